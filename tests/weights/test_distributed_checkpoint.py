"""torch.distributed.checkpoint of models with slices: whole tensors on disk, in any layout back."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

pytest.importorskip("transformers")

import slapo
from slapo.model_schedule import apply_schedule
from slapo.sharding.slice_tensor import SliceTensor
from tests.model_schedule.models import MODELS
from tests.runtimes.ranks import on_ranks


def engine_of(key: str, dp: int, tp: int, seed: int, **options: Any) -> Any:
    mesh = slapo.init_mesh(dp=dp, tp=tp, device="cpu")
    torch.manual_seed(seed)
    model = MODELS[key].build()
    sch = apply_schedule(model, key, group=mesh["tp"])
    given = {"optimizer": torch.optim.SGD, "loss_fn": lambda output, _: output.loss, **options}
    return slapo.build(sch, target="torch", mesh=mesh, check=False, **given)[0]


def whole_of(key: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[key].build()


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "device_mesh") else value


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    pair = ({name: local(t) for name, t in each.items()} for each in (found, wanted))
    torch.testing.assert_close(*pair, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "key"), [((1, 1, 2), "gpt2"), ((1, 1, 2), "llama"), ((1, 2, 2), "gpt2")]
)
@on_ranks()
def test_a_checkpoint_holds_whole_tensors(tmp_path: Path, layout: Any, key: str) -> None:
    where, replicas = str(tmp_path), layout[1]
    options: dict[str, Any] = {"data_parallel": "fsdp"} if replicas > 1 else {}
    engine = engine_of(key, replicas, 2, seed=0, **options)
    before = {name: local(t).clone() for name, t in engine.state_dict().items()}
    dcp.async_save({"model": engine.state_dict()}, checkpoint_id=f"{where}/late").result()
    dcp.save({"model": engine.state_dict()}, checkpoint_id=where)
    # In the same layout, in place.
    with torch.no_grad():
        for parameter in engine.parameters():
            local(parameter).zero_()
    dcp.load({"model": engine.state_dict()}, checkpoint_id=where)
    assert_same(engine.state_dict(), before)
    zeros = {name: torch.zeros_like(t) for name, t in engine.state_dict().items()}
    for copied in (zeros, copy.deepcopy(zeros)):
        dcp.load({"model": copied}, checkpoint_id=where)
        assert_same(copied, before)
    torch.save(engine.state_dict(), file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(isinstance(local(tensor), SliceTensor) for tensor in loaded.values())
    assert_same(loaded, before)
    # In a model that no schedule has touched.
    for path in (where, f"{where}/late"):
        plain = whole_of(key, seed=1)
        dcp.load({"model": plain.state_dict()}, checkpoint_id=path)
        assert_same(plain.state_dict(), whole_of(key, seed=0).state_dict())
    # In another layout.
    if replicas > 1:
        other = engine_of(key, 1, 4, seed=1)
        dcp.load({"model": other.state_dict()}, checkpoint_id=where)
        assert_same(other.state_dict(), engine_of(key, 1, 4, seed=0).state_dict())


@on_ranks(2)
def test_state_dicts_are_as_before_in_all_else() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 1).sync("fwd_post", "all_reduce")
    model, _ = slapo.build(sch)
    state = model.state_dict()
    assert isinstance(state["0.weight"], SliceTensor)
    assert type(state["1.bias"]) is Tensor
    # Copies know, results of operations do not, and neither do files.
    for copied in (copy.deepcopy(state), {k: v.clone() for k, v in state.items()}):
        assert isinstance(copied["0.weight"], SliceTensor)
        assert torch.equal(copied["0.weight"], state["0.weight"])
    assert type(state["0.weight"] + 1) is Tensor
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) is Tensor for value in loaded.values())
    assert torch.equal(loaded["0.weight"], model[0].weight)
    model.load_state_dict(copy.deepcopy(state), assign=True)
    assert type(model[0].weight) is nn.Parameter
    assert type(model[0].weight.data) is Tensor
    assert tuple(model[0].weight.orig_shape) == (6, 4)
    x = torch.ones(3, 4)
    model(x).sum().backward()
    assert state["0.weight"].shape == state["0.weight"].size() == (3, 4)
    dist.barrier()
