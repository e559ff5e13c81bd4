"""What pieces of a run add up to: over micro-batches, layers, frozen parameters, nodes, calls."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmark.measure import peak_of
from slapo.cost import MACHINES, Update, dryrun
from slapo.cost.meter import Meter
from slapo.cost.models import for_training, shrink, training_inputs, untie
from slapo.cost.runs import _run, loss_of_output
from slapo.model_schedule import Recipe, apply_schedule, register_recipe
from slapo.model_schedule.registry import recipe_of, unregister
from tests.cost.real import config_of
from tests.graph.served import make
from tests.primitives.models import Tied


def _tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.ones(samples, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _frozen(*paths: str) -> nn.Module:
    model = for_training(config_of("llama"))
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


def test_stages_hold_tied_parameters_each() -> None:
    names = {"head.weight", "emb.weight"}
    untied = untie(shrink(Tied()))
    assert untied.ties == [names]
    assert len(list(untied.model.parameters())) == 4
    assert len(list(untie(shrink(Tied()), [frozenset(names)]).model.parameters())) == 3


# --- memory -------------------------------------------------------------------------------------
def test_activations_in_flight_are_as_many_as_stages() -> None:
    """What a stage makes and the next one frees is gone with its micro-batch."""
    ask = partial(dryrun, "llama", config_of("llama", layers=8), mesh={"pp": 4}, machine="cpu")
    few, many = (ask(batch=n, micro_batches=n, seq_len=64) for n in (4, 64))
    held = [[stage.activations for stage in found.stages] for found in (few, many)]
    assert held[0] == held[1]
    assert held[0][1] > held[0][2] > held[0][3]  # the first has fewer layers, beside its embeddings


class Kinds(nn.Module):
    """Parameters whose gradients come about in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.twice = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.twice(self.table(tokens)))
        x = self.norm(checkpoint(self.again, x, use_reentrant=True))
        return self.head(checkpoint(self.again, x, use_reentrant=False)).logsumexp(-1).sum()


def test_a_later_micro_batch_is_that_of_a_second_run() -> None:
    """Only the first is run; the second adds to the gradients that are there."""
    inputs = {"tokens": torch.arange(24).view(2, 12)}
    derived = _run(Kinds(), [], inputs, loss_of_output, rounding=1).again.backward["after",]
    model = Kinds()
    with Meter(model, kernels=True) as meter:
        model(**inputs).backward()
        loss = model(**inputs)
        meter.peak = before = meter.alive
        count = len(meter.kernels)
        loss.backward()
        del loss
    kernels = meter.kernels[count:]
    for kind in (sum, len):
        assert kind([k.moved for k in derived.kernels]) == kind([k.moved for k in kernels])
    assert derived.delta == meter.alive - before
    assert derived.peak == meter.peak - before


def test_sparse_gradients_do_not_count() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 50))

    ask = partial(dryrun, lambda sch: None, inputs=lambda n: {"input": torch.ones(n, 8).long()})
    loss = {"loss_fn": lambda output, labels: output.sum(), "optimizer": torch.optim.SGD}
    found = ask(make, machine="cpu", batch=2, **loss)
    assert found.stages[0].gradients >= 4 * (16 * 50 + 50)


def test_layers_dropped_by_chance_count_as_run() -> None:
    from transformers import OPTConfig

    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 64}
    ask = partial(dryrun, "opt", machine="cpu", seq_len=16)
    config = partial(OPTConfig, word_embed_proj_dim=32, num_hidden_layers=4, **sizes)
    always, mostly = (ask(config(layerdrop=share)) for share in (0.0, 0.1))
    assert (mostly.peak, mostly.flops) == (always.peak, always.flops)


@pytest.mark.parametrize("family", ["GPTJ", "Bloom"])
def test_what_a_layer_returns_beside_is_held_once(family: str) -> None:
    import transformers

    kind: Any = getattr(transformers, f"{family}Config")
    config = kind(n_embd=64, n_layer=8, n_head=8, hidden_size=64, vocab_size=128, rotary_dim=4)
    model = for_training(config).train()
    apply_schedule(model, "auto", ckpt_ratio=1.0, check=False)
    inputs = training_inputs(model, 4, 64)

    def step() -> None:
        model(**inputs).loss.backward()
        model.zero_grad()

    gc.collect()
    found = dryrun(
        "auto",
        config,
        machine="cpu",
        batch=4,
        seq_len=64,
        ckpt_ratio=1.0,
        optimizer=torch.optim.SGD,
    )
    assert found.peak == pytest.approx(peak_of(step), rel=0.05)


def test_parameters_without_a_gradient_have_no_state() -> None:
    def make_unused() -> nn.Module:
        return make(lambda self, x: self.used(x), used=nn.Linear(16, 16), other=nn.Linear(512, 512))

    found = dryrun(
        lambda sch: None, make_unused, inputs=lambda n: {"x": torch.ones(n, 16)}, machine="cpu"
    )
    (stage,) = found.stages
    assert stage.gradients == 4 * (16 * 16 + 16)
    assert stage.parameters > 4 * 512 * 512


def test_zero_3_holds_its_bucket_in_bytes() -> None:
    ask = partial(dryrun, "llama", config_of("llama"), mesh={"dp": 4}, seq_len=16, machine="cpu")
    small, large = (ask(target="deepspeed", zero=3, bucket=size).peak for size in (1000, 2000))
    assert large - small >= 2 * 4 * 1000  # of gradients, and of parameters


# --- frozen -------------------------------------------------------------------------------------
def test_layers_behind_frozen_ones_can_be_cut() -> None:
    ask = partial(dryrun, "llama", mesh={"pp": 2}, batch=2, micro_batches=2, inputs=_tokens)
    whole, embeddings = (
        ask(partial(_frozen, *paths), machine="cpu") for paths in ((), ("model.embed_tokens",))
    )
    assert embeddings.stages[0].gradients < whole.stages[0].gradients
    assert embeddings.stages[1].peak == whole.stages[1].peak
    assert embeddings.time.backward <= whole.time.backward


def test_frozen_layers_take_no_backward() -> None:
    ask = partial(dryrun, "llama", machine="cpu", inputs=_tokens, batch=2)
    whole, head = (ask(partial(_frozen, *paths)) for paths in ((), ("model",)))
    assert head.time.backward < 0.5 * whole.time.backward
    assert head.flops < 0.7 * whole.flops
    assert head.layout.length == 16  # of the inputs


def test_some_frozen_layers_are_a_kind_of_their_own() -> None:
    ask = partial(dryrun, "llama", machine="cpu", inputs=_tokens, batch=2)
    layers = [f"model.layers.{number}" for number in range(4)]
    gradients = [ask(partial(_frozen, *layers[:count])).stages[0].gradients for count in (0, 2, 4)]
    assert gradients[0] - gradients[1] == gradients[1] - gradients[2] > 0


# --- time ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("devices", "far"), [(4, 3), (8, 1), (16, 0)])
def test_messages_between_nodes_are_slow(devices: int, far: int) -> None:
    """Four stages of four ranks each."""
    node = replace(MACHINES["v100-16gb"], devices=devices)
    ask = partial(dryrun, "llama", config_of("llama"), mesh={"pp": 4, "tp": 4}, seq_len=64)
    found = ask(machine=node, batch=4, micro_batches=4).time.messages
    near = ask(machine=replace(node, devices=16), batch=4, micro_batches=4).time.messages
    slow = replace(node, inside=node.between, latency=(node.latency[1],) * 2, devices=16)
    most = ask(machine=slow, batch=4, micro_batches=4).time.messages
    assert found == pytest.approx(near + far / 3 * (most - near))


def test_an_optimizer_of_lists_has_a_few_kernels() -> None:
    update = Update.of(torch.optim.AdamW, accelerator=True)
    assert len(update.kernels_for([10] * 50)) == len(update.kernels_for([500]))
    assert sum(kernel.moved for kernel in update.kernels_for([1 << 20, 1 << 20])) > 16 << 20
    fused = Update.of(partial(torch.optim.AdamW, fused=True))
    names = [kernel.name for kernel in fused.kernels_for([10, 20])]
    assert names == ["_foreach_add_", "_fused_adamw_"]
    each = Update.of(partial(torch.optim.AdamW, foreach=False))
    assert len(each.kernels_for([10, 20])) == 2 * len(each.kernels_for([10]))


# --- what is kept from call to call -------------------------------------------------------------
def test_switches_of_torch_tell_runs_apart() -> None:
    ask = partial(dryrun, "llama", config_of("llama"), machine="cpu", seq_len=48)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ask().dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    plain = ask()
    assert plain.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert ask().peak != plain.peak
    assert ask().peak == plain.peak


def test_a_key_that_is_registered_anew_is_asked_again() -> None:
    class AskedError(Exception):
        pass

    def other(config: Any) -> Recipe:
        raise AskedError

    ask = partial(dryrun, "mine", config_of("llama"), machine="cpu", seq_len=16)
    register_recipe("mine")(partial(recipe_of, "llama"))
    try:
        ask()
        unregister("mine")
        register_recipe("mine")(other)
        with pytest.raises(AskedError):
            ask()
    finally:
        unregister("mine")


def test_an_optimizer_of_whole_matrices() -> None:
    dryrun("llama", config_of("llama"), seq_len=16, optimizer=torch.optim.Muon)
