"""Megatron-Core as a package: found, on a device that it can work on, and kept quiet."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import MissingPackageError, SlapoError

_PARTS = (
    "distributed",
    "enums",
    "optimizer",
    "parallel_state",
    "pipeline_parallel",
    # Imported by the schedules as they run.
    "transformer.multi_token_prediction",
)


def check_installed() -> None:
    """Refuse early and by name what would fail late.

    Raises
    ------
    MissingPackageError
        If Megatron-Core is not installed.

    Examples
    --------
    >>> check_installed()  # doctest: +SKIP
    """
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingPackageError(
            'build(target="megatron") needs the package megatron-core, which is not installed; '
            'pip install "slapo[megatron]"'
        )


def check_device(mesh: DeviceMesh) -> None:
    """Refuse a job that Megatron-Core would fail in: it puts its buffers on CUDA by name.

    Parameters
    ----------
    mesh
        The job's.

    Raises
    ------
    SlapoError
        If there is no CUDA device, or the mesh is on another one.

    Examples
    --------
    >>> import slapo.mesh
    >>> check_device(slapo.mesh.init_mesh(device="cpu"))  # doctest: +SKIP
    """
    remedy = 'target="torch" and target="deepspeed" run on any device'
    if not torch.cuda.is_available():
        raise SlapoError(
            'target="megatron" needs CUDA, where Megatron-Core puts its gradient and receive '
            f"buffers, and this process sees no CUDA device; {remedy}"
        )
    # Asked in Megatron-Core's own words.
    theirs = torch.empty(0, device="cuda").device.type
    if mesh.device_type != theirs:
        raise SlapoError(
            f'target="megatron" works on {theirs!r}, and the mesh is on {mesh.device_type!r}; make '
            f"it by slapo.init_mesh(..., device={theirs!r}), or take another target: {remedy}"
        )


@cache
def megatron_core() -> Any:
    """The package ``megatron.core``, with the parts that the runtime uses.

    The first call imports them, which takes seconds; so nothing does that on import.

    Examples
    --------
    >>> megatron_core().__name__  # doctest: +SKIP
    'megatron.core'
    """
    with quiet():
        # It brings most of torch along, whose own deprecations concern nobody here.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        for part in _PARTS:
            importlib.import_module(f"megatron.core.{part}")
        return importlib.import_module("megatron.core")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings that concern Megatron-Core's code: a user can do nothing about them.

    Examples
    --------
    >>> with quiet():
    ...     pass
    """
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"megatron(\.|$)")
        # Raised within torch, about collectives that the distributed optimizer calls.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # It works without its optional kernels.
        warnings.filterwarnings("ignore", r".*\b(Apex|Transformer Engine)\b.*not installed")
        # A stage without parameters to train is in order.
        warnings.filterwarnings("ignore", "WARNING: there is no optimizer on RANK")
        yield
