"""From a user's functions to an optimizer and a scheduler, on all ranks or on none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from slapo.agreement import all_ranks_or_none

#: From a list of parameters, or of ``(name, parameter)``, to an optimizer.
OptimizerFn = Callable[[list[Any]], Any]

#: First argument of a function that wants names too.
NAMED = "named_parameters"


def make_optimizer(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
    """The user's optimizer over this rank's parameters. A collective of the world.

    Parameters
    ----------
    factory
        Gets a list of parameters; of ``(name, parameter)`` if its first argument is called
        ``named_parameters``.
    named
        Of this rank. Where nothing is trained, the factory gets an empty parameter, as torch's
        optimizers want one.
    device
        Of that.

    Raises
    ------
    TypeError
        If it returns no optimizer.

    Examples
    --------
    >>> def no_decay_for_biases(named_parameters):
    ...     biases = [p for name, p in named_parameters if name.endswith("bias")]
    ...     others = [p for name, p in named_parameters if not name.endswith("bias")]
    ...     return torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}])
    >>> named = list(torch.nn.Linear(2, 2).named_parameters())
    >>> len(make_optimizer(no_decay_for_biases, named, torch.device("cpu")).param_groups)
    2
    """
    return all_ranks_or_none("optimizer", lambda: _make(factory, named, device))


def _make(
    factory: OptimizerFn, named: Sequence[tuple[str, Parameter]], device: torch.device
) -> torch.optim.Optimizer:
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


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Parameters that a call has to give."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _wants_names(factory: OptimizerFn) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without a signature that Python can read
        return False
    return next(iter(parameters), None) == NAMED


def make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    """The user's scheduler; None without one. A collective of the world.

    Raises
    ------
    TypeError
        If it is none that is stepped without arguments.

    Examples
    --------
    >>> make_scheduler(None, optimizer=None) is None
    True
    """
    return all_ranks_or_none("lr_scheduler", lambda: _make_scheduler(factory, optimizer))


def _make_scheduler(factory: Callable[[Any], Any] | None, optimizer: Any) -> Any:
    if factory is None:
        return None
    scheduler = factory(optimizer)
    check_scheduler(scheduler)
    return scheduler


def check_scheduler(scheduler: Any) -> None:
    """Refuse what cannot be stepped after each batch.

    Raises
    ------
    TypeError
        Saying why.

    Examples
    --------
    >>> check_scheduler(None)
    Traceback (most recent call last):
        ...
    TypeError: lr_scheduler(optimizer) returned a NoneType; it must return a scheduler with step()
    """
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
