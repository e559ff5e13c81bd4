"""Capture of a module's forward by dynamo, for the arguments of one call.

Dynamo interprets the bytecode of ``forward``, so unsupported code is an error and never a silent
constant. It runs on fake tensors with symbolic sizes. Torch's own checks decide whether a capture
serves another call of its key: the shape engine's conditions on argument sizes, and dynamo's guards
on the module and Python globals.

Technique: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation" (ASPLOS 2024).
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.hf import causal_masks_left_out, refuse_collected
from slapo.graph.trace.import_graph import GraphImport, Path
from slapo.graph.trace.leaf_calls import Call, LeafCalls, number_of, returns_alike
from slapo.graph.trace.leaves import IsLeaf
from slapo.graph.trace.nests import call_key, collected_keys, parts, rebuild, size_check
from slapo.graph.trace.refusals import CACHE_REFUSED, explain, refuse_effects
from slapo.graph.trace.surroundings import surroundings
from slapo.graph.trace.torch_private import (
    CaptureOutput,
    CheckFunctionManager,
    FakeTensor,
    GuardBuilder,
    fullgraph_capture,
)


@dataclass
class Capture:
    """A graph, and the conditions under which it is valid for a call."""

    #: one placeholder per parameter of the forward; ``node.meta`` has the KIND of each value
    graph: fx.Graph
    key: Any
    #: the key of the call as seen by a ``torch.compile`` around the module
    compile_key: Any
    #: dynamo's guards on the module and on Python globals
    state: Any
    #: conditions on argument sizes
    sizes: list[str]
    #: arguments of each leaf's first call, with fake tensors
    inputs: dict[str, Call] = field(default_factory=dict)
    #: structure of each leaf's first result, and its fake tensors and sizes
    results: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict)
    #: paths of the modules whose operations are in the graph
    entered: frozenset[str] = frozenset()
    #: path, name and value of the attributes that the forward read
    constants: list[tuple[str, str, Any]] = field(default_factory=list)
    #: training modes of the modules below, which affect what leaves return
    modes: Any = None
    #: function of the module and the arguments that runs the graph
    code: Any = None
    fits: Callable[[Any, Any], bool] = field(init=False)

    def __post_init__(self) -> None:
        self.fits = size_check(self.sizes)

    def holds(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the capture is valid for a call of its key."""
        frame = {"module": module, "args": args, "kwargs": kwargs}
        return self.fits(args, kwargs) and bool(self.state.check(frame))

    def holds_state(self, module: nn.Module) -> bool:
        """Return whether the module and globals are unchanged."""
        return bool(self.state.check({"module": module, "args": (), "kwargs": {}}))

    def holds_in_mode(self, module: nn.Module) -> bool:
        """Return whether a capture in the module's current mode would be the same.

        Guards cover whether the forward reads the mode; leaves are run again to compare their
        results.
        """
        if not self.holds_state(module):
            return False
        with surroundings(module, any_batch=True):
            return returns_alike(module, self.inputs, self.results)


def capture(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_leaf: IsLeaf,
    any_batch: bool = False,
    parked: Collection[str] = (),
) -> Capture:
    """Capture ``root.forward`` for arguments like these.

    Nothing stays changed or patched, and the module's own hooks are not captured. Gradients and
    autocast keep their current modes. Real, meta and fake tensor arguments become inputs of any
    size above 1; other values become constants. Modules selected by `is_leaf` become one call,
    others are entered with their hooks. With `any_batch` sizes of 1 stay symbolic, inputs are taken
    as contiguous, and a tensor passed twice counts as two. Modules at the paths `parked` exist
    during the capture only. A TraceError names the module, the line and the fix.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    >>> captured = capture(net, (torch.ones(3, 5),), {}, is_leaf=lambda module, path: True)
    >>> [node.target for node in captured.graph.nodes]
    ['input', '0', '1', 'output']
    >>> captured.holds(net, (torch.ones(9, 5),), {})
    True
    """
    args, kwargs = tuple(args), dict(kwargs)
    modules, entered = _sort_out(root, is_leaf)
    refuse_collected(root, entered, collected_keys())
    calls = LeafCalls(root, modules, any_batch)
    with surroundings(root, any_batch) as effects:
        example = _Example(root, args, kwargs, shares=not any_batch)
        # A copy for each capture, as dynamo adds names to the globals of captured functions.
        forward = FunctionType(_call_forward.__code__, {"__builtins__": builtins})
        try:
            with calls.standing_in(), causal_masks_left_out(example.arguments):
                output = fullgraph_capture(forward, example.frame)
                refuse_effects(effects)
                for path, name in calls.left_behind:
                    if _is_read(output, path, name):
                        raise TraceError(
                            f"{path!r} sets its attribute {name!r} when it is called, and the "
                            "module above reads it; return the value instead, or make the module "
                            "above a leaf"
                        )
                graph = GraphImport(
                    root, example.arguments, example.places, output, calls, any_batch
                )
                graph.run(example.frame)
        except TraceError:
            raise
        except Exception as error:
            raise explain(error, root) from error
        # Guards look at the classes of leaves, so these are restored first.
        sizes = _size_conditions(output)
        constants = _constants_read(output, root)
        state = _state_guards(output, forward, modules, parked)
        for name in [n for n in forward.__globals__ if n.startswith("__compiled_fn")]:
            del forward.__globals__[name]  # dynamo's graph, which guards would keep alive
    key, compile_key = call_key(args, kwargs), call_key(args, kwargs, within_compile=True)
    below = graph.entered(entered)
    return Capture(
        graph.graph,
        key,
        compile_key,
        state,
        sizes,
        calls.inputs,
        calls.results,
        below,
        constants,
    )


def _call_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """Frame for dynamo, with fixed argument names whatever decorates the forward."""
    return module.forward(*args, **kwargs)


def _sort_out(root: nn.Module, is_leaf: IsLeaf) -> tuple[dict[str, nn.Module], set[str]]:
    """Return the leaves by path, and the paths of modules that may be entered."""
    found: dict[str, nn.Module] = {}
    entered: set[str] = set()
    for path, module in root.named_modules():
        # Below a leaf too, as forwards may reach past a child: ``self.model.decoder(x)``.
        above = root.get_submodule(path.rpartition(".")[0])
        if not path or isinstance(above, torch.jit.ScriptModule) or not _is_called(module):
            continue
        if is_leaf(module, path):
            found[path] = module
        else:
            entered.add(path)
    return found, entered


def _is_called(module: nn.Module) -> bool:
    """Return False for containers that are never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return getattr(type(module), "forward", None) is not nn.Module.forward


# --- arguments -----------------------------------------------------------------------------------
class _Example:
    """Example arguments for a capture: tensors without history, each object once."""

    def __init__(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shares: bool
    ) -> None:
        signature = inspect.signature(root.forward)
        names = list(signature.parameters)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the example inputs do not fit {type(root).__name__}.forward: {error}; its "
                f"parameters are {', '.join(names)}"
            ) from error
        if bound.arguments.get("use_cache", False) is None:
            bound.arguments["use_cache"] = False
        bound.apply_defaults()
        given = bound.arguments
        if given.get("use_cache") is True:
            raise TraceError(CACHE_REFUSED)
        self._shares = shares
        self._made: dict[int, Tensor] = {}
        #: id of a tensor -> its path in the arguments
        self.places: dict[int, Path] = {}
        self.arguments = {name: self._made_of(value, (name,)) for name, value in given.items()}
        positional: list[Any] = []
        extra: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            value = self.arguments[parameter.name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += value
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = value
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(value)
        named = {k: extra[k] if k in extra else self.arguments[k] for k in kwargs}
        #: ``(module, args, kwargs)``, split as by the caller, since decorated forwards depend on
        #: that
        self.frame = root, tuple(positional[: len(args)]), named

    def _made_of(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            made = self._made.get(id(value)) if self._shares else None
            if made is None:
                # For any batch: micro-batches are slices of a batch, whose strides a graph must not
                # ask for.
                made = _without_past(value if self._shares else value.contiguous())
                self._made[id(value)] = made
                self.places[id(made)] = path
            return made
        elements = parts(value)
        if elements is None:
            return number_of(value)
        items = [self._made_of(p.value, (*path, (p.access, p.key))) for p in elements]
        return rebuild(value, items)


def _without_past(value: Tensor) -> Tensor:
    """Return a tensor like `value` with dynamic sizes; a copy if it is not a leaf."""
    if type(value) not in (Tensor, nn.Parameter, FakeTensor):
        raise TraceError(
            f"an argument is a {type(value).__name__}, whose operations a graph cannot record; "
            "pass plain tensors, or make the module a leaf"
        )
    sizes = [isinstance(s, torch.SymInt) for s in value.shape]
    shape, stride = ([number_of(s) for s in many] for many in (value.shape, value.stride()))
    if type(value) is Tensor and not any(sizes):
        new = value.detach()
    else:
        new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    new.requires_grad_(value.requires_grad)
    if not value.is_leaf:
        new = new.clone()  # non-leaf tensors may be written to by the forward
    for dim, size in enumerate(shape):
        # Plain integers among the sizes of a fake tensor are fixed by the model.
        if sizes[dim] if any(sizes) else size > 1:
            # Not `mark_dynamic`, which is an error if the code fixes the size.
            torch._dynamo.maybe_mark_dynamic(new, dim)
    return new


# --- checks under which a capture serves another call of its key ---------------------------------
#: Sources of module parameters and buffers, and of other attributes, which graphs read by name.
_IN_MODULE = re.compile(r"\.(_parameters|_buffers)\[[^\]]+\]$")
_CHILD = re.compile(r"\._modules\['([^']+)'\]")
_PLAIN = re.compile(r"L\['module'\](\._modules\['[^']+'\])*\.\w+")


def _size_conditions(output: CaptureOutput) -> list[str]:
    """Return the shape engine's conditions on argument sizes, such as ``args[0].size()[1]``."""
    graph = output.graph_capture_output.output_graph
    fakes = [f for f in graph.shape_env.tracked_fakes or () if "_slapo" not in f.source.name]
    (found,) = graph.shape_env.produce_guards_verbose(
        [f.fake for f in fakes],
        [f.source for f in fakes],
        input_contexts=[f.symbolic_context for f in fakes],
        # Without static dimensions, the guard of a loop over a size would be dropped.
        ignore_static=False,
        langs=("python",),
    )
    asked = (e for e in dict.fromkeys(found.exprs) if "L['module']" not in e and "L[" in e)
    conditions = (e.replace("L['args']", "args").replace("L['kwargs']", "kwargs") for e in asked)
    # Micro-batches are slices of a batch and differ in their offsets.
    return [condition for condition in conditions if "storage_offset" not in condition]


def _state_guards(
    output: CaptureOutput, forward: FunctionType, leaves: Collection[str], parked: Collection[str]
) -> Any:
    """Return dynamo's guards on the module and Python globals, checked by ``.check(frame)``."""
    # Arguments are covered by their key, and module tensors by :class:`.Tree`. Leaves have no class
    # guard, as they may be replaced. Modules in `parked` have no guards, as rewrites remove them.
    # Other tensors are part of the graph and must be the same objects.
    graph = output.graph_capture_output.output_graph
    opaque, gone = ({f"L['module']{_source_of(p)}" for p in each} for each in (leaves, parked))
    scope = {"G": forward.__globals__}
    kept = [g for g in graph.guards.inner if _kept(g, opaque, tuple(gone)) and _is_there(g, scope)]
    graph.guards.inner = type(graph.guards.inner)(map(_exact, kept))
    ordered = graph.guard_on_key_order
    graph.guard_on_key_order = type(ordered)(s for s in ordered if _is_asked(s.name, tuple(gone)))
    graph.skip_guards_check = True
    return CheckFunctionManager(forward.__code__, graph).guard_manager


def _constants_read(output: CaptureOutput, root: nn.Module) -> list[tuple[str, str, Any]]:
    """Return path, name and value of plain module attributes that the forward reads."""
    # An outer ``torch.compile`` sees the graph and not the forward, so it must guard on these too.
    graph = output.graph_capture_output.output_graph
    names = dict.fromkeys(g.name for g in graph.guards.inner if _PLAIN.fullmatch(g.name))
    found = []
    for source in names:
        holder, _, name = source.rpartition(".")
        path = ".".join(_CHILD.findall(holder))
        value = getattr(root.get_submodule(path), name, None)
        if name != "training" and isinstance(value, (bool, int, float, str)):
            found.append((path, name, value))
    return found


def _is_read(output: CaptureOutput, path: str, name: str) -> bool:
    """Return whether the forward reads an attribute of the module at `path`."""
    source = f"L['module']{_source_of(path)}.{name}"
    guards = output.graph_capture_output.output_graph.guards.inner
    return any(g.name == source or g.name.startswith((f"{source}.", f"{source}[")) for g in guards)


def _source_of(path: str) -> str:
    return "".join(f"._modules[{name!r}]" for name in path.split("."))


def _is_asked(name: str, gone: tuple[str, ...]) -> bool:
    if not name.startswith(("L['module']", "G[")):
        return False
    ours = "_slapo" in name or "_dot_output_capturing" in name
    return not ours and not (gone and name.startswith(gone))


def _kept(guard: Any, opaque: Collection[str], gone: tuple[str, ...]) -> bool:
    name = guard.name
    if not _is_asked(name, gone) or guard.create_fn_name() == "WEAKREF_ALIVE":
        return False
    given = getattr(guard.create_fn, "keywords", None) or {}
    if "source_b" in given and not _is_asked(given["source_b"].name, gone):
        return False  # compares with an object outside the module and globals
    if name == "L['module']" or name in opaque:  # the class may change, the attributes may not
        return given.get("attr", "forward") not in ("__call__", "forward")
    return guard.create_fn_name() != "TENSOR_MATCH" or not _IN_MODULE.search(name)


def _is_there(guard: Any, scope: dict[str, Any]) -> bool:
    """Return False for a global missing from its module, as in code run by ``exec``."""
    try:
        return not guard.name.startswith("G[") or bool([eval(guard.name, scope)])
    except (AttributeError, KeyError):
        return False
    except Exception:  # a source that only dynamo can evaluate
        return True


def _exact(guard: Any) -> Any:
    """Guard on identity for tensors in lists, closures and globals, which are graph constants."""
    is_constant = guard.create_fn_name() == "TENSOR_MATCH" and not _PLAIN.fullmatch(guard.name)
    return guard.originating_source.make_guard(GuardBuilder.ID_MATCH) if is_constant else guard
