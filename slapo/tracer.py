"""Tracers; see :mod:`slapo.graph.trace.preview` and :mod:`slapo.graph.trace.capture`."""

from slapo.graph.trace.module import Traced
from slapo.graph.trace.preview import preview

__all__ = ["Traced", "preview"]
