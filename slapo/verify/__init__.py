"""Proof that a schedule does not change what a model computes."""

from slapo.verify.numeric.context import Verify

__all__ = ["Verify"]
