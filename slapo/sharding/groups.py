"""Groups of ranks, and how their ranks shard the axes of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slapo.errors import SlapoError

if dist.is_available():
    # Import this before a world group exists. Its functions take the world group of import time as
    # a default argument and keep it for good; dynamo and dispatch modes import it later. A group
    # that outlives destroy_process_group aborts the process at exit.
    import torch.distributed.nn.functional

_LAYOUTS = ("RR", "RS", "SR")

#: Ranks -> the group last used for them in this process, while it exists.
_groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]
_groups = weakref.WeakValueDictionary()


class GroupHandle:
    """A reference to a process group for modules: copies share the group, pickles find it again.

    It does not keep the group alive. A group that outlives ``dist.destroy_process_group`` is
    destroyed with the interpreter, and gloo threads that still run then abort the process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._ref = None if group is None else weakref.ref(group)
        self.ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        if self.ranks is not None and group is not None:
            _groups[self.ranks] = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; for an unpickled handle, a group of the same ranks in this process."""
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
    """Return a handle of `group`, reusing the last one if it matches."""
    global _last
    # Every collective asks for the handle of its group; a new one would look up the ranks each
    # time.
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
            f"this is sharded over the ranks {list(ranks)}, but torch.distributed is not "
            "initialized (anymore); initialize it on that many processes first"
        )
    world = dist.group.WORLD
    if world is not None and tuple(dist.get_process_group_ranks(world)) == ranks:
        return world
    found = _last_used(ranks)
    if found is None:
        raise SlapoError(
            f"this is sharded over the ranks {list(ranks)}, for which this process has no group; "
            "call slapo.init_mesh with the sizes of the original job"
        )
    return found


def _last_used(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group last used for these ranks, if it is one of the present world."""
    found = _groups.get(ranks)
    with suppress(KeyError):  # destroyed, but still referenced somewhere
        if found is not None and dist.get_process_group_ranks(found):
            return found
    return None


_alone = False


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Treat every group as a group of one within the block: nothing is communicated."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def common_ranks(handle: GroupHandle, ranks: Collection[int]) -> list[int]:
    """Ranks in both, or an empty list if there is only one."""
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
    """Return this process's rank in ``group``."""
    return dist.get_rank(group) if _initialized() and not _alone else 0


def share_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and length of a rank's slice of `size`, cut as by ``torch.chunk``."""
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
    """Return ``axis`` counted from the front; unless `uneven`, the ranks must divide its size."""
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
    """Cut ``tensor`` into ``count`` blocks along ``source`` and concatenate them along ``target``.

    Tensor collectives work on dimension 0 only; this moves blocks there and back. The result is
    contiguous, and a copy unless the two axes are the same.
    """
    if source == target:
        return tensor.contiguous()
    return torch.cat(tensor.tensor_split(count, source), target)


def lengthened(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Pad ``tensor`` with zeros to ``size`` along ``axis``; collectives need equal shapes."""
    missing = size - tensor.shape[axis]
    behind = [0, 0] * (tensor.dim() - 1 - axis)
    return functional.pad(tensor, [*behind, 0, missing]) if missing else tensor


def neighbors(group: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    """This rank's group among those of ``count`` consecutive ranks of ``group``.

    Each group is created once, and only by its own ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    first = group_rank(group) // count * count
    mine = tuple(ranks[first : first + count])
    if mine == tuple(ranks):
        return group
    found = _last_used(mine)
    if found is None:
        # Otherwise every rank of the job would have to create every such group.
        found = dist.new_group(list(mine), use_local_synchronization=True)
        _groups[mine] = found
    return found


def group_of_one() -> dist.ProcessGroup:
    """A group of this rank alone."""
    world = dist.group.WORLD
    assert world is not None, "the mesh has initialized it"
    return neighbors(world, 1)


def parse_reshard(spec: str) -> tuple[str, str]:
    """Split a resharding such as ``"RS->SR"`` into the layouts before and after."""
    source, arrow, target = spec.partition("->")
    if not arrow or source == target or source not in _LAYOUTS or target not in _LAYOUTS:
        valid = ", ".join(f'"{a}->{b}"' for a in _LAYOUTS for b in _LAYOUTS if a != b)
        raise ValueError(f"{spec!r} is not a change between two layouts; pass one of {valid}")
    return source, target


def sharded_axis(layout: str) -> int:
    """Return the axis, counted from the end, at the S."""
    return layout.index("S") - 2


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
