"""One engine for all targets: its whole surface, on real processes."""

import copy
import math
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.agreement import gathered
from slapo.framework_dialect.pytorch.data_parallel import fsdp_units
from tests.primitives.models import Stack, TwoLayers
from tests.runtimes.alone import Alone, compare, largest_difference, of_this_rank, whole
from tests.runtimes.contract import (
    BATCH,
    LENGTH,
    TOLERANCE,
    VOCABULARY,
    alone,
    data,
    halving,
    loss_fn,
    make,
    seeded,
    sgd,
)
from tests.runtimes.ranks import RUNTIMES, error_of, on_ranks

pytestmark = pytest.mark.slow

STEPS, CLIP = 4, 0.1

#: Layouts, and what else is chosen, for each target.
WAYS: dict[str, list[tuple[tuple[int, int, int], dict[str, Any]]]] = {
    "torch": [
        ((2, 1, 1), {}),
        ((1, 2, 1), {}),
        ((1, 2, 1), {"data_parallel": "fsdp"}),
        ((2, 1, 1), {"data_parallel": "fsdp"}),
        ((1, 1, 2), {}),
    ],
    "deepspeed": [
        ((2, 1, 1), {"zero": 0}),
        ((2, 1, 1), {"zero": 1}),
        ((1, 2, 1), {"zero": 0}),
        ((1, 2, 1), {"zero": 2}),
        ((1, 2, 1), {"zero": 3}),
        ((1, 1, 2), {"zero": 1}),
    ],
    "megatron": [((2, 1, 1), {}), ((1, 2, 1), {}), ((1, 1, 2), {})],
}
CASES = [(target, *way) for target, ways in WAYS.items() for way in ways]
OF_TORCH = [
    # HSDP: replicas of parameters that neighbors shard, in a pipeline too.
    ("torch", (1, 4, 1), {"data_parallel": "fsdp", "shard_size": 2, "micro_batches": 2}),
    ("torch", (2, 2, 1), {"data_parallel": "fsdp", "shard_size": 1, "micro_batches": 2}),
    ("torch", (2, 2, 1), {"data_parallel": "fsdp", "micro_batches": 2}),
    # That it is dynamo's graphs that run is seen; which compiler works on them is the user's.
    ("torch", (1, 2, 1), {"compile": {"backend": "aot_eager"}}),
    ("torch", (2, 1, 1), {"compile": {"backend": "aot_eager"}}),
]


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(
        list(value.values()) if isinstance(value, dict) else getattr(value, "__name__", value)
    )


def test_every_runtime_has_its_ways() -> None:
    assert WAYS.keys() == RUNTIMES.keys()


# --- losses that count ---------------------------------------------------------------------------
def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Over tokens that have a target."""
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def uneven() -> Iterator[tuple[Tensor, Tensor]]:
    """Samples have from no target to all; so do micro-batches and replicas."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids, targets = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
        for sample in range(BATCH):
            targets[sample, sample % (LENGTH + 1) :] = -100
        yield ids, targets


def as_tokenized(batch: Any) -> Any:
    """As the tokenizers of Transformers return them: a mapping that is no dict."""
    return UserDict(ids=batch[0]), batch[1]


#: One of each way to sum over replicas, and to cut a batch.
MEANS = [CASES[0], CASES[1], *[case for case in CASES if case[0] != "torch"][2::3]]


@pytest.mark.parametrize(
    ("target", "layout", "options", "loss"),
    [
        *((*case, counted) for case in (*CASES, *OF_TORCH)),
        *((*case, loss_fn) for case in MEANS),
    ],
    ids=shown,
)
@on_ranks()
def test_losses_of_uneven_targets_are_exact(
    target: str, layout: Any, options: dict[str, Any], loss: Any
) -> None:
    """Those that count, and means, which weigh as much as they have targets.

    Some micro-batches have no target, and a mean that is not a number. Each step is clipped, and
    the rate halves.
    """
    given = {"loss_fn": loss, "lr_scheduler": halving}
    engine = make(target, layout, clip_grad_norm=CLIP, **given, **options)
    reference = alone(clip=CLIP, **given)
    found = compare(engine, reference, uneven(), as_tokenized)
    assert max(found.values()) < TOLERANCE, found
    assert min(reference.norms) > CLIP
    assert engine.step_count == STEPS


@on_ranks(1)
def test_the_mean_of_means_is_a_word_away() -> None:
    layout = (1, 1, 1)
    means = make("torch", layout, loss_mean="micro_batches", micro_batches=2)
    ids, targets = next(data())
    targets[0, 1:] = -100
    with torch.no_grad():
        pairs = zip(ids.chunk(2), targets.chunk(2), strict=True)
        parts = [loss_fn(seeded()(part), wanted) for part, wanted in pairs]
    loss = means.train_batch(iter([(ids, targets)]))
    assert float(loss) == pytest.approx(sum(map(float, parts)) / 2)


# --- adapters ------------------------------------------------------------------------------------
def with_adapters() -> Any:
    """LoRA on the layers that `make` splits, no matrix of which is zero."""
    peft = pytest.importorskip("peft")
    model = seeded()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(model, config).base_model.model.train()


@pytest.mark.wide
@pytest.mark.parametrize(("target", "layout", "options"), CASES, ids=shown)
@on_ranks()
def test_adapters_train_as_in_one_process(
    target: str, layout: Any, options: dict[str, Any]
) -> None:
    """Only the adapters are trained, and the frozen weights keep their values."""
    engine = make(target, layout, model=with_adapters(), clip_grad_norm=CLIP, **options)
    reference = Alone(with_adapters(), loss_fn, sgd, clip=CLIP)
    found = compare(engine, reference, data(STEPS))
    assert max(found.values()) < TOLERANCE, found
    assert min(reference.norms) > CLIP
    start = with_adapters().state_dict()
    frozen = [name for name, p in reference.model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 17
    assert all(torch.equal(reference.model.state_dict()[name], start[name]) for name in frozen)


# --- the rest of the surface ---------------------------------------------------------------------
def no_decay_for_biases(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    biases = [p for name, p in named_parameters if name.endswith("bias")]
    others = [p for name, p in named_parameters if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)


@pytest.mark.parametrize(("target", "layout", "options"), CASES, ids=shown)
@on_ranks()
def test_the_whole_surface(target: str, layout: Any, options: dict[str, Any]) -> None:
    """Modes, norms, names, values in and out, evaluations of any size."""
    given = {"optimizer": no_decay_for_biases, "clip_grad_norm": math.inf}
    engine = make(target, layout, **given, **options)
    engine.eval()
    start = {name: whole(t).clone() for name, t in engine.state_dict().items()}
    reference = alone(optimizer=no_decay_for_biases, named=True)
    assert max(compare(engine, reference, data(2)).values()) < TOLERANCE
    assert all(m.training for m in engine.module.modules())
    assert f"mesh {layout}" in repr(engine)
    assert set().union(*gathered(list(start), None)) == seeded().state_dict().keys()

    # Back to the start: a copy of the optimizer's own would go on from where it was.
    again, batch = alone(optimizer=no_decay_for_biases, named=True), next(data())
    mine = of_this_rank(engine.mesh, batch)
    engine.eval_batch(iter([mine]))  # FSDP2 keeps what it has gathered
    engine.load_state_dict(start)
    assert largest_difference(engine, again.state()) == 0
    evaluated = engine.eval_batch(iter([mine]))
    assert abs(evaluated.item() - again.evaluate(batch)[0]) < TOLERANCE
    assert max(compare(engine, again, data(1, seed=9)).values()) < TOLERANCE
    assert engine.step_count == 3

    for samples in (7, 3, 1):
        generator = torch.Generator().manual_seed(samples)
        ids, targets = torch.randint(0, VOCABULARY, (2, samples, LENGTH), generator=generator)
        loss, outputs = engine.eval_batch(iter([(ids, targets)]), return_outputs=True)
        wanted, expected = again.evaluate((ids, targets))
        assert abs(loss.item() - wanted) < TOLERANCE
        is_last = engine.mesh.get_local_rank("pp") == layout[0] - 1
        assert bool(outputs) == is_last
        if is_last:
            assert (torch.cat(outputs) - expected).abs().max().item() < TOLERANCE
    text = error_of(lambda: engine.load_state_dict({"nothing": torch.ones(1)}))
    assert text.startswith("ValueError")
    assert "has unexpected ['nothing']" in text


# --- between backward and step -------------------------------------------------------------------
@on_ranks(1)
def test_backward_and_step_belong_together(target: str) -> None:
    engine, batches = make(target, (1, 1, 1), micro_batches=1), data()
    ids, targets = next(batches)
    engine.backward(loss_fn(engine(ids), targets))
    with pytest.raises(
        slapo.SlapoError, match=r"1 earlier backward\(\) calls were not followed by step"
    ):
        engine.train_batch(batches)
    engine.step()
    engine.train_batch(batches)
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(slapo.SlapoError, match=r"no gradients; call engine.backward\(lo"):
        engine.step()
    assert engine.step_count == 2
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())


# --- target "torch" ------------------------------------------------------------------------------
def test_the_units_that_fsdp_gathers() -> None:
    # Blocks by name, as vision models have them, and layers of one class beside them.
    named: Any = nn.Module()
    named.first, named.last = nn.Linear(2, 2), nn.Linear(2, 2)
    named.block1, named.block2 = TwoLayers(), TwoLayers()
    assert list(fsdp_units(named)) == [named.block1, named.block2]
    # Two stacks of one class: their layers, and not they, are gathered.
    stacks = nn.Module()
    stacks.encoder, stacks.decoder = Stack(), Stack()
    assert list(fsdp_units(stacks)) == [*stacks.encoder.layers, *stacks.decoder.layers]
    by_key = nn.ModuleDict({"a": TwoLayers(), "b": TwoLayers()})
    assert list(fsdp_units(by_key)) == list(by_key.values())
    # An inner list or dict has no forward that could gather.
    assert list(fsdp_units(nn.ModuleList([by_key]))) == list(by_key.values())
