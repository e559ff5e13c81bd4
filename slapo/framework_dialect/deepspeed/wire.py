"""What crosses a stage boundary under DeepSpeed's pipeline.

DeepSpeed takes every floating-point tensor that a stage sends for one whose gradient comes back. A
mask or a position table has none, so it travels as bytes. Which tensors do is decided where they
are made, and told to the next stage with their shapes, once for each form of batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@dataclass(frozen=True)
class Parcel:
    """One tensor of a boundary.

    Parameters
    ----------
    shape, dtype
        The tensor's own.
    has_gradient
        Whether its gradient comes back. If not, it travels as bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Parcel:
        """What to say about a tensor that a stage sends."""
        parcel = cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        if parcel.has_gradient and not tensor.is_floating_point():
            raise SlapoError(
                f"a tensor of {tensor.dtype} and shape {parcel.shape} needs a gradient and crosses "
                "a stage boundary, where DeepSpeed sends those of real numbers only; cut the stage "
                "elsewhere"
            )
        return parcel

    def pack(self, tensor: Tensor) -> Tensor:
        """The tensor as it travels."""
        tensor = tensor.contiguous()
        return tensor if self.has_gradient else tensor.detach().flatten().view(torch.uint8)

    def unpack(self, tensor: Tensor) -> Tensor:
        """The tensor that was packed."""
        return tensor if self.has_gradient else tensor.view(self.dtype).view(self.shape)

    def buffer(self, device: torch.device) -> Tensor:
        """Room for what travels."""
        if self.has_gradient:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return torch.empty(size, dtype=torch.uint8, device=device)


def to_numbers(parcels: tuple[Parcel, ...]) -> list[int]:
    """Describe parcels in whole numbers, to be sent ahead of them.

    Examples
    --------
    >>> to_numbers((Parcel((2, 3), torch.float32, True),))
    [0, 1, 2, 2, 3]
    """
    return [
        number
        for parcel in parcels
        for number in (
            _DTYPES.index(parcel.dtype),
            int(parcel.has_gradient),
            len(parcel.shape),
            *parcel.shape,
        )
    ]


def from_numbers(numbers: list[int]) -> tuple[Parcel, ...]:
    """Undo :func:`to_numbers`.

    Examples
    --------
    >>> from_numbers([0, 1, 2, 2, 3])
    (Parcel(shape=(2, 3), dtype=torch.float32, has_gradient=True),)
    """
    parcels, rest = [], list(numbers)
    while rest:
        dtype, has_gradient, dims, *rest = rest
        parcels.append(Parcel(tuple(rest[:dims]), _DTYPES[dtype], bool(has_gradient)))
        rest = rest[dims:]
    return tuple(parcels)


class StageLayer(nn.Module):
    """A stage as a layer of ``PipelineModule``: takes and returns what travels.

    Parameters
    ----------
    stage
        Takes and returns tensors; the last one returns anything.
    index, n_stages
        Which stage it is.

    Attributes
    ----------
    arriving, leaving : tuple of Parcel, or None
        What the boundaries before and after it carry; None until it is known.
    """

    def __init__(self, stage: nn.Module, index: int, n_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.index = index
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        self.forget()

    def forget(self) -> None:
        """Expect boundaries of another form."""
        self.arriving: tuple[Parcel, ...] | None = None
        self.leaving: tuple[Parcel, ...] | None = None

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        """Unpack, run the stage, pack."""
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not self.is_first:
            assert self.arriving is not None, "told before the tensors came"
            tensors = tuple(p.unpack(t) for p, t in zip(self.arriving, tensors, strict=True))
        output = self.stage(*tensors)
        return in_the_open(output) if self.is_last else self._pack(output)

    def _pack(self, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parcels = tuple(Parcel.of(tensor) for tensor in output)
        if self.leaving is None:
            self.leaving = parcels
        if parcels != self.leaving:
            raise SlapoError(
                f"stage {self.index} sends {parcels}, and has told the next one that it sends "
                f"{self.leaving}; all micro-batches of a batch must have one form"
            )
        return tuple(p.pack(tensor) for p, tensor in zip(parcels, output, strict=True))


class Wrapped(tuple[Any, ...]):
    """An output that DeepSpeed does not look into, and the tensors in it."""

    __slots__ = ()


def in_the_open(output: Any) -> Any:
    """An output whose tensors DeepSpeed finds: it prepares a backward by hooks on them.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Output:
    ...     logits: Tensor
    >>> in_the_open(Output(torch.ones(1)))[1]
    [tensor([1.])]
    >>> in_the_open([1])
    [1]
    """
    if isinstance(output, (Tensor, tuple, list, dict)):
        return output
    return Wrapped((output, tensors_in(output)))


def as_returned(output: Any) -> Any:
    """Undo :func:`in_the_open`.

    Examples
    --------
    >>> as_returned(in_the_open(3))
    3
    """
    return output[0] if isinstance(output, Wrapped) else output


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in containers and in attributes of objects, to a few levels.

    Examples
    --------
    >>> tensors_in({"a": [torch.ones(1)], "b": None})
    [tensor([1.])]
    """
    return _tensors_in(value, levels=4)


def _tensors_in(value: Any, levels: int) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if levels == 0 or isinstance(value, (str, bytes, type, nn.Module)):
        return []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (tuple, list)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    return [tensor for item in items for tensor in _tensors_in(item, levels - 1)]
