"""The module that stands in for a traced one: a graph, the original's state, and its limits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from slapo.errors import SlapoError


class Guard(Protocol):
    """A condition on the arguments of a call."""

    @property
    def text(self) -> str:
        """The condition as a user would write it."""

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """Whether a call fits; `bound` is parameter name -> argument."""


@dataclass(frozen=True)
class CallContract:
    """What a traced graph may be called with; anything else is refused, not computed wrongly.

    Parameters
    ----------
    concrete
        Parameter name -> the value it was traced with. ``{"kwargs": {}}`` for a ``**kwargs``
        traced empty.
    never_none
        Parameters traced as tensors for which None would have taken another branch.
    size_guards
        Limits on tensor sizes that the trace relied on.
    training
        The mode the graph holds for; None when it holds for both.
    dtype
        The parameters' dtype, when the graph bakes it in.
    inlined
        Paths of the modules whose operations are in the graph, when these depend on the mode: they
        follow the flag of the traced module, so theirs must be the same.
    """

    concrete: Mapping[str, Any] = field(default_factory=dict)
    never_none: frozenset[str] = frozenset()
    size_guards: tuple[Guard, ...] = ()
    training: bool | None = None
    dtype: torch.dtype | None = None
    inlined: tuple[str, ...] = ()

    @property
    def is_trivial(self) -> bool:
        """True when every call is allowed."""
        return not (
            self.concrete
            or self.never_none
            or self.size_guards
            or self.training is not None
            or self.dtype is not None
            or self.inlined
        )


class _CompileAtAccess:
    """Class attribute ``forward`` of a stale :class:`TracedModule`: compiles, then steps aside."""

    def __get__(self, module: TracedModule | None, owner: type) -> Any:
        if module is None:
            return self
        module.compile_now()
        return module.forward


_MODULE_STATE = ("_parameters", "_buffers", "_modules")
_MISSING = object()


class TracedModule(fx.GraphModule):
    """An ``fx.GraphModule`` that keeps all of its original and compiles only when used.

    Three things differ from ``fx.GraphModule``:

    - Parameters, buffers (persistent or not), children and plain attributes of the original all
      stay, under the same names, used by the graph or not; so ``state_dict`` keys never change.
    - ``recompile()`` only marks the code as stale; code is generated at the next call, or when
      ``code`` or the signature is looked at. Rewriting N subgraphs compiles once.
    - A call outside the limits of the trace (:class:`CallContract`) is a :class:`SlapoError`.
    """

    contract: CallContract
    origin: type[nn.Module]

    forward = _CompileAtAccess()

    @classmethod
    def from_graph(
        cls,
        root: nn.Module,
        graph: fx.Graph,
        contract: CallContract,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> TracedModule:
        """The traced form of `root`; `root` itself is left as it is."""
        origin = root.origin if isinstance(root, TracedModule) else type(root)
        module = cls(nn.Module(), fx.Graph(), origin.__name__)
        for slot in _MODULE_STATE:
            module.__dict__[slot] = root.__dict__[slot].copy()
        module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
        for name, value in root.__dict__.items():
            module.__dict__.setdefault(name, value)
        for name, tensor in (constants or {}).items():
            module.register_buffer(name, tensor, persistent=False)
        module.training = root.training
        module.contract = contract
        module.origin = origin
        module.graph = graph
        return module

    # --- lazy compilation --------------------------------------------------------------------
    def recompile(self) -> fx.graph.PythonCode:
        """Mark the generated code as out of date."""
        own = type(self)
        if "forward" in vars(own):
            del own.forward
        self.__dict__["_stale"] = True
        return None  # type: ignore[return-value]

    def compile_now(self) -> fx.graph.PythonCode:
        """Check the graph and generate its Python code."""
        self._graph.lint()
        self.__dict__["_kinds"] = parameter_kinds(self._graph)
        code = super().recompile()
        # fx wraps __call__ to decorate errors on stderr; ours must stay, it checks the contract.
        del type(self).__call__
        self.__dict__["_stale"] = False
        return code

    @property
    def is_stale(self) -> bool:
        """True when the graph changed after its code was generated."""
        return bool(self.__dict__["_stale"])

    def _recompile_submodules(self) -> list[tuple[str, fx.graph.PythonCode]]:
        return []  # children are compiled when they are used

    @property
    def code(self) -> str:
        """The Python source generated from the graph."""
        if self._stale:
            self.compile_now()
        return self._code

    # --- calls -------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the call against the contract, then run hooks and the graph."""
        if not self.contract.is_trivial:
            self._check_call(args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_mode(self.contract)
        if self._stale:
            self.compile_now()
        check_arguments(self.contract, bind_arguments(self._kinds, args, kwargs), self._label)

    def _check_mode(self, contract: CallContract) -> None:
        if contract.training is not None and contract.training != self.training:
            was, now = _mode(contract.training), _mode(self.training)
            raise SlapoError(
                f"{self._label}: traced in {was} mode and its graph differs in {now} mode; "
                f"trace it in {now} mode, or call .{was if was == 'eval' else 'train'}() first"
            )
        for path in contract.inlined:
            flag = _training_of(self, path)
            if flag is not None and flag != self.training:
                raise SlapoError(
                    f"{self._label}: {path!r} is in {_mode(flag)} mode and its operations are part "
                    f"of this graph, which is in {_mode(self.training)} mode; set the modes alike, "
                    "or trace with it in leaf_modules"
                )
        if contract.dtype is not None:
            dtype = _first_float_dtype(self)
            if dtype is not None and dtype != contract.dtype:
                raise SlapoError(
                    f"{self._label}: traced with {contract.dtype} parameters, they are now {dtype};"
                    " convert the model before tracing it"
                )

    @property
    def _label(self) -> str:
        return f"traced {self.origin.__name__}"

    def __getattr__(self, name: str) -> Any:
        """Methods and properties of the original class stay usable on the traced module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            origin = self.__dict__.get("origin")
            if origin is None or name.startswith("__") or name == "forward":
                raise
            if inspect.getattr_static(origin, name, _MISSING) is _MISSING:
                raise
            # Its methods may call super(), so they need an object of the class: one that shares
            # the state of this.
            stand_in = object.__new__(origin)
            object.__setattr__(stand_in, "__dict__", self.__dict__)
            return getattr(stand_in, name)

    # --- copies ------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        kind = _kind_of(self)
        new = kind.__new__(kind)
        memo[id(self)] = new
        nn.Module.__init__(new)
        type(new).__name__ = type(self).__name__
        state = {k: v for k, v in self.__dict__.items() if k not in ("_graph", "contract")}
        new.__dict__.update(copy.deepcopy(state, memo))
        new.__dict__["contract"] = self.contract  # immutable, and its values may not copy
        # The graph has its own memo: fx keeps nodes in it, which are no business of the caller's.
        new.graph = copy.deepcopy(self._graph)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("_graph", "_code")}
        return _rebuild, (_kind_of(self), type(self).__name__, state, self._graph)


def _kind_of(module: TracedModule) -> type[TracedModule]:
    """The class as written; fx makes one of its own for each graph module."""
    kind: type[TracedModule] = type(module).__mro__[1]
    return kind


def _rebuild(
    kind: type[TracedModule], name: str, state: dict[str, Any], graph: fx.Graph
) -> TracedModule:
    module = kind(nn.Module(), fx.Graph(), name)
    module.__dict__.update(state)
    module.graph = graph
    return module


def check_arguments(contract: CallContract, bound: Mapping[str, Any], label: str) -> None:
    """Refuse a call that a traced graph does not hold for.

    Parameters
    ----------
    contract
        The graph's.
    bound
        Parameter name -> value of this call; absent parameters are left out.
    label
        What to call the module.

    Raises
    ------
    SlapoError
        Naming the argument and the remedy.
    """
    for name, traced in contract.concrete.items():
        given = bound.get(name, _MISSING)
        if given is not _MISSING and not same_value(given, traced):
            raise SlapoError(
                f"{label}: argument {name!r} is {_short(given)}, but the module was "
                f"traced with {_short(traced)}; {_remedy(name, given)}"
            )
    for name in contract.never_none:
        if bound.get(name) is None:
            raise SlapoError(
                f"{label}: argument {name!r} is None, but the module was traced for a "
                f"tensor there; trace it with concrete_args={{{name!r}: None}} to leave it out"
            )
    for guard in contract.size_guards:
        if not guard.holds(bound):
            raise SlapoError(
                f"{label}: the trace holds only while {guard.text}; trace again with "
                "inputs of the new sizes"
            )


def parameter_kinds(graph: fx.Graph) -> list[tuple[str, str]]:
    """(name, "" or "*" or "**") of each forward parameter."""
    targets = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return [(t.lstrip("*"), "*" * (len(t) - len(t.lstrip("*")))) for t in targets]


def bind_arguments(
    kinds: list[tuple[str, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Parameter name -> value of this call; absent parameters are left out."""
    bound: dict[str, Any] = {}
    extra = dict(kwargs)
    position = 0
    for name, stars in kinds:
        if stars == "*":
            bound[name], position = args[position:], len(args)
        elif stars == "**":
            bound[name] = {k: v for k, v in extra.items() if v is not None}
        elif position < len(args):
            bound[name] = args[position]
            position += 1
        elif name in extra:
            bound[name] = extra.pop(name)
    return bound


def same_value(given: Any, traced: Any) -> bool:
    """Whether an argument is the constant that a graph was traced with; tensors never are."""
    if given is traced:
        return True
    if isinstance(given, torch.Tensor) or isinstance(traced, torch.Tensor):
        return False
    if isinstance(traced, (tuple, list)) and isinstance(given, type(traced)):
        return len(given) == len(traced) and all(map(same_value, given, traced))
    if isinstance(traced, dict) and isinstance(given, dict):
        return given.keys() == traced.keys() and all(
            same_value(given[k], v) for k, v in traced.items()
        )
    return type(given) is type(traced) and bool(given == traced)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remedy(name: str, given: Any) -> str:
    if type(given).__name__.endswith("Cache"):
        return "graphs hold no caches: call the model with use_cache=False"
    return (
        f"trace it with that value (concrete_args={{{name!r}: ...}} or example_inputs) to call it "
        "so"
    )


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _training_of(module: nn.Module, path: str) -> bool | None:
    """The flag of a module below; None when a rewrite has removed it."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = found._modules.get(name) if found is not None else None
    return None if found is None else found.training


def _first_float_dtype(module: nn.Module) -> torch.dtype | None:
    """Asked at every call, so without the sets and generators of ``module.parameters()``."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dtype.is_floating_point:
            return parameter.dtype
    found = (_first_float_dtype(child) for child in module._modules.values() if child is not None)
    return next((dtype for dtype in found if dtype is not None), None)
