"""The placement check passes every recipe, and finds what is left out of one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import slapo
from slapo.model_schedule import (
    Stack,
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
def changed_recipe(key: str, changes: dict[str, Any]) -> Iterator[None]:
    """The recipe of a key with other entries, as "changed"; `splits` may leave some out."""
    recipe = recipe_of(key, MODELS[key].build().config)
    splits: dict[str, str | None] = changes.pop("splits", {})

    def of_layer(stack: Stack) -> dict[str, str]:
        others = {path: words for path, words in stack.splits.items() if path not in splits}
        return {**others, **{path: words for path, words in splits.items() if words is not None}}

    stacks = tuple(replace(stack, splits=of_layer(stack)) for stack in recipe.stacks)
    changed = replace(recipe, stacks=stacks, **changes)
    register_recipe("changed")(lambda config: changed)
    try:
        yield
    finally:
        unregister("changed")


@pytest.mark.parametrize(
    ("key", "splits"),
    [
        ("qwen3", {"self_attn.q_norm self_attn.k_norm": None}),
        ("gpt2", {"attn": "sum_grad"}),
        ("gpt2", {"attn.c_attn": "columns"}),
        ("t5", {"layer.0.SelfAttention.relative_attention_bias": None}),
    ],
)
def test_a_table_that_lacks_something_is_refused(key: str, splits: dict[str, Any]) -> None:
    with changed_recipe(key, {"splits": splits}), fake_world(2, 1):
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
    ("key", "changes", "name", "value"),
    [
        ("llama", {"embeddings": "embed_token"}, "embeddings", "embed_token"),
        ("llama", {"heads": "lm_heads"}, "heads", "lm_heads"),
        ("llama", {"counts": "num_heads"}, "counts", "num_heads"),
        ("gpt2", {"splits": {"mlp.drop": "fork_rng"}}, "splits", r"h.*.mlp.drop"),
        ("gpt2", {"splits": {"attn": "divide(heads)"}}, "attributes", "transformer.h.*.attn.heads"),
        ("llama", {"splits": {"mlp": "regroup(of, 1)"}}, "attributes", "model.layers.*.mlp.of"),
    ],
)
def test_a_table_that_names_what_is_not_there(
    key: str, changes: dict[str, Any], name: str, value: str
) -> None:
    says = f"names entries that .* lack: {{'{name}': '{re.escape(value)}"
    with changed_recipe(key, changes), fake_world(2, 1):
        with pytest.raises(ValueError, match=says):
            apply_schedule(MODELS[key].build(), "changed")


def test_a_table_that_names_what_a_kernel_replaces() -> None:
    splits = {"attn.attention.attn_dropout": "sum"}
    with changed_recipe("gpt_neo", {"splits": splits}), fake_world(2, 1):
        says = r"replaced \['h\.\*\.attn\.attention\.attn_dropout'\].*attn_op_name=None"
        with pytest.raises(ValueError, match=says):
            apply_schedule(MODELS["gpt_neo"].build(), "changed")
