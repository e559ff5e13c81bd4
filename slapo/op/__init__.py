"""Modules and functions that a schedule swaps in."""

from slapo.op.attend import attend
from slapo.op.attention import FlashAttention, FlashAttentionOp
from slapo.op.checkpoint import CheckPointWrapper, ForkRNGWrapper, checkpoint
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
