"""Collectives of a schedule as hooks of modules; copies and pickles keep them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slapo.sharding.collectives import copy_to_group
from slapo.sharding.sync import SyncOp
from slapo.wrapper import innermost


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
    """A pre-forward hook (with keyword arguments) that maps the first input tensor.

    The first in the order of the forward's parameters, however it is called; or those that the op
    names.
    """

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Map it."""
        positions = input_names(innermost(module))
        named = getattr(self.function, "argument", None)
        wanted: tuple[str, ...] | list[str] = named or [
            *positions[: len(args)],
            *sorted(kwargs, key=lambda k: positions.index(k) if k in positions else len(positions)),
        ]
        given, found = {**dict(zip(positions, args, strict=False)), **kwargs}, False
        for name in wanted:
            if isinstance(given.get(name), Tensor) and (named or not found):
                given[name], found = self.function(given[name]), True
        if found:
            new = [given[name] for name, _ in zip(positions, args, strict=False)]
            return (*new, *args[len(new) :]), {name: given[name] for name in kwargs}
        for index, value in enumerate(args):  # of a forward that takes any number
            if isinstance(value, Tensor) and not named:
                return (*args[:index], self.function(value), *args[index + 1 :]), kwargs
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
    """

    function: SyncOp

    def __init__(self, op: SyncOp) -> None:
        super().__init__(op, "bwd_post")

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass them on, with a backward of their own."""
        seen: dict[int, Tensor] = {}

        def passed(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    return value
                if id(value) not in seen:  # one that is given twice is one
                    seen[id(value)] = copy_to_group(value, self.function.group.group)
                return seen[id(value)]
            if isinstance(value, (tuple, list, Mapping)):  # named tuples, Transformers' outputs
                return pytree.tree_map_only(Tensor, passed, value)
            return value

        names = self.function.argument
        if names is None:
            return tuple(map(passed, args)), {key: passed(v) for key, v in kwargs.items()}
        named = zip(input_names(innermost(module)), args, strict=False)
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
