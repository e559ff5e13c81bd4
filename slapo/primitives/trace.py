"""``.trace()`` and ``.trace_until(paths)``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from torch import fx, nn

from slapo.errors import TraceError, with_nearest
from slapo.graph.trace.leaves import Depth, is_sealed, is_torch_leaf
from slapo.graph.trace.module import Traced, attach, trace_of
from slapo.graph.trace.tree import (
    TraceResult,
    containers_down_to,
    named_constants,
    trace_by_capture,
    trace_by_preview,
    trace_containers,
)
from slapo.history import warn_caller
from slapo.logger import get_logger
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.utils.calls import outline
from slapo.wrapper import innermost

logger = get_logger()


class _ClosedError(TraceError):
    """A module that no tracer can enter, whatever the arguments."""


class TracePrimitive(Primitive, name="trace"):
    """Replace a module by its graph, so that its operations can be found and rewritten.

    ``mod --> fx.GraphModule`` with the same call signature, names and state

    Children stay module calls under their names. A later call of another kind (train or eval mode,
    another constant or number of dimensions) is captured when it comes, with the same changes.

    Parameters
    ----------
    recursive
        Also trace the modules that this one calls, each as a graph of its own.
    flatten
        Inline all operations into one graph; targets then read ``a.b``.
    tracer
        ``"pytorch"``: symbolic tracing, for simple modules. ``"huggingface"``: capture by the front
        end of ``torch.compile``, for Transformers models and modules that symbolic tracing cannot
        handle. ``"dynamo"``: the same capture, always as one flat graph.
    leaf_modules
        Class names or paths of modules that stay opaque.
    concrete_args
        Map from forward parameter to the constant to trace with; no other argument becomes fixed.
        Entries for ``**kwargs``, and entries without a value, are dropped.
    config
        Model config for making example inputs, if the module has none.
    example_inputs
        Tensors to capture with: a tuple, or a dict of keyword arguments. By default they are made
        up for Transformers models and for their layers on their own (hidden states, no mask). For a
        module within a model they are recorded in a run of that model.

    Returns
    -------
    bool
        True, or False with a warning that names the module, the reason and the fix. A failed trace
        changes nothing, and no call can be chained.

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
    def apply(
        sch: Node,
        /,
        recursive: bool = True,
        flatten: bool = False,
        tracer: Literal["pytorch", "huggingface", "dynamo"] = "pytorch",
        leaf_modules: Annotated[Collection[str], "names of classes, or paths"] = (),
        concrete_args: Mapping[str, Any] | None = None,
        config: Any = None,
        example_inputs: Any = None,
    ) -> bool:
        remember_inputs(sch, example_inputs)
        module = innermost(sch.mod)
        _check_leaves(module, leaf_modules)
        concrete_args = named_constants(module, concrete_args)
        depth = Depth(flatten or tracer == "dynamo", frozenset(leaf_modules))
        shared = sch.state.shared_captures

        def by_preview() -> TraceResult:
            return trace_by_preview(module, recursive, depth, concrete_args, shared)

        def by_capture() -> TraceResult:
            inputs = _inputs(sch, concrete_args, config, example_inputs)
            return trace_by_capture(module, inputs, recursive, depth, shared)

        try:
            _check_traceable(module)
            result = _first_or_second(sch, by_preview, by_capture, tracer)
        except TraceError as error:
            _warn(sch, tracer, error)
            return False
        _attach(sch, result)
        return True


def remember_inputs(sch: Node, example_inputs: Any) -> None:
    """Store inputs of the root, which ``build(check=True)`` uses too."""
    if sch.parent is None and example_inputs is not None:
        sch.state.example_inputs = outline(example_inputs)


def _inputs(sch: Node, constants: Mapping[str, Any], config: Any, given: Any) -> Any:
    # Late: it imports torch._dynamo, which takes a second and only captures need.
    from slapo.primitives.example_inputs import find_inputs

    return find_inputs(sch, constants, config, given)


def _first_or_second(
    sch: Node,
    by_preview: Callable[[], TraceResult],
    by_capture: Callable[[], TraceResult],
    tracer: str,
) -> TraceResult:
    """Trace with proxies if requested, and capture if that fails."""
    if tracer != "pytorch":
        return by_capture()
    try:
        return by_preview()
    except TraceError as error:
        reason = error
    try:  # outside the except block, so that an error here is not chained to the other one
        result = by_capture()
    except TraceError as other:
        # Both reasons: either may be the one that the user can fix.
        raise TraceError(f"{reason}; and by a capture: {other}") from reason
    logger.info('%s was traced as by tracer="huggingface": %s', sch.where, reason)
    return result


class TraceUntilPrimitive(Primitive, name="trace_until"):
    """Trace the containers from the root down to some paths; their children stay modules.

    ``root, root.encoder --> graphs``; ``root.encoder.layer.0`` and so on stay modules

    Pipeline cuts need such graphs.

    Parameters
    ----------
    paths
        One path or several. They and everything above them become graphs.
    tracer
        ``"pytorch"`` or ``"huggingface"``, as for :meth:`Schedule.trace`. The first falls back to
        the second if symbolic tracing fails and inputs are available.
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

    changes_model = False  # no module is above the root, and its own captures are new

    @staticmethod
    def apply(
        sch: Node,
        /,
        paths: str | Collection[str],
        tracer: Literal["pytorch", "huggingface"] = "pytorch",
        concrete_args: Mapping[str, Any] | None = None,
        config: Any = None,
        example_inputs: Any = None,
    ) -> bool:
        if sch.parent is not None:
            raise ValueError(
                f"trace_until traces from the root down; call it on the root, with {sch.path!r} as "
                "the prefix of the paths"
            )
        remember_inputs(sch, example_inputs)
        wanted = [paths] if isinstance(paths, str) else list(paths)
        for path in wanted:
            sch[path]  # raises a KeyError with the nearest names if the path does not exist
        containers = containers_down_to(wanted, lambda path: path in sch)
        module = innermost(sch.mod)
        concrete_args = named_constants(module, concrete_args)
        shared = sch.state.shared_captures

        def by_preview() -> TraceResult:
            return trace_containers(module, containers, None, concrete_args, shared)

        def by_capture() -> TraceResult:
            inputs = _inputs(sch, concrete_args, config, example_inputs)
            return trace_containers(module, containers, inputs, concrete_args, shared)

        try:
            for path in containers:
                _check_traceable(innermost(sch[path].mod))
            # A pipeline runs the joined graph; a capture with the given inputs makes it exact.
            how = tracer if example_inputs is None else "huggingface"
            result = _first_or_second(sch, by_preview, by_capture, how)
        except TraceError as error:
            _warn(sch, tracer, error)
            return False
        _attach(sch, result)
        return True


def _check_leaves(module: nn.Module, leaf_modules: Collection[str]) -> None:
    if not leaf_modules:
        return
    named = {path: type(innermost(m)).__name__ for path, m in module.named_modules()}
    unknown = [name for name in leaf_modules if name not in named and name not in named.values()]
    if unknown:
        known = {*named, *named.values()}
        classes = f"its classes are {sorted(set(named.values()))}"
        raise ValueError(
            f"leaf_modules names {unknown}, neither the class nor the path of a module here; "
            + with_nearest(str(unknown[0]), known, classes)
        )


def _check_traceable(module: nn.Module) -> None:
    if isinstance(module, Traced):
        if trace_of(module).is_rewritten:
            raise _ClosedError(
                "its graph was rewritten, and a new trace would lose the rewrites; trace it once, "
                "with the options that you need"
            )
    elif isinstance(module, fx.GraphModule):
        raise _ClosedError("it is a graph already, made by torch.fx; find() works on it as it is")
    elif is_torch_leaf(module):
        raise _ClosedError("it is a torch layer, always a single call; trace its parent")
    elif is_sealed(module):
        raise _ClosedError(
            "it is marked traceable = False; trace its parent, or the modules below it"
        )


def _warn(sch: Node, tracer: str, error: TraceError) -> None:
    if isinstance(error, _ClosedError):
        remedy = ""
    elif tracer == "pytorch":
        remedy = '; pass tracer="huggingface", concrete_args for flags, or leaf_modules'
    else:
        remedy = "; pass example_inputs, concrete_args for non-tensors, or leaf_modules"
    where = sch.path or "the root"
    warn_caller(
        f"{where} ({type(innermost(sch.mod)).__name__}) could not be traced with "
        f"tracer={tracer!r}: {error}. Nothing was changed{remedy}"
    )


def _attach(sch: Node, result: TraceResult) -> None:
    """Turn the traced modules into graph modules and update the schedule tree."""
    for path, trace in result.traces.items():
        module = innermost(sch.mod.get_submodule(path))
        attach(module, trace)
        if path in sch:
            sch[path].rebuild_children(deep=True)
    if result.skipped:
        path, reason = next(iter(result.skipped.items()))
        logger.info(
            "%d modules stay opaque in the trace of %s, the first is %s: %s",
            len(result.skipped),
            sch.where,
            path,
            reason,
        )
