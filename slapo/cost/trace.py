"""One run on fakes, cut where layers begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo.cost.meter import Collective, Kernel, Meter


@dataclass
class Segment:
    """What runs between two marks, forward or backward.

    Parameters
    ----------
    delta
        Bytes alive at its end, less those at its start.
    peak
        Bytes alive at the worst moment, less those at its start.
    kernels, collectives
        Of it.
    parameters
        Names of those that it reads.
    crossing
        Bytes of the tensors that the next segment is called with.
    gradient
        Of these, bytes whose gradient comes back.
    """

    delta: int
    peak: int
    kernels: Sequence[Kernel]
    collectives: Sequence[Collective]
    parameters: frozenset[str] = frozenset()
    crossing: int = 0
    gradient: int = 0


#: ("before", stack), ("layer", stack, place in the list) or ("after",)
Place = tuple[Any, ...]


@dataclass
class Pass:
    """A micro-batch, forward and backward: segments by place, in the order they ran."""

    forward: dict[Place, Segment] = field(default_factory=dict)
    backward: dict[Place, Segment] = field(default_factory=dict)


class IrregularError(Exception):
    """The layers do not run one after another, each once."""


class Recorder:
    """Marks where layers begin and end, in the meter's figures.

    Parameters
    ----------
    meter
        Active while the model runs.
    layers
        For each stack its layers, in order.
    """

    def __init__(self, meter: Meter, layers: Sequence[Sequence[nn.Module]]) -> None:
        self.meter = meter
        self.passes: list[Pass] = []
        self._handles: list[Any] = []
        self._open: Pass = Pass()
        #: the layer whose forward ended last, until what its caller frees is gone
        self._left: Place = ()
        #: where the backward ends
        self._first: Place = ()
        self._order = [(s, n) for s, each in enumerate(layers) for n in range(len(each))]
        self._next = 0
        for stack, each in enumerate(layers):
            for number, layer in enumerate(each):
                self._hook(layer, stack, number)

    def _hook(self, layer: nn.Module, stack: int, number: int) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(stack, number, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(stack, number, output)

        self._handles.append(
            layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(layer.register_forward_hook(after))

    # --- marks -----------------------------------------------------------------------------------
    def _start(self) -> None:
        meter = self.meter
        meter.before_next = None
        self._from = meter.alive, len(meter.kernels), len(meter.collectives)
        meter.peak = meter.alive
        meter.touched = set()

    def _close(self) -> Segment:
        alive, kernels, collectives = self._from
        meter = self.meter
        segment = Segment(
            meter.alive - alive,
            meter.peak - alive,
            meter.kernels[kernels:],
            meter.collectives[collectives:],
            frozenset(meter.touched),
        )
        self._start()
        return segment

    def _enter(self, stack: int, number: int, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed again in a backward
            return
        self._settle()
        if self._next >= len(self._order) or self._order[self._next] != (stack, number):
            raise IrregularError
        hidden = _hidden((args, kwargs))
        crossing = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if number == 0:
            self._open.forward["before", stack] = self._close()
            self._follow(hidden, ("layer", stack, 0))
        previous = list(self._open.forward.values())[-1]
        previous.crossing = sum(_size(t) for t in crossing)
        previous.gradient = sum(_size(t) for t in crossing if t.requires_grad)

    def _leave(self, stack: int, number: int, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._left = ("layer", stack, number)
        # What its caller held of the layer before goes with the next assignment, and belongs here.
        self.meter.before_next = self._settle
        self._next += 1
        hidden = _hidden(output)
        if hidden is None:
            raise IrregularError
        position = self._order.index((stack, number))
        follower = self._order[position + 1] if position + 1 < len(self._order) else None
        place: Place = ("after",)
        if follower is not None:
            is_new = follower[0] != stack
            place = ("before", follower[0]) if is_new else ("layer", *follower)
        self._follow(hidden, place)

    def _settle(self) -> None:
        """The layer that was left last is over."""
        if self._left:
            self._open.forward[self._left] = self._close()
            self._left = ()

    def _follow(self, hidden: Tensor | None, place: Place) -> None:
        """Note when the backward of a place is over, which is called with a tensor."""
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self._ended(place))
        else:  # nothing before needs a gradient: the backward ends there
            self._first = place

    def _ended(self, place: Place) -> None:
        """The backward of a place is over: its input's gradient is there."""
        self._open.backward[place] = self._close()

    # --- runs ------------------------------------------------------------------------------------
    def run(self, model: nn.Module, inputs: Mapping[str, Any], loss_of: Callable[..., Any]) -> None:
        """One micro-batch; gradients stay, and the next adds to them."""
        self._open, self._next, self._left = Pass(), 0, ()
        self._first = ("before", 0) if self._order else ("after",)
        self._start()
        loss = loss_of(model, inputs)
        self._settle()
        if self._next != len(self._order):
            raise IrregularError
        self._open.forward["after",] = self._close()
        loss.backward()
        del loss
        self._open.backward[self._first] = self._close()
        frozen = itertools.takewhile(lambda place: place != self._first, self._open.forward)
        self._open.backward.update({place: Segment(0, 0, (), ()) for place in frozen})
        if set(self._open.backward) != set(self._open.forward):
            raise IrregularError
        self.passes.append(self._open)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _hidden(values: Any) -> Tensor | None:
    """The first tensor of floating point: what layers pass on."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point())
    return next(tensors, None)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
