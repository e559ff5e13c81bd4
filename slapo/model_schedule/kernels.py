"""Faster replacements for Transformers modules, with the same values and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slapo.logger import get_logger
from slapo.op.interface import use_attention
from slapo.op.mlp import GatedDense, GatedMLP
from slapo.op.norm import RMSNorm
from slapo.op.residual import DenseDropoutAddNorm
from slapo.schedule import Schedule

logger = get_logger()


def use_kernels(base: Schedule) -> None:
    """Replace activations, norms and gated blocks of known classes below `base`."""
    classes = {type(module) for module in base.mod.modules()}
    for module in base.mod.modules():
        if type(module).__name__ in _MAKERS and "forward" in vars(module):
            raise ValueError(
                f"kernels: a {type(module).__name__} of the model has a patched forward, which "
                "its replacement would drop; pass kernels=False, or patch it afterwards"
            )
    # The order of a set differs between processes, and ranks must record the same primitives.
    for cls in sorted(classes, key=lambda each: each.__name__):
        # A class of the user with such a name may compute something else.
        if cls.__name__ in _MAKERS and cls.__module__.startswith("transformers."):
            base.replace_all(cls, _MAKERS[cls.__name__])


def exact_gelu(path: str, module: nn.Module) -> nn.GELU:
    """Return GELU as a module that fusions recognize."""
    return nn.GELU()


def tanh_gelu(path: str, module: nn.Module) -> nn.GELU:
    """Return the tanh form of GELU as one kernel."""
    return nn.GELU(approximate="tanh")


def rms_norm(path: str, module: nn.Module) -> RMSNorm:
    """Return the norm as one kernel, with the same parameter."""
    return RMSNorm.like(module)


def rms_norm_of_offsets(path: str, module: nn.Module) -> RMSNorm:
    """Return the norm as one kernel; its weight is an offset from 1."""
    return RMSNorm.like(module, offset=1.0)


def rms_norm_of_t5(path: str, module: nn.Module) -> RMSNorm:
    """Return the norm as one kernel, cast to the dtype of the weight."""
    return RMSNorm.like(module, casts_to_weight=True)


def gated_mlp(path: str, module: nn.Module) -> GatedMLP:
    """Return the block around the same layers, with a fused activation and product."""
    return GatedMLP.like(module)


def gated_dense(path: str, module: nn.Module) -> GatedDense:
    """Return T5's gated block around the same layers, with a fused activation and product."""
    return GatedDense.like(module)


def end_of_half(path: str, module: nn.Module) -> DenseDropoutAddNorm:
    """Return dropout, residual and norm as one module, which can run them as one kernel."""
    return DenseDropoutAddNorm.like(module)


#: Name of a class in Transformers -> maker of the replacement.
_MAKERS: dict[str, Callable[[str, Any], nn.Module]] = {
    "GELUActivation": exact_gelu,
    "NewGELUActivation": tanh_gelu,
    "FastGELUActivation": tanh_gelu,
    "LlamaRMSNorm": rms_norm,
    "MistralRMSNorm": rms_norm,
    "Qwen2RMSNorm": rms_norm,
    "Qwen3RMSNorm": rms_norm,
    "MixtralRMSNorm": rms_norm,
    "GemmaRMSNorm": rms_norm_of_offsets,
    "Gemma3RMSNorm": rms_norm_of_offsets,
    "T5LayerNorm": rms_norm_of_t5,
    "LlamaMLP": gated_mlp,
    "MistralMLP": gated_mlp,
    "Qwen2MLP": gated_mlp,
    "Qwen3MLP": gated_mlp,
    "GemmaMLP": gated_mlp,
    "Gemma3MLP": gated_mlp,
    "T5DenseGatedActDense": gated_dense,
    "BertSelfOutput": end_of_half,
    "BertOutput": end_of_half,
    "RobertaSelfOutput": end_of_half,
    "RobertaOutput": end_of_half,
}


def use_backend(sch: Schedule, name: str, required: bool) -> bool:
    """Set the attention backend; return False if attention stays the model's own."""
    if not required and not hasattr(sch.mod, "set_attn_implementation"):
        return False  # no model of Transformers, so there is nothing to say
    try:
        use_attention(sch.mod, name)
    except ValueError as error:
        if required:
            raise
        logger.info("attention stays unchanged: %s", error)
        return False
    return True


def fuse_bias_gelu(layers: list[Schedule], where: str) -> None:
    """Fuse a bias addition and the GELU after it into one TorchScript kernel.

    ``gelu(linear(x)) --> BiasGELU(matmul(x), bias)``
    """
    path, _, linear = where.partition(":")
    for layer in layers:
        node = layer[path]
        # A leaf of the trace hides its bias, so the layer becomes a product and a sum first.
        node[linear].decompose()
        if not node.trace(recursive=False):
            raise ValueError(f"{node.path!r} could not be traced; leave disable_fuse_bias_gelu out")
        found = node.find(_gelu_of_sum)
        if len(found) != 1:
            raise ValueError(
                f"disable_fuse_bias_gelu=False: {len(found)} GELUs follow the bias in "
                f"{node.path!r}; leave it out for models with another activation"
            )
        node.fuse(found, compiler="TorchScript", name="BiasGELU")


def _gelu_of_sum(x: Tensor, bias: Tensor) -> Tensor:
    """Pattern that matches a GELU module of either form."""
    return F.gelu(x + bias)
