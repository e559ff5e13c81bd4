"""Tracers; see :mod:`slapo.graph.trace.symbolic` and :mod:`slapo.graph.trace.capture`."""

from slapo.graph.trace.contract import CallContract
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.symbolic import trace_symbolically

__all__ = ["CallContract", "TracedModule", "trace_symbolically"]
