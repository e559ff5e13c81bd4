"""What ``import slapo`` costs beyond ``import torch``, in fresh processes, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory

from benchmark.measure import Progress, Result, Target, Times

CODES = ("import torch", "import slapo")
ROUNDS = 7


def run(quick: bool, progress: Progress) -> Result:
    """Start a process for each import, several times."""
    with TemporaryDirectory() as byte_code:
        return _run(quick, progress, byte_code)


def _run(quick: bool, progress: Progress, byte_code: str) -> Result:
    rounds = 1 if quick else ROUNDS
    times: dict[str, list[Times]] = {code: [] for code in CODES}
    for code in () if quick else CODES:
        _measure(code, byte_code)  # byte code gets compiled, files get into the cache
    for turn in range(rounds):
        for code in CODES:
            times[code].append(_measure(code, byte_code))
            progress(f"{code}, {turn + 1} of {rounds}: {times[code][-1].cpu:.2f} s of CPU")
    extra = [s.cpu - t.cpu for s, t in zip(times[CODES[1]], times[CODES[0]], strict=True)]
    rows = [
        {
            "code": code,
            "rounds": rounds,
            "cpu_s": round(median(t.cpu for t in measured), 4),
            "wall_s": round(median(t.wall for t in measured), 4),
        }
        for code, measured in times.items()
    ]
    return Result(rows, [Target("import slapo beyond torch", median(extra), 0.2, "s")])


def _measure(code: str, byte_code: str) -> Times:
    """As where it is installed: with byte code, which some environments do not write."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = byte_code
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    after = os.times()
    cpu = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    return Times(cpu, time.perf_counter() - start)
