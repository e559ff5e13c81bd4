"""The symbolic tracer: ``torch.fx`` proxies through ``forward``, for modules without surprises.

Technique: Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning
in Python" (MLSys 2022).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError as ProxyTraceError

from slapo.errors import TraceError
from slapo.graph.trace.absent_parts import Place, first_difference
from slapo.graph.trace.attributes import reads_in
from slapo.graph.trace.contract import STATES, CallContract, states_among
from slapo.graph.trace.generators import generators_kept, refuse_seeds
from slapo.graph.trace.leaves import IsLeaf
from slapo.graph.trace.left_behind import Leavings, may_leave
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.names import spare_self
from slapo.graph.trace.questions import RefusingTracer
from slapo.graph.trace.regions import refuse_regions
from slapo.graph.trace.state import ModuleState
from slapo.graph.trace.versions import Version, all_versions

_READS = (
    "the forward reads what a child sets or fills when it is called, an attribute of it or a list "
    'or dict that it is given; use tracer="huggingface", or name the module that does so in '
    "leaf_modules"
)
_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


class SymbolicTracer(RefusingTracer):
    """A tracer that keeps the signature and is linear in the number of parameters.

    Parameters
    ----------
    is_leaf
        Which modules become ``call_module`` nodes.
    concrete_args
        Forward parameter -> value; all others become proxies.
    absent
        See :class:`slapo.graph.trace.absent_parts.Parts`.
    leavings
        Marks what leaves may leave behind.
    """

    def __init__(
        self,
        is_leaf: IsLeaf,
        concrete_args: Mapping[str, Any],
        absent: frozenset[int] = frozenset(),
        leavings: Leavings | None = None,
    ) -> None:
        super().__init__(absent)
        self.leavings, self.may_leave = leavings, False
        self._is_leaf = is_leaf
        self._values = dict(concrete_args)
        self._tensor_names: dict[int, str] = {}
        self.entered: set[str] = set()

    def trace(self, root: nn.Module, concrete_args: Any = None) -> fx.Graph:  # type: ignore[override]
        """The graph of `root`'s forward."""
        tensors = [*root.named_parameters(), *root.named_buffers()]
        self._tensor_names = {id(t): name for name, t in reversed(tensors)}
        if isinstance(root, TracedModule):
            # Fx reads the globals of a function of that name; a graph's code has none to wrap.
            self.traced_func_name = "_call_impl"
        return super().trace(root)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Opaque or not, by the rule given at construction."""
        return self._is_leaf(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A node for a leaf; for others their body, without the checks of traced modules."""
        body = m.forward if isinstance(m, TracedModule) else forward
        path = self.path_of_module(m)
        if not self._is_leaf(m, path):
            self.entered.add(path)
            return super().call_module(m, body, args, kwargs)
        result = super().call_module(m, body, args, kwargs)
        if self.leavings is not None:
            self.leavings.leave(m, args, kwargs)
        self.may_leave = self.may_leave or may_leave(m, args, kwargs)
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers become ``get_attr`` nodes, found by identity."""
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self._tensor_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """One placeholder per parameter of the signature; forward is called by keyword."""
        spare_self(self.graph)
        parameters = list(inspect.signature(self.root.forward).parameters.values())
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for parameter in parameters:
            proxy = self._placeholder(parameter)
            if parameter.kind in _STARS:
                continue
            value = self._values.get(parameter.name, proxy)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                keywords[parameter.name] = value

        def call(*_: Any) -> Any:
            return self.root.forward(*positional, **keywords)

        return call, []

    def _placeholder(self, parameter: inspect.Parameter) -> fx.Proxy:
        name = _STARS.get(parameter.kind, "") + parameter.name
        default = () if parameter.default is parameter.empty else (parameter.default,)
        return self.create_proxy("placeholder", name, default, {})


def baked_arguments(
    module: nn.Module, concrete_args: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """What a symbolic trace takes as constants, and which parameters may be None.

    Flags and numbers with a default (``scale=1.0``, ``causal=False``) are constants: a proxy
    cannot steer Python. Parameters that default to None are traced as given.

    Raises
    ------
    ValueError
        If `concrete_args` names no parameter of the module's forward.
    TraceError
        If the forward takes ``*args`` and nothing else.
    """
    given = dict(concrete_args or {})
    parameters = inspect.signature(module.forward).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise ValueError(
            f"concrete_args names {unknown}, which {type(module).__name__}.forward does not take; "
            f"its parameters are {list(parameters)}"
        )
    optional = []
    takes_any = [p.kind for p in parameters.values()] == [inspect.Parameter.VAR_POSITIONAL]
    if takes_any and not given:
        raise TraceError(
            f"{type(module).__name__}.forward takes any number of arguments, and nothing says how "
            "many; pass example_inputs"
        )
    for name, parameter in parameters.items():
        if parameter.kind in _STARS:
            given.setdefault(name, () if _STARS[parameter.kind] == "*" else {})
        elif name not in given and parameter.default is None:
            optional.append(name)
        elif name not in given and parameter.default is not parameter.empty:
            given[name] = parameter.default
    return given, optional


def trace_symbolically(
    module: nn.Module, is_leaf: IsLeaf, concrete_args: Mapping[str, Any] | None = None
) -> TracedModule:
    """Trace `module` with proxies; it is left unchanged.

    Raises
    ------
    TraceError
        If Python in a forward depends on the value of a tensor, or unpacks one; if a forward
        changes attributes, switches gradients or autocast; if an entered module is in another
        mode.
    """
    concrete, optional = baked_arguments(module, concrete_args)

    def trace(without: frozenset[str]) -> Version:
        constants = {**concrete, **dict.fromkeys(without)}
        graph, tracer, repeat = _trace_checked(module, is_leaf, constants)
        asked = states_among(reads_in(module, tracer.entered).names)
        contract = CallContract(
            constants,
            frozenset(optional) - without,
            states={name: STATES[name][0]() for name in asked},
        )
        return Version(graph, contract, {}, frozenset(tracer.entered), repeat=repeat)

    return all_versions(module, trace, optional)


def _trace_once(module: nn.Module, tracer: SymbolicTracer) -> fx.Graph:
    """One run with proxies, which may not stay in the module."""
    state = ModuleState(module)
    try:
        with generators_kept() as check_generators, refuse_regions():
            with refuse_seeds():
                graph = tracer.trace(module)
            check_generators()
        if tracer.refusal is not None:
            raise tracer.refusal  # the forward has caught it
        if tracer.leavings is None:
            _check_tensors(module)
            state.check_unchanged()
        return graph
    except Exception as error:
        raise TraceError(_explain(error)) from error
    finally:
        if tracer.leavings is not None:
            tracer.leavings.undo()
        state.restore()


def _check_tensors(module: nn.Module) -> None:
    """Fx keeps tensors from elsewhere in attributes of the module."""
    if any(name.startswith("_tensor_constant") for name in vars(module)):
        raise TraceError(
            "the forward uses a tensor that is neither a parameter nor a buffer of the module; "
            'register it as a buffer, or use tracer="huggingface"'
        )


def _trace_checked(
    module: nn.Module, is_leaf: IsLeaf, constants: Mapping[str, Any]
) -> tuple[fx.Graph, SymbolicTracer, Callable[[], None] | None]:
    """The graph of a forward that does the same in each run, whatever leaves do.

    Where leaves can do nothing that matters, only a repeated run remains to be made, by the caller:
    that of the other mode serves as well.
    """
    tracer = SymbolicTracer(is_leaf, constants)
    graph = _trace_once(module, tracer)
    parts, unused = tracer.parts, tracer.parts.unused()

    def difference(
        absent: frozenset[int] = frozenset(), leavings: Leavings | None = None
    ) -> tuple[str, str] | None:
        other = SymbolicTracer(is_leaf, constants, absent, leavings)
        return first_difference(graph, _trace_once(module, other), parts.nodes(absent))

    def differs(absent: frozenset[int], leavings: Leavings | None = None) -> bool:
        try:
            return difference(absent, leavings) is not None
        except TraceError:
            return True

    def repeat() -> None:
        _check_repeated(difference())

    if not parts.taken and not tracer.may_leave:
        return graph, tracer, repeat
    # All that should not matter at once; only where it does, one by one.
    if differs(unused, Leavings() if tracer.may_leave else None):
        repeat()
        if differs(unused):
            _refuse_asking(*(parts.taken[number].place for number in unused))
        raise TraceError(_READS)
    for number in parts.used_at_each_place():
        try:
            asks = difference(frozenset({number})) is not None
        except TraceError:
            continue  # it needs the part, as the original does
        if asks:
            _refuse_asking(parts.taken[number].place)
    return graph, tracer, None


def _check_repeated(found: tuple[str, str] | None) -> None:
    if found is not None:
        raise TraceError(
            f"two runs of the forward differ, {found[0]} and {found[1]}: it draws random numbers, "
            "or reads a clock or a counter, outside of a tensor operation; make the module that "
            "does so a leaf"
        )


def _refuse_asking(*places: Place) -> None:
    where = ", ".join(dict.fromkeys(f"{place.filename}:{place.line}" for place in places))
    raise TraceError(
        f"the forward asks whether a part of what a child returns is None (taken at {where}), "
        'which this tracer cannot answer for every call; use tracer="huggingface", or name the '
        "module that does so in leaf_modules"
    )


def _explain(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0]
    if isinstance(error, ProxyTraceError) and "control flow" in reason:
        return "a branch or loop depends on a tensor or its size"
    own = isinstance(error, (TraceError, ProxyTraceError))
    return reason if own else f"{type(error).__name__}: {reason}"
