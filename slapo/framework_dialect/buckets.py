"""Gradients of many parameters in few buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


@dataclass
class Bucket:
    """Gradients that travel in one flat buffer, with a count of ranks that have each.

    The counts ride along so that no rank needs to know beforehand what others miss: every rank
    sends buffers of the same layout, whatever its own gradients are.
    """

    params: list[Parameter]

    def start(self, group: dist.ProcessGroup) -> None:
        """Fill the buffer and begin its reduction."""
        self._parts = [local_part(param.detach()) for param in self.params]
        first, count = self._parts[0], len(self.params)
        length = sum(part.numel() for part in self._parts) + count
        self._flat = torch.zeros(length, dtype=reduced_in(first.dtype), device=first.device)
        present = [param.grad is not None for param in self.params]
        self._flat[-count:] = 1 if all(present) else self._flat.new_tensor(present)
        slots = [s for s, here in zip(self._slots(), present, strict=True) if here]
        grads = [local_part(p.grad) for p in self.params if p.grad is not None]
        if grads:
            torch._foreach_copy_(slots, grads)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self, divisor: int = 1) -> None:
        """Wait for the sums and hand them back as gradients, divided by ``divisor``."""
        assert self._work is not None
        self._work.wait()
        self._create_missing()
        held = [
            (slot, local_part(param.grad))
            for slot, param in zip(self._slots(), self.params, strict=True)
            if param.grad is not None
        ]
        if not held:
            return
        if divisor != 1:
            self._flat.div_(divisor)
        torch._foreach_copy_([grad for _, grad in held], [slot for slot, _ in held])

    def _slots(self) -> list[Tensor]:
        """Views into the buffer, each of its parameter's shape."""
        pieces = self._flat[: -len(self.params)].split([part.numel() for part in self._parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, self._parts, strict=True)]

    def _create_missing(self) -> None:
        """Make room for gradients that other ranks have; only then the counts are read."""
        if all(param.grad is not None for param in self.params):
            return
        counts = self._flat[-len(self.params) :].tolist()
        for param, count in zip(self.params, counts, strict=True):
            if param.grad is None and count:
                param.grad = torch.zeros_like(param)


def reduced_in(dtype: torch.dtype) -> torch.dtype:
    """Type in which gradients of ``dtype`` are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def share_out(params: list[Parameter], bucket_bytes: int) -> Iterator[Bucket]:
    """Share out parameters by device and type, in their order."""
    for dtype, same in by_kind(params):
        numbers = _cut([p.numel() * reduced_in(dtype).itemsize for p in same], bucket_bytes)
        for _, members in groupby(zip(numbers, same, strict=True), key=lambda pair: pair[0]):
            yield Bucket([param for _, param in members])


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum over all elements, in one number; of a type that does not depend on the tensors."""
    # Apple's accelerator has no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=device)
    for dtype, same in by_kind(tensors):
        norms = torch._foreach_norm(same, 2, dtype=reduced_in(dtype))
        total += torch.stack(list(norms)).to(wide).square().sum().to(device)
    return total


def by_kind(tensors: Sequence[AnyTensor]) -> Iterator[tuple[torch.dtype, list[AnyTensor]]]:
    """Share out tensors by device and type, as the fused operations want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (_, dtype), same in kinds.items():
        yield dtype, same


def distinct(params: Iterable[Parameter]) -> list[Parameter]:
    """Each parameter once, in order."""
    return list({id(param): param for param in params}.values())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    # Asking for the class would import torch.distributed.tensor, which takes a second.
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "device_mesh")


def _cut(sizes: list[int], limit: int) -> Iterator[int]:
    """Number the bucket of each size; one ends when it has reached the limit."""
    number, filled = 0, 0
    for size in sizes:
        yield number
        filled += size
        if filled >= limit:
            number, filled = number + 1, 0
