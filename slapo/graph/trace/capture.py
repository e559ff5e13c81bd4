"""One capture: torch's dynamo writes a forward down, its leaves kept as calls.

Dynamo interprets the bytecode of ``forward``, so what it does not understand is an error and never
a silent constant. It runs on tensors without data, whose sizes are symbols.

Technique: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation" (ASPLOS 2024).
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import output_graph, trace_rules, utils
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.variables import builder

from slapo.errors import TraceError
from slapo.graph.trace.adopt import Adoption
from slapo.graph.trace.call import BoundCall
from slapo.graph.trace.contract import CallContract
from slapo.graph.trace.example_tensors import ExampleCall, module_device
from slapo.graph.trace.failures import explain, told_once
from slapo.graph.trace.generators import cuda_not_started, generators_kept
from slapo.graph.trace.leaf_calls import LeafCalls
from slapo.graph.trace.leaf_outputs import CapturedForm
from slapo.graph.trace.leaves import IsLeaf
from slapo.graph.trace.on_meta import one_device
from slapo.graph.trace.output_capture import hooks_installed
from slapo.graph.trace.shape_env import CaptureShapeEnv
from slapo.graph.trace.state import caches_off, no_results_kept
from slapo.graph.trace.watch import Watch


class Reached(Exception):
    """A capture has come to the call of a leaf whose output must be known first.

    Parameters
    ----------
    path
        Where the leaf is.
    args, kwargs
        What it was called with: fake tensors.
    """

    def __init__(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(f"{path!r} is called")
        self.path, self.args, self.kwargs = path, args, kwargs


@dataclass
class Capture:
    """What a captured forward has yielded.

    Attributes
    ----------
    graph : fx.Graph
        One placeholder per parameter of the module's forward; no fake tensors in it.
        ``node.meta["slapo_kind"]`` says what a node's value is: "tensor", "container" (a tuple, a
        model output) or "value" (a size, a dtype, a device, None).
    contract : CallContract
        What the graph may be called with.
    constants : dict of str to Tensor
        Tensors from outside the module, by the name the graph has for them.
    child_inputs : dict of str to (tuple, dict)
        Arguments of the first call of each leaf. A leaf called several times with different Python
        values is left out, because one graph could not serve all of its calls.
    entered : frozenset of str
        Paths of the modules below whose operations are in the graph.
    reads_mode : bool
        Whether the forward asked for ``module.training``. If not, the graph holds in train and in
        eval mode.
    form
        The form of what the forward returns; None if it follows from more than the sizes given.
    """

    graph: fx.Graph
    contract: CallContract
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    child_inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    entered: frozenset[str] = frozenset()
    reads_mode: bool = True
    form: CapturedForm | None = None


def capture(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_leaf: IsLeaf,
    outputs: dict[Any, Any] | None = None,
    containers: Mapping[str, CapturedForm | None] = MappingProxyType({}),
) -> Capture:
    """Write down what ``root.forward`` does with arguments like these.

    Parameters
    ----------
    root
        The module. It is not changed, and its own hooks are not captured.
    args, kwargs
        Example inputs: tensors (real, on meta, or fake) become inputs of any size, everything else
        is built into the graph. Sizes of 1 stay 1; take larger ones for what shall vary.
    is_leaf
        ``is_leaf(module, path)``: True for modules that become one call. Others are entered, their
        hooks included.
    outputs
        Forms of leaves' outputs, to be shared by captures of one model.
    containers
        Path -> what a leaf returns that has been captured, or None for one that is to be.

    Raises
    ------
    Reached
        At the call of a leaf that is to be captured before.
    TypeError
        If the example inputs do not fit the signature.
    TraceError
        If the forward does something that a graph cannot hold; the message names the module, the
        line and the remedy. Nothing stays changed or patched.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    >>> captured = capture(net, (torch.ones(3, 5),), {}, is_leaf=lambda module, path: True)
    >>> [node.target for node in captured.graph.nodes]
    ['input', '0', '1', 'output']
    """
    call = BoundCall.of(root, args, kwargs).without_cache()
    leaves, entered = _sort_out(root, is_leaf)
    device = module_device(root)
    calls = LeafCalls(root, leaves, {} if outputs is None else outputs, device, containers)
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(_at_rest())
        stack.enter_context(_collections_deferred())
        stack.enter_context(one_device(root))
        stack.enter_context(no_results_kept())
        stack.enter_context(caches_off(root))
        example = ExampleCall.of(root, call)
        stack.enter_context(hooks_installed(root))
        stack.enter_context(calls.standing_in())
        notes = stack.enter_context(_configured())
        try:
            forward = FunctionType(_call_forward.__code__, {"__builtins__": builtins})
            output = fullgraph_capture(forward, (root, example.args, example.kwargs))
            notes.watch.check_effects()
            adoption = Adoption(root, example, output, notes.shape_env, notes.watch, calls.accesses)
            graph = adoption.finish()
            adoption.check_reads(calls.changed)
        except Exception as error:
            if calls.reached is not None:
                raise Reached(calls.reached, *calls.inputs[calls.reached]) from None
            if isinstance(error, TraceError):
                raise
            raise explain(error, root) from error
    inlined = adoption.entered(entered)
    contract = adoption.contract()
    return Capture(
        graph,
        contract,
        adoption.constants,
        calls.child_inputs,
        inlined,
        calls.mode_matters or adoption.reads_mode(),
        adoption.form(),
    )


def _call_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """What dynamo sees: arguments under known names, whatever decorates the forward.

    It is copied for each capture, as dynamo leaves names in the globals of what it captures.
    """
    return module.forward(*args, **kwargs)


def _sort_out(root: nn.Module, is_leaf: IsLeaf) -> tuple[dict[str, nn.Module], set[str]]:
    """Modules that stay calls, and those that may be entered, by path.

    What lies below a leaf is sorted too: forwards may reach past a child, as in
    ``self.model.decoder(x)``.
    """
    leaves: dict[str, nn.Module] = {}
    entered: set[str] = set()
    seen = {id(root)}

    def visit(module: nn.Module, path: str, below_leaf: bool) -> None:
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            seen.add(id(child))
            leaf = _is_called(child) and is_leaf(child, here)
            if leaf:
                leaves[here] = child
            elif _is_called(child):
                entered.add(here)
                if not below_leaf:
                    _check_enterable(child, here)
            if not isinstance(child, torch.jit.ScriptModule):
                visit(child, here, below_leaf or leaf)

    visit(root, "", False)
    return leaves, entered


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_called(module: nn.Module) -> bool:
    """False for mere holders of others."""
    forward = getattr(type(module), "forward", None)
    return isinstance(module, torch.jit.ScriptModule) or not (
        _is_list(module) or forward is nn.Module.forward
    )


def _check_enterable(module: nn.Module, path: str) -> None:
    if module._backward_hooks or module._backward_pre_hooks:
        raise TraceError(
            f"{path} has backward hooks, which its inlined forward would lose; keep it a leaf "
            "(leaf_modules=[...])"
        )


# --- surroundings --------------------------------------------------------------------------------
@contextmanager
def _at_rest() -> Iterator[None]:
    """Modes of torch that are on outside have no part in the capture."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.enable_grad():
        yield


@contextmanager
def _collections_deferred() -> Iterator[None]:
    """Dynamo makes many objects and frees few: collecting them took a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Notes:
    """What is heard of a capture beside its graph."""

    watch: Watch = field(default_factory=Watch)
    shape_env: CaptureShapeEnv | None = None


@contextmanager
def _configured() -> Iterator[_Notes]:
    """Dynamo as a capture needs it; in this thread and for the time of the block."""
    notes = _Notes()

    def shape_env(**settings: Any) -> CaptureShapeEnv:
        notes.shape_env = CaptureShapeEnv(**settings)
        return notes.shape_env

    settings: dict[str, Any] = {
        "replay_side_effects": False,
        "side_effect_replay_policy": "silent",
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "specialize_int": True,
        "verbose": False,
        "suppress_errors": False,
        "ignore_logging_functions": _logging_functions(),
        "allow_rnn": True,
        # With symbols for sizes, making an entry takes as long as running the operation.
        "fake_tensor_cache_enabled": False,
    }
    with ExitStack() as stack:
        stack.enter_context(dynamo_config.patch(**settings))
        stack.enter_context(mock.patch.object(output_graph, "ShapeEnv", shape_env))
        stack.enter_context(_no_fixed_addresses())
        stack.enter_context(cuda_not_started())
        stack.enter_context(_functions_kept())
        stack.enter_context(told_once())
        stack.enter_context(notes.watch.watching())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch, about itself
        # What dynamo would write of its settings: it takes a copy of them all, and that of torch
        # 2.11 fails with a log of forty lines where functions are among them.
        stack.enter_context(mock.patch.object(utils, "_get_dynamo_config_for_logging", _nothing))
        stack.enter_context(utils.get_metrics_context())
        yield notes


@contextmanager
def _no_fixed_addresses() -> Iterator[None]:
    """Dynamo marks each parameter of a module as staying where it is, for graphs of CUDA."""
    names = ("og_module_named_parameters_fn_ptr", "og_module_named_buffers_fn_ptr")
    with ExitStack() as stack:
        for home, name in itertools.product((builder, output_graph), names):
            stack.enter_context(mock.patch.object(home, name, None, create=True))
        yield


def _nothing() -> None:
    return None


def _logging_functions() -> set[Any]:
    found: set[Any] = {
        getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error")
    }
    hf_logging = sys.modules.get("transformers.utils.logging")
    for name in ("warning_once", "info_once", "warning_advice"):
        with contextlib.suppress(AttributeError):
            found.add(getattr(hf_logging, name))
    return found


@contextmanager
def _functions_kept() -> Iterator[None]:
    """Every ``autograd.Function`` is one node, so that its own backward is kept."""
    known = trace_rules._allowed_callable_ids
    added = [cls for cls in set(_subclasses(torch.autograd.Function)) if id(cls) not in known]
    for cls in added:
        known.add(id(cls))
    try:
        yield
    finally:
        for cls in added:
            known.remove(id(cls))


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
