"""What ``slapo recipes`` prints."""

from __future__ import annotations

import inspect
from typing import Any

from slapo.errors import MissingPackageError
from slapo.model_schedule.api import apply_schedule
from slapo.model_schedule.registry import AUTO, description, recipe_keys, recipe_of

_AUTO = (
    "Any model of Transformers whose config carries a tensor-parallel plan; in one process any "
    "with a list of layers."
)


def list_recipes() -> str:
    """Keys, and what stands behind them."""
    keys = recipe_keys()
    width = max(map(len, keys))
    lines = [f"{key:{width}}  {description(key)}" for key in keys]
    return "\n".join(
        [*lines, f"{AUTO:{width}}  {_AUTO}", "", "Table and options of one: slapo recipes KEY"]
    )


def show_recipe(key: str) -> str:
    """The table of a family with its default sizes, and the options of all.

    Raises
    ------
    KeyError
        If there is no such recipe.
    """
    if key == AUTO:
        return f"{_AUTO}\n\nOptions of apply_schedule:\n{_options()}"
    recipe = recipe_of(key, _default_config(key))
    return f"{description(key)}\n\n{recipe}\n\nOptions of apply_schedule:\n{_options()}"


def _default_config(key: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError("transformers", "hf", "a recipe's table") from error
    try:
        return transformers.AutoConfig.for_model(key)
    except ValueError:  # no family of Transformers
        return None


def _options() -> str:
    """The table in the manual of ``apply_schedule``."""
    text = inspect.getdoc(apply_schedule) or ""
    _, _, after = text.partition("**options\n")
    table = after.partition("\nReturns\n")[0]
    lines = [line for line in table.splitlines() if line.strip(" =")]
    return "\n".join(f"  {line.strip()}" if line.startswith("    ``") else line for line in lines)
