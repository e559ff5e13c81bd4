"""Process groups for scripts that start their own processes; ``torchrun`` jobs do not need it.

For the meshes of real runs there is :func:`slapo.init_mesh`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slapo.logger import get_logger
from slapo.mesh import leave_together

logger = get_logger()


def setup(rank: int, world_size: int, backend: str = "nccl") -> None:
    """Join the process group of the job, as one of its processes.

    Processes meet at ``MASTER_ADDR`` and ``MASTER_PORT``. The defaults are this machine and port
    29500.

    Parameters
    ----------
    rank, world_size
        Rank of this process, and number of processes.
    backend
        Without CUDA, ``"nccl"`` becomes ``"gloo"``, which is logged. With CUDA the process uses the
        device of its rank, and ``"nccl"`` includes gloo for CPU collectives.

    Raises
    ------
    ValueError
        If `rank` is not in the range of `world_size`, or there is a process group already.

    Examples
    --------
    >>> setup(0, 1, "gloo")
    >>> dist.get_world_size()
    1
    >>> cleanup()
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"setup: rank {rank} is invalid for {world_size} processes; pass a rank from 0 to "
            "world_size - 1"
        )
    if backend == "nccl":
        backend = _nccl_or_gloo(rank)
    store = dist.HashStore() if world_size == 1 else None
    if store is None:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def cleanup() -> None:
    """Leave the process group, if there is one, together with the other processes.

    Examples
    --------
    >>> cleanup()
    >>> dist.is_initialized()
    False
    """
    leave_together()


def execute(fn: Callable[..., Any], args: Any) -> None:
    """Call ``fn(rank, args)`` in each of ``args.world_size`` processes.

    A single process is the current one. Several are spawned, and have to call :func:`setup`
    themselves; the first failure ends all of them. In a process that ``torchrun`` has started, the
    call is made in that process.

    Parameters
    ----------
    fn
        A function at the top level of a file. Each process imports that file again, so the code
        that starts the job must be under ``if __name__ == "__main__":``.
    args
        Source of the number of processes: an object with the attribute ``world_size``, as from
        ``argparse``; a mapping with that key; or the number itself. A tuple or list starts with
        the number and is passed item by item: ``fn(rank, world_size, ...)``.

    Raises
    ------
    ValueError, TypeError
        If `args` has no number of processes.
    torch.multiprocessing.ProcessRaisedException
        With the traceback of a process that failed.

    Examples
    --------
    >>> execute(lambda rank, args: print(rank, args["world_size"]), {"world_size": 1})
    0 1
    >>> execute(lambda rank, world_size, name: print(rank, name), (1, "alone"))
    0 alone
    """
    world_size = _world_size(args)
    passed = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if dist.is_torchelastic_launched():
        fn(_launched_rank(world_size), *passed)
    elif world_size == 1:
        fn(0, *passed)
    else:
        # A free port keeps two jobs apart.
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": _free_port()}
        chosen = {name: value for name, value in place.items() if name not in os.environ}
        os.environ.update(chosen)
        try:
            mp.spawn(fn, args=passed, nprocs=world_size)
        finally:
            for name in chosen:
                del os.environ[name]


def _world_size(args: Any) -> int:
    if isinstance(args, Mapping):
        found = args.get("world_size")
    elif isinstance(args, (tuple, list)):
        found = args[0] if args else None
    else:
        found = getattr(args, "world_size", args)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise TypeError(
            f"execute: {args!r} has no number of processes; pass a positive integer, a tuple that "
            "starts with it, or a mapping or object with it as world_size"
        )
    return found


def _launched_rank(world_size: int) -> int:
    launched = int(os.environ["WORLD_SIZE"])
    if launched != world_size:
        raise ValueError(
            f"execute: world_size is {world_size}, but torchrun started {launched} processes; "
            "make them equal, or start the script without torchrun"
        )
    return int(os.environ["RANK"])


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def _nccl_or_gloo(rank: int) -> str:
    if not torch.cuda.is_available():
        logger.info('backend "nccl" needs CUDA, which this machine lacks; using "gloo"')
        return "gloo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"
