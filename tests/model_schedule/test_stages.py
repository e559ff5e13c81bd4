"""Recipes with pipeline stages, alone and with all else, against training in one process."""

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule
from slapo.model_schedule.losses import OwnLoss, own_loss
from slapo.model_schedule.stage_cuts import chosen_cuts, even_cuts, layer_costs
from tests.distributed import run_distributed
from tests.model_schedule.models import MODELS
from tests.model_schedule.modes import UNCUT
from tests.runtimes.alone import Alone, compare
from tests.runtimes.layouts import sgd

STEPS, BATCH, LENGTH = 3, 4, 12
#: Of losses, norms and values after three clipped steps, in float32.
TOLERANCE = 1e-5
CUT = sorted(set(MODELS) - set(UNCUT))
#: Twins that differ in nothing a stage could see.
DISTINCT = sorted(set(CUT) - {"roberta", "mistral", "qwen2", "gemma3_text"})


ALL: dict[str, Any] = {"sequence_parallel": True, "ckpt_ratio": 0.5}
FUSED: dict[str, Any] = {"fused_loss": True}
WHOLE_TABLE: dict[str, Any] = {"parallel_vocabulary": False}
TOGETHER = [key for key in DISTINCT if key != "wideresnet"]


class Loss:
    """Sum over tokens (or samples), and how many count, of what a model gives."""

    def __init__(self, shift: bool) -> None:
        self.shift = shift

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.shift:
            labels = labels[:, 1:]
        count = (labels != -100).sum()
        logits = output if isinstance(output, Tensor) else output.logits
        if logits is None:
            return output.loss * count, count
        flat = (logits[:, :-1] if self.shift else logits).flatten(0, -2)
        return F.cross_entropy(flat, labels.flatten(), reduction="sum"), count

    def mean(self, output: Any, labels: Tensor) -> Tensor:
        total, count = self(output, labels)
        return total / count


def batches(key: str, labeled: bool) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Inputs and labels; `labeled`: with labels among the inputs."""
    found = []
    for _ in range(STEPS):
        inputs = dict(MODELS[key].inputs(BATCH, LENGTH))
        labels = inputs.get("labels")
        labels = torch.arange(BATCH) % 10 if labels is None else labels
        if not labeled:
            inputs.pop("labels", None)
            if key == "t5":
                inputs["decoder_input_ids"] = F.pad(labels.clamp(min=0), (1, -1))
        found.append((inputs, labels))
    return found


def compare_keys(
    rank: int,
    world_size: int,
    keys: list[str],
    layout: tuple[int, int, int],
    options: dict[str, Any],
    engine_options: dict[str, Any],
) -> dict[str, dict[str, float]]:
    """Key -> largest differences of losses, norms and values after some steps."""
    found = {}
    given = dict(engine_options)
    target = given.pop("target", "torch")
    for key in keys:
        changes = given.pop("changes", {})
        mesh = slapo.init_mesh(*layout, device="cpu")
        model = MODELS[key].build(**changes)
        own = own_loss(model)
        loss = Loss(isinstance(own, OwnLoss) and own.moved)
        labeled = bool(options.get("fused_loss"))
        reference = Alone(MODELS[key].build(**changes), loss.mean, optimizer=sgd, clip=1.0)
        slapo.set_random_seed(11, mesh=mesh)
        cuts = {"pipeline_cuts": layout[0]} if layout[0] > 1 else {}
        sch = apply_schedule(model, key, group=mesh["tp"], **{**cuts, **options})
        base: dict[str, Any] = {"loss_fn": loss, "optimizer": sgd, "clip_grad_norm": 1.0}
        # Statistics over a batch are not those over its parts.
        base["micro_batches"] = 1 if key == "wideresnet" else max(2, layout[0])
        if target == "torch":
            base["pipeline_schedule"] = "gpipe" if key == "wideresnet" else "1f1b"
        engine, _ = slapo.build(sch, target=target, mesh=mesh, **{**base, **given})
        found[key] = compare(engine, reference, batches(key, labeled))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "layout", "options", "engine"),
    [
        (CUT[::5], (2, 1, 1), {}, {}),
        *(
            pytest.param(CUT[part::5], (2, 1, 1), {}, {}, marks=pytest.mark.wide)
            for part in range(1, 5)
        ),
        pytest.param(["t5", "wideresnet"], (4, 1, 1), {}, {}, marks=pytest.mark.wide),
        pytest.param(["bert", "llama"], (4, 1, 1), {}, {}, marks=pytest.mark.wide),
        (TOGETHER[::8], (2, 1, 2), ALL, {}),
        *(
            pytest.param(TOGETHER[part::8], (2, 1, 2), ALL, {}, marks=pytest.mark.wide)
            for part in (2, 4, 6)
        ),
        pytest.param(["gpt2"], (2, 1, 2), WHOLE_TABLE, {}, marks=pytest.mark.wide),
        pytest.param(["gpt2"], (2, 2, 2), ALL, {}, marks=pytest.mark.wide),
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
