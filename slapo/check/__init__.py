"""Proof before training that a tensor-parallel schedule puts every tensor where it belongs."""

from slapo.check.rules import register_place_rule
from slapo.check.run import check
from slapo.errors import PlacementError

__all__ = ["PlacementError", "check", "register_place_rule"]
