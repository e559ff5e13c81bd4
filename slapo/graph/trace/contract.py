"""What a traced graph may be called with; anything else is refused, not computed wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn

from slapo.errors import SlapoError
from slapo.graph.trace.reads import global_value


class Guard(Protocol):
    """A condition on the arguments of a call."""

    @property
    def text(self) -> str:
        """The condition as a user would write it."""

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """Whether a call fits; `bound` is parameter name -> argument."""

    def parameters(self) -> set[str]:
        """Names of the parameters that the condition is about."""


NO_CACHE = "graphs hold no caches: call the model with use_cache=False"


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
    states
        State of the process that the traced code asked for, and what it was: see :data:`STATES`.
    attributes
        Path, name and value of plain attributes that the traced code may have read.
    globals
        The same of plain values of Python modules.
    unread
        Entries of ``**kwargs`` that no code reads: they may be anything.
    is_trivial
        True when every call is allowed.
    knows_tensors
        True when a constant is a tensor: it is known by itself, not by what :func:`call_key` tells.
    """

    concrete: Mapping[str, Any] = field(default_factory=dict)
    never_none: frozenset[str] = frozenset()
    size_guards: tuple[Guard, ...] = ()
    training: bool | None = None
    dtype: torch.dtype | None = None
    inlined: tuple[str, ...] = ()
    states: Mapping[str, Any] = field(default_factory=dict)
    attributes: tuple[tuple[str, str, Any], ...] = ()
    globals: tuple[tuple[str, str, Any], ...] = ()
    unread: frozenset[str] = frozenset()
    is_trivial: bool = field(init=False, repr=False, compare=False)
    knows_tensors: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits = (
            *(self.concrete, self.never_none, self.size_guards, self.inlined),
            *(self.states, self.attributes, self.globals),
        )
        is_trivial = self.training is None and self.dtype is None and not any(map(len, limits))
        object.__setattr__(self, "is_trivial", is_trivial)
        object.__setattr__(self, "knows_tensors", _has_tensors(self.concrete))


@dataclass(frozen=True)
class Bound:
    """A function that code calls by the name of a global; compared by identity.

    A copy in another process has the function that is found under its own name there. For others,
    such as lambdas, there is nothing to compare then.
    """

    function: Callable[..., Any] | None

    def __reduce__(self) -> tuple[Any, ...]:
        home = getattr(self.function, "__module__", None) or ""
        name = getattr(self.function, "__qualname__", "")
        is_found = global_value(home, name) is self.function
        return Bound, (self.function if is_found else None,)


def autocast_state() -> tuple[Any, ...]:
    """Which devices autocast is on for, and with which dtype."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return tuple((device, torch.get_autocast_dtype(device)) for device in on)


#: State that Python code may ask for -> how to read it, and what it is called.
STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "grad": (torch.is_grad_enabled, "whether gradients are recorded"),
    "autocast": (autocast_state, "torch.autocast"),
}


#: Names by which Python asks for the state that steers operations.
_STATE_NAMES = {
    "grad": frozenset({"is_grad_enabled", "is_inference_mode_enabled"}),
    "autocast": frozenset(
        {
            *("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_available"),
            *("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"),
        }
    ),
}


def states_among(names: Set[str]) -> frozenset[str]:
    """The states that code with these names in it asks for."""
    return frozenset(state for state, words in _STATE_NAMES.items() if names & words)


def state_problem(contract: CallContract) -> str | None:
    """What is wrong with the state of the process, as seen by the graph; None if nothing is."""
    for name, traced in contract.states.items():
        read, title = STATES[name]
        now = read()
        if now != traced:
            return (
                f"its code depends on {title}, which was {traced or 'off'} in the trace and is "
                f"{now or 'off'} now; trace it as it will run"
            )
    for home, name, traced in contract.globals:
        now = global_value(home, name, traced)
        if type(traced) is Bound:
            if now is traced or now is traced.function or traced.function is None:
                continue
            traced = traced.function
        elif now is traced or now == traced:
            continue
        is_now, was = short(now), short(traced)
        is_now = f"another function {was}" if is_now == was else is_now
        return (
            f"global {name!r} of {home} is {is_now}, but the graph was traced with {was}; set it "
            "before the trace"
        )
    return None


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
    problem = argument_problem(contract, bound)
    if problem is not None:
        raise SlapoError(f"{label}: {problem.text}")


class Problem(NamedTuple):
    """Why a graph does not hold for a call, and how far the call was from one that it holds for."""

    text: str
    distance: int = 3


def argument_problem(contract: CallContract, bound: Mapping[str, Any]) -> Problem | None:
    """What is wrong with the arguments of a call, and the remedy; None if nothing is.

    All arguments that differ from the trace's are told at once.
    """
    if contract.unread:
        bound = {name: _that_counts(contract, name, value) for name, value in bound.items()}
    wrong = [
        (name, bound[name], traced)
        for name, traced in contract.concrete.items()
        if name in bound and not same_value(bound[name], traced)
    ]
    if not wrong and bound.get("use_cache") and "use_cache" not in contract.concrete:
        return Problem(NO_CACHE, 2)
    missing = [name for name in sorted(contract.never_none) if bound.get(name) is None]
    told = [
        f"argument {name!r} is {short(given)}, but the module was traced with {short(traced)}"
        for name, given, traced in wrong
    ]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        names = ", ".join(map(repr, missing))
        told.append(f"argument {names} {are} None, but the module was traced for tensors there")
    if told:
        remedy = _remedy([given for _, given, _ in wrong])
        return Problem(f"{'; '.join(told)}; {remedy}", 2 if wrong else 1)
    for guard in contract.size_guards:
        if not guard.holds(bound):
            limit = f"the trace holds only while {guard.text}; trace again with inputs like these"
            return Problem(limit, 0)
    return None


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that :func:`argument_problem` can depend on: calls with equal keys fare alike.

    Unless a constant is a tensor. None for arguments such as caches or subclasses of tensors, which
    only a look at them can tell.
    """
    try:
        return tuple(map(_key, args)), tuple(kwargs), tuple(map(_key, kwargs.values()))
    except TypeError:
        return None


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        return value.shape, value.dtype, value.requires_grad
    if value is None or kind in _NUMBERS:
        return kind, value  # the kind too, as True == 1
    if kind is dict:
        return kind, tuple(value), tuple(map(_key, value.values()))
    if kind is tuple or kind is list:
        return kind, tuple(map(_key, value))
    raise TypeError(kind)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({bool, int, float, str})


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _that_counts(contract: CallContract, name: str, value: Any) -> Any:
    """A value without the entries of ``**kwargs`` that no code reads."""
    if not isinstance(value, dict) or not isinstance(contract.concrete.get(name), dict):
        return value
    return {key: each for key, each in value.items() if key not in contract.unread}


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
            bound[name] = constants_in(extra)
        elif position < len(args):
            bound[name] = args[position]
            position += 1
        elif name in extra:
            bound[name] = extra.pop(name)
    return bound


def constants_in(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``**kwargs`` counts: not what is None, nor that no cache is asked for."""
    return {
        k: v for k, v in extra.items() if v is not None and not (k == "use_cache" and v is False)
    }


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


def short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if type(value) in (tuple, list) and any(isinstance(v, torch.Tensor) for v in value):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(short, value))}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remedy(given: Iterable[Any]) -> str:
    if any(type(value).__name__.endswith("Cache") for value in given):
        return NO_CACHE
    return "trace it with example_inputs= as you call it"
