"""Slapo: a schedule language for training large PyTorch models.

A schedule sets how an unmodified ``nn.Module`` runs: kernels, sharding, checkpointing, pipeline
stages. The model definition stays untouched.

Examples
--------
>>> import torch.nn as nn
>>> import slapo
>>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
>>> _ = sch["0"].checkpoint()
>>> model, _ = slapo.build(sch)
"""

from typing import TYPE_CHECKING, Any

from slapo.errors import (
    MissingPackageError,
    PlacementError,
    SlapoError,
    TraceError,
    VerificationError,
)
from slapo.late import attribute
from slapo.logger import get_logger
from slapo.op.checkpoint import checkpoint
from slapo.pattern import ModulePattern, Pattern, call_module
from slapo.primitives.base import Primitive, list_primitives, register_primitive
from slapo.random import get_rng_tracker, set_random_seed
from slapo.schedule import Schedule, create_schedule
from slapo.weights.meta import init_empty_weights

if TYPE_CHECKING:
    from slapo import autotune as autotune
    from slapo import cost as cost
    from slapo import env as env
    from slapo import initialization as initialization
    from slapo import tracer as tracer
    from slapo._build import build
    from slapo._replay import replay
    from slapo.autotune import Database as Database
    from slapo.autotune import Space as Space
    from slapo.autotune import Symbol as Symbol
    from slapo.clip import clip_grad_norm_
    from slapo.cost import dryrun, suggest
    from slapo.derive.rules import register_axis_rule
    from slapo.framework_dialect import Engine
    from slapo.mesh import init_mesh
    from slapo.model_schedule import apply_schedule, draft
    from slapo.pretrained import load_pretrained, save_pretrained
    from slapo.record import ScheduleRecord
    from slapo.saving.steps import checkpoints
    from slapo.training import fit
    from slapo.verify import Verify
    from slapo.verify.bisect import bisect
    from slapo.verify.placement import check, register_place_rule

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "MissingPackageError",
    "ModulePattern",
    "Pattern",
    "PlacementError",
    "Primitive",
    "Schedule",
    "ScheduleRecord",
    "SlapoError",
    "TraceError",
    "VerificationError",
    "Verify",
    "apply_schedule",
    "bisect",
    "build",
    "call_module",
    "check",
    "checkpoint",
    "checkpoints",
    "clip_grad_norm_",
    "create_schedule",
    "draft",
    "dryrun",
    "fit",
    "get_logger",
    "get_rng_tracker",
    "init_empty_weights",
    "init_mesh",
    "list_primitives",
    "load_pretrained",
    "register_axis_rule",
    "register_place_rule",
    "register_primitive",
    "replay",
    "save_pretrained",
    "set_random_seed",
    "suggest",
]

#: Lazily imported name -> the module that defines it.
_LATE = {
    "Database": "slapo.autotune",
    "Engine": "slapo.framework_dialect",
    "ScheduleRecord": "slapo.record",
    "Space": "slapo.autotune",
    "Symbol": "slapo.autotune",
    "Verify": "slapo.verify",
    "apply_schedule": "slapo.model_schedule",
    "bisect": "slapo.verify.bisect",
    "build": "slapo._build",
    "check": "slapo.verify.placement",
    "checkpoints": "slapo.saving.steps",
    "clip_grad_norm_": "slapo.clip",
    "draft": "slapo.model_schedule",
    "dryrun": "slapo.cost",
    "fit": "slapo.training",
    "get_cuda_rng_tracker": "slapo.random",
    "init_mesh": "slapo.mesh",
    "is_random_seed_set": "slapo.random",
    "load_pretrained": "slapo.pretrained",
    "register_axis_rule": "slapo.derive.rules",
    "register_place_rule": "slapo.verify.placement",
    "replay": "slapo._replay",
    "save_pretrained": "slapo.pretrained",
    "suggest": "slapo.cost",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _LATE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATE})
