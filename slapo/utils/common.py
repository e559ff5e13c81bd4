"""Small helpers of general use."""

from slapo.hooks import get_hooks

__all__ = ["get_hooks"]
