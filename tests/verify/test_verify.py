"""Verify: what it accepts, what it refuses and whom it names, and that it leaves nothing behind."""

from __future__ import annotations

import copy
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
from tests.graph.served import make
from tests.primitives.models import Computes, Stack
from tests.runtimes.ranks import on_ranks
from tests.sharding.packed import Attention, heads_of

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(15).view(3, 5) % 8


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


def test_train_mode_compares_dropout_masks_and_batch_statistics() -> None:
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)
    sch = slapo.create_schedule(nn.Sequential(*layers))
    with slapo.Verify(sch, X[0], eval_mode=False):
        sch["0"].checkpoint()
        sch.trace()


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
