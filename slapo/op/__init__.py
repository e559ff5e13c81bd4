"""Modules and functions that a schedule swaps in."""

from typing import TYPE_CHECKING, Any

from slapo.late import attribute

# Files of the same names, which Python would bind in their place.
from slapo.op.attend import attend
from slapo.op.checkpoint import CheckPointWrapper, ForkRNGWrapper, checkpoint

if TYPE_CHECKING:
    from slapo.op.attention import FlashAttention, FlashAttentionOp
    from slapo.op.cross_entropy import ParallelCrossEntropy
    from slapo.op.gated import GatedDense, GatedMLP, gated_gelu, gated_silu
    from slapo.op.gpt_neo import GPTNeoAttention
    from slapo.op.interface import use_attention
    from slapo.op.linear import (
        LinearWithAct,
        LinearWithDropout,
        LinearWithSeparateBias,
        LinearWithSyncFunc,
    )
    from slapo.op.linear_loss import LossHead, linear_cross_entropy
    from slapo.op.mlp import FusedMLP
    from slapo.op.norm import RMSNorm
    from slapo.op.print import Print
    from slapo.op.qkv import FusedQKV
    from slapo.op.residual import DenseDropoutAddNorm, dropout_add_norm

__all__ = [
    "CheckPointWrapper",
    "DenseDropoutAddNorm",
    "FlashAttention",
    "FlashAttentionOp",
    "ForkRNGWrapper",
    "FusedMLP",
    "FusedQKV",
    "GPTNeoAttention",
    "GatedDense",
    "GatedMLP",
    "LinearWithAct",
    "LinearWithDropout",
    "LinearWithSeparateBias",
    "LinearWithSyncFunc",
    "LossHead",
    "ParallelCrossEntropy",
    "Print",
    "RMSNorm",
    "attend",
    "checkpoint",
    "dropout_add_norm",
    "gated_gelu",
    "gated_silu",
    "linear_cross_entropy",
    "use_attention",
]

#: Names that are imported when they are first asked for: schedules need few of them.
_LATE = {
    "DenseDropoutAddNorm": "slapo.op.residual",
    "FlashAttention": "slapo.op.attention",
    "FlashAttentionOp": "slapo.op.attention",
    "FusedMLP": "slapo.op.mlp",
    "FusedQKV": "slapo.op.qkv",
    "GPTNeoAttention": "slapo.op.gpt_neo",
    "GatedDense": "slapo.op.gated",
    "GatedMLP": "slapo.op.gated",
    "LinearWithAct": "slapo.op.linear",
    "LinearWithDropout": "slapo.op.linear",
    "LinearWithSeparateBias": "slapo.op.linear",
    "LinearWithSyncFunc": "slapo.op.linear",
    "LossHead": "slapo.op.linear_loss",
    "ParallelCrossEntropy": "slapo.op.cross_entropy",
    "Print": "slapo.op.print",
    "RMSNorm": "slapo.op.norm",
    "dropout_add_norm": "slapo.op.residual",
    "gated_gelu": "slapo.op.gated",
    "gated_silu": "slapo.op.gated",
    "linear_cross_entropy": "slapo.op.linear_loss",
    "use_attention": "slapo.op.interface",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _LATE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
