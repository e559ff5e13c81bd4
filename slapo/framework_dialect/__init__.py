"""Runtimes that a schedule can be lowered to, as plug-ins."""

from slapo.framework_dialect.deepspeed.runtime import DeepSpeedRuntime
from slapo.framework_dialect.megatron.runtime import MegatronRuntime
from slapo.framework_dialect.pytorch.runtime import TorchRuntime
from slapo.framework_dialect.registry import (
    get_dialect_cls,
    register_framework_dialect,
)
from slapo.framework_dialect.runtime import Engine, Lowering, Runtime

__all__ = [
    "DeepSpeedRuntime",
    "Engine",
    "Lowering",
    "MegatronRuntime",
    "Runtime",
    "TorchRuntime",
    "get_dialect_cls",
    "register_framework_dialect",
]
