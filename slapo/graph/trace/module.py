"""The module that stands in for a traced one: a graph, the original's state, and its limits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx.graph_module import _forward_from_src

from slapo.errors import SlapoError
from slapo.graph.trace.attributes import (
    ABSENT,
    Held,
    differs,
    is_kept,
    is_same_tensor,
    kind_of_module,
    tensor_at,
    tensors_held,
    told,
    value_of,
    without_entry,
)
from slapo.graph.trace.classes import check_names, class_for
from slapo.graph.trace.contract import (
    CallContract,
    Problem,
    argument_problem,
    bind_arguments,
    call_key,
    parameter_kinds,
    state_problem,
)
from slapo.graph.trace.state import SLOTS
from slapo.wrapper import innermost

#: What the variants of a traced module share with it.
_LENT = (
    *SLOTS,
    "_non_persistent_buffers_set",
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


class _Forward(property):
    """What an object has as ``forward`` and a class as a function of the object, as methods are.

    A property, as dynamo knows those: a descriptor of our own it would enter without end.
    """

    def __call__(self, module: TracedModule, *args: Any, **kwargs: Any) -> Any:
        """``super().forward``, and classes that wrap the one of the class they derive from."""
        return self.__get__(module)(*args, **kwargs)


class TracedModule(fx.GraphModule):
    """An ``fx.GraphModule`` that keeps all of its original and compiles only when used.

    It is an object of the original's class, too: whatever that does of its own when it is
    trained, moved, saved, loaded or set attributes of, it does on.

    Four things differ from ``fx.GraphModule``:

    - Parameters, buffers (persistent or not), children and plain attributes of the original all
      stay, under the same names, used by the graph or not; so ``state_dict`` keys never change.
    - ``recompile()`` only marks the code as stale; code is generated at the next call, or when
      ``code`` or the signature is looked at. Rewriting N subgraphs compiles once.
    - A call outside the limits of the trace (:class:`CallContract`) is a :class:`SlapoError`.
    - Traced modules of one class share a class. fx makes one for each graph, and whoever sets an
      attribute of ``nn.Module``, as each symbolic trace does, has Python visit all of them.
    """

    contract: CallContract
    origin: type[nn.Module]
    #: Paths of the modules whose operations are in the graphs.
    _inlined: frozenset[str] = frozenset()
    #: Paths that a flat trace was told to leave alone.
    _kept_whole: frozenset[str] = frozenset()
    _kinds: list[tuple[str, str]]

    #: The class as written, which those that :func:`class_for` makes derive from.
    _kind: ClassVar[type[TracedModule]]

    def __new__(cls, *args: Any, **kwargs: Any) -> TracedModule:
        """An object of this class, which needs no class of its own: it keeps its code itself."""
        return object.__new__(cls)

    @classmethod
    def from_graph(
        cls,
        root: nn.Module,
        graph: fx.Graph,
        contract: CallContract,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> TracedModule:
        """The traced form of `root`; `root` itself is left as it is.

        Raises
        ------
        TraceError
            If `root` has a method or attribute under a name that a graph has another use for.
        """
        origin = kind_of_module(root)
        if not isinstance(root, TracedModule):
            check_names(cls, root)
        module = _empty(cls, origin)
        for slot in SLOTS:
            module.__dict__[slot] = root.__dict__[slot].copy()
        module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
        for name, value in root.__dict__.items():
            module.__dict__.setdefault(name, value)
        for name, tensor in (constants or {}).items():
            module.register_buffer(name, tensor, persistent=False)
        module.__dict__["_held"] = tensors_held(root, constants or {})
        module.training = root.training
        module.contract = contract
        module.origin = origin
        module.graph = graph
        return module

    # --- lazy compilation --------------------------------------------------------------------
    def recompile(self) -> fx.graph.PythonCode:
        """Mark the generated code as out of date.

        Who changes this graph alone makes it differ from those for other calls; they are dropped
        then, and such calls refused. Rewrites change all of them: :meth:`rewritten_together`.
        """
        self.__dict__["_stale"] = True
        if not self.__dict__.get("_together"):
            self.__dict__["_variants"] = ()
        return None  # type: ignore[return-value]

    @contextmanager
    def rewritten_together(self) -> Iterator[None]:
        """Within the block changes of one graph are made to all graphs of the module."""
        before = self.__dict__.get("_together", False)
        self.__dict__["_together"] = True
        try:
            yield
        finally:
            self.__dict__["_together"] = before

    def compile_now(self) -> None:
        """Check the graph and generate its Python code.

        fx would put the code into the class, and wrap ``__call__`` there to decorate errors.
        """
        self._graph.lint()
        code = self._graph.python_code(root_module="self")
        forward = _forward_from_src(code.src, code.globals)
        signature = inspect.signature(forward)
        self.__dict__ |= {
            "_kinds": parameter_kinds(self._graph),
            "_code": code.src,
            "_lineno_map": code._lineno_map,
            "_prologue_start": code._prologue_start,
            "_forward": forward,
            "_signature": signature.replace(parameters=[*signature.parameters.values()][1:]),
            "_stale": False,
        }

    @property
    def is_stale(self) -> bool:
        """True when the graph changed after its code was generated."""
        return bool(self.__dict__["_stale"])

    def delete_submodule(self, target: str) -> bool:
        """Remove a module that no graph calls; a list that the code looped over has one less."""
        removed = super().delete_submodule(target)
        above, _, entry = target.rpartition(".")
        if removed and above:
            for each in self.graphs:
                left = without_entry(each.contract.attributes, above, entry)
                each.contract = replace(each.contract, attributes=left)
        return removed

    def _recompile_submodules(self) -> list[tuple[str, fx.graph.PythonCode]]:
        return []  # children are compiled when they are used

    @property
    def code(self) -> str:
        """The Python source generated from the graph."""
        if self._stale:
            self.compile_now()
        return self._code

    def __str__(self) -> str:
        """Modules and code, always those of the present graph."""
        if self._stale:
            self.compile_now()
        return super().__str__()

    # --- several graphs ----------------------------------------------------------------------
    def set_variants(self, variants: tuple[TracedModule, ...]) -> None:
        """Have other graphs for calls that this one does not hold for.

        Parameters
        ----------
        variants
            Traced forms of the same module; they live on the state of this from now on.
        """
        self.__dict__["_variants"] = variants
        for variant in variants:
            self._lend(variant)

    @property
    def graphs(self) -> tuple[TracedModule, ...]:
        """The owners of all graphs of the module, the one that is shown first."""
        shown: TracedModule = self.__dict__.get("_shown", self)
        variants: tuple[TracedModule, ...] = shown.__dict__.get("_variants", ())
        for variant in variants:
            shown._lend(variant)
        return (shown, *variants)

    @property
    def has_limits(self) -> bool:
        """True where there are calls that it refuses, or serves by another of its graphs.

        Its code in another graph would serve them like all others.
        """
        return not self.contract.is_trivial or bool(self.__dict__.get("_variants"))

    def _lend(self, variant: TracedModule) -> None:
        """Whatever has become of this module's state is the variant's too."""
        for slot in _LENT:
            variant.__dict__[slot] = self.__dict__[slot]
        variant.__dict__["_shown"] = self

    def _code_or_what_was_set(self) -> Callable[..., Any]:
        """The code of the graph, always that of the present one; or what has been put in place."""
        state = self.__dict__
        if "forward" in state:
            return state["forward"]
        if state["_stale"]:
            self.compile_now()
        function = state["_forward"]

        # Bound by hand: before torch 2.13 dynamo knows no other way that gives the same
        # instructions when it comes here once more, with code that is no longer stale.
        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        forward.__signature__ = state["_signature"]  # type: ignore[attr-defined]
        return forward

    def _set_forward(self, function: Callable[..., Any]) -> None:
        self.__dict__["forward"] = function

    def _delete_forward(self) -> None:
        if "forward" not in self.__dict__:
            raise AttributeError("forward")
        del self.__dict__["forward"]

    forward = _Forward(_code_or_what_was_set, _set_forward, _delete_forward)

    # --- calls -------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the call against the contract, then run hooks and the graph that serves it."""
        state = self.__dict__
        if "forward" in state:
            return nn.Module.__call__(self, *args, **kwargs)
        # Here, not in what Module.compile() has dynamo interpret. When that meets a call of a graph
        # module, it asks for its forward first, and so for its code.
        if not torch.compiler.is_dynamo_compiling() and state["_stale"]:
            self.compile_now()
        if self.contract.is_trivial and not state.get("_held"):
            return nn.Module.__call__(self, *args, **kwargs)
        module = self._serving(args, kwargs)
        return nn.Module.__call__(module, *args, **kwargs)

    def _serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
        """The owner of the graph that holds for a call."""
        problem = self._problem(args, kwargs)
        if problem is None or _is_traced(args, kwargs):
            return self
        for variant in self.__dict__.get("_variants", ()):
            self._lend(variant)
            found = variant._problem(args, kwargs)
            if found is None:
                return variant
            problem = min(problem, found, key=lambda each: each.distance)
        raise SlapoError(f"{self._label}: {problem.text}")

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem | None:
        contract = self.contract
        problem = self._mode_problem(contract) or state_problem(contract)
        if problem is not None:
            return Problem(problem)
        if self._stale:
            self.compile_now()
        kinds, state = self._kinds, self.__dict__
        if torch.compiler.is_dynamo_compiling() or contract.knows_tensors:
            return argument_problem(contract, bind_arguments(kinds, args, kwargs))
        # In training one call is like the last. The kinds are others when the code is.
        key = call_key(args, kwargs)
        passed = state.get("_passed")
        if passed is not None and passed[0] is contract and passed[1] is kinds and passed[2] == key:
            return None
        found = argument_problem(contract, bind_arguments(kinds, args, kwargs))
        state["_passed"] = (contract, kinds, key) if found is None and key is not None else None
        return found

    def _mode_problem(self, contract: CallContract) -> str | None:
        if contract.training is not None and contract.training != self.training:
            was, now = _mode(contract.training), _mode(self.training)
            return (
                f"traced in {was} mode and its graph differs in {now} mode; trace it in {now} "
                f"mode, or call .{was if was == 'eval' else 'train'}() first"
            )
        for path in contract.inlined:
            flag = _training_of(self, path)
            if flag is not None and flag != self.training:
                return (
                    f"{path!r} is in {_mode(flag)} mode and its operations are part of this graph, "
                    f"which is in {_mode(self.training)} mode; set the modes alike, or trace with "
                    "it in leaf_modules"
                )
        if contract.dtype is not None:
            dtype = _first_float_dtype(self)
            if dtype is not None and dtype != contract.dtype:
                return (
                    f"traced with {contract.dtype} parameters, they are now {dtype}; convert the "
                    "model before tracing it"
                )
        return self._attribute_problem(contract) or self._tensor_problem()

    def _attribute_problem(self, contract: CallContract) -> str | None:
        """A graph has attributes such as the number of heads built in."""
        at: str | None = None
        module: nn.Module | None = None
        shown = self.__dict__.get("_shown", self)
        for path, name, traced in contract.attributes:
            if path != at:
                at, module = path, _module_at(shown, path)
            if module is None or is_kept(module, name, traced):
                continue
            now = value_of(module, name)
            if now is not ABSENT or not path:
                place, is_now, was = told(traced, now)
                where = f"{path}.{name}" if path else name
                return (
                    f"attribute {where + place!r} is {is_now}, but the graph was traced with "
                    f"{was}; {_remedy(name)}"
                )
        return None

    def _tensor_problem(self) -> str | None:
        """Plain tensors are buffers of a graph that was recorded; the attributes stay as well."""
        held: Held = self.__dict__.get("_held", {})
        for (path, place), (constant, tensor) in held.items():
            module = _module_at(self.__dict__.get("_shown", self), path)
            now = tensor if module is None else tensor_at(module, place)
            if now is tensor:
                continue
            buffer = self._buffers.get(constant)
            if buffer is not None and is_same_tensor(now, buffer):
                held[path, place] = constant, now
                continue
            name, *keys = place
            where = f"{path}.{name}" if path else name
            where += "".join(f"[{key!r}]" for key in keys)
            return (
                f"attribute {where!r} is another tensor, but the graph was recorded with the one "
                "it had; set it before the trace, or make it a buffer"
            )
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that the graph has built in cannot be set any more."""
        self._check_built_in(name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Nor can they be deleted."""
        self._check_built_in(name, ABSENT)
        super().__delattr__(name)

    def _check_built_in(self, name: str, value: Any) -> None:
        """Refuse a value that none of the graphs has; ``train`` may set one for each mode."""
        if "contract" not in self.__dict__:
            return
        traced = [
            next((t for p, n, t in each.contract.attributes if not p and n == name), value)
            for each in self.graphs
        ]
        if all(differs(each, value) for each in traced):
            place, new, was = told(traced[0], value)
            change = "deleting it" if value is ABSENT else f"setting it to {new}"
            raise SlapoError(
                f"{self._label}: its graph was traced with {name}{place} = {was}, {change} "
                f"would change nothing; {_remedy(name)}"
            )

    @property
    def _label(self) -> str:
        return f"traced {self.origin.__name__}"

    # --- copies ------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        new = object.__new__(type(self))
        memo[id(self)] = new
        state = self._state_but_graph()
        state.pop("contract")
        new.__dict__.update(copy.deepcopy(state, memo))
        new.__dict__["contract"] = self.contract  # immutable, and its values may not copy
        # The graph has its own memo: fx keeps nodes in it, which are no business of the caller's.
        with new.rewritten_together():
            new.graph = copy.deepcopy(self._graph)
        return new

    def __copy__(self) -> TracedModule:
        """The same parameters and children, and graphs of its own."""
        state = self._state_but_graph()
        state |= {slot: state[slot].copy() for slot in SLOTS}
        state["_variants"] = tuple(copy.copy(variant) for variant in state.get("_variants", ()))
        return _rebuild(self._kind, state, copy.deepcopy(self._graph))

    def _replicate_for_data_parallel(self) -> TracedModule:
        """As ``nn.DataParallel`` wants it: without parameters, which it sets as attributes."""
        replica = copy.copy(self)
        replica.__dict__["_parameters"] = {}
        replica.__dict__["_is_replica"] = True
        return replica

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._state_but_graph()
        return _rebuild, (self._kind, state, self._graph)

    def _state_but_graph(self) -> dict[str, Any]:
        own = ("_graph", "_code", "_forward", "_signature", "_passed", "_shown")
        return {name: value for name, value in self.__dict__.items() if name not in own}


def compile_graphs(model: nn.Module) -> None:
    """Generate the code of every graph now: errors show here, and torch.compile sees plain code.

    In a capture it would be too late: a child that is compiled is no module there, as fx checks it.
    """
    for module in map(innermost, model.modules()):
        if isinstance(module, TracedModule) and module.is_stale:
            module.compile_now()


def inlined_in(module: nn.Module) -> frozenset[str]:
    """Paths of the modules below one whose operations are in its graphs; nothing for no graph."""
    return module._inlined if isinstance(module, TracedModule) else frozenset()


def kept_whole_in(module: nn.Module) -> frozenset[str]:
    """Paths that a flat trace was told to keep as one call each."""
    return module._kept_whole if isinstance(module, TracedModule) else frozenset()


def _empty(kind: type[TracedModule], origin: type[nn.Module]) -> TracedModule:
    """A traced module without state, contract and operations."""
    kind = getattr(kind, "_kind", kind)
    module = kind(nn.Module(), fx.Graph(), kind.__name__)
    module.__class__ = class_for(kind, origin)  # only now: fx would call the original's __init__
    return module


def _rebuild(kind: type[TracedModule], state: dict[str, Any], graph: fx.Graph) -> TracedModule:
    module = _empty(kind, state["origin"])
    module.__dict__.update(state)
    with module.rewritten_together():
        module.graph = graph
    return module


def _is_traced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a trace meets the module, of which it makes one call: that one will be checked."""
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def _remedy(attribute: str) -> str:
    if "gradient_checkpointing" in attribute:  # of Transformers, whose layers ask for it
        return "checkpoint its layers by sch[path].checkpoint() instead"
    return "set it before the trace"


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _module_at(module: nn.Module, path: str) -> nn.Module | None:
    """A module at or below; None when a rewrite has removed it."""
    found: nn.Module | None = module
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if found is not None else None
    return found


def _training_of(module: nn.Module, path: str) -> bool | None:
    found = _module_at(module, path)
    return None if found is None else found.training


def _first_float_dtype(module: nn.Module) -> torch.dtype | None:
    """Asked at every call, so without the sets and generators of ``module.parameters()``."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dtype.is_floating_point:
            return parameter.dtype
    for child in module._modules.values():
        dtype = None if child is None else _first_float_dtype(child)
        if dtype is not None:
            return dtype
    return None


# --- stand-ins until the new room of traces is merged ------------------------------------------
Traced = TracedModule
_RULES = "_slapo_rules"


class View:
    """One graph of a traced module while it is rewritten."""

    def __init__(
        self, module: Any, graph: fx.Graph, is_shown: bool = True, training: bool | None = None
    ) -> None:
        self.module, self.graph, self.is_shown = module, graph, is_shown
        self.training = module.training if training is None else training

    def get_submodule(self, path: str) -> nn.Module:
        """The child, parked ones included."""
        parked = self.module.__dict__.get("_slapo_parked", {})
        hidden = self.module.__dict__.get(path)
        if isinstance(hidden, nn.Module):
            return hidden
        found: nn.Module = parked[path] if path in parked else self.module.get_submodule(path)
        return found

    def add(self, stem: str, child: nn.Module) -> str:
        """Register a child as ``<stem>_<k>``; out of sight for a graph that is not shown."""
        k = 0
        while hasattr(self.module, f"{stem}_{k}"):
            k += 1
        if self.is_shown:
            self.module.add_module(f"{stem}_{k}", child)
        else:
            self.module.__dict__[f"{stem}_{k}"] = child
        return f"{stem}_{k}"


def rules_of(module: Any) -> list[Any]:
    """The rewrites of a module."""
    rules: list[Any] = module.__dict__.get(_RULES, [])
    return rules


def rewrite(module: Any, rule: Any) -> None:
    """Apply a rule and remember it."""
    rule.apply(View(module, module.graph))
    module.__dict__.setdefault(_RULES, []).append(rule)
    module.recompile()


def park_unused(module: Any, targets: Any) -> list[str]:
    """Take children out that the shown graph calls no more."""
    parked = module.__dict__.setdefault("_slapo_parked", {})
    for target in targets:
        parked[target] = module.get_submodule(target)
        module.delete_submodule(target)
    return list(targets)
