"""Runtimes that a schedule can be lowered to, as plug-ins."""

from slapo.framework_dialect.registry import (
    Dialect,
    get_dialect_cls,
    register_framework_dialect,
)

__all__ = ["Dialect", "get_dialect_cls", "register_framework_dialect"]
