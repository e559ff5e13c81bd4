"""The grid of processes, and what does not make one."""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import slapo
from slapo.errors import SlapoError
from slapo.mesh import (
    current_device,
    describe_rank,
    device_of_world,
    grid_of,
    init_mesh,
    new_group,
)
from tests.distributed import free_port, launched, run_distributed
from tests.runtimes.ranks import error_of, on_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher and no process group, before and after."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_single_process_is_a_world_of_one() -> None:
    mesh = init_mesh(device="cpu")
    assert mesh.shape == (1, 1, 1)
    assert dist.get_world_size() == 1
    assert dist.get_backend() == "gloo"
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    assert tensor.tolist() == [1.0, 1.0]
    assert grid_of(mesh) is mesh
    assert current_device(mesh) == device_of_world() == torch.device("cpu")
    world = dist.group.WORLD
    assert init_mesh().device_type == "cpu"  # in the same group
    assert dist.group.WORLD is world


@on_ranks(2)
def test_all_groups_have_the_timeout() -> None:
    """The world, the groups of the mesh, and one that is made later."""
    mesh = init_mesh(pp=2, dp=1, tp=1, device="cpu", timeout=45)
    groups = [dist.group.WORLD, *(mesh.get_group(dim) for dim in ("pp", "dp", "tp"))]
    for group in (*groups, new_group([0, 1])):
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 45


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SlapoError, match=r"not \['MASTER_ADDR', 'MASTER_PORT'\]; launch with"):
        init_mesh(device="cpu")


def test_an_address_alone_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch`` exports one for a single process."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert init_mesh(device="cpu").size() == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SlapoError, match=r"device is 'cuda', but this process only sees 'cpu'"):
        init_mesh(device="cuda")
    assert not dist.is_initialized()


def trained_on(rank: int, world_size: int, names: tuple[str, ...], sizes: Any) -> list[float]:
    """Losses of three steps of data parallelism, tensor parallelism or both."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), mesh=mesh)
    if sch.world_size > 1:
        sch["0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["1"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=lambda output, target: (output - target).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    replica = mesh.get_local_rank("dp") if "dp" in names else 0
    replicas = dict(zip(names, sizes, strict=True)).get("dp", 1)
    x = torch.arange(16.0).view(4, 4).chunk(replicas)[replica] / 10
    return [float(engine.train_batch(iter([(x, x[:, :2])]))) for _ in range(3)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("names", "sizes"),
    [(("dp",), (2,)), (("tp",), (2,)), (("tp", "dp"), (2, 2)), (("dp", "pp", "tp"), (2, 1, 2))],
)
def test_a_mesh_of_some_dimensions_in_any_order(names: Any, sizes: Any) -> None:
    init_mesh(device="cpu")
    alone = trained_on(0, 1, ("dp",), (1,))
    for found in run_distributed(trained_on, math.prod(sizes), names, sizes):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@on_ranks(8)
def test_neighbors_are_tensor_parallel() -> None:
    mesh, rank = init_mesh(pp=2, dp=2, tp=2), dist.get_rank()
    place = [mesh.get_local_rank(dim) for dim in ("pp", "dp", "tp")]
    assert place == [rank // 4, rank // 2 % 2, rank % 2]
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [rank - place[2], rank | 1]
    assert dist.get_process_group_ranks(mesh.get_group("pp")) == [rank % 4, rank % 4 + 4]
    assert describe_rank(mesh.mesh, 5) == "rank 5 (pp 1, dp 0, tp 1)"
    assert mesh["dp"].size() == 2


@on_ranks(2)
def test_errors_come_on_every_rank() -> None:
    """``tests/golden/mistakes/init_mesh_on_two_ranks.txt`` has other sizes on each rank."""
    rank = dist.get_rank()
    text = "ValueError: init_mesh: pp=4, dp=1, tp=1 needs 4 processes, but the job has 2; "
    wrong = error_of(lambda: init_mesh(pp=4))
    assert wrong.startswith(f"{text}pass pp=2 and keep the rest, or launch 4")
    mixed = error_of(lambda: init_mesh(pp=2 * (1 - rank)))
    failed = "SlapoError: init_mesh failed on rank 1 with ValueError"
    assert mixed.startswith("ValueError: init_mesh: pp is 0" if rank else failed)


@pytest.fixture
def port() -> int:
    return free_port()


@on_ranks(2)
def test_the_environment_of_a_launcher(port: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(launched(rank, 2, port))
    mesh = init_mesh(tp=2, device="cpu")
    assert isinstance(mesh, DeviceMesh)
    assert mesh.get_local_rank("tp") == rank
