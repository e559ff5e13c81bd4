"""The placement check passes every recipe, and finds what is left out of one."""

from __future__ import annotations

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
from tests.model_schedule.models import MODELS
from tests.model_schedule.modes import MODES, REFUSED

CHECKED = ["layers", "slices", "fused", "tokens", "own", "all"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key", recipe_keys())
def test_recipes_pass(key: str, ranks: int) -> None:
    for mode in CHECKED:
        if (key, mode) in REFUSED:
            continue
        with fake_world(ranks, ranks - 1):
            slapo.set_random_seed(1, tp_rank=ranks - 1)
            sch = apply_schedule(MODELS[key].build(), key, **MODES[mode])
            check(sch, MODELS[key].inputs(3, 12))


@pytest.mark.parametrize(
    ("key", "field"),
    [("qwen3", "inside"), ("gpt2", "counts"), ("gpt2", "blocks"), ("t5", "by_head")],
)
def test_a_table_that_lacks_something_is_refused(key: str, field: str) -> None:
    @register_recipe("lacking")
    def lacking(config: Any) -> Any:
        recipe = recipe_of(key, config)
        changed = {"blocks": 1}.get(field, "")
        stacks = []
        for stack in recipe.stacks:
            regions = tuple(replace(region, **{field: changed}) for region in stack.regions)
            stacks.append(replace(stack, regions=regions))
        return replace(recipe, stacks=tuple(stacks))

    try:
        with fake_world(2, 1):
            # Before anything changes where it names too little, else as a recipe of no family.
            with pytest.raises((slapo.PlacementError, ValueError), match=r"is split|does not hold"):
                apply_schedule(MODELS[key].build(), "lacking")
            if field in ("counts", "blocks"):
                sch = apply_schedule(MODELS[key].build(), "lacking", check=False)
                with pytest.raises(slapo.PlacementError):
                    check(sch, MODELS[key].inputs(3, 12))
    finally:
        unregister("lacking")
