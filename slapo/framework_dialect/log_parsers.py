"""Speed, size and memory of a training run, parsed from its log."""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import median
from typing import NamedTuple

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.I)
_FAILED = re.compile(r"^Traceback \(most recent call last\)|ChildFailedError", re.MULTILINE)
_MIB_OF = {"MiB": 1.0, "GB": 1024.0}  # DeepSpeed's GB is a power of two

# Lines of examples/train_3d.py, of DeepSpeed's timers and pipeline engine, and of Megatron-LM's
# training loop. The first group is the value, the second its unit.
_PARAMETERS = (
    r"parameters per rank: ([\d,]+)",
    r"STAGE_PARAMS=(\d+)",
    r"number of parameters on \(.*?\) model parallel rank \(.*?\): (\d+)",
)
_SPEED = (
    r"samples/s: ([\d.]+)",
    r"CurrSamplesPerSec=([\d.]+)",
    r"samples/sec: ([\d.]+)",
)
_MEMORY = (
    r"peak memory: ([\d.]+) (MiB)",
    r"MaxMemAllocated=([\d.]+)\s*(GB)",
    r"\bMax_MA ([\d.]+) (GB)",
    r"max allocated: ([\d.]+)",
)
_MEGATRON_STEP = re.compile(
    r"elapsed time per iteration \(ms\): ([\d.]+).*?global batch size: *(\d+)"
)


class LogSummary(NamedTuple):
    """Metrics of a run.

    Attributes
    ----------
    param_per_gpu
        Parameters of the rank that has the most; 0 if the log does not have them.
    samples_per_sec
        Speed of the full job: the median over the log, so that a slow first step does not count.
    gpu_mem
        Largest peak of the tensors on an accelerator in MiB; 0.0 without one.
    error_code
        0 for a successful run, 1 for one that ran out of memory, 2 for any other that failed or
        logged no speed.
    """

    param_per_gpu: int
    samples_per_sec: float
    gpu_mem: float
    error_code: int


class LogParser:
    """Parses the logs of every target: ``get_dialect_cls("log_parser", target)``."""

    @staticmethod
    def parse_log(log: str | os.PathLike[str]) -> LogSummary:
        r"""Parse a log.

        Parameters
        ----------
        log
            Path of a file; or the log itself, as a string with line breaks.

        Raises
        ------
        FileNotFoundError
            If there is no such file.

        Examples
        --------
        >>> LogParser.parse_log(
        ...     "parameters per rank: 1,024, samples/s: 8.5, peak memory: 0 MiB\n"
        ... )
        LogSummary(param_per_gpu=1024, samples_per_sec=8.5, gpu_mem=0.0, error_code=0)
        >>> LogParser.parse_log("torch.OutOfMemoryError: CUDA out of memory.\n").error_code
        1
        """
        if isinstance(log, str) and ("\n" in log or not log):
            text = log
        else:
            text = Path(log).read_text(errors="replace")
        steps = [(float(ms), int(batch)) for ms, batch in _MEGATRON_STEP.findall(text)]
        speeds = [*_numbers(_SPEED, text), *(1000 * batch / ms for ms, batch in steps if ms)]
        if _OUT_OF_MEMORY.search(text):
            error_code = 1
        else:
            error_code = 0 if speeds and not _FAILED.search(text) else 2
        return LogSummary(
            int(max(_numbers(_PARAMETERS, text), default=0)),
            median(speeds) if speeds else 0.0,
            max(_numbers(_MEMORY, text), default=0.0),
            error_code,
        )


def _numbers(patterns: tuple[str, ...], text: str) -> list[float]:
    """Values that match the patterns; memory in MiB."""
    found = [match.groups() for pattern in patterns for match in re.finditer(pattern, text)]
    return [
        float(number.replace(",", "")) * (_MIB_OF[unit[0]] if unit else 1.0)
        for number, *unit in found
    ]
