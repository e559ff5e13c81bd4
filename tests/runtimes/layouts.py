"""Train a model in a layout of processes, and the same model in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from examples.parallel_models import FAMILIES, Family, Sizes, schedule
from slapo.sharding.shards import shards_of
from slapo.wrapper import innermost

STEPS, BATCH, LENGTH, MICRO_BATCHES = 5, 4, 8, 2
SIZES = Sizes(hidden=16, layers=4, heads=4, length=LENGTH, vocabulary=40)
LEARNING_RATE = 1e-2


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that state counts; its step is linear in the gradient, so differences stay what
    they are (Adam divides by them where gradients are near 0).
    """
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def batches(
    family: Family, seed: int = 5, uneven: bool = False
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """One whole batch for each step; `uneven`: from sample to sample, fewer tokens have labels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, SIZES.vocabulary, (BATCH, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        labels = ids.clone()
        for sample in range(BATCH if uneven else 0):
            labels[sample, LENGTH - 2 * sample :] = -100
        found.append(family.batch({"input_ids": ids, "attention_mask": mask, "labels": labels}))
    return found


def rows(batch: Any, dp: int, size: int) -> Any:
    """The part of a batch that one data-parallel rank gets."""
    inputs, targets = batch
    part = slice(dp * BATCH // size, (dp + 1) * BATCH // size)
    return {name: tensor[part] for name, tensor in inputs.items()}, targets[part]


def model_of(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = Sizes(**{**SIZES.__dict__, "dropout": dropout})
    return FAMILIES[name].build(sizes).train()


def train_alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after all steps, without a schedule."""
    family, model = FAMILIES[name], model_of(name)
    optimizer = sgd(list(model.parameters()))
    losses = []
    for inputs, targets in batches(family, uneven=True):
        loss = family.loss(model(**inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copy.deepcopy(model.state_dict())


def train_laid_out(
    name: str, target: str, layout: tuple[int, int, int], dropout: float = 0.0, **options: Any
) -> tuple[list[float], Any]:
    """Losses of all steps, and the engine after them."""
    family = FAMILIES[name]
    mesh = slapo.init_mesh(*layout, device="cpu")
    place = {dim: mesh.get_local_rank(dim) for dim in ("pp", "dp", "tp")}
    sch = slapo.create_schedule(model_of(name, dropout), group=mesh["tp"])
    looped = options.get("pipeline_schedule") in ("interleaved_1f1b", "zero_bubble", "zbv")
    stages = layout[0] * (2 if looped else 1)
    schedule(sch, family, stages, checkpoint_ratio=options.pop("checkpoint_ratio", 0.0))
    engine, _ = slapo.build(
        sch,
        target=target,
        mesh=mesh,
        loss_fn=family.token_loss,
        optimizer=sgd,
        micro_batches=MICRO_BATCHES,
        **options,
    )
    slapo.set_random_seed(11, **{f"{dim}_rank": rank for dim, rank in place.items()})
    data = (rows(batch, place["dp"], layout[1]) for batch in batches(family, uneven=True))
    return [engine.train_batch(data).item() for _ in range(STEPS)], engine


def largest_difference(engine: Any, expected: dict[str, Tensor]) -> float:
    """Of this rank's parameters to the same parts of the expected ones."""
    largest = 0.0
    count = 0
    for path, module in engine.lowering.module.named_modules():
        inner = innermost(module)
        for leaf, parameter in inner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            whole = expected[_in_model(engine, name)]
            spec = shards_of(inner).get(leaf)
            part = spec.slice(whole) if spec is not None else whole
            value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert value.shape == part.shape, name
            largest = max(largest, (value - part).abs().max().item())
            count += 1
    assert count, "this rank holds parameters"
    return largest


def _in_model(engine: Any, name: str) -> str:
    """With several stages in a rank, their list puts a number in front."""
    return name.partition(".")[2] if len(engine.lowering.stages) > 1 else name


def compare(
    rank: int,
    world_size: int,
    names: list[str],
    target: str,
    layout: tuple[int, int, int],
    alone: dict[str, tuple[list[float], dict[str, Tensor]]],
    options: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """Model -> largest difference of losses and of parameters to the run in one process."""
    found = {}
    for name in names:
        losses, state = alone[name]
        laid_out, engine = train_laid_out(name, target, layout, **options)
        apart = max(abs(a - b) for a, b in zip(laid_out, losses, strict=True))
        found[name] = (apart, largest_difference(engine, state))
    return found


def train_twice(
    rank: int, world_size: int, names: list[str], target: str, layout: tuple[int, int, int]
) -> dict[str, tuple[list[float], bool]]:
    """Model -> losses with dropout, and whether a second run with the same seed is equal."""
    found = {}
    for name in names:
        runs = [train_laid_out(name, target, layout, dropout=0.1) for _ in range(2)]
        states = [engine.state_dict() for _, engine in runs]
        equal = runs[0][0] == runs[1][0] and all(
            torch.equal(states[0][key], states[1][key]) for key in states[0]
        )
        found[name] = (runs[0][0], equal)
    return found
