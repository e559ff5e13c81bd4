"""A node of the schedule tree: a path in a live model, and the notes on its module."""

from __future__ import annotations

import copy
import difflib
import itertools
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from slapo.errors import SlapoError
from slapo.graph.trace.leaves import is_torch_leaf
from slapo.graph.trace.module import inlined_in, kept_whole_in
from slapo.history import Record, digest, spelled
from slapo.optimizers import Known
from slapo.sharding.groups import GroupHandle
from slapo.weights.provenance import write_down
from slapo.weights.slots import TieGroups
from slapo.wrapper import innermost

if TYPE_CHECKING:
    from typing_extensions import Self

#: Root of a model -> history of the schedule over it. Keys are weak: modules are not kept alive.
_HISTORIES: WeakKeyDictionary[nn.Module, list[Record]] = WeakKeyDictionary()


#: Attribute of einops' layers with the items of ``axes_lengths``, which their forward reads.
EINOPS = "_axes_lengths"

#: Holders, modules or their configs, each with the integer attributes that may count sharded parts.
Numbers = list[tuple[Callable[[], Any], dict[str, Any]]]


def numbers_of(model: nn.Module) -> Numbers:
    """Integers, and sequences of integers, among the attributes of modules and their configs."""
    modules = list(model.modules())
    attributes = [(name, value) for module in modules for name, value in vars(module).items()]
    holders = {id(module): (module, vars(module)) for module in modules}
    for name, value in attributes:
        entries = config_entries(name, value)
        if entries is not None:
            holders[id(value)] = value, entries
    found: Numbers = []
    for holder, entries in holders.values():
        own = {name: value for name, value in entries.items() if name and _counts(name, value)}
        if own:
            try:
                found.append((weakref.ref(holder), own))
            except TypeError:  # not weakly referenceable, such as a dict as a config
                found.append((itertools.repeat(holder).__next__, own))
    return found


def config_entries(name: str, value: Any) -> dict[str, Any] | None:
    """Return the entries of a config, an attribute of a module, as a dict; None for others.

    Configs are ``config``, and namespaces, dataclasses and dicts of plain values.
    """
    is_dict = isinstance(value, dict)
    entries: dict[str, Any] = value if is_dict else getattr(value, "__dict__", {})
    if name.startswith("_") or isinstance(value, type) or not entries:
        return None
    if name == "config" and not is_dict:
        return entries
    is_kind = is_dict or is_dataclass(value) or isinstance(value, (Namespace, SimpleNamespace))
    plain = (bool, int, float, str, list, tuple, dict, torch.dtype, type(None))
    is_plain = all(isinstance(k, str) and isinstance(v, plain) for k, v in entries.items())
    return entries if is_kind and is_plain else None


def _counts(name: str, value: Any) -> bool:
    if name[0] == "_":
        return name == EINOPS
    if type(value) is int or config_entries(name, value) is not None:
        return True
    numbers = type(value) is tuple or type(value) is list
    return numbers and len(value) > 0 and all(type(each) is int for each in value)


def history_of(root: nn.Module) -> list[Record]:
    """Primitives that the last schedule over a model has applied."""
    return _HISTORIES.get(root, [])


class PrimitiveNotes(dict[str, Any]):
    """Primitive name -> its notes on a node, created by `start` on first access."""

    def __init__(self, start: Callable[[str], Any]) -> None:
        super().__init__()
        self.start = start

    def __missing__(self, name: str) -> Any:
        self[name] = self.start(name)
        return self[name]


@dataclass
class ScheduleMetadata:
    """Metadata of a node.

    Parameters
    ----------
    tie_weights
        On the root: parameter name -> its other names.
    param_tags
        Parameter name -> key -> value, as set by :meth:`Schedule.annotate`.
    primitives
        Primitive name -> its notes on this node.
    applied
        Records of the primitives applied to the module, at this path or at another of its paths.
    """

    tie_weights: dict[str, tuple[str, ...]] = field(default_factory=dict)
    param_tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    primitives: PrimitiveNotes = field(default_factory=lambda: PrimitiveNotes(lambda name: {}))
    applied: list[Record] = field(default_factory=list)

    def copy(self) -> ScheduleMetadata:
        """Return an independent copy."""
        data = PrimitiveNotes(self.primitives.start)
        for name, value in self.primitives.items():
            data[name] = value.copy() if hasattr(value, "copy") else value
        tags = {name: dict(tags) for name, tags in self.param_tags.items()}
        return ScheduleMetadata(dict(self.tie_weights), tags, data, list(self.applied))


@dataclass
class ScheduleState:
    """State shared by all nodes of one tree."""

    ties: TieGroups
    #: primitive name -> initial value of its notes on a node
    start_note: Callable[[str], Any]
    history: list[Record] = field(default_factory=list)
    #: id of a module -> its nodes; a module registered at several paths has several
    nodes_of: dict[int, list[Node]] = field(default_factory=dict)
    #: names of tied parameters that were sharded with their partner and not yet sharded by name
    followed: set[str] = field(default_factory=set)
    #: kind of module -> arguments of its first call, for recording tracers
    captured: dict[Any, Any] = field(default_factory=dict)
    #: captures that modules of the tree share
    shared_captures: dict[Any, Any] = field(default_factory=dict)
    #: the model's parameters before it was scheduled
    parameters: Known = field(default_factory=dict)
    #: the original model, and the loader that reads its weights at build
    original: Any = None
    loader: Any = None
    #: holders and their integer attributes before the model was scheduled
    numbers: Numbers = field(default_factory=list)
    #: target that the model was built for: "" for a plain module, None before build
    built_for: str | None = None
    #: inputs of the last run of the model; large tensors are kept without values
    example_inputs: Any = None
    #: predicate called before a primitive is applied, with its record and arguments
    admits: Callable[[Record, tuple[Any, ...], dict[str, Any]], bool] | None = None
    #: > 0 while a primitive runs: nested primitive calls belong to it and are not recorded
    depth: int = 0

    def copy(self) -> ScheduleState:
        """Return an independent copy."""
        return replace(
            self,
            history=list(self.history),
            nodes_of={key: list(nodes) for key, nodes in self.nodes_of.items()},
            followed=set(self.followed),
            # Captures belong to the modules of the original; a copy makes its own.
            captured={},
            shared_captures={},
            parameters={},
            numbers=list(self.numbers),
            built_for=None,
            admits=None,
        )

    def restore(self, other: ScheduleState) -> None:
        """Reset this state to `other`."""
        self.ties, self.depth, self.followed = other.ties, other.depth, set(other.followed)
        # In place: the table of histories refers to this list.
        self.history[:] = other.history
        self.nodes_of = {key: list(nodes) for key, nodes in other.nodes_of.items()}


class Node:
    """One module of the model at its path. See :class:`slapo.Schedule`.

    Primitives use this interface: the tree, and the operations that change it.
    """

    def __init__(
        self,
        mod: nn.Module,
        name: str,
        path: str,
        parent: Self | None,
        group: dist.ProcessGroup | GroupHandle | None,
        state: ScheduleState,
    ) -> None:
        self._mod = mod
        self.name = name
        self.path = path
        self.parent = parent
        self.rank: int
        self.world_size: int
        if isinstance(group, GroupHandle):  # inherited from the parent
            assert parent is not None, "only a parent hands on its own"
            self._group, self.rank, self.world_size = group, parent.rank, parent.world_size
        else:
            self._group = GroupHandle(group)
            self.rank = dist.get_rank(group) if group is not None else 0
            self.world_size = dist.get_world_size(group) if group is not None else 1
        self.metadata = ScheduleMetadata(primitives=PrimitiveNotes(state.start_note))
        self.state = state
        self.child: dict[str, Self] = {}
        others = state.nodes_of.setdefault(id(mod), [])
        if others:  # the module is also at another path, or moves here
            self.metadata.applied.extend(others[0].metadata.applied)
        others.append(self)
        if parent is None:
            _HISTORIES[mod] = state.history
        self.rebuild_children()

    # --- the tree ----------------------------------------------------------------------------
    def __getitem__(self, path: str) -> Self:
        """Return the node at `path` below this one; ``""`` is the node itself.

        Raises
        ------
        KeyError
            If there is no such path; the message has the nearest ones.
        """
        found = self._lookup(path)
        if found is None:
            raise KeyError(self.describe_unknown(path))
        return found

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._lookup(path) is not None

    def _lookup(self, path: str) -> Self | None:
        if not isinstance(path, str):
            known = [p for p, _ in self.named_schedules() if p][:3]
            raise TypeError(f"a schedule path is a string, got {path!r}; pass one such as {known}")
        node, pending = self, ""
        for part in path.split(".") if path else ():
            pending = f"{pending}.{part}" if pending else part
            # The user may have set another module by hand, as in ``model.fc = new``.
            node.follow(pending)
            if pending in node.child:  # list items have joined names: "layer.3"
                node, pending = node.child[pending], ""
        return None if pending else node

    def follow(self, name: str) -> None:
        """Pick up a child module that the user has replaced or added."""
        child, present = self.child.get(name), _slot(self.mod, name)
        if child is None and (present is None or _is_transparent(present, name, self._hides)):
            return
        if child is None and self._is_kept_whole():
            return
        if child is None or present is not child.mod:
            self.rebuild_children()

    def check_live(self) -> None:
        """Raise SlapoError if the node's module is no longer a part of the model."""
        node, parent = self, self.parent
        while parent is not None:  # runs before every primitive; a generator takes twice as long
            if _slot(parent._mod, node.name) is not node._mod:
                raise SlapoError(
                    f"{spelled(self.path)}: the module at {node.path!r} was replaced after this "
                    "node was taken from the schedule; look it up again"
                )
            node, parent = parent, parent.parent

    def describe_unknown(self, path: str) -> str:
        """Return the error message for a path that does not exist."""
        inlined = self._describe_inlined(path)
        if inlined is not None:
            return inlined
        paths = [p for p, _ in self.named_schedules() if p]
        near = difflib.get_close_matches(path, paths, n=3, cutoff=0.4)
        head = path.split(".")[0]
        near = near or [p for p in paths if p.split(".")[0] == head][:3] or paths[:3]
        here = f" below {self.path!r}" if self.path else ""
        if self._is_tensor(path):
            owner, _, leaf = path.rpartition(".")
            return (
                f"no module at {path!r}{here}, which is a tensor; name the module, and the tensor "
                f"as an argument: {spelled(self[owner].path)}.shard({leaf!r}, axis=0)"
            )
        sealed = self._sealed_above(path)
        if sealed is not None:
            return (
                f"no module at {path!r}{here}: {sealed.path!r} is torch's own "
                f"{type(innermost(sealed.mod)).__name__}, which is a single node because it uses "
                "its parts directly; replace it with your own modules to schedule its parts"
            )
        if not self._is_list(path):
            return f"no module at {path!r}{here}; nearest paths are {near}"
        items = [p for p in self.child if p.startswith(f"{path}.")][:3] or near
        return (
            f"no module at {path!r}{here}; nearest paths are {items}: the items of an "
            "nn.ModuleList are nodes, the list itself is not"
        )

    def _describe_inlined(self, path: str) -> str | None:
        """Return the error message for a path to a module that graphs no longer call, else None."""
        for above, node in self.named_schedules():
            name = path[len(above) :].lstrip(".") if path.startswith(above) else ""
            if name and node._hides(name):
                below = [p for p, _ in self.named_schedules() if p.startswith(f"{path}.")]
                return (
                    f"{path!r} was inlined when {node.path or 'the root'} was traced, whose graph "
                    f"calls {below[:4]} there and not the module; change it before tracing, name "
                    "it in leaf_modules, or use find() and the static form of the primitive"
                )
        return None

    def _is_list(self, path: str) -> bool:
        try:
            return isinstance(self.mod.get_submodule(path), nn.ModuleList)
        except AttributeError:
            return False

    def _sealed_above(self, path: str) -> Node | None:
        """Return the layer of torch that contains the module at `path`, if any."""
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            node = self._lookup(".".join(parts[:end]))
            if node is not None:
                inside = _slot(innermost(node.mod), ".".join(parts[end:])) is not None
                return node if inside and is_torch_leaf(innermost(node.mod)) else None
        return None

    def _is_tensor(self, path: str) -> bool:
        owner, _, leaf = path.rpartition(".")
        node = self._lookup(owner)
        return node is not None and isinstance(getattr(node.mod, leaf, None), torch.Tensor)

    def get_module(self, path: str = "") -> nn.Module:
        """Return the module at `path` below this node, including one that a flat trace has inlined.

        Raises
        ------
        KeyError
            If there is no such path; the message has the nearest ones.
        """
        node = self._lookup(path)
        if node is None and self._describe_inlined(path) is not None:
            return self.mod.get_submodule(path)
        return self[path].mod

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, Self]]:
        """Yield this node and all nodes below it with their paths, like ``named_modules``."""
        yield prefix, self
        # Before the loop below, as it may rebuild the dict of children.
        for name in list(self.child):
            self.follow(name)
        for name, child in self.child.items():
            yield from child.named_schedules(f"{prefix}.{name}" if prefix else name)

    def get_top_schedule(self) -> Self:
        """Return the root of the tree."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group; None for a world of one."""
        return self._group.group

    @property
    def mod(self) -> nn.Module:
        """The module that is currently at this path."""
        return self._mod

    @mod.setter
    def mod(self, value: object) -> None:
        raise AttributeError(
            f"{spelled(self.path)}.mod is the module in the model; put another module there with "
            f"{spelled(self.path)}.replace(module)"
        )

    def ancestors(self) -> Iterator[Self]:
        """Yield the nodes above, the parent first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    @property
    def where(self) -> str:
        """This node's path for use in a message."""
        return repr(self.path) if self.path else "the root"

    @property
    def model_path(self) -> str:
        """Path of the module in the model; differs from `path` if the root has a path."""
        top = self.get_top_schedule()
        return self.path[len(top.path) :].lstrip(".") if top.path else self.path

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same schedule over a copy of the model."""
        if self.parent is not None:
            raise SlapoError(
                f"{spelled(self.path)} is part of a schedule and cannot be copied alone; copy the "
                "root, and take the node from the copy"
            )
        state = self.state.copy()
        # Its keys are ids of the original's modules; the nodes of the copy fill it again.
        state.nodes_of = {}
        write_down(self.mod)  # copied tensors would lose their origins
        model = copy.deepcopy(self.mod, memo)
        new = type(self)(model, self.name, self.path, None, self.group, state)
        for (_, old), (_, node) in zip(self.named_schedules(), new.named_schedules(), strict=True):
            node.metadata = old.metadata.copy()
        return new

    @property
    def is_current(self) -> bool:
        """False after a module above was replaced, which detaches this part of the tree."""
        return self in self.state.nodes_of.get(id(self.mod), ())

    # --- change of modules, used by primitives -----------------------------------------------
    def set_module(self, new: nn.Module) -> None:
        """Put `new` at every path of the present module, and update the tree."""
        old = self.mod
        # A module at several paths has several nodes, and all of these paths get the new one.
        for node in self.state.nodes_of.pop(id(old)):
            node._mod = new
            self.state.nodes_of.setdefault(id(new), []).append(node)
            if node.parent is None:
                _HISTORIES[new] = self.history
            else:
                owner, name = child_slot(node.parent.mod, node.name)
                owner._modules[name] = new
            node.rebuild_children()

    def rebuild_children(self, deep: bool = False) -> None:
        """Make the children agree with the module; nodes of unchanged modules stay.

        With `deep`, rebuild all levels below, for example after a trace.
        """
        modules = {} if self._is_kept_whole() else children_of(self.mod, self._hides)
        child = self.child
        left = [node for name, node in child.items() if modules.get(name) is not node.mod]
        for node in left:
            del child[node.name]
        for name, module in modules.items():
            if name not in child:
                child[name] = self._make_child(name, module)
        if list(child) != list(modules):  # new nodes were appended and may belong earlier
            ordered = {name: child[name] for name in modules}
            child.clear()
            child.update(ordered)
        for node in left:
            node._forget()
        for node in child.values() if deep else ():
            if node.child:
                node.rebuild_children(deep=True)

    def _hides(self, name: str) -> bool:
        """Return whether a flat graph has inlined the module at a path (not a direct child)."""
        own = inlined_in(innermost(self.mod))
        if own:
            return name in own and not self._is_direct(name)
        graph, start = self.graph_above()
        return graph is not None and f"{start}.{name}" in inlined_in(innermost(graph.mod))

    def _is_direct(self, name: str) -> bool:
        """Return whether all modules between here and a path are lists."""
        ends = [k for k, letter in enumerate(name) if letter == "."]
        return all(isinstance(_slot(self.mod, name[:end]), nn.ModuleList) for end in ends)

    def _is_kept_whole(self) -> bool:
        """Return whether a flat trace above has this module as a leaf."""
        graph, path = self.graph_above()
        return graph is not None and path in kept_whole_in(innermost(graph.mod))

    def graph_above(self) -> tuple[Node | None, str]:
        """Return the nearest node above with a flat graph, and the path from it to this node."""
        node: Node | None = self.parent
        path = self.name
        while node is not None and not _is_flat(innermost(node.mod)):
            path, node = f"{node.name}.{path}", node.parent
        return node, path

    def refresh(self, targets: Iterable[str]) -> None:
        """Update the nodes of the modules at some paths below; other nodes are not visited."""
        for target in targets:
            node, name = self._owner_of(target)
            node._refresh_child(name)

    def _owner_of(self, target: str) -> tuple[Self, str]:
        """Return the node whose child is, or would be, at `target`, and the child's name."""
        node, pending = self, ""
        *parts, last = target.split(".")
        for part in parts:
            pending = f"{pending}.{part}" if pending else part
            if pending in node.child:
                node, pending = node.child[pending], ""
        return node, f"{pending}.{last}" if pending else last

    def _refresh_child(self, name: str) -> None:
        try:
            module: nn.Module | None = self.mod.get_submodule(name)
        except AttributeError:
            module = None
        present = self.child.get(name)
        if present is not None and present.mod is module:
            return
        if present is not None:
            del self.child[name]
            present._forget()
        if module is not None and not _is_transparent(module, name, self._hides):
            self.child[name] = self._make_child(name, module)  # modules are added last

    def _make_child(self, name: str, module: nn.Module) -> Any:
        path = f"{self.path}.{name}" if self.path else name
        return type(self)(module, name, path, self, self._group, self.state)

    def _forget(self) -> None:
        """Remove this node and all below it from the table of nodes."""
        for _, node in self.named_schedules():
            nodes = self.state.nodes_of.get(id(node.mod), [])
            if node in nodes:
                nodes.remove(node)
            if not nodes:
                self.state.nodes_of.pop(id(node.mod), None)

    # --- the record --------------------------------------------------------------------------
    @property
    def history(self) -> list[Record]:
        """Every primitive applied to the tree, in order."""
        return self.state.history

    def note(self, record: Record) -> None:
        """Add a record to the history, and to the metadata of every node of this module."""
        self.history.append(record)
        for node in self.state.nodes_of[id(self.mod)]:
            node.metadata.applied.append(record)

    def digest(self) -> str:
        """Return a fingerprint of the history; equal on ranks that applied the same primitives."""
        return digest(self.history)


def children_of(
    module: nn.Module, hides: Callable[[str], bool], prefix: str = ""
) -> dict[str, nn.Module]:
    """Return the children of a module under their names in the schedule.

    Items of lists have joined names, and so do the modules called inside an inlined module. Layers
    of torch that are leaves have no children. `hides` is True for the name of an inlined module.
    `prefix`, including its dot, is prepended to every name.
    """
    if is_torch_leaf(innermost(module)):
        return {}
    found: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        full = f"{prefix}{name}"
        if child is not None and _is_transparent(child, full, hides):
            found.update(children_of(child, hides, f"{full}."))
        elif child is not None:
            found[full] = child
    return found


def _is_flat(module: nn.Module) -> bool:
    return bool(inlined_in(module) or kept_whole_in(module))


def _is_transparent(module: nn.Module, name: str, hides: Callable[[str], bool]) -> bool:
    """Return whether a module is not a node, so that its children belong to the node around it.

    An inlined module that has parameters of its own is a node nevertheless: it holds them.
    """
    if isinstance(module, nn.ModuleList):
        return True
    return hides(name) and all(p is None for p in module._parameters.values())


def _slot(parent: nn.Module, name: str) -> nn.Module | None:
    """Return the module currently registered as a child, or None."""
    module: nn.Module | None = parent
    for part in name.split("."):
        module = module._modules.get(part) if module is not None else None
    return module


def child_slot(parent: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that registers the child called `name`, and its name there."""
    *lists, last = name.split(".")
    for part in lists:
        inner = parent._modules[part]
        assert inner is not None, "a schedule child is in lists that exist"
        parent = inner
    return parent, last
