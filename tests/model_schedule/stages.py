"""Recipes in a layout of processes, trained beside the model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import slapo
from slapo.model_schedule import apply_schedule
from slapo.model_schedule.losses import OwnLoss, own_loss
from tests.model_schedule.models import MODELS
from tests.runtimes.alone import Alone, compare
from tests.runtimes.layouts import sgd

STEPS, BATCH, LENGTH = 3, 4, 12


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
