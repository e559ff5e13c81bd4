"""Hooks for the collectives of a schedule, and a wrapper for sizes; pickles keep them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from slapo.sharding.sync import SyncOp
from slapo.wrapper import ModuleWrapper, innermost

#: Tensors, and their proxies during torch.fx tracing.
_TENSORS: tuple[Any, ...] = (Tensor, fx.Proxy)
#: Functions that return the sizes of a tensor.
SIZES = (Tensor.size, Tensor.shape.__get__)  # type: ignore[attr-defined]


def _without_tensor(module: Any, what: str, values: tuple[Any, ...]) -> TypeError:
    kinds = [type(value).__name__ for value in values]
    return TypeError(
        f"sync on {type(module).__name__}: {what} has no tensor, in {kinds}; put the sync on the "
        "module that takes or creates the tensor, or pass a hook function"
    )


class SyncHook:
    """A hook of this library, with its function and mode; copies and pickles keep it."""

    def __init__(self, op: Callable[[Tensor], Tensor], mode: str) -> None:
        #: what the user asked for: to compare and to print
        self.op, self._slapo_mode = op, mode
        #: what a call runs; a trace temporarily replaces it (graph/trace/leaves.py)
        self._slapo_carry = op

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op}, {self._slapo_mode!r})"


class InputHook(SyncHook):
    """Pre-forward hook (with keyword arguments) that maps input tensors.

    The default is the first tensor in the order of the forward's parameters, even if passed by
    keyword. An op may name other inputs.
    """

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, keywords = input_names(innermost(module))
        ordered = [*positions, *keywords]
        named = getattr(self.op, "argument", None)
        # The first tensor by the signature, in whatever order the call passes its keywords.
        wanted: tuple[str, ...] | list[str] = named or [
            *positions[: len(args)],
            *sorted(kwargs, key=lambda k: ordered.index(k) if k in ordered else len(ordered)),
        ]
        given, found = {**dict(zip(positions, args, strict=False)), **kwargs}, False
        for name in wanted:
            if isinstance(given.get(name), _TENSORS) and (named or not found):
                given[name], found = self._slapo_carry(given[name]), True
        if found:
            new = [given[name] for name, _ in zip(positions, args, strict=False)]
            # Values beyond the named parameters belong to the forward's *args.
            return (*new, *args[len(new) :]), {name: given[name] for name in kwargs}
        for index, value in enumerate(args):  # for a forward with ``*args``
            if isinstance(value, _TENSORS) and not named:
                return (*args[:index], self._slapo_carry(value), *args[index + 1 :]), kwargs
        raise _without_tensor(module, "the call", (*args, *kwargs.values()))


class OutputHook(SyncHook):
    """Post-forward hook that maps the first output tensor."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__(op, "fwd_post")

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, _TENSORS):
            return self._slapo_carry(output)
        if isinstance(output, Mapping):  # including output objects of Transformers
            for key, value in output.items():
                if isinstance(value, _TENSORS):
                    return _with_item(output, key, self._slapo_carry(value))
        if isinstance(output, (tuple, list)):
            for index, value in enumerate(output):
                if isinstance(value, _TENSORS):
                    new = [*output[:index], self._slapo_carry(value), *output[index + 1 :]]
                    return _rebuilt(output, new)
        raise _without_tensor(module, "the output", (output,))


def _rebuilt(like: Any, items: list[Any]) -> Any:
    # A named tuple takes its items one by one.
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _with_item(output: Mapping[Any, Any], key: Any, value: Tensor) -> Any:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, **{key: value})
    new: Any = copy.copy(output)
    new[key] = value
    return new


class GradientHook(SyncHook):
    """Pre-forward hook that sums gradients of inputs over the group.

    Each input passes through an identity whose backward is the all-reduce.
    """

    op: SyncOp

    def __init__(self, op: SyncOp) -> None:
        super().__init__(op, "bwd_post")
        # The op names the sum of the gradient; in the forward pass an input passes unchanged.
        self._slapo_carry = dataclasses.replace(op, name="all_reduce_grad", argument=None)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen: dict[int, Tensor] = {}

        def passed(tensor: Tensor) -> Tensor:
            if id(tensor) not in seen:  # an input passed twice is summed once
                seen[id(tensor)] = self._slapo_carry(tensor)
            return seen[id(tensor)]

        names = self.op.argument
        if names is None:
            new_args = tuple(_mapped(value, passed) for value in args)
            new_kwargs = {key: _mapped(value, passed) for key, value in kwargs.items()}
            if (args or kwargs) and not seen and torch.is_grad_enabled():
                raise _without_tensor(module, "the call", (*args, *kwargs.values()))
            return new_args, new_kwargs
        named = zip(input_names(innermost(module))[0], args, strict=False)
        new = [_mapped(value, passed) if name in names else value for name, value in named]
        new.extend(args[len(new) :])
        return tuple(new), {k: _mapped(v, passed) if k in names else v for k, v in kwargs.items()}


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Map the tensors in `value`, including those in containers and dataclasses."""
    if isinstance(value, _TENSORS):
        return function(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            new = _mapped(item, function)
            value = value if new is item else _with_item(value, key, new)
    elif isinstance(value, (tuple, list)):
        items = [_mapped(item, function) for item in value]
        if any(new is not item for new, item in zip(items, value, strict=True)):
            value = _rebuilt(value, items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        new = {name: _mapped(item, function) for name, item in fields.items()}
        changed = {name: item for name, item in new.items() if item is not fields[name]}
        value = dataclasses.replace(value, **changed) if changed else value
    return value


def input_names(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional and of the keyword-only parameters of a module's forward."""
    # Dynamo would warn at each compilation that it traces a cached function, and not its cache.
    names_of = _names_of if torch.compiler.is_compiling() else _cached_names
    if "forward" in module.__dict__:
        return names_of(module.forward)
    positional, keywords = names_of(type(module).forward)
    return positional[1:], keywords


def _names_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of positional and of keyword-only parameters."""
    known = inspect.signature(function).parameters.values()
    positional = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(positional), tuple(p.name for p in known if p.kind is p.KEYWORD_ONLY)


_cached_names = functools.lru_cache(maxsize=256)(_names_of)


# --- sizes of arguments --------------------------------------------------------------------------
class LocalSize(ModuleWrapper):
    """Runs a module that reads one size of an argument as this rank's share of it.

    ``batch, length, width = x.shape`` is the size of the full hidden states; views of sharded
    projections need the width on this rank.
    """

    argument: str
    axis: int
    ranks: int

    def __init__(self, mod: nn.Module, argument: str, axis: int, ranks: int) -> None:
        super().__init__(mod)
        self.__dict__.update(argument=argument, axis=axis, ranks=ranks)  # not of the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = input_names(innermost(self.mod))[0]
        tensor = {**dict(zip(names, args, strict=False)), **kwargs}.get(self.argument)
        if not isinstance(tensor, Tensor):  # an argument that was left out
            return self.mod(*args, **kwargs)
        # Dynamo reads `x.shape` without asking modes.
        run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
        return run(self.mod, _Share(tensor, self.axis, self.ranks), args, kwargs)


def _run(mod: nn.Module, share: TorchFunctionMode, args: Any, kwargs: dict[str, Any]) -> Any:
    with share:
        return mod(*args, **kwargs)


class _Share(TorchFunctionMode):
    """Divides one size of a tensor where Python reads it."""

    def __init__(self, tensor: Tensor, axis: int, ranks: int) -> None:
        super().__init__()
        if not -tensor.dim() <= axis < tensor.dim():
            raise IndexError(
                f"an input of shape {tuple(tensor.shape)} has no axis {axis}; set another one"
            )
        self.tensor, self.axis, self.ranks = tensor, axis % tensor.dim(), ranks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SIZES or args[0] is not self.tensor:
            return out
        if isinstance(out, Size):
            sizes = list(out)
            sizes[self.axis] = self._share(sizes[self.axis])
            return Size(sizes)
        axis = args[1] if len(args) > 1 else (kwargs or {})["dim"]
        return self._share(out) if axis % self.tensor.dim() == self.axis else out

    def _share(self, size: int) -> int:
        if size % self.ranks:
            raise ValueError(
                f"axis {self.axis} of an input of shape {tuple(self.tensor.shape)} is not "
                f"divisible by {self.ranks} ranks; use a number of ranks that divides it"
            )
        return size // self.ranks
