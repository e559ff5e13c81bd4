"""Collectives as module hooks: the operations of ``Schedule.sync`` by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slapo.hooks import MODE_ATTRIBUTE
from slapo.sharding.collectives import (
    all_gather,
    copy_to_group,
    parse_reshard,
    reduce_from_group,
    reduce_scatter,
    reshard,
    scatter,
)
from slapo.sharding.layout import REPLICATE, Placement, shard

MODES = ("fwd_pre", "fwd_post", "bwd_post")

#: op -> (modes it works in, keyword arguments it takes)
_OPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_reduce": (("fwd_post", "bwd_post"), ()),
    "all_gather": (("fwd_pre", "fwd_post"), ("axis", "tensor_parallel_output_grad")),
    "reduce_scatter": (("fwd_post",), ("axis",)),
    "scatter": (("fwd_post",), ("axis",)),
}
_RESHARD_MODES = ("fwd_pre", "fwd_post")


@dataclass(frozen=True)
class SyncOp:
    """One collective on one activation.

    Parameters
    ----------
    name
        A key of the table in ``Schedule.sync``, or a reshard such as ``"RS->SR"``.
    group
        The ranks; None for a world of one.
    axis
        Axis of the activation, where the op has one.
    tensor_parallel_output_grad
        Of ``all_gather``: whether ranks use the gathered tensor differently.
    known_axis
        The axis (from the end) that a gathered tensor is known to be sharded along; checked when
        a tensor with its number of dimensions is at hand.
    """

    name: str
    group: dist.ProcessGroup | None
    axis: int | None = None
    tensor_parallel_output_grad: bool = True
    known_axis: int | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Apply the collective."""
        if self.name == "all_reduce":
            return reduce_from_group(tensor, self.group)
        if self.axis is None:
            return reshard(tensor, self.name, self.group)
        self._check_axis(tensor)
        if self.name == "all_gather":
            keep = self.tensor_parallel_output_grad
            return all_gather(tensor, self.group, self.axis, tensor_parallel_output_grad=keep)
        function = reduce_scatter if self.name == "reduce_scatter" else scatter
        return function(tensor, self.group, self.axis)

    def _check_axis(self, tensor: Tensor) -> None:
        dims = tensor.dim()
        if self.known_axis is not None and (self.axis or 0) % dims != self.known_axis % dims:
            raise ValueError(
                f"{self.name}: the activation of shape {tuple(tensor.shape)} is sharded along axis "
                f"{self.known_axis}, not {self.axis}; pass axis={self.known_axis}"
            )

    def output(self) -> Placement:
        """How the result lies across the ranks."""
        if self.name in ("all_reduce", "all_gather"):
            return REPLICATE
        if "->" in self.name:
            return {"RR": REPLICATE, "RS": shard(-1), "SR": shard(-2)}[self.name[-2:]]
        negative = self.axis is not None and self.axis < 0
        return Placement("shard", self.axis if negative else None)

    def __str__(self) -> str:
        return self.name if self.axis is None else f"{self.name} axis={self.axis}"


def make_sync_op(
    mode: str, name: str, group: dist.ProcessGroup | None, arguments: dict[str, Any]
) -> SyncOp:
    """The op called `name` in `mode`.

    Raises
    ------
    ValueError
        For an unknown op, one that does not work in this mode, or a missing axis.
    TypeError
        For arguments the op does not take.
    """
    modes: tuple[str, ...]
    keywords: tuple[str, ...]
    if "->" in name:
        parse_reshard(name)
        entry: tuple[tuple[str, ...], tuple[str, ...]] = (_RESHARD_MODES, ())
    elif name in _OPS:
        entry = _OPS[name]
    else:
        raise ValueError(
            f"unknown sync op {name!r}; known are {[*_OPS]} and reshards such as 'RS->RR'"
        )
    modes, keywords = entry
    if mode not in modes:
        raise ValueError(f"sync op {name!r} works in modes {list(modes)}, not in {mode!r}")
    unknown = [key for key in arguments if key not in keywords]
    if unknown:
        raise TypeError(f"sync op {name!r} does not take {unknown}; it takes {list(keywords)}")
    if "axis" in keywords and type(arguments.get("axis")) is not int:
        raise ValueError(
            f"sync op {name!r} needs axis=, an axis of the activation; got {arguments.get('axis')}"
        )
    return SyncOp(name, group, **arguments)


def check_mode(mode: str) -> None:
    """Raise ``ValueError`` unless `mode` is one of the three."""
    if mode not in MODES:
        raise ValueError(f"unknown sync mode {mode!r}; known are {list(MODES)}")


# --- hooks -----------------------------------------------------------------------------------
def pre_hook(function: Callable[[Tensor], Tensor], mode: str) -> Callable[..., Any]:
    """A pre-forward hook (with keyword arguments) that maps the first input tensor."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:index], function(value), *args[index + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: function(value)}
        raise TypeError(f"sync on {type(module).__name__}: the call has no tensor argument")

    return _labelled(hook, function, mode)


def post_hook(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A post-forward hook that maps the first output tensor."""

    def hook(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return function(output)
        if type(output) in (tuple, list):
            for index, value in enumerate(output):
                if isinstance(value, Tensor):
                    new = [*output[:index], function(value), *output[index + 1 :]]
                    return type(output)(new)
        raise TypeError(
            f"sync on {type(module).__name__}: the output is a {type(output).__name__}, not a "
            "tensor or a tuple of some; put the sync on the module that makes the tensor, or pass "
            "a hook function"
        )

    return _labelled(hook, function, "fwd_post")


def gradient_hook(group: dist.ProcessGroup | None) -> Callable[..., Any]:
    """A pre-forward hook that sums the gradient of the first input tensor over the group."""
    return pre_hook(lambda tensor: copy_to_group(tensor, group), "bwd_post")


def _labelled(hook: Callable[..., Any], function: Any, mode: str) -> Callable[..., Any]:
    setattr(hook, MODE_ATTRIBUTE, mode)
    hook.__name__ = hook.__qualname__ = f"sync_{mode}"
    hook._slapo_op = function  # type: ignore[attr-defined]
    return hook
