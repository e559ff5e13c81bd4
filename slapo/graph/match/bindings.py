"""What the arguments of a pattern stand for in a match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.fx as fx

from slapo.graph.trace.nodes import nodes_in


class Arguments:
    """What each argument of a pattern stands for, also after rewrites beside the match.

    These put other nodes in the place of the match's inputs. So an input is looked up where the
    match uses it.

    Parameters
    ----------
    values
        Argument's name -> node, constant, weight of a module, or container of these.
    nodes
        The nodes of the match.
    """

    def __init__(self, values: Mapping[str, Any], nodes: Iterable[fx.Node]) -> None:
        self._values = dict(values)
        self._places: dict[fx.Node, tuple[fx.Node, int]] = {}
        wanted = set(nodes_in(self._values))
        for user in nodes:
            for index, value in enumerate(_operands(user)):
                if value in wanted:
                    self._places.setdefault(value, (user, index))

    def now(self) -> dict[str, Any]:
        """Argument's name -> what it stands for in the graph as it is now."""
        return {name: fx.map_arg(value, self._present) for name, value in self._values.items()}

    def _present(self, node: fx.Node) -> fx.Node:
        """The node that is used where `node` was."""
        user, index = self._places.get(node, (None, 0))
        if user is None or user._erased:
            return node
        operands = _operands(user)
        return operands[index] if index < len(operands) else node


class Match(list[fx.Node]):
    """The nodes of a match, in graph order.

    Parameters
    ----------
    nodes
        The nodes.
    values
        What the pattern's arguments stand for, by name.
    """

    def __init__(self, nodes: Iterable[fx.Node], values: Mapping[str, Any] | None = None) -> None:
        super().__init__(nodes)
        self._arguments = Arguments(values or {}, self)

    @property
    def bindings(self) -> dict[str, Any]:
        """Name of each argument of the pattern -> what it stands for.

        That is a node, a constant, the weight of a module (:class:`.canonical.ModuleState`), or a
        container of these. Arguments that the pattern does not use are left out.
        """
        return self._arguments.now()


def _operands(node: fx.Node) -> list[fx.Node]:
    return nodes_in((node.args, node.kwargs))
