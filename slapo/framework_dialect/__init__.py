"""Runtimes that a schedule can be lowered to, as plug-ins.

Slapo's own runtimes are imported when a schedule is built for them: :func:`get_dialect_cls`.
"""

from typing import Any

from slapo.framework_dialect.engine import Engine
from slapo.framework_dialect.registry import get_dialect_cls, register_framework_dialect
from slapo.framework_dialect.runtime import Lowering, Runtime
from slapo.late import attribute

__all__ = [
    "Engine",
    "Lowering",
    "Runtime",
    "get_dialect_cls",
    "register_framework_dialect",
]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, {})
