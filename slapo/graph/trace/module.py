"""Traced modules: the user's own module with a class that can run graphs.

Like ``fully_shard``, a trace changes only the class of a module: parameters, children, hooks,
attributes and names are the same objects. The graph is for inspection and rewriting. A module
without rewrites runs its own forward. One with rewrites runs dynamo's capture of each kind of call,
with the rewrites applied to each.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import fx, nn
from torch.fx import graph_module

from slapo.errors import SlapoError, TraceError
from slapo.graph.trace.leaves import Depth, IsLeaf
from slapo.graph.trace.nests import call_key, tensors
from slapo.graph.trace.nodes import graph_of, rows_of, switches_mode
from slapo.graph.trace.views import Rewrite, Stub, View, as_before
from slapo.wrapper import innermost

if TYPE_CHECKING:
    from slapo.graph.trace.capture import Capture

#: Maximum number of kinds of calls. Beyond it an argument most likely differs in each call.
MAX_KINDS = 64

#: Captures that siblings share: class -> (signature of the module, pristine capture).
Shared = dict[Any, list[tuple[Any, "Capture"]]]


class Tree:
    """Snapshot of the modules below one, and of the tensor properties that Python may have read.

    Dynamo sees no tensors of leaves, though their results depend on them. Values may change.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        modules = [m for m in self._modules if not isinstance(m, torch.jit.ScriptModule)]
        self._children = [m._modules for m in modules]
        self._tensors = [t for m in modules for t in (m._parameters, m._buffers) if t]
        self._before = self._now()

    def _now(self) -> Any:
        children = [child for table in self._children for child in table.values()]
        tensors = (tensor for table in self._tensors for tensor in table.values())
        return children, [t if t is None else (t.dtype, t.requires_grad, t.shape) for t in tensors]

    def modes(self) -> tuple[bool, ...]:
        """Return the training mode of each module."""
        return tuple([module.training for module in self._modules])

    def is_as_before(self) -> bool:
        """Return whether everything is unchanged."""
        return bool(self._now() == self._before)


class Trace:
    """Settings, graphs and rewrites of a traced module."""

    def __init__(
        self,
        origin: type[nn.Module],
        is_leaf: IsLeaf,
        shown: fx.Graph | Callable[[], fx.Graph],
        entered: frozenset[str] = frozenset(),
        first: Capture | None = None,
        inputs: Any = None,
        called: frozenset[str] | None = None,
        constants: dict[str, Any] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.origin, self.is_leaf = origin, is_leaf
        #: the graph that the schedule sees, or a function that makes it on first use
        self._shown = shown
        #: paths of the modules whose operations are in the graph
        self.entered = entered
        #: paths of the modules that it calls, if known before the graph is made
        self._called = called
        #: the arguments, and the constants by parameter, that it was traced with
        self.inputs, self.constants = inputs, constants or {}
        #: captures shared by siblings
        self.shared: Shared = {} if shared is None else shared
        self.rules: list[Rewrite] = []
        self.parked: dict[str, Stub] = {}
        self.added: list[str] = []
        #: modules that one rewrite added and another removed, by name
        self.dropped: dict[str, nn.Module] = {}
        #: the capture that was shown first; None for a preview, which never runs
        self.first = first
        self.edited: Callable[..., Any] | None = None
        self.known: list[Capture] = []
        self.number: int | None = None
        #: snapshot of the modules and tensors that captures depend on
        self.tree: Tree | None = None
        #: the latest graph with containers entered, for a pipeline
        self.joined: Any = None

    @property
    def shown(self) -> fx.Graph:
        """The graph that the schedule sees."""
        if not isinstance(self._shown, fx.Graph):
            self._shown = self._shown()
        return self._shown

    @shown.setter
    def shown(self, graph: fx.Graph) -> None:
        self._shown = graph

    def calls(self, path: str) -> bool:
        """Return whether the graph calls the module at `path`."""
        if self._called is not None and not isinstance(self._shown, fx.Graph):
            return path in self._called
        return bool(self.shown.find_nodes(op="call_module", target=path))

    @property
    def is_rewritten(self) -> bool:
        """True if calls run graphs instead of the module's own forward."""
        return bool(self.rules) or self.edited is not None

    def forget(self) -> None:
        """Drop all captures, after a change of something that they contain as a constant."""
        self.known, self.tree, self.joined = [], None, None

    def take_joined(self, key: Any, root: nn.Module) -> Any:
        """Return the last joined graph once, if it has this `key` and is still valid."""
        joined, self.joined = self.joined, None
        is_known = joined is not None and joined.capture is not None and joined.key == key
        return joined if is_known and joined.capture.holds_state(root) else None

    def edit(self) -> None:
        """Run the shown graph, however it was edited, from now on."""
        self.shown.lint()
        self.edited = code_of(self.shown)
        self.forget()

    # --- calls ---------------------------------------------------------------------------------
    def code_for(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """Return the code of a capture that is valid for a call."""
        if torch.compiler.is_dynamo_compiling():
            return _known_code(module, args, kwargs)
        # Before the guards, which cover what the forward reads and not the tensors and children of
        # leaves.
        if self.tree is None or not self.tree.is_as_before():
            self.forget()
            self.tree = Tree(module)
        key, modes = call_key(args, kwargs), self.tree.modes()
        for each in self.known:
            if each.key == key and each.modes == modes and each.holds(module, args, kwargs):
                return each.code
        # A compiled caller that reaches this must not compile it.
        return torch.compiler.disable(self._new_code)(module, key, modes, args, kwargs)

    def _new_code(
        self,
        module: nn.Module,
        key: Any,
        modes: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[..., Any]:
        # No rules can be applied to other captures: the edits were made to the shown graph alone.
        if self.edited is not None:
            first = self.first
            if first is None or (first.key == key and first.holds(module, args, kwargs)):
                return self.edited
            raise TraceError(
                f"the graph of {self.origin.__name__} was edited by hand and is valid only for "
                "calls like the traced one; this call differs in an argument's type, in a size "
                "that the code reads, or in a mode"
            )
        if len(self.known) >= MAX_KINDS:
            raise TraceError(
                f"{self.origin.__name__} was called in {MAX_KINDS} different ways, and its "
                "rewrites need a capture for each; pass the values that vary as tensors"
            )
        given = tensors([args, kwargs])
        # Each capture starts from the children before all rewrites; the rules below then remove and
        # add theirs.
        with as_before(module, given[0].device if given else None):
            each = captured(module, args, kwargs, self.is_leaf, self.shared, key, self.parked)
        for rule in self.rules:
            rule.apply(View(module, each.graph, is_shown=False))
        self._check_children(each.graph)
        if self.number is None:
            self.number = next(_NUMBERS)
            _MODULES[self.number] = module
        each.code, each.modes = code_of(each.graph), modes
        self.known.append(each)
        return each.code

    def _check_children(self, graph: fx.Graph) -> None:
        """Refuse a capture that still uses a child which rewrites have removed."""
        nodes = (*graph.find_nodes(op="call_module"), *graph.find_nodes(op="get_attr"))
        for node in nodes if self.parked else ():
            path = str(node.target)
            gone = next((p for p in self.parked if path == p or path.startswith(f"{p}.")), None)
            if gone is not None:
                raise TraceError(
                    f"this kind of call of {self.origin.__name__} also uses {gone!r} (at "
                    f"{node.name}), which a rewrite has removed, as the graph that is shown does "
                    "not use it elsewhere; leave it out of the rewrite, or trace the module with "
                    "inputs of this kind"
                )

    # --- undo and copies -------------------------------------------------------------------------
    def _copied(self) -> dict[str, Any]:
        """Return the state for a copy, which captures anew because guards cannot be copied."""
        tables = ("rules", "parked", "added", "dropped")
        state = {k: v.copy() if k in tables else v for k, v in self.__dict__.items()}
        return {**state, "known": [], "tree": None, "number": None, "joined": None}

    def saved(self) -> dict[str, Any]:
        """Return the state, for :meth:`restore`."""
        shown = self._shown
        before = copy.deepcopy(shown) if isinstance(shown, fx.Graph) else shown
        return {**self._copied(), "before": before}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        state = dict(saved)
        before, shown = state.pop("before"), state["_shown"]
        # Unless it changed, the graph stays the same object: matches that a user holds refer to its
        # nodes.
        if isinstance(shown, fx.Graph) and str(shown) != str(before):
            state["_shown"] = before
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        edited = None if self.edited is None else True
        state: dict[str, Any] = {"shared": {}, "first": None, "inputs": None, "edited": edited}
        return {**self._copied(), **state, "_shown": rows_of(self.shown)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_shown": graph_of(state["_shown"])})
        self.edited = None if self.edited is None else code_of(self.shown)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        new = object.__new__(Trace)
        new.__dict__.update({**self._copied(), "_shown": copy.deepcopy(self.shown)})
        new.rules = [copy.copy(rule) for rule in self.rules]
        return new


def captured(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: IsLeaf,
    shared: Shared,
    key: Any = None,
    parked: Collection[str] = (),
) -> Capture:
    """Return a capture; a sibling's is reused if dynamo's guards hold for this module too."""
    # These import torch._dynamo, which takes a second.
    from slapo.graph.trace.capture import capture
    from slapo.graph.trace.leaf_calls import signature

    key = call_key(args, kwargs) if key is None else key
    family = shared.setdefault((type(module), is_leaf, frozenset(parked)), [])
    own = signature(module)
    for known, each in family:
        if each.key == key and known == own and each.holds(module, args, kwargs):
            # Rules change the returned graph; siblings need it as it was captured.
            return replace(each, graph=copy.deepcopy(each.graph))
    new = capture(module, args, kwargs, is_leaf, parked=parked)
    family.append((own, replace(new, graph=copy.deepcopy(new.graph))))
    return new


# --- the class -----------------------------------------------------------------------------------
class Traced(fx.GraphModule):
    """Mixin of the class of traced modules.

    ``graph`` is the shown graph, ``code`` its source. After a manual change of the graph,
    ``recompile()`` makes it the code of the module.
    """

    _origin: type[nn.Module]
    _lineno_map = None  # torch.compile reads it on a GraphModule

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an untraced object of the original class."""
        return cls._origin(*args, **kwargs)

    @property
    def graph(self) -> fx.Graph:
        """The graph that the schedule sees."""
        shown = trace_of(self).shown
        if shown.owning_module is None:  # fx uses it to decide which calls may be dropped
            shown.owning_module = self
        return shown

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        trace_of(self).shown = graph
        trace_of(self).edit()

    @property
    def _graph(self) -> fx.Graph:  # type: ignore[override]
        return trace_of(self).shown

    @property
    def code(self) -> str:
        """The Python source of the shown graph."""
        return str(self.graph.python_code("self").src)

    def recompile(self) -> fx.graph.PythonCode:
        """Run the manually edited graph from now on."""
        caller = sys._getframe(1).f_code.co_filename
        # an enclosing graph module also calls this, without an edit
        if caller != graph_module.__file__:
            trace_of(self).edit()
        return trace_of(self).shown.python_code("self")

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        new = object.__new__(type(self))
        # fx would rebuild the module from its graph, as an object of a class of its own.
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __copy__(self) -> Traced:
        new = object.__new__(type(self))
        tables = ("_parameters", "_buffers", "_modules")
        new.__dict__ |= {k: v.copy() if k in tables else v for k, v in self.__dict__.items()}
        new.__dict__["_trace"] = copy.deepcopy(trace_of(self))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (trace_of(self).origin,), self.__dict__

    __repr__ = nn.Module.__repr__

    def __str__(self) -> str:
        """Return the modules, and the code of the shown graph."""
        return f"{nn.Module.__repr__(self)}\n\n{self.code}"


class _Eagerly:
    """Method that runs on the original forward, such as Transformers' ``generate``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        # An object of the original class that shares the state: ``generate`` calls ``self(...)``
        # and ``super()``, and uses key/value caches, which no graph holds.
        eager = object.__new__(trace_of(module).origin)
        object.__setattr__(eager, "__dict__", module.__dict__)
        return getattr(eager, self.name)


_CLASSES: WeakValueDictionary[type, type[Traced]] = WeakValueDictionary()


def class_for(origin: type[nn.Module]) -> type[Traced]:
    """Return the class of traced modules of one class, with Traced and the original as bases.

    The original base is added afterwards, so that its ``__init_subclass__`` does not run.
    """
    known = _CLASSES.get(origin)
    if known is not None:
        return known
    own = origin.forward

    @functools.wraps(own)  # trainers select batch columns by the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = self.__dict__["_trace"]
        if not trace.rules and trace.edited is None:
            return own(self, *args, **kwargs)
        return trace.code_for(self, args, kwargs)(self, *args, **kwargs)

    body = {"__module__": origin.__module__, "forward": forward, "_origin": origin}
    generate = getattr(origin, "generate", None)
    if str(getattr(generate, "__module__", "")).startswith("transformers."):
        body["generate"] = _Eagerly("generate")
    made: Any = type(origin.__name__, (Traced,), body)
    try:
        made.__bases__ = (Traced, origin)
    except TypeError as error:
        raise TraceError(
            f"an object of {origin.__name__} cannot have a graph: {error}; make the module a leaf"
        ) from error
    _CLASSES[origin] = made
    return made


def trace_of(module: nn.Module) -> Trace:
    """Return the trace of a traced module."""
    trace: Trace = module.__dict__["_trace"]
    return trace


def attach(module: nn.Module, trace: Trace) -> None:
    """Turn `module` into a traced one."""
    kind = class_for(trace.origin)
    vars(module)["_trace"] = trace
    module.__class__ = kind


def _restored(origin: type[nn.Module]) -> Traced:
    return object.__new__(class_for(origin))


def origin_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has, or had before it was traced."""
    return trace_of(module).origin if isinstance(module, Traced) else type(module)


def inlined_in(module: nn.Module) -> frozenset[str]:
    """Return the paths of modules whose operations are in the graph of a traced module."""
    return trace_of(module).entered if isinstance(module, Traced) else frozenset()


def uncalled_in(module: nn.Module) -> frozenset[str]:
    """Return the paths of uncalled modules, whose operations a rewritten parent runs."""
    rewritten = isinstance(module, Traced) and trace_of(module).is_rewritten
    return inlined_in(module) if rewritten else frozenset()


def kept_whole_in(module: nn.Module) -> frozenset[str]:
    """Return the paths of modules that a flat trace keeps as one call each."""
    depth = trace_of(module).is_leaf if isinstance(module, Traced) else None
    if not isinstance(depth, Depth) or not depth.flatten or not depth.leaf_modules:
        return frozenset()
    return frozenset(
        path
        for path, each in module.named_modules()
        if path in depth.leaf_modules or type(innermost(each)).__name__ in depth.leaf_modules
    )


def check_traceable(module: nn.Module) -> None:
    """Refuse an object whose ``forward`` was replaced, as by wrappers of other libraries."""
    if "forward" in vars(module):
        raise TraceError(
            f"forward was set on this {type(module).__name__} itself, and a trace sees only the "
            "class's forward; trace before it is set, or make the module a leaf"
        )


# --- code ----------------------------------------------------------------------------------------
def code_of(graph: fx.Graph) -> Callable[..., Any]:
    """Return a function ``(module, *args, **kwargs)`` that runs a graph."""
    source = graph.python_code(root_module="self")
    run: Callable[..., Any] = graph_module._forward_from_src(source.src, source.globals)
    return _modes_restored(run) if any(map(switches_mode, graph.nodes)) else run


def _modes_restored(run: Callable[..., Any]) -> Callable[..., Any]:
    """Restore ``no_grad`` and ``autocast`` if an error occurs inside such a region."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        grad = torch.is_grad_enabled()
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        try:
            return run(*args, **kwargs)
        except BaseException:
            torch._C._set_grad_enabled(grad)
            for device, enabled, dtype in casts:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            raise

    return guarded


#: Rewritten modules by number: dynamo evaluates `_candidates` on constants only, and a module is
#: none.
_MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_NUMBERS = itertools.count()


def _known_code(module: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return the code of a known kind of call, inside an outer torch.compile."""
    trace = module._trace
    # Read here, so that the outer dynamo guards on them too.
    modes = () if trace.tree is None else trace.tree.modes()
    key = call_key(args, kwargs, within_compile=True)
    # An outer graph can contain neither the guards of a capture nor a new capture. So the choice is
    # made while it is traced, and is valid as long as the outer guards on key, modes and attributes
    # hold.
    for index in _candidates(trace.number, key, modes):
        known = trace.known[index]
        if known.fits(args, kwargs) and all(
            getattr(module.get_submodule(path), name) == value
            for path, name, value in known.constants
        ):
            return known.code
    raise RuntimeError(
        "a rewritten module got a new kind of call inside torch.compile; call the model once this "
        "way before it is compiled"
    )


def _candidates(number: int | None, key: Any, modes: Any) -> tuple[int, ...]:
    """Return the captures of a key with unchanged state; runs while the outer dynamo traces."""
    module = None if number is None else _MODULES.get(number)
    trace = None if module is None else trace_of(module)
    if module is None or trace is None or trace.tree is None or not trace.tree.is_as_before():
        return ()
    found = [
        e.compile_key == key and e.modes == modes and e.holds_state(module) for e in trace.known
    ]
    return tuple(index for index, holds in enumerate(found) if holds)


# Like ``torch.compiler.assume_constant_result``, which would import dynamo here.
_candidates._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- rewrites ------------------------------------------------------------------------------------
def rewrite(module: fx.GraphModule, rule: Rewrite) -> None:
    """Apply a rule to the shown graph and to every later capture; an error changes nothing."""
    if not isinstance(module, Traced):  # a user's graph module, which runs its own graph
        rule.apply(View(module, module.graph))
        module.recompile()
        return
    trace = trace_of(module)
    if trace.edited is not None:
        raise SlapoError(
            f"the graph of {trace.origin.__name__} was edited by hand, but a rewrite would change "
            "the captures of the module instead; rewrite first, or continue by hand"
        )
    # On the shown graph first: an error there leaves module and rules unchanged.
    rule.apply(View(module, trace.shown))
    trace.rules.append(rule)
    trace.forget()


def forget_captures(*modules: nn.Module) -> None:
    """Drop the captures of traced modules after a change below them.

    Captures contain constants such as parameter shapes. Unchanged ones are found again among the
    captures that siblings share.
    """
    for module in map(innermost, modules):
        if isinstance(module, Traced):
            trace_of(module).forget()


def rules_of(module: nn.Module) -> list[Rewrite]:
    """Return the rewrites of a traced module, in order."""
    return trace_of(module).rules if isinstance(module, Traced) else []
