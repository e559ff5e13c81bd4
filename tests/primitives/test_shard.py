"""``.shard`` on ranks of a pretended world: slices, sizes, ties, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D  # noqa: F401 - of the golden file

import slapo
from slapo.sharding.layout import Layout
from slapo.sharding.rules import Effect, register_shard_rule
from slapo.sharding.shards import shards_of
from slapo.verify.placement.offline import fake_world
from tests.entries import Entries
from tests.fingerprint import refused
from tests.graph.served import make
from tests.primitives.models import Tied

#: A module, tensor and axis of a shard, and the sizes that change on two and four ranks.
ENTRIES = Entries("slices.txt", globals())


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_slice_and_sizes(title: str, update_golden: bool) -> None:
    def tell(make: Callable[[], nn.Module], shard: tuple[str, int]) -> str:
        told = {}
        for rank, ranks in ((0, 2), (1, 2), (3, 4)):
            with fake_world(ranks, rank):
                module, before = sharded(make, *shard, rank, ranks), vars(make())
            sizes = {k: v for k, v in vars(module).items() if isinstance(v, int)}
            told[ranks] = {k: v for k, v in sizes.items() if v != before[k]}
        return str(told)

    ENTRIES.check(title, tell, update_golden)


def sharded(
    make: Callable[[], nn.Module], name: str, axis: int, rank: int, ranks: int
) -> nn.Module:
    module = make()
    whole = getattr(module, name).detach().clone()
    node = slapo.create_schedule(nn.Sequential(module))["0"].shard(name, axis)
    local = getattr(node.mod, name)
    assert node.mod is module
    assert torch.equal(local, whole.chunk(ranks, axis)[rank])
    assert local.orig_shape == whole.shape
    assert type(local) is type(getattr(make(), name))
    # Its own storage: the whole tensor can be freed.
    assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
    return module


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
