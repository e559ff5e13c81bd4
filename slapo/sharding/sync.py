"""The operations of ``Schedule.sync``: a table of them, and collectives as module hooks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slapo.errors import with_nearest
from slapo.sharding.collectives import (
    all_gather,
    copy_to_group,
    parse_reshard,
    reduce_from_group,
    reduce_scatter,
    reshard,
    scatter,
)
from slapo.sharding.groups import GroupHandle
from slapo.sharding.guards import refuse_replicas_of_slices
from slapo.sharding.layout import REPLICATE, Placement, shard
from slapo.wrapper import innermost

MODES = ("fwd_pre", "fwd_post", "bwd_post")


@dataclass(frozen=True)
class _Row:
    """What is known of one operation.

    Parameters
    ----------
    modes
        In which it works.
    keywords
        Arguments that it takes.
    run
        The collective, which autograd differentiates into its conjugate.
    output
        How the result lies across the ranks.
    """

    modes: tuple[str, ...]
    keywords: tuple[str, ...]
    run: Callable[[SyncOp, Tensor], Tensor]
    output: Callable[[SyncOp], Placement]


@dataclass(frozen=True)
class SyncOp:
    """One collective on one activation.

    Parameters
    ----------
    name
        A key of the table in ``Schedule.sync``, or a reshard such as ``"RS->SR"``.
    group
        Handle of the ranks.
    axis
        Axis of the activation, where the op has one.
    tensor_parallel_output_grad
        Of ``all_gather``: whether ranks use the gathered tensor differently.
    argument
        Of ``all_reduce`` in the mode ``bwd_post``: names of the inputs it is for; None for all.
    known_axis
        The axis (from the end) that a gathered tensor is known to be sharded along; checked when
        a tensor with its number of dimensions is at hand.
    """

    name: str
    group: GroupHandle
    axis: int | None = None
    tensor_parallel_output_grad: bool = True
    argument: tuple[str, ...] | None = None
    known_axis: int | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Apply the collective."""
        refuse_replicas_of_slices(self.group)
        if self.axis is not None:
            self._check_axis(tensor, self.axis)
        return _row(self.name).run(self, tensor)

    def _check_axis(self, tensor: Tensor, axis: int) -> None:
        dims = tensor.dim()
        if self.known_axis is not None and axis % dims != self.known_axis % dims:
            raise ValueError(
                f"{self.name}: the activation of shape {tuple(tensor.shape)} is sharded along axis "
                f"{self.known_axis}, not {axis}; pass axis={self.known_axis}"
            )

    def output(self) -> Placement:
        """How the result lies across the ranks."""
        return _row(self.name).output(self)

    def __str__(self) -> str:
        return self.name if self.axis is None else f"{self.name} axis={self.axis}"


def _run_all_gather(op: SyncOp, tensor: Tensor) -> Tensor:
    keep = op.tensor_parallel_output_grad
    return all_gather(tensor, op.group.group, op.axis or 0, tensor_parallel_output_grad=keep)


def _own_slice(op: SyncOp) -> Placement:
    # An axis from the front has no known place from the end.
    return Placement("shard", op.axis if op.axis is not None and op.axis < 0 else None)


_TABLE = {
    "all_reduce": _Row(
        ("fwd_post", "bwd_post"),
        ("argument",),
        lambda op, tensor: reduce_from_group(tensor, op.group.group),
        lambda op: REPLICATE,
    ),
    "all_gather": _Row(
        ("fwd_pre", "fwd_post"),
        ("axis", "tensor_parallel_output_grad"),
        _run_all_gather,
        lambda op: REPLICATE,
    ),
    "reduce_scatter": _Row(
        ("fwd_post",),
        ("axis",),
        lambda op, tensor: reduce_scatter(tensor, op.group.group, op.axis or 0),
        _own_slice,
    ),
    "scatter": _Row(
        ("fwd_post",),
        ("axis",),
        lambda op, tensor: scatter(tensor, op.group.group, op.axis or 0),
        _own_slice,
    ),
}
_RESHARD = _Row(
    ("fwd_pre", "fwd_post"),
    (),
    lambda op, tensor: reshard(tensor, op.name, op.group.group),
    lambda op: {"RR": REPLICATE, "RS": shard(-1), "SR": shard(-2)}[op.name[-2:]],
)


def _row(name: str) -> _Row:
    return _TABLE.get(name, _RESHARD)


def make_sync_op(mode: str, name: str, group: GroupHandle, arguments: Mapping[str, Any]) -> SyncOp:
    """The op called `name` in `mode`.

    Raises
    ------
    ValueError
        For an unknown op, one that does not work in this mode, or a missing axis.
    TypeError
        For arguments the op does not take.
    """
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
    keywords = [key for key in row.keywords if key != "argument" or mode == "bwd_post"]
    unknown = [key for key in arguments if key not in keywords]
    if unknown:
        raise TypeError(f"sync op {name!r} does not take {unknown}; it takes {keywords}")
    if "axis" in keywords and type(arguments.get("axis")) is not int:
        raise ValueError(
            f"sync op {name!r} needs an axis of the activation, got {arguments.get('axis')!r}; "
            "pass axis=-1 for features"
        )
    given = dict(arguments)
    if given.get("argument") is not None:
        given["argument"] = _names(given["argument"])
    return SyncOp(name, group, **given)


def _names(argument: Any) -> tuple[str, ...]:
    names = (argument,) if isinstance(argument, str) else argument
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"argument is {argument!r}; pass the name of an input of the module, or several"
        )
    return tuple(names)


def check_mode(mode: str) -> None:
    """Raise ``ValueError`` unless `mode` is one of the three."""
    if mode not in MODES:
        raise ValueError(f"unknown sync mode {mode!r}; known are {list(MODES)}")


# --- hooks -----------------------------------------------------------------------------------
class SyncHook:
    """A hook of this library: what it does, and in which mode; copies and pickles keep it.

    Parameters
    ----------
    function
        Tensor -> tensor.
    mode
        As in ``Schedule.sync``.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], mode: str) -> None:
        self.function, self._slapo_mode = function, mode

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.function}, {self._slapo_mode!r})"


class InputHook(SyncHook):
    """A pre-forward hook (with keyword arguments) that maps the first input tensor."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Map it."""
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:index], self.function(value), *args[index + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: self.function(value)}
        raise TypeError(
            f"sync on {type(module).__name__}: the call has no tensor argument; put the sync on "
            "the module that takes the tensor"
        )


class OutputHook(SyncHook):
    """A post-forward hook that maps the first output tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function, "fwd_post")

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Map it."""
        if isinstance(output, Tensor):
            return self.function(output)
        if isinstance(output, Mapping):  # as Transformers' output objects are, too
            for key, value in output.items():
                if isinstance(value, Tensor):
                    return _with_item(output, key, self.function(value))
        if isinstance(output, (tuple, list)):
            for index, value in enumerate(output):
                if isinstance(value, Tensor):
                    new = [*output[:index], self.function(value), *output[index + 1 :]]
                    return type(output)(*new) if hasattr(output, "_fields") else type(output)(new)
        raise TypeError(
            f"sync on {type(module).__name__}: the output is a {type(output).__name__} without a "
            "tensor that could be mapped; put the sync on the module that makes the tensor, or "
            "pass a hook function"
        )


def _with_item(output: Mapping[Any, Any], key: Any, value: Tensor) -> Any:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, **{key: value})
    new: Any = copy.copy(output)
    new[key] = value
    return new


class GradientHook(SyncHook):
    """A pre-forward hook that sums gradients of inputs over the group.

    Parameters
    ----------
    op
        With the names of the inputs, or None for all that need a gradient.
    module
        That it is for; another of its class may take its place.
    """

    def __init__(self, op: SyncOp, module: nn.Module) -> None:
        super().__init__(op, "bwd_post")
        self._names, self._group = op.argument, op.group
        self._positions = (type(module), input_names(module))

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass them on, with a backward of their own."""
        refuse_replicas_of_slices(self._group)
        seen: dict[int, Tensor] = {}

        def passed(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    return value
                if id(value) not in seen:  # one that is given twice is one
                    seen[id(value)] = copy_to_group(value, self._group.group)
                return seen[id(value)]
            if type(value) in (tuple, list):
                return type(value)([passed(item) for item in value])
            if type(value) is dict:
                return {key: passed(item) for key, item in value.items()}
            return value

        names = self._names
        if names is None:
            return tuple(map(passed, args)), {key: passed(v) for key, v in kwargs.items()}
        bare = innermost(module)
        if type(bare) is not self._positions[0]:
            self._positions = (type(bare), input_names(bare))
        named = zip(self._positions[1], args, strict=False)
        new = [passed(value) if name in names else value for name, value in named]
        new.extend(args[len(new) :])
        return tuple(new), {k: passed(v) if k in names else v for k, v in kwargs.items()}


def input_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a module's forward."""
    if "forward" not in module.__dict__:
        return _names_of(type(module).forward)[1:]
    return _names_of(module.forward)


@functools.lru_cache(maxsize=256)
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
