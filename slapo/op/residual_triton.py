"""Triton kernel of :func:`slapo.op.residual.dropout_add_norm`; imported when it first runs."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slapo.op.dispatch import refuse_graph

#: Most programs of the backward pass. Each sums the parameters' gradients over its rows.
_PROGRAMS = 256
_WARPS = 8


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, seed_ptr, out_ptr, sum_ptr, mean_ptr, scale_ptr,
    size, p, factor, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize one row; `bias_ptr` and `seed_ptr` may be None."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.load(x_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        # Offsets are 32-bit numbers, so masks repeat after 2**32 elements.
        is_kept = tl.rand(tl.load(seed_ptr), (row * size + columns).to(tl.int32)) >= p
        total = tl.where(is_kept, total * factor, 0.0)
    residual = tl.load(residual_ptr + row * size + columns, mask=inside, other=0.0)
    # Rounded as it is stored: the backward pass reads the values that were normalized.
    rounded = (total + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * size + columns, rounded, mask=inside)
    total = rounded.to(tl.float32)
    mean = tl.sum(total, 0) / size
    # Lanes beyond the row hold 0 - mean, which must not count in the variance.
    centered = tl.where(inside, total - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, 0) / size + eps)
    out = centered * scale * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_ptr, sum_ptr, mean_ptr, scale_ptr, weight_ptr, seed_ptr,
    x_grad_ptr, residual_grad_ptr, weight_parts_ptr, bias_parts_ptr,
    rows, size, p, factor, BLOCK: tl.constexpr,
):  # fmt: skip
    """Differentiate every n-th row; n is the number of programs."""
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        grad = tl.load(grad_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(sum_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = tl.where(inside, total - tl.load(mean_ptr + row), 0.0) * scale
        of_weight += grad * normed
        of_bias += grad
        grad *= weight
        # The gradient of a layer norm: the parts along the mean and along the normed row drop out.
        along = normed * (tl.sum(normed * grad, 0) / size)
        of_sum = (grad - along - tl.sum(grad, 0) / size) * scale
        target = residual_grad_ptr + row * size + columns
        tl.store(target, of_sum.to(residual_grad_ptr.dtype.element_ty), mask=inside)
        if seed_ptr is not None:
            is_kept = tl.rand(tl.load(seed_ptr), (row * size + columns).to(tl.int32)) >= p
            of_sum = tl.where(is_kept, of_sum * factor, 0.0)
        target = x_grad_ptr + row * size + columns
        tl.store(target, of_sum.to(x_grad_ptr.dtype.element_ty), mask=inside)
    own = tl.program_id(0) * size + columns
    tl.store(weight_parts_ptr + own, of_weight, mask=inside)
    tl.store(bias_parts_ptr + own, of_bias, mask=inside)


class DropoutAddNorm(torch.autograd.Function):
    """``layer_norm(residual + dropout(x))`` by the two kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        p: float,
        eps: float,
        out_type: torch.dtype,
    ) -> Tensor:
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        hidden = x.shape[-1]
        rows = x.numel() // hidden
        out = torch.empty_like(x, dtype=out_type)
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        mean, scale = x.new_empty(2, rows, dtype=torch.float32)
        operands = (x, residual, weight, bias, seed, out, total, mean, scale)
        _launch(forward_kernel, rows, operands, (hidden, p, _factor(p), eps))
        ctx.save_for_backward(total, mean, scale, weight, seed)
        ctx.p, ctx.types = p, (x.dtype, residual.dtype, weight.dtype)
        ctx.bias_type = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("dropout_add_norm by triton", "pass backend='torch'")
        total, mean, scale, weight, seed = ctx.saved_tensors
        x_type, residual_type, weight_type = ctx.types
        rows, hidden = len(mean), total.shape[-1]
        x_grad = torch.empty_like(total, dtype=x_type)
        residual_grad = torch.empty_like(total, dtype=residual_type)
        programs = min(rows, _PROGRAMS)
        parts = total.new_empty(2, programs, hidden, dtype=torch.float32)
        saved = (grad.contiguous(), total, mean, scale, weight, seed)
        operands = (*saved, x_grad, residual_grad, *parts)
        _launch(backward_kernel, programs, operands, (rows, hidden, ctx.p, _factor(ctx.p)))
        # Summed by torch in one order; atomic additions would give other roundings in each run.
        of_weight, of_bias = parts.sum(1)
        bias_grad = None if ctx.bias_type is None else of_bias.to(ctx.bias_type)
        return x_grad, residual_grad, of_weight.to(weight_type), bias_grad, None, None, None, None


def _factor(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _launch(
    kernel: Any, programs: int, operands: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    x = operands[0]
    assert x is not None
    if programs:  # Triton launches on the current device
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            block = max(triton.next_power_of_2(x.shape[-1]), 16)
            kernel[(programs,)](*operands, *numbers, BLOCK=block, num_warps=_WARPS)
