"""Run of a scheduled model of few layers on fake tensors, as one tensor-parallel rank.

The run is cut into segments where layers begin and end.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from slapo.cost.meter import Collective, Kernel, Meter
from slapo.cost.models import ReducedModel, on_fakes
from slapo.errors import SlapoError
from slapo.graph.trace.hf import causal_masks_left_out
from slapo.logger import only_from
from slapo.random import states_kept
from slapo.schedule import Schedule
from slapo.verify.placement.offline import fake_world

#: ("before", stack), ("layer", stack, position in the list) or ("after",)
Place = tuple[Any, ...]


@dataclass(eq=False)
class Segment:
    """The part of a run between two marks, forward or backward."""

    #: Live bytes at its end and at its peak, minus those at its start.
    delta: int
    peak: int
    kernels: Sequence[Kernel]
    collectives: Sequence[Collective]
    #: Names of the parameters that it reads.
    parameters: frozenset[str] = frozenset()
    #: Bytes of the next segment's input tensors, and of those that require gradients.
    crossing: int = 0
    gradient: int = 0

    @cached_property
    def flops(self) -> float:
        """FLOPs of its matrix products."""
        return sum(kernel.flops for kernel in self.kernels)


@dataclass
class Pass:
    """Forward and backward of a micro-batch: segments by place, in execution order."""

    forward: dict[Place, Segment] = field(default_factory=dict)
    backward: dict[Place, Segment] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank."""

    elements: int
    itemsize: int
    is_trained: bool

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.elements * self.itemsize


@dataclass
class Run:
    """Costs of a micro-batch on one rank."""

    #: The first micro-batch of a step, whose backward allocates the gradients, and a later one.
    first: Pass
    again: Pass
    held: dict[str, HeldParameter]
    #: Bytes of the model's buffers, and of a micro-batch's inputs.
    buffers: int
    inputs: int
    #: True if the layers run one after another; else the run is a single segment.
    regular: bool


def run(
    small: ReducedModel,
    schedule: Callable[[nn.Module], Schedule],
    inputs: Mapping[str, Any],
    tp: int,
    loss_of: Callable[..., Tensor],
    rounding: int,
    traced: bool,
    accelerator: bool,
) -> Run:
    """Run a micro-batch forward and backward on fake tensors, as the first of `tp` ranks.

    With uneven shards the first rank has the most. With `traced`, masks that are inputs reach
    attention, as in pipeline stages; otherwise Transformers models drop them if nothing is masked.
    Fused attention supports dropout on an accelerator only.
    """
    tracing = causal_masks_left_out(inputs) if traced else _not_tracing()
    fused = _fused_dropout() if accelerator else nullcontext()
    world = nullcontext() if tp == 1 else fake_world(tp, 0)
    quiet = only_from(logging.WARNING)
    with world, states_kept(0), tracing, fused, quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A copy, because a schedule changes a model, and the next run schedules it in another way.
        model = on_fakes(small.model, mode)
        with mode:
            model = schedule(model).mod
            given = {
                name: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            layers = [list(model.get_submodule(s.path).children()) for s in small.stacks]
            try:
                try:
                    return _run(model, layers, given, loss_of, rounding)
                # Without marks the run is one segment: no stages, but memory and time of one rank
                # are still right.
                except _IrregularError:
                    return _run(model, [], given, loss_of, rounding)
            except SlapoError:
                raise
            # Models and torch raise these types; refusals of Slapo and of users have others.
            except (RuntimeError, AttributeError, IndexError, AssertionError, ValueError) as error:
                raise SlapoError(
                    f"{type(model).__name__} could not run on fake tensors: "
                    f"{type(error).__name__}: {str(error)[:400]}; if training fails too, fix it "
                    "there, otherwise the model reads tensor values and cannot be dry-run"
                ) from error


def _run(
    model: nn.Module,
    layers: list[list[nn.Module]],
    inputs: Mapping[str, Any],
    loss_of: Callable[..., Tensor],
    rounding: int,
) -> Run:
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = None
    meter = Meter(model, rounding=rounding, fakes=True)
    meter.hold(t for t in inputs.values() if isinstance(t, Tensor))
    meter.watch(named.items())
    recorder = _Recorder(meter, layers, named.values())
    try:
        with meter:
            recorder.run(model, inputs, loss_of)
    finally:
        recorder.remove()
    held = {
        n: HeldParameter(p.numel(), p.element_size(), p.grad is not None) for n, p in named.items()
    }
    return Run(
        recorder.first,
        recorder.again,
        held,
        sum(b.numel() * b.element_size() for b in model.buffers()),
        sum(t.numel() * t.element_size() for t in inputs.values() if isinstance(t, Tensor)),
        bool(layers),
    )


def loss_of_output(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the loss of a Transformers model, or the sum of another model's output."""
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor):
        return output.sum()
    raise TypeError(
        f"{type(model).__name__} returned a {type(output).__name__} without a loss; pass "
        "loss_fn=f, where f(output, labels) returns the loss of a micro-batch"
    )


@contextmanager
def _not_tracing() -> Iterator[None]:
    """Hide fake tensors from Transformers, which would otherwise make explicit masks."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    module: Any = utils
    asked = module.is_fake_tensor
    module.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        module.is_fake_tensor = asked


@contextmanager
def _fused_dropout() -> Iterator[None]:
    """Make attention keep as little with dropout as without it, as on an accelerator."""
    functional: Any = nn.functional
    attention = functional.scaled_dot_product_attention

    def without(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        kwargs.pop("dropout_p", None)
        rest = args[2:3] or (kwargs.pop("is_causal", False),)
        made: Tensor = attention(query, key, value, mask, 0.0, *rest, **kwargs)
        return made

    functional.scaled_dot_product_attention = without
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention


# --- segments -----------------------------------------------------------------------------------
class _IrregularError(Exception):
    """Raised if the layers do not run one after another, each once."""


class _Recorder:
    """Recorder of segments, which start and end with layers."""

    def __init__(
        self,
        meter: Meter,
        layers: Sequence[Sequence[nn.Module]],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        self.meter = meter
        self.first = Pass()
        # One micro-batch is run for both. A later one differs in its backward only: it adds its
        # gradients to existing ones, and then frees its own.
        self.again = Pass(self.first.forward)
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._added)
            for parameter in parameters
            if parameter.requires_grad
        ]
        #: gradient additions of a later micro-batch in the open segment
        self._additions: list[Kernel] = []
        #: the layer that returned last, until its caller has freed the preceding tensors
        self._left: Place = ()
        #: place where the backward ends
        self._end: Place = ()
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
            # Around the schedule's own hooks, whose collectives belong to this layer.
            layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(layer.register_forward_hook(after))

    # --- marks -----------------------------------------------------------------------------------
    def _start(self) -> None:
        meter = self.meter
        meter.before_next = None
        self._from = meter.alive, meter.gradients, len(meter.kernels), len(meter.collectives)
        meter.peak, meter.later_peak = meter.alive, meter.alive - meter.gradients
        meter.touched, self._additions = set(), []

    def _close(self) -> tuple[Segment, Segment]:
        """Close the open segment; return it for the first micro-batch and for a later one."""
        alive, gradients, kernels, collectives = self._from
        meter = self.meter
        first = Segment(
            meter.alive - alive,
            meter.peak - alive,
            meter.kernels[kernels:],
            meter.collectives[collectives:],
            frozenset(meter.touched),
        )
        again = replace(
            first,
            delta=first.delta - (meter.gradients - gradients),
            peak=meter.later_peak - (alive - gradients),
            kernels=[*first.kernels, *self._additions],
        )
        self._start()
        return first, again

    def _added(self, parameter: nn.Parameter) -> None:
        """Hook: record the new gradient of a parameter."""
        grad = parameter.grad
        if grad is not None and self.meter.made(grad):
            # Both gradients are read, and the sum is written.
            moved = 3 * grad.numel() * grad.element_size()
            self._additions.append(Kernel("add_", 0, moved, grad.numel(), grad.dtype))

    def _close_forward(self, place: Place) -> None:
        self.first.forward[place] = self._close()[0]

    def _close_backward(self, place: Place) -> None:
        self.first.backward[place], self.again.backward[place] = self._close()

    def _enter(self, stack: int, number: int, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed in a backward pass
            return
        self._settle()
        if self._next >= len(self._order) or self._order[self._next] != (stack, number):
            raise _IrregularError
        hidden = _hidden((args, kwargs))
        crossing = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if number == 0:
            self._close_forward(("before", stack))
            self._follow(hidden, ("layer", stack, 0))
        previous = list(self.first.forward.values())[-1]
        previous.crossing = sum(_size(t) for t in crossing)
        previous.gradient = sum(_size(t) for t in crossing if t.requires_grad)

    def _leave(self, stack: int, number: int, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._left = ("layer", stack, number)
        # The caller frees tensors of the preceding layer at its next assignment. They belong to
        # this segment.
        self.meter.before_next = self._settle
        self._next += 1
        hidden = _hidden(output)
        if hidden is None:
            raise _IrregularError
        position = self._order.index((stack, number))
        follower = self._order[position + 1] if position + 1 < len(self._order) else None
        place: Place = ("after",)
        if follower is not None:
            is_new = follower[0] != stack
            place = ("before", follower[0]) if is_new else ("layer", *follower)
        self._follow(hidden, place)

    def _settle(self) -> None:
        """Close the segment of the layer that returned last."""
        if self._left:
            self._close_forward(self._left)
            self._left = ()

    def _follow(self, hidden: Tensor | None, place: Place) -> None:
        """Close a place's backward once the gradient of its input is computed."""
        if hidden is not None and hidden.requires_grad:
            # Autograd calls the hook when the gradient of the hidden states is complete, that is,
            # when the backward of everything behind them has run.
            hidden.register_hook(lambda _: self._close_backward(place))
        else:  # nothing before needs a gradient, so the backward ends there
            self._end = place

    # --- runs ------------------------------------------------------------------------------------
    def run(self, model: nn.Module, inputs: Mapping[str, Any], loss_of: Callable[..., Any]) -> None:
        self._end = ("before", 0) if self._order else ("after",)
        self._start()
        loss = loss_of(model, inputs)
        self._settle()
        if self._next != len(self._order):
            raise _IrregularError
        self._close_forward(("after",))
        loss.backward()
        del loss
        self._close_backward(self._end)
        # Frozen segments before the first trained one have no backward.
        for each in (self.first, self.again):
            frozen = itertools.takewhile(lambda place: place != self._end, each.forward)
            each.backward.update({place: Segment(0, 0, (), ()) for place in frozen})
            if set(each.backward) != set(each.forward):
                raise _IrregularError

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _hidden(values: Any) -> Tensor | None:
    """Return the first floating-point tensor, which layers pass on."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point())
    return next(tensors, None)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
