"""Bad input around schedules: groups, roots, ranks, builds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo
from tests.fingerprint import refused
from tests.primitives.models import Stack


# --- create_schedule -------------------------------------------------------------------------
@pytest.mark.parametrize("root", [3, None, "model", nn.Linear, [nn.ReLU()], torch.ones(1)])
def test_a_root_is_a_module(root: Any) -> None:
    with pytest.raises(TypeError, match=r"create_schedule: root must be an nn\.Module, got"):
        slapo.create_schedule(root)


def test_a_schedule_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"got <Schedule of ReLU.*pass its module, .mod"):
        slapo.create_schedule(slapo.create_schedule(nn.ReLU()))  # type: ignore[arg-type]


def test_one_of_several_processes_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = "process 1 of 4 .*not initialized.*init_process_group"
    with pytest.warns(UserWarning, match=message):
        assert slapo.create_schedule(nn.ReLU()).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert slapo.create_schedule(nn.ReLU()).world_size == 1
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "4")  # schedulers set it too; alone it says nothing
    assert slapo.create_schedule(nn.ReLU()).world_size == 1


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(
        slapo.SlapoError, match=r"group 'tp' was given, but torch.distributed is not"
    ):
        slapo.create_schedule(nn.ReLU(), group="tp")  # type: ignore[arg-type]


@pytest.mark.parametrize("group", ["tp", 3, [0, 1]])
def test_a_group_is_a_group(group: Any, pair: None) -> None:
    with pytest.raises(TypeError, match="pass a ProcessGroup, or a DeviceMesh of one dimension"):
        slapo.create_schedule(nn.ReLU(), group=group)


def test_a_group_without_this_process(pair: None) -> None:
    other = dist.new_group([0])
    with pytest.raises((TypeError, ValueError), match="contains this process"):
        slapo.create_schedule(nn.ReLU(), group=other)


def test_meshes() -> None:
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with pytest.raises(
            ValueError, match=r"mesh of 2 dimensions \('dp', 'tp'\).*mesh\[\"tp\"\]"
        ):
            slapo.create_schedule(nn.ReLU(), group=mesh)
        sch = slapo.create_schedule(nn.Sequential(nn.ReLU()), group=mesh["tp"])
        assert (sch.rank, sch.world_size) == (1, 4)
        assert (sch["0"].rank, sch["0"].world_size) == (1, 4)
        assert sch["0"].group is sch.group
        default = slapo.create_schedule(nn.ReLU())
        assert (default.rank, default.world_size) == (5, 8)
    finally:
        dist.destroy_process_group()


# --- build -----------------------------------------------------------------------------------
def test_bad_builds() -> None:
    sch = slapo.create_schedule(Stack())
    with refused(sch, ValueError, "target 'tensorflow'; known are"):
        slapo.build(sch, target="tensorflow")
    with refused(sch, TypeError, r"except sync_replicated, got \['config'\]"):
        slapo.build(sch, config={})
