"""Steps of training saved at one layout and engine, and resumed at another."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

import slapo
from examples.parallel_models import FAMILIES
from slapo.saving.steps import Manifest, Step
from slapo.weights.pieces import box_of
from tests.runtimes import layouts
from tests.runtimes.alone import Alone, largest_difference, of_this_rank
from tests.runtimes.layouts import TOLERANCE, batches, model_of
from tests.runtimes.ranks import RUNTIMES, error_of, on_ranks, stand_in_for_cuda
from tests.runtimes.test_optimizers import OPTIMIZERS

Layout = tuple[int, int, int]

#: steps before a step is saved; the others come after it
BEFORE = 3


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With so large an epsilon, steps are as good as linear in the gradient."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1)


halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

#: name -> target, layout of two ranks, options
KINDS: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tp 2": ("torch", (1, 1, 2), {}),
    "dp 2": ("torch", (1, 2, 1), {}),
    "fsdp": ("torch", (1, 2, 1), {"data_parallel": "fsdp"}),
    "pp 2": ("torch", (2, 1, 1), {}),
    "zero 1": ("deepspeed", (1, 2, 1), {"zero": 1}),
    "zero 2": ("deepspeed", (1, 2, 1), {"zero": 2}),
    "zero 3": ("deepspeed", (1, 2, 1), {"zero": 3}),
    "zero 1 tp 2": ("deepspeed", (1, 1, 2), {"zero": 1}),
    "pipe": ("deepspeed", (2, 1, 1), {}),
    "megatron tp 2": ("megatron", (1, 1, 2), {}),
    "megatron dp 2": ("megatron", (1, 2, 1), {}),
    "megatron pp 2": ("megatron", (2, 1, 1), {}),
}


def build(family: str, kind: str, seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    """An engine; of another model than the others if there is a seed."""
    target, layout, given = KINDS[kind]
    model = model_of(family, dropout)
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter)
    return layouts.build(family, target, layout, model, **{**given, "optimizer": adam, **options})


def alone(family: str, **options: Any) -> Alone:
    return layouts.alone(family, **{"optimizer": adam, **options})


def train(engine: Any, family: str, start: int, stop: int) -> list[float]:
    """Losses of some of the steps."""
    given = batches(FAMILIES[family])[start:stop]
    return [float(engine.train_batch(iter([of_this_rank(engine.mesh, b)]))) for b in given]


def apart(engine: Any, reference: Alone, losses: list[float], first: int = BEFORE) -> float:
    """The largest difference of losses after a step, and of values."""
    pairs = zip(losses, reference.losses[first:], strict=True)
    return max(*(abs(a - b) for a, b in pairs), largest_difference(engine, reference.state()))


def contents(step: Path) -> dict[str, Tensor]:
    """All tensors of a step, whole."""
    found, saved = {}, Step(step)
    for slot, named in saved.manifest.tensors.items():
        for name, tensor in named.items():
            found[f"{slot}:{name}"] = saved.read((slot, name), box_of(tensor.shape))
    saved.close()
    return found


def different(one: Path, other: Path) -> list[str]:
    """What two steps do not have alike, to the bit."""
    left, right = contents(one), contents(other)
    return sorted(left.keys() ^ right.keys()) + [
        name
        for name in left.keys() & right.keys()
        if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]


# --- resumed -------------------------------------------------------------------------------------
ALL = ["tp 2", "fsdp", "zero 1", "zero 2", "zero 3", "pp 2", "megatron tp 2"]


def installed(kinds: list[str]) -> list[str]:
    for target in {KINDS[kind][0] for kind in kinds}:
        pytest.importorskip(RUNTIMES[target])
    return kinds


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("family", "sources"),
    [
        ("gpt2", 2),
        pytest.param("gpt2", len(ALL), marks=WIDE),
        pytest.param("llama", len(ALL), marks=WIDE),
    ],
)
@on_ranks(2, timeout=400)
def test_pairs(tmp_path: Path, family: str, sources: int) -> None:
    """Each kind goes on from what others have saved; one engine from one step after another.

    What it has trained then goes out, and into Transformers.
    """
    kinds = installed(ALL)
    stand_in_for_cuda()
    reference = alone(family).train(batches(FAMILIES[family]))
    for source in kinds:
        engine = build(family, source)
        train(engine, family, 0, BEFORE)
        engine.save(tmp_path / source)
    for number, goal in enumerate(kinds):
        engine = build(family, goal, seed=7)
        for source in (kinds * 2)[number + 1 :][:sources]:
            resumed = engine.load(tmp_path / source)
            assert (resumed.step, engine.step_count, resumed.samples) == (3, 3, 12)
            losses = train(engine, family, BEFORE, layouts.STEPS)
            assert apart(engine, reference, losses) < TOLERANCE, (source, goal)
        slapo.save_pretrained(engine, tmp_path / f"out {goal}")
        if dist.get_rank() == 0:
            made = type(layouts.model_of(family)).from_pretrained(tmp_path / f"out {goal}")
            wanted = reference.state()
            for name, value in made.state_dict().items():
                assert (value - wanted[name]).abs().max() < TOLERANCE, (goal, name)
        dist.barrier()


HALF = ["fsdp", "dp 2", "tp 2", "zero 1 tp 2", "zero 2", "zero 3", "pipe", "megatron dp 2"]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=WIDE), "float16"])
@on_ranks(2, timeout=400)
def test_float32_copies_and_state_go_through_all_engines(tmp_path: Path, dtype: str) -> None:
    """To the bit; and what trains from them is no further apart than half precision makes it."""
    # On a CPU DeepSpeed has no float16.
    fits = [kind for kind in HALF if dtype == "bfloat16" or KINDS[kind][0] != "deepspeed"]
    kinds = installed(fits)
    stand_in_for_cuda()
    before = Path()
    losses = []
    for number, kind in enumerate(kinds):
        engine = build("llama", kind, seed=3 + number, dtype=getattr(torch, dtype))
        if number:
            engine.load(before)
            saved = engine.save(tmp_path / kind).path
            assert different(before, saved) == [], kind
            assert Manifest.read(saved).loss_scale == Manifest.read(before).loss_scale
            before = saved
        else:
            train(engine, "llama", 0, BEFORE)
            before = engine.save(tmp_path / "first").path
        losses.append(train(engine, "llama", BEFORE, layouts.STEPS))
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], abs=0.02), losses


@on_ranks(2, timeout=300)
def test_the_same_layout_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """With dropout, to the bit."""
    for kind in installed(["tp 2", "fsdp", "pp 2", "zero 1", "zero 3"]):
        given: dict[str, Any] = {"lr_scheduler": halving, "clip_grad_norm": 0.1}
        engine = build("gpt2", kind, dropout=0.1, **given)
        train(engine, "gpt2", 0, BEFORE)
        engine.save(tmp_path / kind)
        expected = train(engine, "gpt2", BEFORE, layouts.STEPS)
        again = build("gpt2", kind, seed=7, dropout=0.1, **given)
        resumed = again.load(tmp_path / kind)
        assert resumed.notes == (), kind
        assert train(again, "gpt2", BEFORE, layouts.STEPS) == expected, kind
        steps = [e.save(tmp_path / f"{kind} {n}").path for n, e in enumerate((engine, again))]
        assert different(*steps) == [], kind


@on_ranks(2, timeout=300)
def test_state_that_cannot_be_cut_anew(tmp_path: Path) -> None:
    """Of whole matrices, which one of the ranks keeps; of rows and columns."""
    for name in ("muon", "adafactor"):
        given = {"optimizer": OPTIMIZERS[name]}
        engine = build("llama", "tp 2", **given)
        train(engine, "llama", 0, BEFORE)
        step = engine.save(tmp_path / name).path
        expected = train(engine, "llama", BEFORE, layouts.STEPS)
        again = build("llama", "tp 2", seed=7, **given)
        assert again.load(step).notes == ()
        assert train(again, "llama", BEFORE, layouts.STEPS) == expected, name
        other = build("llama", "fsdp", **given)
        assert "cannot be resharded; resume with" in error_of(partial(other.load, step))
        other.load(step, only="weights")
    # Replicas have the state of whole matrices, which lies as they do.
    given = {"optimizer": OPTIMIZERS["muon"]}
    engine = build("llama", "dp 2", **given)
    train(engine, "llama", 0, BEFORE)
    step = engine.save(tmp_path / "dp").path
    reference = alone("llama", **given).train(batches(FAMILIES["llama"]))
    other = build("llama", "pp 2", seed=7, **given)
    other.load(step)
    assert apart(other, reference, train(other, "llama", BEFORE, layouts.STEPS)) < 1e-4
