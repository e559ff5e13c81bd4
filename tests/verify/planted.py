"""Mistakes that Verify must catch, each with the module that its message must name first.

Each is one line of a right schedule that was left out, written twice or written wrong, in the
second layer where there are several, or something that the schedule changed and did not mean to.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from slapo.op import FusedQKV
from slapo.sharding import reduce_from_group
from slapo.weights.provenance import Source
from tests.sharding.families import FAMILIES, Region, Stack, Steps
from tests.verify.models import build, initialize, inputs

Schedule = slapo.Schedule


@dataclass(frozen=True)
class Planted:
    """One mistake.

    Parameters
    ----------
    family
        Of :data:`tests.sharding.families.FAMILIES`, or ``"conv"``.
    places
        Paths, or names of parameters, that are right to be named first.
    apply
        Schedule it with the mistake.
    ranks
        How many processes.
    init
        See :func:`tests.verify.models.initialize`.
    seeded
        Whether ranks make the same model.
    """

    family: str
    places: tuple[str, ...]
    apply: Callable[[Schedule], object]
    ranks: int = 1
    init: str = "default"
    seeded: bool = True


PLANTED: dict[str, Planted] = {}


def plant(
    name: str, family: str, *places: str, ranks: int = 1, init: str = "default", seeded: bool = True
) -> Callable[[Any], Any]:
    def add(apply: Any) -> Any:
        assert name not in PLANTED
        PLANTED[name] = Planted(family, places, apply, ranks, init, seeded)
        return apply

    return add


def caught(name: str) -> tuple[str, str]:
    """Verify's message and the place that it names; both empty where it lets a mistake pass.

    What primitives refuse raises.
    """
    state: dict[str, bool] = {}
    case = PLANTED[name]
    seed = torch.distributed.get_rank() if not case.seeded else 0
    model = build(case.family, seed=seed)
    initialize(model, case.init)
    sch = slapo.create_schedule(model)
    try:
        with slapo.Verify(sch, inputs(case.family)):
            case.apply(sch)
            state["applied"] = True
    except slapo.SlapoError as error:
        if not state:
            raise
        return str(error), place_of(error)
    return "", ""


def place_of(error: Exception) -> str:
    """The module that an error names as the place of the fault."""
    if getattr(error, "suspect", ""):
        return str(error.suspect)  # type: ignore[attr-defined]
    found = re.search(r"'([^']*)'|sch\[\"([^\"]*)\"\]", str(error))
    return (found.group(1) or found.group(2) or "") if found else ""


def is_right(name: str, place: str) -> bool:
    """Whether a mistake is in the module that was named, or a tensor of it."""
    return any(
        place == right or (place.startswith(f"{right}.") and place.rpartition(".")[0] == right)
        for right in PLANTED[name].places
    )


# --- tensor parallelism ---------------------------------------------------------------------------
class Planting(Steps):
    """The right schedule but for one method."""

    layer = 1


def tensor_parallel(
    name: str,
    family: str,
    *places: str,
    ranks: int = 2,
    spread: bool = False,
    init: str = "default",
) -> Callable[[type[Steps]], type[Steps]]:
    def add(steps: type[Steps]) -> type[Steps]:
        def apply(sch: Schedule) -> None:
            steps(FAMILIES[family], spread).apply(sch)

        plant(name, family, *places, ranks=ranks, init=init)(apply)
        return steps

    return add


def without_row_sync(path: str) -> type[Steps]:
    class Steps_(Planting):
        def row(self, layer: Schedule, row: tuple[str, int], number: int) -> None:
            if number == self.layer and row[0] == path:
                layer[path].shard("weight", axis=row[1])
            else:
                super().row(layer, row, number)

    return Steps_


def other_row_sync(path: str, sync: Callable[[Schedule], object]) -> type[Steps]:
    class Steps_(Planting):
        def row(self, layer: Schedule, row: tuple[str, int], number: int) -> None:
            super().row(layer, row, number)
            if number == self.layer and row[0] == path:
                sync(layer[path])

    return Steps_


def other_enter(path: str, sync: Callable[[Schedule, Region], object]) -> type[Steps]:
    class Steps_(Planting):
        def enter(self, layer: Schedule, region: Region, number: int) -> None:
            if number == self.layer and region.enter == path:
                sync(layer[path], region)
            else:
                super().enter(layer, region, number)

    return Steps_


def without_enter(path: str) -> type[Steps]:
    return other_enter(path, lambda node, region: None)


def without_count(attribute: str) -> type[Steps]:
    class Steps_(Planting):
        def count(self, layer: Schedule, path: str, name: str, number: int) -> None:
            if number != self.layer or name != attribute:
                super().count(layer, path, name, number)

    return Steps_


def other_column(path: str, change: Callable[[Schedule, int, int], object]) -> type[Steps]:
    class Steps_(Planting):
        def column(self, layer: Schedule, column: tuple[str, int, int], number: int) -> None:
            if number == self.layer and column[0] == path:
                change(layer[path], column[1], column[2])
            else:
                super().column(layer, column, number)

    return Steps_


def times(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, args, output: output * factor


def summed_times(factor: float, group: Any) -> Callable[..., Any]:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(g if g is None else factor * reduce_from_group(g, group) for g in grad_input)

    return hook


_REGIONS = {
    "gpt2": (
        "transformer.h.1",
        ("attn", "attn.c_attn", "attn.c_proj"),
        ("mlp", "mlp.c_fc", "mlp.c_proj"),
    ),
    "llama": (
        "model.layers.1",
        ("self_attn", "", "self_attn.o_proj"),
        ("mlp", "", "mlp.down_proj"),
    ),
    "qwen3": (
        "model.layers.1",
        ("self_attn", "", "self_attn.o_proj"),
        ("mlp", "", "mlp.down_proj"),
    ),
    "bert": (
        "bert.encoder.layer.1",
        ("attention.self", "", "attention.output.dense"),
        ("intermediate", "intermediate.dense", "output.dense"),
    ),
    "t5": (
        "encoder.block.1",
        ("layer.0.SelfAttention", "", "layer.0.SelfAttention.o"),
        ("layer.1.DenseReluDense", "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"),
    ),
}


def _plant_regions() -> None:
    """In every family the reductions that are left out, forward and backward."""
    for family, (layer, *regions) in _REGIONS.items():
        for (enter, column, row), part in zip(regions, ("attention", "mlp"), strict=True):
            name = f"{family}: no sum behind the {part}"
            tensor_parallel(name, family, f"{layer}.{row}")(without_row_sync(row))
            places = [f"{layer}.{path}" for path in (enter, column) if path]
            if family == "t5":  # whose decoder has the same paths
                places += [path.replace("encoder", "decoder") for path in places]
            name = f"{family}: no sum of gradients before the {part}"
            tensor_parallel(name, family, *places)(without_enter(enter))


_plant_regions()

GPT2, LLAMA, QWEN3, BERT = (
    "transformer.h.1",
    "model.layers.1",
    "model.layers.1",
    "bert.encoder.layer.1",
)

tensor_parallel("gpt2: output summed twice", "gpt2", f"{GPT2}.mlp.c_proj")(
    other_row_sync("mlp.c_proj", lambda node: node.sync("fwd_post", times(2.0)))
)
tensor_parallel("llama: mean in place of a sum", "llama", f"{LLAMA}.self_attn.o_proj")(
    other_row_sync("self_attn.o_proj", lambda node: node.sync("fwd_post", times(0.5)))
)
tensor_parallel("gpt2: gradients summed twice", "gpt2", f"{GPT2}.mlp")(
    other_enter("mlp", lambda node, _: node.sync("bwd_post", summed_times(2.0, node.group)))
)
tensor_parallel("bert: gradients of the mlp averaged", "bert", f"{BERT}.intermediate")(
    other_enter(
        "intermediate", lambda node, _: node.sync("bwd_post", summed_times(0.5, node.group))
    )
)
tensor_parallel("gpt2: packed projection split as one block", "gpt2", f"{GPT2}.attn.c_attn")(
    other_column(
        "attn.c_attn", lambda node, axis, blocks: node.shard("weight", axis).shard("bias", 0)
    )
)
tensor_parallel(
    "gpt2: packed projection in the wrong number of blocks", "gpt2", f"{GPT2}.attn.c_attn"
)(
    other_column(
        "attn.c_attn",
        lambda node, axis, blocks: node.shard("weight", axis, 6).shard("bias", 0, 6),
    )
)
tensor_parallel("gpt2: split_size not divided", "gpt2", f"{GPT2}.attn")(without_count("split_size"))


def instead_of(attribute: str, other: str) -> type[Steps]:
    """The size of a head is cut where their number should be."""

    class Steps_(Planting):
        def count(self, layer: Schedule, path: str, name: str, number: int) -> None:
            wrong = number == self.layer and name == attribute
            super().count(layer, path, other if wrong else name, number)

    return Steps_


for _family, _path, _number, _size in (
    ("gpt2", f"{GPT2}.attn", "num_heads", "head_dim"),
    ("bert", f"{BERT}.attention.self", "num_attention_heads", "attention_head_size"),
    ("t5", "encoder.block.1.layer.0.SelfAttention", "n_heads", "key_value_proj_dim"),
):
    tensor_parallel(f"{_family}: heads are cut", _family, _path)(instead_of(_number, _size))


@tensor_parallel("llama: heads are cut", "llama", f"{LLAMA}.self_attn")
class _CutHeads(Planting):
    def fork(self, layer: Schedule, path: str, number: int) -> None:
        super().fork(layer, path, number)
        if number == self.layer and path == "self_attn":
            layer[path].set("head_dim", layer[path].mod.head_dim // layer.world_size)


@tensor_parallel("gpt2: bias added once per rank", "gpt2", f"{GPT2}.mlp.c_proj")
class _BiasPerRank(Planting):
    def reduce(self, node: Schedule, number: int) -> None:
        super().reduce(node, number)
        if number == self.layer and node.path.endswith("mlp.c_proj"):
            extra = node.world_size - 1
            node.sync("fwd_post", lambda module, args, out: out + extra * module.bias.detach())


@tensor_parallel("gpt2: head's gradient is multiplied", "gpt2", "lm_head")
class _HeadGradient(Planting):
    def head(self, sch: Schedule) -> None:
        sch["lm_head"].sync("bwd_post", "all_reduce")
        sch["lm_head"].sync("fwd_post", "all_gather", axis=-1)


@tensor_parallel("llama: head's gradient is not summed", "llama", "lm_head")
class _HeadSum(Planting):
    def head(self, sch: Schedule) -> None:
        sch["lm_head"].shard("weight", axis=0)
        sch["lm_head"].sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def without_inner(path: str) -> type[Steps]:
    class Steps_(Planting):
        def whole_inside(self, layer: Schedule, name: str, number: int) -> None:
            if number != self.layer or name != path:
                super().whole_inside(layer, name, number)

    return Steps_


for _norm in ("self_attn.q_norm", "self_attn.k_norm"):
    tensor_parallel(f"qwen3: {_norm} sees some heads", "qwen3", f"{QWEN3}.{_norm}")(
        without_inner(_norm)
    )


def without_tokens(path: str) -> type[Steps]:
    class Steps_(Planting):
        def sees_tokens(self, layer: Schedule, name: str, number: int) -> None:
            if number != self.layer or name != path:
                super().sees_tokens(layer, name, number)

    return Steps_


for _family, _layer, _norm in (
    ("gpt2", GPT2, "ln_2"),
    ("llama", LLAMA, "input_layernorm"),
    ("bert", BERT, "attention.output.LayerNorm"),
):
    tensor_parallel(
        f"{_family}: {_norm} sees some tokens", _family, f"{_layer}.{_norm}", spread=True
    )(without_tokens(_norm))


@tensor_parallel("gpt2: the last norm sees some tokens", "gpt2", "transformer.ln_f", spread=True)
class _LastNorm(Planting):
    def together(self, sch: Schedule, stack: Stack) -> None:
        sch[stack.last].sync("fwd_post", "all_gather", axis=1)


@tensor_parallel(  # either may be mended
    "llama: gathered as if its reader were whole", "llama", "model.norm", "lm_head", spread=True
)
class _Gathered(Planting):
    def together(self, sch: Schedule, stack: Stack) -> None:
        last = sch[stack.last]
        last.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
        last.annotate("weight", "partial_grad", True)


@tensor_parallel(
    "t5: cross attention's other input is not summed",
    "t5",
    "decoder.block.1.layer.1.EncDecAttention",
)
class _CrossAttention(Planting):
    def enter(self, layer: Schedule, region: Region, number: int) -> None:
        if number == self.layer and region.enter.endswith("EncDecAttention"):
            layer[region.enter].sync("bwd_post", "all_reduce", argument="hidden_states")
        else:
            super().enter(layer, region, number)


@plant("gpt2: ranks are not seeded", "gpt2", "transformer.wte", ranks=2, seeded=False)
def _unseeded(sch: Schedule) -> None:
    Steps(FAMILIES["gpt2"]).apply(sch)


@tensor_parallel("gpt2: each rank drops others of what is whole", "gpt2", f"{GPT2}.mlp.dropout")
class _ForkedWhole(Planting):
    def region(self, layer: Schedule, region: Region, number: int) -> None:
        super().region(layer, region, number)
        if number == self.layer and region.enter == "mlp":
            layer["mlp"].fork_rng()


@plant("bert: one rank's schedule drops elsewhere", "bert", f"{BERT}.output.dropout", ranks=2)
def _dropout_of_one_rank(sch: Schedule) -> None:
    Steps(FAMILIES["bert"]).apply(sch)
    sch[f"{BERT}.output.dropout"].mod.p = 0.1 + 0.1 * sch.rank


# --- one process ----------------------------------------------------------------------------------
def assigned(path: str, attribute: str, value: Any) -> Callable[[Schedule], None]:
    def apply(sch: Schedule) -> None:
        setattr(sch[path].mod, attribute, value)

    return apply


def replaced(path: str, make: Callable[[Any], nn.Module]) -> Callable[[Schedule], object]:
    return lambda sch: sch[path].replace(make(sch[path].mod))


for _name, _family, _path, _attribute, _value in (
    ("gpt2: eps of a norm", "gpt2", f"{GPT2}.ln_1", "eps", 1e-4),
    (
        "llama: eps of a norm",
        "llama",
        f"{LLAMA}.post_attention_layernorm",
        "variance_epsilon",
        1e-5,
    ),
    ("qwen3: eps of an inner norm", "qwen3", f"{QWEN3}.self_attn.q_norm", "variance_epsilon", 1e-5),
    ("bert: eps of a norm", "bert", f"{BERT}.output.LayerNorm", "eps", 1e-6),
    ("t5: eps of a norm", "t5", "decoder.block.1.layer.0.layer_norm", "variance_epsilon", 1e-5),
    ("conv: eps of a norm", "conv", "blocks.1.bn1", "eps", 1e-4),
    ("conv: momentum of a norm", "conv", "blocks.1.bn1", "momentum", 0.2),
    ("llama: scale of the scores", "llama", f"{LLAMA}.self_attn", "scaling", 0.5),
    ("bert: scale of the scores", "bert", f"{BERT}.attention.self", "scaling", 0.5),
    ("gpt2: dropout", "gpt2", f"{GPT2}.mlp.dropout", "p", 0.2),
    ("bert: dropout", "bert", f"{BERT}.attention.output.dropout", "p", 0.0),
    ("t5: dropout", "t5", "encoder.block.1.layer.1.dropout", "p", 0.5),
    ("conv: dropout", "conv", "blocks.1.drop", "p", 0.3),
    ("llama: dropout of the scores", "llama", f"{LLAMA}.self_attn", "attention_dropout", 0.3),
):
    plant(_name, _family, _path)(assigned(_path, _attribute, _value))

for _name, _family, _path, _make in (
    ("gpt2: activation", "gpt2", f"{GPT2}.mlp.act", lambda old: nn.GELU()),
    ("llama: activation", "llama", f"{LLAMA}.mlp.act_fn", lambda old: nn.GELU(approximate="tanh")),
    ("conv: activation", "conv", "blocks.1.act", lambda old: nn.LeakyReLU()),
    ("gpt2: a fresh layer", "gpt2", f"{GPT2}.mlp.c_fc", lambda old: type(old)(128, 32)),
    (
        "bert: a fresh head",
        "bert",
        "cls.predictions.transform.dense",
        lambda old: nn.Linear(32, 32),
    ),
    ("qwen3: a layer of other names", "qwen3", f"{QWEN3}.mlp.up_proj", lambda old: Renamed(old)),
    ("conv: a norm is dropped", "conv", "blocks.1.bn2", lambda old: nn.Identity()),
    (
        "conv: a fresh norm",
        "conv",
        "norm",
        lambda old: nn.BatchNorm2d(8, track_running_stats=False),
    ),
    ("conv: padding", "conv", "blocks.1.conv1", lambda old: reflecting(old)),
):
    plant(_name, _family, _path)(replaced(_path, _make))

plant("gpt2: activation in a branch of zeros", "gpt2", f"{GPT2}.mlp.act", init="zero")(
    replaced(f"{GPT2}.mlp.act", lambda old: nn.ReLU())
)


class Renamed(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.kernel = nn.Parameter(layer.weight.detach().t().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


def reflecting(layer: nn.Conv2d) -> nn.Module:
    new = copy.deepcopy(layer)
    new.padding_mode = "reflect"
    new._reversed_padding_repeated_twice = [1, 1, 1, 1]
    return new


class Swapped(FusedQKV):
    """Packs the key where the query belongs."""

    def weight_sources(self) -> dict[str, Source]:
        return {
            f"fused_linear.{name}": Source((f"1.{name}", f"0.{name}", f"2.{name}"))
            for name in ("weight", "bias")
        }


@plant("bert: query and key swapped in a fusion", "bert", f"{BERT}.attention.self.Swapped_0")
def _swapped_fusion(sch: Schedule) -> None:
    attention = sch[f"{BERT}.attention.self"]
    attention.trace(tracer="huggingface")

    def projection(x: Tensor, shape: Any) -> Tensor:
        return slapo.call_module("query|key|value", x).view(shape).transpose(1, 2)

    attention.replace(Swapped(32, 4), attention.find(projection))


@plant("bert: query and key swapped", "bert", f"{BERT}.attention.self.query")
def _swapped(sch: Schedule) -> None:
    attention = sch[f"{BERT}.attention.self"].mod
    attention.query, attention.key = attention.key, attention.query


@plant("llama: gate and up swapped", "llama", f"{LLAMA}.mlp.gate_proj")
def _swapped_values(sch: Schedule) -> None:
    mlp = sch[f"{LLAMA}.mlp"].mod
    with torch.no_grad():
        gate, up = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
        mlp.gate_proj.weight.copy_(up)
        mlp.up_proj.weight.copy_(gate)


@plant("bert: a square weight transposed", "bert", f"{BERT}.attention.output.dense")
def _transposed(sch: Schedule) -> None:
    layer = sch[f"{BERT}.attention.output.dense"].mod
    layer.weight.data = layer.weight.data.t().contiguous()


@plant("t5: a weight in another dtype", "t5", "encoder.block.1.layer.1.DenseReluDense.wi")
def _dtype(sch: Schedule) -> None:
    sch["encoder.block.1.layer.1.DenseReluDense.wi"].mod.bfloat16()


@plant("gpt2: a layer is frozen", "gpt2", f"{GPT2}.attn.c_proj")
def _frozen(sch: Schedule) -> None:
    sch[f"{GPT2}.attn.c_proj"].mod.weight.requires_grad_(False)


@plant("gpt2: the head is untied", "gpt2", "lm_head", "transformer.wte")
def _untied(sch: Schedule) -> None:
    head = sch["lm_head"].mod
    head.weight = nn.Parameter(head.weight.detach().clone())


@plant("llama: frequencies of positions", "llama", "model.rotary_emb")
def _frequencies(sch: Schedule) -> None:
    sch["model.rotary_emb"].mod.inv_freq.mul_(0.5)


@plant("bert: positions", "bert", "bert.embeddings")
def _positions(sch: Schedule) -> None:
    sch["bert.embeddings"].mod.position_ids.copy_(torch.arange(32).flip(0)[None])


@plant("conv: running variance", "conv", "blocks.0.bn1")
def _running(sch: Schedule) -> None:
    sch["blocks.0.bn1"].mod.reset_running_stats()
    sch["blocks.0.bn1"].mod.running_var.mul_(2)


@plant("conv: a buffer in another dtype", "conv", "blocks.0.bn1")
def _buffer_dtype(sch: Schedule) -> None:
    norm = sch["blocks.0.bn1"].mod
    norm.running_mean = norm.running_mean.double()


@plant("gpt2: hooks are lost", "gpt2", f"{GPT2}.attn", f"{GPT2}.attn.c_attn", ranks=2)
def _lost_hooks(sch: Schedule) -> None:
    Steps(FAMILIES["gpt2"]).apply(sch)
    sch[f"{GPT2}.attn"].mod._forward_pre_hooks.clear()


@plant("qwen3: computes in half precision", "qwen3", f"{QWEN3}.mlp.down_proj")
def _half(sch: Schedule) -> None:
    sch[f"{QWEN3}.mlp.down_proj"].sync("fwd_post", lambda module, args, out: out.bfloat16().float())


@plant("gpt2: detached", "gpt2", f"{GPT2}.mlp.c_proj")
def _detached(sch: Schedule) -> None:
    sch[f"{GPT2}.mlp.c_proj"].sync("fwd_post", lambda module, args, out: out.detach())


@plant("conv: channels are not summed", "conv", "blocks.1.conv2", ranks=2)
def _channels(sch: Schedule) -> None:
    conv_channels(sch, skip="forward")


@plant("conv: gradients of channels are not summed", "conv", "blocks.1.conv1", ranks=2)
def _channels_back(sch: Schedule) -> None:
    conv_channels(sch, skip="backward")


def conv_channels(sch: Schedule, skip: str = "") -> None:
    """Channels of every block are split over the ranks."""
    for number, block in enumerate(sch.select("blocks.*")):
        wrong = skip if number == 1 else ""
        block["conv1"].shard("weight", axis=0).shard("bias", axis=0)
        for name in ("weight", "bias", "running_mean", "running_var"):
            block["bn1"].shard(name, axis=0)
        block["conv2"].shard("weight", axis=1)
        if wrong != "backward":
            block["conv1"].sync("bwd_post", "all_reduce")
        if wrong != "forward":
            block["conv2"].sync("fwd_post", "all_reduce")
