"""Runtimes that a schedule can be lowered to, as plug-ins.

Those that Slapo ships are imported when a schedule is built for them: :func:`get_dialect_cls`.
"""

from slapo.framework_dialect.engine import Engine
from slapo.framework_dialect.registry import get_dialect_cls, register_framework_dialect
from slapo.framework_dialect.runtime import Lowering, Runtime

__all__ = [
    "Engine",
    "Lowering",
    "Runtime",
    "get_dialect_cls",
    "register_framework_dialect",
]
