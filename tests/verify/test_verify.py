"""Verify: what it accepts, what it refuses and whom it names, and that it leaves nothing behind."""

import copy
import logging
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.op import FusedQKV
from slapo.sharding.shards import shards_of
from slapo.weights.provenance import Source
from tests.graph.served import make
from tests.primitives.models import Computes, Stack
from tests.runtimes.ranks import on_ranks
from tests.sharding.families import FAMILIES, Steps
from tests.sharding.packed import MLP, Attention, Packed, heads_of
from tests.verify.models import build, inputs

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
ROWS = X[0]


#: Modules of another output, and of another gradient.
WRONG_GELU = partial(Computes, partial(F.gelu, approximate="tanh"))
WRONG_GRADIENT = partial(Computes, lambda x: 2 * F.gelu(x) - F.gelu(x).detach())


def acted() -> nn.Module:
    layers = OrderedDict(first=nn.Linear(4, 4), act=nn.GELU(), last=nn.Linear(4, 4))
    return nn.Sequential(layers)


def test_disabled_does_nothing() -> None:
    sch = slapo.create_schedule(acted())
    with slapo.Verify(sch, X, enable=False):
        sch["act"].replace(WRONG_GELU())


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


def test_a_replacement_keeps_the_values_that_are_refused() -> None:
    sch, new = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4)
    values = new.weight.detach().clone()
    with pytest.raises(slapo.VerificationError), slapo.Verify(sch, X):
        sch["0"].replace(new)
    assert torch.equal(new.weight, values)
    with slapo.Verify(sch, X), slapo.init_empty_weights():
        sch["0"].replace(nn.Linear(4, 4))


def test_weight_sources_carry_values_and_gradients() -> None:
    for empty in (False, True):
        with slapo.init_empty_weights(enable=empty):
            sch = slapo.create_schedule(Attention())
        sch.trace()
        with slapo.Verify(sch, torch.randn(3, 5, 16)):
            with slapo.init_empty_weights(enable=empty):
                new = FusedQKV(16, 4)
            sch.replace(new, sch.find(heads_of))
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


# --- several processes ---------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [(2,), (4,)], ids=str)
@pytest.mark.parametrize("empty", [False, True])
@on_ranks()
def test_tensor_parallel(layout: Any, empty: bool) -> None:
    torch.manual_seed(0)
    with slapo.init_empty_weights(enable=empty):
        model = Stack(2, size=8)
    sch = slapo.create_schedule(model)
    torch.manual_seed(sch.rank)  # every rank's own inputs: those of rank 0 count
    with slapo.Verify(sch, torch.randn(3, 5, 8)):
        for block in sch.select("layers.*"):
            block["fc1"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
            block["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    assert sum(len(shards_of(m)) for m in model.modules()) == 6


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
    for module, message in ((WRONG_GELU(), "the output differs"), (WRONG_GRADIENT(), "gradient")):
        sch = slapo.create_schedule(Spectrum())
        with pytest.raises(slapo.VerificationError, match=message), slapo.Verify(sch, X):
            sch["act"].replace(module)


def test_an_object_is_compared_by_a_loss_of_it() -> None:
    """``tests/golden/mistakes/Verify.txt`` has it without one."""
    sch = slapo.create_schedule(
        make(lambda self, x: SimpleNamespace(hidden=self.fc(x)), fc=nn.Linear(4, 4))
    )
    with slapo.Verify(sch, X, loss_fn=lambda output: output.hidden.sum()):
        sch.fork_rng()


def test_a_replacement_of_an_earlier_block_is_an_original_later() -> None:
    sch = slapo.create_schedule(Attention())
    sch.trace()
    x = torch.randn(3, 5, 16)
    with slapo.Verify(sch, x):
        sch.replace(FusedQKV(16, 4), sch.find(heads_of))
    with slapo.Verify(sch, x):
        sch["FusedQKV_0.fused_linear"].checkpoint()
    with pytest.raises(slapo.VerificationError), slapo.Verify(sch, x):
        sch["FusedQKV_0.fused_linear"].replace(nn.Sequential(nn.Linear(16, 48), nn.ReLU()))


def test_gradients_inside_a_fusion_are_compared() -> None:
    sch = slapo.create_schedule(acted())
    with slapo.Verify(sch, X) as verify:
        match = sch.find(lambda x: F.gelu(slapo.call_module("first", x)))
        sch.fuse(match)
        assert "first.weight" in verify.sides.origins.original_names
    assert "FusedModule_0" in sch


# --- by where tensors come from -------------------------------------------------------------------
class Turned(nn.Module):
    """A layer with its weight the other way round; the fault: and twice is once."""

    def __init__(self, is_turned: bool = True, sizes: tuple[int, int] = (16, 16)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*sizes))
        self.bias = nn.Parameter(torch.empty(sizes[1]))
        self.is_turned = is_turned

    def weight_sources(self) -> dict[str, Source]:
        return {"weight": Source(("0.weight",), transpose=True), "bias": Source(("0.bias",))}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self.is_turned else self.weight, self.bias)


class Interleaved(nn.Module):
    """Gate and up in turns, scaled: code that is not followed."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.both, self.start = nn.Parameter(torch.empty(48, 16)), start

    def weights_from(self, originals: Any) -> dict[str, Tensor]:
        gate, up = (each["weight"] for each in originals)
        return {"both": 2 * torch.stack([gate, up], 1).reshape(48, 16)}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        both = F.linear(x, self.both / 2).unflatten(-1, (24, 2))
        return both[..., self.start], both[..., 1 - self.start]


def interleave(sch: slapo.Schedule, start: int = 0) -> None:
    sch.trace()
    sch.replace(Interleaved(start), sch.find(lambda x: slapo.call_module("gate|up", x)))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_square_weight_that_is_turned_several_times(times: int) -> None:
    sch, x = slapo.create_schedule(nn.Sequential(nn.Linear(16, 16), MLP())), torch.randn(2, 16)
    with slapo.Verify(sch, x):
        for number in range(times):
            sch["0"].replace(Turned(is_turned=number % 2 == 0))
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(sch, x):
        sch["0"].replace(Turned(is_turned=times % 2 == 1))


def test_a_turned_weight_that_is_not_square() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6)))
    with slapo.Verify(sch, torch.randn(2, 4)):
        sch["0"].replace(Turned(sizes=(4, 6)))


def test_the_copy_may_be_of_a_packed_model() -> None:
    sch, x = slapo.create_schedule(MLP()), torch.randn(2, 16)
    sch.trace()
    sch.replace(Packed(), sch.find(lambda x: slapo.call_module("gate|up", x)))
    with slapo.Verify(sch, x):
        sch["Packed_0.both"].replace(Whole())
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(sch, x):
        sch["Packed_0.both"].replace(Whole(2.0))


class Whole(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.kernel, self.scale = nn.Parameter(torch.empty(16, 48)), scale

    def weights_from(self, originals: Any) -> dict[str, Tensor]:
        (only,) = originals[0].values()
        return {"kernel": only.t() if only.shape[0] == 48 else only}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel * self.scale


def test_weights_by_code_that_is_not_followed() -> None:
    sch, x = slapo.create_schedule(MLP()), torch.randn(2, 16)
    with slapo.Verify(sch, x):
        interleave(sch)
    wrong = slapo.create_schedule(MLP())
    with pytest.raises(slapo.VerificationError, match="differs"), slapo.Verify(wrong, x):
        interleave(wrong, start=1)


# --- dtypes, modes, constant tensors, schedules in two blocks -------------------------------------
class OnlySingle(nn.Module):
    """Takes float32 and nothing else, as kernels do."""

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"expected dtype float32, got {x.dtype}")
        return F.leaky_relu(x, self.slope)


def test_what_refuses_float64_is_compared_in_its_own_dtype(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def model() -> slapo.Schedule:
        return slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), OnlySingle(), nn.Linear(4, 2)))

    sch = model()
    with caplog.at_level(logging.INFO), slapo.Verify(sch, ROWS):
        sch["1"].replace(OnlySingle())
    sch = model()
    told = r"first at '1' \(OnlySingle\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, ROWS):
        sch["1"].replace(OnlySingle(0.1))
    assert "Verify does not compare in torch.float64" in caplog.text


def test_constants_are_perturbed_alike_where_they_are_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias)
    model[1].bias = model[0].bias
    sch = slapo.create_schedule(model)
    with slapo.Verify(sch, ROWS):
        sch["0"].checkpoint()
    assert not sch.mod[0].bias.detach().any()


def test_masks_and_positions_keep_their_values() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4))
            self.register_buffer("ids", torch.zeros(3, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            assert bool((self.mask == 1).all())
            assert not bool(self.ids.any())
            return x @ self.mask

    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), Masked()))
    with slapo.Verify(sch, ROWS):
        sch["0"].checkpoint()


def test_a_model_that_cannot_train_is_compared_in_eval_mode() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with slapo.Verify(sch, ROWS[:1]):  # a batch of one has no variance
        sch["0"].checkpoint()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.fc(x) + self.bias, 0.1, self.training)


def test_dropouts_in_compiled_fusions_are_out_of_sight() -> None:
    def pattern(x: Tensor, bias: Tensor, training: bool) -> Tensor:
        return F.dropout(x + bias, 0.1, training)

    sch = slapo.create_schedule(nn.Sequential(Dropping(), nn.Dropout(0.2)))
    with slapo.Verify(sch, ROWS):
        sch["0"].trace(flatten=True)
        found = sch["0"].find(pattern)
        assert len(found) == 1
        sch["0"].fuse(found, compiler="TorchScript")
    with pytest.raises(slapo.VerificationError, match="'1' drops with"), slapo.Verify(sch, ROWS):
        sch["1"].mod.p = 0.3


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_a_sharded_model_is_an_original_too() -> None:
    sch = slapo.create_schedule(build("gpt2"))
    with slapo.Verify(sch, inputs("gpt2")):
        Steps(FAMILIES["gpt2"]).apply(sch)
    with slapo.Verify(sch, inputs("gpt2")):
        sch["transformer.h.0"].checkpoint()
    told = r"first at 'transformer.h.1.mlp.act' \(ReLU\)"
    with pytest.raises(slapo.VerificationError, match=told), slapo.Verify(sch, inputs("gpt2")):
        sch["transformer.h.1.mlp.act"].replace(nn.ReLU())


@on_ranks(2)
def test_ranks_fall_back_together() -> None:
    """Float64 is refused on one rank, while the other is in a sum."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    with slapo.Verify(sch, ROWS):
        sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        sch["2"].shard("weight", 1).sync("fwd_post", "all_reduce")
        sch["1"].replace(OnlySingle() if sch.rank == 1 else nn.ReLU())
