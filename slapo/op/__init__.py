"""Modules that a schedule swaps in."""

from slapo.op.checkpoint import CheckPointWrapper, ForkRNGWrapper, checkpoint
from slapo.op.linear import LinearWithSeparateBias, LinearWithSyncFunc
from slapo.op.qkv import FusedQKV
from slapo.op.show import Print

__all__ = [
    "CheckPointWrapper",
    "ForkRNGWrapper",
    "FusedQKV",
    "LinearWithSeparateBias",
    "LinearWithSyncFunc",
    "Print",
    "checkpoint",
]
