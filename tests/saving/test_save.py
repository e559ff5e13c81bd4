"""What `engine.save` and `engine.load` promise beside values: data, order, refusals."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.command import main
from slapo.saving.nests import encode
from slapo.saving.steps import file_of
from slapo.weights.files import TensorFile
from tests.runtimes.ranks import error_of, on_ranks

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    """With a buffer, a tied weight, a parameter that nothing uses, and a frozen one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last, self.again = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.again.weight = self.last.weight
        self.unused, self.head = nn.Linear(2, 2), nn.Linear(width, 1)
        self.head.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.last(self.drop(self.norm(self.first(x))))))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def engine_of(
    optimizer: Optimizer | None = adam,
    model: nn.Module | None = None,
    fuses: bool = False,
    **options: Any,
) -> Any:
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(len(options))
    sch = slapo.create_schedule(Model() if model is None else model)
    if fuses:
        sch.trace()
        found = sch.find(lambda x: slapo.call_module("drop", slapo.call_module("norm", x)))
        sch.fuse(found, compiler="TorchScript")
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": optimizer, "mesh": mesh, **options}
    given.setdefault("data_parallel_options", {"find_unused_parameters": True})
    return slapo.build(sch, target="torch", **given)[0]


class Data:
    """Batches that come in one order, and may be gone on with."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        return torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        order, last = torch.arange(3), deque([1, 2], 2)
        told = (b"bytes", {1, 2}, [None, 1.5])
        return {"number": self.number, 5: told, "order": order, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[5] == (b"bytes", {1, 2}, [None, 1.5])
        assert torch.equal(state["order"], torch.arange(3))
        assert (state["last"], state["last"].maxlen) == (deque([1, 2]), 2)
        self.number = state["number"]


class Seeks(Data):
    load_state_dict = None  # type: ignore[assignment]
    state_dict = None  # type: ignore[assignment]

    def seek(self, samples: int) -> None:
        self.number = samples // 4


def steps(engine: Any, data: Data, count: int = 2) -> list[float]:
    return [float(engine.train_batch(data)) for _ in range(count)]


@on_ranks(1)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Dropout, running means, the order of data; the engine may have trained something else."""
    engine, data = engine_of(), Data()
    steps(engine, data)
    saving = engine.save(tmp_path / "run", data=data)
    assert (saving.step, saving.path) == (2, tmp_path / "run/step_00000002")
    assert saving.done()
    assert saving.result() == saving.path
    expected = steps(engine, data)
    for before in (0, 3):
        again, other = engine_of(clip_grad_norm=1e9), Data()
        steps(again, other, before)
        resumed = again.load(tmp_path / "run", data=other)
        assert (resumed.step, resumed.samples, resumed.notes) == (2, 8, ())
        assert steps(again, other) == expected
        wanted = engine.state_dict()
        assert all(torch.equal(value, wanted[n]) for n, value in again.state_dict().items())
        assert again.step_count == 4
        assert again.samples == 16


@on_ranks(1)
def test_statistics_in_a_compiled_fusion(tmp_path: Path) -> None:
    engine = engine_of(fuses=True)
    steps(engine, Data())
    engine.save(tmp_path)
    wanted = engine.state_dict()
    for fuses in (True, False):
        again = engine_of(fuses=fuses)
        again.load(tmp_path)
        found = again.state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            held = f"FusedModule_0.norm.{name}"
            assert torch.equal(found[held if fuses else f"norm.{name}"], wanted[held]), name
    assert wanted["FusedModule_0.norm.num_batches_tracked"] == 2


@on_ranks(1)
def test_data_without_a_state_is_told_the_samples(tmp_path: Path) -> None:
    engine = engine_of()
    steps(engine, Data())
    engine.save(tmp_path)
    data, again = Seeks(), engine_of()
    again.load(tmp_path, data=data)
    assert data.number == 2
    assert "without seek()" in error_of(lambda: again.load(tmp_path, data=Data()))
    engine.step_count += 1
    engine.save(tmp_path, data=Data())
    assert again.load(tmp_path).notes == ("data: its state was saved, but no data= was given",)


@on_ranks(1)
def test_steps_are_kept_listed_and_never_overwritten(tmp_path: Path) -> None:
    engine, data = engine_of(), Data()
    assert slapo.checkpoints(tmp_path) == []
    for _ in range(4):
        steps(engine, data, 1)
        engine.save(tmp_path, keep=3)
    shutil.copytree(tmp_path / "step_00000004", tmp_path / "step_00000009.tmp")
    (tmp_path / "step_00000008").mkdir()
    names = [path.name for path in slapo.checkpoints(tmp_path)]
    assert names == ["step_00000002", "step_00000003", "step_00000004"]
    assert engine_of().load(tmp_path).step == 4
    assert engine_of().load(tmp_path / "step_00000002").step == 2


@on_ranks(1)
def test_beside_training(tmp_path: Path) -> None:
    """Values are those of the call; one step is under way at a time."""
    engine, data = engine_of(), Data()
    steps(engine, data)
    going = threading.Event()
    create = TensorFile.create.__func__  # type: ignore[attr-defined]

    def waits(*args: Any) -> TensorFile:
        assert going.wait(60)
        return create(TensorFile, *args)

    with mock.patch.object(TensorFile, "create", waits):
        saving = engine.save(tmp_path / "run", wait=False)
        expected = steps(engine, data)
        assert not saving.done()
        assert slapo.checkpoints(tmp_path / "run") == []
        going.set()
        second = engine.save(tmp_path / "run", wait=False)  # waits for the first
        assert saving.done()
        second.result()
    places = [{value.data_ptr() for value in each.copies.values()} for each in (saving, second)]
    assert places[0] == places[1]  # in the memory of the first, which is written
    assert len(slapo.checkpoints(tmp_path / "run")) == 2
    again, other = engine_of(), Data()
    again.load(saving.path)
    other.number = 2
    assert steps(again, other) == expected

    with mock.patch.object(TensorFile, "create", side_effect=OSError(28, "No space left", "x")):
        steps(engine, data, 1)
        failing = engine.save(tmp_path / "run", wait=False)
        steps(engine, data, 1)
        assert "No space left" in error_of(lambda: engine.save(tmp_path / "run"))
        assert "No space left" in error_of(failing.result)
    engine.save(tmp_path / "run")
    assert len(slapo.checkpoints(tmp_path / "run")) == 3


@on_ranks(1)
def test_weights_alone(tmp_path: Path) -> None:
    engine = engine_of()
    steps(engine, Data())
    engine.save(tmp_path)
    again = engine_of(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    data = Data()
    steps(again, data, 1)
    state = {n: v.clone() for n, v in again.optimizer.state_dict()["state"][0].items()}
    draws = torch.get_rng_state()
    resumed = again.load(tmp_path, only="weights")
    assert (resumed.step, again.step_count) == (2, 1)
    wanted = engine.state_dict()
    assert all(torch.equal(value, wanted[n]) for n, value in again.state_dict().items())
    now = again.optimizer.state_dict()["state"][0]
    assert all(torch.equal(v, state[n]) for n, v in now.items())
    assert torch.equal(torch.get_rng_state(), draws)
    engine_of(optimizer=None).load(tmp_path, only="weights")
    x, y = next(Data())
    engine.backward(nn.functional.mse_loss(engine(x), y))
    assert "call step() first" in error_of(lambda: engine.load(tmp_path))


# --- groups of parameters, and optimizers of all kinds -------------------------------------------
def two_groups(named_parameters: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    weights = [p for n, p in named if n.endswith("weight")]
    others = [p for n, p in named if not n.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": others, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.1)


def two_groups_again(named_parameters: Any) -> torch.optim.Optimizer:
    """The same groups, in another order and of other options."""
    optimizer = two_groups(named_parameters)
    optimizer.param_groups.reverse()
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    return optimizer


@on_ranks(1)
def test_groups_of_parameters(tmp_path: Path) -> None:
    engine = engine_of(two_groups)
    steps(engine, Data())
    engine.save(tmp_path)
    again = engine_of(two_groups_again)
    again.load(tmp_path)
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.01, 0.1]
    data, other = Data(), Data()
    data.number = other.number = 2
    torch.manual_seed(0)
    expected = steps(engine, data)
    torch.manual_seed(0)
    assert steps(again, other) == expected
    assert "parameter groups with different options" in error_of(lambda: engine_of().load(tmp_path))
    frozen = Model()
    frozen.first.weight.requires_grad = False
    assert "other parameters" in error_of(lambda: engine_of(two_groups, frozen).load(tmp_path))


OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@on_ranks(1)
def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Its tensors have the names that they have in the whole."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        sch = slapo.create_schedule(nn.ModuleDict({"one": nn.Linear(4, 1), "two": nn.Linear(1, 1)}))
        given = {"loss_fn": nn.functional.mse_loss, "optimizer": adam}
        mesh = slapo.init_mesh(device="cpu")
        engine, _ = slapo.build(sch["one"], target="torch", mesh=mesh, **given)
        if seed:
            engine.load(tmp_path)
        else:
            steps(engine, Data())
            engine.save(tmp_path)
        found.append(engine.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        *((name, None) for name in OPTIMIZERS),
        *((None, name) for name in SCHEDULERS),
        ("amsgrad", "MultiStepLR"),  # whose learning rate is a tensor
    ],
)
@on_ranks(1)
def test_state_of_any_form(tmp_path: Path, optimizer: str | None, scheduler: str | None) -> None:
    given: Any = {"optimizer": adam if optimizer is None else OPTIMIZERS[optimizer]}
    if scheduler is not None:
        given["lr_scheduler"] = SCHEDULERS[scheduler]
    engine, again = engine_of(**given), engine_of(**given)
    data, other = Data(), Data()
    steps(engine, data)
    engine.save(tmp_path)
    assert again.load(tmp_path).notes == ()
    for _ in range(2):  # as it was saved, and as it goes on
        (group,), (restored,) = engine.optimizer.param_groups, again.optimizer.param_groups
        assert (type(restored["lr"]), restored["lr"]) == (type(group["lr"]), group["lr"])
        if scheduler is not None:
            assert again.scheduler.get_last_lr() == engine.scheduler.get_last_lr()
        other.number = data.number
        draws = torch.get_rng_state()
        expected = steps(engine, data)
        torch.set_rng_state(draws)
        assert steps(again, other) == expected


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["inspect", *arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(lr_scheduler=SCHEDULERS["LambdaLR"])
    for _ in range(2):
        steps(engine, Data(), 1)
        engine.save(tmp_path / "run", data=Data())
    slapo.save_pretrained(engine, tmp_path / "weights")
    (tmp_path / "run/step_00000007.tmp").mkdir()
    status, text = shown(capsys, str(tmp_path / "run"), "--verify")
    assert status == 0
    for expected in (
        "a run with 2 complete steps",
        "all checksums match",
        "interrupted: step_00000007.tmp",
        "step 2, after 8 samples",
        "model      Model",
        "layout     pp=1, dp=1, tp=1 on torch, ddp; slapo ",
        "optimizer  AdamW, learning rate 0.0333333",
        "values     13 tensors, 160 elements, float32, int64, 644 B",
        "exp_avg    7 tensors, 129 elements",
        "step       2",
        "also       scheduler, random states, data",
        "schedule   0 primitives",
    ):
        assert expected in text, text
    flip(tmp_path / "run/step_00000001" / file_of(0), -9)
    status, text = shown(capsys, str(tmp_path / "run/step_00000001"), "--verify")
    assert status == 1
    assert "is damaged (its checksum differs)" in text
    status, text = shown(capsys, str(tmp_path / "weights"))
    assert status == 0
    assert "a Hugging Face folder: no config.json" in text
    assert "values     13 tensors, 160 elements" in text
    status, text = shown(capsys, str(tmp_path))
    assert status == 1
    assert "holds no weights" in text


# --- what is wrong -------------------------------------------------------------------------------
def flip(path: Path, at: int) -> None:
    """Flip a bit of a byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@on_ranks(1)
def test_a_step_that_is_spoiled(tmp_path: Path) -> None:
    """``tests/golden/mistakes/engine.txt`` has other ways; nothing has changed after any."""
    engine = engine_of()
    steps(engine, Data())
    step = engine.save(tmp_path).path
    flip(step / file_of(0), -9)
    other = engine_of()
    before = {n: v.clone() for n, v in other.state_dict().items()}
    assert "is damaged (its checksum differs)" in error_of(lambda: other.load(step))
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())
    assert other.step_count == 0
    assert not other.optimizer.state
    steps(other, Data())


@pytest.mark.parametrize("dtype", ["O", "i4, f8"])
def test_arrays_whose_bytes_do_not_suffice_are_refused(dtype: str) -> None:
    array = pytest.importorskip("numpy").zeros(2, dtype)
    with pytest.raises(slapo.SlapoError, match=r"state\['order'\] is an array of dtype"):
        encode({"order": array}, [], "state")
