"""`slapo tune` and `python -m slapo.autotune.tune`, with trials as processes."""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slapo import command
from slapo.autotune import Database
from slapo.autotune.trial import _runs
from slapo.autotune.tune import main

pytest.importorskip("optuna")
Run = Callable[..., tuple[int, str, str]]

SPACE = """
def space(choose):
    tp = choose("tp", [1, 2, 4])
    return {"tp": tp, "micro": choose("micro", [1, 2, 4] if tp > 1 else [1, 2])}
"""
#: Eight points; the larger the values the faster.
TRAIN = """
import json, os, sys
values = json.loads(os.environ["SLAPO_TRIAL"])
with open("runs", "a") as file: print(json.dumps(values), sys.argv[1:], file=file)
print(json.dumps({"throughput": values["tp"] * 10 + values["micro"]}))
"""
PYTHON = ["python", "-S", "-E"]


@pytest.fixture
def tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command in a folder with a space and a script: its status, output and errors."""
    monkeypatch.chdir(tmp_path)
    Path("space.py").write_text(SPACE)
    Path("train.py").write_text(TRAIN)

    def run(*arguments: str, start: Callable[..., int] = main) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = start([*map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out, printed.err

    return run


def runs() -> list[str]:
    return Path("runs").read_text().splitlines()


def test_a_search(tune: Run) -> None:
    def slapo(arguments: list[str]) -> int:
        return command.main(["tune", *arguments])

    options = ["--config", "space.py", "--db", "my.db", "--trials", "8"]
    script = [*PYTHON, "train.py", "--tp={tp}", "--db", "{micro}", "--help"]
    status, out, err = tune(*options, *script, start=slapo)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["trial", "throughput", "tp", "micro"]
    assert lines[1].split()[1:] == ["44", "4", "4"]
    assert "8 trials of 8 points: 8 ok" in out
    best = lines[lines.index("the best again:") + 1]
    python = shlex.split(best)[1]
    assert Path(shutil.which(python) or "").samefile(sys.executable)
    assert shlex.split(best) == [
        'SLAPO_TRIAL={"tp": 4, "micro": 4}',
        *[python, *PYTHON[1:]],
        *["train.py", "--tp=4", "--db", "4", "--help"],
    ]
    assert "[8/8]" in err
    assert "best 44" in err
    assert len(set(runs())) == 8
    assert "[8/8]" not in tune(*options, *script)[2]  # nothing is left to do
    assert len(runs()) == 8
    assert Path("my.db.png").exists() == ("no plot" not in err)
    assert len(list(Path("my.db.logs").iterdir())) == 8
    done = subprocess.run(["bash", "-c", best], capture_output=True, text=True, check=False)
    assert done.stdout == '{"throughput": 44}\n'


def test_the_published_form(tune: Run) -> None:
    Path("bench.py").write_text(
        "def get_bs_range(args):\n    assert args.error_stop == 'symbol'\n    return 4, 32, 4\n"
        "def update_space(args, space):\n"
        "    ratios = [1.0] if space['batch_size'].val < 12 else [0.5, 1.0]\n"
        "    space.create_symbol('ckpt_ratio', ratios)\n    return space\n"
    )
    Path("run.sh").write_text(
        'if [ $1 -gt 16 ]; then echo "RuntimeError: CUDA out of memory"; exit 1; fi\n'
        "echo $1 $2 >> runs; echo samples/s: $1\n"
    )
    options = ["--config", "bench.py", "--db", "bench.json", "--error-stop", "symbol"]
    status, out, err = tune(*options, "--trials", "14", "run.sh", "batch_size", "ckpt_ratio")
    assert status == 0
    assert re.search(r"bash run\.sh 16 (0\.5|1\.0)$", out, re.MULTILINE)
    assert sorted(runs()) == ["12 0.5", "12 1.0", "16 0.5", "16 1.0", "4 1.0", "8 1.0"]
    trials = Database("bench.json").trials
    assert len(trials) == 14
    assert {t.outcome for t in trials} == {"ok", "out_of_memory", "skipped"}
    assert "failed with batch_size=" in err


def test_a_command_in_the_configuration(tune: Run) -> None:
    Path("space.py").write_text(
        f"{SPACE}\ndef command(point):\n"
        f"    return {PYTHON!r} + ['train.py', '--gpus', point['tp']]\n"
    )
    status, out, _ = tune("--config", "space.py", "--trials", "2")
    assert status == 0
    assert "train.py --gpus " in out


def test_outcomes_are_kept_with_their_logs(tune: Run) -> None:
    """``test_trial.py`` has all of them."""
    Path("space.py").write_text("def space(choose):\n    return {'n': choose('n', range(3))}\n")
    Path("train.py").write_text(
        "import json, os, time\nn = json.loads(os.environ['SLAPO_TRIAL'])['n']\n"
        "time.sleep(60 * (n == 1))\nif n == 2: raise KeyError('lost')\n"
        "print('{\"throughput\": 5}')\n"
    )
    options = ["--config", "space.py", "--trials", "3", "--timeout", "0.7"]
    status, out, _ = tune(*options, *PYTHON, "train.py")
    assert status == 0
    found = {trial.values["n"]: trial for trial in Database("trials.db").trials}
    assert [found[n].outcome for n in range(3)] == ["ok", "timeout", "crash"]
    assert found[0].result == 5.0
    assert found[1].seconds >= 0.7
    assert found[2].reason == "exit status 1: KeyError: 'lost'"
    assert "KeyError: 'lost'" in Path(found[2].log).read_text()
    assert "3 trials of 3 points: 1 " in out


def test_a_script_without_a_result(tune: Run) -> None:
    for text, why in [("print('done')", "'done'"), ("print('{\"throughput\": NaN}')", "nan")]:
        Path("train.py").write_text(text)
        for db in Path().glob("trials.db"):
            db.unlink()
        status, _, err = tune("--config", "space.py", *PYTHON, "train.py")
        assert status == 2
        assert "the script reports no result" in err
        assert why in err
        assert "report_result" in err
        assert Path(re.findall(r"Its log: (\S+)", err)[0]).exists()
    Path("train.py").write_text(TRAIN)
    status, out, _ = tune("--config", "space.py", "--retry", "--trials", "3", *PYTHON, "train.py")
    assert status == 0
    assert "3 ok" in out


def test_a_configuration_that_is_no_python(tune: Run) -> None:
    Path("space.py").write_text("def space(:")
    status, out, err = tune("--config", "space.py", "train.py")
    assert (status, out) == (2, "")
    assert "SyntaxError" in err


def test_a_script_that_always_fails(tune: Run) -> None:
    Path("train.py").write_text("raise KeyError('lost')")
    status, out, _ = tune("--config", "space.py", "--trials", "2", *PYTHON, "train.py")
    assert status == 1
    assert "no trial gave a result" in out
    assert "crash, trial 0: exit status 1: KeyError: 'lost' trials.db.logs/trial-0000.log" in out


def test_files_in_the_way(tune: Run) -> None:
    Path("trials.db.png").mkdir()
    status, out, err = tune("--config", "space.py", "--trials", "1", *PYTHON, "train.py")
    assert status == 0
    assert "1 trials of 8 points: 1 ok" in out
    assert "no plot: " in err
    Path("other.db.logs").touch()
    status, _, err = tune("--config", "space.py", "--db", "other.db", *PYTHON, "train.py")
    assert status == 2
    assert "other.db.logs/trial-0000.log cannot be written: " in err


def test_without_optuna(tune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, err = tune("--config", "space.py", "train.py")
    assert status == 2
    assert "pip install 'slapo[tune]'" in err


def test_what_is_ignored_stays_so(tune: Run) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Path("train.py").write_text("import os; os.kill(int(os.environ['TUNER']), 1)\n" + TRAIN)
        os.environ["TUNER"] = str(os.getpid())
        status, out, _ = tune("--config", "space.py", "--trials", "1", *PYTHON, "train.py")
    finally:
        signal.signal(signal.SIGHUP, before)
        del os.environ["TUNER"]
    assert status == 0
    assert "1 ok" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_search_and_its_trial(tune: Run, number: signal.Signals) -> None:
    Path("train.py").write_text(
        f"import os, time; open('pid', 'w').write(str(os.getpid()))\n"
        f"os.kill({os.getpid()}, {int(number)}); time.sleep(60)"
    )
    before = signal.signal(number, signal.SIG_DFL)  # nohup, around the tests, ignores one
    try:
        status, _, err = tune("--config", "space.py", "--trials", "1", *PYTHON, "train.py")
    finally:
        signal.signal(number, before)
    assert status == 130
    assert "the same command continues" in err
    assert not _runs(int(Path("pid").read_text()))
    assert [trial.outcome for trial in Database("trials.db").trials] == ["cut_off"]


def test_the_module_can_be_run(tune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def module(arguments: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["tune", *arguments])
        monkeypatch.delitem(sys.modules, "slapo.autotune.tune", raising=False)
        runpy.run_module("slapo.autotune.tune", run_name="__main__")
        return -1

    status, out, _ = tune("--config", "space.py", "--trials", "1", "train.py", start=module)
    assert status == 0
    assert "1 trials of 8 points: 1 ok" in out
