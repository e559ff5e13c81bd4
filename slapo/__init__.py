"""Slapo: a schedule language for training large PyTorch models.

A schedule states how an unmodified ``nn.Module`` runs: which kernels, sharded how, checkpointed
where. The definition of the model stays untouched.

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
from slapo.random import (
    get_cuda_rng_tracker,
    get_rng_tracker,
    is_random_seed_set,
    set_random_seed,
)
from slapo.schedule import Schedule, create_schedule
from slapo.weights.meta import init_empty_weights

if TYPE_CHECKING:
    import slapo.autotune as autotune
    import slapo.cost as cost
    import slapo.env as env
    import slapo.initialization as initialization
    import slapo.tracer as tracer
    from slapo._build import build
    from slapo._replay import replay
    from slapo.autotune import Database, Space, Symbol
    from slapo.clip import clip_grad_norm_
    from slapo.cost import dryrun
    from slapo.mesh import init_mesh
    from slapo.model_schedule import apply_schedule
    from slapo.record import ScheduleRecord
    from slapo.verify import Verify
    from slapo.verify.bisect import bisect
    from slapo.verify.placement import check, register_place_rule

__version__ = "0.1.0"

__all__ = [
    "Database",
    "MissingPackageError",
    "ModulePattern",
    "Pattern",
    "PlacementError",
    "Primitive",
    "Schedule",
    "ScheduleRecord",
    "SlapoError",
    "Space",
    "Symbol",
    "TraceError",
    "VerificationError",
    "Verify",
    "apply_schedule",
    "autotune",
    "bisect",
    "build",
    "call_module",
    "check",
    "checkpoint",
    "clip_grad_norm_",
    "cost",
    "create_schedule",
    "dryrun",
    "env",
    "get_cuda_rng_tracker",
    "get_logger",
    "get_rng_tracker",
    "init_empty_weights",
    "init_mesh",
    "initialization",
    "is_random_seed_set",
    "list_primitives",
    "register_place_rule",
    "register_primitive",
    "replay",
    "set_random_seed",
    "tracer",
]

#: Names that are imported when they are first asked for, and where from.
_LATE = {
    "Database": "slapo.autotune",
    "ScheduleRecord": "slapo.record",
    "Space": "slapo.autotune",
    "Symbol": "slapo.autotune",
    "Verify": "slapo.verify",
    "apply_schedule": "slapo.model_schedule",
    "bisect": "slapo.verify.bisect",
    "build": "slapo._build",
    "check": "slapo.verify.placement",
    "clip_grad_norm_": "slapo.clip",
    "dryrun": "slapo.cost",
    "init_mesh": "slapo.mesh",
    "register_place_rule": "slapo.verify.placement",
    "replay": "slapo._replay",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _LATE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
