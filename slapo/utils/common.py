"""Helpers that users import; see :mod:`slapo.hooks`."""

from slapo.hooks import get_hooks

__all__ = ["get_hooks"]
