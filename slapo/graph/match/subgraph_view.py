"""Module view of some operations of a traced module, sharing its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from slapo.graph.trace.module import code_of
from slapo.wrapper import innermost

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_CODE = "_slapo_code"


class SubgraphView(fx.GraphModule):
    """Module that runs operations of `owner`, looking up children and parameters at each call.

    It therefore follows replacements in the owner. It has no state of its own: its tables are the
    owner's.
    """

    owner: nn.Module
    #: path, in the owner, of the module that wraps the view; set once it has one
    name: str
    #: indices of the owner's rewrites that were applied to this graph
    rewritten_by: set[int]

    def __new__(cls, *args: Any, **kwargs: Any) -> SubgraphView:
        """Make an object of the class itself, not of a class per graph as fx does."""
        return object.__new__(cls)

    def __init__(self, owner: nn.Module, graph: fx.Graph) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({slot: owner.__dict__[slot] for slot in _SHARED})
        self.__dict__.update(owner=owner, name="", rewritten_by=set(), _graph=graph)
        self.training = owner.training
        self.recompile()

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self._graph.python_code("self").src

    def recompile(self) -> Any:
        self.__dict__[_CODE] = code_of(self._graph)

    def forward(self, *inputs: Any) -> Any:
        """Run the operations on the owner's state."""
        return self.__dict__[_CODE](self.owner, *inputs)

    __repr__ = nn.Module.__repr__
    __str__ = nn.Module.__repr__

    __deepcopy__: Any = None  # copied by __reduce__, unlike other graph modules

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != _CODE}
        return object.__new__, (type(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.recompile()


def subgraph_view(
    owner: nn.Module, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]
) -> SubgraphView:
    """Make the view of a chain, whose nodes are in graph order."""
    graph = fx.Graph()
    copies = {value: graph.placeholder(value.name) for value in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[nodes[-1]])
    return SubgraphView(owner, graph)


def views_of(owner: nn.Module) -> list[SubgraphView]:
    """Return the views of a module's operations, which its children wrap."""
    inner = (innermost(child) for child in owner._modules.values() if child is not None)
    return [each for each in inner if isinstance(each, SubgraphView) and each.owner is owner]
