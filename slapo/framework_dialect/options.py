"""Options that every runtime takes, validated before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import with_nearest
from slapo.framework_dialect.batches import BatchDims
from slapo.framework_dialect.optimizers import OptimizerFn
from slapo.framework_dialect.precision import HALVES, half_of
from slapo.mesh import grid_of

#: ``loss_fn(output, targets)`` -> the mean over a micro-batch, or ``(sum, count)``.
LossFn = Callable[[Any, Any], Any]

#: Number of first steps that are checked, and the interval of later checks.
CHECKED_STEPS, CHECK_EVERY = 3, 100

Options = TypeVar("Options", bound="TrainingOptions")


# --- the values that an option takes -------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """Valid values of an option; `expected` completes the sentence "pass ..."."""

    is_valid: Callable[[Any], bool]
    expected: str
    error: type[Exception] = ValueError

    def check(self, name: str, value: Any) -> None:
        """Raise if the value is not valid."""
        if not self.is_valid(value):
            shown = repr(value)
            shown = shown if len(shown) < 60 else f"a {type(value).__name__}"
            raise self.error(f"{name} is {shown}; pass {self.expected}")


def is_whole(value: Any) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Return whether a value is a number; bools are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _function(of: str) -> Rule:
    return Rule(lambda v: v is None or callable(v), f"a function of {of}", TypeError)


def _is_optimizer_fn(value: Any) -> bool:
    return value is None or (callable(value) and not isinstance(value, torch.optim.Optimizer))


def _is_batch_dims(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and all(isinstance(name, (str, int)) for name in value)
        and all(axis is None or type(axis) is int for axis in value.values())
    )


def one_of(*values: Any) -> Rule:
    """Return the rule of an option with a few values."""
    shown = [repr(v) if isinstance(v, str) else str(v) for v in values]
    return Rule(lambda v: v in values, f"{', '.join(shown[:-1])} or {shown[-1]}")


FLAG = Rule(lambda v: isinstance(v, bool), "True or False", TypeError)


@dataclass(frozen=True)
class TrainingOptions:
    """Arguments of ``build`` that every runtime takes.

    Parameters
    ----------
    mesh
        From :func:`slapo.init_mesh`, or another mesh over all processes whose dimensions are some
        of ``"pp"``, ``"dp"`` and ``"tp"``.
    loss_fn
        ``loss_fn(output, targets)`` -> the mean loss of a micro-batch, or ``(sum, count)``. In the
        second case the loss of a batch is the quotient of both sums over all micro-batches and
        replicas, for any kind of count.
    loss_mean
        Weights of mean losses. ``"targets"`` weights each micro-batch and replica by its number of
        targets: the model's own ``labels`` in the inputs, or else integer targets; targets of -100
        are not counted. ``"micro_batches"`` weights all equally. Batches without such targets have
        equal weights.
    optimizer
        ``optimizer(parameters)`` -> a torch optimizer. The argument is a list of parameters, or of
        ``(name, parameter)`` with names of the model if the first argument of the function is
        called ``named_parameters``.
    micro_batches
        Number of parts that a batch is split into; the last ones may have one sample less. Each
        tensor is split along its first axis, or along the only axis that has the size of the batch.
    batch_dims
        Sample axis of inputs for which it is not the first, or is ambiguous:
        ``{"position_ids": 1}``, by the name of an argument, or by its position in a tuple. None:
        every micro-batch gets the full input.
    clip_grad_norm
        Largest norm of the full model's gradient; ``math.inf`` only measures it. None: it is
        neither measured nor clipped.
    lr_scheduler
        ``lr_scheduler(optimizer)`` -> an object whose ``step()`` is called after each batch.
    dtype
        Dtype that the model computes in. ``torch.bfloat16`` or ``torch.float16``: the optimizer
        keeps parameters in float32, and buffers keep their dtype. ``torch.float32``: the model is
        converted to it. None: the dtype of the parameters.
    nonfinite
        Reaction to a gradient with infinities or NaN: ``"step"`` does not check gradients,
        ``"skip"`` skips the steps of the optimizer and the scheduler, ``"error"`` raises. With
        ``torch.float16`` such steps are always skipped, or raise, and the loss scale is lowered;
        DeepSpeed's ZeRO always skips them.
    check_batches
        Compare batches over the ranks that must have the same one, and gradients of parameters
        replicated over tensor-parallel ranks. Done at the first steps and at every hundredth.
    sync_replicated
        Copy the first rank's values of replicated parameters to the other ranks. False: the values
        must be equal when the engine is built.
    """

    mesh: DeviceMesh
    loss_fn: LossFn | None = None
    optimizer: OptimizerFn | None = None
    loss_mean: str = "targets"
    micro_batches: int = 1
    batch_dims: BatchDims | None = None
    clip_grad_norm: float | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    nonfinite: str = "step"
    check_batches: bool = True
    sync_replicated: bool = False

    rules: ClassVar[dict[str, Rule]] = {
        "loss_fn": _function("(output, target)"),
        "optimizer": Rule(
            _is_optimizer_fn,
            "a function of a list of parameters, such as functools.partial(torch.optim.AdamW, "
            "lr=1e-4): build replaces the parameters",
            TypeError,
        ),
        "loss_mean": one_of("targets", "micro_batches"),
        "batch_dims": Rule(
            _is_batch_dims, 'a mapping such as {"position_ids": 1, "mask": None}', TypeError
        ),
        "micro_batches": Rule(is_whole, "a positive integer"),
        "clip_grad_norm": Rule(
            lambda v: v is None or (is_number(v) and v > 0), "a number above 0, or None"
        ),
        "lr_scheduler": _function("an optimizer"),
        "dtype": one_of(torch.float32, *HALVES, None),
        "nonfinite": one_of("step", "skip", "error"),
        "check_batches": FLAG,
        "sync_replicated": FLAG,
    }

    @classmethod
    def of(cls: type[Options], target: str, given: Mapping[str, Any], model: nn.Module) -> Options:
        """Return the validated options that a user gave `build` for a model."""
        check_names(target, given, [entry.name for entry in fields(cls)])
        if "mesh" not in given:
            raise TypeError(
                f"target {target!r} needs mesh=; pass slapo.init_mesh(pp=, dp=, tp=), even for "
                "one process"
            )
        options = cls(**given)
        if options.batch_dims:
            _check_arguments(options.batch_dims, model)
        loss = getattr(options.loss_fn, "__self__", options.loss_fn)
        if isinstance(loss, nn.Module):
            known = set(map(id, model.parameters()))
            own = [n for n, p in loss.named_parameters() if p.requires_grad and id(p) not in known]
            if own and options.has_optimizer:
                raise ValueError(
                    f"loss_fn has parameters {own[:3]} that are not the model's, and no optimizer "
                    "would update them; make the loss a module of the model, or freeze them"
                )
        return options if options.dtype else replace(options, dtype=half_of(model))

    def __post_init__(self) -> None:
        # From here on a mesh has the dimensions (pp, dp, tp), of size 1 if the user's mesh lacks
        # them: mesh.shape[1] is the number of replicas.
        object.__setattr__(self, "mesh", grid_of(self.mesh))
        for name, rule in self.rules.items():
            rule.check(name, getattr(self, name))
        if self.mesh.shape[0] > 1 and self.loss_fn is None:
            raise ValueError(
                f"a mesh with pp={self.mesh.shape[0]} needs a loss; pass loss_fn=f, where "
                "f(output, target) returns the mean loss of a micro-batch, or (sum, count)"
            )
        if self.lr_scheduler is not None and not self.has_optimizer:
            raise ValueError("lr_scheduler needs an optimizer; pass optimizer= too")

    @property
    def has_optimizer(self) -> bool:
        """Return whether the model trains."""
        return self.optimizer is not None

    @property
    def half(self) -> torch.dtype | None:
        """Half precision that the model computes in; None for none."""
        return self.dtype if self.dtype in HALVES else None

    def described(self) -> dict[str, Any]:
        """Options as plain data, equal on ranks that were given the same values."""
        return {entry.name: _described(getattr(self, entry.name)) for entry in fields(self)}

    @staticmethod
    def is_checked(step: int) -> bool:
        """Return whether a step compares values that must be equal on several ranks."""
        return step < CHECKED_STEPS or step % CHECK_EVERY == 0


def _check_arguments(batch_dims: BatchDims, model: nn.Module) -> None:
    """Refuse names that are not arguments of the model."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in batch_dims:
        if isinstance(name, str) and name not in parameters:
            takes = with_nearest(name, list(parameters), f"it has {list(parameters)}")
            raise ValueError(
                f"batch_dims has {name!r}, which {type(model).__name__}.forward does not take; "
                f"{takes}"
            )


def check_names(target: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that a target does not have; the message has the nearest one."""
    for name in given:
        if name not in known:
            takes = with_nearest(name, known, f"it takes {list(known)}")
            raise TypeError(f"target {target!r} has no option {name!r}; {takes}")


def _described(value: Any) -> Any:
    """Convert an option to plain data, in which differences between two ranks show."""
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
