"""From a user's functions to an optimizer and a scheduler, on all ranks or on none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from slapo.agreement import all_ranks_or_none, gathered, has_peers, on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.runtime import Lowering

#: From a list of parameters, or of ``(name, parameter)``, to an optimizer.
OptimizerFn = Callable[[list[Any]], Any]


def make_optimizer(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
    """The user's optimizer over this rank's parameters. A collective of the world."""
    return all_ranks_or_none("optimizer", lambda: _make_optimizer(factory, named, device))


def place_steps(
    optimizer: torch.optim.Optimizer,
    lowering: Lowering,
    group: Callable[[], dist.ProcessGroup | None],
    flat: str | None = None,
) -> None:
    """Let steps that need whole tensors have them, or refuse. A collective of the world.

    `group` makes the group of the ranks among which the parts of each tensor lie; `flat` says why
    the runtime cannot have whole tensors, if so.
    """
    if flat is None and not has_peers():
        return  # nothing is split, and any optimizer will do
    from slapo.sharding.whole_steps import (  # for builds with an optimizer only
        ELEMENT,
        MODEL,
        error_of_coupled_steps,
        reach_of_steps,
        slices_of,
        step_on_wholes,
    )

    reach = reach_of_steps(optimizer)
    here = max(reach.values(), default=ELEMENT), bool(slices_of(lowering.module))
    everywhere = gathered(here, None)
    furthest, is_sliced = max(r for r, _ in everywhere), any(s for _, s in everywhere)
    if furthest == ELEMENT:
        return
    if flat is not None:
        raise on_every_rank(
            SlapoError(
                f"{type(optimizer).__name__} computes a step from whole tensors, and {flat}; pass "
                "an optimizer that treats each element by itself, as AdamW does, or build for "
                'target="torch"'
            )
        )
    if furthest == MODEL and (is_sliced or lowering.n_stages > 1):
        raise error_of_coupled_steps(optimizer)
    step_on_wholes(optimizer, lowering.module, reach, group())


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Optimizers that hold the state: one that has others as attributes hands its steps on."""
    from slapo.sharding.whole_steps import steppers_of  # for who saves, or has slices

    found = steppers_of(optimizer)
    if optimizer not in found and any(optimizer.state.values()):
        inner = [type(each).__name__ for each in found]
        raise SlapoError(
            f"{type(optimizer).__name__} keeps state of its own beside that of its {inner}, which "
            "cannot be saved; let one of them keep it"
        )
    return found


def make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    """The user's scheduler; None without one. A collective of the world."""
    return all_ranks_or_none("lr_scheduler", lambda: _make_scheduler(factory, optimizer))


def _make_optimizer(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
    # Where nothing is trained, an empty parameter: torch's optimizers refuse an empty list.
    given = list(named) or [("nothing", Parameter(torch.zeros(0, device=device)))]
    optimizer = factory(given if _wants_names(factory) else [p for _, p in given])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer(parameters) returned a {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer"
        )
    needed = _needed_arguments(optimizer.step)
    if needed:
        raise TypeError(
            f"{type(optimizer).__name__}.step() needs {needed}: it computes the loss several times "
            "in a step, and an engine does so once; pass another optimizer"
        )
    return optimizer


def _wants_names(factory: OptimizerFn) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without a signature that Python can read
        return False
    return next(iter(parameters), None) == "named_parameters"


def _make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    if factory is None:
        return None
    scheduler = factory(optimizer)
    check_scheduler(scheduler)
    return scheduler


def check_scheduler(scheduler: Any) -> None:
    """Refuse what cannot be stepped after each batch."""
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"lr_scheduler(optimizer) returned a {type(scheduler).__name__}; it must return a "
            "scheduler with step()"
        )
    needed = _needed_arguments(scheduler.step)
    if needed:
        raise TypeError(
            f"{type(scheduler).__name__}.step() needs {needed}, and the engine steps schedulers "
            "without arguments; leave out lr_scheduler, make this one around engine.optimizer, and "
            "step it yourself"
        )


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
