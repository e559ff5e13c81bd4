"""A graph to look at where nobody says what a module is called with.

It is torch.fx's own trace. It never runs: a module with rewrites runs captures, which are made
when it is called. So a proxy that answers wrongly can mislead a search, and no number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.leaves import IsLeaf, sync_hooks
from slapo.graph.trace.nests import OWNER
from slapo.graph.trace.nodes import add_placeholder, spare_self
from slapo.graph.trace.state import attributes_kept, generators_kept

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def preview(
    module: nn.Module, is_leaf: IsLeaf, concrete_args: Mapping[str, Any] | None = None
) -> tuple[fx.Graph, frozenset[str]]:
    """Trace a module with proxies; returns the graph, and the paths whose operations it holds.

    Parameters with a default other than None, and those in `concrete_args`, are constants of it.

    Raises
    ------
    TraceError
        If proxies do not survive its forward.

    Examples
    --------
    >>> graph, _ = preview(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda module, path: True)
    >>> [node.target for node in graph.nodes]
    ['input', '0', '1', 'output']
    """
    tracer = _Tracer(is_leaf, constants_of(module, concrete_args or {}))
    with attributes_kept(module), generators_kept(), _syncs_shown(module, tracer):
        try:
            graph = tracer.trace(module)
        except TraceError:
            raise
        except fx.proxy.TraceError as error:
            raise TraceError("a branch or loop depends on a tensor or its size") from error
        except Exception as error:  # of any code that proxies run
            first = next(iter(str(error).strip().splitlines()), "")
            raise TraceError(f"{type(error).__name__}: {first}") from error
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None) or {}
        paths = [str(path) for path, _ in stack.values()]
        node.meta[OWNER] = paths[-1 - (node.op == "call_module")] if len(paths) > 1 else ""
    return graph, frozenset(tracer.entered)


@contextmanager
def _syncs_shown(module: nn.Module, tracer: fx.Tracer) -> Iterator[None]:
    """Within the block the collective of a sync is one node."""
    hooks = [(hook, hook._slapo_carry) for hook in sync_hooks(module)]
    for hook, carry in hooks:
        hook._slapo_carry = partial(_as_node, tracer, carry)
    try:
        yield
    finally:
        for hook, carry in hooks:
            hook._slapo_carry = carry


def _as_node(tracer: fx.Tracer, function: Any, value: Any) -> Any:
    return tracer.create_proxy("call_function", function, (value,), {})


def constants_of(module: nn.Module, concrete_args: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a preview has as constants, and their values."""
    parameters = inspect.signature(module.forward).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind not in _VARIADIC}
    fixed = {k: v for k, v in defaults.items() if v is not None and v is not inspect._empty}
    return {**fixed, **concrete_args}


class _Tracer(fx.Tracer):
    def __init__(self, is_leaf: IsLeaf, constants: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self._is_leaf, self._constants = is_leaf, constants
        self.entered: set[str] = set()
        self._names: dict[int, str] = {}
        self._below: set[nn.Module] = set()

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        """Whether a call of `module` is one node."""
        if self._is_leaf(module, path):
            return True
        self.entered.add(path)
        return False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Modules that the forward itself makes are no children, and are run."""
        if m not in self._below:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A node for a parameter or buffer; fx would look for its name in all of the model."""
        name = self._names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Placeholders under the names and defaults of the forward's parameters."""
        spare_self(self.graph)
        self._below = set(self.root.modules())
        held = [*self.root.named_parameters(), *self.root.named_buffers()]
        self._names = {id(tensor): name for name, tensor in reversed(held)}
        values: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.root.forward).parameters.items():
            proxy = self.proxy(add_placeholder(self.graph, parameter))
            if parameter.kind in _VARIADIC:
                continue
            values[name] = self._constants.get(name, proxy)

        def run(*_: Any) -> Any:
            return self.root.forward(**values)

        return run, []


def named_constants(module: nn.Module, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Constants for parameters of a forward, as scripts write them.

    Entries for ``*args`` and ``**kwargs``, and those without a value, as an inspection of the
    signature gives them, are dropped.

    Raises
    ------
    ValueError
        For a name that the forward does not take.

    Examples
    --------
    >>> import inspect
    >>> class Loose(nn.Module):
    ...     def forward(self, x, scale=2, **kwargs):
    ...         return x * scale
    >>> parameters = inspect.signature(Loose().forward).parameters.values()
    >>> named_constants(Loose(), {p.name: p.default for p in parameters})
    {'scale': 2}
    """
    parameters = inspect.signature(module.forward).parameters
    given = {k: v for k, v in (concrete_args or {}).items() if v is not inspect.Parameter.empty}
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters]
    if unknown and not is_open:
        raise ValueError(
            f"concrete_args names {unknown}, which {type(module).__name__}.forward does not take; "
            f"pass parameters of it: {', '.join(parameters)}"
        )
    return {
        name: value
        for name, value in given.items()
        if name not in parameters or parameters[name].kind not in _VARIADIC
    }
