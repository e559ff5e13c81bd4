"""Ready schedules of model families: recipes as tables, applied by a few shared functions."""

from slapo.model_schedule.api import apply_schedule
from slapo.model_schedule.drafts import Draft, draft
from slapo.model_schedule.gpt2 import gen_embedding_hooks
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.registry import (
    recipe_keys,
    recipe_of,
    register_recipe,
    register_schedule,
    unregister,
)

__all__ = [
    "Draft",
    "Recipe",
    "Stack",
    "apply_schedule",
    "draft",
    "gen_embedding_hooks",
    "recipe_keys",
    "recipe_of",
    "register_recipe",
    "register_schedule",
    "unregister",
]
