"""Modules and functions that a schedule swaps in."""

from slapo.op.attend import attend
from slapo.op.attention import FlashAttention, FlashAttentionOp
from slapo.op.checkpoint import CheckPointWrapper, ForkRNGWrapper, checkpoint
from slapo.op.cross_entropy import ParallelCrossEntropy
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
from slapo.op.qkv import FusedQKV
from slapo.op.show import Print

__all__ = [
    "CheckPointWrapper",
    "FlashAttention",
    "FlashAttentionOp",
    "ForkRNGWrapper",
    "FusedMLP",
    "FusedQKV",
    "GPTNeoAttention",
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
    "linear_cross_entropy",
    "use_attention",
]
