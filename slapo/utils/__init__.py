"""Helpers for inspecting modules and resource usage."""

from typing import Any

from slapo.late import attribute


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, {})
