"""What a run measured, read from its log."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.I)
_FAILED = re.compile(r"^Traceback \(most recent call last\)|ChildFailedError", re.MULTILINE)
_MIB_OF = {"MiB": 1.0, "GB": 1024.0}  # DeepSpeed means a power of two


class LogSummary(NamedTuple):
    """What a log says.

    Attributes
    ----------
    param_per_gpu
        Parameters of the rank that has the most; 0 where the log does not say.
    samples_per_sec
        Of the whole job: the median over what was logged, so that a slow first step does not count.
    gpu_mem
        Largest peak of the tensors on an accelerator in MiB; 0.0 without one.
    error_code
        0 for a run that went well, 1 for one that ran out of memory, 2 for any other that failed or
        logged no speed.
    """

    param_per_gpu: int
    samples_per_sec: float
    gpu_mem: float
    error_code: int


class LogParser:
    """Reads what the loop of ``examples/train_3d.py`` prints at its end, on any target."""

    #: Each has the number as its first group, and may have the unit as its second.
    parameters: ClassVar[Sequence[str]] = (r"parameters per rank: ([\d,]+)",)
    speed: ClassVar[Sequence[str]] = (r"samples/s: ([\d.]+)",)
    memory: ClassVar[Sequence[str]] = (r"peak memory: ([\d.]+) (MiB)",)

    @classmethod
    def parse_log(cls, log: str | os.PathLike[str]) -> LogSummary:
        r"""Read a log.

        Parameters
        ----------
        log
            The path of a file; or the text itself, which is a string with line breaks.

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
        text = _text_of(log)
        speeds = cls._speeds(text)
        return LogSummary(
            int(max(_numbers(cls.parameters, text), default=0)),
            median(speeds) if speeds else 0.0,
            max(_numbers(cls.memory, text), default=0.0),
            _error_code(text, bool(speeds)),
        )

    @classmethod
    def _speeds(cls, text: str) -> list[float]:
        return _numbers(cls.speed, text)


class TorchLogParser(LogParser):
    """For target ``"torch"``: see :class:`LogParser`."""


class DeepSpeedLogParser(LogParser):
    r"""Reads the lines of DeepSpeed's timers, and of its pipeline engine, too.

    Examples
    --------
    >>> DeepSpeedLogParser.parse_log(
    ...     "STAGE_PARAMS=640 (0.001M)\nsteps: 1 loss: 3.1 iter time (s): 0.5 samples/sec: 16.0\n"
    ... )
    LogSummary(param_per_gpu=640, samples_per_sec=16.0, gpu_mem=0.0, error_code=0)
    """

    parameters = (*LogParser.parameters, r"STAGE_PARAMS=(\d+)")
    speed = (*LogParser.speed, r"CurrSamplesPerSec=([\d.]+)", r"samples/sec: ([\d.]+)")
    memory = (*LogParser.memory, r"MaxMemAllocated=([\d.]+)\s*(GB)", r"\bMax_MA ([\d.]+) (GB)")


class MegatronLogParser(LogParser):
    r"""Reads the lines of Megatron-LM's training loop, too.

    Examples
    --------
    >>> MegatronLogParser.parse_log(
    ...     " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 4096\n"
    ...     " elapsed time per iteration (ms): 500.0 | global batch size:    16 | lm loss: 2.5\n"
    ... )
    LogSummary(param_per_gpu=4096, samples_per_sec=32.0, gpu_mem=0.0, error_code=0)
    """

    parameters = (
        *LogParser.parameters,
        r"number of parameters on \(.*?\) model parallel rank \(.*?\): (\d+)",
    )
    memory = (*LogParser.memory, r"max allocated: ([\d.]+)")

    _STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?global batch size: *(\d+)")

    @classmethod
    def _speeds(cls, text: str) -> list[float]:
        steps = [(float(ms), int(batch)) for ms, batch in cls._STEP.findall(text)]
        return [*super()._speeds(text), *(1000 * batch / ms for ms, batch in steps if ms)]


def _text_of(log: str | os.PathLike[str]) -> str:
    if isinstance(log, str) and ("\n" in log or not log):
        return log
    return Path(log).read_text(errors="replace")


def _numbers(patterns: Sequence[str], text: str) -> list[float]:
    """What the patterns find, memory in MiB."""
    found = [match.groups() for pattern in patterns for match in re.finditer(pattern, text)]
    return [
        float(number.replace(",", "")) * (_MIB_OF[unit[0]] if unit else 1.0)
        for number, *unit in found
    ]


def _error_code(text: str, has_speed: bool) -> int:
    if _OUT_OF_MEMORY.search(text):
        return 1
    return 0 if has_speed and not _FAILED.search(text) else 2
