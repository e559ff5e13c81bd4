"""All families and schedules of one's own: state is under original names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("transformers")

import slapo
from slapo.agreement import gathered
from tests.model_schedule.models import MODELS
from tests.runtimes.ranks import on_ranks
from tests.saving.test_resume import different
from tests.weights.test_pretrained import Own, loss_of, rebuilt


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def engine_of(
    model: nn.Module, layout: tuple[int, int, int], schedule: Any = None, **options: Any
) -> Any:
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model, group=mesh["tp"])
    if schedule is not None:
        schedule(sch)
    given = {"loss_fn": loss_of, "optimizer": momentum, **options}
    return slapo.build(sch, target="torch", mesh=mesh, **given)[0]


#: One for each way of packing and tying weights.
KINDS = ("gpt2", "llama", "mixtral", "t5")


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(KINDS, id="kinds"),
        pytest.param([k for k in MODELS if k not in KINDS], id="others", marks=pytest.mark.wide),
    ],
)
@on_ranks(2, timeout=300)
def test_families_from_slices_to_shares(tmp_path: Path, keys: Sequence[str]) -> None:
    """By a recipe at tp 2, as it is under FSDP2, and back: the same to the bit."""
    for key in keys:
        found = []
        for number, layout in enumerate([(1, 1, 2), (1, 2, 1), (1, 1, 2)]):
            mesh = slapo.init_mesh(*layout, device="cpu")
            model = MODELS[key].build()
            if mesh.shape[2] > 1:
                sch, more = slapo.apply_schedule(model, key, group=mesh["tp"]), {}
            else:
                sch = slapo.create_schedule(model, group=mesh["tp"])
                more = {"data_parallel": "fsdp"}
            engine, _ = slapo.build(
                sch, target="torch", mesh=mesh, loss_fn=loss_of, optimizer=momentum, **more
            )
            if number:
                engine.load(found[-1])
            else:
                batch = MODELS[key].inputs(2, 8)
                engine.train_batch(iter([(batch, torch.zeros(2))]))
            found.append(engine.save(tmp_path / f"{key}{number}").path)
        assert different(found[0], found[1]) == [], key
        assert different(found[0], found[2]) == [], key


def of_own(sch: slapo.Schedule) -> None:
    rebuilt(sch)
    if sch.world_size > 1:
        both = sch["mlp.Packed_0.both"]
        both.shard("weight", axis=0, blocks=2).sync("bwd_post", "all_reduce")
        sch["mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def own_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 11, (4, 3), generator=generator), torch.zeros(4)) for _ in range(4)]


@on_ranks(2)
def test_a_rewritten_model_goes_on_as_the_original_and_back(tmp_path: Path) -> None:
    """Packed, three times transposed, sliced, tied; against one process."""
    torch.manual_seed(0)
    model = Own()
    optimizer, expected = momentum(list(model.parameters())), []
    for ids, _ in own_batches():
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses: list[float] = []
    step = Path()
    for number, schedule in enumerate([of_own, None, of_own]):
        torch.manual_seed(0 if not number else 7)
        engine = engine_of(Own(), (1, 1, 2), schedule)
        if number:
            engine.load(step)
        batches = iter(own_batches()[number + (number > 1) :][: 1 + (number == 1)])
        losses += [float(engine.train_batch(batches)) for _ in range(1 + (number == 1))]
        step = engine.save(tmp_path / str(number)).path
    assert losses == pytest.approx(expected, abs=2e-6)


def normed() -> nn.Module:
    pairs = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    return nn.Sequential(*pairs)


@on_ranks(2)
def test_statistics_are_those_of_the_first_replica(tmp_path: Path) -> None:
    """DDP's ranks take its buffers before each forward; parts of two ranks would fit to neither."""
    engine = engine_of(normed(), (1, 2, 1))
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.train_batch(iter([(batch, torch.zeros(5))]))
    engine.save(tmp_path / "run")
    slapo.save_pretrained(engine, tmp_path / "folder", max_shard_size=200)
    wanted, other = gathered(engine.state_dict(), None)
    again = engine_of(normed(), (1, 2, 1))
    again.load(tmp_path / "run")
    files = list((tmp_path / "folder").glob("*.safetensors"))
    assert len(files) > 1
    for found in (again.state_dict(), {k: v for f in files for k, v in load_file(f).items()}):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert not torch.equal(wanted["0.1.running_mean"], other["0.1.running_mean"])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
@on_ranks(2)
def test_adapters_and_what_is_frozen(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found: list[Path] = []
    losses: list[list[float]] = []
    batch = MODELS["llama"].inputs(2, 8)
    for number, layout in enumerate([(1, 1, 2), (1, 1, 2), (1, 2, 1)]):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(MODELS["llama"].build(), config)
        engine = engine_of(model, layout, data_parallel="fsdp" if layout[1] > 1 else "ddp")
        if found:
            engine.load(found[-1])
        else:
            engine.train_batch(iter([(batch, torch.zeros(2))]))
        found.append(engine.save(tmp_path / str(number)).path)
        losses.append([float(engine.train_batch(iter([(batch, torch.zeros(2))]))) for _ in "ab"])
    assert different(found[0], found[1]) == []
    assert different(found[0], found[2]) == []
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
