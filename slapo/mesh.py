"""The device mesh of pipeline, data and tensor parallelism."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo.agreement import all_ranks_or_none, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.sharding.groups import group_of_one

# From the slowest links to the fastest: tensor-parallel ranks are neighbors on one machine.
DIMS = ("pp", "dp", "tp")

# How long a finished rank waits for the others.
_LAST_SECONDS = 5.0


def init_mesh(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
) -> DeviceMesh:
    """Create the device mesh of pipeline, data and tensor parallelism over all processes.

    Starts ``torch.distributed`` if needed: from the environment that ``torchrun`` sets, or as a
    world of one process without it. Every process of the job has to call it with the same
    arguments.

    Parameters
    ----------
    pp, dp, tp
        Number of pipeline ranks, data-parallel replicas, and tensor-parallel ranks. Their product
        is the number of processes. Adjacent ranks differ in ``tp``.
    device
        Type of the devices that the model runs on, such as ``"cpu"`` or ``"cuda"``. None: that of
        the process group if there is one, else the accelerator if there is one, else the CPU.
    timeout
        Seconds after which a rank that waits for others raises, for all groups of the job. None
        keeps that of the process group: torch's default is 30 minutes (gloo) or 10 (NCCL).

    Returns
    -------
    DeviceMesh
        With the dimensions ``("pp", "dp", "tp")``.

    Raises
    ------
    ValueError
        If the sizes are not positive integers or their product is not the number of processes, if
        the process group has no backend for the device, or the timeout is not positive. Raised on
        every rank.
    SlapoError
        If ranks pass different arguments, or the launcher's environment is incomplete.

    Examples
    --------
    >>> mesh = init_mesh(device="cpu")
    >>> mesh.mesh_dim_names, mesh.shape
    (('pp', 'dp', 'tp'), (1, 1, 1))
    """
    was_up = _is_up()
    wanted = None if device is None else torch.device(device)
    if not was_up:
        _start(wanted or _best_device(), timeout)
    try:
        kind = all_ranks_or_none("init_mesh", lambda: _check_arguments(pp, dp, tp, wanted, timeout))
        same_on_all_ranks("init_mesh: (pp, dp, tp, device, timeout)", (pp, dp, tp, kind, timeout))
    except (TypeError, ValueError, SlapoError):
        if not was_up:
            dist.destroy_process_group()
        raise
    _select_device(kind)
    return _make_mesh(kind, (pp, dp, tp), None if timeout is None else _as_timedelta(timeout))


def _make_mesh(kind: str, sizes: tuple[int, int, int], timeout: timedelta | None) -> DeviceMesh:
    if timeout is None:
        return init_device_mesh(kind, sizes, mesh_dim_names=DIMS)
    set_timeout(timeout)
    # By default torch gives new groups its default timeout, and point-to-point messages keep the
    # timeout that their group was created with. So groups are created here, after the timeout is
    # set.
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    groups = [
        group_among(ranks.movedim(dim, -1).flatten(0, -2).tolist()) for dim in range(len(DIMS))
    ]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=DIMS)


def timeout_of_job() -> timedelta:
    """Timeout of the job's collectives, which groups created later should have too."""
    world = dist.distributed_c10d._get_default_group()
    backend = world._get_backend(torch.device(next(iter(_backends()))))
    # Torch's fake group, which never waits for a rank, has no options.
    options = getattr(backend, "options", None)
    return options._timeout if options else dist.default_pg_timeout


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of an existing group; None is the world."""
    # Public from torch 2.15 on. Only for gloo and NCCL.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    if dist.get_backend() != "fake":
        change(timeout, group)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a group of some ranks with the timeout of the job. A collective of the world."""
    group = dist.new_group(list(ranks), timeout=timeout_of_job())
    # A rank outside of the group gets a placeholder.
    return group if isinstance(group, dist.ProcessGroup) else None


def grid_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return a user's mesh as one with the dimensions pp, dp and tp."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; pass slapo.init_mesh(pp=, dp=, tp=)")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(DIMS):
        other = [name for name in names if name not in DIMS]
        what = f"the dimensions {other}, which no target uses" if other else "no names"
        raise ValueError(
            f"mesh has {what}; name its dimensions with some of {DIMS}, or create it with "
            "slapo.init_mesh(pp=, dp=, tp=)"
        )
    if not _is_up():
        raise ValueError(
            "mesh outlived its process group: torch.distributed is not initialized; create a "
            "new one with slapo.init_mesh(pp=, dp=, tp=)"
        )
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"mesh of shape {tuple(mesh.shape)} does not cover the world of "
            f"{dist.get_world_size()} processes; create it with slapo.init_mesh(pp=, dp=, tp=)"
        )
    _check_backend(mesh.device_type, "mesh")
    if names == DIMS:
        return mesh
    present = [name for name in DIMS if name in names]
    ranks = mesh.mesh.permute([names.index(name) for name in present])
    ranks = ranks.reshape([mesh.size(names.index(d)) if d in names else 1 for d in DIMS])
    # A dimension that the mesh lacks has one rank, so all code may assume three dimensions.
    groups = [mesh.get_group(name) if name in names else group_of_one() for name in DIMS]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=DIMS)


def group_among(rank_sets: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Create a group of each rank set; returns that of this rank. A collective of the world."""
    made = [new_group(ranks) for ranks in rank_sets]
    return next(group for group in made if group is not None)


def describe_rank(places: torch.Tensor, rank: int) -> str:
    """Name a rank with its coordinates in `places`, the rank tensor of a mesh."""
    place = (places == rank).nonzero()[0].tolist()
    return f"rank {rank} ({', '.join(f'{d} {i}' for d, i in zip(DIMS, place, strict=True))})"


def current_device(mesh: DeviceMesh) -> torch.device:
    """Device of this process, of the mesh's device type."""
    return _indexed(mesh.device_type)


def device_of_world() -> torch.device:
    """Device of the process group: the accelerator if the group has a backend for it."""
    return _indexed(_device_of_backend() if _is_up() else _best_device().type)


def _indexed(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def _is_up() -> bool:
    return dist.is_available() and dist.is_initialized()


def _best_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _start(device: torch.device, timeout: float | timedelta | None) -> None:
    """Start ``torch.distributed`` for models on ``device``."""
    if not dist.is_available():
        raise SlapoError("init_mesh: this build of torch has no torch.distributed; install another")
    if device.type not in ("cpu", _best_device().type):
        raise SlapoError(
            f"init_mesh: device is {device.type!r}, but this process only sees "
            f"{_best_device().type!r}; pass that, or leave device out"
        )
    # MASTER_ADDR alone is no launch: some launchers and cluster shells set it for single processes
    # too.
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    backend = _backend_for(device.type)
    if not given:
        # A store in memory: a single process needs no port, which another job may hold.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    atexit.register(_end)
    missing = sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(os.environ))
    if missing:
        raise SlapoError(
            f"init_mesh: the environment has {given} but not {missing}; launch with torchrun, set "
            "all four, or unset RANK and WORLD_SIZE to run a single process"
        )
    _select_device(device.type)
    # Validated later, on all ranks at once.
    at_first = None if timeout is None else max(_as_timedelta(timeout), timedelta(seconds=1))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group(backend, timeout=at_first)
        return
    # A launcher's store outlives its ranks and still has the addresses of ranks that are gone.
    store, rank, size = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=at_first)


def _backend_for(kind: str) -> str:
    """Backend string with collectives of the device, plus gloo for CPU tensors."""
    default = dist.get_default_backend_for_device(kind)
    # Objects and small tensors are exchanged on the CPU, and NCCL has no collectives there.
    return default if kind == "cpu" else f"cpu:gloo,{kind}:{default}"


def _select_device(kind: str) -> None:
    """Select the accelerator that the launcher assigned to this process."""
    if kind == "cpu" or "LOCAL_RANK" not in os.environ:
        return
    index, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if index >= count:
        raise SlapoError(
            f"init_mesh: LOCAL_RANK is {index}, but this machine has {count} {kind} devices; "
            "launch at most one process for each"
        )
    torch.accelerator.set_device_index(index)


def _check_arguments(
    pp: int,
    dp: int,
    tp: int,
    device: torch.device | None,
    timeout: float | timedelta | None,
) -> str:
    """Check the user's arguments against the process group; return the device type."""
    if timeout is not None and not _as_timedelta(timeout) > timedelta(0):
        raise ValueError(f"init_mesh: timeout is {timeout!r}; pass seconds above 0, or None")
    sizes = dict(zip(DIMS, (pp, dp, tp), strict=True))
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"init_mesh: {name} is {size!r}; pass a positive integer")
    _check_world(sizes, dist.get_world_size())
    kind = _device_of_backend() if device is None else device.type
    _check_backend(kind, "init_mesh")
    return kind


def _end() -> None:
    """Leave the group that `_start` created, unless the process ends by an error."""
    if getattr(sys, "last_value", None) is None:
        leave_together()


def leave_together() -> None:
    """Leave the process group, if there is one, at the same time as the other ranks.

    Gloo threads whose peers leave first sometimes abort the process, and the launcher reports a
    finished job as failed. So ranks wait for each other, but only briefly: a rank that is still in
    a collective has to see that this one is gone.
    """
    if not _is_up():
        return
    with suppress(RuntimeError):  # the store may be gone with the process that kept it
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + _LAST_SECONDS
        done = store.add("slapo/ends", 1)
        while done < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            done = store.add("slapo/ends", 0)
    dist.destroy_process_group()


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def _check_world(sizes: dict[str, int], world: int) -> None:
    needed = sizes["pp"] * sizes["dp"] * sizes["tp"]
    if needed == world:
        return
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    fitting = [
        f"{name}={world // (needed // size)}"
        for name, size in sizes.items()
        if world % (needed // size) == 0
    ]
    remedy = f"pass {' or '.join(fitting)} and keep the rest, or " if fitting else ""
    raise ValueError(
        f"init_mesh: {shown} needs {needed} processes, but the job has {world}; "
        f"{remedy}launch {needed} (torchrun --nproc-per-node {needed} on one machine)"
    )


def _backends() -> dict[str, str]:
    """Device type -> backend of the running process group."""
    config = str(dist.get_backend_config())
    return dict(entry.split(":", 1) for entry in config.split(","))


def _device_of_backend() -> str:
    best = _best_device().type
    backends = _backends()
    return best if _serves(backends.get(best), best) else next(iter(backends))


def _serves(backend: str | None, kind: str) -> bool:
    # Gloo claims accelerators, but lacks most of their collectives.
    return backend is not None and (kind == "cpu" or backend != "gloo")


def _check_backend(kind: str, what: str) -> None:
    backends = _backends()
    if not _serves(backends.get(kind), kind):
        raise ValueError(
            f"{what}: the device is {kind!r}, but the running process group has the backends "
            f"{backends}; start it with {_backend_for(kind)!r}, or let init_mesh start it"
        )
