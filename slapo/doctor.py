"""The command ``slapo doctor``: versions, devices and missing optional packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.distributed as dist

#: Package -> (extra that installs it, features that need it).
_OPTIONAL = {
    "transformers": ("hf", "Hugging Face models, slapo train, slapo suggest"),
    "deepspeed": ("deepspeed", 'target="deepspeed"'),
    "megatron-core": ("megatron", 'target="megatron"'),
    "triton": ("kernels", "fused kernels on CUDA"),
    "liger-kernel": ("kernels", "gated MLPs and RMS norms on CUDA"),
    "xformers": ("kernels", "xFormers attention on CUDA"),
    "optuna": ("tune", "slapo tune"),
    "matplotlib": ("tune", "plots of slapo tune and slapo dryrun"),
    "rich": ("examples", "examples/quickstart.py"),
}


def report() -> Iterator[str]:
    """Yield lines about this machine and this environment."""
    yield f"slapo {metadata.version('slapo')}, Python {platform.python_version()}"
    yield f"torch {torch.__version__} on {platform.platform()}"
    yield f"devices: {_devices()}"
    backends = [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)]
    yield f"torch.distributed backends: {', '.join(backends) or 'none'}"
    missing: dict[str, list[str]] = {}
    for package, (extra, use) in _OPTIONAL.items():
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            missing.setdefault(extra, []).append(f"{package} ({use})")
    for extra, packages in missing.items():
        yield f"not installed: {', '.join(packages)}; pip install 'slapo[{extra}]'"


def _devices() -> str:
    cores = f"{os.cpu_count()} CPU cores"
    if not torch.accelerator.is_available():
        return f"{cores}, no accelerator"
    count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    if not torch.cuda.is_available():
        return f"{cores}, {count} x {kind}"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return f"{cores}, {count} x {properties.name} ({memory:.0f} GiB), CUDA {torch.version.cuda}"


def _has_backend(name: str) -> bool:
    return dist.is_available() and bool(getattr(dist, f"is_{name}_available")())
