"""The schedule: a tree of paths over a live model, with the primitives as methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from slapo import printing
from slapo.errors import SlapoError, with_nearest
from slapo.graph.match.find import (
    Located,
    Matches,
    Origin,
    Subgraph,
    find_nodes,
    find_subgraphs_in,
    read_pattern,
    read_question,
)
from slapo.history import spelled, warn_caller
from slapo.logger import get_logger
from slapo.node import Node, ScheduleMetadata, ScheduleState, history_of, numbers_of
from slapo.optimizers import parameters_of
from slapo.primitives import (
    AnnotatePrimitive,
    CheckpointPrimitive,
    CompilePrimitive,
    CutPipelineStagePrimitive,
    DecomposePrimitive,
    ForkRNGPrimitive,
    FusePrimitive,
    ReplaceAllPrimitive,
    ReplacePrimitive,
    SetPrimitive,
    ShardPrimitive,
    SyncPrimitive,
    TracePrimitive,
    TraceUntilPrimitive,
)
from slapo.primitives.base import find_primitive, list_primitives, reserve_names
from slapo.primitives.run import as_method, as_question, run
from slapo.primitives.wrapping import check_module
from slapo.record import ScheduleRecord
from slapo.selection import Selection
from slapo.sharding.tp_group import resolve_group
from slapo.snapshot import Snapshot
from slapo.weights.meta import refuse_calls
from slapo.weights.provenance import note_origins
from slapo.weights.slots import TieGroups
from slapo.wrapper import innermost

logger = get_logger()

T = TypeVar("T", Subgraph, Located)


class Schedule(Node):
    """A node of the schedule tree: one module of the model, addressed by its path.

    Created by :func:`create_schedule`. Primitives are methods. They act immediately and in place,
    and return the node, so calls chain. ``print`` shows the tree with the primitives applied.

    Attributes
    ----------
    mod : nn.Module
        The module that is currently at this path.
    name, path : str
        Local name, and full path from the root.
    parent : Schedule or None
    child : dict of str to Schedule
        Children in order. Items of an ``nn.ModuleList`` are children of the list's owner under
        the joined name, such as ``"layer.3"``.
    group : ProcessGroup or None
        The tensor-parallel group.
    rank, world_size : int
        Rank of this process in the group, and the size of the group.
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
    compile = as_method(CompilePrimitive, CompilePrimitive.apply)
    fork_rng = as_method(ForkRNGPrimitive, ForkRNGPrimitive.apply)
    annotate = as_method(AnnotatePrimitive, AnnotatePrimitive.apply)
    set = as_method(SetPrimitive, SetPrimitive.apply)
    trace = as_question(TracePrimitive, TracePrimitive.apply)
    trace_until = as_question(TraceUntilPrimitive, TraceUntilPrimitive.apply)
    fuse = as_method(FusePrimitive, FusePrimitive.apply)
    decompose = as_method(DecomposePrimitive, DecomposePrimitive.apply)
    cut_pipeline_stage = as_method(CutPipelineStagePrimitive, CutPipelineStagePrimitive.apply)

    def select(self, pattern: str) -> Selection[Schedule]:
        """Select the nodes below this one whose path matches a glob.

        Primitives called on the selection apply to each node.

        Parameters
        ----------
        pattern
            ``*`` matches one path component or a part of it; ``**`` matches any number of
            components.

        Raises
        ------
        ValueError
            If no path matches.

        Examples
        --------
        >>> import slapo
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        >>> sch = slapo.create_schedule(model)
        >>> len(sch.select("*.0").checkpoint())
        3
        """
        return Selection.matching(self, pattern)

    @property
    def record(self) -> ScheduleRecord:
        """Record of the primitives applied to the whole tree so far, to save, compare or replay.

        Examples
        --------
        >>> import slapo
        >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        >>> before = sch.record
        >>> print(before.diff(sch["0"].checkpoint().record))
        @@ -0,0 +1 @@
        +sch["0"].checkpoint()
        """
        return ScheduleRecord(self.history, self.world_size, self.get_top_schedule().path)

    # --- graphs ------------------------------------------------------------------------------
    def find(self, pattern: str | Callable[..., Any] | nn.Module) -> Matches[Subgraph]:
        """Find subgraphs of this module, and of traced modules below it, that match a pattern.

        Traces the module if it is not a graph yet; without a match the module is left unchanged.
        Matching follows the dataflow. Independent operations in between do not hide a match, and
        operands of commutative operations may swap. ``F.gelu(x)`` and an ``nn.GELU`` are
        equivalent. An argument that the pattern omits matches any value in the module. Constants in
        the pattern, including tensors, must be equal. Matches do not overlap.

        Parameters
        ----------
        pattern
            A function or a :class:`slapo.pattern.Pattern` whose arguments match any value; or a
            regular expression, matched from the start against targets of module calls.

        Returns
        -------
        list
            Subgraphs, each a list of ``(parent_path, node)``. Its ``bindings`` map each argument of
            the pattern to the matched node. An empty list has ``why``: how far the search got and
            what to try. The reason is also logged.

        Raises
        ------
        SlapoError
            If the module cannot be traced automatically.
        ValueError, TypeError
            If `pattern` is not a pattern.

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
        >>> (match,) = sch.find(lambda h, bias: torch.relu(h + bias))
        >>> [node.name for _, node in match], match.bindings
        (['add', 'relu'], {'h': fc, 'bias': x})
        >>> print(sch.find(lambda h: torch.relu(torch.sin(h))).why)
        1 of 2 operations of the pattern were found together, relu at relu; sin was not: in its
        place is add (add)
        - no graph here has sin
        """
        wanted = read_pattern(pattern)
        return self._look("find", pattern, lambda: find_subgraphs_in(self.mod, wanted))

    def find_node(self, regex_or_predicate: str | Callable[[fx.Node], bool]) -> Matches[Located]:
        """Find single nodes of this module's graph, as ``(parent_path, node)`` pairs.

        Like :meth:`find`, it traces the module if needed and leaves it unchanged without a match.

        Parameters
        ----------
        regex_or_predicate
            A regular expression, matched from the start against targets of module calls, or a
            predicate on a node.
        """
        question = read_question(regex_or_predicate)
        return self._look("find_node", regex_or_predicate, lambda: find_nodes(self.mod, question))

    def _look(self, verb: str, pattern: Any, search: Callable[[], Matches[T]]) -> Matches[T]:
        """Run a search; a graph traced for it is kept only if something is found."""
        if isinstance(innermost(self.mod), fx.GraphModule):
            found = search()
        else:
            found = self._trace_and_look(verb, search)
        if not found:
            # `why` costs more than the search, so it is formatted only if a handler emits the
            # record.
            logger.info("%s.%s found %s", spelled(self.path), verb, found)
        for index, match in enumerate(found):
            # A record names a match by its search: nodes exist in this process only.
            match.origin = Origin(verb, pattern, index, len(found), len(self.state.history))
        return found

    def _trace_and_look(self, verb: str, search: Callable[[], Matches[T]]) -> Matches[T]:
        """Trace the module, search it, and restore the module if nothing is found."""
        before = Snapshot(self)
        found: Matches[T] | None = None
        try:
            self._trace(verb)
            found = search()
            found.settle()  # computes `why` while the graphs still exist
        finally:
            if not found:
                before.restore()
        return found

    def _trace(self, verb: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            # trace() warns instead of raising, and the error below repeats its reasons.
            warnings.simplefilter("always")
            if run(self, TracePrimitive):
                return
        reasons = "\n".join(f"- {warning.message}" for warning in caught)
        raise SlapoError(
            f"{spelled(self.path)}.{verb}: the module is not traced, and could not be traced "
            f"automatically; call .trace() with the arguments that it needs first:\n{reasons}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Schedule cannot be pickled or copied by copy.copy; use copy.deepcopy(sch), which "
            "copies the model too, or pickle the model, sch.mod"
        )

    def __iter__(self) -> Any:
        """Raise TypeError: without this, Python would iterate by integer keys."""
        raise TypeError(
            "a Schedule is not iterable; get its nodes from sch.named_schedules(), "
            "sch.select(glob) or sch.child.values()"
        )

    if not TYPE_CHECKING:  # type checkers would accept any attribute, and no typo would show

        def __getattr__(self, name: str) -> Any:
            return self._user_primitive(name)

    def _user_primitive(self, name: str) -> Any:
        primitive = None if name.startswith("_") else find_primitive(name)
        if primitive is None:
            raise AttributeError(self._describe_missing(name))
        return as_method(primitive, primitive.apply).__get__(self, Schedule)

    def _describe_missing(self, name: str) -> str:
        text = f"a Schedule has no attribute {name!r}"
        children = [child for child in self.child if child.split(".")[0] == name]
        if children:
            return f"{text}; children are items: sch[{children[0]!r}]"
        if hasattr(self.__dict__.get("_mod"), name):
            return f"{text}; the module's attribute is sch.mod.{name}"
        return f"{text}; {with_nearest(name, dir(self), f'its primitives are {list_primitives()}')}"

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
    # Attributes that __init__ sets are not in dir() of the class.
    {name for name in dir(Schedule) if not name.startswith("_")}
    | {"mod", "name", "path", "parent", "child", "group", "rank", "world_size", "metadata", "state"}
)


def _start_note(name: str) -> Any:
    primitive = find_primitive(name)
    if primitive is None:
        raise KeyError(f"no primitive is called {name!r}; known are {list_primitives()}")
    return primitive.init_metadata()


def create_schedule(
    root: nn.Module,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
) -> Schedule:
    """Create a schedule over a model. The model is not copied: primitives rewrite it in place.

    Parameters
    ----------
    root
        Any module.
    name, path, parent
        Position in a larger tree; leave them out for a whole model.
    group
        The tensor-parallel group: a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, or None
        for the default group (a world of one if ``torch.distributed`` is not initialized).
    mesh
        Instead of `group`: a mesh such as that of :func:`slapo.init_mesh`. Its dimension ``"tp"``
        is the group; without that dimension every rank has the full model.

    Returns
    -------
    Schedule
        The root node.

    Raises
    ------
    TypeError
        If `root` is not a module, `group` is not a group, or both `mesh` and `group` are given.
    ValueError
        If a mesh given as `group` has several dimensions, or does not include this process.
    SlapoError
        If a group is given and ``torch.distributed`` is not initialized.

    Warns
    -----
    UserWarning
        If the model was scheduled before, for example when a notebook cell runs again: it is
        still as that schedule left it. Also if this process is one of several that have not
        initialized ``torch.distributed``: it is then a world of one.

    Examples
    --------
    >>> sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    >>> print(sch)
    Sequential
    |-- 0: Linear(in_features=4, out_features=4, bias=True)
    `-- 1: ReLU()
    """
    check_module(root, "create_schedule: root", "pass the model itself")
    if isinstance(root, (DistributedDataParallel, nn.DataParallel)):
        raise TypeError(
            f"create_schedule: root is a {type(root).__name__} already, which has registered the "
            "parameters; schedule the model itself, model.module, and wrap the model that "
            "slapo.build returns"
        )
    if parent is not None:
        tp_group = parent.group if group is None and mesh is None else resolve_group(group, mesh)
        return Schedule(root, name, path, parent, tp_group, parent.state)
    _warn_of_earlier(root)
    state = ScheduleState(TieGroups(root), _start_note)
    schedule = Schedule(root, name, path, None, resolve_group(group, mesh), state)
    schedule.metadata.tie_weights = state.ties.as_dict()
    state.original = note_origins(root)
    state.parameters, state.numbers = parameters_of(root), numbers_of(root)
    refuse_calls(root)
    return schedule


def _warn_of_earlier(root: nn.Module) -> None:
    """Warn if an earlier schedule has changed the model: the new one lacks that history."""
    earlier = history_of(root)
    if earlier:
        count = f"{len(earlier)} primitive{'s' if len(earlier) > 1 else ''}"
        warn_caller(
            f"create_schedule: this {type(innermost(root)).__name__} was scheduled before ({count},"
            f" the first {earlier[0]}) and keeps those changes; the new schedule does not show "
            "them. To start over, rebuild the model before create_schedule, or keep the model "
            "unchanged and schedule copies: create_schedule(copy.deepcopy(model))"
        )


__all__ = ["Schedule", "ScheduleMetadata", "create_schedule"]
