"""Reports of what a run uses."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from slapo.logger import get_logger

_GIB = 2**30


@dataclass(frozen=True)
class MemoryReport:
    """Memory in bytes; None where the platform does not say.

    Attributes
    ----------
    rss, peak_rss : int or None
        Resident memory of the process, now and at its peak.
    device : torch.device or None
        The accelerator that the other numbers are about; None without one.
    allocated, peak_allocated : int or None
        Memory of tensors on the accelerator, now and at its peak.
    reserved : int or None
        Memory that torch's allocator holds on the accelerator.
    """

    rss: int | None
    peak_rss: int | None
    device: torch.device | None = None
    allocated: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None

    def __str__(self) -> str:
        text = f"process {_gib(self.rss)} (peak {_gib(self.peak_rss)})"
        if self.device is not None:
            text += (
                f", {self.device} {_gib(self.allocated)} allocated "
                f"(peak {_gib(self.peak_allocated)}), {_gib(self.reserved)} reserved"
            )
        return text


def report_memory(
    msg: str = "",
    device: torch.device | str | int | None = None,
    ranks: int | Collection[int] | None = 0,
) -> MemoryReport:
    """Log and return the memory of this process and of its accelerator.

    Parameters
    ----------
    msg : str
        What the report is about; put in front of it.
    device : torch.device, str or int, optional
        The accelerator, by default the current one. The CPU has only the process' own numbers.
    ranks : int or collection of int, optional
        The global ranks that log, None for all. Every rank gets its report.

    Returns
    -------
    MemoryReport

    Examples
    --------
    >>> report = report_memory("after build")
    >>> report.peak_rss > 0
    True
    """
    report = _measure(_accelerator(device))
    text = f"{msg}: {report}" if msg else str(report)
    get_logger("slapo").info("%s", text, ranks=ranks, stacklevel=2)
    return report


def _measure(device: torch.device | None) -> MemoryReport:
    if device is None:
        return MemoryReport(_rss(), _peak_rss())
    return MemoryReport(
        _rss(),
        _peak_rss(),
        device,
        torch.accelerator.memory_allocated(device),
        torch.accelerator.max_memory_allocated(device),
        torch.accelerator.memory_reserved(device),
    )


def _accelerator(device: torch.device | str | int | None) -> torch.device | None:
    """Return the accelerator to report about, with its index."""
    current = torch.accelerator.current_accelerator(check_available=True)
    chosen = current if device is None else torch.device(device)
    if chosen is None or chosen.type in ("cpu", "meta"):
        return None
    if current is None or chosen.type != current.type:
        raise ValueError(
            f"report_memory: there is no device {chosen} here, the accelerator is {current}; "
            f"pass one of its devices, or None for the current one"
        )
    if chosen == torch.device(chosen.type):
        return torch.device(chosen.type, torch.accelerator.current_device_index())
    return chosen


def _rss() -> int | None:
    """Return the resident memory of this process; only Linux tells without another package."""
    return _of_linux("VmRSS")


def _peak_rss() -> int | None:
    peak = _of_linux("VmHWM")
    if peak is not None:
        return peak  # what getrusage tells there begins at the peak of the process that forked
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _of_linux(field: str) -> int | None:
    """A size in bytes that the kernel tells of this process; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return next((int(kilobytes) * 1024 for kilobytes in found), None)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.2f} GiB"
