"""``.replace(new_mod)`` and ``.replace(fn_or_mod, target_ops)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from slapo.graph.rewrite.rules import Replace, Rule, carry_out
from slapo.hooks import move_hooks, move_reducers
from slapo.logger import get_logger
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.subgraphs import (
    Subgraphs,
    check_hooks,
    check_hooks_of_other_calls,
    end_modules,
    move_end_hooks,
    parse,
)
from slapo.primitives.wrapping import check_called, check_module
from slapo.sharding.partial import defer_bias_as
from slapo.sharding.state import copy_shards, make_sharding, move_syncs, shards_of
from slapo.weights.provenance import dropped_values, inherit_weights
from slapo.weights.slots import TiePlan
from slapo.wrapper import innermost, replace_innermost

logger = get_logger("slapo")


class ReplacePrimitive(Primitive, name="replace"):
    """Replace this module by another one, or operations by one call.

    | whole module: ``self.act(x) --> self.act(x)`` with ``act`` another module
    | vertical: ``b = f(x, w); c = g(b) --> c = new(x, w)``
    | horizontal: ``a = f(x); b = g(x) --> t = new(x); a = t[0]; b = t[1]``
    | single node: ``b = f(x, 2) --> b = fn(x, 2)``

    Values bound to the pattern's arguments, constants included, go to the parameters of the same
    names. The remaining values follow in the order of the pattern's arguments. Inputs that the
    pattern does not name come last, in order of first use.

    The rewrite is repeated in the graph of every kind of call that the traced module meets later. A
    call whose graph does not admit the rewrite raises :class:`slapo.errors.TraceError`.

    Hooks move to the new module. Tied parameters stay tied. A new module with ``weight_sources()``
    (see :class:`slapo.weights.provenance.Source`) takes its values from the modules it replaces.
    Parameters of a new module on ``meta`` become the replaced parameters of the same name.

    Parameters
    ----------
    new_mod
        The new module.
    target_ops
        Result of ``find``: one subgraph is replaced vertically, several horizontally. A
        ``(parent_path, node)`` pair of ``find_node`` is replaced by a function of the same
        arguments. None replaces the module itself.
    name
        Prefix of the new submodule's name, ``<name>_<k>``; the default is its class name.
    concrete_args
        Arguments passed as constants, by parameter name.
    fn_or_mod
        Alias of `new_mod` for the static form, which accepts functions too.

    Raises
    ------
    ValueError
        If the number of required arguments does not match the subgraph's inputs, if inner values of
        the subgraph are used outside, if an operation may not move (see
        :func:`slapo.graph.rewrite.reorder.check_reorder`), or if a tie would break.
    RuntimeError
        If a hook would be lost.
    TypeError
        If the replacement is not a module, or with `target_ops` not callable.

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
    def apply(
        sch: Node,
        /,
        new_mod: Annotated[
            nn.Module | Callable[..., Any] | None,
            "such as nn.GELU(), or a node's .mod",
        ] = None,
        target_ops: Any = None,
        name: str | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        *,
        fn_or_mod: nn.Module | Callable[..., Any] | None = None,
    ) -> Node:
        if (new_mod is None) == (fn_or_mod is None):
            how_many = "no replacement" if new_mod is None else "two replacements"
            raise TypeError(f"got {how_many}; pass one, as new_mod or (with target_ops) fn_or_mod")
        new = new_mod if new_mod is not None else fn_or_mod
        if target_ops is None:
            if name is not None or concrete_args is not None:
                raise ValueError(
                    "name and concrete_args need target_ops; pass the result of sch.find(...) too"
                )
            replace_module(sch, check_module(new, "without target_ops, the replacement"))
            return sch
        if not callable(new):
            raise TypeError(
                f"the replacement of operations must be a module or a function, got {new!r}; pass "
                "the module or the function itself"
            )
        subgraphs = parse(sch, target_ops)
        scripted = isinstance(new, torch.jit.ScriptModule)
        check_hooks(subgraphs, keeps_hooks=isinstance(new, nn.Module), scripted=scripted)
        same_call = subgraphs.single_node and not isinstance(new, nn.Module)
        where = {"bindings": subgraphs.bindings, "picks": subgraphs.picks}
        rule = Replace(subgraphs.gm, subgraphs.chains, new, name, concrete_args, same_call, **where)
        described = _described(rule, subgraphs.bindings)
        rewrite_subgraphs(rule, new, subgraphs)
        if isinstance(new, nn.Module):
            new.train(subgraphs.gm.training)
        if not same_call:
            logger.info("replaced by %s", described)
        return sch


def replace_module(sch: Node, new: nn.Module) -> None:
    """Replace the innermost module; its wrappers stay around the new one."""
    old = innermost(sch.mod)
    if new is sch.mod or new is old:
        raise ValueError(
            f"the module is already this {type(new).__name__}; pass another module, or leave "
            "the call out"
        )
    _check_not_above(sch, new)
    check_called(sch)
    path = sch.model_path
    # Plans check and may raise, so they come before the first change.
    tie_plan = TiePlan(sch.get_top_schedule().mod, sch.state.ties, [path], path, new)
    # Compared before inherit_weights() adopts the old parameters.
    dropped = dropped_values(new, old)
    if dropped:
        logger.warning(
            '%s keeps its own values of %s, and those of sch["%s"] are lost; to keep them, create '
            "the new module under slapo.init_empty_weights(), load the old state_dict, or define "
            "weight_sources()",
            type(new).__name__,
            dropped[:3],
            sch.path,
        )
    inherit_weights(new, [old])
    _set_ties(sch, tie_plan)
    # A new module starts in training mode, which would differ in a model in eval mode.
    new.train(old.training)
    # A new module that wraps the old one replaces it together with its wrappers and hooks.
    wraps_old = any(m is old or m is sch.mod for m in new.modules())
    if not wraps_old:
        shards = shards_of(old)
        if shards and all(getattr(new, name, None) is getattr(old, name) for name in shards):
            copy_shards(old, new)  # was on meta: it took over the slices
            defer_bias_as(old, new)
        move_hooks(old, new)
        move_reducers(old, new)
        move_syncs(old, new)
    outer = new if wraps_old else replace_innermost(sch.mod, new)
    # Wrappers around the module stay, and only their innermost module is another one.
    if outer is sch.mod:
        sch.rebuild_children()
    else:
        sch.set_module(outer)
    if not wraps_old:
        _carry_notes(sch, new)


def _set_ties(sch: Node, plan: TiePlan) -> None:
    sch.state.ties = plan.carry_out()
    sch.get_top_schedule().metadata.tie_weights = sch.state.ties.as_dict()


def _check_not_above(sch: Node, new: nn.Module) -> None:
    """Raise if the new module contains an ancestor of the node."""
    inside = {id(module) for module in new.modules()}
    for node in sch.ancestors():
        if id(innermost(node.mod)) in inside or id(node.mod) in inside:
            raise ValueError(
                f"the new {type(new).__name__} contains {node.where}, which would contain "
                "it in turn; use copies of the modules that you need"
            )


def _carry_notes(sch: Node, new: nn.Module) -> None:
    """Carry tags over to parameters of the same name; drop shards that the new module lacks."""
    for param_name, tags in sch.metadata.param_tags.items():
        if new._parameters.get(param_name) is not None:
            state = make_sharding(new, sch.group)
            state.tags[param_name] = dict(tags)
            state.attach(new, param_name)
    noted = sch.metadata.primitives.get("shard", {})
    for tensor_name in [name for name in noted if name not in shards_of(new)]:
        del noted[tensor_name]


def rewrite_subgraphs(rule: Rule, new: Any, subgraphs: Subgraphs) -> None:
    """Apply a rule after the hook checks, and move weights, hooks and ties to the new module."""
    chains, owner, plan = subgraphs.chains, subgraphs.owner, rule.plan
    assert plan is not None
    # All that can refuse comes before carry_out(), which changes the graph.
    check_hooks_of_other_calls(subgraphs, plan)
    ends = end_modules(subgraphs)
    tie_plan = _plan_ties(subgraphs, new)
    targets = [str(n.target) for chain in chains for n in chain if n.op == "call_module"]
    if isinstance(new, nn.Module):
        inherit_weights(new, [m for chain in chains for m in subgraphs.modules(chain)])
    call = carry_out(subgraphs.gm, rule)
    if isinstance(new, nn.Module):
        targets.append(str(call.target))
        # The name is chosen by carry_out(), as the first free one.
        tie_plan.new_path = _join(owner.model_path, targets[-1])
        # Several chains side by side have no common first or last module; check_hooks() refused
        # hooks.
        if len(chains) == 1:
            move_end_hooks(ends, new)
    _set_ties(owner, tie_plan)
    owner.refresh(targets)


def _described(rule: Replace, bindings: Sequence[Mapping[str, Any]]) -> str:
    """Describe the arguments of the new call, and how they were matched."""
    assert rule.plan is not None
    wanted = rule.callee.names
    named = [name for name in bindings[0] if name in wanted]
    left = [f"{name}={value}" for name, value in bindings[0].items() if name not in wanted]
    how = "in order of first use"
    if bindings[0]:
        how = f"{', '.join(named)} by name" if named else "in the order of the pattern's arguments"
    unknown = f"; no parameter has the name of the pattern's {', '.join(left)}" if left else ""
    return f"{rule.callee.call(rule.plan.args, rule.plan.kwargs)}, {how}{unknown}"


def _plan_ties(subgraphs: Subgraphs, new: nn.Module | Callable[..., Any]) -> TiePlan:
    owner = subgraphs.owner
    called = {str(n.target) for chain in subgraphs.chains for n in chain if n.op == "call_module"}
    paths = [_join(owner.model_path, target) for target in sorted(called)]
    holder = new if isinstance(new, nn.Module) else nn.Module()
    return TiePlan(owner.get_top_schedule().mod, owner.state.ties, paths, "", holder)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
