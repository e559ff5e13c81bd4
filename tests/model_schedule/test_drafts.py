"""``slapo.draft``: equal to one process, on models that no table is written for."""

import functools
import logging
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import slapo
from benchmark.draft_ranks import sharded_share
from slapo import scripting
from slapo.agreement import gathered
from slapo.command import main
from slapo.model_schedule import apply_schedule, recipe_of, unregister
from slapo.model_schedule.drafts import draft_in_group
from slapo.model_schedule.registry import recipe_keys
from slapo.model_schedule.splits import entries_of, words_of
from slapo.verify.numeric.harness import gathered_gradients
from slapo.verify.placement.offline import fake_world
from tests.distributed import run_distributed
from tests.graph.served import make
from tests.model_schedule.draft_models import (
    OWN,
    STRANGERS,
    Alibi,
    DroppingHeads,
    FewKeys,
    Gated,
    Indexed,
    Own,
    Packed,
    dropping,
    ids,
    literal,
    of_torch,
    own,
    written_norm,
)
from tests.model_schedule.models import MODELS, VOCABULARY, Model
from tests.model_schedule.random_models import random_model
from tests.runtimes.ranks import on_ranks

#: Unequal blocks, parallel blocks, parameters of a module's own, latent attention, two stacks.
FAST = ["phi3", "cohere2", "mamba2", "deepseekv3", "bart"]


def some_and_wide(some: list[str], others: list[str]) -> list[Any]:
    """Names that a test is run with, and those that take longer."""
    marks = [pytest.mark.wide, pytest.mark.timeout(600)]
    return [pytest.param(some, id="some"), pytest.param(others, id="others", marks=marks)]


def quiet() -> None:
    warnings.simplefilter("ignore")
    slapo.get_logger().setLevel(logging.ERROR)


# --- equal to one process ------------------------------------------------------------------------
class WholeBlock(Packed):
    """Attention with literal sizes, and an MLP in the same module."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, literal=True)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(super().forward(x))))


class Parametrized(Gated):
    """Layers of torch whose weight a module computes, in front of others."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.turn = parametrizations.orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.mix = parametrizations.weight_norm(nn.Linear(hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(self.turn(x)))


class WidthOfInput(nn.Module):
    """Attention that reads its width off its input, in two ways, as nanoGPT and timm do."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads, self.hidden = 4, hidden
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, x.size(-1) // self.heads
        parts = self.qkv(x).split(self.hidden, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class _Heads(nn.Module):
    """Attention; its subclasses say how a tensor is split into heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def split(self, x: Tensor, number: int) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        q, k, v = (self.split(layer(x), number) for number, layer in enumerate(layers))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(rearrange(y, "b h n d -> b n (h d)"))


class ByEinops(_Heads):
    """Splits by functions and layers of einops, which caches what it computes from sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.heads = 4
        self.layer = Rearrange("b n (h d) -> b h n d", h=4)

    def split(self, x: Tensor, number: int) -> Tensor:
        if number == 0:
            return self.layer(x)
        return rearrange(x, "b n (h d) -> b h n d", h=self.heads)


@dataclass(frozen=True)
class Settings:
    heads: int = 4
    name: str = "small"


class ByConfigs(_Heads):
    """Reads the number of heads from a dict and from a dataclass, which all blocks share."""

    sizes, args = {"heads": 4, "rotary": {"base": 100}}, Settings()

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.sizes, self.args = type(self).sizes, type(self).args
        self.seen = {2: 3}  # no config

    def split(self, x: Tensor, number: int) -> Tensor:
        heads = self.args.heads if number else self.sizes["heads"]
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class BiasOfParts(nn.Module):
    """Packed queries, keys and values, whose bias is joined of parts as in BEiT."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = 4
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(hidden)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(hidden))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).view(*x.shape[:2], 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        return self.out(y.transpose(1, 2).flatten(2))


class Scale(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.gamma


class InLists(nn.Module):
    """Layers that are lists of norms, some of them absent, and a block, as in x-transformers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([Scale(hidden), None]), kind(hidden)])
            for kind in (ByEinops, Gated)
        )

    def forward(self, x: Tensor) -> Tensor:
        for (norm, _), block in self.layers:
            x = x + block(norm(x))
        return x


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])


class CalledTwice(Gated):
    """A module reads the sizes of two tensors off one argument."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.flat, self.wide = Flat(), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.flat(self.wide(x)).mean()
        return super().forward(self.flat(x).view(x.shape)) * mean


class Casting(nn.Linear):
    """As those of Whisper and timm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, self.weight.to(x.dtype), self.bias.to(x.dtype) if self.bias is not None else None
        )


class Bending(nn.Linear):
    """No sum over its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def casting(hidden: int) -> nn.Module:
    return nn.Sequential(Casting(hidden, 64), nn.GELU(), Casting(64, hidden))


def bending(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, 64), nn.GELU(), Bending(64, hidden))


def scripted(hidden: int) -> nn.Module:
    """Modules that take no hooks, between others, and twice the same."""
    norm, act = scripting.script(nn.LayerNorm(hidden)), scripting.script(nn.GELU())
    return nn.Sequential(norm, nn.Linear(hidden, 64), act, nn.Linear(64, hidden), norm)


#: Blocks of models of this file alone, and the smallest share of the bytes that is sharded.
MORE: dict[str, Any] = {"whole block": (WholeBlock, 0.5), "parametrized": (Parametrized, 0.7)}
MORE |= {"few keys": (FewKeys, 0.85), "dropping": (dropping, 0.0), "width": (WidthOfInput, 0.95)}
MORE |= {"einops": (ByEinops, 0.95), "configs": (ByConfigs, 0.95), "lists": (InLists, 0.95)}
MORE |= {"called twice": (CalledTwice, 0.7)}
MORE |= {
    "bias of parts": (BiasOfParts, 0.95),
    "casting": (casting, 0.95),
    "bending": (bending, 0.45),
    "scripted": (scripted, 0.45),
}


def model_of(name: str) -> Model:
    """Of the tables, of this file, or a random one by its seed."""
    if name.isdigit():
        return Model(functools.partial(random_model, int(name)), ids)
    kinds = OWN[name][0] if name in OWN else (MORE.get(name, ())[:1])
    return STRANGERS.get(name) or Model(functools.partial(own, *kinds), ids)


def drafted_on_ranks(
    rank: int, world_size: int, names: list[str]
) -> dict[str, tuple[float, list[str]]]:
    """The share, where outputs and every gradient are those of one process; what was given up."""
    quiet()
    slapo.set_random_seed(7, tp_rank=rank)
    found = {}
    for name in names:
        model = model_of(name)
        drafted = draft_in_group(model.build(), model.inputs(3, 13), dist.group.WORLD)
        sch = slapo.create_schedule(model.build(), group=dist.group.WORLD)
        with slapo.Verify(sch, model.inputs(2, 11)):
            drafted.apply(sch)
        found[name] = drafted.share, drafted.given_up
    return found


def check_shares(least: dict[str, float], ranks: int = 2, timeout: float = 280) -> Any:
    """A model -> the smallest share of it that is sharded."""
    first, *others = run_distributed(drafted_on_ranks, ranks, [*least], timeout=timeout)
    assert all(other == first for other in others)
    for name, share in least.items():
        assert first[name][0] >= share, (name, first)
    return first


@pytest.mark.parametrize("names", some_and_wide(FAST, [n for n in STRANGERS if n not in FAST]))
def test_families_without_a_table(names: list[str]) -> None:
    check_shares(dict.fromkeys(names, 0.6), timeout=280 if names == FAST else 550)


def test_own_models() -> None:
    """Of some parts stay whole."""
    more = {name: each for name, each in MORE.items() if name not in ("few keys", "dropping")}
    found = check_shares({name: share for name, (_, share) in (OWN | more).items()})
    (given_up,) = found["whole block"][1]
    assert "'blocks.0'" in given_up
    assert not found["parametrized"][1]


def test_a_write_through_a_view_of_a_single_image() -> None:
    """Autograd passes the gradient on through flat memory, where a batch of one is no dimension."""
    norm, relu = nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(inplace=True)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), norm, relu, nn.Conv2d(8, 2, 1))
    drafted = slapo.draft(model, torch.randn(1, 4, 5, 5), ranks=2)
    assert drafted.share > 0.9
    assert not drafted.given_up


def test_few_heads_on_four_ranks() -> None:
    """Fewer heads of keys than ranks; and one head on each rank, for which rotary keys are one."""
    check_shares({"few keys": 0.85, "deepseekv3": 0.9}, ranks=4)


@on_ranks(2)
def test_torch_takes_no_fast_path_around_the_syncs_of_its_layers() -> None:
    quiet()
    drafted = draft_in_group(own(of_torch, of_torch), ids(), dist.group.WORLD)
    sch = slapo.create_schedule(own(of_torch, of_torch).eval(), group=dist.group.WORLD)
    drafted.apply(sch)
    built, _ = slapo.build(sch)
    with torch.no_grad():
        torch.testing.assert_close(built(ids()), own(of_torch, of_torch).eval()(ids()))


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 50),
        *(
            pytest.param(n, n + 150, marks=[pytest.mark.wide, pytest.mark.timeout(1800)])
            for n in range(50, 500, 150)
        ),
    ],
)
def test_random_models(start: int, stop: int) -> None:
    names = [str(seed) for seed in range(start, stop)]
    for found in run_distributed(drafted_on_ranks, 2, names, timeout=1700 if start else 280):
        shares = [share for share, _ in found.values()]
        assert sum(shares) / len(shares) > 0.75, found
        # Numbers of heads that are written as literals are refused rightly.
        refused = [
            seed
            for seed, (_, given_up) in found.items()
            if any("check:" in why for why in given_up)
            and not any(getattr(m, "literal", False) for m in model_of(seed).build().modules())
        ]
        assert len(refused) / len(names) < 0.02, refused


KEYS = [key for key in MODELS if key != "wideresnet"]


@pytest.mark.parametrize("keys", some_and_wide(["gpt2", "qwen3"], KEYS))
@on_ranks(2, timeout=580)
def test_as_much_is_sharded_as_by_hand(keys: list[str]) -> None:
    quiet()
    for key in keys:
        model = MODELS[key]
        drafted = draft_in_group(model.build(), model.inputs(3, 12), dist.group.WORLD)
        sch = apply_schedule(model.build(), key, group=dist.group.WORLD)
        assert drafted.share > sharded_share(sch.mod) - 0.01, key


# --- the program ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["stablelm", "mamba2", "bart", "swin"])
def test_the_text_makes_the_same_recipe(name: str) -> None:
    model: Model = STRANGERS[name]
    drafted = slapo.draft(model.build(), model.inputs(3, 13))
    assert drafted.verdict is None
    exec(str(drafted), {})
    try:
        assert recipe_of(drafted.key, None) == drafted.recipe
    finally:
        unregister(drafted.key)
    assert model.build().__class__.__name__ in str(drafted)


#: Other sizes of a family: width, heads, and how many layers.
WIDER: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3}
_TWO_WIDER: dict[str, Any] = {
    "d_model": 48,
    "decoder_layers": 3,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 72),
}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "state_size": 12, "num_hidden_layers": 3},
    "stablelm": WIDER,
    "falcon": {"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 4},
    "gptneox": WIDER,
    "cohere2": {**WIDER, "head_dim": 12, "layer_types": ["full_attention"] * 3},
    "bloom": {"hidden_size": 48, "n_head": 6, "n_layer": 3},
    "falconh1": {"hidden_size": 64, "mamba_d_ssm": 96, "mamba_d_head": 12, "mamba_n_heads": 8},
    "lfm2": {"hidden_size": 48, "num_attention_heads": 6},
    "qwen3moe": {**WIDER, "head_dim": 10, "moe_intermediate_size": 24, "num_experts": 6},
    "olmoe": {**WIDER, "intermediate_size": 24, "num_experts": 6},
    "deepseekv3": {"hidden_size": 48, "q_lora_rank": 24, "kv_lora_rank": 12, "v_head_dim": 12},
    "electra": WIDER,
    "debertav2": WIDER,
    "modernbert": {**WIDER, "layer_types": ["full_attention"] * 3},
    "bart": _TWO_WIDER,
    "mbart": _TWO_WIDER,
    "whisper": _TWO_WIDER,
    "dinov2": WIDER,
    "convnext": {"hidden_sizes": [24, 48], "depths": [2, 1]},
}


def of_other_sizes(rank: int, world_size: int, texts: dict[str, str]) -> None:
    """Programs of another process, on models that it had not."""
    quiet()
    slapo.set_random_seed(7, tp_rank=rank)
    for name, text in texts.items():
        model, before = STRANGERS[name], set(recipe_keys())
        exec(text, {})
        (key,) = set(recipe_keys()) - before
        sch = slapo.create_schedule(model.build(**OTHERS[name]), group=dist.group.WORLD)
        inputs = model.inputs(2, 12)
        with slapo.Verify(sch, inputs):
            apply_schedule(sch, key, kernels=False, attn_op_name=None, example_inputs=inputs)
        assert sharded_share(sch.mod) > 0.5, name


@pytest.mark.parametrize("names", some_and_wide([*OTHERS][:2], [*OTHERS][2:]))
def test_the_text_is_for_other_sizes_too(names: list[str]) -> None:
    models = {name: STRANGERS[name] for name in names}
    texts = {n: str(slapo.draft(m.build(), m.inputs(3, 13))) for n, m in models.items()}
    run_distributed(of_other_sizes, 2, texts, timeout=550)


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("norm over all", "blocks.*.norm", "whole(-1)"),
        ("norm over all", "blocks.*.up", "columns"),
        ("dropping", "blocks.*.drop", "fork_rng"),
        (
            "phi3",
            "layers.*.self_attn.qkv_proj",
            "columns(config.num_attention_heads*head_dim, num_key_value_heads*head_dim, "
            "num_key_value_heads*head_dim)",
        ),
    ],
)
def test_words_of_a_table(name: str, path: str, said: str) -> None:
    """Sizes are attributes, and not numbers."""
    model = model_of(name)
    drafted = slapo.draft(model.build(), model.inputs(3, 13))
    assert drafted.recipe.splits[path] == said
    assert drafted.verdict is None


# --- by key --------------------------------------------------------------------------------------
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ckpt_ratio": 0.5, "fused_loss": True},
    {"gather_logits": False},
    {"sequence_parallel": True},
]


#: Experts and their router, latent attention, one norm in front of two blocks, a mixer.
SPREAD = ["qwen3moe", "cohere2", "mamba2", "lfm2", "falcon", "bart"]
TOKENS = [{"sequence_parallel": True}]


@pytest.mark.parametrize(
    ("name", "key", "every"),
    [
        pytest.param("stablelm", "auto", OPTIONS, id="options"),
        pytest.param("gptneox", "draft", OPTIONS, id="options, draft", marks=pytest.mark.wide),
        pytest.param("deepseekv3", "draft", TOKENS, id="tokens"),
        *(
            pytest.param(name, "draft", TOKENS, id=f"tokens, {name}", marks=pytest.mark.wide)
            for name in SPREAD
        ),
    ],
)
@on_ranks(2)
def test_options_of_recipes(name: str, key: str, every: list[dict[str, Any]]) -> None:
    """The loss and every gradient are those of one process."""
    quiet()
    slapo.set_random_seed(7, tp_rank=dist.get_rank())
    model = STRANGERS[name]
    plain, inputs = model.build(), model.inputs(2, 12)
    wanted = plain(**inputs).loss
    wanted.backward()
    gradients = {path: p.grad for path, p in plain.named_parameters() if p.grad is not None}
    for options in every:
        sch = apply_schedule(model.build(), key, group=dist.group.WORLD, **options)
        built, _ = slapo.build(sch)
        loss = built(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
        found = gathered_gradients(built, sch.group)
        for path, gradient in gradients.items():
            torch.testing.assert_close(found[path], gradient, atol=1e-5, rtol=1e-4)


# --- what stays whole ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "name", "why"),
    [
        (Alibi, "blocks.0.q.weight", "values of arange"),
        (written_norm, "blocks.0.up.weight", "linalg_vector_norm"),
        (Indexed, "blocks.0.qkv.weight", "select"),
        (literal, "blocks.0.qkv.weight", ""),
    ],
)
def test_reasons(block: Any, name: str, why: str) -> None:
    drafted = slapo.draft(own(block, Gated), ids())
    assert drafted.verdict is None
    assert name in drafted.left_whole
    assert why in drafted.left_whole[name][0]
    assert "blocks.1.both.weight" not in drafted.left_whole
    if block is literal:  # given up, and said why
        assert "blocks.0" in " ".join(drafted.given_up)
        assert drafted.left_whole[name][0] == "given up"
    assert f"left whole: {name}" in drafted.summary()


class Lossy(Own):
    """A module that returns a number, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(Gated)
        self.loss, self.registers = nn.CrossEntropyLoss(), nn.Parameter(torch.zeros(0, 24))

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return self.loss(logits.flatten(0, 1), ids.flatten()) + self.registers.sum()


class Windows(Own):
    """A size whose formula cannot be divided: a square of windows that is one window here."""

    def __init__(self) -> None:
        super().__init__(Gated)
        self.window = 14

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        return out.reshape(len(ids) // (196 // self.window // self.window), *out.shape[1:])


def queries() -> nn.Module:
    """A table that is added whole, beside one for tokens of the same number of rows."""
    table = nn.Embedding(VOCABULARY, VOCABULARY)
    return make(
        lambda self, ids: self.inner(ids) @ self.table.weight, inner=Own(Gated), table=table
    )


class Positions(nn.Embedding):
    """Takes a shape, and makes the indices itself, as Marian's and RoFormer's tables do."""

    def forward(self, shape: torch.Size, given: Tensor | None = None) -> Tensor:
        return super().forward(torch.arange(shape[-1]) if given is None else given)


class TwoTables(Own):
    """A table of positions with as many rows as the vocabulary has."""

    def __init__(self, makes_indices: bool) -> None:
        super().__init__(Gated)
        self.makes_indices, self.positions = makes_indices, Positions(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        given = None if self.makes_indices else torch.arange(ids.shape[-1])
        return super().forward(ids) + self.positions(ids.shape, given=given)


def grouped_heads(hidden: int) -> nn.Module:
    """A convolution whose groups are the heads of queries and of keys, as in Zaya."""
    both = 3 * hidden // 2
    return make(
        lambda self, x: self.down(self.mix(torch.cat([self.q(x), self.k(x)], -1).mT).mT),
        q=nn.Linear(hidden, hidden),
        k=nn.Linear(hidden, hidden // 2),
        mix=nn.Conv1d(both, both, 3, padding=1, groups=6),
        down=nn.Linear(both, hidden),
    )


@pytest.mark.parametrize(
    "build",
    [
        Lossy,
        Windows,
        queries,
        functools.partial(TwoTables, True),
        functools.partial(TwoTables, False),
        functools.partial(Own, grouped_heads, Gated),
    ],
)
def test_modules_that_others_have_too(build: Any) -> None:
    drafted = slapo.draft(build(), {"ids": ids(3, 13)})
    assert drafted.verdict is None
    assert not drafted.given_up
    assert drafted.share > 0.4


def test_a_classifier_outside_of_the_base_model_stays_whole() -> None:
    inner = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 48))
    forward = lambda self, x: self.classifier(self.inner(x).relu())  # noqa: E731
    model: Any = make(forward, inner=inner, classifier=nn.Linear(48, 2))
    model.base_model_prefix = "inner"
    drafted = slapo.draft(model, torch.randn(3, 24))
    assert drafted.verdict is None
    assert [why.partition(":")[0] for why in drafted.given_up] == ["classifier.weight"]
    assert drafted.share > 0.4


class SizesOfInputs(nn.Module):
    """Reads the size of its output off a tensor of its own: heads cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.fc1, self.fc2 = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = (x * 2).shape
        by_head = self.fc1(x).view(batch, tokens, self.heads, -1).softmax(-1)
        return self.fc2(by_head.reshape(batch, tokens, width))


def two_blocks() -> nn.Module:
    mlp = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24))
    return nn.Sequential(OrderedDict(attention=SizesOfInputs(), mlp=mlp))


def test_many_layers_are_refused_at_once() -> None:
    drafted = slapo.draft(nn.Sequential(*(two_blocks() for _ in range(12))), torch.randn(3, 7, 24))
    assert drafted.verdict is None
    assert len(drafted.given_up) < 6
    assert drafted.share > 0.6


class Deep(nn.Module):
    """Twelve equal layers, which are found by their number."""

    calls = 0

    def __init__(self, is_counted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(16) for _ in range(12))
        self.count = 12 if is_counted else None

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.count or len(self.layers)):
            Deep.calls += 1
            x = x + self.layers[number](x)
        return x


@pytest.mark.parametrize(("is_counted", "least", "most"), [(False, 24, 24), (True, 60, 80)])
def test_the_proof_runs_one_layer_of_each_kind(
    is_counted: bool, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof runs the model four times; one that needs all its layers fails and keeps them."""
    monkeypatch.setattr(Deep, "calls", 0)
    drafted = slapo.draft(Deep(is_counted), torch.randn(3, 7, 16), ranks=4)
    assert least <= Deep.calls <= most
    assert drafted.verdict is None
    assert drafted.share > 0.95


def stuck() -> nn.Module:
    """Layers that cannot be sharded."""

    def forward(self: Any, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)

    layers = nn.ModuleList(SizesOfInputs() for _ in range(2))
    return make(forward, layers=layers, norm=nn.LayerNorm(24))


def test_a_model_of_which_nothing_is_sharded_is_refused_over_ranks() -> None:
    """Else each rank would do the work of one process, and no message would say so."""
    x = torch.randn(3, 7, 24)
    words = r"no parameter of Made can be sharded, .*left whole: layers.*use tp=1"
    with fake_world(2), pytest.raises(slapo.SlapoError, match=words):
        apply_schedule(stuck(), "auto", example_inputs=x, group=dist.group.WORLD)


def test_tokens_stay_whole_where_no_layer_is_sharded() -> None:
    """Attention over this rank's tokens alone would raise no error."""
    drafted = slapo.draft(stuck(), torch.randn(3, 7, 24))
    assert drafted.verdict is None
    assert not drafted.recipe.splits
    with fake_world(2), pytest.raises(ValueError, match="the draft shards no layer"):
        apply_schedule(stuck(), drafted.recipe, sequence_parallel=True, group=dist.group.WORLD)


def test_sizes_that_are_equal() -> None:
    """A batch of as many samples as there are heads, tokens as many as features."""
    drafted = slapo.draft(own(Packed, Gated), ids(4, 32))
    other = slapo.draft(own(Packed, Gated), ids(3, 11))
    assert drafted.recipe == other.recipe


def test_ranks_that_do_not_divide() -> None:
    drafted = slapo.draft(own(Packed, Gated), ids(), ranks=3)
    assert "4 is not divisible by 3" in drafted.left_whole["blocks.0.qkv.weight"][0]
    assert drafted.recipe.splits["blocks.1"] == "columns, sum_grad(x)"  # of 96 features


def test_gradients_through_writes_in_place() -> None:
    """Autograd follows a write through a view to the whole tensor, and so does the derivation."""

    class Scaled(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.mix = nn.Linear(hidden, hidden)
            self.scale = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            out[..., :3] = x[..., :3] * self.scale
            out[..., 5:] = 1.0  # of several writes, none hides the others
            return out + self.mix(x)

    drafted = slapo.draft(nn.Sequential(nn.Linear(9, 32), Scaled(32), Gated(32)), torch.randn(2, 9))
    assert not drafted.given_up
    assert drafted.recipe.splits["2"] == "columns, sum_grad(x)"


def test_an_operation_of_ones_own() -> None:
    def odd_pair(hidden: int) -> nn.Module:
        layers = {"up": nn.Linear(hidden, 64), "down": nn.Linear(64, hidden)}
        return make(lambda self, x: self.down(torch.ops.slapo_tests.odd(self.up(x))), **layers)

    @torch.library.custom_op("slapo_tests::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    odd.register_fake(torch.empty_like)
    odd.register_autograd(lambda ctx, grad: grad * 3)
    drafted = slapo.draft(own(odd_pair), ids())
    assert "no axis rule for slapo_tests::odd" in drafted.left_whole["blocks.0.up.weight"][0]
    slapo.register_axis_rule("slapo_tests::odd", lambda call: [call.axes[0]])
    slapo.register_place_rule("slapo_tests::odd", lambda call: call.places[0])
    drafted = slapo.draft(own(odd_pair), ids())
    assert drafted.recipe.splits["blocks.*.up"] == "columns"
    assert drafted.verdict is None


@on_ranks(2)
def test_ranks_agree_with_dropout() -> None:
    """About whole parameters, after three steps."""
    quiet()
    slapo.set_random_seed(7, tp_rank=dist.get_rank())
    kinds = DroppingHeads, dropping, Gated
    drafted = draft_in_group(own(*kinds), ids(), dist.group.WORLD)
    model, _ = slapo.build(
        drafted.apply(slapo.create_schedule(own(*kinds), group=dist.group.WORLD))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(ids(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.detach() for n, p in model.named_parameters() if not hasattr(p, "orig_shape")}
    assert "final.weight" in whole
    first, second = gathered(whole, None)
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())


# --- bad input: more in ``tests/golden/mistakes/draft.txt`` ---------------------------------------
def test_words_that_are_no_list() -> None:
    with pytest.raises(ValueError, match=r"not a list of words"):
        words_of("columns(")


def test_a_module_may_have_several_entries() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    found, absent = entries_of(sch, [("0 1", "columns"), ("0 2", "fork_rng"), ("0 1", "sum")])
    said = [(entry.node.path, entry.words[0].name) for entry in found]
    assert said[:3] == [("0", "columns"), ("0", "fork_rng"), ("0", "sum")]
    assert said[3:] == [("1", "columns"), ("1", "sum")]
    assert list(absent) == ["2"]


# --- the command ---------------------------------------------------------------------------------
NOTHING = """
import torch
def nothing():
    return torch.nn.Sequential(torch.nn.LayerNorm(8)), torch.ones(3, 8)
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a folder, and on a function of which nothing can be sharded."""
    STRANGERS["stablelm"].build(num_hidden_layers=6).config.save_pretrained(tmp_path)
    assert main(["draft", str(tmp_path), "--tp", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("from slapo.model_schedule import Recipe")
    assert '"layers.*.mlp.down_proj": "rows"' in said.out
    assert "sharded, with" in said.err
    (tmp_path / "own.py").write_text(NOTHING)
    assert main(["draft", f"{tmp_path}/own.py:nothing"]) == 1


@on_ranks(2)
def test_the_page() -> None:
    """Its edited table is equal to the model on two ranks."""
    quiet()
    own_model, recipe = Path("docs/drafts.md").read_text().split("```python\n")[1:3]
    names: dict[str, Any] = {}
    exec(own_model.partition("print(")[0], names)
    exec(recipe.partition("```")[0], names)
    inputs = torch.randint(128, (3, 11), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    sch = slapo.create_schedule(names["Model"](), group=dist.group.WORLD)
    with slapo.Verify(sch, inputs):
        apply_schedule(sch, "my_model", example_inputs={"ids": inputs})
    assert sch["blocks.1.mlp.narrow"].mod.weight.shape == (4, 32)
