"""One recording, from example inputs to graph and contract."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.errors import TraceError
from slapo.graph.trace.call import BoundCall, add_placeholder
from slapo.graph.trace.contract import CallContract
from slapo.graph.trace.recorder.fake_inputs import (
    FakeInputs,
    fresh_shape_env,
    module_device,
    new_fake_mode,
)
from slapo.graph.trace.recorder.guards import (
    DtypeGuard,
    SizeGuard,
    StructureGuard,
    TensorGuard,
    guards_of,
)
from slapo.graph.trace.recorder.leaf_calls import DATA_DEPENDENT
from slapo.graph.trace.recorder.operators import eliminate_dead_code
from slapo.graph.trace.recorder.patches import outer_at_rest, recording
from slapo.graph.trace.recorder.recorder import Recorder
from slapo.graph.trace.recorder.shape_env import Origin
from slapo.graph.trace.state import ModuleState
from slapo.graph.trace.trees import KIND, has_tensor, kind_of, parts

IsLeaf = Callable[[nn.Module, str], bool]


@dataclass
class Recording:
    """What a recorded run has yielded.

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
        Fake arguments of the first call of each leaf. A leaf called several times with different
        Python values is left out, because one graph could not serve all of its calls.
    fake_mode : FakeTensorMode
        The mode of the fake tensors; pass it on to record the children.
    entered : frozenset of str
        Paths of the modules below whose operations are in the graph.
    asks_mode : bool
        Whether the run asked for ``module.training`` where that may matter to the graph. If not,
        the graph holds in train and in eval mode.
    """

    graph: fx.Graph
    contract: CallContract
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    child_inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    fake_mode: FakeTensorMode = field(default_factory=new_fake_mode)
    entered: frozenset[str] = frozenset()
    asks_mode: bool = True


def record(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_leaf: IsLeaf,
    fake_mode: FakeTensorMode | None = None,
) -> Recording:
    """Run ``root.forward`` once on fake tensors and write down what it does.

    Python runs for real, so control flow, keyword arguments and dataclass outputs need no care.
    Tensors are fake: no memory, no arithmetic, and sizes that are symbols, so the graph serves any
    size within the guards of its contract.

    Parameters
    ----------
    root
        The module. It is not changed, and its own hooks are not recorded.
    args, kwargs
        Example inputs: tensors (real, on meta, or fake) become inputs of any size, everything else
        is built into the graph. Sizes of 1 stay 1; take larger ones for what shall vary.
    is_leaf
        ``is_leaf(module, path)``: True for modules that become one call. Others are entered, their
        hooks included.
    fake_mode
        The mode of an earlier recording, which already knows the parameters. Sizes start afresh.

    Returns
    -------
    Recording
        Graph, contract, and what is needed to go on with the children.

    Raises
    ------
    TypeError
        If the example inputs do not fit the signature.
    TraceError
        If the run does something that a graph cannot hold; the message names the module, the line
        and the remedy. Nothing stays changed or patched.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    >>> recorded = record(net, (torch.ones(3, 5),), {}, is_leaf=lambda module, path: True)
    >>> [node.target for node in recorded.graph.nodes]
    ['input', '0', '1', 'output']
    """
    call = BoundCall.of(root, args, kwargs).without_cache()
    mode = fake_mode or new_fake_mode()
    with outer_at_rest(), fresh_shape_env(mode) as shape_env:
        inputs = FakeInputs(mode, module_device(root))
        arguments = {k: inputs.make(v, (k,)) for k, v in call.arguments.items()}
        recorder, placeholders = _run_safely(root, call, arguments, mode, is_leaf)
        eliminate_dead_code(recorder.graph)
        guards = _argument_guards(call, recorder, placeholders)
        guards += [SizeGuard.of(("==", size, number)) for size, number in inputs.pinned]
        guards += guards_of(shape_env.decisions, inputs.sizes, shape_env.hints)
        return Recording(
            recorder.graph,
            _contract(root, call, guards),
            recorder.values.constants,
            recorder.leaf_calls.inputs,
            mode,
            frozenset(recorder.entered - {""}),
            recorder.modes.asked,
        )


def _run_safely(
    root: nn.Module,
    call: BoundCall,
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
    is_leaf: IsLeaf,
) -> tuple[Recorder, dict[str, fx.Node]]:
    """The run, with the module put back and every failure explained."""
    state = ModuleState(root)
    recorder = None
    try:
        state.conceal_values(mode)
        recorder = Recorder(root, mode, is_leaf)
        placeholders = _run(root, call, arguments, mode, recorder)
        state.check(recorder.entered)
    except TraceError as error:
        raise _explain(error, root, recorder, error) from error.__cause__
    except Exception as error:
        raise _explain(_reason(error), root, recorder, error) from error
    finally:
        state.restore()
    return recorder, placeholders


def _run(
    root: nn.Module,
    call: BoundCall,
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
    recorder: Recorder,
) -> dict[str, fx.Node]:
    """The recorded run itself; returns the placeholders by parameter."""
    graph = recorder.graph
    parameters = call.signature.parameters
    placeholders = {name: add_placeholder(graph, p) for name, p in parameters.items()}
    # The python dispatcher makes torch's own composite functions (F.pad) see symbols, not numbers.
    with mode, enable_python_dispatcher():
        bound = {}
        for name, value in arguments.items():
            placeholders[name].meta[KIND] = kind_of(value)
            bound[name] = recorder.bind(value, placeholders[name]) if has_tensor(value) else value
        args, kwargs = call.with_arguments(bound)
        with recording(recorder), recorder.shape_env.asked_by(Origin.OWN):
            result = root.forward(*args, **kwargs)
        graph.output(recorder.values.argument(result)).meta[KIND] = kind_of(result)
    for node in graph.nodes:  # what is left: sizes, devices, switches of grad mode
        node.meta.setdefault(KIND, "value")
    return placeholders


# --- the contract --------------------------------------------------------------------------------
def _contract(root: nn.Module, call: BoundCall, guards: list[SizeGuard]) -> CallContract:
    with_tensors = frozenset(k for k, v in call.arguments.items() if has_tensor(v))
    dtype = next((p.dtype for p in root.parameters() if p.is_floating_point()), None)
    return CallContract(call.concrete(), with_tensors, tuple(guards), None, dtype)


def _argument_guards(
    call: BoundCall, recorder: Recorder, placeholders: Mapping[str, fx.Node]
) -> list[SizeGuard]:
    """Structure, rank and, where the code has asked for it, the kind of dtype."""
    found: list[SizeGuard] = []
    for name, value in call.arguments.items():
        if has_tensor(value):
            found += _value_guards(value, (name,), placeholders[name], recorder.dtypes_read)
    return found


def _value_guards(
    value: Any, path: tuple[Any, ...], node: fx.Node | None, dtypes_read: set[fx.Node]
) -> list[SizeGuard]:
    if isinstance(value, torch.Tensor):
        guards: list[SizeGuard] = [TensorGuard.at(path, value.dim())]
        if node in dtypes_read:
            guards.append(DtypeGuard.at(path, value.dtype))
        return guards
    elements = parts(value)
    if elements is None:
        return []
    found: list[SizeGuard] = [StructureGuard.at(path, value)]
    for part in elements:
        users = node.users if node is not None else ()
        user = next((u for u in users if u.args == (node, part.key)), None)
        found += _value_guards(part.value, (*path, part.key), user, dtypes_read)
    return found


# --- failures ------------------------------------------------------------------------------------
def _reason(error: Exception) -> str:
    if isinstance(error, DATA_DEPENDENT):
        return (
            "Python asks for a value that only real data can tell (an if on a tensor, .item(), "
            "nonzero, a boolean index); make the module a leaf: leaf_modules=[...] or an attribute "
            "traceable = False"
        )
    return (
        f"running it on fake tensors failed with {type(error).__name__}: {error}; if it runs on "
        "real ones, make the module a leaf: leaf_modules=[...]"
    )


def _explain(
    reason: object, root: nn.Module, recorder: Recorder | None, error: Exception
) -> TraceError:
    """The reason, after the module and the line where it arose."""
    where = recorder.failed_in if recorder else None
    place = f"{where} in {type(root).__name__}" if where else type(root).__name__
    line = _user_line(error)
    return TraceError(f"cannot trace {place}{f' ({line})' if line else ''}: {reason}")


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _user_line(error: Exception) -> str:
    """``file:line`` of the innermost frame that belongs neither to torch nor to the tracers."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*_NOT_THE_USERS, "<")):
            return f"{frame.filename}:{frame.lineno}"
    return ""
