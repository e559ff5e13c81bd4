"""Tracers; see :mod:`slapo.graph.trace.tree` and :mod:`slapo.graph.trace.capture`."""

from slapo.graph.trace.module import Traced
from slapo.graph.trace.tree import preview

__all__ = ["Traced", "preview"]
