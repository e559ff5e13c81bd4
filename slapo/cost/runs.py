"""A scheduled model of few layers, run on fakes as one rank of a tensor-parallel group."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.cost.meter import Meter
from slapo.cost.models import ReducedModel, on_fakes
from slapo.cost.trace import IrregularError, Pass, Recorder
from slapo.errors import SlapoError
from slapo.logger import only_warnings
from slapo.random import states_kept
from slapo.schedule import Schedule
from slapo.verify.placement.offline import fake_world

#: From a model to its schedule.
ScheduleFn = Callable[[nn.Module], Schedule]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank."""

    elements: int
    itemsize: int
    is_trained: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * self.itemsize


@dataclass
class Run:
    """What a micro-batch costs on one rank.

    Parameters
    ----------
    first, again
        The first micro-batch of a step, whose backward makes the gradients, and a later one, whose
        backward adds to them.
    held
        Parameters by name.
    buffers
        Bytes of the model's buffers.
    inputs
        Bytes of a micro-batch.
    regular
        Whether its layers run one after another; else it has no marks.
    """

    first: Pass
    again: Pass
    held: dict[str, HeldParameter]
    buffers: int
    inputs: int
    regular: bool


def run(
    small: ReducedModel,
    schedule: ScheduleFn,
    inputs: Mapping[str, Any],
    tp: int = 1,
    loss_of: Callable[..., Tensor] | None = None,
    rounding: int = 1,
    traced: bool = False,
    accelerator: bool = False,
) -> Run:
    """Run two micro-batches forward and backward; nothing is computed.

    Parameters
    ----------
    small
        The model.
    schedule
        Applied to a copy of it.
    inputs
        Of a micro-batch.
    tp
        Ranks of the group; this is the first, which has the most where shares are uneven.
    loss_of
        ``f(model, inputs)``; by default ``model(**inputs).loss``.
    rounding
        As for :class:`Meter`.
    traced
        Whether the model will be traced, as for pipeline stages: models of Transformers then give
        attention an explicit mask.
    accelerator
        Whether kernels are those of one: its fused attention takes dropout, a processor's does not.
    """
    tracing = nullcontext() if traced else _not_tracing()
    fused = _fused_dropout() if accelerator else nullcontext()
    alone = _alone_or_in(tp)
    with alone, states_kept(0), tracing, fused, only_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = on_fakes(small.model, mode)
        with mode:
            model = schedule(model).mod
            given = {
                name: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            layers = [list(model.get_submodule(s.path).children()) for s in small.stacks]
            loss_of = loss_of or loss_of_output
            try:
                try:
                    return _run(model, layers, given, loss_of, rounding)
                except IrregularError:
                    return _run(model, [], given, loss_of, rounding)
            except SlapoError:
                raise
            except _UNRUN as error:
                raise _could_not_run(model, error) from error


#: What models and torch raise themselves; refusals of ours and of users are of other kinds.
_UNRUN = (RuntimeError, AttributeError, IndexError, AssertionError, ValueError)


def _could_not_run(model: nn.Module, error: Exception) -> SlapoError:
    return SlapoError(
        f"{type(model).__name__} could not be run without numbers: {type(error).__name__}: "
        f"{str(error)[:400]}; if training fails so too, mend it there, else the model asks for "
        "numbers, and cannot be dry-run"
    )


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
    recorder = Recorder(meter, layers)
    try:
        with meter:
            for _ in range(2):
                recorder.run(model, inputs, loss_of)
    finally:
        recorder.remove()
    held = {
        n: HeldParameter(p.numel(), p.element_size(), p.grad is not None) for n, p in named.items()
    }
    first, again = recorder.passes
    return Run(
        first,
        again,
        held,
        sum(b.numel() * b.element_size() for b in model.buffers()),
        sum(t.numel() * t.element_size() for t in inputs.values() if isinstance(t, Tensor)),
        bool(layers),
    )


def loss_of_output(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """What a model of Transformers returns as its loss; the sum of another's output.

    Raises
    ------
    TypeError
        If there is nothing to differentiate.
    """
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
def _alone_or_in(tp: int) -> Iterator[None]:
    with nullcontext() if tp == 1 else fake_world(tp, 0):
        yield


@contextmanager
def _not_tracing() -> Iterator[None]:
    """Models of Transformers take the ways that they take on numbers.

    They ask whether a tensor is a fake, and then make masks that they would do without.
    """
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
    """Attention keeps as little with dropout as without, as on an accelerator."""
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
