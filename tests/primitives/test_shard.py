"""``.shard`` on ranks of a pretended world: slices, sizes, ties, and what it refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.sharding.layout import Layout
from slapo.sharding.rules import Effect, register_shard_rule
from slapo.sharding.shards import shards_of
from slapo.verify.placement.offline import fake_world
from tests.fingerprint import refused
from tests.graph.served import make
from tests.primitives.models import Tied


@pytest.fixture(params=[(0, 2), (1, 2), (3, 4)], ids=lambda p: f"rank{p[0]}of{p[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """One rank of a group whose collectives do nothing."""
    rank, size = request.param
    with fake_world(size, rank):
        yield rank, size


def hf_conv1d(nf: int, nx: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(nf, nx)


#: module, tensor, axis -> attributes afterwards, as multiples of 1 / world_size
SIZES: dict[str, tuple[Callable[[], nn.Module], str, int, dict[str, int]]] = {
    "linear column": (lambda: nn.Linear(8, 12), "weight", 0, {"out_features": 12}),
    "linear row": (lambda: nn.Linear(8, 12), "weight", 1, {"in_features": 8}),
    "linear row from the end": (lambda: nn.Linear(8, 12), "weight", -1, {"in_features": 8}),
    "linear bias": (lambda: nn.Linear(8, 12), "bias", 0, {"out_features": 12}),
    "conv1d hf column": (lambda: hf_conv1d(12, 8), "weight", 1, {"nf": 12}),
    "conv1d hf row": (lambda: hf_conv1d(12, 8), "weight", 0, {"nx": 8}),
    "conv column": (lambda: nn.Conv2d(8, 12, 3), "weight", 0, {"out_channels": 12}),
    "conv row": (lambda: nn.Conv2d(8, 12, 3), "weight", 1, {"in_channels": 8}),
    "conv groups": (
        lambda: nn.Conv2d(8, 12, 3, groups=4),
        "weight",
        0,
        {"out_channels": 12, "in_channels": 8, "groups": 4},
    ),
    "transposed conv": (lambda: nn.ConvTranspose2d(8, 12, 3), "weight", 1, {"out_channels": 12}),
    "batch norm": (lambda: nn.BatchNorm2d(8), "running_mean", 0, {"num_features": 8}),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), "weight", 0, {"num_features": 8}),
    "group norm": (
        lambda: nn.GroupNorm(4, 8),
        "weight",
        0,
        {"num_channels": 8, "num_groups": 4},
    ),
    "embedding rows": (lambda: nn.Embedding(8, 12), "weight", 0, {"num_embeddings": 8}),
    "embedding columns": (lambda: nn.Embedding(8, 12), "weight", 1, {"embedding_dim": 12}),
    "embedding bag": (lambda: nn.EmbeddingBag(8, 12), "weight", 1, {"embedding_dim": 12}),
    "prelu": (lambda: nn.PReLU(8), "weight", 0, {"num_parameters": 8}),
    "bilinear": (lambda: nn.Bilinear(3, 5, 8), "weight", 0, {"out_features": 8}),
}


@pytest.mark.parametrize("name", SIZES)
def test_slice_and_sizes(name: str, world: tuple[int, int]) -> None:
    make, tensor_name, axis, sizes = SIZES[name]
    rank, ranks = world
    module = make()
    whole = getattr(module, tensor_name).detach().clone()
    node = slapo.create_schedule(nn.Sequential(module))["0"].shard(tensor_name, axis)
    local = getattr(node.mod, tensor_name)
    assert node.mod is module
    assert torch.equal(local, whole.chunk(ranks, axis)[rank])
    assert local.orig_shape == whole.shape
    assert type(local) is type(getattr(make(), tensor_name))
    assert {key: getattr(module, key) for key in sizes} == {
        key: size // ranks for key, size in sizes.items()
    }
    # Its own storage: the whole tensor can be freed.
    assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def test_a_class_of_ones_own_may_have_a_rule(pair: None) -> None:
    scale: Any = make(lambda self, x: x * self.weight)
    scale.weight, scale.size = nn.Parameter(torch.ones(4)), 4
    register_shard_rule(type(scale), lambda module, tensor, axis: Effect(("size",), Layout()))
    assert slapo.create_schedule(scale).shard("weight", 0).mod.size == 2


# --- ties ------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["emb", "head"])
def test_the_other_side_of_a_tie_follows(first: str, pair: None) -> None:
    model = Tied()
    sch = slapo.create_schedule(model)
    second = {"emb": "head", "head": "emb"}[first]
    whole = model.emb.weight.detach().clone()
    assert sch.metadata.tie_weights == {
        "emb.weight": ("head.weight",),
        "head.weight": ("emb.weight",),
    }
    sch[first].shard("weight", 0)
    assert model.emb.weight is model.head.weight
    assert torch.equal(model.emb.weight, whole[4:])
    assert (model.emb.num_embeddings, model.head.out_features) == (4, 4)
    assert shards_of(sch[second].mod)["weight"].axis == 0
    sch[second].shard("weight", 0)  # naming the other side too is no second sharding
    with refused(sch, ValueError, "sharded already"):
        sch[second].shard("weight", 0)


# --- slices elsewhere --------------------------------------------------------------------------
def test_a_module_that_takes_slices_over_is_sharded(pair: None) -> None:
    """On meta it has the very tensors of the module it replaces."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 1).sync("fwd_post", "all_reduce")
    before = [shards_of(module) for module in model]
    with slapo.init_empty_weights():
        sch["0"].replace(nn.Linear(4, 4))
        sch["1"].replace(nn.Linear(4, 4))
    assert [shards_of(module) for module in model] == before
    assert type(model.state_dict()["0.weight"]).__name__ == "SliceTensor"
    slapo.check(sch, torch.ones(2, 4))  # the second adds its bias once


def test_slices_are_not_written_for_wholes(pair: None, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(4, 8))
    slapo.create_schedule(model)["0"].shard("weight", 0)
    file, state = tmp_path / "model.safetensors", model.state_dict()
    with pytest.raises(slapo.SlapoError, match=r"\(4, 4\) is this rank's slice of one of shape"):
        files.save_file(state, file)
    assert not file.exists()
    files.save_file({name: value.as_subclass(torch.Tensor) for name, value in state.items()}, file)
    assert torch.equal(files.load_file(file)["0.weight"], model[0].weight)
