"""Trials: the outcome of a process, and the end of all its processes."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo
from slapo.autotune import report_result, trial, trial_values, tune
from slapo.autotune.space import Refused
from slapo.autotune.trial import Launcher, Trial, run_command, run_function
from slapo.autotune.values import kind_of, report_failure

#: Starts in some milliseconds.
PYTHON = [sys.executable, "-S", "-E", "-c"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(tmp_path: Path, code: str, timeout: float = 20.0, values: Any = None) -> Trial:
    return run_command([*PYTHON, code], values or {}, tmp_path / "log", timeout)


def entries(*found: Any) -> str:
    """Code that writes lines to the result file, as the functions of the library do."""
    text = "".join(json.dumps(entry) + "\n" for entry in found)
    return f"import os; open(os.environ['SLAPO_RESULTS'], 'a').write({text!r});"


OOM, PEER = ["out_of_memory", "CUDA out of memory"], ["crash", "Connection closed by peer"]


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        # The result: from the file, from the output, or from the log of a known loop.
        (entries({"throughput": 8.5, "memory": 3}), "ok", "8.5 {'memory': 3}"),
        (entries({"throughput": 8.5}) + "print('{\"throughput\": 7}')", "ok", "8.5"),
        ('print(\'noise\\n{"throughput": 8.5, "x": 3}\\nbye\')', "ok", "8.5 {'x': 3}"),
        ("print('[default0]:{\"throughput\": 5}, late')", "ok", "5.0"),
        ("print('50%\\r100%\\r{\"throughput\": -1}')", "ok", "-1.0"),
        ("print('samples/s: 8.5, peak memory: 0 MiB')", "ok", "8.5"),
        ("print('steps: 1 loss: 3.1 iter time (s): 0.5 samples/sec: 16.0')", "ok", "16.0"),
        (
            "print(' elapsed time per iteration (ms): 500.0 | global batch size:    16 | lm loss')",
            "ok",
            "32.0",
        ),
        # Errors: the file decides, and the first rank that failed for a reason of its own.
        (entries(OOM, PEER) + "raise SystemExit(1)", "out_of_memory", "CUDA out of memory"),
        (entries(PEER, OOM) + "raise SystemExit(1)", "out_of_memory", "CUDA out of memory"),
        (entries(PEER, ["crash", "later"]) + "raise SystemExit(1)", "crash", "by peer"),
        (entries(["wrong_schedule", "h.0"]) + "raise SystemExit(1)", "wrong_schedule", "h.0"),
        (entries(["refused", "3 ranks"]) + "raise SystemExit(1)", "refused", "3 ranks"),
        (entries(OOM), "out_of_memory", "CUDA"),
        (entries({"throughput": 1}, OOM) + "raise SystemExit(1)", "out_of_memory", "CUDA"),
        # Without entries: the exit status and the last line.
        ("raise MemoryError", "out_of_memory", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "out_of_memory", "signal 9"),
        ("raise SystemExit(137)", "out_of_memory", "signal 9"),
        ("raise SystemExit('RuntimeError: CUDA error: out of memory')", "out_of_memory", "CUDA"),
        ("raise SystemExit('std::bad_alloc')", "out_of_memory", "bad_alloc"),
        ("print('RuntimeError: out of memory; skipped')", "out_of_memory", "skipped"),
        (
            "print('out of memory', flush=True); raise KeyError('lost')",
            "crash",
            "exit status 1: KeyError",
        ),
        ("import os; os.abort()", "crash", "exit status -6"),
        ("raise SystemExit(3)", "crash", "exit status 3: it printed nothing"),
        ("print('{\"throughput\": 1}'); raise SystemExit(1)", "crash", "exit status 1"),
        # No result, or no number.
        ('print(\'{"throughput": "fast"}\')', "garbage", "throughput is 'fast'"),
        ("print('{\"throughput\": NaN}')", "garbage", "throughput is nan"),
        ("print('{\"throughput\": true}')", "garbage", "throughput is True"),
        ("print('{\"throughput\": 1' + '0' * 400 + '}')", "garbage", "throughput is 1000"),
        ("print('{\"speed\": 1}')", "no_result", r"has \['speed'\]"),
        ("print('{\"' * 9999)", "no_result", "no line of JSON"),
        ("print('[' * 2**20)", "no_result", "no line of JSON"),
        ("print('samples/s: 1.2.3')", "no_result", "samples/s: 1.2.3"),
        ("pass", "no_result", "it printed nothing"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", "no_result", "last line"),
        (entries() + "open(os.environ['SLAPO_RESULTS'], 'a').write('{\"thr')", "no_result", ""),
        ("import time; time.sleep(60)", "timeout", "timed out after 0.5 s"),
    ],
)
def test_outcomes(tmp_path: Path, code: str, kind: str, reason: str) -> None:
    outcome = run(tmp_path, code, timeout=0.5 if kind == "timeout" else 20.0)
    assert outcome.outcome == kind, outcome
    if kind == "ok":
        assert f"{outcome.result} {outcome.figures or ''}".strip() == reason
    else:
        assert outcome.result is None
        assert re.search(reason, outcome.reason)
        assert 0 < len(outcome.reason) < 400
    assert outcome.seconds > 0
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


class Mine(slapo.PlacementError):
    """A class of a user."""


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (MemoryError(), "out_of_memory", "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory", "CUDA out"),
        (RuntimeError("x\nDefaultCPUAllocator: can't allocate memory: 8 B"), "out_of_memory", "8"),
        (Refused("3 ranks"), "refused", "^3 ranks$"),
        (slapo.PlacementError("h.0: not summed"), "wrong_schedule", "PlacementError: h.0"),
        (Mine("h.0"), "wrong_schedule", "h.0"),
        (slapo.TraceError("h.0"), "wrong_schedule", "h.0"),
        (slapo.MissingPackageError("triton"), "crash", "triton"),
        (KeyError("lost"), "crash", "^KeyError: 'lost'$"),
    ],
)
def test_errors(error: Exception, kind: str, reason: str) -> None:
    """By the exception of a script that calls ``trial_values``, or of a function."""

    def raises(values: Any) -> Any:
        raise error

    outcome = run_function(raises, {}, "throughput")
    assert (outcome.outcome, outcome.reason) == kind_of(error)
    assert outcome.outcome == kind
    assert re.search(reason, outcome.reason)


def test_functions_as_trials() -> None:
    def interrupt(values: Any) -> None:
        raise KeyboardInterrupt

    assert run_function(lambda values: 2 * values["a"], {"a": 3}, "throughput").result == 6.0
    assert run_function(sys.exit, {}, "throughput").outcome == "crash"
    with pytest.raises(KeyboardInterrupt):
        run_function(interrupt, {}, "throughput")
    for value in (None, "4", True, 10**400):
        assert (
            run_function(lambda values, value=value: value, {}, "throughput").outcome == "garbage"
        )
    for value in (torch.tensor(4.0), torch.tensor(4.0).numpy()[()]):
        assert run_function(lambda values, value=value: value, {}, "throughput").result == 4.0


def test_a_failed_cause_is_the_outcome() -> None:
    with pytest.raises(slapo.SlapoError) as found:
        try:
            raise MemoryError
        except MemoryError as error:
            raise slapo.SlapoError("stage 1 failed") from error
    assert kind_of(found.value)[0] == "out_of_memory"


def test_functions_that_scripts_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results"
    said: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: said.append(kind.__name__))
    monkeypatch.setenv("SLAPO_TRIAL", '{"tp": 4}')
    assert trial_values(tp=1, micro=2) == {"tp": 4, "micro": 2}
    report_result(3, loss=0.5)
    assert json.loads(capsys.readouterr().out) == {"throughput": 3.0, "loss": 0.5}
    sys.excepthook(KeyError, KeyError("a"), None)
    assert not file.exists(), "by hand, without a search"

    monkeypatch.setenv("SLAPO_RESULTS", str(file))
    for _ in range(2):
        trial_values()
    report_result(3, loss=0.5)
    for error in (slapo.PlacementError("h.0"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    report_failure("refused", "3 ranks")
    assert said == ["KeyError", "PlacementError", "KeyboardInterrupt"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"throughput": 3.0, "loss": 0.5},
        ["wrong_schedule", "slapo.errors.PlacementError: h.0"],
        ["refused", "3 ranks"],
    ]
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="cannot be compared"):
            report_result(wrong)


def test_a_script_of_the_library(tmp_path: Path) -> None:
    """The uncaught error of a real process, with its traceback in the log."""
    code = (
        "import slapo.autotune as a; values = a.trial_values(); a.report_result(3.0);"
        "raise a.Refused(f'{values} is too much')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    outcome = run_command(command, {"tp": 2, "kernel": "flash"}, tmp_path / "log", 60)
    assert (outcome.outcome, outcome.reason) == (
        "refused",
        "{'tp': 2, 'kernel': 'flash'} is too much",
    )
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("command", "values"),
    [
        ([*PYTHON, "print(1)", "x" * 200_000], {}),
        ([*PYTHON, "print(1)"], {"n": "x" * 200_000}),
        ([*PYTHON, "print(1)", "a\0b"], {}),
        (["/"], {}),
    ],
)
def test_programs_that_cannot_start(tmp_path: Path, command: Any, values: Any) -> None:
    outcome = run_command(command, values, tmp_path / "log", 5)
    assert outcome.outcome == "crash"
    assert "could not be started" in outcome.reason


# --- processes -----------------------------------------------------------------------------------
#: A child in this session, and one in its own that lost its parent; both ignore SIGTERM.
CHILDREN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for away in (False, True):
    if not os.fork():
        if away: os.setsid()
        if not os.fork():
            with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
while not os.path.exists(sys.argv[1]) or open(sys.argv[1]).read().count("\\n") < 2: time.sleep(0.01)
"""


@linux
@pytest.mark.parametrize("rest", ["print('{\"throughput\": 1}')", "time.sleep(600)", "1 / 0"])
def test_no_process_of_a_trial_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    monkeypatch.setattr(trial, "_GRACE", 0.1)
    file = tmp_path / "pids"
    outcome = run_command([*PYTHON, CHILDREN + rest, str(file)], {}, tmp_path / "log", 1.0)
    assert outcome.outcome in ("ok", "timeout", "crash")
    assert outcome.seconds < 5
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 2
    assert not any(map(trial._runs, pids))


def test_a_launcher_has_time_to_end_its_ranks(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def end(*_): time.sleep(0.2); print('ended', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); time.sleep(60)"
    )
    assert run(tmp_path, code, timeout=0.5).outcome == "timeout"
    assert (tmp_path / "log").read_text() == "ended\n"


@linux
def test_a_trial_that_is_interrupted_while_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            raise KeyboardInterrupt

    started: list[Interrupted] = []
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import time; time.sleep(60)")
    assert started[0].wait(5) == -signal.SIGKILL


@linux
@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="searches")
def test_the_next_start_ends_the_trial_of_a_tuner_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    tuner = (
        "from slapo.autotune.trial import run_command; from pathlib import Path;"
        f"command = {[*PYTHON, CHILDREN + 'time.sleep(600)', str(file)]!r};"
        f"run_command(command, {{}}, Path({str(tmp_path / 'db.logs' / 'trial-0000.log')!r}), 60)"
    )
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", tuner])
    while not (file.exists() and file.read_text().count("\n") == 2):
        time.sleep(0.02)
    process.kill()
    process.wait()
    pids = [int(line) for line in file.read_text().split()]
    assert all(map(trial._runs, pids))
    command = ["echo", '{"throughput": 1}']
    for name, is_other in [("other", True), ("db", False)]:
        found = tune(lambda choose: {"a": choose("a", [1])}, command, db=tmp_path / name)
        assert found.best is not None
        assert [trial._runs(pid) for pid in pids] == [is_other] * 2


# --- command lines -------------------------------------------------------------------------------
def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run.sh"):
        Path(name).touch()
    values = {"tp": 2, "kernel": "a b", "shape": [1, 2]}
    made = Launcher("train.py --tp={tp} {kernel} {shape} {{tp}} '{\"a\": 1}'")(values)
    assert made == [sys.executable, "train.py", "--tp=2", "a b", "[1, 2]", "{tp}", '{"a": 1}']
    assert Launcher(["run.sh", "tp", "tp"], bare=True)(values) == ["bash", "run.sh", "2", "2"]
    assert Launcher(["run.sh", "tp"])(values) == ["bash", "run.sh", "tp"]
    assert Launcher(["python", "-V"])(values)[0] == sys.executable
    monkeypatch.setenv("PATH", os.defpath)
    assert Path(Launcher(["torchrun"])(values)[0]).name == "torchrun"
    assert Launcher(lambda v: ["run.sh", v["tp"]])(values) == ["bash", "run.sh", "2"]
    # The Python that ran the trials, by its short name only where a shell finds that one.
    launcher = Launcher(["train.py", "{kernel}"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher.line(values).endswith(shlex.join(["", sys.executable, "train.py", "a b"])[2:])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.defpath}")
    line = launcher.line(values)
    assert line.endswith(" python train.py 'a b'")
    printed = subprocess.run(
        ["bash", "-c", line.replace("python train.py", "printenv SLAPO_TRIAL; true")],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert json.loads(printed.stdout) == values
