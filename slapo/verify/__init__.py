"""Checks that a schedule does not change the results of a model."""

from slapo.verify.numeric.context import Verify

__all__ = ["Verify"]
