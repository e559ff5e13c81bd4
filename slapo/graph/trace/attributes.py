"""Attributes that a graph has built in, and whether they are still what they were."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from slapo.graph.trace.contents import ABSENT, FIXED, PLAIN, Contents, Known, contents_of
from slapo.graph.trace.contract import Bound, short
from slapo.graph.trace.reads import Chain, Reads, global_value, reads_of
from slapo.graph.trace.state import SLOTS
from slapo.hooks import COMPUTING
from slapo.wrapper import innermost

#: What every module has; rewrites change it, and know what they do.
OF_EVERY_MODULE = frozenset(dir(nn.Module()))


@dataclass(frozen=True)
class Child:
    """What the code, or the graph, goes by of a child.

    Parameters
    ----------
    asked
        The class that the code asks about.
    inlined
        The class whose forward is part of the graph.
    hooks
        The hooks of such a child.
    entries
        What a list or dictionary of children has.
    """

    asked: type | None = None
    inlined: type | None = None
    hooks: tuple[int, ...] = ()
    entries: tuple[str, ...] | None = None

    @classmethod
    def part(cls, module: nn.Module) -> Child:
        """Of a child whose forward is part of the graph."""
        return cls(inlined=kind_of_module(module), hooks=_hooks_of(module))

    def differs(self, now: nn.Module) -> bool:
        """Whether a child is not what it was."""
        if self.asked is not None and not isinstance(now, self.asked):
            return True
        if self.inlined is not None and (
            kind_of_module(now) is not self.inlined or _hooks_of(now) != self.hooks
        ):
            return True
        return self.entries is not None and _entries_of(now) != self.entries

    def told_of(self, now: nn.Module) -> Child:
        """The same of another child, to tell the difference by."""
        return Child(
            self.asked and kind_of_module(now),
            self.inlined and kind_of_module(now),
            _hooks_of(now) if self.inlined else (),
            None if self.entries is None else _entries_of(now),
        )

    def __repr__(self) -> str:
        kind = self.inlined or self.asked
        words = [f"a {kind.__name__}"] if kind else []
        words += [f"{len(self.hooks)} hooks"] if self.inlined else []
        words += [] if self.entries is None else [f"entries {list(self.entries)}"]
        return " with ".join(words)


#: Their hooks collect outputs, or gather the parameters of the module, which a graph asks for too.
_NO_CHANGE_BY = ("transformers.", "deepspeed.", "torch.distributed.")
#: Containers that forwards loop over.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


def _hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers of the hooks that may change what the module computes."""
    state = module.__dict__
    held = [state[slot] for slot in COMPUTING if state.get(slot)]
    return tuple(
        number
        for hooks in held
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith(_NO_CHANGE_BY)
    )


def _entries_of(module: nn.Module) -> tuple[str, ...]:
    return (*module._modules, *module._parameters)


@dataclass(frozen=True)
class Trains:
    """Whether a parameter requires a gradient, which the code asks."""

    requires_grad: bool

    def __repr__(self) -> str:
        return "one that requires " + ("a gradient" if self.requires_grad else "no gradient")


_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)
_ALL_PARAMETERS = frozenset({"parameters", "named_parameters"})
#: The attribute that says whether a module is in train mode.
MODE = "training"


#: Path of a module, name of its attribute, and what it was in the trace.
Attribute = tuple[str, str, Any]


def reads_in(root: nn.Module, entered: Collection[str]) -> Reads:
    """What the code of a module and of these below reads, and of the functions that they hold."""
    modules = [root.get_submodule(path) for path in ("", *entered)]
    held = [v for m in modules for v in vars(m).values() if isinstance(v, FunctionType)]
    return reads_of(frozenset(map(kind_of_module, modules)), held)


def attributes_read(
    root: nn.Module, entered: Collection[str], reads: Reads
) -> tuple[Attribute, ...]:
    """The attributes of these modules that their code reads, with what they are.

    A graph has their values built in, whichever tracer made it.
    """
    found = _Found(reads)
    for path in ("", *sorted(entered)):
        module = root.get_submodule(path)
        for name, value in vars(module).items():
            if type(value) in PLAIN and name in reads.names:
                found.add(path, name, value)
        for chain in sorted(reads.chains[kind_of_module(module)]):
            found.follow(module, path, chain)
        for chain in sorted(reads.of_any):
            if value_of(module, chain[0]) is not ABSENT:
                found.follow(module, path, chain)
        for chain in sorted(reads.asked[kind_of_module(module)]):
            found.follow(module, path, chain, asks_kind=True)
        if path:
            above, _, name = path.rpartition(".")
            found.note(above, name, Child.part(innermost(module)))
    if "requires_grad" in reads.names and not _ALL_PARAMETERS.isdisjoint(reads.names):
        for full, parameter in root.named_parameters():
            above, _, name = full.rpartition(".")
            found.known[above, name] = Trains(parameter.requires_grad)
    known = sorted(found.known.items(), key=lambda item: item[0][0])
    return tuple((path, name, value) for (path, name), value in known)


def without_entry(
    attributes: tuple[Attribute, ...], path: str, entry: str
) -> tuple[Attribute, ...]:
    """The same, where a rewrite has taken an entry out of the list of children at a path."""
    above, _, name = path.rpartition(".")
    return tuple(
        (place, called, _less(value, entry) if (place, called) == (above, name) else value)
        for place, called, value in attributes
    )


def _less(value: Any, entry: str) -> Any:
    if not isinstance(value, Child) or value.entries is None:
        return value
    return replace(value, entries=tuple(each for each in value.entries if each != entry))


def globals_read(reads: Reads) -> tuple[Attribute, ...]:
    """The plain values and functions of Python modules among what is read: home, name and value."""
    found = []
    for home, name in sorted(reads.globals):
        value = global_value(home, name)
        if type(value) in PLAIN:
            found.append((home, name, value))
        elif isinstance(value, _FUNCTIONS) and not _stays(value, "." in name):
            found.append((home, name, Bound(value)))
    return tuple(found)


def _stays(function: Any, is_elsewhere: bool) -> bool:
    """Whether nobody binds it anew: one of Python's own, and ``F.gelu``."""
    package = (getattr(function, "__module__", None) or "torch").partition(".")[0]
    own = not isinstance(function, partial) and package in sys.stdlib_module_names
    return own or (is_elsewhere and package == "torch")


class _Found:
    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.known: dict[tuple[str, str], Any] = {}
        self._holders: set[int] = set()

    def add(self, path: str, name: str, value: Any) -> None:
        if name not in OF_EVERY_MODULE:
            self.known.setdefault((path, name), value)

    def note(self, path: str, name: str, child: Child) -> None:
        """Note more of a child."""
        known = self.known.get((path, name))
        if isinstance(known, Child):
            more = {k: v for k, v in vars(child).items() if v not in (None, ())}
            child = replace(known, **more)
        self.known[path, name] = child

    def follow(self, module: nn.Module, path: str, chain: Chain, asks_kind: bool = False) -> None:
        """Note what stands at the end of a chain, if that is something to compare."""
        name, *rest = chain
        if name == MODE and path:
            self.known[path, name] = module.training
        value = value_of(module, name)
        if isinstance(value, nn.Module):
            if isinstance(innermost(value), _LISTS):
                self.note(path, name, Child(entries=_entries_of(innermost(value))))
            if rest:
                below = f"{path}.{name}" if path else name
                self.follow(innermost(value), below, tuple(rest), asks_kind)
            elif asks_kind:
                self.note(path, name, Child(asked=kind_of_module(innermost(value))))
        elif isinstance(value, torch.Tensor):
            if rest == ["requires_grad"]:
                self.known[path, name] = Trains(value.requires_grad)
            elif name not in vars(module):
                self.add(path, name, Known.TENSOR)
        elif value is None or value is ABSENT or type(value) in PLAIN:
            self.add(path, name, value)
        elif name not in vars(module):
            return  # a method
        elif isinstance(value, FIXED):
            self.add(path, name, value)
        elif id(value) not in self._holders:
            self._holders.add(id(value))  # children have the configuration of the whole
            contents = contents_of(value, self.reads.names)
            if contents is not None:
                self.add(path, name, contents)


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
    for slot in SLOTS:
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
    if type(traced) is Child:
        return isinstance(now, nn.Module) and traced.differs(innermost(now))
    if traced is Known.TENSOR:
        return now is None
    if type(traced) is Trains:
        return getattr(now, "requires_grad", None) is not traced.requires_grad
    if traced is None or traced is ABSENT:
        return True
    if type(now) not in PLAIN and type(now) is not type(traced):
        return True
    return bool(now != traced)


#: Path of a module; name of an attribute, and keys in it -> the graph's buffer, and the tensor.
Held = dict[tuple[str, tuple[Any, ...]], tuple[str, torch.Tensor]]


def tensors_held(root: nn.Module, constants: Mapping[str, torch.Tensor]) -> Held:
    """The attributes of modules, and entries in them, that a graph has as buffers of its own."""
    names = {id(tensor): name for name, tensor in constants.items()}
    return {
        (path, place): (names[id(tensor)], tensor)
        for path, module in root.named_modules()
        for name, value in (vars(module).items() if names else ())
        for place, tensor in _tensors_in(value, (name,))
        if id(tensor) in names
    }


def _tensors_in(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (dict, list, tuple)) and place[0] not in SLOTS:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(each, (*place, key))


def tensor_at(module: nn.Module, place: tuple[Any, ...]) -> Any:
    """What is now at such a place; None where there is none any more."""
    value: Any = module.__dict__
    try:
        for key in place:
            value = value[key]
    except (LookupError, TypeError):
        return None
    return value


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
        place, was, is_now = changed
        return place, short(is_now), short(was)
    if type(traced) is Child and isinstance(now, nn.Module):
        now = traced.told_of(innermost(now))
    if type(traced) is Trains and isinstance(now, torch.Tensor):
        now = Trains(now.requires_grad)
    return "", short(now), short(traced)
