"""Modules and functions that a schedule swaps in."""

import importlib
from typing import TYPE_CHECKING, Any

from slapo.late import submodule

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

#: File -> names that are imported when they are first asked for: schedules need few of them.
_FILES = {
    "attention": "FlashAttention FlashAttentionOp",
    "cross_entropy": "ParallelCrossEntropy",
    "gated": "GatedDense GatedMLP gated_gelu gated_silu",
    "gpt_neo": "GPTNeoAttention",
    "interface": "use_attention",
    "linear": "LinearWithAct LinearWithDropout LinearWithSeparateBias LinearWithSyncFunc",
    "linear_loss": "LossHead linear_cross_entropy",
    "mlp": "FusedMLP",
    "norm": "RMSNorm",
    "print": "Print",
    "qkv": "FusedQKV",
    "residual": "DenseDropoutAddNorm dropout_add_norm",
}


def __getattr__(name: str) -> Any:
    home = next((file for file, names in _FILES.items() if name in names.split()), None)
    if home is None:
        return submodule(__name__, name)
    value = globals()[name] = getattr(importlib.import_module(f"slapo.op.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
