"""Tracers; see :mod:`slapo.graph.symbolic` and :mod:`slapo.graph.recorder`."""

from slapo.graph.symbolic import trace_symbolically
from slapo.graph.traced_module import CallContract, TracedModule

__all__ = ["CallContract", "TracedModule", "trace_symbolically"]
