"""Rewrites as rules, applied to the shown graph and to each later capture.

A rule holds no node or module, so that it is copied and pickled with its module. It stores the
searches that found the operations, the indices of their matches, and the name of the replacement.
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

    The constructor plans it for the shown graph and raises all errors there; only :func:`carry_out`
    changes anything. There is a pick per chain, None for operations picked by hand.
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
        chains = [in_order(chain) for chain in chains]
        known = list(bindings) or [{}] * len(chains)
        for k, pick in enumerate(picks or [None] * len(chains)):
            # Operations picked by hand have no search, and later captures need one to find them
            # again.
            if pick is None and isinstance(home_of(module), Traced):
                search, position, match = search_for_chain(module, chains[k])
                pick, known[k] = (search, position), match.bindings
            if pick is not None:  # an untraced module has one graph for all calls
                self.picks.append(pick)
        #: the plan for the shown graph, until it is carried out
        self.plan: Plan | None = self._planned(module, chains, known)

    def __getstate__(self) -> dict[str, Any]:
        # A plan holds nodes of this graph, which the copy's graph does not have.
        return {**self.__dict__, "plan": None}

    def _planned(self, gm: HasGraph, chains: Chains, bindings: Bindings) -> Plan:
        """Check the rewrite of one graph; raises ValueError if it is impossible."""
        return lay_out(gm, chains, tuple(subgraph_inputs(chains[0])), {})

    def _target(self, view: View, part: HasGraph, plan: Plan) -> Any:
        """Return the path of the submodule, or the function, that replaces the operations."""
        raise NotImplementedError

    def apply(self, view: View) -> None:
        """Rewrite one graph; if that is impossible, leave it unchanged and raise TraceError."""
        part = self._part_of(view)
        plan = self.plan if view.is_shown else None
        if plan is None:
            found = self._search(view)
            # Captures share the view inside a checkpoint; another one may have rewritten it
            # already.
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
        """Return the part of a view to rewrite: itself, or a part that a checkpoint has moved."""
        if not self.inside:
            return view
        for node in view.graph.nodes:
            if called_path(node) == self.inside:
                part = called_module(view, node)
                if isinstance(part, SubgraphView):
                    return part
        raise self._refusal(f"it lacks {self.inside}, which contains the operations")

    def _search(self, view: View) -> dict[Search, list[Match]]:
        """Repeat the searches of this rule, and of later ones made before it was applied."""
        # The shown graph was searched when the program called `find`, perhaps before other
        # rewrites. In a capture the rules run in order, so a search is repeated when as many
        # rewrites are done as then (`search.rewrites`), and its matches wait on the graph for the
        # rule that uses them.
        rules: list[Any] = rules_of(view.module)
        is_next = self.number < len(rules) and rules[self.number] is self
        found: dict[Search, list[Match]] = vars(view.graph).setdefault(_FOUND, {})
        if rules[self.number + 1 :] == []:  # matches keep erased nodes alive
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
        if matches is None:  # this capture already has other rewrites and must be recaptured
            raise self._refusal("the search for the operations ran before another rewrite")
        # Matches are identified by their positions, which mean the same only if there are equally
        # many.
        if len(matches) != search.total:
            raise self._refusal(
                f"its search has {len(matches)} matches there, and {search.total} in the graph "
                "that is shown"
            )
        return matches[position]

    def _refusal(self, reason: str) -> TraceError:
        return TraceError(
            f"{self} cannot be applied to the graph of this kind of call (its inputs or mode "
            f"differ from the graph that is shown): {reason}; call the module as it was traced, "
            "or leave the rewrite out"
        )


def _check_stem(name: str) -> None:
    if not name.isidentifier():
        raise ValueError(
            f"name={name!r} cannot name a submodule; use letters, digits and underscores"
        )


class Replace(Rule):
    """Rule that replaces one chain, or several side by side, by a module or function.

    With `same_call`, a function gets the arguments of the one node that it replaces.
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
        # The module is added with the first graph, the shown one, and later graphs call it by its
        # path.
        if self._new is not None:
            self.target, self._new = view.add(self.stem, self._new), None
        return self.target


class MadePerText(Rule):
    """Rule whose module is made from the operations, once for all captures with equal ones.

    The module for the shown graph becomes a child; those for other captures stay hidden.
    """

    def __init__(
        self, module: fx.GraphModule, chain: Sequence[fx.Node], stem: str, pick: Pick | None = None
    ) -> None:
        _check_stem(stem)
        self.stem, self.shown, self.children = stem, "", dict[str, str | HeldModule]()
        super().__init__(module, [chain], picks=[pick])
        assert self.plan is not None
        #: the module for the shown graph, until it is added
        self.made: nn.Module | None = self._make(module, home_of(module), self.plan.chains[0])

    def __getstate__(self) -> dict[str, Any]:
        shown = {text: child for text, child in self.children.items() if isinstance(child, str)}
        return {**super().__getstate__(), "made": None, "children": shown}

    def _make(self, gm: HasGraph, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        """Make the module for a chain of the graph of `gm`; `home` has the children."""
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
        """Return a text of a chain; equal texts share a module."""
        return text_of(chain)


def carry_out(module: fx.GraphModule, rule: Rule, keep_modules: bool = False) -> fx.Node:
    """Apply a rewrite to all graphs of its module; return the new call in the shown graph.

    Submodules that neither the graph nor a part moved out of it uses any more are removed.
    """
    plan, home = rule.plan, home_of(module)
    assert plan is not None, "a rule is applied once"
    called = [str(node.target) for node in plan.nodes if node.op == "call_module"]
    rewrite(home, rule)
    if called and not keep_modules:
        used = [targets_of(view.graph) for view in views_of(home)]
        park_unused(home, [t for t in called if not any(is_used(each, t) for each in used)])
    assert plan.call is not None
    return plan.call


def home_of(module: fx.GraphModule) -> Any:
    """Return the module that has the children which a graph calls."""
    return module.owner if isinstance(module, SubgraphView) else module


def text_of(chain: Sequence[fx.Node]) -> str:
    """Return a text that is equal for chains with equal computations, whatever their node names."""
    names = {value: f"input_{k}" for k, value in enumerate(subgraph_inputs(chain))}
    names |= {node: f"value_{k}" for k, node in enumerate(chain)}
    lines = []
    for node in chain:
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda value: _Name(names[value]))
        lines.append(f"{names[node]} = {node.op} {_text_of_target(node)} {args}")
    return "\n".join(lines)


class _Name(str):
    """A name within the text of arguments, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _text_of_target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    home, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    name = str(name) or called_name(node)
    # Lambdas and local functions share their qualified names.
    unique = id(target) if not name or "<" in name else ""
    return f"{home}.{name or target}{unique}"


def _has(view: View, path: str) -> bool:
    try:
        return bool(path) and view.get_submodule(path) is not None
    except AttributeError:
        return False


def _called(gm: HasGraph, node: fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    if node.op == "call_method":
        return getattr(torch.Tensor, target, getattr)
    module = called_module(gm, node)
    return target if module is None else module


def _with_name(function: functools.partial[Any]) -> Any:
    """Copy a partial with a name of its own: graphs write calls by name."""
    named: Any = functools.partial(function)
    named.__name__ = f"partial_{getattr(function.func, '__name__', 'call')}"
    named.__module__ = functools.__name__
    return named
