"""Recipes and schedules by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slapo.errors import with_nearest
from slapo.model_schedule.recipe import Recipe

#: Key for any model: the recipe of its family, or else a draft.
AUTO = "auto"
#: Key that derives a schedule from the model.
DRAFT = "draft"

#: Function that makes a family's recipe for a config.
RecipeMaker = Callable[[Any], Recipe]
#: User-defined schedule: ``(model, **config) -> Schedule``.
ScheduleMaker = Callable[..., Any]

_RECIPES: dict[str, RecipeMaker] = {}
_SCHEDULES: dict[str, ScheduleMaker] = {}


def register_recipe(*keys: str) -> Callable[[RecipeMaker], RecipeMaker]:
    """Register ``recipe(config)`` for :func:`apply_schedule` under its keys, as a decorator.

    Parameters
    ----------
    *keys
        New keys, usually the ``model_type`` of the config.

    Raises
    ------
    ValueError
        If no key is given, or one is taken.

    Examples
    --------
    >>> from slapo.model_schedule.recipe import Recipe, Stack
    >>> @register_recipe("my_family")
    ... def my_family(config):
    ...     layer = {"mlp": "sum_grad", "mlp.up": "columns", "mlp.down": "rows"}
    ...     return Recipe((Stack("blocks", layer, last="norm"),), counts="")
    >>> "my_family" in recipe_keys()
    True
    >>> unregister("my_family")
    """
    _check_new(keys)

    def register(maker: RecipeMaker) -> RecipeMaker:
        _RECIPES.update(dict.fromkeys(keys, maker))
        return maker

    return register


def register_schedule(key: str | None = None) -> Callable[[ScheduleMaker], ScheduleMaker]:
    """Register a function that schedules models for :func:`apply_schedule`, as a decorator.

    The function is called with the arguments of :func:`apply_schedule` except the key: a model or a
    schedule, and the given keyword arguments.

    Parameters
    ----------
    key
        A new key; None takes the name of the function.

    Raises
    ------
    ValueError
        If the key is taken.

    Examples
    --------
    >>> import slapo
    >>> @register_schedule()
    ... def all_recomputed(model, **config):
    ...     sch = slapo.create_schedule(model)
    ...     return sch.checkpoint()
    >>> unregister("all_recomputed")
    """

    def register(maker: ScheduleMaker) -> ScheduleMaker:
        name = maker.__name__ if key is None else key
        _check_new((name,))
        _SCHEDULES[name] = maker
        return maker

    return register


def unregister(key: str) -> None:
    """Remove a key.

    Raises
    ------
    KeyError
        If there is no such key.
    """
    for table in (_RECIPES, _SCHEDULES):
        if key in table:
            del table[key]
            return
    raise KeyError(_unknown(key))


def recipe_keys() -> list[str]:
    """Return the keys of all recipes."""
    return sorted(_RECIPES)


def schedule_of(key: str) -> ScheduleMaker | None:
    """Return a user's function, or None if the key is that of a recipe."""
    if key not in _RECIPES and key not in _SCHEDULES:
        raise KeyError(_unknown(key))
    return _SCHEDULES.get(key)


def maker_of(key: str) -> RecipeMaker | ScheduleMaker | None:
    """Return the function registered under a key, or None for ``"auto"``."""
    return _RECIPES.get(key) or _SCHEDULES.get(key)


def recipe_of(key: str, config: Any) -> Recipe:
    """Return the recipe of a family for a config.

    Raises
    ------
    KeyError
        If there is no such recipe.
    """
    if key not in _RECIPES:
        raise KeyError(_unknown(key))
    return _RECIPES[key](config)


def have_one_recipe(key: str, other: str) -> bool:
    """Return whether both are keys of the same recipe."""
    return key == other or _RECIPES.get(key) is _RECIPES.get(other)


def description(key: str) -> str:
    """Return the first line of a recipe's docstring."""
    lines = (_RECIPES[key].__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def _check_new(keys: tuple[str, ...]) -> None:
    if not keys or not all(isinstance(key, str) and key for key in keys):
        raise ValueError(f"got the keys {keys!r}; pass names, such as the config's model_type")
    taken = [key for key in keys if key in (AUTO, DRAFT, *_RECIPES, *_SCHEDULES)]
    if taken:
        raise ValueError(f"{taken} already have a schedule; pass other keys, or unregister() them")


def _unknown(key: Any) -> str:
    known = sorted([AUTO, DRAFT, *_RECIPES, *_SCHEDULES])
    return with_nearest(str(key), known, f"there is no schedule {key!r}; known are {known}")
