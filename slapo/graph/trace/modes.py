"""Constants that depend on the mode of a module."""

from __future__ import annotations

from typing import Any

#: In ``node.meta``: which operation of other graphs is this one.
TWIN = "slapo_twin"


def select_by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """One of two constants."""
    return in_training if training else in_evaluation
