"""The placement check passes every recipe, and finds what is left out of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import slapo
from slapo.model_schedule import (
    apply_schedule,
    recipe_keys,
    recipe_of,
    register_recipe,
    unregister,
)
from slapo.verify.placement import check
from slapo.verify.placement.offline import fake_world
from tests.model_schedule.models import MODELS, shallow
from tests.model_schedule.modes import MODES, REFUSED

CHECKED = ["layers", "slices", "fused", "tokens", "own", "all"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
@pytest.mark.parametrize("key", recipe_keys())
def test_recipes_pass(key: str, ranks: int) -> None:
    for mode in CHECKED:
        if (key, mode) in REFUSED:
            continue
        with fake_world(ranks, ranks - 1):
            slapo.set_random_seed(1, tp_rank=ranks - 1)
            sch = apply_schedule(MODELS[key].build(**shallow(key)), key, **MODES[mode])
            check(sch, MODELS[key].inputs(3, 12))


@contextmanager
def changed_recipe(key: str, changes: dict[str, Any], of_regions: bool = True) -> Iterator[None]:
    """The recipe of a key with other entries, as "changed"."""
    recipe = recipe_of(key, MODELS[key].build().config)
    if of_regions:
        stacks = tuple(
            replace(stack, regions=tuple(replace(region, **changes) for region in stack.regions))
            for stack in recipe.stacks
        )
        changes = {"stacks": stacks}
    changed = replace(recipe, **changes)
    register_recipe("changed")(lambda config: changed)
    try:
        yield
    finally:
        unregister("changed")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("qwen3", {"inside": ""}),
        ("gpt2", {"counts": ""}),
        ("gpt2", {"blocks": 1}),
        ("t5", {"by_head": ""}),
    ],
)
def test_a_table_that_lacks_something_is_refused(key: str, changes: dict[str, Any]) -> None:
    with changed_recipe(key, changes), fake_world(2, 1):
        # Before anything changes where it names too little, else as a recipe of no family.
        with pytest.raises(
            (slapo.PlacementError, ValueError), match=r"in a sharded block|fails the check"
        ):
            apply_schedule(MODELS[key].build(), "changed")
        if key == "gpt2":
            sch = apply_schedule(MODELS[key].build(), "changed", check=False)
            with pytest.raises(slapo.PlacementError):
                check(sch, MODELS[key].inputs(3, 12))


@pytest.mark.parametrize(
    ("key", "changes", "of_regions"),
    [
        ("llama", {"embeddings": "embed_token"}, False),
        ("llama", {"heads": "lm_heads"}, False),
        ("llama", {"counts": "num_heads"}, False),
        ("t5", {"forked": "layer.1.DenseReluDense.drop"}, True),
        ("t5", {"by_head": "layer.0.SelfAttention.relative_bias"}, True),
        ("gpt2", {"counts": "attn.heads"}, True),
        ("llama", {"groups": "self_attn.groups"}, True),
    ],
)
def test_a_table_that_names_what_is_not_there(key: str, changes: Any, of_regions: bool) -> None:
    ((name, value),) = changes.items()
    says = f"names entries that .* lack: {{'{name}.*': '{value}'}}"
    with changed_recipe(key, changes, of_regions), fake_world(2, 1):
        with pytest.raises(ValueError, match=says):
            apply_schedule(MODELS[key].build(), "changed")
