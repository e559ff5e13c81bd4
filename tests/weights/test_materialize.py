"""Models on meta: creation, materialization in build, ties, sharding, errors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.agreement import gathered
from slapo.sharding.shards import shards_of
from tests.graph import zoo
from tests.primitives.models import Stack, Tied
from tests.runtimes.ranks import on_ranks


def numbered(module: nn.Module, path: str) -> None:
    """Values that tell where each element came from, different for every path."""
    for name, tensor in module.named_parameters(recurse=False):
        start = sum(map(ord, f"{path}.{name}"))
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + start)


# --- creation ------------------------------------------------------------------------------------
def test_disabled_and_afterwards_nothing_is_patched() -> None:
    register = nn.Module.register_parameter
    with slapo.init_empty_weights(enable=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with slapo.init_empty_weights():
        assert torch.equal(nn.BatchNorm1d(3).running_var, torch.ones(3))  # buffers are computed
    with pytest.raises(ZeroDivisionError), slapo.init_empty_weights(include_buffers=True):
        _ = 1 / 0
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Parameter(torch.ones(2), requires_grad=False)


def test_ties_and_flags_made_in_the_constructor_stay() -> None:
    with slapo.init_empty_weights():
        pair, model = Pair(), Tied()
    assert not pair.a.requires_grad
    assert pair.a is pair.b
    assert model.head.weight is model.emb.weight
    built, _ = slapo.build(slapo.create_schedule(model))
    assert built.head.weight is built.emb.weight
    assert not built.head.weight.is_meta


# --- one process ---------------------------------------------------------------------------------


def test_what_is_loaded_without_memory_is_read_by_build(tmp_path: Path) -> None:
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        GPT2ForSequenceClassification,
        GPT2LMHeadModel,
    )

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20}
    config = GPT2Config(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    saved = GPT2LMHeadModel(config)
    saved.save_pretrained(tmp_path)
    with slapo.init_empty_weights():
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
        headed = GPT2ForSequenceClassification.from_pretrained(tmp_path)
        linear = nn.Linear(2, 2)
        linear.load_state_dict({"weight": torch.eye(2), "bias": torch.ones(2)}, assign=True)
        assert nn.Linear(2, 2).weight.is_meta
        auto = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, use_cache=False)
        at_once = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)[0]
    assert all(p.is_meta for m in (loaded, headed, auto) for p in m.parameters())
    assert not any(p.is_meta for p in at_once.parameters())
    assert not loaded.training
    assert GPT2LMHeadModel.from_pretrained(tmp_path).lm_head.weight.device.type == "cpu"
    models = [slapo.build(slapo.create_schedule(m))[0] for m in (loaded, headed, linear)]
    assert models[0].lm_head.weight is models[0].transformer.wte.weight
    torch.testing.assert_close(models[0].state_dict(), saved.state_dict())
    wanted = saved.transformer.state_dict()
    torch.testing.assert_close(models[1].transformer.state_dict(), wanted)
    assert not models[1].score.weight.is_meta
    torch.testing.assert_close(models[2](torch.ones(2)), torch.full((2,), 2.0))
    half, _ = slapo.build(slapo.create_schedule(auto))
    assert half.config.use_cache is False
    found = {name: value.bfloat16() for name, value in saved.state_dict().items()}
    torch.testing.assert_close(half.state_dict(), found)
    with slapo.init_empty_weights():
        part = slapo.create_schedule(GPT2LMHeadModel.from_pretrained(tmp_path))["transformer"]
    with pytest.raises(slapo.SlapoError, match="read only when the root is built"):
        slapo.build(part)


def test_a_module_with_some_real_tensors_keeps_those() -> None:
    with slapo.init_empty_weights():
        layer = nn.Linear(4, 4)
    layer.bias = bias = nn.Parameter(torch.full((4,), 7.0))
    built, _ = slapo.build(slapo.create_schedule(layer))
    assert built.bias is bias
    assert torch.equal(bias, torch.full((4,), 7.0))
    assert not layer.weight.is_meta
    assert layer.weight.abs().max() <= 0.5  # 1 / sqrt(4)


def test_false_leaves_them_on_meta() -> None:
    with slapo.init_empty_weights():
        model = Stack(1)
    slapo.build(slapo.create_schedule(model), init_weights=False)
    assert all(p.is_meta for p in model.parameters())


def test_calls_before_the_build_leave_nothing_behind() -> None:
    """``tests/golden/mistakes/init_empty_weights.txt`` has those that are refused."""
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(Stack())
    x = torch.ones(2, 4)
    assert sch.mod(x.to("meta")).is_meta  # who asks for shapes gets them
    copied = copy.deepcopy(sch.mod)
    copied.load_state_dict(Stack().state_dict(), assign=True)
    assert copied(x).shape == x.shape
    model, _ = slapo.build(sch)
    assert not model._forward_pre_hooks
    assert model(x).shape == x.shape


class Scaled(nn.Module):
    """Its initialization reaches into a child, as GPT-2's does for residual projections."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 2.0)
        nn.init.constant_(self.proj.weight, 3.0)


def test_wrappers_and_traces_are_seen_through() -> None:
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(Stack(2))
    sch.trace(recursive=False)
    sch["layers.0.fc1"].checkpoint()
    sch["layers.1"].checkpoint()
    model, _ = slapo.build(sch)
    assert not any(p.is_meta for p in model.parameters())
    assert model(torch.ones(2, 4)).isfinite().all()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "t5"])
def test_hugging_face_initialization(family: str, buffers: bool) -> None:
    define = zoo.FAMILIES[family].build
    torch.manual_seed(0)
    expected = define()
    with slapo.init_empty_weights(include_buffers=buffers):
        model = define()
    slapo.build(slapo.create_schedule(model))
    for (name, want), (_, have) in zip(
        expected.named_parameters(), model.named_parameters(), strict=True
    ):
        if want.numel() > 1:
            assert have.std().item() == pytest.approx(want.std().item(), rel=0.5, abs=1e-8), name
            same_constant = want.std() > 0 or torch.equal(want, have)
            assert same_constant, name
    for (name, want), (_, have) in zip(
        expected.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(want, have), name


# --- several processes ---------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 1, 4)], ids=["two", "four"])
@on_ranks()
def test_ranks_hold_slices_of_one_initialization(layout: Any) -> None:
    with slapo.init_empty_weights():
        model = nn.Sequential(Stack(1, size=8), Scaled(), nn.Embedding(8, 4, padding_idx=5))
    sch = slapo.create_schedule(model)
    sch["0.layers.0.fc1"].shard("weight", 0).shard("bias", 0)
    sch["0.layers.0.fc2"].shard("weight", 1)
    sch["1.proj"].shard("weight", 0).shard("bias", 0)
    sch["2"].shard("weight", 0).sync("fwd_post", "all_reduce")
    torch.manual_seed(sch.rank)  # ranks must agree in spite of it
    slapo.build(sch)
    assert model[0].layers[0].fc1.weight.orig_shape == (16, 8)
    full = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            spec = shards_of(module).get(name)
            full[f"{path}.{name}"] = spec.gather(param.detach(), sch.group) if spec else param
    first, *others = gathered({n: t.detach().clone() for n, t in full.items()}, None)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(full["1.proj.weight"], torch.full((4, 4), 3.0))
    assert torch.equal(full["2.weight"][5], torch.zeros(4))  # the padding row, wherever it lies
    assert (full["2.weight"].abs().sum(1) > 0).sum() == 7
    rows = full["0.layers.0.fc1.weight"]
    bound = 1 / 8**0.5  # fan-in of the whole layer, not of a slice
    assert bound * 0.9 < rows.abs().max() <= bound
    assert not torch.equal(rows[:4], rows[4:8])  # slices of one tensor, not one slice twice
    bound = 1 / 16**0.5
    assert bound * 0.9 < full["0.layers.0.fc2.weight"].abs().max() <= bound


@on_ranks(2)
def test_packed_blocks_are_sliced_one_by_one() -> None:
    with slapo.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 12))
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", 0, blocks=3)
    sch["0"].shard("bias", 0, blocks=3)
    slapo.build(sch, init_weights=numbered)
    full = nn.Linear(4, 12)
    with torch.no_grad():
        numbered(full, "0")
    rows = [block * 4 + sch.rank * 2 + k for block in range(3) for k in range(2)]
    assert torch.equal(model[0].weight, full.weight[rows])
    assert torch.equal(model[0].bias, full.bias[rows])


def test_a_mask_that_nothing_writes_is_an_error() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
            self.register_buffer("code", torch.arange(3, dtype=torch.uint8))

    with slapo.init_empty_weights(include_buffers=True):
        model = nn.Sequential(Masked())
    with pytest.raises(slapo.SlapoError, match=r"'0' \(Masked\) cannot initialize"):
        slapo.build(slapo.create_schedule(model))

    def write(module: nn.Module) -> None:
        if isinstance(module, Masked):
            module.mask.copy_(torch.ones(3, 3).tril())
            module.code.copy_(torch.arange(3))

    slapo.build(slapo.create_schedule(model), init_weights=write)
    assert torch.equal(model[0].mask, torch.ones(3, 3, dtype=torch.bool).tril())


def test_a_model_within_a_module_of_the_users_is_initialized_as_it_says() -> None:
    with slapo.init_empty_weights():
        parts = {"lm": zoo.FAMILIES["bert"].build(), "head": nn.Linear(32, 2)}
    model: Any = nn.ModuleDict(parts)
    slapo.build(slapo.create_schedule(model))
    layer = model.lm.bert.encoder.layer[0].attention.self.query
    assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
    assert layer.weight.std() < 0.04  # 0.02, not 1 / sqrt(3 * 32)
    assert not torch.equal(model.head.bias, torch.zeros(2))


class InitializesBelow(nn.Module):
    """One module sets the weights of many, which then arrive together."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 2 + k, bias=False) for k in range(12))

    def reset_parameters(self) -> None:
        for number, part in enumerate(self.parts):
            nn.init.constant_(part.weight, float(number))


@on_ranks(2)
def test_ranks_exchange_values_in_one_order() -> None:
    # The addresses of modules differ between ranks, as do orders that depend on them.
    rank = torch.distributed.get_rank()
    kept = [nn.Linear(rank + 1, 1) for _ in range(7 * rank)]
    with slapo.init_empty_weights():
        model = InitializesBelow()
    slapo.build(slapo.create_schedule(model))
    del kept
    for number, part in enumerate(model.parts):
        assert part.weight.detach().unique().item() == number
