"""One capture: dynamo writes a forward down for the arguments of one call.

Dynamo interprets the bytecode of ``forward``, so what it does not understand is an error and never
a silent constant. It runs on fake tensors, whose sizes are symbols.

Technique: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation" (ASPLOS 2024).
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.guards import constants_read, is_read, size_conditions, state_guards
from slapo.graph.trace.hf import refuse_collected
from slapo.graph.trace.import_graph import GraphImport, Path
from slapo.graph.trace.kinds import call_key, collected_keys, size_check
from slapo.graph.trace.leaf_calls import Call, LeafCalls
from slapo.graph.trace.leaves import IsLeaf
from slapo.graph.trace.nests import leaves, parts, rebuild
from slapo.graph.trace.refusals import CACHE_REFUSED, explain, refuse_effects
from slapo.graph.trace.surroundings import surroundings
from slapo.graph.trace.torch_private import FakeTensor, fullgraph_capture


@dataclass
class Capture:
    """A graph, and the calls that it holds for."""

    graph: fx.Graph
    key: Any
    #: the key as ``torch.compile`` around it sees the call
    compile_key: Any
    #: dynamo's guards on the module and on Python's globals
    state: Any
    #: conditions on the sizes of arguments
    sizes: list[str]
    #: arguments of the first call of each leaf, with fake tensors
    inputs: dict[str, Call] = field(default_factory=dict)
    #: modules below whose operations are in the graph
    entered: frozenset[str] = frozenset()
    #: path, name and value of the attributes that the forward has read
    constants: list[tuple[str, str, Any]] = field(default_factory=list)
    #: modes of all modules below, which decide what leaves return
    modes: Any = None
    #: function of the module and the arguments that runs the graph
    code: Any = None
    fits: Callable[[Any, Any], bool] = field(init=False)

    def __post_init__(self) -> None:
        self.fits = size_check(self.sizes)

    def holds(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it serves a call of its key."""
        frame = {"module": module, "args": args, "kwargs": kwargs}
        return self.fits(args, kwargs) and bool(self.state.check(frame))

    def holds_state(self, module: nn.Module) -> bool:
        """Whether module and globals are as they were."""
        return bool(self.state.check({"module": module, "args": (), "kwargs": {}}))


def capture(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_leaf: IsLeaf,
    any_batch: bool = False,
    parked: Collection[str] = (),
) -> Capture:
    """Write down what ``root.forward`` does with arguments like these.

    Parameters
    ----------
    root
        The module. It is not changed, and its own hooks are not captured.
    args, kwargs
        Arguments: tensors (real, on meta, or fake) become inputs of any size above 1, everything
        else is built in. Gradients and autocast are as they are on.
    is_leaf
        Which modules below become one call; others are entered, their hooks included.
    any_batch
        Whether the graph must serve a batch of one too: sizes of 1 are sizes like others then.
        Inputs are taken as contiguous, and a tensor that is given twice as two.
    parked
        Paths of modules below that are there for the time of the capture only.

    Raises
    ------
    TypeError
        If the arguments do not fit the signature.
    TraceError
        If the forward does something that a graph cannot hold; the message names the module, the
        line and the remedy. Nothing stays changed or patched.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    >>> captured = capture(net, (torch.ones(3, 5),), {}, is_leaf=lambda module, path: True)
    >>> [node.target for node in captured.graph.nodes]
    ['input', '0', '1', 'output']
    >>> captured.holds(net, (torch.ones(9, 5),), {})
    True
    """
    example = _Example(root, tuple(args), dict(kwargs), shares=not any_batch)
    modules, entered = sort_out(root, is_leaf)
    refuse_collected(root, entered, collected_keys())
    calls = LeafCalls(root, modules)
    with contextlib.ExitStack() as stack:
        effects = stack.enter_context(surroundings(root, any_batch))
        frame = example.frame()
        forward = FunctionType(_call_forward.__code__, {"__builtins__": builtins})
        try:
            with calls.standing_in():
                output = fullgraph_capture(forward, frame)
                refuse_effects(effects)
                for path, name in calls.left_behind:
                    if is_read(output, path, name):
                        raise TraceError(
                            f"{path!r} sets its attribute {name!r} when it is called, and the "
                            "module above reads it; return it from there, or make the module above "
                            "a leaf"
                        )
                graph = GraphImport(
                    root, example.arguments, example.places, output, calls, any_batch
                )
                graph.run(frame)
        except TraceError:
            raise
        except Exception as error:
            raise explain(error, root) from error
        # After the leaves have their classes back: guards look at them.
        sizes = size_conditions(output)
        constants = constants_read(output, root)
        state = state_guards(output, forward, modules, parked)
        for name in [n for n in forward.__globals__ if n.startswith("__compiled_fn")]:
            del forward.__globals__[name]  # dynamo's graph, which guards would keep alive
    return Capture(
        graph.graph,
        call_key(args, dict(kwargs)),
        call_key(args, dict(kwargs), within_compile=True),
        state,
        sizes,
        calls.inputs,
        graph.entered(entered),
        constants,
    )


def _call_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """The frame that dynamo sees: arguments under known names, whatever decorates the forward.

    It is copied for each capture, as dynamo leaves names in the globals of what it captures.
    """
    return module.forward(*args, **kwargs)


class _Example:
    """Arguments for a capture: tensors without a past, each once."""

    def __init__(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shares: bool
    ) -> None:
        self.root, self.args, self.kwargs, self.shares = root, args, kwargs, shares
        self.signature = inspect.signature(root.forward)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the example inputs do not fit {type(root).__name__}.forward: {error}; its "
                f"parameters are {', '.join(self.signature.parameters)}"
            ) from error
        bound.apply_defaults()
        if bound.arguments.get("use_cache") is True:
            raise TraceError(CACHE_REFUSED)
        self.given = dict(bound.arguments)
        self.arguments: dict[str, Any] = {}
        self.places: dict[int, Path] = {}
        self._made: dict[int, Tensor] = {}

    def frame(self) -> tuple[Any, ...]:
        """``(module, args, kwargs)``, split as the caller did: decorated forwards look at that."""
        given = dict(self.given)
        if given.get("use_cache", False) is None and self._states_cache():
            given["use_cache"] = False
        self.arguments = {name: self._made_of(value, (name,)) for name, value in given.items()}
        positional: list[Any] = []
        extra: dict[str, Any] = {}
        for parameter in self.signature.parameters.values():
            value = self.arguments[parameter.name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += value
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = value
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(value)
        named = {k: extra[k] if k in extra else self.arguments[k] for k in self.kwargs}
        return self.root, tuple(positional[: len(self.args)]), named

    def _states_cache(self) -> bool:
        names = list(self.signature.parameters)
        return "use_cache" in self.kwargs or names.index("use_cache") < len(self.args)

    def _made_of(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            made = self._made.get(id(value)) if self.shares else None
            if made is None:
                made = _without_past(value if self.shares else value.contiguous())
                self._made[id(value)] = made
                self.places[id(made)] = path
            return made
        elements = parts(value)
        if elements is None:
            return int(value.node.hint) if isinstance(value, torch.SymInt) else value
        items = [self._made_of(p.value, (*path, (p.access, p.key))) for p in elements]
        return rebuild(value, items)


def _without_past(value: Tensor) -> Tensor:
    """A tensor like `value`, marked as one whose sizes may differ; a copy where it is no leaf."""
    if type(value) not in (Tensor, nn.Parameter, FakeTensor):
        raise TraceError(
            f"an argument is a {type(value).__name__}, whose operations no graph shows; pass plain "
            "tensors, or make the module a leaf"
        )
    sizes = [isinstance(s, torch.SymInt) for s in value.shape]
    shape, stride = ([_number(s) for s in many] for many in (value.shape, value.stride()))
    if type(value) is Tensor and not any(sizes):
        new = value.detach()
    else:
        new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    new.requires_grad_(value.requires_grad)
    if not value.is_leaf:
        new = new.clone()  # one that the forward may write to
    for dim, size in enumerate(shape):
        # Numbers among the sizes of a fake tensor are the model's own.
        if sizes[dim] if any(sizes) else size > 1:
            torch._dynamo.maybe_mark_dynamic(new, dim)
    return new


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def sort_out(root: nn.Module, is_leaf: IsLeaf) -> tuple[dict[str, nn.Module], set[str]]:
    """Modules that stay calls, and those that may be entered, by path.

    Modules below a leaf are sorted too: forwards may reach past a child, as in
    ``self.model.decoder(x)``.
    """
    found: dict[str, nn.Module] = {}
    entered: set[str] = set()
    seen = {id(root)}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            seen.add(id(child))
            if _is_called(child):
                if is_leaf(child, here):
                    found[here] = child
                else:
                    entered.add(here)
            if not isinstance(child, torch.jit.ScriptModule):
                visit(child, here)

    visit(root, "")
    return found, entered


def _is_called(module: nn.Module) -> bool:
    """False for mere holders of others."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return getattr(type(module), "forward", None) is not nn.Module.forward


def has_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere in `value`."""
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))
