"""What is known of how a sharded module's input and output lie across the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placement:
    """How an activation lies across the ranks.

    Parameters
    ----------
    kind
        ``"replicate"``, ``"shard"`` or ``"partial"`` (ranks hold summands).
    axis
        The sharded axis, counted from the end (-1 is the last).
    blocks
        How many blocks lie along that axis, of which each rank has a part, as in a packed query,
        key and value.
    """

    kind: str
    axis: int | None = None
    blocks: int = 1

    def __str__(self) -> str:
        packed = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        return {
            "replicate": "whole on every rank",
            "partial": "a partial sum",
            "shard": f"sharded along axis {self.axis}{packed}",
        }[self.kind]


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")


def shard(axis: int) -> Placement:
    """Sharded along `axis`, counted from the end."""
    return Placement("shard", axis)


@dataclass(frozen=True)
class Layout:
    """Placements of a module's first input and first output; None where nothing is known.

    `vocabulary` marks a table of which each rank holds some rows: indices must be masked.
    """

    input: Placement | None = None
    output: Placement | None = None
    vocabulary: bool = False


@dataclass(frozen=True)
class KnownSync:
    """A sync that stands on a module, as far as layouts are concerned.

    Parameters
    ----------
    mode, op, axis
        As in ``Schedule.sync``; `op` is empty for a function of the user's.
    output
        The placement after it (for ``fwd_post``), None when it is not known.
    completes_gradient
        A ``fwd_pre`` op whose backward sums the gradient over the ranks.
    """

    mode: str
    op: str
    axis: int | None = None
    output: Placement | None = None
    completes_gradient: bool = False

    def after(self, layout: Layout) -> Layout:
        """The layout around this sync, given the one within it."""
        if self.mode == "fwd_post":
            return replace(layout, output=self.output)
        if self.mode == "fwd_pre" and self.completes_gradient and layout.input is not None:
            return replace(layout, input=Placement("shard", self.axis))
        return layout


def around(layout: Layout, syncs: Iterable[KnownSync]) -> Layout:
    """The layout of a module together with its syncs, given that of the bare module."""
    for sync in syncs:
        layout = sync.after(layout)
    return layout


def check_syncs(syncs: Iterable[KnownSync], layout: Layout) -> None:
    """Refuse a layout that syncs which are there already would contradict.

    Raises
    ------
    ValueError
        Saying which sync does not fit.
    """
    for sync in syncs:
        if sync.op:
            check_sync(layout, sync.mode, sync.op, sync.axis)
        layout = sync.after(layout)


def check_sync(layout: Layout, mode: str, op: str, axis: int | None) -> None:
    """Refuse a sync that contradicts `layout`.

    Raises
    ------
    ValueError
        Saying what the layout is and which sync fits it.
    """
    if mode == "fwd_post" and layout.output is not None:
        _check_output(layout.output, op, axis)
    elif mode == "bwd_post" and layout.input is not None and layout.input.kind == "shard":
        raise ValueError(
            f"bwd_post {op}: the module's input is {layout.input}, so is its gradient, which is "
            "already complete; bwd_post belongs to the module whose input is whole"
        )
    elif mode == "fwd_pre" and layout.input is not None:
        _check_input(layout.input, op, axis)


def _check_output(output: Placement, op: str, axis: int | None) -> None:
    if output.kind == "partial" and op not in ("all_reduce", "reduce_scatter"):
        raise ValueError(
            f"fwd_post {op}: the module's output is a partial sum, which needs summing; use "
            "'all_reduce' or 'reduce_scatter', or shard the weight along its other axis"
        )
    if output.kind == "replicate" and op in ("all_reduce", "reduce_scatter", "all_gather"):
        raise ValueError(
            f"fwd_post {op}: the module's output is whole on every rank already, so it would be "
            "counted once per rank; leave the sync out"
        )
    if output.kind != "shard":
        return
    if op in ("all_reduce", "reduce_scatter", "scatter"):
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, each rank holds a slice; use "
            f"'all_gather' with axis={output.axis} to make it whole"
        )
    if output.blocks > 1:
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, and a gather would put the ranks' "
            "parts one after the other; gather each block by itself, or keep what follows sharded"
        )
    if "->" in op:
        _check_reshard(op, op[:2], output, "output")
    elif axis is not None and not may_be_axis(axis, output.axis):
        raise ValueError(
            f"fwd_post {op}: the module's output is {output}, not along axis {axis}; "
            f"pass axis={output.axis}"
        )


def _check_input(expected: Placement, op: str, axis: int | None) -> None:
    if "->" in op:
        _check_reshard(op, op[-2:], expected, "input")
    elif expected.kind == "shard" and op == "all_gather" and axis == expected.axis:
        raise ValueError(
            f"fwd_pre {op}: the module expects its input {expected}; gathering along axis {axis} "
            "gives it the whole; leave the sync out"
        )


def _check_reshard(op: str, letters: str, placement: Placement, side: str) -> None:
    """`letters` are the layout of the last two dimensions on this side of the op."""
    if placement.axis not in (-1, -2, None):
        return
    wanted = {"replicate": "RR", "shard": "RS" if placement.axis == -1 else "SR"}
    needed = wanted.get(placement.kind)
    # A sharded sequence (SR) is no contradiction for a module that mixes features only.
    if needed is None or letters == needed or (needed == "RR" and letters == "SR"):
        return
    raise ValueError(
        f"{op}: the module's {side} is {placement}, which reads {needed!r}, not {letters!r}; "
        f"write {needed!r} there"
    )


def may_be_axis(axis: int, known: int | None) -> bool:
    """Whether `axis` can be the axis `known` (from the end); its rank is unknown at schedule time.

    A non-negative axis fits when some number of dimensions makes the two equal; the hook checks
    again when it sees the tensor.
    """
    if known is None:
        return True
    return axis == known if axis < 0 else axis >= 1 or known != -1
