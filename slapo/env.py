"""Process groups for scripts that start their own processes; ``torchrun`` jobs do not need it.

For the meshes of real runs there is :func:`slapo.init_mesh`.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slapo.logger import get_logger
from slapo.mesh import leave_together

logger = get_logger()

#: Environment variables set by `setup` and removed by `cleanup`: leftovers look like half a launch.
_set_here: list[str] = []


def setup(rank: int, world_size: int, backend: str = "nccl") -> None:
    """Join the process group of the job, as one of its processes.

    Processes meet at ``MASTER_ADDR`` and ``MASTER_PORT``. The defaults are this machine, and port
    29500, or any free port for a single process.

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
        If `rank` is not in the range of `world_size`.
    RuntimeError
        If there is a process group already.

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
    if dist.is_initialized():
        raise RuntimeError(
            f"setup: a process group of {dist.get_world_size()} processes is already "
            "initialized; call slapo.env.cleanup() first, or skip setup"
        )
    _set_default("MASTER_ADDR", "localhost")
    _set_default("MASTER_PORT", str(_free_port() if world_size == 1 else 29500))
    if backend == "nccl":
        backend = _nccl_or_gloo(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def cleanup() -> None:
    """Leave the process group, if there is one, together with the other processes.

    Examples
    --------
    >>> cleanup()
    >>> dist.is_initialized()
    False
    """
    leave_together()
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


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
        If `args` has no number of processes, or `fn` cannot be sent to other processes.
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
        _check_sendable(fn, passed)
        with _meeting_place():
            mp.spawn(fn, args=passed, nprocs=world_size)


def _world_size(args: Any) -> int:
    if isinstance(args, Mapping):
        found = args.get("world_size")
    elif isinstance(args, (tuple, list)):
        found = args[0] if args else None
    else:
        found = getattr(args, "world_size", args)
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(
            f"execute: {args!r} has no number of processes; pass an integer, a tuple that starts "
            "with it, or a mapping or object with an integer world_size"
        )
    if found < 1:
        raise ValueError(f"execute: world_size is {found}; pass a positive integer")
    return found


def _launched_rank(world_size: int) -> int:
    launched = int(os.environ["WORLD_SIZE"])
    if launched != world_size:
        raise ValueError(
            f"execute: world_size is {world_size}, but torchrun started {launched} processes; "
            "make them equal, or start the script without torchrun"
        )
    return int(os.environ["RANK"])


def _check_sendable(fn: Callable[..., Any], passed: tuple[Any, ...]) -> None:
    try:
        pickle.dumps((fn, passed))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"execute: {name} or its arguments cannot be sent to other processes ({error}); define "
            "the function at the top level of a file, and pass plain values"
        ) from error


@contextmanager
def _meeting_place() -> Iterator[None]:
    """Set the address where spawned processes meet; a free port keeps two jobs apart."""
    before = len(_set_here)
    _set_default("MASTER_ADDR", "localhost")
    _set_default("MASTER_PORT", str(_free_port()))
    try:
        yield
    finally:
        while len(_set_here) > before:
            os.environ.pop(_set_here.pop(), None)


def _set_default(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _set_here.append(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _nccl_or_gloo(rank: int) -> str:
    if not torch.cuda.is_available():
        logger.info('backend "nccl" needs CUDA, which this machine lacks; using "gloo"')
        return "gloo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"
