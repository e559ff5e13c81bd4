"""What crosses a stage boundary under Megatron-Core's schedules: one tensor of one dtype.

A stage of ours may send several tensors: hidden states, masks, position tables, numbers of tokens.
Their bytes travel side by side in a buffer, which comes back with the gradients of those that have
any. Bytes are copied and never computed with, since they are not numbers of the buffer's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slapo.errors import SlapoError
from slapo.pipeline.boundaries import Boundary, TensorMeta

#: Of all buffers. Megatron-Core wants their gradients, so it is a dtype that can have one.
WIRE_DTYPE = torch.float32

# Every tensor starts at a multiple of this: the largest element has so many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class BufferLayout:
    """Where each tensor of a boundary lies in the buffer.

    Parameters
    ----------
    tensors
        What crosses, in order.

    Examples
    --------
    >>> hidden = TensorMeta("hidden", (2, 3), torch.bfloat16, requires_grad=True)
    >>> mask = TensorMeta("mask", (5,), torch.bool, requires_grad=False)
    >>> BufferLayout((hidden, mask)).starts, BufferLayout((hidden, mask)).shape
    ((0, 16), (8,))
    """

    tensors: Boundary

    @property
    def starts(self) -> tuple[int, ...]:
        """First byte of each tensor."""
        return self._ends_before()[:-1]

    @property
    def shape(self) -> tuple[int]:
        """Of the buffer; never empty, since an empty message may be none."""
        return (max(self._ends_before()[-1], _ALIGNMENT) // WIRE_DTYPE.itemsize,)

    def _ends_before(self) -> tuple[int, ...]:
        places = [0]
        for meta in self.tensors:
            places.append(places[-1] + -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return tuple(places)

    def read(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, which share its memory."""
        whole = buffer.detach().contiguous()
        memory, first = whole.untyped_storage(), whole.storage_offset() * WIRE_DTYPE.itemsize
        tensors = []
        for meta, start in zip(self.tensors, self.starts, strict=True):
            # No view: autograd would watch over all of them as parts of one tensor.
            tensor: Any = torch.empty(0, dtype=meta.dtype, device=whole.device)
            tensors.append(tensor.set_(memory, (first + start) // meta.dtype.itemsize, meta.shape))
        return tensors

    def write(self, values: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A buffer with these values; zeros where there is none."""
        make = torch.zeros if any(value is None for value in values) else torch.empty
        buffer = make(self.shape, dtype=WIRE_DTYPE, device=device)
        for place, value in zip(self.read(buffer), values, strict=True):
            if value is not None:
                place.copy_(value)
        return buffer

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors of another form.

        Raises
        ------
        SlapoError
            Naming the first of them.
        """
        for meta, tensor in zip(self.tensors, tensors, strict=True):
            found = TensorMeta.of(meta.name, tensor)
            loses_gradient = found.requires_grad and not meta.requires_grad
            if (found.shape, found.dtype) != (meta.shape, meta.dtype) or loses_gradient:
                raise SlapoError(
                    f"a stage sends {found}, and the next one was told to expect {meta}; all "
                    "micro-batches must have one form, and stages must do the same in each"
                )


def pack(manifest: BufferLayout, tensors: Sequence[Tensor], anchor: Tensor | None) -> Tensor:
    """One buffer of all tensors, through which gradients go back to them.

    Parameters
    ----------
    manifest
        Where they lie.
    tensors
        What a stage sends.
    anchor
        Of :func:`unpack` in this stage; None in the first.
    """
    manifest.check(tensors)
    packed: Tensor = _Pack.apply(manifest, anchor, *tensors)
    return packed


def unpack(manifest: BufferLayout, buffer: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The tensors in a buffer, and an anchor.

    What leaves the stage has to hang on the anchor too (:func:`pack`, :func:`anchored`): so the
    buffer has a gradient, which the stage before waits for, also if no tensor in it has one.
    """
    anchor, *tensors = _Unpack.apply(manifest, buffer)
    return tuple(tensors), anchor


def anchored(loss: Tensor, anchor: Tensor | None) -> Tensor:
    """A copy of the loss of the last stage that hangs on the anchor.

    Examples
    --------
    >>> anchored(torch.tensor(2.0), None)
    tensor(2.)
    """
    if anchor is None:
        return loss.clone()
    copy: Tensor = _Anchored.apply(loss, anchor)
    return copy


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, manifest: BufferLayout, anchor: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.manifest = manifest
        return manifest.write(tensors, tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        manifest: BufferLayout = ctx.manifest
        parts = manifest.read(gradients[0])
        wanted = ctx.needs_input_grad[2:]
        anchor = gradients[0].new_zeros(()) if ctx.needs_input_grad[1] else None
        return (None, anchor, *(p if w else None for p, w in zip(parts, wanted, strict=True)))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, manifest: BufferLayout, buffer: Tensor) -> tuple[Tensor, ...]:
        ctx.manifest, ctx.device = manifest, buffer.device
        tensors = manifest.read(buffer)
        metas = zip(tensors, manifest.tensors, strict=True)
        ctx.mark_non_differentiable(*(t for t, meta in metas if not meta.requires_grad))
        ctx.set_materialize_grads(False)
        return (buffer.new_zeros(()), *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        manifest: BufferLayout = ctx.manifest
        return None, manifest.write(gradients[1:], ctx.device)


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.zeros_like(gradients[0])
