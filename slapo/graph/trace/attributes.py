"""Attributes that a graph has built in, and whether they are still what they were."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from slapo.graph.trace.contract import short
from slapo.graph.trace.reads import Chain, Reads, reads_of
from slapo.wrapper import innermost

_PLAIN = (bool, int, float, str)
#: Values that are what they are, besides numbers and strings.
_FIXED = (torch.dtype, torch.device, Enum, FunctionType, BuiltinFunctionType, type)
_SLOTS = ("_parameters", "_buffers", "_modules")
#: A graph holds no caches, whatever the configuration says.
_WITHOUT_EFFECT = frozenset({"use_cache"})


class Known(Enum):
    """What is known of an attribute that has no value to compare."""

    ABSENT = "missing"
    TENSOR = "a parameter or buffer"

    def __repr__(self) -> str:
        return self.value


ABSENT = Known.ABSENT


@dataclass(frozen=True)
class Contents:
    """Plain values in a dictionary, list or configuration."""

    items: tuple[tuple[Any, Any], ...]

    def changed(self, holder: Any) -> tuple[Any, Any, Any] | None:
        """Key, value then and value now of one that differs."""
        inside = _inside(holder)
        for key, traced in self.items:
            now = inside.get(key, ABSENT)
            if now is not traced and (type(now) is not type(traced) or now != traced):
                return key, traced, now
        return None


@dataclass(frozen=True)
class Kind:
    """The class of a child that the code asks about."""

    kind: type

    def __repr__(self) -> str:
        return f"a {self.kind.__name__}"


#: Path of a module, name of its attribute, and what it was in the trace.
Attribute = tuple[str, str, Any]


def attributes_read(root: nn.Module, entered: Collection[str]) -> tuple[Attribute, ...]:
    """The attributes that the code of these modules reads, with what they are.

    A graph has their values built in, whichever tracer made it.
    """
    modules = {path: root.get_submodule(path) for path in ("", *sorted(entered))}
    reads = reads_of(frozenset(map(kind_of_module, modules.values())))
    found = _Found(reads)
    for path, module in modules.items():
        for name, value in vars(module).items():
            if type(value) in _PLAIN and name in reads.names:
                found.add(path, name, value)
        for chain in sorted(reads.chains[kind_of_module(module)]):
            found.follow(module, path, chain)
        for chain in sorted(reads.asked[kind_of_module(module)]):
            found.follow(module, path, chain, asks_kind=True)
    known = sorted(found.known.items(), key=lambda item: item[0][0])
    return tuple((path, name, value) for (path, name), value in known)


class _Found:
    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.known: dict[tuple[str, str], Any] = {}
        self._holders: set[int] = set()

    def add(self, path: str, name: str, value: Any) -> None:
        if not hasattr(nn.Module, name) and name != "training":
            self.known.setdefault((path, name), value)

    def follow(self, module: nn.Module, path: str, chain: Chain, asks_kind: bool = False) -> None:
        """Note what stands at the end of a chain, if that is something to compare."""
        name, *rest = chain
        value = value_of(module, name)
        if isinstance(value, nn.Module):
            if rest:
                below = f"{path}.{name}" if path else name
                self.follow(innermost(value), below, tuple(rest), asks_kind)
            elif asks_kind:
                self.add(path, name, Kind(kind_of_module(innermost(value))))
        elif isinstance(value, torch.Tensor):
            if name not in vars(module):
                self.add(path, name, Known.TENSOR)
        elif value is None or value is ABSENT or type(value) in _PLAIN:
            self.add(path, name, value)
        elif name not in vars(module):
            return  # a method
        elif isinstance(value, _FIXED):
            self.add(path, name, value)
        elif id(value) not in self._holders:
            self._holders.add(id(value))  # children have the configuration of the whole
            items = self._plain_items(value)
            if items:
                self.add(path, name, Contents(items))

    def _plain_items(self, holder: Any) -> tuple[tuple[Any, Any], ...]:
        return tuple(
            (key, value)
            for key, value in _inside(holder).items()
            if (type(value) in _PLAIN or value is None)
            and (not isinstance(key, str) or key in self.reads.names - _WITHOUT_EFFECT)
        )


def _inside(holder: Any) -> Mapping[Any, Any]:
    """The entries of a dictionary or list, the attributes of anything else."""
    if type(holder) is dict:
        return holder
    if type(holder) is list:
        return dict(enumerate(holder))
    try:  # configurations of Transformers look every attribute up in Python
        state: Mapping[Any, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return state


def kind_of_module(module: nn.Module) -> type[nn.Module]:
    """The class of a module; for a traced one, that of its original."""
    origin: type[nn.Module] | None = None
    if isinstance(module, fx.GraphModule):  # others may call anything their origin
        origin = module.__dict__.get("origin")
    return type(module) if origin is None else origin


def is_kept(module: nn.Module, name: str, traced: Any) -> bool:
    """Whether an attribute of a module is what it was; asked at every call, so it is quick."""
    state = module.__dict__
    now = state.get(name, ABSENT)
    if now is traced and traced is not ABSENT:
        return True
    if now is ABSENT:
        if traced is ABSENT:
            return not (
                name in state["_parameters"]
                or name in state["_buffers"]
                or name in state["_modules"]
            )
        now = value_of(module, name)
    return not differs(traced, now)


def value_of(module: nn.Module, name: str) -> Any:
    """An attribute, without running any code of the class; methods and the like are not."""
    state = module.__dict__
    if name in state:
        return state[name]
    for slot in _SLOTS:
        if name in state[slot]:
            return state[slot][name]
    inner = innermost(module)
    if inner is not module:
        return value_of(inner, name)
    return getattr(type(module), name, ABSENT)


def differs(traced: Any, now: Any) -> bool:
    """Whether an attribute is not what a graph was traced with."""
    if now is traced:
        return False
    if type(traced) is Contents:
        return traced.changed(now) is not None
    if type(traced) is Kind:
        return isinstance(now, nn.Module) and not isinstance(innermost(now), traced.kind)
    if traced is Known.TENSOR:
        return now is None
    if traced is None or traced is ABSENT:
        return True
    if type(now) not in _PLAIN and type(now) is not type(traced):
        return True
    return bool(now != traced)


#: Path and name of an attribute -> name of the buffer that holds its tensor, and the tensor.
Held = dict[tuple[str, str], tuple[str, torch.Tensor]]


def tensors_held(root: nn.Module, constants: Mapping[str, torch.Tensor]) -> Held:
    """The plain attributes of modules whose tensors a graph has as buffers of its own."""
    names = {id(tensor): name for name, tensor in constants.items()}
    return {
        (path, name): (names[id(value)], value)
        for path, module in root.named_modules()
        for name, value in (vars(module).items() if names else ())
        if id(value) in names
    }


def is_same_tensor(now: Any, held: torch.Tensor) -> bool:
    """Whether an attribute was only moved or converted, as its buffer was."""
    return (
        isinstance(now, torch.Tensor)
        and (now.shape, now.dtype, now.device) == (held.shape, held.dtype, held.device)
        and torch.equal(now, held)
    )


def told(traced: Any, now: Any) -> tuple[str, str, str]:
    """How to tell a difference: where in the attribute, what it is, and what it was."""
    if type(traced) is Contents:
        changed = traced.changed(now)
        assert changed is not None, "asked for a difference only"
        key, was, is_now = changed
        place = f"[{key!r}]" if isinstance(now, (dict, list)) else f".{key}"
        return place, short(is_now), short(was)
    return "", short(now), short(traced)
