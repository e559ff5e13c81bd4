"""Noise on constant tensors, the same on both sides of a comparison.

A bias of zeros hides that it is added twice, norms of ones that two were swapped, a projection of
zeros whatever stands before it. No schedule may rely on such values: training changes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from slapo.weights.slots import Slot, slots

#: Relative to a constant that is not zero, and at most so much beside zero.
_NOISE = 0.1
#: What is larger stands for infinity.
_LARGEST = 1e3


def perturbed(model: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors by name, the constant ones with noise."""
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for slot in slots(model):
        value = full[slot.name]
        if _is_free(slot) and _is_constant(value):
            key = id(slot.tensor)
            if key not in made:
                made[key] = value + _noise(value, slot.name)
            value = made[key]
        found[slot.name] = value
    return found


def _is_free(slot: Slot) -> bool:
    """Whether a tensor may take other values: parameters, and statistics of batches.

    Other buffers are masks and positions.
    """
    if not slot.tensor.is_floating_point():
        return False
    if isinstance(slot.tensor, nn.Parameter):
        return True
    return isinstance(slot.owner, _NormBase) and slot.leaf in ("running_mean", "running_var")


def _is_constant(value: Tensor) -> bool:
    if value.numel() == 0 or value.is_meta:
        return False
    low, high = value.aminmax()
    return bool(low == high) and abs(float(low)) <= _LARGEST


def _noise(value: Tensor, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
    constant = abs(float(value.flatten()[0]))
    # Of a matrix, so much that its product with a vector stays of the vector's size.
    at_zero = _NOISE if value.dim() < 2 else min(_NOISE, value[0].numel() ** -0.5)
    return (drawn * (constant * _NOISE or at_zero)).to(value.device, value.dtype)
