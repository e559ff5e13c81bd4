"""The primitives of the schedule language: one file each, checks in front of a plain function."""

from slapo.primitives.annotate import AnnotatePrimitive
from slapo.primitives.base import (
    Primitive,
    list_primitives,
    register_builtin,
    register_primitive,
)
from slapo.primitives.checkpoint import CheckpointPrimitive
from slapo.primitives.compile import CompilePrimitive
from slapo.primitives.decompose import DecomposePrimitive
from slapo.primitives.fork_rng import ForkRNGPrimitive
from slapo.primitives.fuse import FusePrimitive
from slapo.primitives.pipeline import CutPipelineStagePrimitive
from slapo.primitives.replace import ReplacePrimitive
from slapo.primitives.replace_all import ReplaceAllPrimitive
from slapo.primitives.set import SetPrimitive
from slapo.primitives.shard import ShardPrimitive
from slapo.primitives.sync import SyncPrimitive
from slapo.primitives.trace import TracePrimitive, TraceUntilPrimitive

register_builtin(
    AnnotatePrimitive,
    CheckpointPrimitive,
    CompilePrimitive,
    CutPipelineStagePrimitive,
    DecomposePrimitive,
    ForkRNGPrimitive,
    FusePrimitive,
    ReplaceAllPrimitive,
    ReplacePrimitive,
    SetPrimitive,
    ShardPrimitive,
    SyncPrimitive,
    TracePrimitive,
    TraceUntilPrimitive,
)

__all__ = [
    "AnnotatePrimitive",
    "CheckpointPrimitive",
    "CompilePrimitive",
    "CutPipelineStagePrimitive",
    "DecomposePrimitive",
    "ForkRNGPrimitive",
    "FusePrimitive",
    "Primitive",
    "ReplaceAllPrimitive",
    "ReplacePrimitive",
    "SetPrimitive",
    "ShardPrimitive",
    "SyncPrimitive",
    "TracePrimitive",
    "TraceUntilPrimitive",
    "list_primitives",
    "register_primitive",
]
