"""Collectives of torch that a model, or a user's hook, calls without this library."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.verify.placement.place import WHOLE, NoRule, Place, PlacementViolation, put_place

#: Namespaces of torch's collectives.
RAW = ("c10d", "_c10d_functional")
_REMEDY = (
    "the collectives of slapo.sharding (reduce_from_group, all_gather, ...) declare their "
    "placements and have a gradient"
)


def raw_collective(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    places: list[Place],
) -> Any:
    """Result without communication; only sums over the ranks have known placements."""
    name = func.overloadpacket.__name__
    if any(place.order for place in places):
        raise NoRule(f"no rule covers it for rows in the ranks' order; {_REMEDY}")
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        _check_sum(args, kwargs)
        if not all(place.is_partial for place in places):
            raise PlacementViolation(
                f"it sums a tensor over the ranks that is not a partial sum; {_REMEDY}"
            )
        return _summed(name, args, tensors)
    if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
        # Nothing is communicated, so there is nothing to wait for.
        return tensors[0] if tensors else _work()
    raise NoRule(f"no rule covers this collective here; {_REMEDY}")


def group_in(args: Iterable[Any]) -> dist.ProcessGroup | None:
    """The group among the arguments of a collective: as an object, or by its name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    # c10d operations get the group as a ScriptObject, functional collectives by its name.
    for value in args:
        with suppress(RuntimeError, KeyError, ValueError):  # other objects and strings
            if isinstance(value, torch.ScriptObject):
                return dist.ProcessGroup.unbox(value)
            if isinstance(value, str):
                found: dist.ProcessGroup = resolve(value)
                return found
    return None


def _summed(name: str, args: Any, tensors: list[Tensor]) -> Any:
    if name == "all_reduce":
        result = tensors[0].clone()
        put_place(result, WHOLE)
        return result
    for tensor in tensors:
        put_place(tensor, WHOLE)
    return tensors[0] if name == "all_reduce_" else (args[0], _work())


def _check_sum(args: Any, kwargs: dict[str, Any]) -> None:
    """Raise for a maximum or any other reduction than a sum."""
    names = [value.lower() for value in (*args, *kwargs.values()) if isinstance(value, str)]
    if any(name in ("avg", "max", "min", "product") for name in names) or not _asked_for_sum():
        raise PlacementViolation(f"it is not a sum over the ranks; {_REMEDY}")


def _asked_for_sum() -> bool:
    """Return True if the running function of ``torch.distributed`` was called for a sum."""
    # ``c10d::allreduce_`` holds the reduction as an opaque ScriptObject; the options of the
    # function of ``torch.distributed`` that called it are readable.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        operation = getattr(frame.f_locals.get("opts"), "reduceOp", None)
        if operation is not None:
            return bool(operation == dist.ReduceOp.SUM)
        frame = frame.f_back
    return True


def _work() -> Any:
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork()
    return work.boxed() if hasattr(work, "boxed") else work
