"""Vocabulary of patterns; see :mod:`slapo.graph.pattern`."""

from slapo.graph.pattern import ModulePattern, Pattern, call_module

__all__ = ["ModulePattern", "Pattern", "call_module"]
