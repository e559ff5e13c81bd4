"""Import of DeepSpeed for the right device, without its output."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from slapo.errors import SlapoError
from slapo.framework_dialect import runtime


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a device type, and attach it to the present process group.

    DeepSpeed selects its device on import, by default the accelerator that it finds.
    """
    is_set = "DS_ACCELERATOR" in os.environ
    os.environ.setdefault("DS_ACCELERATOR", device)
    try:
        with quiet():
            deepspeed = importlib.import_module("deepspeed")
            accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    finally:
        if not is_set:
            os.environ.pop("DS_ACCELERATOR", None)
    if accelerator.device_name() != device:
        raise SlapoError(
            f"deepspeed uses {accelerator.device_name()!r}, but the mesh is on {device!r}; set "
            f"DS_ACCELERATOR={device} in the environment, or create the mesh for the other device"
        )
    if device == "cpu":
        # Its shared-memory collectives take most of a minute to compile on first use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed reads the device index from here, now and later; the launcher may not have set it.
    accelerated = torch.accelerator.current_accelerator(check_available=True) is not None
    index = torch.accelerator.current_device_index() if accelerated else 0
    os.environ.setdefault("LOCAL_RANK", str(index))
    with quiet():
        deepspeed.init_distributed()  # uses the present process group
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's output, and deprecation warnings of all its imports."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


#: Ignores deprecation warnings about DeepSpeed's code.
quiet_warnings = partial(runtime.quiet_warnings, "deepspeed")
