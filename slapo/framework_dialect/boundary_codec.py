"""Encoding of tensors that cross a stage boundary in one buffer.

The pipelines of Megatron-Core and DeepSpeed expect a gradient back for the floating-point tensors
that they send, and Megatron-Core sends one tensor of one dtype. But a stage may send several:
hidden states, masks, position tables, token counts. Their bytes are packed side by side in a
buffer, which returns with the gradients of the tensors that have any. The bytes are not values of
the buffer's dtype, so they are copied and never computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slapo.errors import SlapoError
from slapo.pipeline.boundaries import Boundary, TensorMeta

#: Dtype of all buffers; differentiable, since they have gradients.
WIRE_DTYPE = torch.float32

# Alignment in bytes of every tensor: the size of the largest element.
_ALIGNMENT = 16


@dataclass(frozen=True)
class BufferLayout:
    """Offsets of a boundary's tensors in the buffer.

    Examples
    --------
    >>> hidden = TensorMeta("hidden", (2, 3), torch.bfloat16, requires_grad=True)
    >>> mask = TensorMeta("mask", (5,), torch.bool, requires_grad=False)
    >>> BufferLayout((hidden, mask)).ends, BufferLayout((hidden, mask)).shape
    ((0, 16, 32), (8,))
    """

    tensors: Boundary

    @property
    def ends(self) -> tuple[int, ...]:
        """First byte of each tensor, and the end of the last."""
        places = [0]
        for meta in self.tensors:
            places.append(places[-1] + -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return tuple(places)

    @property
    def shape(self) -> tuple[int]:
        """Length of the buffer; never 0, since an empty message may not be sent."""
        return (max(self.ends[-1], _ALIGNMENT) // WIRE_DTYPE.itemsize,)

    def read(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer, which share its memory."""
        whole = buffer.detach().contiguous()
        memory, first = whole.untyped_storage(), whole.storage_offset() * WIRE_DTYPE.itemsize
        tensors = []
        for meta, start in zip(self.tensors, self.ends[:-1], strict=True):
            # Not a view: autograd would track all of them as parts of one tensor.
            tensor: Any = torch.empty(0, dtype=meta.dtype, device=whole.device)
            tensors.append(tensor.set_(memory, (first + start) // meta.dtype.itemsize, meta.shape))
        return tensors

    def write(self, values: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """Return a buffer with these values; zeros for None."""
        make = torch.zeros if any(value is None for value in values) else torch.empty
        buffer = make(self.shape, dtype=WIRE_DTYPE, device=device)
        for place, value in zip(self.read(buffer), values, strict=True):
            if value is not None:
                place.copy_(value)
        return buffer


def pack(layout: BufferLayout, tensors: Sequence[Tensor], anchor: Tensor | None) -> Tensor:
    """Pack all tensors into one buffer, which passes gradients to them and to the anchor."""
    for meta, tensor in zip(layout.tensors, tensors, strict=True):
        found = TensorMeta.of(meta.name, tensor)
        loses_gradient = found.requires_grad and not meta.requires_grad
        if (found.shape, found.dtype) != (meta.shape, meta.dtype) or loses_gradient:
            raise SlapoError(
                f"a stage sends {found}, but the next one expects {meta}; give all micro-batches "
                "the same shapes and dtypes, and do the same computation in each"
            )
    packed: Tensor = _Pack.apply(layout, anchor, *tensors)
    return packed


def unpack(layout: BufferLayout, buffer: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the tensors in a buffer, and an anchor.

    The output of the stage has to depend on the anchor too (:func:`pack`, :func:`anchored`). Then
    the buffer has a gradient, which the previous stage waits for, even if no tensor in it has one.
    """
    anchor, *tensors = _Unpack.apply(layout, buffer)
    return tuple(tensors), anchor


def anchored(loss: Tensor, anchor: Tensor | None) -> Tensor:
    """Return a copy of the last stage's loss that depends on the anchor."""
    if anchor is None:
        return loss.clone()
    copy: Tensor = _Anchored.apply(loss, anchor)
    return copy


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: BufferLayout, anchor: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.write(tensors, tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = ctx.layout.read(gradients[0])
        wanted = ctx.needs_input_grad[2:]
        anchor = gradients[0].new_zeros(()) if ctx.needs_input_grad[1] else None
        return (None, anchor, *(p if w else None for p, w in zip(parts, wanted, strict=True)))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: BufferLayout, buffer: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.device = layout, buffer.device
        tensors = layout.read(buffer)
        metas = zip(tensors, layout.tensors, strict=True)
        ctx.mark_non_differentiable(*(t for t, meta in metas if not meta.requires_grad))
        # `write` leaves zeros in the buffer for absent gradients; autograd would allocate them one
        # by one.
        ctx.set_materialize_grads(False)
        return (buffer.new_zeros(()), *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, ctx.layout.write(gradients[1:], ctx.device)


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor) -> Tensor:
        # Megatron-Core divides the loss that it gets in place.
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.zeros_like(gradients[0])
