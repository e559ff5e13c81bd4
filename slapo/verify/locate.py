"""Find the first module whose output, or the gradient of whose output, differs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.history import Record
from slapo.sharding.state import layout_of, shards_of
from slapo.verify.tensors import difference, rtol_for, scale_of, tensors_in
from slapo.wrapper import innermost


@dataclass(frozen=True)
class Divergence:
    """Where two models part.

    Parameters
    ----------
    path
        The module's path in the model.
    module
        The scheduled one.
    amount
        By how much they differ, in words.
    suspect
        Path of another module that may be the cause: the last partial sum before, or the module
        that the gradient comes from.
    """

    path: str
    module: nn.Module
    amount: str
    suspect: str | None = None


@dataclass
class Call:
    """One call of a module: its first output tensor and, after a backward, its gradient."""

    path: str
    index: int
    module: nn.Module
    output: Tensor
    gradient: Tensor | None = None


@dataclass
class Run:
    """What a model's modules gave, in the order that their calls ended.

    ``started`` holds paths in the order that calls began.
    """

    calls: list[Call] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def by_key(self) -> dict[tuple[str, int], Call]:
        """Calls by path and number."""
        return {(call.path, call.index): call for call in self.calls}


@contextmanager
def recorded(model: nn.Module) -> Iterator[Run]:
    """Note what every module call gives while the block runs."""
    run = Run()
    counts: dict[str, int] = {}

    def begin(path: str) -> Callable[..., None]:
        return lambda *_: run.started.append(path)

    def end(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = next((t for _, t in tensors_in(output)), None)
            if tensor is None:
                return
            counts[path] = counts.get(path, -1) + 1
            call = Call(path, counts[path], module, tensor.detach().clone())
            run.calls.append(call)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _keep(call, grad))

        return hook

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                pre = module.register_forward_pre_hook(begin(path), prepend=True)
                stack.callback(pre.remove)
                stack.callback(module.register_forward_hook(end(path)).remove)
        yield run


def running_in(error: BaseException, model: nn.Module) -> str | None:
    """The path of the innermost module of `model` that was running when `error` was raised."""
    paths = {}
    for path, module in model.named_modules():
        paths[id(module)] = paths[id(innermost(module))] = path
    found, frame = None, error.__traceback__
    while frame is not None:
        found = paths.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return found


#: What models call the numbers of their heads.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads")
#: Numbers that are the same for one head as for all of them.
_OF_ONE_HEAD = re.compile(r"head_(dim|size)|(groups|buckets|distance|idx|index)$")


def sizes_kept(module: nn.Module, path: str, records: Sequence[Record], world_size: int) -> str:
    """Numbers of a module that holds shards: they are not shared out with its weights.

    Parameters
    ----------
    path
        The module's in the schedule.
    records
        What was applied.
    world_size
        Of the schedule's group.

    Returns
    -------
    str
        A line for a message; empty if nothing was sharded below, or no number is left.
    """
    below = [record for record in records if contains(path, record.path)]
    if not any(record.primitive == "shard" and record.path != path for record in below):
        return ""
    bare = innermost(module)
    known = {record.arguments["name"] for record in below if record.primitive == "set"}
    heads = [
        (name, getattr(bare, name, getattr(getattr(bare, "config", None), name, None)))
        for name in _HEADS
        if repr(name) not in known
    ]
    uneven = [f"{name}={n}" for name, n in heads if type(n) is int and n % world_size]
    if uneven:
        return (
            f"\nit holds shards, and {uneven[0]} cannot be split over {world_size} ranks by whole "
            "heads; use a number of ranks that divides it, or keep its projections whole"
        )
    numbers = [
        f"{name}={value}"
        for name, value in vars(bare).items()
        if type(value) is int and value > 1 and name[0] != "_" and repr(name) not in known
        if not _OF_ONE_HEAD.search(name)
    ]
    if not numbers:
        return ""
    return (
        f"\nit holds shards, and keeps {', '.join(numbers)}: give those that count the whole this "
        f'rank\'s share, as by sch["{path}"].set(name, whole // sch.world_size), and leave each '
        "rank whole heads"
    )


def amount(error: float, limit: float, mine: Tensor, target: Tensor) -> str:
    """By how much a tensor differs, behind the name of where it does."""
    if mine.shape != target.shape:
        return f": its shape is {tuple(mine.shape)}, the original's {tuple(target.shape)}"
    if math.isinf(error) and target.is_floating_point():
        counts = [int((~t.isfinite()).sum()) for t in (mine, target)]
        return f": {counts[0]} of its numbers are NaN or infinite, of the original's {counts[1]}"
    return f", by {error:.3g} where {limit:.3g} is allowed"


def contains(path: str, inner: str) -> bool:
    """Whether the module at `path` is the one at `inner`, or around it."""
    return not path or inner == path or inner.startswith(f"{path}.")


def _keep(call: Call, grad: Tensor) -> None:
    call.gradient = grad.detach().clone()


class Comparison:
    """Compares two runs call by call, parts of all ranks put together.

    Parameters
    ----------
    wanted, given
        Runs of the reference and of the scheduled model.
    group
        Ranks of the scheduled model.
    rtol
        Tolerance, None for that of the dtype.
    agree, largest
        Whether a condition holds on any rank; the largest of the ranks' numbers.
    """

    def __init__(
        self,
        wanted: Run,
        given: Run,
        group: dist.ProcessGroup | None,
        rtol: float | None,
        agree: Callable[[bool], bool],
        largest: Callable[[float], float],
    ) -> None:
        self.expected, self.given = wanted.by_key(), given
        self.group, self.rtol, self.agree, self.largest = group, rtol, agree, largest

    def first_output(self) -> Divergence | None:
        """The first call whose output differs."""
        partial = None
        for call in self.given.calls:
            placement = layout_of(innermost(call.module)).output
            target = self.expected.get((call.path, call.index))
            if target is not None:
                is_partial = placement is not None and placement.kind == "partial"
                found = self._compare(call, call.output, target.output, is_partial)
                if found is not None:
                    return Divergence(*found, suspect=partial)
                partial = call.path if is_partial else partial
        return None

    def first_gradient(self) -> Divergence | None:
        """The first call, seen from the loss, for whose output the gradient differs."""
        for call in reversed(self.given.calls):
            target = self.expected.get((call.path, call.index))
            if target is None or call.gradient is None or target.gradient is None:
                continue
            found = self._compare(call, call.gradient, target.gradient, False)
            if found is not None:
                return Divergence(*found, suspect=self._user_of(call))
        return None

    def _user_of(self, call: Call) -> str | None:
        """The module called next, which most likely uses the output."""
        started = self.given.started
        after = len(started) - 1 - started[::-1].index(call.path)
        inside = f"{call.path}."
        return next((p for p in started[after + 1 :] if not p.startswith(inside)), None)

    def _compare(
        self, call: Call, mine: Tensor, target: Tensor, is_partial: bool
    ) -> tuple[str, nn.Module, str] | None:
        whole = self._whole(call, mine, target, is_partial)
        if whole is None:
            return None
        error = difference(whole, target)
        limit = rtol_for(target, self.rtol) * scale_of(target)
        if not self.agree(error > limit):
            return None
        return call.path, call.module, amount(self.largest(error), limit, whole, target)

    def _whole(self, call: Call, tensor: Tensor, target: Tensor, is_partial: bool) -> Tensor | None:
        """The tensor of all ranks together; None when it is not known how to put it together."""
        world_size = dist.get_world_size(self.group) if self.group is not None else 1
        if tensor.shape == target.shape:
            if is_partial and world_size > 1:
                tensor = tensor.contiguous().clone()
                dist.all_reduce(tensor, group=self.group)
            return tensor
        if world_size == 1:
            return tensor  # nothing explains another shape
        axes = [
            a for a, (m, t) in enumerate(zip(tensor.shape, target.shape, strict=False)) if m != t
        ]
        packed = any(len(s.blocks) > 1 for s in shards_of(innermost(call.module)).values())
        if tensor.dim() != target.dim() or len(axes) != 1 or packed or world_size == 1:
            return None
        (axis,) = axes
        if tensor.shape[axis] * world_size != target.shape[axis]:
            return None
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, axis)
