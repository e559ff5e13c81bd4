"""DeepSpeed as a package: found, imported for the right device, and kept quiet."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from slapo.errors import MissingPackageError, SlapoError


def check_installed() -> None:
    """Refuse early and by name what would fail late.

    Raises
    ------
    MissingPackageError
        If DeepSpeed is not installed.

    Examples
    --------
    >>> check_installed()  # doctest: +SKIP
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError(
            'build(target="deepspeed") needs the package deepspeed, which is not installed; '
            'pip install "slapo[deepspeed]"'
        )


def import_deepspeed(device: str) -> Any:
    """DeepSpeed, working on a type of device and on the process group that is running.

    It chooses its device when it is imported, and takes the accelerator that it finds.

    Parameters
    ----------
    device
        Type of the device that the model runs on.

    Raises
    ------
    SlapoError
        If it was imported before and has chosen another one.

    Examples
    --------
    >>> import_deepspeed("cpu").__name__  # doctest: +SKIP
    'deepspeed'
    """
    with _variable("DS_ACCELERATOR", device), quiet():
        deepspeed = importlib.import_module("deepspeed")
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.device_name() != device:
        raise SlapoError(
            f"deepspeed works on {accelerator.device_name()!r}, and the mesh on {device!r}; set "
            f"DS_ACCELERATOR={device} in the environment, or make the mesh for the other device"
        )
    if device == "cpu":
        # Its collectives over shared memory are compiled for most of a minute on first use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _set_local_rank()
    with quiet():
        deepspeed.init_distributed()  # takes the process group that is running
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mute what DeepSpeed prints, and deprecations in all that it imports."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Ignore deprecations that concern DeepSpeed's code: a user can do nothing about them."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"deepspeed(\.|$)")
        # Raised within torch, about collectives that DeepSpeed calls.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def _set_local_rank() -> None:
    """Tell DeepSpeed, now and later, which device is ours where the launcher has not."""
    device = torch.accelerator.current_accelerator(check_available=True)
    index = 0 if device is None else torch.accelerator.current_device_index()
    os.environ.setdefault("LOCAL_RANK", str(index))


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the time being, if it is not set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
