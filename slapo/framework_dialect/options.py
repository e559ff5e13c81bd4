"""Options that every runtime takes, checked before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import with_nearest
from slapo.framework_dialect.optimizers import OptimizerFn
from slapo.framework_dialect.precision import HALVES, half_of
from slapo.mesh import grid_of

#: ``loss_fn(output, targets)`` -> the mean over a micro-batch, or ``(sum, count)``.
LossFn = Callable[[Any, Any], Any]

#: Steps at the start that are checked, and the distance of those that are checked after them.
CHECKED_STEPS, CHECK_EVERY = 3, 100

NONFINITE = ("step", "skip", "error")

Options = TypeVar("Options", bound="TrainingOptions")


@dataclass(frozen=True)
class TrainingOptions:
    """What every runtime takes.

    Parameters
    ----------
    mesh
        From :func:`slapo.init_mesh`, or another mesh over all processes whose dimensions are some
        of ``"pp"``, ``"dp"`` and ``"tp"``.
    loss_fn
        ``loss_fn(output, targets)`` -> the mean loss of a micro-batch, or ``(sum, count)``: the
        loss of a batch is then the quotient of both sums over all micro-batches and replicas,
        whatever each of them counts.
    optimizer
        ``optimizer(parameters)`` -> a torch optimizer; called with a list of parameters, or of
        ``(name, parameter)`` if its first argument is called ``named_parameters``, with the names
        that the model has for them.
    micro_batches
        Number of equal parts that a batch is cut in.
    clip_grad_norm
        Largest norm of the whole model's gradient; ``math.inf`` measures it only. None: it is
        neither measured nor clipped.
    lr_scheduler
        ``lr_scheduler(optimizer)`` -> what is stepped after each batch.
    dtype
        What the model computes in: ``torch.bfloat16`` or ``torch.float16``; the optimizer keeps
        parameters of float32, and buffers keep their dtype. ``torch.float32``: the model is
        converted to it. None: as the parameters are.
    nonfinite
        What to do about a gradient that is infinite or not a number: ``"step"`` (nothing is looked
        at), ``"skip"`` the optimizer's step and the scheduler's, or ``"error"``. With
        ``torch.float16`` such steps are skipped at least, and the scale of the loss is lowered;
        DeepSpeed's ZeRO skips them always.
    check_batches
        Compare the batches of ranks that must get the same one, at the first steps and at every
        hundredth.
    sync_replicated
        Take the first rank's values of parameters that several ranks hold. False: they must be the
        same when the engine is built.
    """

    mesh: DeviceMesh
    loss_fn: LossFn | None = None
    optimizer: OptimizerFn | None = None
    micro_batches: int = 1
    clip_grad_norm: float | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    nonfinite: str = "step"
    check_batches: bool = True
    sync_replicated: bool = False

    @classmethod
    def of(cls: type[Options], target: str, given: Mapping[str, Any], model: nn.Module) -> Options:
        """The options that a user gave `build` for a model.

        Raises
        ------
        TypeError
            If one is unknown, naming the nearest, or ``mesh`` is missing.
        """
        check_names(target, given, [field.name for field in fields(cls)])
        if "mesh" not in given:
            raise TypeError(
                f"target {target!r} needs mesh=; pass slapo.init_mesh(pp=, dp=, tp=), also for one "
                "process"
            )
        options = cls(**given)
        return options if options.dtype else replace(options, dtype=half_of(model))

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", grid_of(self.mesh))
        count = self.micro_batches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"micro_batches is {count!r}; pass a whole number from 1 up")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is an object, {type(self.optimizer).__name__}, but build changes which "
                "parameters there are; pass a function that makes it, such as "
                "functools.partial(torch.optim.AdamW, lr=1e-4)"
            )
        for name in ("loss_fn", "optimizer", "lr_scheduler"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} is a {type(value).__name__}; {_CALLABLES[name]}")
        limit = self.clip_grad_norm
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit > 0):
            raise ValueError(f"clip_grad_norm is {limit!r}; pass a number above 0")
        if self.dtype not in (None, torch.float32, *HALVES):
            raise ValueError(
                f"dtype is {self.dtype!r}; pass torch.float32, torch.bfloat16, "
                "torch.float16 or None"
            )
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite is {self.nonfinite!r}; known are {list(NONFINITE)}")
        if self.mesh.shape[0] > 1 and self.loss_fn is None:
            raise ValueError(
                f"a pipeline needs a loss, and the mesh has pp={self.mesh.shape[0]}; pass "
                "loss_fn=f, where f(output, target) is the mean loss of a micro-batch, or "
                "(sum, count)"
            )
        for name in ("check_batches", "sync_replicated"):
            check_flag(name, getattr(self, name))
        if self.lr_scheduler is not None and not self._has_optimizer():
            raise ValueError("lr_scheduler needs an optimizer; pass optimizer= too")

    def _has_optimizer(self) -> bool:
        return self.optimizer is not None

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that the model computes in; None for none."""
        return self.dtype if self.dtype in HALVES else None

    def described(self) -> dict[str, Any]:
        """The options as plain data, alike on ranks that were given the same."""
        return {field.name: _described(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def is_checked(step: int) -> bool:
        """Whether a step compares what must be alike on several ranks."""
        return step < CHECKED_STEPS or step % CHECK_EVERY == 0


_CALLABLES = {
    "loss_fn": "pass a function of (output, target)",
    "optimizer": "pass a function of a list of parameters, such as torch.optim.AdamW",
    "lr_scheduler": "pass a function of an optimizer",
}


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Examples
    --------
    >>> check_flag("check_batches", True)
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False")


def check_names(target: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that a target does not have.

    Raises
    ------
    TypeError
        Naming the nearest one.

    Examples
    --------
    >>> check_names("torch", {"micro_batch": 2}, ["mesh", "micro_batches"])
    Traceback (most recent call last):
        ...
    TypeError: target 'torch' has no option 'micro_batch'; did you mean 'micro_batches'? \
It takes ['mesh', 'micro_batches']
    """
    for name in given:
        if name not in known:
            takes = with_nearest(name, known, f"it takes {list(known)}")
            raise TypeError(f"target {target!r} has no option {name!r}; {takes}")


def _described(value: Any) -> Any:
    """Plain data that tells what a user can pass differently on two ranks by mistake."""
    if isinstance(value, DeviceMesh):
        return tuple(value.shape)
    if isinstance(value, functools.partial):
        return _described(value.func), _described(value.args), _described(value.keywords)
    if isinstance(value, Mapping):
        return {str(key): _described(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, FunctionType) and (value.__defaults__ or value.__kwdefaults__):
        return value.__qualname__, _described(value.__defaults__), _described(value.__kwdefaults__)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return getattr(value, "__qualname__", None) or (
        str(value) if isinstance(value, torch.dtype) else type(value).__qualname__
    )
