"""Moved to :mod:`slapo.graph.trace.nodes`."""

from slapo.graph.trace.nodes import spare_self

__all__ = ["spare_self"]
