"""``.annotate``, ``.set``, ``.compile``, ``.fork_rng`` and ``.decompose``."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.op import LinearWithSeparateBias
from slapo.verify.placement.offline import fake_world
from tests.primitives.models import Tied

X = torch.randn(3, 4)


# --- annotate --------------------------------------------------------------------------------
def test_a_tag_follows_every_new_tensor(pair: None) -> None:
    linear: Any = nn.Linear(4, 4)
    linear.weight.requires_grad_(False)
    linear.weight.mine = "kept"
    sch = slapo.create_schedule(nn.Sequential(linear))
    node = sch["0"].annotate("weight", "kind", "expert").annotate("bias", "kind", 1)
    assert node.metadata.param_tags == {"weight": {"kind": "expert"}, "bias": {"kind": 1}}
    node.shard("weight", 0)
    assert (linear.weight.mine, linear.weight.kind) == ("kept", "expert")
    assert not linear.weight.requires_grad
    node.replace(nn.Linear(4, 4))
    assert (node.mod.weight.kind, node.mod.bias.kind) == ("expert", 1)


def test_a_tag_follows_materialization_and_tensors_set_by_hand() -> None:
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


def test_a_sequence_parallel_tag_that_was_rolled_back_does_nothing(
    pair: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.ReLU())
    sch = slapo.create_schedule(model)
    with pytest.raises(ValueError, match="no parameter"):
        sch.select("*").annotate("weight", "sequence_parallel", True)
    assert not hasattr(model[0].weight, "sequence_parallel")
    sums: list[Tensor] = []
    monkeypatch.setattr(
        "slapo.sharding.tags.reduce_from_group", lambda grad, group: sums.append(grad) or grad
    )
    for turned_on, number in ((None, 0), (True, 1), (False, 1)):
        if turned_on is not None:
            sch["0"].annotate("weight", "sequence_parallel", turned_on)
        model(X).sum().backward()
        assert len(sums) == number


# --- set -------------------------------------------------------------------------------------
class Heads(nn.Identity):
    limit = 7

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.sizes = 4, [2, 2]


def test_an_attribute_is_set_and_recorded() -> None:
    sch = slapo.create_schedule(nn.Sequential(Heads(), Heads()))
    before = sch.digest()
    sch["0"].checkpoint().set("heads", 2).set("sizes", [1, 1]).set("limit", 3)
    assert (sch["0"].mod.mod.heads, sch["0"].mod.sizes, sch["0"].mod.limit) == (2, [1, 1], 3)
    assert (sch["1"].mod.heads, Heads.limit) == (4, 7)
    assert "sch[\"0\"].set(name='heads', value=2)" in str(sch.history[1])
    assert sch.digest() != before
    sch.select("*").set("heads", 1)
    assert [child.heads for child in sch.mod] == [1, 1]


def test_a_size_follows_its_weight() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6)))
    sch["0"].mod.weight = nn.Parameter(torch.ones(3, 4))  # a slice that was made by hand
    assert sch["0"].set("out_features", 3).mod.out_features == 3


class Sizes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        return tuple(x.shape), x.size(-1), x.size(dim=0), tuple(y.size()), tuple((x + 1).shape)


def test_the_size_of_an_argument_is_a_share() -> None:
    with fake_world(2):
        sch = slapo.create_schedule(nn.Sequential(Sizes()), group=dist.group.WORLD)
    x, y = torch.ones(4, 3, 6), torch.ones(4, 6)
    part = sch["0"].set("x.shape[-1]").mod
    shares = (4, 3, 3), 3, 4, (4, 6), (4, 3, 6)
    for each in (part, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert each(x, y) == each(y=y, x=x) == shares
    assert torch.compile(part, backend="eager")(x, y) == shares
    assert not {"argument", "axis", "ranks"} & vars(part.mod).keys()
    sch["0"].set("y.shape[0]")
    assert sch["0"].mod(x, y)[3] == (2, 6)
    with pytest.raises(ValueError, match=r"axis 0 .* of shape \(5, 6\) is not divisible"):
        sch["0"].mod(x, torch.ones(5, 6))
    sch["0"].set("x.shape[3]")
    with pytest.raises(IndexError, match="has no axis 3"):
        sch["0"].mod(x, y)


class Views(nn.Linear):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x).view(*x.shape)


@pytest.mark.parametrize("names", [("checkpoint", "set"), ("set", "checkpoint")])
def test_a_recomputation_reads_the_same_sizes(names: tuple[str, str]) -> None:
    with fake_world(2):
        sch = slapo.create_schedule(nn.Sequential(Views(6, 3)), group=dist.group.WORLD)
    for name in names:
        getattr(sch["0"], name)(*(["x.shape[-1]"] if name == "set" else []))
    sch["0"].set("residual.shape[-1]")  # which is left out
    sch.mod(torch.ones(2, 6)).sum().backward()
    assert sch["0"].mod.weight.grad.abs().sum() > 0


# --- compile -------------------------------------------------------------------------------------
# Dynamo of torch 2.14 asks intermediates for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compile_keeps_modules_names_and_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    x, names = torch.randn(3, 4), list(model.state_dict())
    expected, inner = model(x), model[1]
    sch = slapo.create_schedule(model)
    sch["1"].compile(backend="aot_eager")
    assert model[1] is inner
    assert list(model.state_dict()) == names
    assert sch["1"].metadata.primitives["compile"] == {"enabled": True}
    found = slapo.build(sch)[0](x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)


# Dynamo of torch 2.11 warns of generators, and goes on.
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace the builtin:UserWarning")
def test_compile_with_checkpoints_and_hooks() -> None:
    """Whatever is put around it, before or after, runs too."""
    for first in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        x = torch.randn(3, 4, requires_grad=True)
        expected = 2 * model(x)
        sch = slapo.create_schedule(model)
        node = sch["0"].compile(backend="aot_eager") if first else sch["0"].checkpoint()
        node = node.checkpoint() if first else node.compile(backend="aot_eager")
        sch.sync("fwd_post", lambda module, args, output: 2 * output)
        found = sch.mod(x)
        torch.testing.assert_close(found, expected)
        (grad,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


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


# --- what is told and kept ---------------------------------------------------------------------
def test_values_that_a_replacement_drops_are_named(caplog: pytest.LogCaptureFixture) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    copied = nn.Linear(2, 2)
    copied.load_state_dict(sch["0"].mod.state_dict())
    sch["0"].replace(copied)
    with slapo.init_empty_weights():
        empty = nn.Linear(2, 2)
    sch["0"].replace(empty)
    assert not caplog.records
    assert torch.equal(sch["0"].mod.weight, copied.weight)
    sch["0"].replace(nn.Linear(2, 2))
    (record,) = caplog.records
    assert "Linear keeps its own values of ['weight', 'bias'], and those of sch" in record.message


def test_norms_count_a_batch_once_under_checkpoint() -> None:
    models = [nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)) for _ in range(2)]
    slapo.create_schedule(models[1])["0"].checkpoint()
    x = torch.arange(8.0).view(4, 2)
    for model in models:
        for _ in range(2):
            model(x.clone().requires_grad_()).sum().backward()
    for name, buffer in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], buffer), name
    assert models[1][0].num_batches_tracked == 2
