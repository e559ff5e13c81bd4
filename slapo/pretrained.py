"""Loading and saving of weights in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo.agreement import all_ranks_or_none, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.framework_dialect import Engine
from slapo.framework_dialect.failures import naming
from slapo.framework_dialect.precision import cast_parameters
from slapo.logger import get_logger
from slapo.schedule import Schedule
from slapo.weights.export import export, size_in_bytes
from slapo.weights.folders import Folder, Found
from slapo.weights.holdings import Held, holdings
from slapo.weights.load import Loader
from slapo.weights.provenance import Original, note_adapters, original_of
from slapo.wrapper import innermost

Target = Schedule | nn.Module | Engine

logger = get_logger("slapo")


@dataclass(frozen=True)
class Loaded:
    """Outcome of :func:`load_pretrained`.

    Attributes
    ----------
    missing : tuple of str
        Names in the model that are not in the folder.
    unexpected : tuple of str
        Names in the folder that are not in the model.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    _bytes: Callable[[], int] = field(repr=False)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this rank has read; for a schedule, those that its build reads."""
        return self._bytes()


@naming("load_pretrained")
def load_pretrained(
    target: Target,
    folder: str | os.PathLike[str],
    *,
    missing: str = "init",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load the weights of a model from a folder; each rank reads only its own shards.

    Parameters
    ----------
    target
        The root schedule before :func:`slapo.build`, which then reads the values; a built module;
        or an engine, whose optimizer continues from the new weights with its present state.
    folder
        A folder as written by ``save_pretrained``, with one or several weight files, or a single
        safetensors file. Names are converted as Transformers does; names of other models are used
        unchanged.
    missing
        ``"init"`` initializes tensors that belong to a new head, or that were not in the class that
        the folder was saved from; ``"error"`` refuses them.
    dtype
        Dtype of the parameters; None keeps that of the schedule. Only for a schedule.

    Returns
    -------
    Loaded
        The missing and unexpected names, and the bytes that this rank has read.

    Raises
    ------
    SlapoError
        If the folder is damaged, holds a model of another family or of other sizes, lacks tensors
        of its own class, or names differ; on every rank, and before anything changes.

    Examples
    --------
    >>> import tempfile
    >>> import slapo
    >>> model, _ = slapo.build(slapo.create_schedule(nn.Linear(2, 2)))
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> slapo.save_pretrained(model, folder)
    >>> with slapo.init_empty_weights():
    ...     sch = slapo.create_schedule(nn.Linear(2, 2))
    >>> slapo.load_pretrained(sch, folder).missing
    ()
    >>> again, _ = slapo.build(sch)
    >>> bool((again.weight == model.weight).all())
    True
    """
    what = "load_pretrained"
    if missing not in ("init", "error"):
        raise ValueError(f'missing is {missing!r}; pass "init" or "error"')
    _check_dtype(what, dtype)
    original = _original(what, target)
    if isinstance(target, Engine):
        target.check_between_steps(what)
    if dtype is not None and not isinstance(target, Schedule):
        raise ValueError(
            f"load_pretrained: dtype={dtype} is for a schedule before build; leave it out, since a "
            "built model has its training dtype already"
        )
    same_on_all_ranks(what, {"folder": str(folder), "missing": missing, "dtype": str(dtype)})
    found = all_ranks_or_none(what, lambda: _find(original, Path(folder).absolute(), missing))
    loader = Loader(found)
    if isinstance(target, Schedule):
        if dtype is not None:
            # Meta tensors take the dtype here, and build() converts what it reads to it.
            cast_parameters(target.mod, dtype)
        target.state.loader = loader
        generation = found.take_generation_config()
        if generation is not None:
            vars(innermost(target.mod))["generation_config"] = generation
    else:
        loader.fill(all_ranks_or_none(what, lambda: _held(target)))
        if isinstance(target, Engine):
            # First from the new parameters, then from the folder where that is more precise.
            target.renew_masters()
            target.fill_masters(loader)
    if found.missing:
        logger.warning("%s lacks %s, which are initialized", folder, _few(found.missing))
    if found.unexpected:
        logger.warning("%s has %s, which the model lacks", folder, _few(found.unexpected))
    return Loaded(tuple(found.missing), tuple(found.unexpected), lambda: found.folder.bytes_read)


@naming("save_pretrained")
def save_pretrained(
    target: nn.Module | Engine,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: str | int = "50GB",
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as an ordinary Hugging Face folder, which ``from_pretrained`` opens.

    Names and shapes are those of the original model, independent of the schedule. Every rank of the
    job has to call this function. Ranks write files side by side, and none holds the full model.
    The folder gets its final name only once it is complete.

    Parameters
    ----------
    target
        A module or an engine that :func:`slapo.build` returned.
    folder
        A new or empty folder, unless `overwrite` is True.
    max_shard_size
        Largest size of a file in bytes, or a string such as ``"5GB"``.
    dtype
        Dtype of floating-point tensors in the folder; None keeps that of the model.
    values
        Tensors of this rank to save instead of the model's, such as averages of them, with the
        names and shapes of ``state_dict()`` of `target`.
    overwrite
        Replace weights and configs in `folder`, once all are written beside it. Its other files
        stay.

    Raises
    ------
    SlapoError
        If a tensor has no original, as in a module with weights of its own; if `folder` holds
        files and `overwrite` is False; or if `values` do not fit. Raised on every rank.

    Examples
    --------
    >>> import tempfile
    >>> import slapo
    >>> model, _ = slapo.build(slapo.create_schedule(nn.Linear(2, 2)))
    >>> slapo.save_pretrained(model, tempfile.mkdtemp() + "/model")
    """
    what = "save_pretrained"
    _check_dtype(what, dtype)
    limit = size_in_bytes(max_shard_size)
    if isinstance(target, Schedule):
        raise SlapoError(
            "save_pretrained got a schedule; pass the model or engine from slapo.build"
        )
    if isinstance(target, nn.Module) and original_of(target) is None:
        target = getattr(getattr(target, "base_model", None), "model", target)  # inside a PeftModel
    original = _original(what, target)
    if isinstance(target, nn.Module):
        note_adapters(target, original)
    same_on_all_ranks(
        what,
        {"folder": str(folder), "limit": limit, "dtype": str(dtype), "overwrite": overwrite},
    )
    held = all_ranks_or_none(what, lambda: _held(target))
    if values is not None:
        held = all_ranks_or_none(what, lambda: _with_values(target, held, values))
    export(original, held, Path(folder).absolute(), limit, dtype, overwrite)


def take_over_saving(model: nn.Module) -> None:
    """Replace ``model.save_pretrained`` of a sharded model by :func:`save_pretrained`."""
    # shard() has put it there; a model without shards keeps Transformers' own method.
    if "save_pretrained" in innermost(model).__dict__:
        model.__dict__["save_pretrained"] = MethodType(_save_as_transformers, model)


def _save_as_transformers(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = None,
    max_shard_size: str | int = "50GB",
    safe_serialization: bool = True,
    **others: Any,
) -> None:
    if state_dict is not None or others or not safe_serialization:
        raise SlapoError(
            "save_pretrained of a sharded model takes only a folder and max_shard_size; call it "
            "with these, on every rank"
        )
    # Transformers overwrites, too.
    save_pretrained(model, save_directory, max_shard_size=max_shard_size, overwrite=True)


def _held(target: nn.Module | Engine) -> list[Held]:
    return target.held() if isinstance(target, Engine) else holdings(target)


def _with_values(
    target: nn.Module | Engine, held: list[Held], values: Mapping[str, Tensor]
) -> list[Held]:
    module = target.lowering if isinstance(target, Engine) else target
    # keep_vars: the entries are matched to the held tensors by identity.
    state = module.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    lacking = [name for name in own if name not in values]
    unknown = [name for name in values if name not in own]
    if lacking or unknown:
        raise SlapoError(
            f"save_pretrained: values lack {lacking[:3]} and have {unknown[:3]}, which the model "
            "lacks; pass a value for each name in the state_dict() of this rank"
        )
    names = {id(tensor): name for name, tensor in own.items()}
    found = []
    for item in held:
        value = values[names[id(item.tensor)]]
        given = Held(item.name, value, item.origin, item.spec, item.is_buffer)
        if given.origin is not None and value.shape != given.here.shape:
            raise SlapoError(
                f"save_pretrained: the value of {item.name!r} has the shape {tuple(value.shape)}, "
                f"but this rank's part of it has {tuple(given.here.shape)}"
            )
        found.append(given)
    return found


def _original(what: str, target: Any) -> Original:
    if isinstance(target, Schedule):
        if target.parent is not None:
            raise SlapoError(f"{what} got {target.where}; pass the root schedule")
        if target.state.built_for is not None:
            raise SlapoError(
                f"{what}: this schedule is built already; pass the built model or engine"
            )
        return target.state.original
    found = None
    if isinstance(target, Engine):
        found = original_of(target.lowering.model)
    elif isinstance(target, nn.Module):
        found = original_of(target)
    else:
        raise TypeError(
            f"{what}: target is of type {type(target).__name__}; pass a schedule, or the model or "
            "engine returned by slapo.build"
        )
    if found is None:
        raise SlapoError(
            f"{what}: this {type(target).__name__} was not built by slapo.build; pass the model or "
            "engine that it returns"
        )
    return found


def _find(original: Original, path: Path, missing: str) -> Found:
    folder = Folder(path)
    found = Found(folder, original)
    if not found.missing:
        return found
    lacking = found.missing
    if missing == "init" and found.originals:  # otherwise no name matches at all
        lacking = found.missing_in_its_class()
    if lacking:
        extra = f"; it also has {_few(found.unexpected)}" if found.unexpected else ""
        raise SlapoError(
            f"{path} lacks {_few(lacking)}{extra}; pass the folder of this model, or weights for "
            "all of it"
        )
    return found


def _few(names: Sequence[str]) -> str:
    return f"{list(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}"


def _check_dtype(what: str, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{what}: dtype is {dtype!r}; pass a floating-point one of torch, or None")
