"""Verify: what it accepts, what it refuses and whom it names, and that it leaves nothing behind."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.op import FusedQKV
from slapo.sharding.shards import shards_of
from slapo.weights.provenance import Source
from tests.distributed import run_distributed
from tests.graph.served import make
from tests.primitives.models import Stack, Tied

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(15).view(3, 5) % 8


class WrongGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def acted() -> nn.Module:
    layers = OrderedDict(first=nn.Linear(4, 4), act=nn.GELU(), last=nn.Linear(4, 4))
    return nn.Sequential(layers)


class WrongGradient(nn.Module):
    """The right output with twice the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x)
        return y + (y - y.detach())


class Heads(nn.Module):
    """Attention's projections, as FusedQKV replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), 2, 4).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(proj(x)) for proj in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v)


def test_an_equal_schedule_passes() -> None:
    sch = slapo.create_schedule(Stack(2))
    with slapo.Verify(sch, X):
        for block in sch.select("layers.*"):
            block["fc1"].decompose()
            block.fuse(block.find(lambda x, b: F.gelu(b + x)))
        sch["layers.1"].checkpoint()


def test_a_wrong_output_names_the_module_and_the_line() -> None:
    sch = slapo.create_schedule(acted())
    with pytest.raises(slapo.VerificationError, match=r"first at 'act' \(WrongGELU\)") as info:
        with slapo.Verify(sch, X):
            sch["last"].checkpoint()
            sch["act"].replace(WrongGELU())
    assert "test_verify.py" in str(info.value)
    assert 'sch["act"].replace' in str(info.value)
    assert "checkpoint" not in str(info.value)


class Detached(nn.Module):
    """Uses the weight of a layer without its gradient, under another name."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight.detach(), self.inner.bias)


class Count(nn.Module):
    """Gives a number beside the tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, self.number


class InTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


#: The original's path, what is put there instead, and what is said of it.
REPLACED: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any], nn.Module], str]] = {
    "gradient": (
        acted,
        "act",
        lambda old: WrongGradient(),
        r"outputs agree, but the gradient.*'act' \(WrongGradient\) is the first to return",
    ),
    "failure": (acted, "act", lambda old: nn.Unflatten(-1, (3, 3)), "fails with RuntimeError"),
    "type": (lambda: nn.Sequential(nn.Identity()), "0", lambda old: InTuple(), "tuple"),
    "number": (lambda: nn.Sequential(Count(1)), "0", lambda old: Count(2), r"output\[1\]"),
    "shape": (
        acted,
        "last",
        lambda old: nn.Linear(4, 5),
        r"'last.weight' has shape \(5, 4\) and had \(4, 4\)",
    ),
    "a parameter that moved": (acted, "last", Detached, r"gradient of 'last\.weight'"),
    "buffer": (
        lambda: nn.Sequential(nn.BatchNorm1d(4)),
        "0",
        lambda old: nn.BatchNorm1d(4, momentum=0.9),
        r"buffer '0\.running_mean'",
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_a_replacement_changes_is_found(name: str) -> None:
    make, path, new, said = REPLACED[name]
    sch = slapo.create_schedule(make())
    inputs, options = (X[0], {"eval_mode": False}) if name == "buffer" else (X, {})
    with pytest.raises(slapo.VerificationError, match=said) as info:
        with slapo.Verify(sch, inputs, **options):
            sch[path].replace(new(sch[path].mod))
    assert f'sch["{path}"].replace' in str(info.value)


def test_an_error_in_the_block_goes_through_and_nothing_is_verified() -> None:
    sch = slapo.create_schedule(acted())
    with pytest.raises(KeyError, match="nearest"), slapo.Verify(sch, X):
        sch["act"].replace(WrongGELU())
        sch["actt"].replace(nn.GELU())
    forward, call = nn.Module.forward, nn.Module.__call__
    assert nn.Module.forward is forward
    assert nn.Module.__call__ is call


def test_disabled_does_nothing() -> None:
    sch = slapo.create_schedule(acted())
    with slapo.Verify(sch, X, enable=False):
        sch["act"].replace(WrongGELU())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(6, 4)
    model[1].eval()
    sch = slapo.create_schedule(model)
    params = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    for eval_mode in (True, False):
        with slapo.Verify(sch, X[0], eval_mode=eval_mode):
            pass
    assert all(p is params[name] for name, p in model.named_parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 4))
    assert model[0].bias.grad is None
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert slapo.get_rng_tracker().get_states() == {} or slapo.is_random_seed_set()


def test_train_mode_compares_dropout_masks_and_batch_statistics() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))

    sch = slapo.create_schedule(model())
    with slapo.Verify(sch, X[0], eval_mode=False):
        sch["0"].checkpoint()
        sch.trace()
    for eval_mode in (True, False):
        sch = slapo.create_schedule(model())
        told = r"in train mode '2' drops with p=0.25, the original with p=0.5"
        with pytest.raises(slapo.VerificationError, match=told):
            with slapo.Verify(sch, X[0], eval_mode=eval_mode):
                sch["2"].replace(nn.Dropout(0.25))


def test_random_slopes_are_compared_by_their_mean() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.RReLU()))
    with slapo.Verify(sch, X):
        sch["1"].fork_rng()
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.RReLU()))
    with pytest.raises(slapo.VerificationError), slapo.Verify(sch, X):
        sch["1"].replace(nn.RReLU(upper=0.9))


def test_a_replacement_that_keeps_values_of_its_own_is_refused() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    new = nn.Linear(4, 4)
    values = new.weight.detach().clone()
    told = r"'0\.weight' has different values than on entry \(as do 1 more: '0\.bias'\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, X):
        sch["0"].replace(new)
    assert torch.equal(new.weight, values)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    with slapo.Verify(sch, X):
        with slapo.init_empty_weights():
            new = nn.Linear(4, 4)
        sch["0"].replace(new)


def test_weight_sources_carry_values_and_gradients() -> None:
    for empty in (False, True):
        with slapo.init_empty_weights(enable=empty):
            sch = slapo.create_schedule(Heads())

        def projection(x: Tensor, *shape: object) -> Tensor:
            return slapo.call_module("query|key|value", x).view(shape).transpose(1, 2)

        with slapo.Verify(sch, torch.randn(3, 5, 8)):
            with slapo.init_empty_weights(enable=empty):
                new = FusedQKV(8, 2)
            sch.replace(new, sch.find(projection))
        assert "FusedQKV_0" in sch


def test_a_model_on_meta_stays_there() -> None:
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(Stack(2))
    with slapo.Verify(sch, X):
        sch.select("layers.*").checkpoint()
    assert all(p.is_meta for p in sch.mod.parameters())
    with pytest.raises(slapo.VerificationError), slapo.Verify(sch, X):
        sch["layers.0.fc1"].replace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))


def test_a_node_below_the_root_and_a_loss_function() -> None:
    sch = slapo.create_schedule(Stack(2))
    with slapo.Verify(sch["layers.1"], X, loss_fn=lambda y: y.pow(2).mean()):
        sch["layers.1.fc1"].decompose()
    with pytest.raises(slapo.VerificationError, match="first at 'fc2'"):
        with slapo.Verify(sch["layers.1"], X):
            sch["layers.1.fc2"].sync("fwd_post", lambda module, args, output: output.relu())


# --- several processes ---------------------------------------------------------------------------


def _verify(rank: int, world_size: int, empty: bool) -> str:
    torch.manual_seed(0)
    with slapo.init_empty_weights(enable=empty):
        model = Stack(2, size=8)
    sch = slapo.create_schedule(model)
    torch.manual_seed(rank)  # every rank's own inputs: those of rank 0 count
    with slapo.Verify(sch, torch.randn(3, 5, 8)):
        for block in sch.select("layers.*"):
            block["fc1"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
            block["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    specs = [shards_of(m) for m in model.modules()]
    assert sum(len(s) for s in specs) == 6
    return "equal"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("empty", [False, True])
def test_tensor_parallel(world_size: int, empty: bool) -> None:
    assert run_distributed(_verify, world_size, empty) == ["equal"] * world_size


def _other_on_one_rank(sch: slapo.Schedule, rank: int) -> None:
    sch["act"].replace(WrongGELU() if rank == 1 else nn.GELU())


def _tied(sch: slapo.Schedule, rank: int) -> None:
    sch["emb"].shard("weight", 0).sync("fwd_post", "all_reduce")
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def _first_layer(sch: slapo.Schedule, rank: int) -> None:
    sch["first"].shard("weight", 0).shard("bias", 0)
    sch["last"].shard("weight", 1).sync("fwd_post", "all_reduce")


def _bare_table(sch: slapo.Schedule, rank: int) -> None:
    sch["emb"].shard("weight", 0)


#: A model, its inputs, what is done to it, and what is said on both ranks.
ON_RANKS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[..., None], str]] = {
    "a difference on one rank": (acted, X, _other_on_one_rank, "first at 'act'"),
    "a tied head sums both gradients": (Tied, TOKENS, _tied, "equal"),
    "gradients of inputs": (acted, X, _first_layer, "gradient of '<input 0>' differs"),
    "the words of build": (
        Tied,
        TOKENS,
        _bare_table,
        'add sch["emb"].sync("fwd_post", "all_reduce")',
    ),
}


def _said(rank: int, world_size: int, name: str) -> str:
    torch.manual_seed(0)
    make, inputs, schedule, _ = ON_RANKS[name]
    sch = slapo.create_schedule(make())
    try:
        with slapo.Verify(sch, inputs):
            schedule(sch, rank)
    except slapo.SlapoError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("name", ON_RANKS)
def test_all_ranks_say_the_same(name: str) -> None:
    assert all(ON_RANKS[name][-1] in message for message in run_distributed(_said, 2, name))


def test_sparse_gradients_are_compared() -> None:
    tokens = torch.tensor([[0, 2, 2]])
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))
    with slapo.Verify(sch, tokens):
        sch["1"].checkpoint()
    with pytest.raises(slapo.VerificationError, match="gradient"), slapo.Verify(sch, tokens):
        sch["0"].sync("fwd_post", lambda module, args, output: (2 * output) - output.detach())


class Spectrum(nn.Module):
    """Returns complex numbers, and keeps some in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 6), nn.GELU()
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.act(self.fc(x))) * self.turn


def test_complex_outputs_are_compared() -> None:
    with slapo.Verify(sch := slapo.create_schedule(Spectrum()), X):
        sch["fc"].decompose()
    for module, message in ((WrongGELU(), "the output differs"), (WrongGradient(), "gradient")):
        sch = slapo.create_schedule(Spectrum())
        with pytest.raises(slapo.VerificationError, match=message), slapo.Verify(sch, X):
            sch["act"].replace(module)


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class GivesAnObject(nn.Linear):
    def forward(self, input: Tensor) -> Plain:
        return Plain(super().forward(input))


def test_nothing_to_compare_is_no_success() -> None:
    sch = slapo.create_schedule(GivesAnObject(4, 4))
    message = "a Plain, holds no values to compare; pass example_inputs that are"
    with pytest.raises(slapo.SlapoError, match=message), slapo.Verify(sch, torch.ones(2, 4)):
        sch.checkpoint()
    with slapo.Verify(sch, torch.ones(2, 4), loss_fn=lambda output: output.hidden.sum()):
        sch.fork_rng()
    sch = slapo.create_schedule(nn.Sequential(nn.ReLU()))
    with pytest.raises(slapo.SlapoError, match=message[7:]), slapo.Verify(sch, torch.ones(0, 4)):
        sch["0"].replace(nn.Tanh())


def test_another_shape_and_what_is_no_number_are_said() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(slapo.VerificationError) as told, slapo.Verify(sch, torch.ones(2, 4)):
        sch["0"].sync("fwd_post", lambda module, args, output: output.repeat(1, 2)[:, :6])
    assert "first at '0' (Linear): its shape is (2, 6), the original's (2, 4);" in str(told.value)
    sch = slapo.create_schedule(nn.Sequential(nn.ReLU()))
    with pytest.raises(slapo.VerificationError) as told, slapo.Verify(sch, -torch.ones(2, 4)):
        sch["0"].sync("fwd_post", lambda module, args, output: output / 0)
    assert "at '0' (ReLU): 8 of its values are NaN or infinite, 0 in the original;" in str(
        told.value
    )


def test_a_replacement_of_an_earlier_block_is_an_original_later() -> None:
    sch = slapo.create_schedule(Heads())

    def projection(x: Tensor, *shape: object) -> Tensor:
        return slapo.call_module("query|key|value", x).view(shape).transpose(1, 2)

    x = torch.randn(3, 5, 8)
    with slapo.Verify(sch, x):
        sch.replace(FusedQKV(8, 2), sch.find(projection))
    with slapo.Verify(sch, x):
        sch["FusedQKV_0.fused_linear"].checkpoint()
    with pytest.raises(slapo.VerificationError), slapo.Verify(sch, x):
        sch["FusedQKV_0.fused_linear"].replace(nn.Sequential(nn.Linear(8, 24), nn.ReLU()))


def test_a_gradient_that_should_not_be_there_is_found() -> None:
    def frozen(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.fc(x)
        return y + x

    layer = nn.Linear(4, 4)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), make(frozen, fc=layer)))
    with pytest.raises(slapo.VerificationError, match="gradient"), slapo.Verify(sch, X):
        sch["1"].replace(make(lambda self, x: self.fc(x) + x, fc=layer))


def test_gradients_inside_a_fusion_are_compared() -> None:
    sch = slapo.create_schedule(acted())
    with slapo.Verify(sch, X) as verify:
        match = sch.find(lambda x: F.gelu(slapo.call_module("first", x)))
        sch.fuse(match)
        assert "first.weight" in verify.sides.origins.original_names
    assert "FusedModule_0" in sch


class Own(nn.Module):
    """A linear layer whose parameters have other names."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.w = nn.Parameter(layer.weight.detach().clone())
        self.b = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b)


class Declared(Own):
    def weight_sources(self) -> dict[str, Source]:
        return {"w": Source(("0.weight",)), "b": Source(("0.bias",))}


def test_parameters_that_nothing_accounts_for_are_refused() -> None:
    sch = slapo.create_schedule(acted())
    told = r"'last\.weight' is a parameter of the original and is gone.* of 'last' \(Own\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, X):
        sch["last"].replace(Own(sch["last"].mod))
    sch = slapo.create_schedule(acted())
    with slapo.Verify(sch, X):
        sch["last"].replace(Declared(sch["last"].mod))
