"""Patterns: small functions or modules that say which part of a graph a user means.

A pattern is ordinary PyTorch code. It is traced once, and the trace is laid over the graph of a
model by :mod:`slapo.graph.match.search`. The parameters of the pattern are wildcards.
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
    r"""Stand, within a pattern, for the call of any module whose path matches.

    Arguments that the pattern states must match those of the call. Further arguments of the call
    are free, so ``call_module("attention", x)`` also finds ``self.attention(x, mask=None)``. The
    path is compared by :func:`re.match`, from its start: ``"fc"`` also matches ``"fc_out"``.

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
            "use it in a function or a Pattern that is handed to find()"
        )
    compile_name(name_regex)
    return tracer.create_proxy("call_function", call_module, (name_regex, *args), kwargs)


class Pattern(nn.Module):
    """Base class of patterns that are written as modules.

    Submodules take part by class: one without parameters, such as ``nn.GELU()``, matches any
    spelling of the same operator with the same settings; one with parameters, such as
    ``nn.Linear(1, 1)``, matches every call of a module of exactly that class, whatever its sizes
    and weights. A :class:`ModulePattern` matches by path. A tensor that the pattern itself holds is
    a constant, as are those that a pattern function captures: it matches a tensor of the same
    dtype, shape and values only.

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Define the pattern; subclasses override this."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward(); write the pattern")


class ModulePattern(nn.Module):
    """A submodule of a :class:`Pattern` that acts as :func:`call_module` does.

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
        """Stand for the call of a module; only within a pattern."""
        return call_module(self.name_regex, *args, **kwargs)


class _PatternTracer(fx.Tracer):
    """Keeps submodules whole, except for containers and nested patterns."""

    def create_arg(self, a: Any) -> Any:
        """Take a parameter of some model, which a pattern function captures, as any tensor."""
        if isinstance(a, nn.Parameter) and all(a is not own for own in self.root.parameters()):
            a = a.detach()
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the trace stops at `m`."""
        return not isinstance(m, (Pattern, ModulePattern, nn.Sequential))


def trace_pattern(pattern: Callable[..., Any] | type[nn.Module] | nn.Module) -> fx.Graph:
    """Trace a pattern, whose placeholders are wildcards; ``ValueError``, ``TypeError`` if none."""
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
        for name in set(attributes) - before:  # fx puts the tensors that a forward captures there
            del attributes[name]
    output = graph.output_node()
    if all(node.op in WILDCARD_OPS for node in output.all_input_nodes):
        raise ValueError(
            f"the pattern {_describe(pattern)} returns no operation; "
            "return the value (or a tuple of the values) that the pattern computes"
        )
    return graph


def _instantiate(pattern: Any) -> Callable[..., Any]:
    """Return an instance if `pattern` is a class, else `pattern` itself."""
    kinds = "pass a function, a Pattern or a regular expression"
    if isinstance(pattern, type) and not issubclass(pattern, nn.Module):
        raise TypeError(
            f"a pattern class must derive from Pattern, got {pattern.__name__}; {kinds}"
        )
    if not callable(pattern):
        raise TypeError(f"the pattern is {pattern!r}; {kinds}")
    if isinstance(pattern, BuiltinFunctionType):
        raise TypeError(
            f"the pattern is torch's own {pattern.__name__!r}, whose arguments cannot be read; "
            f"pass a function that calls it: lambda x: {pattern.__name__}(x)"
        )
    if not isinstance(pattern, type):
        return pattern
    try:
        made: nn.Module = pattern()
    except TypeError as error:
        raise ValueError(
            f"the pattern class {pattern.__name__} cannot be made without arguments "
            f"({error}); pass an instance"
        ) from error
    return made


def _keep_objects(graph: fx.Graph, root: nn.Module) -> None:
    """Store the modules and constants that a graph names on its nodes: it then stands alone."""
    for node in graph.nodes:
        if node.op == "call_module":
            node.meta[PATTERN_MODULE] = root.get_submodule(node.target)
        elif node.op == "get_attr":
            path, _, name = node.target.rpartition(".")
            owner = root.get_submodule(path)
            is_weight = name in owner._parameters or name in owner._buffers
            # The weights of a layer are what it happened to be made with: they stand for any.
            if isinstance(owner, Pattern) or not is_weight:
                node.meta[PATTERN_TENSOR] = getattr(owner, name)


def compile_name(regex: str) -> re.Pattern[str]:
    """Compile a regular expression on paths of modules, or raise ``TypeError``, ``ValueError``."""
    if not isinstance(regex, str):
        raise TypeError(f"the name of a module is a regular expression (str), got {regex!r}")
    try:
        return re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"{regex!r} is not a regular expression: {error}; write '.*' for any text"
        ) from error


def _describe(pattern: Any) -> str:
    """Name a pattern in a message."""
    if isinstance(pattern, nn.Module):
        return type(pattern).__name__
    return str(getattr(pattern, "__qualname__", pattern))
