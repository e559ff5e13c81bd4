"""A chain of operations as an ``nn.Sequential``: readable, traceable, and not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.fx as fx
from torch import nn

M = TypeVar("M", bound=nn.Module)


def instance_of(base: type[M], name: str) -> M:
    """Make an instance of a subclass that exists for its name; also how a pickle of it is read.

    >>> instance_of(nn.Sequential, "BiasGelu")
    BiasGelu()
    """
    return type(name, (base,), {"__doc__": base.__doc__, "__module__": base.__module__})()


@dataclass(frozen=True)
class _Ref:
    """The place of a value among those that exist when a step runs: inputs, state, results."""

    index: int


@dataclass(frozen=True)
class _Step:
    """The arguments of one child, with references in place of values."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Call(nn.Module):
    """A function, or a method of its first argument, as a module.

    >>> Call("upper")("a"), Call(len)("a")
    ('A', 1)
    """

    def __init__(self, target: Callable[..., Any] | str) -> None:
        super().__init__()
        self.target = target

    def extra_repr(self) -> str:
        """Show the function."""
        if isinstance(self.target, str):
            return f".{self.target}"
        return getattr(self.target, "__name__", repr(self.target))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


class FusedSequential(nn.Sequential):
    """Base class of the sequences that a fusion without compiler makes.

    Unlike in other sequences, a child may use each input and each earlier result.
    """

    _slapo_steps: tuple[_Step, ...] = ()
    _slapo_state: tuple[str, ...] = ()

    def forward(self, *inputs: Any) -> Any:
        """Run the children in order on the inputs of the subgraph in order of first use."""
        values = [*inputs, *(getattr(self, name) for name in self._slapo_state)]
        for child, step in zip(self, self._slapo_steps, strict=True):
            args = [_resolve(value, values) for value in step.args]
            kwargs = {name: _resolve(value, values) for name, value in step.kwargs.items()}
            values.append(child(*args, **kwargs))
        return values[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        return instance_of, (FusedSequential, type(self).__name__), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def sequential_of(module: fx.GraphModule, name: str) -> nn.Sequential:
    """Turn an extracted module into a sequence of the class `name`: a child for each operation.

    The children are called ``"0"``, ``"1"``... The modules are those of `module`; functions are
    wrapped in :class:`Call`.

    >>> sequential_of(fx.symbolic_trace(lambda x, y: (x + y).relu()), "AddRelu")
    AddRelu(
      (0): Call(add)
      (1): Call(.relu)
    )
    """
    sequence = instance_of(FusedSequential, name)
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    state = [node for node in nodes if node.op == "get_attr"]
    calls = [node for node in nodes if node.op.startswith("call_")]
    refs = {node: _Ref(index) for index, node in enumerate([*inputs, *state, *calls])}
    names = _state_names(str(node.target) for node in state)
    for path, attribute in names.items():
        _share(module, path, sequence, attribute)
    for index, node in enumerate(calls):
        is_module = node.op == "call_module"
        child = module.get_submodule(node.target) if is_module else Call(node.target)
        sequence.add_module(str(index), child)
    sequence._slapo_state = tuple(names[str(node.target)] for node in state)
    sequence._slapo_steps = tuple(
        _Step(_refer(node.args, refs), _refer(dict(node.kwargs), refs)) for node in calls
    )
    sequence.training = module.training
    return sequence


def _state_names(paths: Iterable[str]) -> dict[str, str]:
    """Name the state that a sequence reads itself: ``a_b`` for ``a.b`` where that is free."""
    paths = list(dict.fromkeys(paths))
    plain = {path for path in paths if "." not in path and not path.isdigit()}
    taken = {*plain, *dir(FusedSequential)}
    names = {}
    for path in paths:
        name = stem = path.replace(".", "_")
        k = 0
        while path not in plain and (name in taken or name.isdigit()):
            name, k = f"{stem}_{k}", k + 1
        names[path] = name
        taken.add(name)
    return names


def _share(module: nn.Module, path: str, sequence: nn.Module, name: str) -> None:
    """Give the sequence a parameter or buffer that the graph reads."""
    owner, _, field = path.rpartition(".")
    holder = module.get_submodule(owner)
    value = getattr(holder, field)
    if field in holder._buffers:
        persistent = field not in holder._non_persistent_buffers_set
        sequence.register_buffer(name, value, persistent=persistent)
    else:
        setattr(sequence, name, value)


def _refer(value: Any, refs: Mapping[fx.Node, _Ref]) -> Any:
    """Put references in place of nodes, and plain containers in place of those of fx."""
    if isinstance(value, fx.Node):
        return refs[value]
    if isinstance(value, (tuple, list)):
        items = [_refer(item, refs) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _refer(item, refs) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_refer(item, refs) for item in (value.start, value.stop, value.step)))
    return value


def _resolve(value: Any, values: list[Any]) -> Any:
    """Put values in place of references."""
    if isinstance(value, _Ref):
        return values[value.index]
    if isinstance(value, (tuple, list)):
        items = [_resolve(item, values) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _resolve(item, values) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(item, values) for item in (value.start, value.stop, value.step)))
    return value
