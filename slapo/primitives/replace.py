"""``.replace(new_mod)`` and ``.replace(fn_or_mod, target_ops)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from slapo.graph.rewrite.arguments import plan_call
from slapo.graph.rewrite.replace import (
    replace_horizontal,
    replace_node_by_function,
    replace_vertical,
    subgraph_inputs,
)
from slapo.hooks import move_hooks, move_reducers
from slapo.node import Node, ScheduleState
from slapo.primitives.base import Primitive
from slapo.primitives.subgraphs import (
    Subgraphs,
    check_hooks,
    end_modules,
    move_end_hooks,
    parse,
)
from slapo.primitives.wrapping import check_called, check_module
from slapo.sharding.layout import move_syncs
from slapo.sharding.shards import shards_of
from slapo.weights.provenance import Source, inherit_weights
from slapo.weights.tags import apply_tags
from slapo.weights.ties import TiePlan
from slapo.wrapper import innermost, replace_innermost


class ReplacePrimitive(Primitive):
    """Put another module in the place of this one, or one call in the place of operations.

    | whole module: ``self.act(x) --> self.act(x)`` with ``act`` another module
    | vertical: ``b = f(x, w); c = g(b) --> c = new(x, w)``
    | horizontal: ``a = f(x); b = g(x) --> t = new(x); a = t[0]; b = t[1]``
    | single node: ``b = f(x, 2) --> b = fn(x, 2)``

    Hooks move to the new module. Tied parameters stay tied. A new module that defines
    ``weight_sources()`` (see :class:`slapo.weights.provenance.Source`) gets its values from the
    modules it replaces; parameters of a new module on ``meta`` become those of the same name.

    Parameters
    ----------
    new_mod
        The new module.
    target_ops
        What ``find`` returned: one subgraph is replaced vertically, several horizontally. A
        ``(parent_path, node)`` pair of ``find_node`` is replaced by a function of the same
        arguments. None replaces the whole module.
    name
        New submodules are called ``<name>_<k>``; the default is their class's name.
    concrete_args
        Arguments passed as constants, by parameter name.
    fn_or_mod
        Another name of `new_mod`, for the static form, where it may be a function too.

    Raises
    ------
    ValueError
        If the new callable's required arguments do not match the subgraph's inputs in number, the
        subgraph's inner values are used outside, or a tie would break.
    RuntimeError
        If a hook would be lost.
    TypeError
        If the new module is none.

    Examples
    --------
    >>> import torch, slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> sch["1"].replace(nn.GELU()).mod
    GELU(approximate='none')
    >>> match = sch.find(lambda x: nn.functional.gelu(x))
    >>> _ = sch.replace(torch.tanh, match)
    >>> "tanh" in sch.mod.code
    True
    """

    @staticmethod
    def name() -> str:
        """Return ``"replace"``."""
        return "replace"

    @staticmethod
    def apply(
        sch: Node,
        /,
        new_mod: nn.Module | Callable[..., Any] | None = None,
        target_ops: Any = None,
        name: str | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        *,
        fn_or_mod: nn.Module | Callable[..., Any] | None = None,
    ) -> Node:
        """Replace the module, or the matched operations."""
        if (new_mod is None) == (fn_or_mod is None):
            raise TypeError("pass the replacement, as new_mod or (with target_ops) as fn_or_mod")
        new = new_mod if new_mod is not None else fn_or_mod
        if target_ops is None:
            if name is not None or concrete_args is not None:
                raise ValueError("name and concrete_args need target_ops, what find() returned")
            replace_module(sch, check_module(new, "the replacement of a module"))
            return sch
        if not callable(new):
            raise TypeError(
                f"the replacement of operations must be a module or a function, got {new!r}"
            )
        replace_subgraphs(new, parse(sch, target_ops), name, concrete_args)
        return sch


def replace_module(sch: Node, new: nn.Module) -> None:
    """Whole-module replacement; wrappers around the module stay around the new one."""
    old = innermost(sch.mod)
    if new is sch.mod or new is old:
        raise ValueError(f"the module is that {type(new).__name__} already")
    _check_not_above(sch, new)
    check_called(sch)
    path = sch.model_path
    tie_plan = TiePlan(sch.get_top_schedule().mod, sch.state.ties, [path], path, new)
    sources = inherit_weights(new, [old])
    sch.state.ties = tie_plan.carry_out()
    _note_sources(sch.state, sources, path, [path])
    new.train(old.training)
    # A module of the user's that wraps the old one takes its place, wrappers and hooks and all.
    wraps_old = any(m is old or m is sch.mod for m in new.modules())
    if not wraps_old:
        move_hooks(old, new)
        move_reducers(old, new)
        move_syncs(old, new)
    outer = new if wraps_old else replace_innermost(sch.mod, new)
    if outer is sch.mod:
        sch.rebuild_children()
    else:
        sch.set_module(outer)
    if not wraps_old:
        _carry_notes(sch, new)


def _check_not_above(sch: Node, new: nn.Module) -> None:
    """A module cannot contain itself."""
    inside = {id(module) for module in new.modules()}
    node = sch.parent
    while node is not None:
        if id(innermost(node.mod)) in inside or id(node.mod) in inside:
            raise ValueError(
                f"the new {type(new).__name__} contains {node.path or 'the root'!r}, of which it "
                "would become a part; make a copy of what you need of it"
            )
        node = node.parent


def _carry_notes(sch: Node, new: nn.Module) -> None:
    """Tags follow to parameters of the same name; shards of the old module are gone."""
    for param_name, tags in sch.metadata.param_tags.items():
        param = new._parameters.get(param_name)
        if param is not None:
            apply_tags(param, tags, sch.group)
    noted = sch.metadata.primitives.get("shard", {})
    for tensor_name in [name for name in noted if name not in shards_of(new)]:
        del noted[tensor_name]


def replace_subgraphs(
    new: nn.Module | Callable[..., Any],
    subgraphs: Subgraphs,
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> None:
    """The static form: vertical, horizontal, or one node."""
    gm, chains, owner = subgraphs.gm, subgraphs.chains, subgraphs.owner
    check_hooks(subgraphs, keeps_hooks=isinstance(new, nn.Module))
    ends = end_modules(subgraphs)
    tie_plan = _plan_ties(subgraphs, new)
    targets = [str(n.target) for chain in chains for n in chain if n.op == "call_module"]
    old_paths = [_join(owner.model_path, target) for target in targets]
    sources: dict[str, Source] = {}
    if isinstance(new, nn.Module):
        for chain in chains:
            plan_call(new, subgraph_inputs(chain), concrete_args or {})  # a misfit changes nothing
        sources = inherit_weights(new, [m for chain in chains for m in subgraphs.modules(chain)])
    if subgraphs.single_node and not isinstance(new, nn.Module):
        call = replace_node_by_function(gm, chains[0][0], new, concrete_args)
    elif len(chains) == 1:
        call = replace_vertical(gm, chains[0], new, name, concrete_args)
    else:
        call = replace_horizontal(gm, chains, new, name, concrete_args)
    if isinstance(new, nn.Module):
        targets.append(str(call.target))
        tie_plan.new_path = _join(owner.model_path, targets[-1])
        new.train(gm.training)
        if len(chains) == 1:
            move_end_hooks(ends, new)
    owner.state.ties = tie_plan.carry_out()
    _note_sources(owner.state, sources, tie_plan.new_path, old_paths)
    owner.refresh(targets)


def _plan_ties(subgraphs: Subgraphs, new: nn.Module | Callable[..., Any]) -> TiePlan:
    owner = subgraphs.owner
    called = {str(n.target) for chain in subgraphs.chains for n in chain if n.op == "call_module"}
    paths = [_join(owner.model_path, target) for target in sorted(called)]
    holder = new if isinstance(new, nn.Module) else nn.Module()
    return TiePlan(owner.get_top_schedule().mod, owner.state.ties, paths, "", holder)


def _note_sources(
    state: ScheduleState, sources: Mapping[str, Source], new_path: str, old_paths: list[str]
) -> None:
    """Remember which original parameters make up the new ones, by their full names."""
    for name, source in sources.items():
        pairs = (full.partition(".") for full in source.names)
        originals = [_join(old_paths[int(index)], rest) for index, _, rest in pairs]
        state.sources[_join(new_path, name)] = (source, originals)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
