"""Building blocks of patterns; see :mod:`slapo.graph.match.pattern`."""

from slapo.graph.match.pattern import ModulePattern, Pattern, call_module

__all__ = ["ModulePattern", "Pattern", "call_module"]
