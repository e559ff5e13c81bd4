"""Creation of a user's optimizer and scheduler, on all ranks or on none."""

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

#: Function from a list of parameters, or of ``(name, parameter)``, to an optimizer.
OptimizerFn = Callable[[list[Any]], Any]


def make_optimizer(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
    """Create the user's optimizer over this rank's parameters. A collective of the world."""
    return all_ranks_or_none("optimizer", lambda: _make_optimizer(factory, named, device))


def place_steps(
    optimizer: torch.optim.Optimizer,
    lowering: Lowering,
    group: Callable[[], dist.ProcessGroup | None],
    flat: str | None = None,
) -> None:
    """Gather full tensors for optimizers that need them, or refuse. A collective of the world.

    `group` creates the group of ranks that hold the shards of each tensor. `flat` is the reason why
    the runtime has no full tensors, if so.
    """
    if flat is None and not has_peers():
        return  # nothing is sharded, so any optimizer works
    from slapo.sharding.whole_steps import (  # only for builds with an optimizer
        ELEMENT,
        MODEL,
        error_of_coupled_steps,
        reach_of_steps,
        refuse_shared_steps,
        slices_of,
        step_on_wholes,
    )

    reach = reach_of_steps(optimizer)
    is_sliced = bool(slices_of(lowering.module))
    part = tuple(lowering.stages), dist.get_rank(lowering.tp_group) if is_sliced else None
    # Ranks may have different optimizers: a stage that trains nothing has an empty one.
    everywhere = gathered((max(reach.values(), default=ELEMENT), is_sliced, part), None)
    others = [rank for rank, (*_, other) in enumerate(everywhere) if other != part]
    all_ranks_or_none("optimizer", lambda: refuse_shared_steps(optimizer, others))
    furthest, is_sliced = max(r for r, *_ in everywhere), any(s for _, s, _ in everywhere)
    if furthest == ELEMENT:
        return
    if flat is not None:
        raise on_every_rank(
            SlapoError(
                f"{type(optimizer).__name__} computes steps from whole tensors, but {flat}; pass "
                'an elementwise optimizer such as AdamW, or build for target="torch"'
            )
        )
    if furthest == MODEL and (is_sliced or lowering.n_stages > 1):
        raise error_of_coupled_steps(optimizer)
    step_on_wholes(optimizer, lowering.module, reach, group())


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold the state: a wrapper passes its steps to them."""
    from slapo.sharding.whole_steps import steppers_of  # only to save, or with shards

    found = steppers_of(optimizer)
    if optimizer not in found and any(optimizer.state.values()):
        inner = [type(each).__name__ for each in found]
        raise SlapoError(
            f"{type(optimizer).__name__} keeps state besides that of its {inner}, which cannot "
            "be saved; keep it in only one of them"
        )
    return found


def make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    """Create the user's scheduler; None without one. A collective of the world."""
    return all_ranks_or_none("lr_scheduler", lambda: _make_scheduler(factory, optimizer))


def _make_optimizer(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
    # If nothing is trained, an empty parameter: torch's optimizers refuse an empty list.
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
            f"{type(optimizer).__name__}.step() needs {needed}: it computes the loss several "
            "times per step, but an engine does so once; pass another optimizer"
        )
    return optimizer


def _wants_names(factory: OptimizerFn) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without a Python signature
        return False
    return next(iter(parameters), None) == "named_parameters"


def _make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    if factory is None:
        return None
    scheduler = factory(optimizer)
    check_scheduler(scheduler)
    return scheduler


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler that cannot be stepped after each batch."""
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"lr_scheduler(optimizer) returned a {type(scheduler).__name__}; it must return a "
            "scheduler with step()"
        )
    needed = _needed_arguments(scheduler.step)
    if needed:
        raise TypeError(
            f"{type(scheduler).__name__}.step() needs {needed}, but the engine steps schedulers "
            "without arguments; create it for engine.optimizer, and step it yourself"
        )


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
