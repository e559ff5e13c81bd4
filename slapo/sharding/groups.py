"""Groups of ranks, and how their ranks shard the axes of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slapo.errors import SlapoError

if dist.is_available():
    # Its functions have the world's group as a default, which they keep for good if there is one
    # when they are imported, as dynamo and dispatch modes do: a group that outlives
    # destroy_process_group is what aborts a process at its end.
    import torch.distributed.nn.functional

_LAYOUTS = ("RR", "RS", "SR")

#: Ranks -> the group that was used for them last in this process, while it is there.
_groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]
_groups = weakref.WeakValueDictionary()


class GroupHandle:
    """A process group as modules hold it: copies share the group, and pickles find it again.

    It does not keep the group: one that outlives ``dist.destroy_process_group`` ends with the
    interpreter, where threads of gloo that still run abort the process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._ref = None if group is None else weakref.ref(group)
        self.ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        if self.ranks is not None and group is not None:
            _groups[self.ranks] = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; of an unpickled handle, one of the same ranks that this process has made."""
        if self.ranks is None:
            return None
        found = None if self._ref is None else self._ref()
        if found is None:
            found = _find_group(self.ranks)
            self._ref = weakref.ref(found)
        return found

    def __copy__(self) -> GroupHandle:
        return self

    def __deepcopy__(self, memo: object) -> GroupHandle:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.ranks,)

    def __repr__(self) -> str:
        return f"GroupHandle({self.ranks})"


def handle_of(group: dist.ProcessGroup | None) -> GroupHandle:
    """A handle of `group`, that which was made last if it fits."""
    global _last
    if _last is None or group is None or _last._ref is None or _last._ref() is not group:
        _last = GroupHandle(group)
    return _last


_last: GroupHandle | None = None


def _unpickled(ranks: tuple[int, ...] | None) -> GroupHandle:
    handle = GroupHandle(None)
    handle.ranks = ranks
    return handle


def _find_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if not _initialized():
        raise SlapoError(
            f"this is sharded over the ranks {list(ranks)}, and torch.distributed is not "
            "initialized, or not any more; start it on so many processes first"
        )
    world = dist.group.WORLD
    if world is not None and tuple(dist.get_process_group_ranks(world)) == ranks:
        return world
    if ranks not in _groups:
        raise SlapoError(
            f"this is sharded over the ranks {list(ranks)}, of which this process has no group; "
            "call slapo.init_mesh as the job that made it did"
        )
    return _groups[ranks]


_alone = False


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Within the block every group counts as one of a single rank: nothing is communicated."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def common_ranks(handle: GroupHandle, ranks: Collection[int]) -> list[int]:
    """Ranks that are in both, where there are several."""
    both = sorted({*ranks} & {*(handle.ranks or ())})
    return both if len(both) > 1 else []


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group``."""
    if _alone or not _initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the group {group}; "
            f"pass the group that this process belongs to"
        )
    return size


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process' rank inside ``group``."""
    return dist.get_rank(group) if _initialized() and not _alone else 0


def share_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's share of `size` begins, and how long it is, as ``torch.chunk`` cuts it."""
    longest = -(-size // ranks)
    start = min(rank * longest, size)
    return start, min(longest, size - start)


def check_axis(what: str, tensor: Tensor, axis: int) -> int:
    """Return ``axis`` counted from the front."""
    dims = tensor.dim()
    if not -dims <= axis < dims:
        raise ValueError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} has no axis {axis}; "
            f"pass one of {-dims} to {dims - 1}"
            if dims
            else f"{what}: a tensor without dimensions has no axis {axis}"
        )
    return axis % dims


def check_divisible(
    what: str, tensor: Tensor, axis: int, group: dist.ProcessGroup | None, uneven: bool = False
) -> int:
    """Return ``axis`` counted from the front; its size must split evenly unless said otherwise."""
    axis = check_axis(what, tensor, axis)
    ranks = group_size(group)
    if tensor.shape[axis] % ranks and not uneven:
        raise ValueError(
            f"{what}: size {tensor.shape[axis]} of axis {axis} of a tensor of shape "
            f"{tuple(tensor.shape)} is not divisible by world_size {ranks}; "
            f"pad that axis or pick a group whose size divides it"
        )
    return axis


def move_blocks(tensor: Tensor, count: int, source: int, target: int) -> Tensor:
    """Cut ``tensor`` in ``count`` blocks along ``source`` and join them along ``target``.

    The tensor collectives know dimension 0 only; this takes the blocks there and back. The result
    is contiguous, and a copy unless the two axes are the same.
    """
    if source == target:
        return tensor.contiguous()
    return torch.cat(tensor.tensor_split(count, source), target)


def lengthened(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Return ``tensor`` with zeros behind it, so that it has ``size`` along ``axis``.

    Collectives want one shape on all ranks.
    """
    missing = size - tensor.shape[axis]
    behind = [0, 0] * (tensor.dim() - 1 - axis)
    return functional.pad(tensor, [*behind, 0, missing]) if missing else tensor


def neighbors(group: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    """This rank's group among those of ``count`` ranks of ``group``, one behind the other.

    Made by the ranks of each by themselves, and once.
    """
    ranks = dist.get_process_group_ranks(group)
    first = group_rank(group) // count * count
    mine = tuple(ranks[first : first + count])
    if mine == tuple(ranks):
        return group
    found = _groups.get(mine)
    if found is None:
        found = dist.new_group(list(mine), use_local_synchronization=True)
        _groups[mine] = found
    return found


def group_of_one() -> dist.ProcessGroup:
    """A group of this rank alone."""
    world = dist.group.WORLD
    if world is None:
        raise SlapoError("torch.distributed is not initialized; call slapo.init_mesh first")
    return neighbors(world, 1)


def parse_reshard(spec: str) -> tuple[str, str]:
    """Split a resharding such as ``"RS->SR"`` in the layouts before and after."""
    source, arrow, target = spec.partition("->")
    if not arrow or source == target or source not in _LAYOUTS or target not in _LAYOUTS:
        valid = ", ".join(f'"{a}->{b}"' for a in _LAYOUTS for b in _LAYOUTS if a != b)
        raise ValueError(f"{spec!r} is not a change between two layouts; pass one of {valid}")
    return source, target


def sharded_axis(layout: str) -> int:
    """Return the axis, counted from the end, that carries the S."""
    return layout.index("S") - 2


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
