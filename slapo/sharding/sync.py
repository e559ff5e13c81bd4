"""The operations of ``Schedule.sync`` as a table, and checks for contradictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slapo.errors import with_nearest
from slapo.sharding.collectives import (
    all_gather,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
    reshard,
    scatter,
)
from slapo.sharding.groups import GroupHandle, parse_reshard
from slapo.sharding.layout import REPLICATE, KnownSync, Layout, Placement, shard
from slapo.sharding.steps import ALL_GATHER, ALL_REDUCE, COPY, REDUCE_SCATTER, SCATTER


@dataclass(frozen=True)
class _Row:
    #: supported modes
    modes: tuple[str, ...]
    #: accepted arguments
    keywords: tuple[str, ...]
    #: placements of a module's output, where known, that the collective accepts
    takes: tuple[str, ...]
    #: the collective, which autograd differentiates into its conjugate
    run: Callable[[SyncOp, Tensor], Tensor]
    #: placement of the result
    output: Callable[[SyncOp], Placement]


@dataclass(frozen=True)
class SyncOp:
    """One collective on one activation."""

    #: A key of the table in ``Schedule.sync``, or a reshard such as ``"RS->SR"``
    name: str
    #: handle of the ranks
    group: GroupHandle
    #: axis of the activation, if the op has one
    axis: int | None = None
    #: for ``all_gather``: true if ranks use the gathered tensor differently
    tensor_parallel_output_grad: bool = True
    #: in the modes ``bwd_post`` and ``fwd_pre``: names of its inputs. None means all inputs in the
    #: first mode, and the first tensor in the second
    argument: tuple[str, ...] | None = None
    #: the known sharded axis (from the end) of a gathered tensor; checked once the number of
    #: dimensions is known
    known_axis: int | None = None
    #: for ``all_gather``: full size along the axis if the slices are uneven
    total: int | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Apply the collective."""
        if self.axis is not None:
            self._check_axis(tensor, self.axis)
        return _row(self.name).run(self, tensor)

    @property
    def __name__(self) -> str:
        """Name of the op in graphs."""
        return "reshard" if "->" in self.name else self.name

    def _check_axis(self, tensor: Tensor, axis: int) -> None:
        dims = tensor.dim()
        if self.known_axis is not None and axis % dims != self.known_axis % dims:
            raise ValueError(
                f"{self.name}: the activation of shape {tuple(tensor.shape)} is sharded along axis "
                f"{self.known_axis}, not {axis}; pass axis={self.known_axis}"
            )

    def output(self) -> Placement:
        """Placement of the result."""
        return _row(self.name).output(self)

    def sums_gradient(self) -> bool:
        """Return True if the backward sums over the ranks."""
        gathers = self.name == "all_gather" and self.tensor_parallel_output_grad
        return gathers or self.name == "all_reduce_grad"

    def __str__(self) -> str:
        return self.name if self.axis is None else f"{self.name} axis={self.axis}"


def _run_all_gather(op: SyncOp, tensor: Tensor) -> Tensor:
    keep = op.tensor_parallel_output_grad
    return all_gather(tensor, op.group.group, op.axis or 0, keep, op.total)


def _own_slice(op: SyncOp) -> Placement:
    # The position from the end is unknown for an axis counted from the front.
    return Placement("shard", op.axis if op.axis is not None and op.axis < 0 else None)


_TABLE = {
    "all_reduce": _Row(
        ("fwd_post", "bwd_post"),
        ("argument",),
        (ALL_REDUCE.takes,),
        lambda op, tensor: reduce_from_group(tensor, op.group.group),
        lambda op: Placement(ALL_REDUCE.gives),
    ),
    "all_gather": _Row(
        ("fwd_pre", "fwd_post"),
        ("axis", "tensor_parallel_output_grad", "argument", "total"),
        (ALL_GATHER.takes,),
        _run_all_gather,
        lambda op: Placement(ALL_GATHER.gives),
    ),
    "reduce_scatter": _Row(
        ("fwd_post",),
        ("axis",),
        (REDUCE_SCATTER.takes,),
        lambda op, tensor: reduce_scatter(tensor, op.group.group, op.axis or 0),
        _own_slice,
    ),
    "scatter": _Row(
        ("fwd_post",),
        ("axis",),
        (SCATTER.takes,),
        lambda op, tensor: scatter(tensor, op.group.group, op.axis or 0),
        _own_slice,
    ),
    "all_reduce_grad": _Row(
        ("fwd_post",),
        (),
        (COPY.takes,),
        lambda op, tensor: copy_to_group(tensor, op.group.group),
        lambda op: Placement(COPY.gives),
    ),
}
_RESHARD = _Row(
    ("fwd_pre", "fwd_post"),
    ("argument",),
    ("replicate", "shard"),
    lambda op, tensor: reshard(tensor, op.name, op.group.group),
    lambda op: {"RR": REPLICATE, "RS": shard(-1), "SR": shard(-2)}[op.name[-2:]],
)


#: Ops that turn a partial sum into a complete one.
REDUCTIONS = tuple(name for name, row in _TABLE.items() if "partial" in row.takes)


def _row(name: str) -> _Row:
    return _TABLE.get(name, _RESHARD)


def make_sync_op(mode: str, name: str, group: GroupHandle, arguments: Mapping[str, Any]) -> SyncOp:
    """Return the op called `name` for `mode`."""
    if "->" in name:
        parse_reshard(name)
    elif name not in _TABLE:
        raise ValueError(
            f"unknown sync op {name!r}; "
            + with_nearest(name, _TABLE, f"known are {[*_TABLE]} and reshards such as 'RS->RR'")
        )
    row = _row(name)
    if mode not in row.modes:
        raise ValueError(
            f"sync op {name!r} works in modes {list(row.modes)}, not in {mode!r}; pass one of these"
        )
    keywords = [key for key in row.keywords if key != "argument" or mode != "fwd_post"]
    unknown = [key for key in arguments if key not in keywords]
    if unknown:
        raise TypeError(f"sync op {name!r} does not take {unknown}; it takes {keywords}")
    if "axis" in keywords and type(arguments.get("axis")) is not int:
        raise ValueError(
            f"sync op {name!r} needs an axis of the activation, got {arguments.get('axis')!r}; "
            "pass axis=-1 for features"
        )
    given = dict(arguments)
    names = given.get("argument")
    if names is not None:
        given["argument"] = (names,) if isinstance(names, str) else tuple(names)
    return SyncOp(name, group, **given)


# --- contradictions ------------------------------------------------------------------------------
def check_syncs(syncs: Iterable[KnownSync], layout: Layout) -> None:
    """Raise if existing syncs contradict `layout`."""
    for sync in syncs:
        if sync.op:
            check_sync(layout, sync.mode, sync.op, sync.axis)
        layout = sync.after(layout)


def check_sync(layout: Layout, mode: str, op: str, axis: int | None) -> None:
    """Raise if a sync contradicts `layout`."""
    if mode == "fwd_post" and layout.output is not None:
        _check_output(layout.output, op, axis)
    elif mode == "bwd_post" and layout.input is not None and layout.input.kind == "shard":
        raise ValueError(
            f"bwd_post {op}: the module's input is {layout.input}, and so is its gradient, which "
            "is already complete; put bwd_post on the module whose input is whole"
        )
    elif mode == "fwd_pre" and layout.input is not None:
        _check_input(layout.input, op, axis)


def _check_output(output: Placement, op: str, axis: int | None) -> None:
    if output.kind not in _row(op).takes:
        raise ValueError(f"fwd_post {op}: the module's output is {output}{_remedy(output, op)}")
    if output.kind == "shard" and output.blocks > 1:
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, and a gather would concatenate the "
            "ranks' parts; gather each block separately, or keep the next modules sharded"
        )
    if output.copies > 1:
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, which no collective of the group "
            "can gather; let the next module read its part, or keep the weight whole"
        )
    if output.total is not None and op != "all_gather":
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, which it cannot exchange; use "
            f"'all_gather' with axis={output.axis}, or a group whose size divides {output.total}"
        )
    if "->" in op:
        _check_reshard(op, op[:2], output, "output")
    elif output.kind == "shard" and axis is not None and not may_be_axis(axis, output.axis):
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, not along axis {axis}; "
            f"pass axis={output.axis}"
        )


def _remedy(output: Placement, op: str) -> str:
    if output.kind == "partial":
        ops = " or ".join(map(repr, REDUCTIONS))
        return f", which needs summing; use {ops}, or shard the weight along its other axis"
    if output.kind == "shard":
        return (
            f", each rank holds a slice; use 'all_gather' with axis={output.axis} to make it whole"
        )
    return f" already, so {op} would count it once per rank; leave the sync out"


def _check_input(expected: Placement, op: str, axis: int | None) -> None:
    if "->" in op:
        _check_reshard(op, op[-2:], expected, "input")
    elif expected.kind == "shard" and op == "all_gather" and axis == expected.axis:
        raise ValueError(
            f"fwd_pre {op}: the module expects its input {expected}, but gathering along axis "
            f"{axis} makes it whole; leave the sync out"
        )


def _check_reshard(op: str, letters: str, placement: Placement, side: str) -> None:
    """Raise unless `letters`, the layout on this side of the op, match the placement."""
    if placement.axis not in (-1, -2, None):
        return
    wanted = {"replicate": "RR", "shard": "RS" if placement.axis == -1 else "SR"}
    needed = wanted.get(placement.kind)
    # A sharded sequence (SR) does not contradict a module that mixes features only.
    if needed is None or letters == needed or (needed == "RR" and letters == "SR"):
        return
    raise ValueError(
        f"{op}: the module's {side} is {placement}, which is {needed!r} in a reshard, not "
        f"{letters!r}; write {needed!r} there"
    )


def may_be_axis(axis: int, known: int | None) -> bool:
    """Return True if `axis` may equal `known` (from the end) for some number of dimensions.

    The hook checks again once it has the tensor.
    """
    if known is None:
        return True
    return axis == known if axis < 0 else axis >= 1 or known != -1
