"""``slapo.fit``: the loop, resumed and stopped."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo
from slapo.agreement import gathered
from tests.distributed import run_distributed
from tests.runtimes.ranks import on_ranks

STEPS = 6


def engine(tp: int = 1, **options: Any) -> Any:
    mesh = slapo.init_mesh(tp=tp, device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    sch = slapo.create_schedule(model, mesh=mesh)
    if tp > 1:
        sch["0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["3"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["2"].fork_rng()
    slapo.set_random_seed(3, mesh=mesh)
    made = functools.partial(torch.optim.AdamW, lr=0.01)
    ask: dict[str, Any] = {"target": "torch", "loss_fn": F.mse_loss, "optimizer": made}
    return slapo.build(sch, mesh=mesh, **ask, **options)[0]


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator))
        for _ in range(count)
    ]


def losses(history: list[dict[str, float]]) -> list[float]:
    return [each["loss"] for each in history]


def plain(tp: int = 1) -> list[float]:
    """The loop that everybody writes."""
    made, data = engine(tp), batches()
    return [float(made.train_batch(iter([data[step % 4]]))) for step in range(STEPS)]


# --- the loop ------------------------------------------------------------------------------------
def test_it_is_the_plain_loop() -> None:
    history = slapo.fit(engine(clip_grad_norm=1.0), batches(), steps=STEPS)
    assert len(losses(history)) == STEPS
    assert losses(slapo.fit(engine(), batches(), steps=STEPS)) == plain()
    for name in ("seconds", "samples_per_second", "grad_norm", "lr", "memory_gib"):
        assert all(each[name] > 0 for each in history), name


def test_evaluation_scheduler_and_logs() -> None:
    said: list[tuple[int, dict[str, float]]] = []

    made, writer, run = engine(), *map(mock.NonCallableMock, (["add_scalar"], ["log"]))
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    history = slapo.fit(
        made,
        batches(),
        steps=5,
        eval_data=batches(2),
        eval_every=2,
        scheduler=scheduler,
        log=[lambda step, metrics: said.append((step, metrics)), writer, run],
        log_every=2,
    )
    assert [each["lr"] for each in history] == [0.01, 0.005, 0.0025, 0.00125, 0.000625]
    assert ["eval_loss" in each for each in history] == [False, True, False, True, True]
    assert [step for step, _ in said] == [2, 4, 5]
    assert run.log.call_args_list == [mock.call(metrics, step=step) for step, metrics in said]
    assert mock.call("loss", history[1]["loss"], 2) in writer.add_scalar.call_args_list
    by_hand = [float(made.eval_batch(iter([batch]))) for batch in batches(2)]
    assert history[-1]["eval_loss"] == pytest.approx(sum(by_hand) / 2)


def test_the_scheduler_waits_for_skipped_steps() -> None:
    made = engine(nonfinite="skip")
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    good = batches()[0]
    spoilt = (torch.full_like(good[0], torch.nan), *good[1:])
    history = slapo.fit(made, [spoilt, good, good], steps=3, scheduler=scheduler)
    assert [each["lr"] for each in history] == [0.01, 0.01, 0.005]


# --- resumed and stopped -------------------------------------------------------------------------
class Positioned:
    """Data that restores its own position."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        while True:
            self.number += 1
            yield batches()[(self.number - 1) % 4]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@pytest.mark.parametrize("data", [batches, Positioned])
def test_the_same_call_goes_on(data: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = slapo.fit(engine(), data(), steps=3, save=run, save_every=2)
    assert [path.name for path in slapo.checkpoints(run)] == ["step_00000002", "step_00000003"]
    second = slapo.fit(engine(), data(), steps=STEPS, save=run, save_every=2)
    assert losses([*first, *second]) == plain()
    assert slapo.fit(engine(), data(), steps=STEPS, save=run) == []


def test_the_scheduler_goes_on(tmp_path: Path) -> None:
    def rates(steps: int) -> list[float]:
        made = engine()
        falling = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 1 / (step + 1))
        history = slapo.fit(made, batches(), steps=steps, scheduler=falling, save=tmp_path / "run")
        return [each["lr"] for each in history]

    assert [*rates(2), *rates(5)] == pytest.approx([0.01 / step for step in range(1, 6)])


@on_ranks(2)
def test_over_two_ranks(tmp_path: Path) -> None:
    wanted, run = plain(2), tmp_path / "run"
    first = slapo.fit(engine(2), batches(), steps=2, save=run)
    second = slapo.fit(engine(2), batches(), steps=STEPS, save=run)
    assert losses([*first, *second]) == wanted
    assert gathered(wanted, None) == [wanted] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_step_and_save(number: signal.Signals, tmp_path: Path) -> None:
    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    first = slapo.fit(engine(), batches(), steps=STEPS, save=tmp_path / "run", log=stop)
    assert len(first) == 3
    assert [path.name for path in slapo.checkpoints(tmp_path / "run")] == ["step_00000003"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    second = slapo.fit(engine(), batches(), steps=STEPS, save=tmp_path / "run")
    assert losses([*first, *second]) == plain()


SCRIPT = """
import json, os, sys
from pathlib import Path
import slapo
from tests.test_training import STEPS, batches, engine
run, said = Path(sys.argv[1]), Path(sys.argv[2])
def log(step, metrics):
    with said.open("a") as file:
        print(json.dumps([step, metrics["loss"]]), file=file)
class Data:
    def __iter__(self):
        for number in range(100):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and number == 4 and os.environ["RANK"] == "1":
                os._exit(7)
            yield batches()[number % 4]
slapo.fit(engine(2), Data(), steps=STEPS, save=run, save_every=2, log=log)
"""


def all_losses(rank: int, world_size: int) -> list[float]:
    return plain(2)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_job_that_loses_a_rank_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = tmp_path / "said"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(tmp_path / name) for name in ("train.py", "run", "said")]
    ended = subprocess.run(
        [sys.executable, *launch, "--max-restarts", "1", *paths],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads(line) for line in said.read_text().splitlines()]
    wanted = run_distributed(all_losses, 2)[0]
    assert [step for step, _ in found][:4] == [1, 2, 3, 4]
    assert found[-1][0] == STEPS
    assert all(loss == wanted[step - 1] for step, loss in found)


def test_without_tqdm_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in of torch prints each update at once, without a line of its own."""
    monkeypatch.setattr(torch.hub, "tqdm", torch.hub._Faketqdm)
    slapo.fit(engine(), batches(), steps=2, save=tmp_path / "run")
    slapo.fit(engine(), batches(), steps=3, save=tmp_path / "run")
    printed = capsys.readouterr()
    assert not printed.out
    assert "%" not in printed.err
