"""Recipes with pipeline stages, alone and with all else, against training in one process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from torch import nn

from slapo.model_schedule import apply_schedule
from slapo.model_schedule.stage_cuts import chosen_cuts, even_cuts, layer_costs
from tests.distributed import run_distributed
from tests.model_schedule.models import MODELS
from tests.model_schedule.modes import UNCUT
from tests.model_schedule.stages import compare_keys

#: Of losses, norms and values after three clipped steps, in float32.
TOLERANCE = 1e-5
CUT = sorted(set(MODELS) - set(UNCUT))
#: Twins that differ in nothing a stage could see.
DISTINCT = sorted(set(CUT) - {"roberta", "mistral", "qwen2", "gemma3_text"})


ALL: dict[str, Any] = {"sequence_parallel": True, "ckpt_ratio": 0.5}
FUSED: dict[str, Any] = {"fused_loss": True}
TOGETHER = [key for key in DISTINCT if key != "wideresnet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "layout", "options", "engine"),
    [
        (CUT[::5], (2, 1, 1), {}, {}),
        *(
            pytest.param(CUT[part::5], (2, 1, 1), {}, {}, marks=pytest.mark.wide)
            for part in range(1, 5)
        ),
        (["t5", "wideresnet"], (4, 1, 1), {}, {}),
        pytest.param(["bert", "llama"], (4, 1, 1), {}, {}, marks=pytest.mark.wide),
        (TOGETHER[::8], (2, 1, 2), ALL, {}),
        *(
            pytest.param(TOGETHER[part::8], (2, 1, 2), ALL, {}, marks=pytest.mark.wide)
            for part in (2, 4, 6)
        ),
        (["gpt2"], (2, 1, 2), {"parallel_vocabulary": False}, {}),
        (["gpt2"], (2, 2, 2), ALL, {}),
        # The loss is computed within the head, around which an engine has its weight whole.
        (["bert", "llama"], (1, 2, 1), FUSED, {"data_parallel": "fsdp"}),
        (["bert"], (1, 2, 1), FUSED, {"target": "deepspeed", "zero": 3}),
    ],
)
def test_stages_train_as_one_process_does(
    keys: list[str],
    layout: tuple[int, int, int],
    options: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    ranks = layout[0] * layout[1] * layout[2]
    for found in run_distributed(compare_keys, ranks, keys, layout, options, engine, timeout=400):
        for key in keys:
            assert all(value < TOLERANCE for value in found[key].values()), (key, found[key])


@pytest.mark.parametrize("key", sorted(UNCUT))
def test_families_that_cannot_be_cut(key: str) -> None:
    with pytest.raises(ValueError, match=UNCUT[key]):
        apply_schedule(MODELS[key].build(), key, pipeline_cuts=2)


# --- where stages end ----------------------------------------------------------------------------
def test_even_cuts_are_the_best() -> None:
    """Against all ways to cut."""
    chance = random.Random(1)
    for _ in range(200):
        costs = [chance.choice([1, 2, 3, 7.5]) for _ in range(chance.randint(1, 8))]
        stages = chance.randint(1, len(costs))
        best = min(
            dearest(costs, ends)
            for ends in itertools.combinations(range(len(costs) - 1), stages - 1)
        )
        ends = even_cuts(costs, stages)
        assert len(ends) == stages - 1
        assert ends == sorted(set(ends))
        assert dearest(costs, ends) == pytest.approx(best)
    assert even_cuts([1] * 5, 3) == [0, 2]  # the first of those that are as good
    assert chosen_cuts([[0], [1]], [2, 3]) == [0, 3]  # of two stacks


def dearest(costs: list[float], ends: Any) -> float:
    edges = [0, *(end + 1 for end in ends), len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


def test_a_head_counts_for_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 100))
    assert layer_costs(model, ["0", "1"], "2") == [4.0, 204.0]
