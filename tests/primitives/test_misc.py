"""``.annotate``, ``.fork_rng``, ``.decompose`` and ``.cut_pipeline_stage``."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.op import ForkRNGWrapper, LinearWithSeparateBias
from tests.fingerprint import fingerprint
from tests.primitives.models import Block, Stack, Tied

X = torch.randn(3, 4)


def refused(sch: Any, error: type[Exception], message: str, call: Any) -> None:
    before = fingerprint(sch)
    with pytest.raises(error, match=message):
        call()
    assert fingerprint(sch) == before


# --- annotate --------------------------------------------------------------------------------
def test_a_tag_follows_every_new_tensor(pair: None) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    node = sch["0"].annotate("weight", "kind", "expert").annotate("bias", "kind", 1)
    assert node.metadata.param_tags == {"weight": {"kind": "expert"}, "bias": {"kind": 1}}
    node.shard("weight", 0)
    assert node.mod.weight.kind == "expert"
    node.replace(nn.Linear(4, 4))
    assert (node.mod.weight.kind, node.mod.bias.kind) == ("expert", 1)


def test_a_tag_follows_materialisation_and_tensors_set_by_hand() -> None:
    with slapo.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].annotate("weight", "kind", 1)
    sch["1"].annotate("weight", "kind", 2)
    model[1].weight = nn.Parameter(torch.zeros(4, 4))
    slapo.build(sch)
    assert (model[0].weight.kind, model[1].weight.kind) == (1, 2)


def test_both_names_of_a_tied_parameter_have_the_tag() -> None:
    sch = slapo.create_schedule(Tied())
    sch["head"].annotate("weight", "kind", 1)
    assert sch["emb"].mod.weight.kind == 1


@pytest.mark.parametrize("key", ["", "a b", 3, "grad", "shape", "requires_grad"])
def test_bad_keys(key: Any) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    refused(sch, ValueError, "cannot be a tag", lambda: sch["0"].annotate("weight", key, 1))


@pytest.mark.parametrize("name", ["wieght", "0.weight", "running_mean"])
def test_only_parameters_of_the_module_itself(name: str) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.BatchNorm1d(4)))
    refused(sch, ValueError, "of its own", lambda: sch["0"].annotate(name, "k", 1))


def test_a_sequence_parallel_tag_that_was_rolled_back_does_nothing(pair: None) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.ReLU())
    sch = slapo.create_schedule(model)
    with pytest.raises(ValueError, match="no parameter"):
        sch.select("*").annotate("weight", "sequence_parallel", True)
    assert not hasattr(model[0].weight, "sequence_parallel")
    sums: list[Tensor] = []
    import slapo.sharding.tags as tags

    original = tags.reduce_from_group
    tags.reduce_from_group = lambda grad, group: sums.append(grad) or grad
    try:
        model(X).sum().backward()
        assert not sums
        sch["0"].annotate("weight", "sequence_parallel", True)
        model(X).sum().backward()
        assert len(sums) == 1
        sch["0"].annotate("weight", "sequence_parallel", False)
        model(X).sum().backward()
        assert len(sums) == 1
    finally:
        tags.reduce_from_group = original


# --- fork_rng --------------------------------------------------------------------------------
def test_fork_rng_draws_from_the_trackers_state() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Dropout(0.5)))
    slapo.set_random_seed(1)
    assert isinstance(sch["0"].fork_rng().mod, ForkRNGWrapper)
    ones = torch.ones(100)
    before = torch.get_rng_state()
    forked = sch.mod(ones)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(F.dropout(ones, 0.5), forked)
    slapo.set_random_seed(1)
    assert torch.equal(sch.mod(ones), forked)


# --- decompose -------------------------------------------------------------------------------
def test_decompose_keeps_objects_values_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    reference, weight, bias = copy.deepcopy(model), model[0].weight, model[0].bias
    model[0].register_forward_hook(lambda m, i, o: o * 2)
    node = slapo.create_schedule(model)["0"].decompose()
    assert isinstance(node.mod, LinearWithSeparateBias)
    assert node.mod.weight is weight
    assert node.mod.bias is bias
    torch.testing.assert_close(model(X), 2 * reference(X))


def test_decomposed_layers_show_their_addition() -> None:
    sch = slapo.create_schedule(Block())
    sch["fc1"].decompose()
    assert len(sch.find(lambda x, b: F.gelu(x + b))) == 1
    assert "fc1.weight" in sch.mod.state_dict()


def test_what_cannot_be_decomposed() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    sch = slapo.create_schedule(
        nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), Own(4, 4)
        )
    )
    sch["2"].decompose()
    sch["3"].shard("weight", 0)
    for path, message in {
        "0": "no bias",
        "1": "only nn.Linear can be decomposed, not ReLU",
        "2": "decomposed already",
        "3": r"sharded already \(weight\)",
        "4": "forward of its own",
    }.items():
        refused(sch, ValueError, message, lambda path=path: sch[path].decompose())


# --- cut_pipeline_stage ----------------------------------------------------------------------
def test_a_cut_is_noted_and_needs_a_runtime() -> None:
    sch = slapo.create_schedule(Stack())
    sch.trace_until("")
    node = sch["layers.0"].cut_pipeline_stage()
    assert node.metadata.primitives["cut_pipeline_stage"] == {"enabled": True}
    refused(sch, ValueError, "ends after this module already", node.cut_pipeline_stage)
    refused(sch, slapo.SlapoError, r"stages are cut after \['layers.0'\]", lambda: slapo.build(sch))
    assert not slapo.list_primitives(name_only=False)["cut_pipeline_stage"].is_verifiable()


def test_bad_cuts() -> None:
    sch = slapo.create_schedule(Stack())
    refused(sch, slapo.SlapoError, "trace_until", sch["layers.0"].cut_pipeline_stage)
    refused(sch, ValueError, "after the whole model", sch.cut_pipeline_stage)
    sch.trace(flatten=True)
    refused(sch, slapo.SlapoError, "does not call 'layers.0'", sch["layers.0"].cut_pipeline_stage)
