"""Collectives of a model with sharded axes: sums of outputs and of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from slapo.derive.axes import Axis, Chosen, axes_in, is_sharded
from slapo.derive.trace import Node, Trace
from slapo.sharding.partial import is_deferrable
from slapo.verify.placement.view_rules import COPIES, REORDERS, VIEWS

_ROW_LAYERS = ("Conv1D", "Conv1d", "Conv2d", "Conv3d")
#: Operations that turn a partial sum into a partial sum.
_LINEAR = {*VIEWS, *REORDERS, *COPIES, "mul", "div", "neg", "unsqueeze", "squeeze", "expand", "bmm"}
_LINEAR |= {"index_add", "index", "index_select", "index_copy", "index_put", "_index_put_impl"}
_LINEAR |= {"sum", "mean", "split", "split_with_sizes", "slice", "select", "cat", "stack", "add"}
_LINEAR |= {"sub", "copy", "unbind", "where", "scatter_add", "masked_fill", "constant_pad_nd"}
_OF_ONE = {"mul", "div", "bmm"}
_TOGETHER = {"add", "sub", "cat", "stack"}

#: Kinds of gradients: equal on every rank, a partial sum, or both by its uses.
WHOLE, PARTIAL, MIXED = "whole", "partial", "mixed"
#: Path of a module, and the name of the argument that takes a value; ``""`` for its output.
Point = tuple[str, str]


def is_row_layer(module: nn.Module) -> bool:
    """Return whether a layer may add a bias to a partial sum: a sync then adds the bias once."""
    return isinstance(module, nn.Linear) or type(module).__name__ in _ROW_LAYERS


class ImpossibleError(Exception):
    """Raised if a choice of axes has no module where it can communicate."""

    def __init__(self, why: str, axes: Iterable[Axis]) -> None:
        super().__init__(why)
        self.axes = dict.fromkeys(axes)


@dataclass
class Collectives:
    """Collectives of a model, by module path."""

    #: modules whose output is a partial sum and must be summed
    sums: dict[str, None] = field(default_factory=dict)
    #: modules and arguments whose gradient is summed; ``""`` is the gradient of the output
    gradients: dict[Point, None] = field(default_factory=dict)
    #: replicated parameters with a partial gradient, by the indices of their values
    partial: dict[int, None] = field(default_factory=dict)


def place(found: Trace, chosen: Chosen) -> Collectives:
    """Return the collectives that a model with sharded axes needs.

    A sum over a sharded axis stays partial until the innermost module around it ends. In the
    backward pass the gradient of a replicated value is full, partial, or mixed. A mixed one is
    summed at the outermost modules that return partial gradients. Raises ImpossibleError if a
    partial sum is combined with other values, or returned with other outputs.
    """
    forward = _Forward(found, chosen)
    result = Collectives(forward.sums)
    _Backward(found, chosen, forward, result).place()
    return result


class _Forward:
    """Partial sums, from products over sharded axes to the exits of modules."""

    def __init__(self, found: Trace, chosen: Chosen) -> None:
        self.found = found
        #: value -> True if it is sharded
        # By identity, as tensors pass on their dimensions: a model has far fewer of these than
        # values.
        terms = {id(term): term for value in found.values for term in value.dims}
        sharded = {key for key, term in terms.items() if is_sharded(term, chosen)}
        self.is_sharded = [not sharded.isdisjoint(map(id, v.dims)) for v in found.values]
        #: value that is a partial sum -> the axes that were summed over
        self.partial: dict[int, Chosen] = {}
        self.sums: dict[str, None] = {}
        #: calls of row layers
        self.row_calls: set[int] = set()
        for node in found.nodes:
            gone = [t for t in node.contracted if is_sharded(t, chosen)]
            axes = {a: None for t in gone for a in axes_in(t) if a in chosen}
            for number in node.inputs:
                axes |= self.partial.get(number, {})
            if axes:
                self._step(node, axes, bool(gone))

    def _step(self, node: Node, axes: Chosen, begins: bool) -> None:
        call, path = node.call, node.call.path
        if node.kind == "exit":
            if node.name != "only":
                raise ImpossibleError(f"{path!r} returns a partial sum among others", axes)
            self.sums[path] = None
            return
        self.partial |= dict.fromkeys(node.outputs, axes)
        if node.kind == "entry":
            return
        if begins:
            if call.is_leaf and is_row_layer(call.module):
                if not is_deferrable(call.module):
                    raise ImpossibleError(f"a forward of its own adds the bias in {path!r}", axes)
                self.row_calls.add(id(call))
        elif id(call) not in self.row_calls:
            inputs = [number for number in node.inputs if number in self.partial]
            values = self.found.values
            others = [n for n in node.inputs if n not in self.partial and values[n].needs_grad]
            mixes = node.name in _TOGETHER and others
            if node.name not in _LINEAR or (node.name in _OF_ONE and len(inputs) > 1) or mixes:
                raise ImpossibleError(f"{node.name} takes a partial sum in {path!r}", axes)

    def is_whole(self, number: int) -> bool:
        return not self.is_sharded[number] and number not in self.partial


class _Backward:
    """Gradients of replicated values, from the outputs to the parameters."""

    def __init__(
        self, found: Trace, chosen: Chosen, forward: _Forward, result: Collectives
    ) -> None:
        self.found, self.chosen, self.forward, self.result = found, chosen, forward, result
        self.is_whole = forward.is_whole
        self.parameters = set(found.parameters.values())
        self.consumers: dict[int, list[int]] = {}
        self.producers: dict[int, int] = {}
        self.at_point: dict[Point, list[Node]] = {}
        for index, node in enumerate(found.nodes):
            self.at_point.setdefault(_point(node), []).append(node)
            for number in node.inputs:
                self.consumers.setdefault(number, []).append(index)
            for number in node.outputs:
                self.producers[number] = index
        #: points at which nothing is summed, since a place before them is better
        self.banned: set[Point] = set()
        #: modules whose output gradients are not summed, and values that were tried
        self.settled: set[str] = set()
        self.tried: set[tuple[int, tuple[Point, ...]]] = set()

    def place(self) -> None:
        """Add sums of gradients until each replicated parameter's kind is known."""
        # Values have indices in the order of creation, so a walk from the last to the first knows
        # all uses of a value before the value. A new point changes gradients from its inputs on
        # upward only, so the walk goes on there. At the end, points that would sum a whole gradient
        # in some call are taken back.
        kinds: dict[int, str] = {}
        start = len(self.found.values) - 1
        for _ in range(4 * len(self.found.nodes) + 100):  # each pass adds a point or bans one
            again = self._find_kinds(start, kinds)
            if again is None:
                wrong = self._superfluous(kinds)
                if not wrong:
                    break
                for point in wrong:
                    del self.result.gradients[point]
                self.banned |= {point for point in wrong if point[1]}
                self.settled |= {path for path, name in wrong if not name}
                again = len(self.found.values) - 1
            start = again
        else:
            raise ImpossibleError("no places to sum gradients at were found", self.chosen)
        for number in dict.fromkeys(self.found.parameters.values()):
            if self.is_whole(number) and kinds.get(number) in (PARTIAL, MIXED):
                self.result.partial[number] = None

    def _find_kinds(self, start: int, kinds: dict[int, str]) -> int | None:
        """Compute kinds of gradients from `start` down; return where to continue, or None."""
        for number in range(start, -1, -1):
            if not (self.found.values[number].needs_grad and self.is_whole(number)):
                continue
            edges = [(i, self._sent_back(i, number, kinds)) for i in self.consumers.get(number, ())]
            is_output = number in self.found.outputs
            kinds[number] = kind = _joined([k for _, k in edges] + ([WHOLE] if is_output else []))
            if number in self.parameters or kind in ("", WHOLE):
                continue
            node = self.found.nodes[self.producers[number]] if number in self.producers else None
            before = dict(self.result.gradients)
            # Neither part of a mixed gradient can be summed afterwards: the whole part would count
            # n times.
            if kind == MIXED or number in self.found.inputs:
                self._separate(number, kinds)
            elif node is not None and self._ends_whole_layer(node):
                self._sum_at_consumers(node, [index for index, k in edges if k == PARTIAL])
            else:
                continue
            return self._last_of(before.keys() ^ self.result.gradients.keys(), number)
        return None

    def _last_of(self, points: Iterable[Point], number: int) -> int:
        """Return the last value whose gradient changes with some points."""
        nodes = (node for point in points for node in self.at_point.get(point, ()))
        return max([number, *(value for node in nodes for value in node.inputs)])

    def _sent_back(self, index: int, number: int, kinds: dict[int, str]) -> str:
        """Return the kind of gradient that a node returns to one of its inputs."""
        node = self.found.nodes[index]
        if node.kind != "operation":
            (output,) = node.outputs
            if _point(node) in self.result.gradients:
                return WHOLE
            if node.kind == "exit" and not self.is_whole(output):
                return WHOLE  # scattered after a module that gathers
            if not self.is_whole(output):
                return PARTIAL
            return kinds.get(output, "")
        # A row layer adds its bias after the sum: its gradient is that of the output, on every
        # rank.
        if id(node.call) in self.forward.row_calls:
            return WHOLE if number in self.parameters else ""
        if not all(map(self.is_whole, node.outputs)):
            return PARTIAL
        return _joined([kinds.get(output, "") for output in node.outputs])

    # --- points ---------------------------------------------------------------------------------
    def _separate(self, number: int, kinds: dict[int, str]) -> None:
        """Sum the partial gradients of a replicated value that also gets full ones."""
        gradients = self.result.gradients
        before = len(gradients)
        try:
            self._sum_behind(number, kinds)
        # An operation combines the value with slices where no module is entered. Without the points
        # behind the value its gradient is all partial, and is summed before it.
        except ImpossibleError:
            back = self._points_behind(number)
            if not back or (number, back) in self.tried:
                raise
            self.tried.add((number, back))
            for point in back:
                gradients.pop(point, None)
            self.banned |= set(back)
            self.settled |= {path for path, _ in back} | self._layers_behind(number)
            return
        if len(gradients) == before:
            index = self.producers.get(number)
            path = "" if index is None else self.found.nodes[index].call.path
            raise ImpossibleError(f"there is no module to sum gradients at behind {path!r}", {})

    def _sum_behind(self, number: int, kinds: dict[int, str]) -> None:
        """Sum the gradient on every edge that returns a partial one."""
        for index in self.consumers.get(number, ()):
            node = self.found.nodes[index]
            kind = self._sent_back(index, number, kinds)
            if kind not in (PARTIAL, MIXED):
                continue
            point, values = _point(node), self.found.values
            is_entry = node.kind == "entry" and node.name and point not in self.banned
            if kind == PARTIAL and is_entry:
                self.result.gradients[point] = None
            elif node.kind != "operation" or all(map(self.is_whole, node.outputs)):
                for output in node.outputs:
                    self._sum_behind(output, kinds)
            else:
                terms = [term for output in node.outputs for term in values[output].dims]
                axes = [axis for term in terms for axis in axes_in(term) if axis in self.chosen]
                why = f"{node.name} in {node.call.path!r} takes a whole value that is used whole"
                raise ImpossibleError(why, axes)

    def _ends_whole_layer(self, node: Node) -> bool:
        """Return whether a node ends a layer with parameters whose gradients would be partial."""
        # Else each parameter of the layer would need a sum of its own at each step.
        call = node.call
        own = [f"{call.path}.{name}" for name, _ in call.module.named_parameters()]
        return (
            node.kind == "exit"
            and call.is_leaf
            and _point(node) not in self.result.gradients
            and call.path not in self.settled
            and any(self.found.values[self.found.parameters[name]].needs_grad for name in own)
        )

    def _sum_at_consumers(self, exit_node: Node, consumers: list[int]) -> None:
        """Sum at the only module that takes a layer's output, or else at that output."""
        nodes = [self.found.nodes[index] for index in consumers]
        points = {_point(node): None for node in nodes}
        are_entries = all(node.kind == "entry" and node.name for node in nodes)
        if len(points) == 1 and are_entries and self.banned.isdisjoint(points):
            self.result.gradients |= points
        else:
            self.result.gradients[_point(exit_node)] = None

    def _superfluous(self, kinds: dict[int, str]) -> list[Point]:
        """Return points with a sum of a gradient that is not partial in some call of the module."""
        wrong: dict[Point, None] = {}
        for node in self.found.nodes:
            if node.kind == "operation" or _point(node) not in self.result.gradients:
                continue
            (number,), (output,) = node.inputs, node.outputs
            if not self.found.values[number].needs_grad:
                continue
            is_whole = self.is_whole(output)
            kind = kinds.get(output) or PARTIAL
            if kind != PARTIAL or not is_whole:
                wrong[_point(node)] = None
        return list(wrong)

    # --- consumers of a value
    # ----------------------------------------------------------------------
    def _behind(self, number: int) -> list[int]:
        """Return the nodes that replicated values pass through from here, up to points."""
        found: dict[int, None] = {}
        todo, seen = [number], set[int]()
        while todo and len(seen) < 400:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for index in self.consumers.get(value, ()):
                node = self.found.nodes[index]
                found[index] = None
                if _point(node) not in self.result.gradients:
                    todo += [output for output in node.outputs if self.is_whole(output)]
        return list(found)

    def _points_behind(self, number: int) -> tuple[Point, ...]:
        """Return the points that a sum before the value could replace."""
        points = {_point(self.found.nodes[index]): None for index in self._behind(number)}
        return tuple(sorted(point for point in points if point in self.result.gradients))

    def _layers_behind(self, number: int) -> set[str]:
        nodes = [self.found.nodes[index] for index in self._behind(number)]
        return {node.call.path for node in nodes if node.call.is_leaf}


def _point(node: Node) -> Point:
    """Return the point at which a node would sum; operations have none."""
    if node.kind == "operation":
        return ("", "")
    return (node.call.path, node.name if node.kind == "entry" else "")


def _joined(kinds: Iterable[str]) -> str:
    known = {kind for kind in kinds if kind}
    if len(known) > 1:
        return MIXED
    return known.pop() if known else ""
