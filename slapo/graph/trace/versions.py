"""One traced module for every call that the original serves: train or eval, with a mask or without.

A trace follows one call. Where another kind of call takes the same path, the graph holds for both,
at most with constants looked up by the mode; where it takes another path, the module gets a second
graph, and the call decides which one runs.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.absent_parts import first_difference
from slapo.graph.trace.attributes import (
    MODE,
    Attribute,
    attributes_read,
    globals_read,
    kind_of_module,
    reads_in,
)
from slapo.graph.trace.contract import CallContract, Guard
from slapo.graph.trace.guards import SizeGuard, UnlessNone
from slapo.graph.trace.leaves import check_modes, depends_on_mode
from slapo.graph.trace.modes import TWIN, merge_modes, other_mode, same_without
from slapo.graph.trace.module import TracedModule, inlined_in
from slapo.graph.trace.reads import mentions
from slapo.graph.trace.state import SLOTS

_MOST_GRAPHS = 64
#: More than this many masks are not tried in every combination.
_MOST_MASKS = 2


@dataclass
class Version:
    """A graph of a module for one kind of call.

    Parameters
    ----------
    graph, contract, constants
        See :class:`slapo.graph.trace.capture.Capture`.
    entered
        Paths of the modules whose operations are in the graph.
    reads_mode
        False when the graph is known to be the same in train and in eval mode.
    attributes
        What the code read of the modules, in the mode of the trace.
    globals
        What it read of Python modules.
    unread
        Entries of ``**kwargs`` that no code of the module, or below, reads.
    follow_mode
        Paths of children whose mode the code read, and that had the mode of the root.
    repeat
        Refuses, by a TraceError, a forward that does something else in a second run, in the mode
        of the trace; None where that is known.
    """

    graph: fx.Graph
    contract: CallContract
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    entered: frozenset[str] = frozenset()
    reads_mode: bool = True
    attributes: tuple[Attribute, ...] = ()
    globals: tuple[Attribute, ...] = ()
    unread: frozenset[str] = frozenset()
    follow_mode: frozenset[str] = frozenset()
    repeat: Callable[[], None] | None = None


#: Traces the module as it is, the named parameters None.
Trace = Callable[[frozenset[str]], Version]


def all_versions(module: nn.Module, trace: Trace, optional: list[str]) -> TracedModule:
    """Trace `module` for all kinds of calls.

    Parameters
    ----------
    module
        It is not changed.
    trace
        Traces it once.
    optional
        Parameters that are tensors in the trace and may be None in other calls.

    Raises
    ------
    TraceError
        If the trace fails in the module's present mode with all its arguments.
    """
    trace = _noting_state(module, trace)
    nothing: frozenset[str] = frozenset()
    base, *others = _both_modes(module, trace, nothing)
    serves_both = not others
    check_modes(module, base.entered)
    needed: list[str] = []
    free: list[str] = []
    for name in optional:
        if name in base.contract.never_none:
            without = _versions_without(module, trace, {name})
            if serves_both and _holds_without(base, without, name):
                free.append(name)
            elif without:
                needed.append(name)
                others += without
    for names in _subsets(needed):
        others += _versions_without(module, trace, names)
    for other in others:
        missing = {name for name in needed if name not in other.contract.never_none}
        for name in free:
            _holds_without(other, _versions_without(module, trace, missing | {name}), name)
    return assemble(module, base, others)


def _noting_state(module: nn.Module, trace: Trace) -> Trace:
    """`trace`, with the attributes read, and one name for each tensor that graphs have built in.

    Each capture counts its own, and the graphs of a module share its state.
    """
    names: dict[int, str] = {}
    known: list[torch.Tensor] = []  # kept alive: their addresses tell them apart

    def name_of(tensor: torch.Tensor) -> str:
        if id(tensor) not in names:
            free = (f"_tensor_constant{number}" for number in itertools.count(len(names)))
            names[id(tensor)] = next(name for name in free if not hasattr(module, name))
            known.append(tensor)
        return names[id(tensor)]

    def named(without: frozenset[str]) -> Version:
        version = trace(without)
        renamed = {old: name_of(tensor) for old, tensor in version.constants.items()}
        for node in version.graph.find_nodes(op="get_attr"):
            node.target = renamed.get(str(node.target), node.target)
        version.constants = {renamed[old]: t for old, t in version.constants.items()}
        reads = reads_in(module, version.entered)
        version.attributes = attributes_read(module, version.entered, reads)
        version.globals = globals_read(reads)
        if any(str(n.target).startswith("**") for n in version.graph.find_nodes(op="placeholder")):
            version.unread = _unread_in(module)
        return version

    return named


#: What models of Transformers act on by themselves, by hooks and caches, and hand on to all layers.
_HANDED_ON = frozenset({"output_hidden_states", "use_cache"})


def _unread_in(module: nn.Module) -> frozenset[str]:
    kinds = frozenset(kind_of_module(each) for each in module.modules())
    return frozenset(word for word in _HANDED_ON if not mentions(kinds, word))


def _versions_without(module: nn.Module, trace: Trace, names: Collection[str]) -> list[Version]:
    """Versions for calls without these; none where such calls cannot be traced.

    They stay refused then, by the contract of the others.
    """
    try:
        return _both_modes(module, trace, frozenset(names))
    except TraceError:
        return []


def assemble(module: nn.Module, base: Version, others: list[Version]) -> TracedModule:
    """The traced module of these versions, the first being what it shows."""
    for other in others:
        base.constants.update(other.constants)
    traced = _as_module(module, base)
    number_nodes(base.graph)
    variants = []
    for index, other in enumerate(others, 1):
        align_nodes(base.graph, other.graph, index)
        variants.append(_as_module(module, other))
    traced.set_variants(tuple(variants))
    # What a graph of a graph finds inlined is not called any more either.
    traced._inlined = inlined_in(module).union(*(v.entered for v in (base, *others)))
    return traced


def _as_module(module: nn.Module, version: Version) -> TracedModule:
    mode_matters = depends_on_mode(version.graph, version.contract.training)
    inlined = tuple(sorted(version.follow_mode | version.entered)) if mode_matters else ()
    contract = replace(
        version.contract,
        inlined=inlined,
        attributes=version.attributes,
        globals=version.globals,
        unread=version.unread,
    )
    return TracedModule.from_graph(module, version.graph, contract, version.constants)


# --- modes ---------------------------------------------------------------------------------------
def _both_modes(module: nn.Module, trace: Trace, without: frozenset[str]) -> list[Version]:
    """One version for train and eval, or one for each; the present mode's comes first."""
    here = trace(without)
    if not here.reads_mode and mode_is_a_flag(module):
        return [here]
    agree = False
    with other_mode(module):
        try:
            other = trace(without)
            agree = _agree(here, other)
            if not agree:
                _repeat(other)
        except TraceError:
            other = None
    if not agree:
        _repeat(here)
    alike = other is not None and same_limits(here, other)
    if other is not None and alike and merge_modes(here.graph, other.graph, module.training):
        same = {(path, name): value for path, name, value in other.attributes}
        kept = tuple(a for a in here.attributes if same.get(a[:2]) == a[2])
        modes = {path for path, name, _ in here.attributes if name == MODE}
        here.follow_mode = frozenset(modes - {path for path, name, _ in kept if name == MODE})
        here.attributes = kept
        return [here]
    here.contract = replace(here.contract, training=module.training)
    if other is None:
        return [here]
    other.contract = replace(other.contract, training=not module.training)
    return [here, other]


def _agree(one: Version, other: Version) -> bool:
    """Whether two runs show of each other that they are no accident."""
    if one.repeat is None and other.repeat is None:
        return True
    return first_difference(one.graph, other.graph) is None


def _repeat(version: Version) -> None:
    if version.repeat is not None:
        version.repeat()


def same_limits(one: Version, other: Version) -> bool:
    """Whether two versions may be called alike."""
    return one.contract.size_guards == other.contract.size_guards


def mode_is_a_flag(root: nn.Module) -> bool:
    """True when ``.train()`` and ``.eval()`` change nothing but the flags of `root` and below.

    Modules may define ``train`` to do more (merge weights, freeze a part), and ``training`` as a
    property.
    """
    kinds = {type(module) for module in root.modules()}
    if any(isinstance(getattr(kind, "training", None), property) for kind in kinds):
        return False
    if all(kind.train is nn.Module.train for kind in kinds):
        return True
    before = [_attributes_but_mode(module) for module in root.modules()]
    with other_mode(root):
        now = [_attributes_but_mode(module) for module in root.modules()]
    return len(now) == len(before) and all(map(_same_items, now, before))


def _attributes_but_mode(module: nn.Module) -> dict[str, Any]:
    state = vars(module)
    slots = [state.get(slot, {}) for slot in SLOTS]
    return {**state, **slots[0], **slots[1], **slots[2], "training": None}


def _same_items(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[k] is before[k] for k in now)


# --- optional inputs -----------------------------------------------------------------------------
def _subsets(names: list[str]) -> Iterator[frozenset[str]]:
    """Combinations of several of them: of a few all, of many those of masks, and all of them."""
    are_many = len(names) > _MOST_MASKS
    few = [name for name in names if "mask" in name][:_MOST_MASKS] if are_many else names
    for size in range(2, len(few) + 1):
        yield from map(frozenset, itertools.combinations(few, size))
    if are_many:
        yield frozenset(names)


def _holds_without(version: Version, without: list[Version], name: str) -> bool:
    """Whether a graph holds for calls with None in the place of a tensor; if so, they may come.

    A module that hands an optional mask on to a function works without it too; one that asks
    ``if mask is not None`` does not. The versions traced without it tell.
    """
    if name not in version.contract.never_none or len(without) != 1:
        return False
    node = next(n for n in version.graph.nodes if n.op == "placeholder" and n.target == name)
    if not is_handed_on(node) or not same_without(version.graph, without[0].graph, name):
        return False
    version.contract = _without_demand(version.contract, name)
    return True


def is_handed_on(node: fx.Node) -> bool:
    """True when nothing looks into the value: every use passes it to a module or function."""
    return all(
        user.op in ("call_module", "output")
        or (user.op == "call_function" and user.target is not getattr)
        for user in node.users
    )


def _without_demand(contract: CallContract, name: str) -> CallContract:
    guards: tuple[Guard, ...] = tuple(
        UnlessNone(guard.text, True, name, guard)
        if isinstance(guard, SizeGuard) and name in guard.parameters()
        else guard
        for guard in contract.size_guards
    )
    return replace(contract, never_none=contract.never_none - {name}, size_guards=guards)


def maybe_none(module: nn.Module, given: dict[str, Any]) -> list[str]:
    """Parameters that hold a tensor here and may be None in other calls of the same model.

    Those whose default is None, and that are masks (Transformers drops a mask of ones, which a run
    on fake tensors cannot know).
    """
    parameters = inspect.signature(module.forward).parameters
    return [
        name
        for name, value in given.items()
        if name in parameters
        and isinstance(value, torch.Tensor)
        and (parameters[name].default is None or "mask" in name)
    ]


# --- twins ---------------------------------------------------------------------------------------
def number_nodes(graph: fx.Graph) -> None:
    """Give every node a number of its own."""
    for number, node in enumerate(graph.nodes):
        node.meta[TWIN] = number


def align_nodes(base: fx.Graph, other: fx.Graph, index: int) -> None:
    """Number the nodes of `other` like the nodes of `base` that are the same operation.

    Those that it has alone get numbers that no other graph has; `index` tells the graphs apart.

    The two come from the same code, so what they have in common stands in the same order: the
    longest common run of operations, constants included, is taken.
    """
    left, right = list(base.nodes), list(other.nodes)
    words = [[_spelled(node) for node in nodes] for nodes in (left, right)]
    matcher = SequenceMatcher(None, words[0], words[1], autojunk=False)
    for number, node in enumerate(right):
        node.meta[TWIN] = -(number * _MOST_GRAPHS + index)
    for start, first, length in matcher.get_matching_blocks():
        for offset in range(length):
            right[first + offset].meta[TWIN] = left[start + offset].meta[TWIN]


def _spelled(node: fx.Node) -> str:
    """A node with its constants, but not which values it takes."""
    nothing = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: "_")
    return f"{node.op} {node.target} {nothing!r}"
