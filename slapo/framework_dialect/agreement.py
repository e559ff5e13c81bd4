"""Errors and checks that all ranks of a group meet at once.

An error on one rank alone leaves the others waiting in their next collective. What may go wrong on
some ranks only is therefore run through :func:`all_ranks_or_none`, and what must be alike is
compared by :func:`same_on_all_ranks` and :func:`same_batch`: either every rank goes on, or every
rank raises.

All three are collectives: every rank of the group has to call them. They do nothing in a world of
one and under torch's fake process group, whose other ranks do not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError

T = TypeVar("T")

# What the weight of an element grows by from row to row, from column to column and in the rest of a
# checksum: odd and far apart, so that no two places weigh the same.
_STEPS = (2_654_435_761, 40_503_000_787, 805_459_861_301)

# Below all numbers of a digest and their negatives.
_LOWEST = -(2**62)

# On an exception that every rank of the group raises: nobody is left waiting.
_ON_EVERY_RANK = "_slapo_on_every_rank"


def all_ranks_or_none(
    what: str, check: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Run ``check`` on each rank; if it raises on any of them, raise on all.

    Parameters
    ----------
    what
        What is being done, for the message of the ranks whose own check went well.
    check
        Runs on each rank by itself, without collectives.
    group
        The ranks that take part; None for the world.

    Returns
    -------
    T
        What ``check`` returned here.

    Raises
    ------
    Exception
        What ``check`` raised here.
    SlapoError
        If it raised on other ranks only, with their numbers and errors.

    Examples
    --------
    >>> all_ranks_or_none("read the size", lambda: 3)
    3
    """
    if not has_peers(group):
        return check()
    result, error = _attempt(check)
    failed = torch.tensor(int(error is not None), device=communication_device(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        _raise_everywhere(what, error, group)
    return result  # type: ignore[return-value]  # there was no error


def same_on_all_ranks(what: str, value: Any, group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on every rank, values that differ between ranks.

    Parameters
    ----------
    what
        Name of the value, for the message.
    value
        This rank's; it must be picklable and comparable by ``==``.
    group
        The ranks that take part; None for the world.

    Raises
    ------
    SlapoError
        On all ranks, naming the first that differs from the group's first, and both values.

    Examples
    --------
    >>> same_on_all_ranks("micro_batches", 4)
    """
    if not has_peers(group):
        return
    values = gathered(value, group)
    other = next((i for i, v in enumerate(values) if v != values[0]), None)
    if other is None:
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    raise on_every_rank(
        SlapoError(
            f"{what} differs between ranks: {values[0]!r} on rank {ranks[0]}, {values[other]!r} on "
            f"rank {ranks[other]}; pass the same on every rank"
        )
    )


def same_batch(what: str, load: Callable[[], T], mesh: DeviceMesh) -> T:
    """Load this rank's batch; refuse batches that differ within a data-parallel coordinate.

    The pipeline and tensor-parallel ranks of one data-parallel coordinate work on one batch, and
    get it by loading it each. Where their loaders have drifted apart, training goes on with a
    model that nobody meant. The ranks compare shapes, types and a checksum of the bytes, in one
    small collective.

    Parameters
    ----------
    what
        What is being done, for messages.
    load
        Returns the batch, any nest of tensors. If it raises on a rank, all ranks raise.
    mesh
        Of the dimensions pp, dp and tp.

    Returns
    -------
    T
        The batch.

    Raises
    ------
    Exception
        What ``load`` raised here.
    SlapoError
        On all ranks, if a rank could not load its batch or has another one than its peers.

    Examples
    --------
    >>> from slapo.mesh import init_mesh
    >>> same_batch("train_batch", lambda: [1, 2], init_mesh(device="cpu"))
    [1, 2]
    """
    if not has_peers(None):
        return load()
    batch, error = _attempt(load)
    digest = [0, 0, 0] if error else [1, *batch_digest(batch)]
    if not _all_alike(digest, mesh):
        digests = gathered(digest, None)
        if not all(digest[0] for digest in digests):
            _raise_everywhere(what, error, None)
        _refuse_other_batches(what, batch, digests, mesh)
    return batch  # type: ignore[return-value]  # there was no error


def batch_digest(batch: Any) -> tuple[int, int]:
    """Two numbers that tell batches apart: one of their form, one of their tensors' bytes.

    Examples
    --------
    >>> batch_digest(torch.tensor([1, 2])) == batch_digest(torch.tensor([2, 1]))
    False
    """
    form = 0
    for byte in describe_batch(batch).encode():
        form = (form * 1_000_003 + byte) % 2**61
    sums = [checksum(leaf) for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    content = 0
    for value in torch.stack([s.cpu() for s in sums]).tolist() if sums else ():
        content = (content * 1_000_003 + value) % 2**61
    return form, content


def describe_batch(batch: Any) -> str:
    """Shapes and types of a batch, for people.

    Examples
    --------
    >>> describe_batch((torch.zeros(2, 3), None))
    'float32(2, 3), None'
    """
    return ", ".join(_describe_leaf(leaf) for leaf in _leaves(batch))


def checksum(tensor: Tensor) -> Tensor:
    """A 0-dim integer that changes with any element or swap of elements; NaN is as good as any.

    Sums over the rows and over the columns of the elements laid out in a square, each weighted by
    its place: two passes over the data and no copy of it.

    Examples
    --------
    >>> int(checksum(torch.tensor([float("nan")]))) == int(checksum(torch.tensor([float("nan")])))
    True
    """
    bits = _as_integers(tensor.detach())
    width = max(1, isqrt(bits.numel()))
    head = bits.numel() // width * width
    square = bits[:head].view(-1, width)
    parts = [square.sum(1), square.sum(0), bits[head:].to(torch.int64)]
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for step, part in zip(_STEPS, parts, strict=True):
        places = torch.arange(part.numel(), device=bits.device)
        # Overflow wraps, which does no harm.
        total = total + (part * (places * step + 1)).sum()
    return total


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors have to be for the collectives of ``group``.

    Examples
    --------
    >>> from slapo.mesh import init_mesh
    >>> communication_device(init_mesh(device="cpu")["tp"].get_group())
    device(type='cpu')
    """
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # a backend without cpu was started on it
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_peers(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there are other processes in the group, None for the world, that really exist.

    Examples
    --------
    >>> has_peers()
    False
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"


def on_every_rank(error: T) -> T:
    """Mark an exception that all ranks raise together.

    Examples
    --------
    >>> is_on_every_rank(on_every_rank(ValueError("bad")))
    True
    """
    setattr(error, _ON_EVERY_RANK, True)
    return error


def is_on_every_rank(error: BaseException) -> bool:
    """Whether all ranks raise this exception together, so that none waits for another.

    Examples
    --------
    >>> is_on_every_rank(ValueError("bad"))
    False
    """
    return getattr(error, _ON_EVERY_RANK, False)


def _attempt(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return check(), None
    except Exception as error:
        return None, error


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of the group, in their order; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_everywhere(what: str, error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise this rank's own error, or one that tells of the other ranks'."""
    texts = gathered(f"{type(error).__name__}: {error}" if error else None, group)
    if error is not None:
        raise on_every_rank(error)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    failed = {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}
    first = next(iter(failed))
    others = f" (and on {len(failed) - 1} more: {list(failed)[1:]})" if len(failed) > 1 else ""
    raise on_every_rank(SlapoError(f"{what} failed on rank {first}{others} with {failed[first]}"))


def _all_alike(digest: list[int], mesh: DeviceMesh) -> bool:
    """Whether all ranks have a batch, and those of a data-parallel coordinate the same one."""
    # Of each coordinate the largest digest and, by its negative, the smallest: in one collective.
    extremes = torch.full((mesh.size(1), 2, len(digest)), _LOWEST, dtype=torch.int64)
    extremes[mesh.get_local_rank("dp")] = torch.tensor([digest, [-number for number in digest]])
    extremes = extremes.to(communication_device(None))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes[:, 0], -extremes[:, 1]
    return bool((smallest[:, 0] > 0).all()) and torch.equal(largest, smallest)


def _refuse_other_batches(
    what: str, batch: Any, digests: list[list[int]], mesh: DeviceMesh
) -> None:
    """Raise on all ranks if two of one data-parallel coordinate hold different batches."""
    for dp, ranks in enumerate(mesh.mesh.transpose(0, 1).flatten(1).tolist()):
        other = next((r for r in ranks if digests[r] != digests[ranks[0]]), None)
        if other is not None:
            shown = gathered(describe_batch(batch), None)
            same_form = digests[other][1] == digests[ranks[0]][1]
            how = "with other contents" if same_form else f"of {shown[other]}"
            raise on_every_rank(
                SlapoError(
                    f"{what}: ranks {ranks[0]} and {other} share data-parallel coordinate {dp} and "
                    f"got different batches: {shown[ranks[0]]} on rank {ranks[0]}, one {how} on "
                    f"rank {other}; seed and shard the data by mesh.get_local_rank('dp'), so that "
                    "the pp and tp ranks of one coordinate read the same"
                )
            )


def _leaves(batch: Any) -> list[Any]:
    return pytree.tree_leaves(batch)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}"
    return repr(leaf) if leaf is None or isinstance(leaf, (bool, int, str)) else type(leaf).__name__


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor, in one dimension and in pieces of at most 32."""
    flat = tensor.contiguous().flatten()
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten()
    # Sums and weights are of 64 bits: in wider pieces the upper bits would fall off.
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
