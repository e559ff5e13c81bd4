"""Patterns: small functions or modules that describe a part of a graph.

A pattern is ordinary PyTorch code. It is traced once, and :mod:`slapo.graph.match.search` matches
the trace with the graph of a model. The parameters of the pattern are wildcards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from types import BuiltinFunctionType
from typing import Any

import torch.fx as fx
from torch import nn

PATTERN_MODULE = "slapo_pattern_module"
"""Key of ``node.meta``: the module that a node of a pattern calls."""

PATTERN_TENSOR = "slapo_pattern_tensor"
"""Key of ``node.meta``: the tensor that a node of a pattern stands for."""

PATTERN_OF_CHAIN = "slapo_pattern_of_chain"
"""Key of ``node.meta`` in patterns made of a chain, where settings such as dropout's may be any.

For a node that a rewrite has made the value is ``"open"``: constants may be any.
"""

WILDCARD_OPS = ("placeholder", "get_attr")

_ACTIVE_TRACER: ContextVar[fx.Tracer | None] = ContextVar("slapo_pattern_tracer", default=None)


def call_module(name_regex: str, *args: Any, **kwargs: Any) -> Any:
    r"""Match, within a pattern, the call of any module whose path matches.

    Arguments stated in the pattern must match those of the call. Other arguments of the call are
    free, so ``call_module("attention", x)`` also finds ``self.attention(x, mask=None)``. The path
    is matched from its start (:func:`re.match`): ``"fc"`` also matches ``"fc_out"``.

    >>> import torch.nn.functional as F
    >>> def pattern(x):
    ...     return F.gelu(call_module(r"fc\d", x))
    >>> [node.op for node in trace_pattern(pattern).nodes]
    ['placeholder', 'call_function', 'call_function', 'output']
    """
    tracer = _ACTIVE_TRACER.get()
    if tracer is None:
        raise ValueError(
            f"call_module({name_regex!r}, ...) was called outside of a pattern; "
            "use it in a function or a Pattern that is passed to find()"
        )
    compile_name(name_regex)
    return tracer.create_proxy("call_function", call_module, (name_regex, *args), kwargs)


class Pattern(nn.Module):
    """Base class of patterns written as modules.

    Submodules match by class. One without parameters, such as ``nn.GELU()``, matches any spelling
    of the same operator with the same settings. One with parameters, such as ``nn.Linear(1, 1)``,
    matches every call of a module of exactly that class, with any sizes and weights. A
    :class:`ModulePattern` matches by path. Tensors that the pattern holds, or that a pattern
    function captures, are constants. They match tensors of equal dtype, shape and values only.

    >>> class Mlp(Pattern):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = ModulePattern("fc1")
    ...         self.act = nn.ReLU()
    ...     def forward(self, x):
    ...         return self.act(self.fc(x))
    >>> len(trace_pattern(Mlp).nodes)
    4
    """


class ModulePattern(nn.Module):
    """Submodule of a :class:`Pattern` that matches like :func:`call_module`.

    >>> ModulePattern("query|key|value")
    ModulePattern('query|key|value')
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        compile_name(name)
        self.name_regex = name

    def extra_repr(self) -> str:
        """Show the regular expression."""
        return repr(self.name_regex)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Match the call of a module; valid within a pattern only."""
        return call_module(self.name_regex, *args, **kwargs)


class _PatternTracer(fx.Tracer):
    """Tracer that enters only containers and nested patterns."""

    def create_arg(self, a: Any) -> Any:
        """Treat a captured parameter of another model as a plain tensor."""
        # fx refuses a parameter that the root does not have.
        if isinstance(a, nn.Parameter) and all(a is not own for own in self.root.parameters()):
            a = a.detach()
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, (Pattern, ModulePattern, nn.Sequential))


def trace_pattern(pattern: Callable[..., Any] | type[nn.Module] | nn.Module) -> fx.Graph:
    """Trace a pattern; placeholders are wildcards. Raises ValueError or TypeError."""
    root = _instantiate(pattern)
    tracer = _PatternTracer()
    token = _ACTIVE_TRACER.set(tracer)
    attributes = getattr(root, "__dict__", {})
    before = set(attributes)
    try:
        graph = tracer.trace(root)
        _keep_objects(graph, tracer.root)
    except Exception as error:
        raise ValueError(
            f"the pattern {_describe(pattern)} cannot be traced: {type(error).__name__}: {error}; "
            "a pattern calls tensor operations on its parameters, without control flow"
        ) from error
    finally:
        _ACTIVE_TRACER.reset(token)
        for name in set(attributes) - before:  # fx stores the tensors that a forward captures there
            del attributes[name]
    output = graph.output_node()
    if all(node.op in WILDCARD_OPS for node in output.all_input_nodes):
        raise ValueError(
            f"the pattern {_describe(pattern)} returns no operation; "
            "return the value (or a tuple of the values) that the pattern computes"
        )
    return graph


def _instantiate(pattern: Any) -> Callable[..., Any]:
    """Instantiate a pattern class; return other patterns unchanged."""
    if isinstance(pattern, BuiltinFunctionType):
        raise TypeError(
            f"the pattern is torch's own {pattern.__name__!r}, whose arguments cannot be read; "
            f"pass a function that calls it: lambda x: {pattern.__name__}(x)"
        )
    return pattern() if isinstance(pattern, type) else pattern


def _keep_objects(graph: fx.Graph, root: nn.Module) -> None:
    """Store the modules and constants of a graph on its nodes, so that it needs no root."""
    for node in graph.nodes:
        if node.op == "call_module":
            node.meta[PATTERN_MODULE] = root.get_submodule(node.target)
        elif node.op == "get_attr":
            path, _, name = node.target.rpartition(".")
            owner = root.get_submodule(path)
            is_weight = name in owner._parameters or name in owner._buffers
            # The weights of a layer are arbitrary, so they match any.
            if isinstance(owner, Pattern) or not is_weight:
                node.meta[PATTERN_TENSOR] = getattr(owner, name)


def compile_name(regex: str) -> re.Pattern[str]:
    """Compile a regular expression for module paths; raises TypeError or ValueError."""
    try:
        return re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"{regex!r} is not a regular expression: {error}; write '.*' for any text"
        ) from error


def _describe(pattern: Any) -> str:
    if isinstance(pattern, nn.Module):
        return type(pattern).__name__
    return str(getattr(pattern, "__qualname__", pattern))
