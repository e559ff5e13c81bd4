"""``.set(name, value)``."""

from __future__ import annotations

import difflib
import re
from typing import Any

from torch import Tensor, fx, nn

from slapo.errors import SlapoError, with_nearest
from slapo.graph.trace.module import Traced, origin_of
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called, wrap
from slapo.sharding.rules import tensor_of_size
from slapo.sharding.sync_hooks import LocalSize, input_names
from slapo.wrapper import innermost, replace_innermost, with_wrapped

#: A size that a forward reads off an argument.
SIZE = re.compile(r"(\w+)\.shape\[(-?\d+)\]")
_OF_TORCH = frozenset(vars(nn.Module()))


class _NotGiven:
    """Marks an omitted argument that may be None."""

    def __repr__(self) -> str:
        return "<not given>"


_NONE = _NotGiven()


class SetPrimitive(Primitive, name="set"):
    """Set a plain attribute of the module: a number of heads, a size, a flag.

    ``mod.num_heads == 8 --> mod.num_heads == 4``

    Modules store sizes beside their weights and reshape by them, and sharding cannot infer which of
    these sizes must change. A change made through the schedule is part of its record, and
    :func:`slapo.build` reports ranks that set different values.

    Parameters
    ----------
    name
        An existing attribute of the module. Or a size that the forward reads off an argument, as
        ``"x.shape[-1]"``, without `value` and `whole`: ``x.shape`` and ``x.size()`` give this
        rank's share of it from then on, as the views of sharded projections need. ``torch.compile``
        leaves such a module out of its graphs.
    value
        New value. A number, bool, string, tuple or list must keep its type.
    whole
        Global value, instead of `value`: a number, or a tuple or list of numbers. Sets ``whole //
        world_size``, so the recorded call is right for any number of ranks.

    Raises
    ------
    AttributeError
        If the module has no such attribute; the message lists the nearest names.
    ValueError
        If the attribute repeats the size of a weight and the new value would differ from it, if
        `whole` is not divisible, or if the forward has no such argument.
    TypeError
        If the attribute is a module, a tensor, a method or a property; if the type differs; or
        unless exactly one of `value` and `whole` is given.
    SlapoError
        If the module is traced already and the value is built into its graph.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.MultiheadAttention(8, 4))
    >>> sch.set("num_heads", 2).mod.num_heads
    2
    >>> sch.set("num_heads", whole=4).mod.num_heads  # a world of one
    4
    """

    @staticmethod
    def apply(sch: Node, /, name: str, value: Any = _NONE, whole: Any = None) -> Node:
        if size := SIZE.fullmatch(str(name)):
            if value is not _NONE or whole is not None:
                raise TypeError(f"{name!r} is a share of what it is at each call; pass no value")
            _share_size(sch, size[1], int(size[2]))
            return sch
        value = _one_of(name, value, whole, sch.world_size)
        module = innermost(sch.mod)
        # A Traced module captures again for changed attributes; a graph of torch.fx cannot.
        if isinstance(module, fx.GraphModule) and not isinstance(module, Traced):
            raise SlapoError(
                f"{type(module).__name__} was traced with {name!r} built into its graph; set it "
                "before the trace"
            )
        check_attribute(module, name, value)
        _check_size(module, name, value)
        check_called(sch)
        setattr(module, name, value)
        return sch


def _share_size(sch: Node, argument: str, axis: int) -> None:
    takes = [name for names in input_names(innermost(sch.mod)) for name in names]
    if argument not in takes:
        raise ValueError(
            with_nearest(
                argument, takes, f"the forward has no argument {argument!r}; it takes {takes}"
            )
        )
    for module in with_wrapped(sch.mod):
        if isinstance(module, LocalSize) and (module.argument, module.axis) == (argument, axis):
            raise ValueError("this size is a rank's share already; leave the second call out")
    bare = innermost(sch.mod)
    made = LocalSize(bare, argument, axis, sch.world_size)
    if bare is sch.mod:
        wrap(sch, made)
    else:  # within the others: a recomputation reads the same sizes
        sch.set_module(replace_innermost(sch.mod, made))


def _one_of(name: str, value: Any, whole: Any, world_size: int) -> Any:
    if (value is _NONE) == (whole is None):
        raise TypeError(
            f"got {'neither' if whole is None else 'both'} of value and whole; pass the value of "
            f"{name!r}, or as whole= a number to divide over the ranks"
        )
    return value if whole is None else _part(name, whole, world_size)


def _part(name: str, whole: Any, world_size: int) -> Any:
    if isinstance(whole, (tuple, list)):
        return type(whole)(_part(name, item, world_size) for item in whole)
    if type(whole) is not int:
        raise TypeError(f"whole is {whole!r}; pass an integer, or a tuple or a list of them")
    if whole % world_size:
        raise ValueError(
            f"whole={whole} of {name!r} is not divisible by world_size {world_size}; pass a "
            "multiple of it, or pass this rank's value as value="
        )
    return whole // world_size


def check_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Raise unless `name` is a plain attribute and `value` fits it."""
    kind = type(module).__name__
    if not isinstance(name, str) or not hasattr(module, name):
        own = [each for each in vars(module) if not each.startswith("_") and each != "training"]
        near = difflib.get_close_matches(str(name), own, n=3) or own
        raise AttributeError(f"{kind} has no attribute {name!r}; set one of {near}")
    old = getattr(module, name)
    plain = name in vars(module) and name not in _OF_TORCH
    if isinstance(old, (nn.Module, Tensor)) or isinstance(value, (nn.Module, Tensor)):
        raise TypeError(
            f"{name!r} of {kind} is, or would be, a tensor or a module; use replace or shard"
        )
    if callable(old) or not (plain or name in _class_constants(origin_of(module))):
        raise TypeError(
            f"{name!r} of {kind} is {old!r}, not a plain attribute; set the attribute behind it"
        )
    # type() rather than isinstance(): True is an int, and 8 / 2 a float that reshapes refuse.
    if isinstance(old, (bool, int, float, str, tuple, list)) and type(value) is not type(old):
        raise TypeError(
            f"{name!r} of {kind} is {old!r}, of type {type(old).__name__}, and {value!r} is of "
            f"type {type(value).__name__}; pass a value of the same type (divide sizes with //)"
        )


def _check_size(module: nn.Module, name: str, value: Any) -> None:
    """Raise if the attribute repeats the size of a tensor and `value` differs from that size."""
    repeats = tensor_of_size(module, name)
    size = value if repeats is None else getattr(module, repeats[0]).shape[repeats[1]]
    if repeats is not None and value != size:
        raise ValueError(
            f"{name!r} of {type(module).__name__} is the size of its {repeats[0]!r} along axis "
            f"{repeats[1]}, which is {size}; call shard({repeats[0]!r}, "
            f"axis={repeats[1]}), which sets both"
        )


def _class_constants(kind: type[nn.Module]) -> set[str]:
    """Names of class constants, up to ``nn.Module``, that an instance may override."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return {
        name
        for base in bases
        for name, value in vars(base).items()
        # Functions and properties are descriptors, with __get__; constants are not.
        if not name.startswith("__") and not hasattr(type(value), "__get__")
    }
