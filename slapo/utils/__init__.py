"""Helpers for inspecting modules and resource usage."""

from slapo.utils import common, report

__all__ = ["common", "report"]
