"""The schedule: a tree of names over a live model, and the methods that rewrite the model."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo import printing
from slapo.errors import SlapoError
from slapo.graph.find import Match, find_nodes, find_subgraphs_in
from slapo.graph.leaves import is_torch_leaf
from slapo.history import Record, digest
from slapo.op.wrapper import innermost
from slapo.primitives import (
    AnnotatePrimitive,
    CheckpointPrimitive,
    CutPipelineStagePrimitive,
    DecomposePrimitive,
    ForkRNGPrimitive,
    FusePrimitive,
    ReplaceAllPrimitive,
    ReplacePrimitive,
    ShardPrimitive,
    SyncPrimitive,
    TracePrimitive,
    TraceUntilPrimitive,
)
from slapo.primitives.base import find_primitive, list_primitives, reserve_names
from slapo.primitives.run import as_method, run
from slapo.selection import Selection
from slapo.weights.provenance import Source
from slapo.weights.ties import TieGroups


class _PrimitiveData(dict[str, Any]):
    """Primitive's name -> what it notes on a node, made when first asked for."""

    def __missing__(self, name: str) -> Any:
        primitive = find_primitive(name)
        if primitive is None:
            raise KeyError(f"no primitive is called {name!r}; known are {list_primitives()}")
        self[name] = primitive.init_metadata()
        return self[name]


@dataclass
class ScheduleMetadata:
    """What a node remembers.

    Parameters
    ----------
    tie_weights
        On the root: parameter name -> its other names.
    param_tags
        Parameter name -> key -> value, as :meth:`Schedule.annotate` set them.
    primitives
        Primitive's name -> what it noted here.
    """

    tie_weights: dict[str, tuple[str, ...]] = field(default_factory=dict)
    param_tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    primitives: dict[str, Any] = field(default_factory=_PrimitiveData)

    def copy(self) -> ScheduleMetadata:
        """A copy that later changes of this one do not reach."""
        data = _PrimitiveData()
        for name, value in self.primitives.items():
            data[name] = value.copy() if hasattr(value, "copy") else value
        tags = {name: dict(tags) for name, tags in self.param_tags.items()}
        return ScheduleMetadata(dict(self.tie_weights), tags, data)


@dataclass
class ScheduleState:
    """What all nodes of one tree share."""

    ties: TieGroups
    history: list[Record] = field(default_factory=list)
    #: id of a module -> the nodes it stands at, for modules registered at several places too
    nodes_of: dict[int, list[Schedule]] = field(default_factory=dict)
    #: names of tied parameters that were sharded with their partner and not named themselves yet
    followed: set[str] = field(default_factory=set)
    #: parameter made of others -> how, and their names
    sources: dict[str, tuple[Source, list[str]]] = field(default_factory=dict)
    #: kind of module -> arguments of its first call, for recording tracers
    captured: dict[Any, Any] = field(default_factory=dict)
    #: > 0 while a primitive runs: what it calls is part of it and not recorded by itself
    depth: int = 0

    def copy(self) -> ScheduleState:
        """A copy that later changes of this one do not reach."""
        nodes = {key: list(nodes) for key, nodes in self.nodes_of.items()}
        return ScheduleState(
            self.ties,
            list(self.history),
            nodes,
            set(self.followed),
            dict(self.sources),
            {},
            self.depth,
        )

    def restore(self, other: ScheduleState) -> None:
        """Become like `other`."""
        self.ties, self.depth, self.followed = other.ties, other.depth, set(other.followed)
        self.history[:] = other.history
        self.sources = dict(other.sources)
        self.nodes_of = {key: list(nodes) for key, nodes in other.nodes_of.items()}


class Schedule:
    """A node of the schedule tree: one module of the model, by the name it has there.

    Made by :func:`create_schedule`. Primitives are methods; they act at once, in place, and return
    the node, so calls chain. ``print`` shows the tree with what was applied where.

    Attributes
    ----------
    mod : nn.Module
        The module that stands here now.
    name, path : str
        Local name, and name from the root.
    parent : Schedule or None
    child : dict of str to Schedule
        Children in order. Those of an ``nn.ModuleList`` are children of the list's owner under
        the joined name, such as ``"layer.3"``.
    group : ProcessGroup or None
        The tensor-parallel group.
    rank, world_size : int
        This process's rank in the group, and the group's size.
    metadata : ScheduleMetadata

    Examples
    --------
    >>> import slapo
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    >>> sch["1"].replace(nn.GELU()).mod
    GELU(approximate='none')
    """

    replace = as_method(ReplacePrimitive, ReplacePrimitive.apply)
    replace_all = as_method(ReplaceAllPrimitive, ReplaceAllPrimitive.apply)
    shard = as_method(ShardPrimitive, ShardPrimitive.apply)
    sync = as_method(SyncPrimitive, SyncPrimitive.apply)
    checkpoint = as_method(CheckpointPrimitive, CheckpointPrimitive.apply)
    fork_rng = as_method(ForkRNGPrimitive, ForkRNGPrimitive.apply)
    annotate = as_method(AnnotatePrimitive, AnnotatePrimitive.apply)
    trace = as_method(TracePrimitive, TracePrimitive.apply)
    trace_until = as_method(TraceUntilPrimitive, TraceUntilPrimitive.apply)
    fuse = as_method(FusePrimitive, FusePrimitive.apply)
    decompose = as_method(DecomposePrimitive, DecomposePrimitive.apply)
    cut_pipeline_stage = as_method(CutPipelineStagePrimitive, CutPipelineStagePrimitive.apply)

    def __init__(
        self,
        mod: nn.Module,
        name: str,
        path: str,
        parent: Schedule | None,
        group: dist.ProcessGroup | None,
        state: ScheduleState,
    ) -> None:
        self.mod = mod
        self.name = name
        self.path = path
        self.parent = parent
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.metadata = ScheduleMetadata()
        self.state = state
        self.child: dict[str, Schedule] = {}
        state.nodes_of.setdefault(id(mod), []).append(self)
        self.rebuild_children()

    # --- the tree ----------------------------------------------------------------------------
    def __getitem__(self, path: str) -> Schedule:
        """The node at `path` below this one; ``""`` is the node itself.

        Raises
        ------
        KeyError
            Naming the nearest existing paths.
        """
        found = self._lookup(path)
        if found is None:
            raise KeyError(self._unknown(path))
        return found

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._lookup(path) is not None

    def _lookup(self, path: str) -> Schedule | None:
        if not isinstance(path, str):
            raise TypeError(f"a schedule path is a string, got {path!r}")
        node, pending = self, ""
        for part in path.split(".") if path else ():
            pending = f"{pending}.{part}" if pending else part
            if pending in node.child:  # names of list items are joined: "layer.3"
                node, pending = node.child[pending], ""
        return None if pending else node

    def _unknown(self, path: str) -> str:
        paths = [p for p, _ in self.named_schedules() if p]
        near = difflib.get_close_matches(path, paths, n=3, cutoff=0.4)
        head = path.split(".")[0]
        near = near or [p for p in paths if p.split(".")[0] == head][:3] or paths[:3]
        here = f" below {self.path!r}" if self.path else ""
        return f"no module at {path!r}{here}; nearest paths are {near}"

    def get_module(self, path: str = "") -> nn.Module:
        """The module at `path` below this node."""
        return self[path].mod

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, Schedule]]:
        """This node and all below it, with their paths from here, as ``named_modules`` does."""
        yield prefix, self
        for name, child in self.child.items():
            yield from child.named_schedules(f"{prefix}.{name}" if prefix else name)

    def get_top_schedule(self) -> Schedule:
        """The root of the tree."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def model_path(self) -> str:
        """The module's name in the model; it differs from `path` where the root has a path."""
        top = self.get_top_schedule()
        return self.path[len(top.path) :].lstrip(".") if top.path else self.path

    @property
    def is_current(self) -> bool:
        """False once a module above was replaced, and with it this part of the tree."""
        return self in self.state.nodes_of.get(id(self.mod), ())

    def select(self, pattern: str) -> Selection:
        """Nodes below this one whose path matches a glob, as one object to apply primitives to.

        Parameters
        ----------
        pattern
            ``*`` stands for one part of a path, or part of one; ``**`` for any number of parts.

        Raises
        ------
        ValueError
            If nothing matches.

        Examples
        --------
        >>> import slapo
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        >>> sch = slapo.create_schedule(model)
        >>> len(sch.select("*.0").checkpoint())
        3
        """
        return Selection.matching(self, pattern)

    # --- graphs ------------------------------------------------------------------------------
    def find(self, pattern: str | Callable[..., Any] | nn.Module) -> list[list[Match]]:
        """Subgraphs of this module, and of traced modules below it, that match a pattern.

        Traces the module if it is not a graph yet. Matching is by dataflow: independent operations
        in between do not hide a match, ``F.gelu(x)`` and an ``nn.GELU`` are the same, operands of
        commutative operations may swap. Matches do not overlap.

        Parameters
        ----------
        pattern
            A function or a :class:`slapo.pattern.Pattern`, whose arguments stand for any value; or
            a regular expression, matched from the start against targets of module calls.

        Returns
        -------
        list
            Of subgraphs, each a list of ``(parent_path, node)``. Empty when nothing matches.

        Examples
        --------
        >>> import slapo, torch
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return torch.relu(self.fc(x) + x)
        >>> sch = slapo.create_schedule(Block())
        >>> [[node.name for _, node in match] for match in sch.find(lambda x, y: torch.relu(x + y))]
        [['add', 'relu']]
        """
        self._ensure_traced("find")
        return find_subgraphs_in(self.mod, pattern)

    def find_node(self, regex_or_predicate: str | Callable[[fx.Node], bool]) -> list[Match]:
        """Single nodes of this module's graph, as ``(parent_path, node)`` pairs.

        Parameters
        ----------
        regex_or_predicate
            A regular expression, matched from the start against targets of module calls, or a
            function of a node.
        """
        self._ensure_traced("find_node")
        return find_nodes(self.mod, regex_or_predicate)

    def _ensure_traced(self, verb: str) -> None:
        """Trace with proxies; record a run where that is not enough."""
        if isinstance(innermost(self.mod), fx.GraphModule):
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if run(self, TracePrimitive) or run(self, TracePrimitive, tracer="huggingface"):
                return
        reasons = "\n".join(f"- {warning.message}" for warning in caught)
        raise SlapoError(
            f'sch["{self.path}"].{verb}: the module is not traced, and could not be by itself:\n'
            f"{reasons}"
        )

    # --- change of modules, used by primitives -----------------------------------------------
    def set_module(self, new: nn.Module) -> None:
        """Put `new` wherever the present module stands, and follow with the tree."""
        old = self.mod
        for node in self.state.nodes_of.pop(id(old)):
            node.mod = new
            self.state.nodes_of.setdefault(id(new), []).append(node)
            if node.parent is not None:
                owner, name = child_slot(node.parent.mod, node.name)
                owner._modules[name] = new
            node.rebuild_children()

    def rebuild_children(self) -> None:
        """Make the children agree with the module; nodes of unchanged modules stay."""
        # A flat graph has thousands of children and is rewritten as often: most calls find one
        # child added, so nothing is done for those that stayed but to look at them.
        modules = children_of(self.mod)
        child = self.child
        left = [node for name, node in child.items() if modules.get(name) is not node.mod]
        for node in left:
            del child[node.name]
        for name, module in modules.items():
            if name not in child:
                path = f"{self.path}.{name}" if self.path else name
                child[name] = Schedule(module, name, path, self, self.group, self.state)
        if list(child) != list(modules):  # a new node came last, and may belong elsewhere
            ordered = {name: child[name] for name in modules}
            child.clear()
            child.update(ordered)
        for node in left:
            node._forget()

    def _forget(self) -> None:
        """The node left the tree."""
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

    def digest(self) -> str:
        """A fingerprint of the history, equal on every rank that applied the same."""
        return digest(self.history)

    def __getattr__(self, name: str) -> Any:
        primitive = None if name.startswith("_") else find_primitive(name)
        if primitive is None:
            raise AttributeError(
                f"a Schedule has no attribute {name!r}; its primitives are {list_primitives()}"
            )
        return as_method(primitive, primitive.apply).__get__(self, Schedule)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *list_primitives()})

    def __str__(self) -> str:
        return printing.tree(self)

    def __repr__(self) -> str:
        where = f" at {self.path!r}" if self.path else ""
        return (
            f"<Schedule of {type(innermost(self.mod)).__name__}{where}, "
            f"rank {self.rank} of {self.world_size}, {len(self.child)} children>"
        )

    def _repr_html_(self) -> str:
        return printing.html(self)


reserve_names(
    {name for name in vars(Schedule) if not name.startswith("_")}
    | {"mod", "name", "path", "parent", "child", "group", "rank", "world_size", "metadata", "state"}
)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Children as the schedule names them: list items joined, leaves of torch without any."""
    inner = innermost(module)
    if is_torch_leaf(inner) and type(inner) is not nn.Module:  # a bare one just holds others
        return {}
    found: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList):
            found.update({f"{name}.{item}": below for item, below in children_of(child).items()})
        elif child is not None:
            found[name] = child
    return found


def child_slot(parent: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that registers the child called `name`, and the name there."""
    *lists, last = name.split(".")
    for part in lists:
        inner = parent._modules[part]
        assert inner is not None, "a schedule child lies in lists that exist"
        parent = inner
    return parent, last


def create_schedule(
    root: nn.Module,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Schedule:
    """Lay a schedule over a model. The model is not copied: primitives rewrite it in place.

    Parameters
    ----------
    root
        Any module.
    name, path, parent
        Place in a larger tree; leave them out for a whole model.
    group
        The tensor-parallel group: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None
        for the default group (a world of one where ``torch.distributed`` is not initialised).

    Returns
    -------
    Schedule
        The root node.

    Raises
    ------
    TypeError
        If `root` is no module or `group` no group.
    ValueError
        If the mesh has several dimensions or this process is not in the group.
    SlapoError
        If this process is one of several that have not initialised ``torch.distributed``.

    Examples
    --------
    >>> sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    >>> print(sch)
    Sequential
    |-- 0: Linear(in_features=4, out_features=4, bias=True)
    `-- 1: ReLU()
    """
    if not isinstance(root, nn.Module):
        raise TypeError(f"create_schedule: needs an nn.Module, got {type(root).__name__}")
    if parent is not None:
        tp_group = parent.group if group is None else resolve_group(group)
        return Schedule(root, name, path, parent, tp_group, parent.state)
    state = ScheduleState(ties=TieGroups(root))
    schedule = Schedule(root, name, path, None, resolve_group(group), state)
    schedule.metadata.tie_weights = state.ties.as_dict()
    return schedule


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group that `group` stands for; None for a world of one."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names: Any = group.mesh_dim_names
            raise ValueError(
                f"create_schedule: group is a mesh of {group.ndim} dimensions {names}; pass one "
                'of them, such as mesh["tp"]'
            )
        group = group.get_group()
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise SlapoError(
                "create_schedule: a group was given, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first"
            )
        _check_alone()
        return None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"create_schedule: group is a {type(group).__name__}; pass a ProcessGroup or a "
            "DeviceMesh of one dimension that contains this process"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"create_schedule: global rank {dist.get_rank()} is not in the group; pass the group "
            "that contains this process"
        )
    return group


def _check_alone() -> None:
    """Refuse to take one of several processes that a launcher started for a world of one."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world_size.isdigit() and int(world_size) > 1:
        raise SlapoError(
            f"create_schedule: this is process {os.environ['RANK']} of {world_size} (RANK and "
            "WORLD_SIZE are set), but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or unset RANK to run one process alone"
        )


__all__ = ["Schedule", "ScheduleMetadata", "create_schedule"]
