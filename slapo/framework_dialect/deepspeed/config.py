"""DeepSpeed's configuration: what a user wrote, joined with what the arguments of build say."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Config = dict[str, Any]

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

# So that several tensors with gradients may cross a boundary, and a first stage may take integers.
_PIPELINE = {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}

_NO_OPTIMIZER = (
    "pass optimizer=, a callable from a list of parameters to a torch optimizer, or put an "
    '"optimizer" section into the config'
)

# Prints nothing about progress; None, DeepSpeed's default, is not understood everywhere.
_NEVER = 10**9


@dataclass(frozen=True)
class Layout:
    """Where the model runs: ranks along each dimension, and the type of device."""

    pp: int
    dp: int
    tp: int
    device: str


@dataclass(frozen=True)
class Settings:
    """Outcome of :func:`merge`.

    Parameters
    ----------
    config
        A configuration for ``deepspeed.initialize``.
    micro_batches, zero, clip_grad_norm
        What holds; ``clip_grad_norm`` is 0 for none.
    micro_batch_size
        The one that the user's configuration fixes, if it does.
    has_optimizer
        Whether the model is trained, and not only run.
    """

    config: Config
    micro_batches: int
    zero: int
    clip_grad_norm: float
    micro_batch_size: int | None
    has_optimizer: bool


def load(config: Mapping[str, Any] | str | Path | None) -> Config:
    """A copy of the configuration that is safe to change.

    Parameters
    ----------
    config
        A mapping, or the path of a JSON file; None is an empty one.

    Raises
    ------
    TypeError
        If it is something else.
    ValueError
        If the file is missing or holds no JSON object.

    Examples
    --------
    >>> load({"steps_per_print": 10})
    {'steps_per_print': 10}
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, Path)):
        raise TypeError(
            f"deepspeed: config is a {type(config).__name__}; pass a dict or the path of a JSON "
            "file"
        )
    return _read(Path(config))


def _read(path: Path) -> Config:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"deepspeed: config {str(path)!r} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"deepspeed: config {str(path)!r} is no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(
            f"deepspeed: config {str(path)!r} holds a {type(loaded).__name__}, not an object"
        )
    return loaded


def merge(config: Config, given: Mapping[str, Any], layout: Layout) -> Settings:
    """Join a configuration with the arguments of build.

    Entries with the value ``"auto"`` count as absent where an argument of build says the same.

    Parameters
    ----------
    config
        The user's.
    given
        Arguments of build by name. What is None or missing is left to the configuration.
    layout
        Where the model runs.

    Raises
    ------
    ValueError
        If the two contradict each other, or DeepSpeed cannot do what they ask for.

    Examples
    --------
    >>> settings = merge({}, {"micro_batches": 4}, Layout(2, 1, 1, "cpu"))
    >>> settings.config["gradient_accumulation_steps"]
    4
    """
    merged = copy.deepcopy(config)
    has_optimizer = _merge_optimizer(merged, given, layout.device)
    half = _merge_dtype(merged, given.get("dtype"), layout.device)
    zero = _merge_zero(merged, given.get("zero"), half, has_optimizer)
    check_zero(zero, layout.pp)
    count, clip = given.get("micro_batches"), given.get("clip_grad_norm")
    _merge_entry(merged, "gradient_accumulation_steps", count, "micro_batches", 1)
    _merge_entry(merged, "gradient_clipping", clip, "clip_grad_norm", 0.0)
    micro_batches = _whole_number(merged, "gradient_accumulation_steps")
    size = _merge_sizes(merged, micro_batches, layout.dp)
    fix_entries(merged, layout)
    return Settings(merged, micro_batches, zero, _clip(merged), size, has_optimizer)


def check_zero(zero: int, pp: int) -> None:
    """Refuse what ``PipelineModule`` cannot do.

    Examples
    --------
    >>> check_zero(1, pp=2)
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed: the ZeRO stage is {zero!r}; pass 0, 1, 2 or 3")
    if pp > 1 and zero > 1:
        raise ValueError(
            f"deepspeed: ZeRO stage {zero} does not go with pp={pp}: DeepSpeed's pipeline keeps "
            "gradients and parameters whole until its last micro-batch; pass zero=0 or zero=1, or "
            "a mesh with pp=1"
        )


def fix_entries(config: Config, layout: Layout) -> None:
    """Set what has to have one value; refuse others.

    Examples
    --------
    >>> config = {}
    >>> fix_entries(config, Layout(1, 1, 1, "cpu"))
    >>> config["steps_per_print"]
    1000000000
    """
    if layout.pp > 1:
        section = _section(config, "pipeline")
        for name, value in _PIPELINE.items():
            if section.setdefault(name, value) is not value:
                raise _contradiction(f"pipeline.{name}", section[name], f"stages need {value}")
    if layout.tp > 1 and _section(config, "tensor_parallel", create=False).get("autotp_size"):
        size = config["tensor_parallel"]["autotp_size"]
        raise _contradiction(
            "tensor_parallel.autotp_size", size, f"the schedule shards over tp={layout.tp} already"
        )
    if config.get("managed_gradient_accumulation") is False:
        raise _contradiction("managed_gradient_accumulation", False, "train_batch needs True")
    if config.get("steps_per_print") is None:
        config["steps_per_print"] = _NEVER


# --- single entries ------------------------------------------------------------------------------
def precision_of(config: Config) -> torch.dtype | None:
    """The half precision that a configuration enables; None if none.

    Examples
    --------
    >>> precision_of({"bf16": {"enabled": True}})
    torch.bfloat16
    """
    sections = {name: _section(config, name, create=False) for name in _PRECISIONS}
    found = [name for name, section in sections.items() if section.get("enabled") is True]
    if len(found) > 1:
        raise ValueError("deepspeed: the config enables both bf16 and fp16; enable one")
    return _PRECISIONS[found[0]] if found else None


def _merge_dtype(config: Config, wanted: torch.dtype | None, device: str) -> torch.dtype | None:
    """The half precision; None for float32."""
    sections = {name: _section(config, name, create=False) for name in _PRECISIONS}
    dtype = wanted or precision_of(config) or torch.float32
    for name, precision in _PRECISIONS.items():
        is_on, entry = dtype is precision, sections[name].get("enabled", "auto")
        if entry not in ("auto", is_on):
            raise _contradiction(f"{name}.enabled", entry, f"the model computes in {dtype}")
        if is_on or (entry == "auto" and name in config):
            _section(config, name)["enabled"] = is_on
    if dtype is torch.float16 and device == "cpu":
        raise ValueError(
            "deepspeed: the model computes in torch.float16 on a CPU, where DeepSpeed has none; "
            "pass dtype=torch.bfloat16 or torch.float32"
        )
    if dtype is torch.bfloat16:
        # Micro-batches and replicas would be added up in bfloat16, and lose small gradients.
        _section(config, "data_types").setdefault("grad_accum_dtype", "fp32")
        config.setdefault("communication_data_type", "fp32")
    return None if dtype is torch.float32 else dtype


def _merge_zero(
    config: Config, wanted: int | None, half: torch.dtype | None, has_optimizer: bool
) -> int:
    copies = half is not None and has_optimizer
    section = _section(config, "zero_optimization")
    _merge_entry(section, "stage", wanted, "zero", int(copies), "zero_optimization.stage")
    if copies and section["stage"] == 0:
        raise ValueError(
            f"deepspeed: ZeRO stage 0 with {half}, for which DeepSpeed takes an extra optimizer "
            "step at the start and adds micro-batches up in half precision; pass zero=1: the same "
            "training in less memory"
        )
    if section["stage"] in (1, 2) and not has_optimizer:
        raise ValueError(
            f"deepspeed: ZeRO stage {section['stage']} shares out what an optimizer needs, and "
            f"there is none; {_NO_OPTIMIZER}, or zero=0"
        )
    return section["stage"]


def _merge_sizes(config: Config, micro_batches: int, dp: int) -> int | None:
    """Complete the batch sizes, which DeepSpeed wants although it uses them for statistics only."""
    total, size = (
        None if config.get(key) in (None, "auto") else _whole_number(config, key)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
    )
    parts = micro_batches * dp
    shown = f"micro_batches={micro_batches} and dp={dp}"
    if total is not None and (total % parts or size not in (None, total // parts)):
        needs = f"is not divisible by {shown}" if total % parts else f"contradicts {shown} with"
        also = "" if total % parts else f" train_micro_batch_size_per_gpu={size}"
        raise ValueError(
            f"deepspeed: train_batch_size={total} in the config {needs}{also}; leave it out, and "
            "batches may have any size"
        )
    known = total // parts if total is not None else size
    config["train_micro_batch_size_per_gpu"] = known or 1
    config["train_batch_size"] = (known or 1) * parts
    return known


def _merge_optimizer(config: Config, given: Mapping[str, Any], device: str) -> bool:
    """Whether there is one."""
    for key, name in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
        if given.get(name) is not None and config.get(key) is not None:
            kind = config[key].get("type") if isinstance(config[key], Mapping) else config[key]
            raise _contradiction(key, kind, f"{name}= is passed too")
    if given.get("optimizer") is not None:
        config.setdefault("zero_allow_untested_optimizer", True)
        return True
    use_torch_adam(config, device)
    return config.get("optimizer") is not None


def use_torch_adam(config: Config, device: str) -> None:
    """Spare a CPU the minute that building DeepSpeed's fused Adam takes.

    Examples
    --------
    >>> config = {"optimizer": {"type": "AdamW"}}
    >>> use_torch_adam(config, "cpu")
    >>> config["optimizer"]["params"]
    {'torch_adam': True}
    """
    section = config.get("optimizer")
    offloads = _section(config, "zero_optimization", create=False).get("offload_optimizer")
    if device != "cpu" or offloads or not isinstance(section, dict):
        return
    if str(section.get("type", "")).lower() in ("adam", "adamw"):
        section.setdefault("params", {}).setdefault("torch_adam", True)


def _merge_entry(
    section: Config, key: str, given: Any, argument: str, default: Any, shown: str = ""
) -> None:
    said = section.get(key)
    said = None if said == "auto" else said
    if given is not None and said is not None and said != given:
        raise _contradiction(shown or key, said, f"{argument}={given!r}")
    section[key] = next(value for value in (given, said, default) if value is not None)


def _contradiction(entry: str, said: Any, other: str) -> ValueError:
    return ValueError(
        f"deepspeed: the config says {entry}={said!r}, but {other}; change one of them, or leave "
        "the entry out"
    )


def _section(config: Config, name: str, create: bool = True) -> Config:
    found = config.setdefault(name, {}) if create else config.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"deepspeed: the config's {name} is {found!r}; it must be a dict")
    return found


def _whole_number(config: Config, key: str) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        name = "micro_batches" if key == "gradient_accumulation_steps" else key
        raise ValueError(f"deepspeed: {name} is {value!r}; pass a whole number from 1 up")
    return value


def _clip(config: Config) -> float:
    value = config["gradient_clipping"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(
            f"deepspeed: clip_grad_norm is {value!r}; pass a positive number, or None for no limit"
        )
    return float(value)
