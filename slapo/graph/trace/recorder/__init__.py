"""The recorder tracer: run ``forward`` on fake tensors, write down what it does."""

from slapo.graph.trace.examples import example_inputs
from slapo.graph.trace.recorder.guards import SizeGuard
from slapo.graph.trace.recorder.mode_reads import mode_is_a_flag
from slapo.graph.trace.recorder.operators import eliminate_dead_code, is_impure
from slapo.graph.trace.recorder.record import Recording, record

__all__ = [
    "Recording",
    "SizeGuard",
    "eliminate_dead_code",
    "example_inputs",
    "is_impure",
    "mode_is_a_flag",
    "record",
]
