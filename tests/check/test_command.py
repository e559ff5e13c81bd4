"""``slapo check`` on the command line."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch.distributed as dist

import slapo
from slapo.command import main
from slapo.verify.placement.offline import check_at
from tests.check.verdicts import fake_world

SCRIPT = """
import torch
from torch import nn
from beside import HIDDEN


def layers():
    model = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 40), nn.Linear(40, HIDDEN))
    return model, torch.ones(3, 5, HIDDEN, requires_grad=True)


def right(forgets=False):
    model, x = layers()

    def schedule(sch, sequence_parallel=False):
        if sequence_parallel:
            raise ValueError("no tokens here")
        sch["1"].shard("weight", axis=0).shard("bias", axis=0)
        if not forgets:
            sch["1"].sync("bwd_post", "all_reduce")
        sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

    return model, schedule, x


def wrong():
    return right(forgets=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "beside.py").write_text("HIDDEN = 16\n")
    path = tmp_path / "script_of_mine.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(path)


def test_right_and_wrong(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{script}:right", "--tp", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "Sequential on 4 ranks: 5 primitives, every tensor where it belongs",
        "Sequential on 2 ranks: 5 primitives, every tensor where it belongs",
    ]
    assert main(["check", f"{script}:wrong", "--tp", "2"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert 'add sch["1"].sync("bwd_post", "all_reduce")' in said.err
    assert f"{script}:" in said.err
    assert main(["check", f"{script}:right", "--tp", "2", "--sp"]) == 1
    assert "no tokens here" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_draw(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", f"{script}:right", "--tp", "4"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "rank 3 of 4" in page
    assert "in_features=16, out_features=10" in page  # of 40, on four ranks
    assert "http" not in page  # it needs no other file


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_the_tuner(name: str) -> str:
        if name in ("optuna", "matplotlib"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_the_tuner)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"slapo {slapo.__version__}, Python 3.")
    assert any("gloo" in line for line in lines)
    missing = "optuna (slapo tune), matplotlib (plots of slapo tune and slapo dryrun)"
    assert f"not installed: {missing}; pip install 'slapo[tune]'" in lines


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.py:make", "--tp", "2"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err


def test_within_a_process_group() -> None:
    with fake_world(), pytest.raises(slapo.SlapoError, match=r"call slapo\.check"):
        list(check_at(lambda: None, 2))


def test_models_of_transformers_need_no_inputs() -> None:
    from tests.sharding.families import FAMILIES, Steps

    def make() -> object:
        return FAMILIES["t5"].build(0.1), lambda sch, sequence_parallel: Steps(
            FAMILIES["t5"], sequence_parallel
        ).apply(sch)

    assert [checked.ranks for checked in check_at(make, 4, sequence_parallel=True)] == [4, 2]


# --- the command itself ---------------------------------------------------------------------------
def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in ("check", "recipes", "dryrun", "tune"))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"slapo {slapo.__version__}\n"


def test_a_reader_that_has_seen_enough() -> None:
    code = "import sys; from slapo.command import main; sys.exit(main(['recipes']))"
    reading = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert reading.stdout is not None
    reading.stdout.close()
    _, said = reading.communicate(timeout=120)
    assert (reading.returncode, said) == (0, b"")


def test_a_slip_in_a_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="did you mean 'create_schedule'"):
        _ = slapo.creat_schedule
    with pytest.raises(AttributeError, match=r"module 'slapo\.utils' has no attribute"):
        _ = slapo.utils.nothing_like_it
