"""Kernels of Triton behind :func:`slapo.op.residual.dropout_add_norm`; imported where they run.

Each row, the features of one token, is read once and written once each way. Which elements
dropout keeps is not stored: it follows from a seed, the row and the column by Philox (Salmon et
al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), and the backward pass works it out again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Elements of a row for each thread: 16 bytes of a half, which is one load.
_PER_THREAD = 8
_THREADS = 32
_MIN_WARPS, _MAX_WARPS = 2, 16
#: Of the backward pass, for each multiprocessor: enough loads under way, few partial sums.
_RESIDENT_WARPS = 20
#: Of a multiprocessor, and what they are handed out by.
_REGISTERS, _UNIT = 65536, 8
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
#: Named, as its default is to change: products may go into sums unrounded.
OPTIONS = {"enable_fp_fusion": True}
#: What a random word is compared with has so many values.
_LEVELS = 2**31


@dataclass(frozen=True)
class Settings:
    """What the kernels are told beside tensors.

    Parameters
    ----------
    p
        Probability that an element is zeroed; 0 outside of training.
    eps
        Added to the variance, or to the mean of squares.
    is_rms
        Whether the mean stays where it is.
    sum_type
        Of ``residual + dropout(x + bias)``.
    out_type
        Of the result.
    returns_sum
        Whether the sum is a result too.
    is_training
        Whether there may be a backward pass.
    """

    p: float
    eps: float
    is_rms: bool
    sum_type: torch.dtype
    out_type: torch.dtype
    returns_sum: bool
    is_training: bool

    @property
    def threshold(self) -> int:
        """Words below it are of elements that are zeroed."""
        return min(round(self.p * _LEVELS), _LEVELS - 1)

    @property
    def scale(self) -> float:
        """What elements that are kept are multiplied by."""
        return 0.0 if self.p == 1 else 1 / (1 - self.p)


# --- kernels -------------------------------------------------------------------------------------
@triton.jit
def is_kept(
    seed: tl.tensor, row: tl.tensor, threshold: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Which elements of a row dropout keeps; four from each call of Philox."""
    quads = tl.arange(0, BLOCK // 4)
    zeros = tl.zeros_like(quads)
    a, b, c, d = tl.philox(seed, quads, zeros + row, zeros, zeros)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,))
    return (words >> 1).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_bias_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    threshold: tl.tensor,
    dropout_scale: tl.tensor,
    SUM_TYPE: tl.constexpr,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program for each row. Pointers that are None are of what is not wanted, or not there."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        kept = is_kept(tl.load(seed_ptr), row.to(tl.int32), threshold, BLOCK)
        total = tl.where(kept, total * dropout_scale, 0.0)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
    # Rounded as it is stored, so that the backward pass sees the numbers that were normalised.
    rounded = (total + residual.to(tl.float32)).to(SUM_TYPE)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * size + columns, rounded, mask=inside)
    total = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_RMS:
        scale = 1 / tl.sqrt(tl.sum(total * total, 0) / size + eps)
        out = (total * scale).to(SUM_TYPE).to(tl.float32) * weight
    else:
        mean = tl.sum(total, 0) / size
        centred = tl.where(inside, total - mean, 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / size + eps)
        out = centred * scale * weight
        if norm_bias_ptr is not None:
            out += tl.load(norm_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    if scale_ptr is not None:
        tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["threshold", "rows"])
def backward_kernel(
    out_grad_ptr: tl.tensor,
    sum_grad_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    x_grad_ptr: tl.tensor,
    residual_grad_ptr: tl.tensor,
    bias_parts_ptr: tl.tensor,
    weight_parts_ptr: tl.tensor,
    norm_bias_parts_ptr: tl.tensor,
    out_grad_stride: tl.tensor,
    sum_grad_stride: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    threshold: tl.tensor,
    dropout_scale: tl.tensor,
    SUM_TYPE: tl.constexpr,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program takes every so-manieth row, and adds up what the parameters get from them."""
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_norm_bias = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        total = tl.load(sum_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(out_grad_ptr + row * out_grad_stride + columns, mask=inside, other=0.0)
        grad = grad.to(tl.float32)
        scale = tl.load(scale_ptr + row)
        if IS_RMS:
            normed = total * scale
            of_weight += grad * normed.to(SUM_TYPE).to(tl.float32)
        else:
            normed = tl.where(inside, total - tl.load(mean_ptr + row), 0.0) * scale
            of_weight += grad * normed
            of_norm_bias += grad
        grad *= weight
        of_sum = grad - normed * (tl.sum(normed * grad, 0) / size)
        if not IS_RMS:
            of_sum -= tl.sum(grad, 0) / size
        of_sum *= scale
        if sum_grad_ptr is not None:
            more = tl.load(sum_grad_ptr + row * sum_grad_stride + columns, mask=inside, other=0.0)
            of_sum += more.to(tl.float32)
        if residual_grad_ptr is not None:
            target = residual_grad_ptr + row * size + columns
            tl.store(target, of_sum.to(residual_grad_ptr.dtype.element_ty), mask=inside)
        if seed_ptr is not None:
            kept = is_kept(tl.load(seed_ptr), number, threshold, BLOCK)
            of_sum = tl.where(kept, of_sum * dropout_scale, 0.0)
        of_bias += of_sum
        if x_grad_ptr is not None:
            target = x_grad_ptr + row * size + columns
            tl.store(target, of_sum.to(x_grad_ptr.dtype.element_ty), mask=inside)
    own = tl.program_id(0) * size + columns
    if weight_parts_ptr is not None:
        tl.store(weight_parts_ptr + own, of_weight, mask=inside)
    if norm_bias_parts_ptr is not None:
        tl.store(norm_bias_parts_ptr + own, of_norm_bias, mask=inside)
    if bias_parts_ptr is not None:
        tl.store(bias_parts_ptr + own, of_bias, mask=inside)


# --- launches ------------------------------------------------------------------------------------
def block_of(hidden: int) -> tuple[int, int]:
    """Columns of a program, and its warps.

    Examples
    --------
    >>> block_of(768)
    (1024, 4)
    """
    block = max(triton.next_power_of_2(hidden), 16)
    return block, min(max(block // (_PER_THREAD * _THREADS), _MIN_WARPS), _MAX_WARPS)


def residents_of(warps: int) -> tuple[int, int]:
    """Programs of the backward pass for each multiprocessor, and the registers of a thread.

    Each program takes as many rows as any other: one that had no room until others are done would
    double the time. So the registers are limited to what all have room with.

    Examples
    --------
    >>> residents_of(4)
    (5, 96)
    """
    programs = max(_RESIDENT_WARPS // warps, 1)
    return programs, _REGISTERS // (programs * warps * _THREADS) // _UNIT * _UNIT


class DropoutAddNorm(torch.autograd.Function):
    """``norm(residual + dropout(x + bias))`` of rows, and the sum too where that is asked for."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor | None]:
        shape = x.shape
        x, residual = _rows(x), _rows(residual)
        weight, norm_bias, bias = weight.contiguous(), _contiguous(norm_bias), _contiguous(bias)
        needs_grad = settings.is_training and any(ctx.needs_input_grad)
        out = x.new_empty(x.shape, dtype=settings.out_type)
        keeps_sum = needs_grad or settings.returns_sum
        total = x.new_empty(x.shape, dtype=settings.sum_type) if keeps_sum else None
        scales = x.new_empty(len(x), dtype=torch.float32) if needs_grad else None
        means = torch.empty_like(scales) if scales is not None and not settings.is_rms else None
        vectors = (bias, weight, norm_bias, seed)
        _launch_forward(x, residual, vectors, (out, total, means, scales), settings)
        out = out.view(shape)
        given_sum = total.view(shape) if total is not None and settings.returns_sum else None
        ctx.set_materialize_grads(False)
        saved = total if given_sum is None else given_sum
        ctx.save_for_backward(saved, means, scales, weight, seed)
        ctx.settings, ctx.shape = settings, shape
        ctx.types = [None if each is None else each.dtype for each in (x, residual)]
        ctx.types += [None if each is None else each.dtype for each in (norm_bias, bias)]
        return out, given_sum

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102
        ctx: Any, out_grad: Tensor | None, sum_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, means, scales, weight, seed = ctx.saved_tensors
        settings: Settings = ctx.settings
        shape, hidden = ctx.shape, ctx.shape[-1]
        total = total.view(-1, hidden)
        if out_grad is None:
            out_grad = total.new_zeros(shape, dtype=settings.out_type)
        out_grad = _rows(out_grad)
        sum_grad = None if sum_grad is None else _rows(sum_grad)
        needed = ctx.needs_input_grad
        wants_x, wants_residual, wants_weight, wants_norm_bias, wants_bias = needed[:5]
        x_type, residual_type, norm_bias_type, bias_type = ctx.types
        # Without dropout both have the same gradient, which is written once then. It must be one
        # object: of two views, autograd would take each for its own to add to.
        is_shared = seed is None and x_type == residual_type and wants_residual
        of_residual = total.new_empty(shape, dtype=residual_type) if wants_residual else None
        writes_x = wants_x and not is_shared
        of_x = total.new_empty(shape, dtype=x_type) if writes_x else None
        programs = _programs(total)
        wanted = (wants_bias, wants_weight, wants_norm_bias)
        sums = total.new_empty(sum(wanted), programs, hidden, dtype=torch.float32)
        parts = iter(sums)
        of_bias, of_weight, of_norm_bias = (next(parts) if each else None for each in wanted)
        results = (of_x, of_residual, of_bias, of_weight, of_norm_bias)
        saved = (total, means, scales, weight, seed)
        _launch_backward(programs, out_grad, sum_grad, saved, results, settings)
        of_x = of_residual if is_shared and wants_x else of_x
        of_parameters = iter(sums.sum(1))
        of_bias, of_weight, of_norm_bias = (
            next(of_parameters).to(dtype) if each else None
            for each, dtype in zip(wanted, (bias_type, weight.dtype, norm_bias_type), strict=True)
        )
        return of_x, of_residual, of_weight, of_norm_bias, of_bias, None, None


def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`slapo.op.residual.dropout_add_norm`, which checks what comes here."""
    seed = None
    if settings.p > 0:
        # From torch's generator on the device, so that a forked state is drawn from, and a
        # checkpoint that puts the state back gets the same elements again. Nothing waits for it.
        seed = torch.randint(2**63 - 1, (1,), device=x.device)
    results = DropoutAddNorm.apply(x, residual, weight, norm_bias, bias, seed, settings)
    return cast("tuple[Tensor, Tensor | None]", results)


def _launch_forward(
    x: Tensor,
    residual: Tensor,
    vectors: tuple[Tensor | None, ...],
    results: tuple[Tensor | None, ...],
    settings: Settings,
) -> None:
    rows, hidden = x.shape
    block, warps = block_of(hidden)
    if rows:
        with _on(x):
            forward_kernel[(rows,)](
                *(x, residual, *vectors, *results),
                *(x.stride(0), residual.stride(0), hidden, settings.eps),
                *(settings.threshold, settings.scale),
                SUM_TYPE=_TYPES[settings.sum_type],
                IS_RMS=settings.is_rms,
                BLOCK=block,
                num_warps=warps,
                **OPTIONS,
            )


def _launch_backward(
    programs: int,
    out_grad: Tensor,
    sum_grad: Tensor | None,
    saved: tuple[Tensor | None, ...],
    results: tuple[Tensor | None, ...],
    settings: Settings,
) -> None:
    rows, hidden = out_grad.shape
    block, warps = block_of(hidden)
    if programs:
        with _on(out_grad):
            backward_kernel[(programs,)](
                *(out_grad, sum_grad, *saved, *results),
                out_grad.stride(0),
                0 if sum_grad is None else sum_grad.stride(0),
                *(rows, hidden, settings.threshold, settings.scale),
                SUM_TYPE=_TYPES[settings.sum_type],
                IS_RMS=settings.is_rms,
                BLOCK=block,
                num_warps=warps,
                maxnreg=residents_of(warps)[1],
                **OPTIONS,
            )


def _rows(tensor: Tensor) -> Tensor:
    """``(..., hidden)`` -> ``(rows, hidden)`` whose features lie side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _programs(rows: Tensor) -> int:
    """Of the backward pass: as many as run at a time, but no more than there are rows."""
    multiprocessors = 1  # the interpreter has none
    if rows.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    residents, _ = residents_of(block_of(rows.shape[-1])[1])
    return min(len(rows), residents * multiprocessors)
