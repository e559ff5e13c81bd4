"""Modules and functions that schedules put into a model."""

from typing import TYPE_CHECKING, Any

from slapo.late import attribute
from slapo.op.attention import FlashAttention, FlashAttentionOp, attend

# Imported here: Python would bind the file of the same name instead.
from slapo.op.checkpoint import CheckPointWrapper, ForkRNGWrapper, checkpoint

if TYPE_CHECKING:
    from slapo.op.cross_entropy import ParallelCrossEntropy
    from slapo.op.interface import GPTNeoAttention, use_attention
    from slapo.op.linear import (
        FusedQKV,
        LinearWithAct,
        LinearWithDropout,
        LinearWithSeparateBias,
        LinearWithSyncFunc,
    )
    from slapo.op.linear_loss import LossHead, linear_cross_entropy
    from slapo.op.mlp import FusedMLP, GatedDense, GatedMLP, gated_gelu, gated_silu
    from slapo.op.norm import RMSNorm
    from slapo.op.print import Print
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

#: Imported on first access, since schedules need few of these names.
_HOMES = {
    "cross_entropy": ("ParallelCrossEntropy",),
    "interface": ("GPTNeoAttention", "use_attention"),
    "linear": (
        "FusedQKV",
        "LinearWithAct",
        "LinearWithDropout",
        "LinearWithSeparateBias",
        "LinearWithSyncFunc",
    ),
    "linear_loss": ("LossHead", "linear_cross_entropy"),
    "mlp": ("FusedMLP", "GatedDense", "GatedMLP", "gated_gelu", "gated_silu"),
    "norm": ("RMSNorm",),
    "print": ("Print",),
    "residual": ("DenseDropoutAddNorm", "dropout_add_norm"),
}
_LATE = {name: f"slapo.op.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _LATE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
