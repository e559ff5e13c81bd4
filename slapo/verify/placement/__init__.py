"""Placement check of tensor-parallel schedules, before training."""

from slapo.errors import PlacementError
from slapo.verify.placement.rules import register_place_rule
from slapo.verify.placement.run import check

__all__ = ["PlacementError", "check", "register_place_rule"]
