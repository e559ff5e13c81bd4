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

import importlib
from typing import TYPE_CHECKING, Any

# Bound for `slapo.env` and so on; the other modules are by the imports below.
from slapo import env, initialization, tracer
from slapo.build import build
from slapo.clip import clip_grad_norm_
from slapo.errors import (
    MissingPackageError,
    PlacementError,
    SlapoError,
    TraceError,
    VerificationError,
)
from slapo.logger import get_logger
from slapo.mesh import init_mesh
from slapo.op.checkpoint import checkpoint
from slapo.pattern import ModulePattern, Pattern, call_module
from slapo.primitives.base import Primitive, list_primitives, register_primitive
from slapo.random import (
    get_cuda_rng_tracker,
    get_rng_tracker,
    is_random_seed_set,
    set_random_seed,
)
from slapo.record import ScheduleRecord
from slapo.replay import replay
from slapo.schedule import Schedule, create_schedule
from slapo.verify import Verify
from slapo.verify.bisect import bisect
from slapo.verify.placement import check, register_place_rule
from slapo.weights.meta import init_empty_weights

if TYPE_CHECKING:
    import slapo.autotune as autotune
    import slapo.cost as cost
    from slapo.autotune import Database, Space, Symbol
    from slapo.cost import dryrun

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

#: What is imported when it is first asked for: few programs tune, or ask for costs.
_LATE = {
    "autotune": "slapo.autotune",
    "cost": "slapo.cost",
    "Database": "slapo.autotune.database",
    "Space": "slapo.autotune.symbols",
    "Symbol": "slapo.autotune.symbols",
    "dryrun": "slapo.cost.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATE[name])
    return module if name in ("autotune", "cost") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
