"""``.trace()`` and ``.trace_until(paths)``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx, nn

from slapo.errors import TraceError, with_nearest
from slapo.graph.trace.call import named_constants
from slapo.graph.trace.leaves import is_sealed, is_torch_leaf
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.tree import TraceResult, containers_down_to, trace_symbolic_tree
from slapo.history import warn_caller
from slapo.hooks import move_hooks
from slapo.logger import get_logger
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.utils.calls import outline
from slapo.wrapper import innermost, replace_innermost

logger = get_logger()

TRACERS = ("pytorch", "huggingface", "dynamo")


class _ClosedError(TraceError):
    """A module that no tracer enters, whatever is passed."""


class TracePrimitive(Primitive):
    """Replace a module by its graph, so that its operations can be found and rewritten.

    ``mod --> fx.GraphModule`` of the same call signature, names and state

    Children stay calls of modules under their names. A call that the graph does not hold for
    (another constant, a size outside the limits met) is an error when it happens.

    Parameters
    ----------
    recursive
        Trace the modules that this one calls too, each as a graph of its own.
    flatten
        One graph with all operations inlined; targets then read ``a.b``.
    tracer
        ``"pytorch"``: symbolic, for modules without surprises. ``"huggingface"``: the front end of
        ``torch.compile`` writes the forward down, for Transformers models and whatever the former
        cannot trace. ``"dynamo"``: the same, always as one flat graph.
    leaf_modules
        Class names or paths that stay opaque.
    concrete_args
        Forward parameter -> constant to trace with; nothing else is fixed by that. Entries for
        ``**kwargs``, and those without a value, are dropped.
    config
        Model config to make example inputs from, where the module has none itself.
    example_inputs
        Tensors to record with, a tuple or a dict of keyword arguments; made up for Transformers
        models, and for their layers where these stand alone (hidden states, no mask); taken from a
        run of the whole model for modules within one.

    Returns
    -------
    bool
        True, or False with a warning that names the module, the reason and what to pass, so that no
        call chains after it. A failed trace changes nothing.

    Raises
    ------
    ValueError
        For an unknown tracer or parameter name.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> sch.trace()
    True
    >>> [node.target for node in sch.mod.graph.nodes if node.op == "call_module"]
    ['0', '1']
    """

    @staticmethod
    def name() -> str:
        """Return ``"trace"``."""
        return "trace"

    @staticmethod
    def apply(
        sch: Node,
        /,
        recursive: bool = True,
        flatten: bool = False,
        tracer: str = "pytorch",
        leaf_modules: Collection[str] = (),
        concrete_args: Mapping[str, Any] | None = None,
        config: Any = None,
        example_inputs: Any = None,
    ) -> bool:
        """Trace first, then put the graphs in place."""
        _check_tracer(tracer)
        if isinstance(leaf_modules, str):
            raise TypeError(
                f"leaf_modules is a list of names, got the string {leaf_modules!r}; "
                f"pass [{leaf_modules!r}]"
            )
        remember_inputs(sch, example_inputs)
        module = innermost(sch.mod)
        _check_leaves(module, leaf_modules)
        concrete_args = named_constants(module, concrete_args)
        inputs = (concrete_args, config, example_inputs)
        try:
            _check_traceable(module)
            if tracer == "pytorch":
                result = _trace_with_proxies(sch, recursive, flatten, leaf_modules, inputs)
            else:
                result = _capture(sch, tracer, recursive, flatten, leaf_modules, inputs)
        except TraceError as error:
            _warn(sch, tracer, error)
            return False
        if flatten:
            result.traced[""]._kept_whole = _named(module, leaf_modules)
        _put_in_place(sch, result)
        return True


def remember_inputs(sch: Node, example_inputs: Any) -> None:
    """Inputs of the whole model serve ``build(check=True)`` too."""
    if sch.parent is None and example_inputs is not None:
        sch.state.example_inputs = outline(example_inputs)


#: ``concrete_args``, ``config`` and ``example_inputs``.
_Given = tuple[Mapping[str, Any], Any, Any]


def _trace_with_proxies(
    sch: Node, recursive: bool, flatten: bool, leaf_modules: Collection[str], given: _Given
) -> TraceResult:
    """By proxies; by a capture where proxies do not survive and there are inputs for it."""
    module = innermost(sch.mod)
    return _first_or_second(
        sch,
        lambda: trace_symbolic_tree(module, recursive, flatten, leaf_modules, given[0]),
        lambda: _capture(sch, "huggingface", recursive, flatten, leaf_modules, given),
    )


def _first_or_second(
    sch: Node, by_proxies: Callable[[], TraceResult], by_capture: Callable[[], TraceResult]
) -> TraceResult:
    try:
        return by_proxies()
    except TraceError as error:
        reason = error
    try:  # not within the other block, whose error has nothing to do with what fails here
        result = by_capture()
    except TraceError as other:
        raise TraceError(f"{reason}; and by a capture: {other}") from reason
    logger.info('%s was traced as by tracer="huggingface": %s', sch.where, reason)
    return result


def _capture(
    sch: Node,
    tracer: str,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
    given: _Given,
) -> TraceResult:
    # It brings sympy and torch._dynamo: a second that only captures should take.
    from slapo.primitives.recording import RecordingInputs, run_and_trace

    inputs = RecordingInputs(sch, *given)
    return run_and_trace(inputs, tracer, recursive, flatten, leaf_modules)


class TraceUntilPrimitive(Primitive):
    """Trace the containers from the root down to some paths, whose children stay untouched.

    ``root, root.encoder --> graphs``; ``root.encoder.layer.0`` and so on stay modules

    This is what pipeline cuts need.

    Parameters
    ----------
    paths
        One path or several; they and everything above them become graphs.
    tracer
        ``"pytorch"`` or ``"huggingface"``, as for :meth:`Schedule.trace`: the first does as the
        second where proxies do not survive and there are inputs for it.
    concrete_args, config, example_inputs
        As for :meth:`Schedule.trace`, for the root's forward.

    Returns
    -------
    bool
        True, or False with a warning. A failed trace changes nothing.

    Raises
    ------
    ValueError
        When called below the root, or with an unknown tracer.
    KeyError
        If a path does not exist.

    Examples
    --------
    >>> import slapo
    >>> from torch import nn
    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Sequential(block), nn.ReLU()))
    >>> sch.trace_until("0")
    True
    >>> sch["0.0"].cut_pipeline_stage().name
    '0'
    """

    @staticmethod
    def name() -> str:
        """Return ``"trace_until"``."""
        return "trace_until"

    @staticmethod
    def apply(
        sch: Node,
        /,
        paths: str | Collection[str],
        tracer: str = "pytorch",
        concrete_args: Mapping[str, Any] | None = None,
        config: Any = None,
        example_inputs: Any = None,
    ) -> bool:
        """Trace every container on the way, then put all graphs in place."""
        _check_tracer(tracer, TRACERS[:2])
        if sch.parent is not None:
            raise ValueError(
                f"trace_until traces from the root down; call it on the root, with {sch.path!r} "
                "in front of the paths"
            )
        remember_inputs(sch, example_inputs)
        wanted = [paths] if isinstance(paths, str) else list(paths)
        for path in wanted:
            sch[path]  # a path that does not exist is a KeyError that names the nearest
        containers = containers_down_to(wanted, lambda path: path in sch)
        concrete_args = named_constants(innermost(sch.mod), concrete_args)
        try:
            for path in containers:
                _check_traceable(innermost(sch[path].mod))
            given = (concrete_args, config, example_inputs)
            if tracer == "pytorch":
                result = _first_or_second(
                    sch,
                    lambda: _symbolic_containers(sch, containers, concrete_args),
                    lambda: _captured_containers(sch, containers, given),
                )
            else:
                result = _captured_containers(sch, containers, given)
        except TraceError as error:
            _warn(sch, tracer, error)
            return False
        _put_in_place(sch, result)
        return True


def _captured_containers(sch: Node, containers: list[str], given: _Given) -> TraceResult:
    from slapo.primitives.recording import RecordingInputs, run_and_trace_containers

    return run_and_trace_containers(RecordingInputs(sch, *given), containers)


def _symbolic_containers(
    sch: Node, containers: list[str], concrete_args: Mapping[str, Any] | None
) -> TraceResult:
    """Children that are no containers are named as leaves; those on the way are entered."""
    chain = set(containers)
    others = [path for path, _ in sch.named_schedules() if path and path not in chain]
    result = trace_symbolic_tree(innermost(sch.mod), True, False, frozenset(others), concrete_args)
    missing = [path for path in containers if path not in result.traced]
    if missing:
        reason = result.skipped.get(missing[0], "its parent does not call it")
        raise TraceError(f"{missing[0]!r}: {reason}")
    return result


def _check_tracer(tracer: str, known: tuple[str, ...] = TRACERS) -> None:
    if tracer not in known:
        raise ValueError(f"unknown tracer {tracer!r}; known are {list(known)}")


def _check_leaves(module: nn.Module, leaf_modules: Collection[str]) -> None:
    if not leaf_modules:
        return
    given: Collection[Any] = leaf_modules
    names = [each.__name__ for each in given if isinstance(each, type)]
    if names:
        raise TypeError(f"leaf_modules takes names of classes, or paths; pass {names}")
    named = {path: type(innermost(m)).__name__ for path, m in module.named_modules()}
    unknown = [name for name in leaf_modules if name not in named and name not in named.values()]
    if unknown:
        known = {*named, *named.values()}
        classes = f"its classes are {sorted(set(named.values()))}"
        raise ValueError(
            f"leaf_modules names {unknown}, neither the class nor the path of a module here; "
            + with_nearest(str(unknown[0]), known, classes)
        )


def _named(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Paths of the modules that are named, by path or class."""
    return frozenset(
        path
        for path, each in module.named_modules()
        if path in names or type(innermost(each)).__name__ in names
    )


def _check_traceable(module: nn.Module) -> None:
    if isinstance(module, TracedModule) and module.has_limits:
        raise _ClosedError(
            "it is a graph already, which holds for some calls only or has several forms, and a "
            "graph of that graph would hold for all calls in silence; trace it once, as you need it"
        )
    if isinstance(module, fx.GraphModule) or not is_sealed(module):
        return
    if is_torch_leaf(module):
        raise _ClosedError("it is a layer of torch, one call by itself; trace its parent")
    raise _ClosedError("it is marked traceable = False; trace its parent, or the modules below it")


def _warn(sch: Node, tracer: str, error: TraceError) -> None:
    """Say which module, why, and what to pass."""
    if isinstance(error, _ClosedError):
        remedy = ""
    elif tracer == "pytorch":
        remedy = '; pass tracer="huggingface", concrete_args for flags, or leaf_modules'
    else:
        remedy = "; pass example_inputs, concrete_args for what is no tensor, or leaf_modules"
    where = sch.path or "the root"
    warn_caller(
        f"{where} ({type(innermost(sch.mod)).__name__}) could not be traced with "
        f"tracer={tracer!r}: {error}. Nothing was changed{remedy}"
    )


def _put_in_place(sch: Node, result: TraceResult) -> None:
    """Outermost first: a graph module has a table of children of its own."""
    for path, traced in result.traced.items():
        if path not in sch:
            continue
        node = sch[path]
        old = innermost(node.mod)
        move_hooks(old, traced)
        node.state.take_place(old, traced)
        outer = replace_innermost(node.mod, traced)
        if outer is node.mod:
            node.rebuild_children()
        else:
            node.set_module(outer)
    if result.skipped:
        path, reason = next(iter(result.skipped.items()))
        logger.info(
            "%d modules stay opaque in the trace of %s, the first is %s: %s",
            len(result.skipped),
            sch.where,
            path,
            reason,
        )
