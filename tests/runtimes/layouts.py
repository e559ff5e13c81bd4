"""Train a model in a layout of processes, and the same model in one process."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from examples.parallel_models import FAMILIES, Family, Sizes, schedule
from tests.runtimes.alone import Alone, compare, of_this_rank

STEPS, BATCH, LENGTH, MICRO_BATCHES = 5, 4, 8, 2
SIZES = Sizes(hidden=16, layers=4, heads=4, length=LENGTH, vocabulary=40)
LEARNING_RATE = 1e-2

#: float32 sums over ranks and micro-batches are in another order, so that each is off by some 1e-7
#: of its size; five steps of momentum SGD let that grow to a few 1e-6 on parameters and losses of
#: size 1 to 4.
TOLERANCE = 2e-5


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that state counts; its step is linear in the gradient, so differences stay what
    they are (Adam divides by them where gradients are near 0).
    """
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As Megatron-Core sets it up below. With so large an epsilon, steps are as good as linear in
    the gradient.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.0)


def _config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(**{"weight_decay": 0.0, **fields})


megatron_adam = partial(_config, optimizer="adam", lr=1e-2, adam_eps=1e-2)
megatron_sgd = partial(_config, optimizer="sgd", lr=LEARNING_RATE)


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


def model_of(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = Sizes(**{**SIZES.__dict__, "dropout": dropout})
    return FAMILIES[name].build(sizes).train()


def alone(name: str, **options: Any) -> Alone:
    """A family's model in one process."""
    return Alone(model_of(name), FAMILIES[name].loss, **{"optimizer": sgd, **options})


def build(
    name: str,
    target: str,
    layout: tuple[int, int, int],
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """The engine of a family's model, or of another one of its class, in a layout."""
    family = FAMILIES[name]
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model or model_of(name), group=mesh["tp"])
    looped = options.get("pipeline_schedule") in ("interleaved_1f1b", "zero_bubble", "zbv")
    stages = layout[0] * (2 if looped else 1)
    schedule(sch, family, stages, checkpoint_ratio=options.pop("checkpoint_ratio", 0.0))
    given = {"loss_fn": family.token_loss, "optimizer": sgd, "micro_batches": MICRO_BATCHES}
    slapo.set_random_seed(11, mesh=mesh)
    return slapo.build(sch, target=target, mesh=mesh, **{**given, **options})[0]


def check_families(
    names: Iterable[str], target: str, layout: tuple[int, int, int], **options: Any
) -> None:
    """Train families with uneven labels, in the layout and in one process."""
    clip = options.get("clip_grad_norm")
    for name in names:
        family = FAMILIES[name]
        reference = alone(name, clip=clip)
        engine = build(name, target, layout, **options)
        apart = compare(engine, reference, batches(family, uneven=True))
        assert max(apart.values()) < TOLERANCE, (name, apart)
        assert len(set(reference.losses)) == STEPS, "it learns"
        assert min(reference.norms) > (clip or 0), "each step is clipped"


def check_repeats(name: str, target: str, layout: tuple[int, int, int]) -> None:
    """Two runs with dropout and one seed are equal to the bit."""
    runs = []
    for _ in range(2):
        engine = build(name, target, layout, model_of(name, dropout=0.1))
        data = (of_this_rank(engine.mesh, batch) for batch in batches(FAMILIES[name]))
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        runs.append((losses, engine.state_dict()))
    (losses, state), (again, state_again) = runs
    assert losses == again, name
    assert all(torch.equal(state[key], state_again[key]) for key in state), name
