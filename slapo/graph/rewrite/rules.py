"""Rewrites as rules: done in the graph that a schedule sees, and again in each later capture.

A rule holds no node and no module, so that it is copied and pickled with the module it belongs to.
It keeps the searches that found the operations, which of their matches it is about, and the name
of what is called instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch import nn

from slapo.errors import SlapoError, TraceError
from slapo.graph.match.canonical import SHOWN_NAME, called_path
from slapo.graph.match.find import Search, search_for_chain
from slapo.graph.match.search import Match
from slapo.graph.match.subgraph_view import SubgraphView, views_of
from slapo.graph.rewrite.arguments import Callee, common_bindings, plan_call, plan_same_call
from slapo.graph.rewrite.effects import HasGraph, called_module
from slapo.graph.rewrite.plan import (
    Plan,
    common_inputs,
    in_order,
    lay_out,
    subgraph_inputs,
    wrong_results,
)
from slapo.graph.trace.module import Traced, rewrite, rules_of
from slapo.graph.trace.nodes import HeldModule, called_name
from slapo.graph.trace.views import View, is_used, park_unused, targets_of
from slapo.history import caller_location
from slapo.wrapper import innermost

Chains: TypeAlias = Sequence[Sequence[fx.Node]]
Bindings: TypeAlias = Sequence[Mapping[str, Any]]
"""For each chain, what the arguments of the pattern stand for."""
Pick: TypeAlias = tuple[Search, int]
"""A search, and which of its matches."""

_FOUND = "_slapo_found"
"""Attribute of a captured graph while rules are applied to it: results of searches so far."""


class Rule:
    """A rewrite of the graphs of one module, or of a :class:`.SubgraphView` of one.

    To make a rule plans it for the graph that the schedule sees: all its errors are raised there,
    and nothing is changed before :func:`carry_out`. There is a pick for each chain, None for
    operations that were picked by hand.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        chains: Chains,
        bindings: Bindings = (),
        picks: Sequence[Pick | None] = (),
    ) -> None:
        self.location = caller_location()
        self.inside = module.name if isinstance(module, SubgraphView) else ""
        self.number = len(rules_of(home_of(module)))
        self.picks: list[Pick] = []
        chains = [in_order(module.graph, chain) for chain in chains]
        known = list(bindings) or [{}] * len(chains)
        for k, pick in enumerate(picks or [None] * len(chains)):
            if pick is None and isinstance(home_of(module), Traced):
                search, position, match = search_for_chain(module, chains[k])
                pick, known[k] = (search, position), match.bindings
            if pick is not None:  # without a trace there is one graph for all calls
                self.picks.append(pick)
        #: what the rule does to the shown graph, until it is done
        self.plan: Plan | None = self._planned(module, chains, known)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None}

    def _planned(self, gm: HasGraph, chains: Chains, bindings: Bindings) -> Plan:
        """Check the rewrite of one graph; ``ValueError`` if it cannot be done."""
        return lay_out(gm, chains, tuple(subgraph_inputs(chains[0])), {})

    def _target(self, view: View, part: HasGraph, plan: Plan) -> Any:
        """The path of the submodule, or the function, that is called instead."""
        raise NotImplementedError

    def apply(self, view: View) -> None:
        """Rewrite one graph; where that is not possible it stays, and this is a ``TraceError``."""
        part = self._part_of(view)
        plan = self.plan if view.is_shown else None
        if plan is None:
            found = self._search(view)
            if isinstance(part, SubgraphView) and self.number in part.rewritten_by:
                return
            matches = [self._pick(search, position, found) for search, position in self.picks]
        try:
            if plan is None:
                plan = self._planned(part, matches, [match.bindings for match in matches])
            target = self._target(view, part, plan)
        except (ValueError, SlapoError) as error:
            if view.is_shown:
                raise
            raise self._refusal(str(error)) from error
        plan.carry_out(target, checked=part is not view or not view.is_shown)
        if isinstance(part, SubgraphView):
            part.rewritten_by.add(self.number)
            part.recompile()
        self.plan = None

    def _part_of(self, view: View) -> View | SubgraphView:
        """The part of a view to rewrite: itself, or a part that a checkpoint has moved."""
        if not self.inside:
            return view
        for node in view.graph.nodes:
            if called_path(node) == self.inside:
                part = called_module(view, node)
                if isinstance(part, SubgraphView):
                    return part
        raise self._refusal(f"it has no {self.inside}, which the operations are in")

    def _search(self, view: View) -> dict[Search, list[Match]]:
        """Repeat the searches of this rule and of later ones that were made before it was done."""
        rules: list[Any] = rules_of(view.module)
        is_next = self.number < len(rules) and rules[self.number] is self
        found: dict[Search, list[Match]] = vars(view.graph).setdefault(_FOUND, {})
        if rules[self.number + 1 :] == []:  # matches hold on to erased nodes
            del vars(view.graph)[_FOUND]
        for rule in rules[self.number :] if is_next else [self]:
            for search, _ in rule.picks:
                if search in found or search.rewrites != self.number:
                    continue
                part = rule._part_of(view)
                if not isinstance(part, SubgraphView) or rule.number not in part.rewritten_by:
                    found[search] = search.run(part.graph, part.get_submodule)
        return found

    def _pick(self, search: Search, position: int, found: Mapping[Search, list[Match]]) -> Match:
        matches = found.get(search)
        if matches is None:  # this capture has other rewrites already, and is to be made again
            raise self._refusal("the operations were searched for before another rewrite")
        if len(matches) != search.total:
            raise self._refusal(
                f"the operations that it is about are there {len(matches)} times, and "
                f"{search.total} times in the graph that is shown"
            )
        return matches[position]

    def _refusal(self, reason: str) -> TraceError:
        return TraceError(
            f"{self} has no place in the graph of this kind of call (other inputs, or another mode,"
            f" than the graph that is shown): {reason}; call the module as it was traced, or leave "
            "the rewrite out"
        )


def _check_stem(name: str) -> None:
    if not name.isidentifier():
        raise ValueError(
            f"name={name!r} cannot name a submodule; use letters, digits and underscores"
        )


class Replace(Rule):
    """Another module or function instead of one chain, or of several side by side.

    By `same_call` a function gets the arguments of the one node that it replaces.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        chains: Chains,
        new: Callable[..., Any],
        name: str | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        same_call: bool = False,
        **where: Any,
    ) -> None:
        if not callable(new):
            raise TypeError(f"the replacement must be a module or a function, got {new!r}")
        self.callee, self.concrete_args = Callee.of(new), dict(concrete_args or {})
        self.same_call, self.several = same_call, len(chains) != 1
        self.stem = name or getattr(new, "original_name", None) or type(new).__name__
        self._new: nn.Module | None = None
        self.target: Any = None
        if isinstance(new, nn.Module):
            _check_stem(self.stem)
            self._new = new
        else:
            self.target = _with_name(new) if isinstance(new, functools.partial) else new
        super().__init__(module, chains, **where)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_new": None}

    def __str__(self) -> str:
        return f"the replacement by {self.callee.label} at {self.location}"

    def _planned(self, gm: HasGraph, chains: Chains, bindings: Bindings) -> Plan:
        callee, constants = self.callee, self.concrete_args
        if self.same_call:
            (node,) = chains[0]
            args, kwargs = plan_same_call(node, _called(gm, node), callee, constants)
        elif self.several:
            if callee.returns_tensor:
                raise SlapoError(wrong_results(callee.label, "one tensor", len(chains)))
            shared = common_bindings(callee, bindings, constants)
            args, kwargs = plan_call(callee, common_inputs(chains), constants, shared)
        else:
            args, kwargs = plan_call(callee, subgraph_inputs(chains[0]), constants, bindings[0])
        return lay_out(gm, chains, args, kwargs, self.several)

    def _target(self, view: View, part: HasGraph, plan: Plan) -> Any:
        if self._new is not None:
            self.target, self._new = view.add(self.stem, self._new), None
        return self.target


class MadePerText(Rule):
    """A module that is made of the operations: one for all captures in which they are the same.

    The module for the shown graph becomes a child, those for others stay out of sight.
    """

    def __init__(
        self, module: fx.GraphModule, chain: Sequence[fx.Node], stem: str, pick: Pick | None = None
    ) -> None:
        _check_stem(stem)
        self.stem, self.shown, self.children = stem, "", dict[str, str | HeldModule]()
        super().__init__(module, [chain], picks=[pick])
        assert self.plan is not None
        #: the module for the shown graph, until it is there
        self.made: nn.Module | None = self._make(module, home_of(module), self.plan.chains[0])

    def __getstate__(self) -> dict[str, Any]:
        shown = {text: child for text, child in self.children.items() if isinstance(child, str)}
        return {**super().__getstate__(), "made": None, "children": shown}

    def _make(self, gm: HasGraph, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        """Make the module of a chain of the graph of `gm`, of which `home` has the children."""
        raise NotImplementedError

    def _target(self, view: View, part: HasGraph, plan: Plan) -> Any:
        (chain,) = plan.chains
        text = self._text(part, chain)
        child = self.children.get(text, "")
        if not (isinstance(child, HeldModule) or _has(view, child)):
            made = self.made if self.made is not None else self._make(part, view.module, chain)
            self.children[text] = name = view.add(self.stem, made)
            self.made, inner = None, innermost(made)
            if isinstance(inner, SubgraphView):
                inner.name = str(name)
        self.shown = self.shown or str(self.children[text])
        plan.meta[SHOWN_NAME] = self.shown
        return self.children[text]

    def _text(self, gm: HasGraph, chain: list[fx.Node]) -> str:
        """Text of a chain: where it is the same, the module is."""
        return text_of(chain)


def carry_out(module: fx.GraphModule, rule: Rule, keep_modules: bool = False) -> fx.Node:
    """Do a rewrite in all graphs of its module; returns the new call in the shown graph.

    Submodules that neither the graph nor a part moved out of it needs any more are taken out.
    """
    plan, home = rule.plan, home_of(module)
    if plan is None:
        raise ValueError(f"{rule} was carried out already; make another rule")
    called = [str(node.target) for node in plan.nodes if node.op == "call_module"]
    rewrite(home, rule)
    if called and not keep_modules:
        used = [targets_of(view.graph) for view in views_of(home)]
        park_unused(home, [t for t in called if not any(is_used(each, t) for each in used)])
    assert plan.call is not None
    return plan.call


def home_of(module: fx.GraphModule) -> Any:
    """The module that holds the children which a graph calls."""
    return module.owner if isinstance(module, SubgraphView) else module


def text_of(chain: Sequence[fx.Node]) -> str:
    """A text that is equal for chains that compute the same, whatever their nodes are called."""
    names = {value: f"input_{k}" for k, value in enumerate(subgraph_inputs(chain))}
    names |= {node: f"value_{k}" for k, node in enumerate(chain)}
    lines = []
    for node in chain:
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda value: _Name(names[value]))
        lines.append(f"{names[node]} = {node.op} {_text_of_target(node)} {args}")
    return "\n".join(lines)


class _Name(str):
    """A name within the text of arguments, where strings are quoted."""

    def __repr__(self) -> str:
        return str(self)


def _text_of_target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    home, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    name = str(name) or called_name(node)
    unique = id(target) if not name or "<" in name else ""
    return f"{home}.{name or target}{unique}"


def _has(view: View, path: str) -> bool:
    try:
        return bool(path) and view.get_submodule(path) is not None
    except AttributeError:
        return False


def _called(gm: HasGraph, node: fx.Node) -> Callable[..., Any]:
    """Look up what a node calls."""
    target: Any = node.target
    if node.op == "call_method":
        return getattr(torch.Tensor, target, getattr)
    module = called_module(gm, node)
    return target if module is None else module


def _with_name(function: functools.partial[Any]) -> Any:
    """A partial as graphs write calls: by name, which must not be that of the bare function."""
    named: Any = functools.partial(function)
    named.__name__ = f"partial_{getattr(function.func, '__name__', 'call')}"
    named.__module__ = functools.__name__
    return named
