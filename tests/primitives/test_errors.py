"""Groups and ranks that a schedule is created over."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo.verify.placement.offline import fake_world


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


def test_a_group_without_this_process(pair: None) -> None:
    other = dist.new_group([0])
    with pytest.raises((TypeError, ValueError), match="contains this process"):
        slapo.create_schedule(nn.ReLU(), group=other)


def test_meshes() -> None:
    with fake_world(8, 5):
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
