"""Trials: what becomes of a process, and of all that it starts."""

from __future__ import annotations

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
from slapo.autotune import report_result, trial_values
from slapo.autotune.launch import Launcher
from slapo.autotune.space import Refused, TuneError
from slapo.autotune.supervisor import Log, descendants
from slapo.autotune.trial import Outcome, classify, run_command, run_function

#: Starts in some milliseconds.
PYTHON = [sys.executable, "-S", "-E", "-c"]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's kernel")


def run(tmp_path: Path, code: str, timeout: float = 20.0, values: Any = None) -> Outcome:
    return run_command([*PYTHON, code], values or {}, tmp_path / "log", timeout)


OUTCOMES = {
    "ok": "print('noise'); print('{\"throughput\": 8.5, \"memory\": 3}'); print('bye')",
    "out_of_memory": "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory.')",
    "crash": "raise KeyError('lost')",
    "timeout": "import time; time.sleep(60)",
    "wrong_schedule": "raise SystemExit('slapo.errors.PlacementError: h.0: not summed')",
    "no_result": "print('all is well')",
    "garbage": "print('{\"throughput\": NaN}')",
    "refused": "raise SystemExit('slapo.autotune.space.Refused: 3 ranks')",
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_outcomes(tmp_path: Path, kind: str) -> None:
    outcome = run(tmp_path, OUTCOMES[kind], timeout=0.5 if kind == "timeout" else 20.0)
    assert outcome.kind == kind, outcome
    assert (outcome.value is not None) == (kind == "ok")
    assert bool(outcome.reason) == (kind != "ok")
    if kind == "ok":
        assert (outcome.value, outcome.figures) == (8.5, {"memory": 3})
        assert "bye" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("raise MemoryError", "out_of_memory", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "out_of_memory", "signal 9"),
        ("raise SystemExit(137)", "out_of_memory", "signal 9"),
        ("raise SystemExit('  exitcode  : -9 (pid: 7)')", "out_of_memory", "signal 9"),
        ("raise SystemExit('std::bad_alloc')", "out_of_memory", "bad_alloc"),
        ("import os; os.abort()", "crash", "exit status -6"),
        ("raise SystemExit(3)", "crash", "exit status 3: it printed nothing"),
        ("print('{\"throughput\": 1}'); raise SystemExit(1)", "crash", "exit status 1"),
        ("print('slapo.errors.MissingPackageError: x'); raise SystemExit(1)", "crash", "status 1"),
        ('print(\'{"throughput": "fast"}\')', "garbage", "throughput is 'fast'"),
        ("print('{\"throughput\": true}')", "garbage", "throughput is True"),
        ("print('{\"throughput\": null}')", "garbage", "throughput is None"),
        ("print('{\"speed\": 1}')", "no_result", r"has \['speed'\] and no 'throughput'"),
        ("print('{{{{')", "no_result", "its last line is '{{{{'"),
        ("pass", "no_result", "it printed nothing"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", "no_result", "last line"),
        ("print('RuntimeError: out of memory; skipped')", "out_of_memory", "skipped"),
        (
            "print('[rank1]: slapo.errors.SlapoError: x'); raise SystemExit(1)",
            "wrong_schedule",
            "x",
        ),
    ],
)
def test_how_outcomes_are_told_apart(tmp_path: Path, code: str, kind: str, reason: str) -> None:
    outcome = run(tmp_path, code)
    assert outcome.kind == kind, outcome
    assert re.search(reason, outcome.reason)


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("samples/s: 8.5, peak memory: 0 MiB", 8.5),
        ("steps: 1 loss: 3.1 iter time (s): 0.5 samples/sec: 16.0", 16.0),
        (" elapsed time per iteration (ms): 500.0 | global batch size:    16 | lm loss: 2", 32.0),
        ('50%\r100%\r{"throughput": 3}WARNING: late', 3.0),
    ],
)
def test_logs_of_training_loops(text: str, speed: float) -> None:
    ended = {"returncode": 0, "timed_out": False, "seconds": 1.0, "error": ""}
    assert classify(text, ended, 60, "throughput").value == speed


FAILED: dict[str, Any] = {"returncode": 1, "timed_out": False, "seconds": 1.0, "error": ""}
QUOTES = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    {}
"""
CAUGHT = "slapo.errors.SlapoError: h.0: not here; the reference runs\n"
PEER = "[rank1]: RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1\n"
LAUNCHER = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + "=" * 20 + "\n"


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("to avoid running out of memory\nKeyError: 'x'\n", "crash", "KeyError"),
        ("UserWarning: not enough memory to pin\nKeyError: 'x'\n", "crash", "KeyError"),
        (
            QUOTES.format("from math import OutOfMemoryError")
            + "ImportError: cannot import name 'OutOfMemoryError' from 'math'",
            "crash",
            "ImportError",
        ),
        (QUOTES.format("raise MemoryError") + "MemoryError", "out_of_memory", "^MemoryError$"),
        ("[rank0]: torch.OutOfMemoryError: x\n" + PEER, "out_of_memory", "torch.OutOf"),
        ("RuntimeError: CUDA error: out of memory", "out_of_memory", "CUDA error"),
        ("ERROR:root:CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory", "Tried"),
        ("Error: CUDA out of memory", "out_of_memory", "CUDA"),
        ("  what():  std::bad_alloc", "out_of_memory", "bad_alloc"),
        ("run.sh: line 3: fork: Cannot allocate memory", "out_of_memory", "fork"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable", "out_of_memory", "Array"),
        ("a table\nout of memory", "out_of_memory", "out of memory"),
        (CAUGHT + QUOTES.format("a['b']") + "KeyError: 'b'", "crash", "KeyError"),
        (CAUGHT + QUOTES.format("raise Boom") + "__main__.Boom: 3", "crash", "Boom"),
        ("[default0]:[rank0]: " + CAUGHT + PEER + LAUNCHER, "wrong_schedule", "h.0: not here"),
        (CAUGHT + "Error: run.sh failed", "wrong_schedule", "h.0: not here"),
        ("slapo.Schedule: 3 primitives", "crash", "exit status 1"),
        ("0: " + CAUGHT, "wrong_schedule", "h.0: not here"),
        ("50%\rslapo.autotune.Refused: 3 ranks", "refused", "3 ranks"),
    ],
)
def test_failures_are_told_by_the_exception(text: str, kind: str, reason: str) -> None:
    outcome = classify(text, FAILED, 60, "throughput")
    assert outcome.kind == kind, outcome
    assert re.search(reason, outcome.reason)


@pytest.mark.parametrize(
    "line", ["x" * 2**20, "[" * 2**20, "a." * 2**19, "{" * 2**20, "a " * 2**19]
)
def test_long_lines_are_read_soon(line: str) -> None:
    started = time.process_time()
    assert classify(line, {**FAILED, "returncode": 0}, 60, "throughput").kind == "no_result"
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("line", "value", "figures"),
    [
        ('{"throughput": -1}', -1.0, {}),
        ('step 1 {\'lr\': 0.1} {"loss": 2} {"throughput": 5}', 5.0, {}),
        ('{"throughput": 5, "deep": ' + "[" * 900 + "]" * 900 + ', "loss": 2}', 5.0, {"loss": 2}),
        ('{"throughput": 5, "long": "' + "x" * 10**5 + '", "loss": 2}', 5.0, {"loss": 2}),
        ('{"throughput": 1' + "0" * 400 + "}", None, {}),
        ('{"throughput": ' + "[" * 900 + "]" * 900 + "}", None, {}),
    ],
)
def test_lines_of_json(line: str, value: float | None, figures: dict[str, Any]) -> None:
    outcome = classify(line, {**FAILED, "returncode": 0}, 60, "throughput")
    assert (outcome.value, outcome.figures) == (value, figures)
    assert outcome.kind == ("garbage" if value is None else "ok")
    assert len(outcome.reason) < 400


@pytest.mark.parametrize("text", ["samples/s: 1.2.3", "samples/s: " + "9" * 400, "samples/s: ."])
def test_speeds_that_are_none(text: str) -> None:
    assert classify(text, {**FAILED, "returncode": 0}, 60, "throughput").kind == "no_result"


@pytest.mark.parametrize("text", ["x" * 200_000, "a\0b"])
def test_values_that_the_system_cannot_pass(tmp_path: Path, text: str) -> None:
    command = [*PYTHON, "print(1)", text]
    outcome = run_command(command, {"n": text}, tmp_path / "log", 5)
    assert outcome.kind == "crash"
    assert "could not be started" in outcome.reason


@linux
def test_a_signal_to_the_process_that_watches_is_no_lack_of_memory(tmp_path: Path) -> None:
    code = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
    outcome = run(tmp_path, code)
    assert outcome.kind == "crash"
    assert "watches over it" in outcome.reason


def test_an_error_of_the_library_is_told_by_its_name() -> None:
    """As Python prints the classes that a script can meet."""
    for error in (slapo.PlacementError, slapo.VerificationError, slapo.TraceError):
        text = f"Traceback (most recent call last):\n{error.__module__}.{error.__name__}: text\n"
        ended = {"returncode": 1, "timed_out": False, "seconds": 1.0, "error": ""}
        assert classify(text, ended, 60, "throughput").kind == "wrong_schedule"


def test_a_trial_gets_its_values(tmp_path: Path) -> None:
    code = "import os; print('{\"throughput\": 1, \"got\": %s}' % os.environ['SLAPO_TRIAL'])"
    outcome = run(tmp_path, code, values={"tp": 2, "kernel": "flash"})
    assert outcome.figures["got"] == {"tp": 2, "kernel": "flash"}


def test_a_program_that_cannot_start(tmp_path: Path) -> None:
    outcome = run_command([str(tmp_path)], {}, tmp_path / "log", 5)
    assert outcome.kind == "crash"
    assert "could not be started" in outcome.reason


def test_a_trial_that_prints_without_end(tmp_path: Path) -> None:
    outcome = run(tmp_path, "while True: print('x' * 4096)", timeout=1.0)
    assert outcome.kind == "timeout"
    assert (tmp_path / "log").stat().st_size < 2**22
    flood = "print('first'); print('x' * 2**24); print('{\"throughput\": 2}')"
    assert run(tmp_path, flood).value == 2.0
    text = (tmp_path / "log").read_text()
    assert text.startswith("first")
    assert "bytes left out" in text


def test_logs_keep_both_ends(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log"), keep=10)
    for number in range(1000):
        log.add(b"%d " % number)
    log.close()
    text = (tmp_path / "log").read_text()
    assert text.startswith("0 1 2 3 4 ")
    assert text.endswith("98 999 ")
    assert len(text) < 60


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


ORPHAN = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        with open(sys.argv[1], "w") as file: file.write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]): time.sleep(0.01)
"""


@linux
@pytest.mark.parametrize("rest", ["print('{\"throughput\": 1}')", "time.sleep(600)", "1 / 0"])
def test_no_process_of_a_trial_is_left(tmp_path: Path, rest: str) -> None:
    """Not even one that has a session of its own and lost its parent."""
    told = tmp_path / "pid"
    outcome = run_command([*PYTHON, ORPHAN + rest, str(told)], {}, tmp_path / "log", 1.5)
    assert outcome.kind in ("ok", "timeout", "crash")
    assert outcome.seconds < 5
    assert not is_there(int(told.read_text()))


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_ends_with_its_tuner(tmp_path: Path, number: int) -> None:
    told = tmp_path / "pid"
    supervisor = Path(slapo.__file__).parent / "autotune" / "supervisor.py"
    code = f"""
import os, subprocess, sys, time
command = [sys.executable, "-I", "-S", {str(supervisor)!r}, {str(tmp_path / "log")!r}, "60"]
trial = [*{PYTHON!r}, {ORPHAN + "time.sleep(600)"!r}, {str(told)!r}]
subprocess.run([*command, str(os.getpid()), *trial], start_new_session=True)
"""
    tuner = subprocess.Popen([*PYTHON, code], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 10
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    started = list(descendants(tuner.pid))
    assert len(started) >= 2
    tuner.send_signal(number)
    tuner.wait()
    orphan = int(told.read_text())
    while any(map(is_there, [*started, orphan])) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_there, [*started, orphan]))
    assert tuner.stdin is not None
    tuner.stdin.close()


def test_functions_as_trials() -> None:
    def raising(error: BaseException) -> Any:
        def run(values: dict[str, Any]) -> float:
            raise error

        return run

    assert run_function(lambda values: 2 * values["a"], {"a": 3}, "throughput").value == 6.0
    for error, kind in [
        (MemoryError(), "out_of_memory"),
        (Refused("3 ranks"), "refused"),
        (KeyError("a"), "crash"),
        (slapo.PlacementError("h.0"), "wrong_schedule"),
        (type("Mine", (slapo.PlacementError,), {})("h.0"), "wrong_schedule"),
        (slapo.errors.MissingPackageError("triton"), "crash"),
        (SystemExit(1), "crash"),
    ]:
        assert run_function(raising(error), {}, "throughput").kind == kind
    with pytest.raises(KeyboardInterrupt):
        run_function(raising(KeyboardInterrupt()), {}, "throughput")
    for value in (None, "4", True, 10**400):
        assert run_function(lambda values, value=value: value, {}, "throughput").kind == "garbage"
    for value in (torch.tensor(4.0), torch.tensor(4.0).numpy()[()]):
        assert run_function(lambda values, value=value: value, {}, "throughput").value == 4.0


def test_what_scripts_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLAPO_TRIAL", '{"tp": 4}')
    assert trial_values(tp=1, micro=2) == {"tp": 4, "micro": 2}
    report_result(3, loss=0.5)
    assert json.loads(capsys.readouterr().out) == {"throughput": 3.0, "loss": 0.5}
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="cannot be compared"):
            report_result(wrong)
    for text in ("[1]", "tp=4"):
        monkeypatch.setenv("SLAPO_TRIAL", text)
        with pytest.raises(ValueError, match="is no JSON object"):
            trial_values()


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


def test_commands_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prog").touch()
    for command, message in [
        ([], "there is no script to run"),
        (["nope.py"], "there is no script 'nope.py' in "),
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["./prog"], r"the program './prog' may not be executed; run: chmod \+x ./prog"),
    ]:
        with pytest.raises(TuneError, match=message):
            Launcher(command)
    with pytest.raises(TuneError, match=r"placeholder \{tpp\}: did you mean 'tp'\? Points"):
        Launcher(["echo", "{tpp}"]).check(["tp", "pp"])
    with pytest.raises(TuneError, match="return a list of the program"):
        Launcher(lambda values: "echo 1")({})
