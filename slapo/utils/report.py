"""Reports of resource usage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn, profiler

from slapo.logger import get_logger
from slapo.utils.calls import as_call

_MIB, _GIB = 2**20, 2**30


class MemoryReport(float):
    """MiB of tensors on the accelerator, 0.0 without one; attributes are in bytes.

    Attributes are None if the platform does not report them.

    Attributes
    ----------
    rss, peak_rss : int or None
        Resident memory of the process, current and peak.
    device : torch.device or None
        Accelerator of the values below; None without one.
    allocated, peak_allocated : int or None
        Memory of tensors on the accelerator, current and peak.
    reserved : int or None
        Memory reserved by torch's allocator on the accelerator.
    """

    rss: int | None
    peak_rss: int | None
    device: torch.device | None
    allocated: int | None
    peak_allocated: int | None
    reserved: int | None

    def __new__(
        cls,
        rss: int | None,
        peak_rss: int | None,
        device: torch.device | None = None,
        allocated: int | None = None,
        peak_allocated: int | None = None,
        reserved: int | None = None,
    ) -> MemoryReport:
        report = super().__new__(cls, (allocated or 0) / _MIB)
        report.rss, report.peak_rss, report.device = rss, peak_rss, device
        report.allocated, report.peak_allocated = allocated, peak_allocated
        report.reserved = reserved
        return report

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
    report_gc: bool = False,
    device: torch.device | str | int | None = None,
    ranks: int | Collection[int] | None = 0,
) -> MemoryReport:
    """Log and return the memory of this process and of its accelerator.

    Parameters
    ----------
    msg : str
        Prefix of the logged text.
    report_gc : bool
        True also logs the tensors that Python's garbage collector tracks: count and bytes per
        device.
    device : torch.device, str or int, optional
        Accelerator to report, by default the current one. For the CPU only process values are
        reported.
    ranks : int or collection of int, optional
        Global ranks that log, None for all. Every rank returns its report.

    Returns
    -------
    MemoryReport
        MiB of tensors on the accelerator as a float, 0.0 without one.

    Examples
    --------
    >>> report = report_memory("after build")
    >>> report.peak_rss > 0
    True
    """
    report = _measure(_accelerator(device))
    text = f"{msg}: {report}" if msg else str(report)
    if report_gc:
        text += f"; known to Python: {_tensors_of_python()}"
    get_logger("slapo").info("%s", text, ranks=ranks, stacklevel=2)
    return report


def _tensors_of_python() -> str:
    """Describe the tensors that the garbage collector tracks, by device."""
    found: dict[str, list[int]] = {}
    for value in gc.get_objects():
        # isinstance may run code of proxies; fake tensors have no memory.
        if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta:
            found.setdefault(value.device.type, []).append(value.nbytes)
    each = (f"{len(n)} tensors of {_gib(sum(n))} on {kind}" for kind, n in sorted(found.items()))
    return ", ".join(each) or "no tensors"


def profile_perf(model: nn.Module, inputs: Any, backward: bool = False) -> str:
    """Run a model under torch's profiler; log and return a table of times.

    Parameters
    ----------
    model : nn.Module
        Module to run.
    inputs : tensor, tuple or mapping
        Inputs of the call.
    backward : bool
        True also runs the backward pass of the sum of the output's first tensor.

    Returns
    -------
    str
        Table of the ten slowest operators.

    Examples
    --------
    >>> table = profile_perf(nn.Linear(2, 2), torch.ones(1, 2))
    >>> "aten::linear" in table
    True
    """
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    args, kwargs = as_call(inputs, "inputs")
    with profiler.profile(activities=activities) as found:
        output = model(*args, **kwargs)
        if backward:
            leaves = pytree.tree_leaves(output)
            next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)).sum().backward()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table: str = found.key_averages().table(sort_by=by, row_limit=10)
    get_logger("slapo").info("%s", table, ranks=0, stacklevel=2)
    return table


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
    """Return the accelerator to report, with its index."""
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
    """Return the resident memory of this process; only Linux reports it without another package."""
    return _of_linux("VmRSS")


def _peak_rss() -> int | None:
    peak = _of_linux("VmHWM")
    if peak is not None:
        return peak  # on Linux getrusage starts from the peak of the process that forked
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _of_linux(field: str) -> int | None:
    """Return a size in bytes that the Linux kernel reports for this process, else None."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return next((int(kilobytes) * 1024 for kilobytes in found), None)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.2f} GiB"
