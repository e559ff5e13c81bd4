"""DeepSpeed's configuration: the user's, merged with the arguments of build."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slapo.framework_dialect.options import TrainingOptions, is_whole
from slapo.framework_dialect.precision import HALF_NAMES

Config = dict[str, Any]

# Allows several tensors with gradients to cross a boundary, and integer inputs of the first stage.
_PIPELINE = {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}

# Disables progress output; DeepSpeed does not accept its default, None, everywhere.
_NEVER = 10**9


@dataclass(frozen=True)
class Layout:
    """Ranks along each dimension, and the device type."""

    pp: int
    dp: int
    tp: int
    device: str


@dataclass(frozen=True)
class DeepSpeedOptions(TrainingOptions):
    """Arguments of ``build(sch, target="deepspeed")``, in addition to :class:`TrainingOptions`.

    Parameters
    ----------
    config
        DeepSpeed's configuration: a dict, which is not modified, or the path of a JSON file.
        Arguments of build may be left out of it, and must not contradict it.
    zero
        ZeRO stage: 0 to 3, at most 1 with a pipeline. The default is 0, or 1 in half precision.
    topology
        DeepSpeed's, such as ``PipeModelDataParallelTopology``; instead of a mesh, to get
        DeepSpeed's own engine.
    """

    config: Any = None
    zero: int | None = None
    topology: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology is not None:
            raise ValueError("deepspeed: mesh= and topology= are alternatives; pass one of them")

    @property
    def has_optimizer(self) -> bool:
        """False if the model only runs and is not trained."""
        return super().has_optimizer or self.config.get("optimizer") is not None


def load(config: Mapping[str, Any] | str | Path | None) -> Config:
    """Return a copy of the configuration, or of the JSON file, that is safe to modify."""
    if isinstance(config, (str, Path)):
        config = json.loads(Path(config).read_text())
    if not isinstance(config, (Mapping, type(None))):
        raise TypeError(
            f"deepspeed: config is a {type(config).__name__}; pass a dict or the path of a JSON "
            "file with one"
        )
    return copy.deepcopy(dict(config or {}))


def merge(config: Config, given: Mapping[str, Any], layout: Layout) -> Config:
    """Merge a configuration with the arguments of build; an argument of None defers to it.

    Entries with the value ``"auto"`` count as absent. A contradiction raises a ValueError.
    """
    merged = copy.deepcopy(config)
    has_optimizer = _merge_optimizer(merged, given, layout.device)
    half = _merge_dtype(merged, given.get("dtype"), layout.device)
    zero = _merge_zero(merged, given.get("zero"), half, has_optimizer)
    check_zero(zero, layout.pp)
    count, clip = given.get("micro_batches"), given.get("clip_grad_norm")
    _merge_entry(merged, "gradient_accumulation_steps", count, "micro_batches", 1)
    _merge_entry(merged, "gradient_clipping", clip, "clip_grad_norm", 0.0)
    micro_batches = _whole_number(merged, "gradient_accumulation_steps", "micro_batches")
    _merge_sizes(merged, micro_batches, layout.dp)
    fix_entries(merged, layout)
    return merged


def flat_parameters(config: Config) -> str | None:
    """Reason why DeepSpeed's optimizers step on flat pieces of parameters; None if they do not."""
    if stage := zero_of(config):
        return f"ZeRO stage {stage} has flat pieces of them"
    half = precision_of(config)
    return None if half is None else f"DeepSpeed has flat copies of them in {half}"


def zero_of(config: Config) -> Any:
    """ZeRO stage of a configuration."""
    return (config.get("zero_optimization") or {}).get("stage", 0)


def check_zero(zero: int, pp: int) -> None:
    """Refuse ZeRO stages that are invalid, or that ``PipelineModule`` does not support."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed: the ZeRO stage is {zero!r}; pass 0, 1, 2 or 3")
    if pp > 1 and zero > 1:
        raise ValueError(
            f"deepspeed: ZeRO stage {zero} does not fit pp={pp}: DeepSpeed's pipeline needs full "
            "gradients and parameters until its last micro-batch; pass zero=0 or zero=1, or a "
            "mesh with pp=1"
        )


def fix_entries(config: Config, layout: Layout) -> None:
    """Set the entries that have only one valid value; refuse other values."""
    if layout.pp > 1:
        section = _section(config, "pipeline")
        for name, value in _PIPELINE.items():
            if section.setdefault(name, value) is not value:
                raise _contradiction(f"pipeline.{name}", section[name], f"stages need {value}")
    size = _section(config, "tensor_parallel", create=False).get("autotp_size")
    if layout.tp > 1 and size:
        raise _contradiction(
            "tensor_parallel.autotp_size", size, f"the schedule shards over tp={layout.tp} already"
        )
    if config.get("managed_gradient_accumulation") is False:
        raise _contradiction("managed_gradient_accumulation", False, "train_batch needs True")
    if config.get("steps_per_print") is None:
        config["steps_per_print"] = _NEVER


def use_torch_adam(config: Config, device: str) -> None:
    """Select torch's Adam on a CPU: building DeepSpeed's fused Adam takes a minute."""
    section = config.get("optimizer")
    offloads = _section(config, "zero_optimization", create=False).get("offload_optimizer")
    if device != "cpu" or offloads or not isinstance(section, dict):
        return
    if str(section.get("type", "")).lower() in ("adam", "adamw"):
        section.setdefault("params", {}).setdefault("torch_adam", True)


def precision_of(config: Config) -> torch.dtype | None:
    """Half precision that a configuration enables; None if none."""
    sections = {name: _section(config, name, create=False) for name in HALF_NAMES}
    found = [name for name, section in sections.items() if section.get("enabled") is True]
    if len(found) > 1:
        raise ValueError("deepspeed: the config enables both bf16 and fp16; enable one")
    return HALF_NAMES[found[0]] if found else None


# --- single entries ------------------------------------------------------------------------------
def _merge_optimizer(config: Config, given: Mapping[str, Any], device: str) -> bool:
    """Return whether there is an optimizer."""
    for key, name in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
        if given.get(name) is not None and config.get(key) is not None:
            kind = config[key].get("type") if isinstance(config[key], Mapping) else config[key]
            raise _contradiction(key, kind, f"{name}= is passed too")
    if given.get("optimizer") is not None:
        # DeepSpeed refuses ZeRO with optimizers outside its own list, unless this is set.
        config.setdefault("zero_allow_untested_optimizer", True)
        return True
    use_torch_adam(config, device)
    return config.get("optimizer") is not None


def _merge_dtype(config: Config, wanted: torch.dtype | None, device: str) -> torch.dtype | None:
    """Return the half precision; None for float32."""
    dtype = wanted or precision_of(config) or torch.float32
    for name, precision in HALF_NAMES.items():
        is_on = dtype is precision
        entry = _section(config, name, create=False).get("enabled", "auto")
        if entry not in ("auto", is_on):
            raise _contradiction(f"{name}.enabled", entry, f"the model computes in {dtype}")
        if is_on or (entry == "auto" and name in config):
            _section(config, name)["enabled"] = is_on
    if dtype is torch.float16 and device == "cpu":
        raise ValueError(
            "deepspeed: the model computes in torch.float16, which DeepSpeed lacks on CPUs; "
            "pass dtype=torch.bfloat16 or torch.float32"
        )
    if dtype is torch.bfloat16:
        # Otherwise sums over micro-batches and replicas would be in bfloat16, and lose small
        # gradients.
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
            f"deepspeed: with ZeRO stage 0 and {half}, DeepSpeed runs an extra optimizer step at "
            "the start and accumulates micro-batches in half precision; pass zero=1 for the "
            "same training in less memory"
        )
    if section["stage"] in (1, 2) and not has_optimizer:
        raise ValueError(
            f"deepspeed: ZeRO stage {section['stage']} shards optimizer state, but there is no "
            "optimizer; pass optimizer=, a callable from a list of parameters to a torch "
            'optimizer, put an "optimizer" section into the config, or pass zero=0'
        )
    return section["stage"]


def _merge_sizes(config: Config, micro_batches: int, dp: int) -> None:
    """Complete the batch sizes: DeepSpeed requires them, but uses them only for statistics."""
    total, size = (
        None if config.get(key) in (None, "auto") else _whole_number(config, key)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
    )
    parts = micro_batches * dp
    if total is not None and (total % parts or size not in (None, total // parts)):
        also = "" if size is None else f" with train_micro_batch_size_per_gpu={size}"
        raise ValueError(
            f"deepspeed: train_batch_size={total} in the config{also} does not match "
            f"micro_batches={micro_batches} and dp={dp}; leave it out to allow batches of any "
            "size"
        )
    known = total // parts if total is not None else size
    config["train_micro_batch_size_per_gpu"] = known or 1
    config["train_batch_size"] = (known or 1) * parts


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
        f"deepspeed: the config has {entry}={said!r}, but {other}; change one of them, or leave "
        "the entry out"
    )


def _section(config: Config, name: str, create: bool = True) -> Config:
    found = config.setdefault(name, {}) if create else config.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"deepspeed: the config's {name} is {found!r}; it must be a dict")
    return found


def _whole_number(config: Config, key: str, name: str = "") -> int:
    value: int = config[key]
    if not is_whole(value):
        raise ValueError(f"deepspeed: {name or key} is {value!r}; pass a positive integer")
    return value
