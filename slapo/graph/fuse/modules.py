"""Modules that run a graph, compiled by inductor or as a sequence of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.trace.module import code_of

M = TypeVar("M", bound=nn.Module)

_CODE = "_slapo_code"


def _instance_of(base: type[M], name: str) -> M:
    """Instantiate a subclass made for its name; pickles use this too."""
    return type(name, (base,), {"__doc__": base.__doc__, "__module__": base.__module__})()


class _GraphRunner(nn.Module):
    """Runs a graph over its own children; copies and pickles regenerate the code."""

    _slapo_graph: fx.Graph

    def forward(self, *inputs: Any) -> Any:
        return self.__dict__[_CODE](self, *inputs)

    def _set_graph(self, graph: fx.Graph) -> None:
        self._slapo_graph = graph
        self.__dict__[_CODE] = code_of(graph)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made by `type()` and has no import path; it is made again by name.
        kind = type(self)
        state = {name: value for name, value in vars(self).items() if name != _CODE}
        return _instance_of, (kind.__bases__[0], kind.__name__), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_graph(self._slapo_graph)


class CompiledModule(_GraphRunner):
    """Base class of modules fused by inductor.

    ``torch.compile(module)`` would put ``_orig_mod`` into all state names. ``module.compile()`` is
    lost by a copy and cannot be pickled.
    """

    def _set_graph(self, graph: fx.Graph) -> None:
        super()._set_graph(graph)
        self.__dict__[_CODE] = torch.compile(self.__dict__[_CODE], backend="inductor")


class Call(nn.Module):
    """A function, or a method of its first argument, as a module."""

    def __init__(self, target: Callable[..., Any] | str) -> None:
        super().__init__()
        self.target = target

    def extra_repr(self) -> str:
        if isinstance(self.target, str):
            return f".{self.target}"
        return getattr(self.target, "__name__", repr(self.target))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


class FusedSequential(_GraphRunner, nn.Sequential):
    """Sequence whose children may use each input and each earlier result."""


def compiled_late(module: fx.GraphModule, name: str) -> CompiledModule:
    """Make a module of class `name` that inductor compiles on its first call."""
    compiled = _instance_of(CompiledModule, name)
    for path, child in module._modules.items():
        compiled.add_module(path, child)
    compiled.training = module.training
    compiled._set_graph(module.graph)
    return compiled


def sequential_of(module: fx.GraphModule, name: str) -> nn.Sequential:
    """Turn an extracted module into a sequence of class `name`, one child per operation."""
    sequence = _instance_of(FusedSequential, name)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op.startswith("call_"):
            target: Any = node.target
            child = module.get_submodule(target) if node.op == "call_module" else Call(target)
            copies[node].op, copies[node].target = "call_module", str(len(sequence))
            sequence.add_module(str(len(sequence)), child)
    sequence.training = module.training
    sequence._set_graph(graph)
    return sequence
