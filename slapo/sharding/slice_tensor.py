"""Slices in state dicts with the checkpoint protocol of ``torch.distributed.checkpoint``.

That package takes plain tensors of one name for replicas, and would store one rank's slice for all.
With the protocol a checkpoint holds full tensors under the model's own names. Any layout, and the
unscheduled model, can load its part of them.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.sharding.slicing import ShardSpec, is_sharded

#: Operations whose result is the same part of the full tensor; the stager of ``async_save`` uses
#: the last one.
_COPIES = {
    *(Tensor.detach, Tensor.clone, Tensor.to, Tensor.cpu, Tensor.contiguous, Tensor.new_empty),
    *(torch.clone, torch.zeros_like, torch.empty_like, torch.detach),
}


@dataclass(frozen=True)
class Box:
    """A contiguous part of this rank's tensor, with its place in the full and the local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Select the part from the full tensor."""
        return _narrowed(tensor, self.offsets, self.sizes)

    def of_local(self, tensor: Tensor) -> Tensor:
        """Select the part from this rank's tensor."""
        return _narrowed(tensor, self.local, self.sizes)


class SliceTensor(Tensor):
    """This rank's part of a parameter in a state dict; otherwise an ordinary tensor.

    Copies keep their place in the full tensor; other results, and pickles, are plain tensors.
    """

    _boxes: Sequence[Box]
    _whole: torch.Size

    @classmethod
    def of(cls, tensor: Tensor, boxes: Sequence[Box], whole: torch.Size) -> SliceTensor:
        """Wrap a tensor without copying, and store its place."""
        found = tensor.as_subclass(cls)
        found._boxes, found._whole = boxes, whole
        return found

    def plain(self) -> Tensor:
        """The same data as a plain tensor."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        source = args[0] if args else None
        if func is Tensor.size and len(args) == 1 and _is_loading(sys._getframe(1)):
            return source._whole  # type: ignore[union-attr]
        # safetensors asks this of each tensor before it writes its bytes.
        if func is Tensor.is_contiguous and _named(sys._getframe(1), "safetensors.torch"):
            _refuse_whole(source)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _COPIES and isinstance(source, cls):
            return cls.of(result, source._boxes, source._whole)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # Not plain().__deepcopy__: copy.deepcopy keeps the plain tensor alive, whose id is in the
        # memo.
        return SliceTensor.of(copy.deepcopy(self.plain(), memo), self._boxes, self._whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    # --- the protocol of torch.distributed.checkpoint --------------------------------------------
    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        found = next(box for box in self._boxes if box.offsets == tuple(index.offset))
        return found.of_local(self.plain())


def _narrowed(tensor: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def _is_loading(caller: Any) -> bool:
    """Return True if the load planner calls: it compares the size of the full tensor."""
    return _named(caller, "torch.distributed.checkpoint.default_planner")


def _named(caller: Any, module: str) -> bool:
    return caller.f_globals.get("__name__") == module


def _refuse_whole(part: Any) -> None:
    """Raise for a slice saved as the full tensor, as by PEFT's ``save_pretrained``."""
    raise SlapoError(
        f"a tensor of shape {tuple(part.shape)} is this rank's slice of one of shape "
        f"{tuple(part._whole)}, but a safetensors file would store it as the whole; call "
        "slapo.save_pretrained(built_model, folder) on every rank, or pass "
        "tensor.as_subclass(torch.Tensor) for one file per rank"
    )


def place_in_state_dict(state_dict: dict[str, Any], name: str, spec: ShardSpec) -> None:
    """Store the place of an entry of a state dict in the full tensor, also for an FSDP2 shard."""
    tensor = state_dict.get(name)
    if tensor is None or spec.world_size == 1 or isinstance(tensor, nn.Parameter):
        return
    kind = _class_of_shares() if is_sharded(tensor) else SliceTensor
    state_dict[name] = kind.of(tensor, boxes_of(tensor, spec), spec.full_shape)


@functools.cache
def _class_of_shares() -> Any:
    from torch.distributed.tensor import DTensor  # takes a second, but FSDP2 users have it

    class SliceDTensor(DTensor):
        """FSDP2's shard of a slice."""

        @classmethod
        def of(cls, share: Any, boxes: Sequence[Box], whole: torch.Size) -> Any:
            """Turn the DTensor into this class in place, and store its place."""
            local = share._local_tensor.as_subclass(Tensor)
            share.__class__, share._local_tensor = cls, SliceTensor.of(local, boxes, whole)
            return share

        def plain(self) -> Any:
            local: Any = self._local_tensor
            return DTensor(local.plain(), self._spec, requires_grad=self.requires_grad)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            place: Any = self._local_tensor
            return SliceDTensor.of(copy.deepcopy(self.plain(), memo), place._boxes, place._whole)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.plain().__reduce_ex__(protocol)

        def size(self, *dim: int) -> Any:  # type: ignore[override]
            if not dim and _is_loading(sys._getframe(1)):
                return self._local_tensor._whole  # type: ignore[attr-defined]
            return super().size(*dim)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            source = args[0] if args else None
            if func in _COPIES and isinstance(source, cls) and isinstance(result, DTensor):
                place: Any = source._local_tensor
                return cls.of(result, place._boxes, place._whole)
            return result

    return SliceDTensor


def unwrapped(param: nn.Parameter | None) -> nn.Parameter | None:
    """Unwrap a parameter that ``load_state_dict(assign=True)`` took from a state dict."""
    if not isinstance(param, SliceTensor):
        return param
    return nn.Parameter(param.plain().detach(), param.requires_grad)


def boxes_of(tensor: Tensor, spec: ShardSpec | None) -> list[Box]:
    """Places of this rank's parts in the full tensor, also for an FSDP2 shard of a slice."""
    boxes = [_whole(tensor.shape)] if spec is None else _boxes_of_slice(spec)
    if not is_sharded(tensor):
        return boxes
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    share: Any = tensor
    sizes, start = compute_local_shape_and_global_offset(
        share.shape, share.device_mesh, share.placements
    )
    return [cut for box in boxes if (cut := _cut(box, start, sizes)) is not None]


def _whole(shape: torch.Size) -> Box:
    none = (0,) * len(shape)
    return Box(none, tuple(shape), none)


def _boxes_of_slice(spec: ShardSpec) -> list[Box]:
    found, block, local = [], 0, 0
    whole = _whole(spec.full_shape)
    for size in spec.blocks:
        start, own = spec.share(size)
        if own:
            offsets = _at(whole.offsets, spec.axis, block + start)
            starts = _at(whole.local, spec.axis, local)
            found.append(Box(offsets, _at(whole.sizes, spec.axis, own), starts))
        block, local = block + size, local + own
    return found


def _at(sizes: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*sizes[:axis], value, *sizes[axis + 1 :])


def _cut(box: Box, start: Sequence[int], size: Sequence[int]) -> Box | None:
    """The part of a box inside FSDP2's shard of the slice, with positions in that shard."""
    low = [max(first, begin) for first, begin in zip(box.local, start, strict=True)]
    ends = [first + length for first, length in zip(box.local, box.sizes, strict=True)]
    high = [min(end, begin + n) for end, begin, n in zip(ends, start, size, strict=True)]
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    if min(sizes) <= 0:
        return None
    moved = zip(box.offsets, low, box.local, strict=True)
    local = tuple(a - begin for a, begin in zip(low, start, strict=True))
    return Box(tuple(offset + a - first for offset, a, first in moved), sizes, local)
