"""Mistakes that Verify must catch, each with the module that its message must name first.

Each is one line of a right schedule that was left out, written twice or written wrong, in the
second layer where there are several, or something that the schedule changed and did not mean to.
"""

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
from tests.check import planted
from tests.check.planted import Change, at, instead, left_out, then
from tests.sharding.families import FAMILIES, Stack, Steps
from tests.verify.models import build, initialize, inputs

Schedule = slapo.Schedule


@dataclass(frozen=True)
class Planted:
    """One mistake."""

    #: of :data:`tests.sharding.families.FAMILIES`, or ``"conv"``
    family: str
    #: paths, or names of parameters, that are right to be named first
    places: tuple[str, ...]
    #: schedule it with the mistake
    apply: Callable[[Schedule], object]
    #: how many processes
    ranks: int = 1
    #: see :func:`tests.verify.models.initialize`
    init: str = "default"
    #: whether ranks make the same model
    seeded: bool = True


PLANTED: dict[str, Planted] = {}


def plant(
    name: str, *places: str, ranks: int = 1, init: str = "default", seeded: bool = True
) -> Callable[[Any], Any]:
    """Enter a mistake, whose name begins with the family."""

    def add(apply: Any) -> Any:
        assert name not in PLANTED
        PLANTED[name] = Planted(name.partition(":")[0], places, apply, ranks, init, seeded)
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
#: Family -> the second layer of its first stack.
LAYERS = {
    name: FAMILIES[name].stacks[0].layers.replace("*", "1")
    for name in ("gpt2", "llama", "qwen3", "bert", "t5")
}
GPT2, LLAMA, QWEN3, BERT, T5 = LAYERS.values()


def tensor_parallel(name: str, method: str, about: str, change: Change, *places: str) -> None:
    """The right schedule of a family on two ranks with one wrong decision about a module."""
    family = name.partition(":")[0]
    where = at(about) if about else planted.anywhere
    spread = method in ("sees_tokens", "together")  # which are about sequence parallelism
    steps = planted.Planted(FAMILIES[family], spread, (method, where, change))
    plant(name, *(places or [f"{LAYERS[family]}.{about}"]), ranks=2)(steps.apply)


def times(factor: float) -> Change:
    """Another multiple of what is right."""
    return then(lambda node: node.sync("fwd_post", lambda module, args, out: out * factor))


def summed_times(factor: float) -> Change:
    """Another multiple of the sum of gradients."""

    def sync(node: Schedule) -> None:
        def hook(module: nn.Module, grads: Any, grad_output: Any) -> Any:
            return tuple(
                g if g is None else factor * reduce_from_group(g, node.group) for g in grads
            )

        node.sync("bwd_post", hook)

    return instead(sync)


def cut_in(blocks: int) -> Change:
    return instead(lambda node: node.shard("weight", 1, blocks).shard("bias", 0, blocks))


def bias_per_rank(node: Schedule) -> None:
    extra = node.world_size - 1
    node.sync("fwd_post", lambda module, args, out: out + extra * module.bias.detach())


def counted(other: str) -> Change:
    """The size of a head is cut where their number should be."""
    return lambda steps, right, layer, path, name: right(path, other)


def cut_head(node: Schedule) -> None:
    node.set("head_dim", node.mod.head_dim // node.world_size)


def head_multiplied(steps: Steps, right: Any, sch: Schedule) -> None:
    sch["lm_head"].sync("bwd_post", "all_reduce")
    sch["lm_head"].sync("fwd_post", "all_gather", axis=-1)


def head_not_summed(steps: Steps, right: Any, sch: Schedule) -> None:
    sch["lm_head"].shard("weight", axis=0)
    sch["lm_head"].sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def last_not_tagged(steps: Steps, right: Any, sch: Schedule, stack: Stack) -> None:
    sch[stack.last].sync("fwd_post", "all_gather", axis=1)


def gathered_as_if_whole(steps: Steps, right: Any, sch: Schedule, stack: Stack) -> None:
    last = sch[stack.last]
    last.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
    last.annotate("weight", "partial_grad", True)


for _family in LAYERS:
    for _part, _region in zip(
        ("attention", "mlp"), FAMILIES[_family].stacks[0].regions, strict=True
    ):
        _columns = [path for path, *_ in _region.columns]
        _paths = [_region.enter, *(_columns if len(_columns) == 1 else ())]
        _places = [f"{LAYERS[_family]}.{path}" for path in _paths]
        if _family == "t5":  # whose decoder has the same paths
            _places += [path.replace("encoder", "decoder") for path in _places]
        _name = f"{_family}: no sum behind the {_part}"
        tensor_parallel(_name, "row", _region.rows[-1][0], planted.no_forward_sync)
        _name = f"{_family}: no sum of gradients before the {_part}"
        tensor_parallel(_name, "enter", _region.enter, left_out, *_places)

for _row in (
    ("gpt2: output summed twice", "row", "mlp.c_proj", times(2.0)),
    ("llama: mean in place of a sum", "row", "self_attn.o_proj", times(0.5)),
    ("gpt2: bias added once per rank", "row", "mlp.c_proj", then(bias_per_rank)),
    ("gpt2: gradients summed twice", "enter", "mlp", summed_times(2.0)),
    ("bert: gradients of the mlp averaged", "enter", "intermediate", summed_times(0.5)),
    ("gpt2: packed projection split as one block", "column", "attn.c_attn", cut_in(1)),
    ("gpt2: packed projection in the wrong number of blocks", "column", "attn.c_attn", cut_in(6)),
    ("llama: heads are cut", "fork", "self_attn", then(cut_head)),
    ("qwen3: self_attn.q_norm sees some heads", "whole_inside", "self_attn.q_norm", left_out),
    ("qwen3: self_attn.k_norm sees some heads", "whole_inside", "self_attn.k_norm", left_out),
    ("gpt2: split_size not divided", "count", "split_size", left_out, f"{GPT2}.attn"),
    ("gpt2: heads are cut", "count", "num_heads", counted("head_dim"), f"{GPT2}.attn"),
    (
        "bert: heads are cut",
        "count",
        "num_attention_heads",
        counted("attention_head_size"),
        f"{BERT}.attention.self",
    ),
    (
        "t5: heads are cut",
        "count",
        "n_heads",
        counted("key_value_proj_dim"),
        f"{T5}.layer.0.SelfAttention",
    ),
    ("gpt2: ln_2 sees some tokens", "sees_tokens", "ln_2", left_out),
    ("llama: input_layernorm sees some tokens", "sees_tokens", "input_layernorm", left_out),
    (
        "bert: attention.output.LayerNorm sees some tokens",
        "sees_tokens",
        "attention.output.LayerNorm",
        left_out,
    ),
    ("gpt2: head's gradient is multiplied", "head", "", head_multiplied, "lm_head"),
    ("llama: head's gradient is not summed", "head", "", head_not_summed, "lm_head"),
    ("gpt2: the last norm sees some tokens", "together", "", last_not_tagged, "transformer.ln_f"),
    # Either may be fixed.
    (
        "llama: gathered as if its reader were whole",
        "together",
        "",
        gathered_as_if_whole,
        "model.norm",
        "lm_head",
    ),
    (
        "t5: cross attention's other input is not summed",
        "enter",
        "layer.1.EncDecAttention",
        instead(lambda node: node.sync("bwd_post", "all_reduce", argument="hidden_states")),
        "decoder.block.1.layer.1.EncDecAttention",
    ),
    (
        "gpt2: each rank drops others of what is whole",
        "region",
        "mlp",
        then(lambda node: node.fork_rng()),
        f"{GPT2}.mlp.dropout",
    ),
):
    tensor_parallel(*_row)


@plant("gpt2: ranks are not seeded", "transformer.wte", ranks=2, seeded=False)
def _unseeded(sch: Schedule) -> None:
    Steps(FAMILIES["gpt2"]).apply(sch)


@plant("bert: one rank's schedule drops elsewhere", f"{BERT}.output.dropout", ranks=2)
def _dropout_of_one_rank(sch: Schedule) -> None:
    Steps(FAMILIES["bert"]).apply(sch)
    sch[f"{BERT}.output.dropout"].mod.p = 0.1 + 0.1 * sch.rank


# --- one process ----------------------------------------------------------------------------------
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


def acted(path: str, act: Callable[[Schedule], object]) -> Callable[[Schedule], object]:
    return lambda sch: act(sch[path])


def replaced(path: str, make: Callable[[Any], nn.Module]) -> Callable[[Schedule], object]:
    return acted(path, lambda node: node.replace(make(node.mod)))


for _name, _path, _attribute, _value in (
    ("gpt2: eps of a norm", f"{GPT2}.ln_1", "eps", 1e-4),
    ("llama: eps of a norm", f"{LLAMA}.post_attention_layernorm", "variance_epsilon", 1e-5),
    ("qwen3: eps of an inner norm", f"{QWEN3}.self_attn.q_norm", "variance_epsilon", 1e-5),
    ("bert: eps of a norm", f"{BERT}.output.LayerNorm", "eps", 1e-6),
    ("t5: eps of a norm", "decoder.block.1.layer.0.layer_norm", "variance_epsilon", 1e-5),
    ("conv: eps of a norm", "blocks.1.bn1", "eps", 1e-4),
    ("conv: momentum of a norm", "blocks.1.bn1", "momentum", 0.2),
    ("llama: scale of the scores", f"{LLAMA}.self_attn", "scaling", 0.5),
    ("bert: scale of the scores", f"{BERT}.attention.self", "scaling", 0.5),
    ("gpt2: dropout", f"{GPT2}.mlp.dropout", "p", 0.2),
    ("bert: dropout", f"{BERT}.attention.output.dropout", "p", 0.0),
    ("t5: dropout", "encoder.block.1.layer.1.dropout", "p", 0.5),
    ("conv: dropout", "blocks.1.drop", "p", 0.3),
    ("llama: dropout of the scores", f"{LLAMA}.self_attn", "attention_dropout", 0.3),
):
    plant(_name, _path)(acted(_path, lambda n, key=_attribute, to=_value: setattr(n.mod, key, to)))

for _name, _path, _make in (
    ("gpt2: activation", f"{GPT2}.mlp.act", lambda old: nn.GELU()),
    ("llama: activation", f"{LLAMA}.mlp.act_fn", lambda old: nn.GELU(approximate="tanh")),
    ("conv: activation", "blocks.1.act", lambda old: nn.LeakyReLU()),
    ("gpt2: a fresh layer", f"{GPT2}.mlp.c_fc", lambda old: type(old)(128, 32)),
    ("bert: a fresh head", "cls.predictions.transform.dense", lambda old: nn.Linear(32, 32)),
    ("qwen3: a layer of other names", f"{QWEN3}.mlp.up_proj", Renamed),
    ("conv: a norm is dropped", "blocks.1.bn2", lambda old: nn.Identity()),
    ("conv: a fresh norm", "norm", lambda old: nn.BatchNorm2d(8, track_running_stats=False)),
    ("conv: padding", "blocks.1.conv1", reflecting),
):
    plant(_name, _path)(replaced(_path, _make))

plant("gpt2: activation in a branch of zeros", f"{GPT2}.mlp.act", init="zero")(
    replaced(f"{GPT2}.mlp.act", lambda old: nn.ReLU())
)

for _name, _path, _act in (
    (
        "t5: a weight in another dtype",
        f"{T5}.layer.1.DenseReluDense.wi",
        lambda node: node.mod.bfloat16(),
    ),
    (
        "gpt2: a layer is frozen",
        f"{GPT2}.attn.c_proj",
        lambda n: n.mod.weight.requires_grad_(False),
    ),
    ("llama: frequencies of positions", "model.rotary_emb", lambda n: n.mod.inv_freq.mul_(0.5)),
    (
        "bert: positions",
        "bert.embeddings",
        lambda node: node.mod.position_ids.copy_(torch.arange(32).flip(0)[None]),
    ),
    (
        "qwen3: computes in half precision",
        f"{QWEN3}.mlp.down_proj",
        lambda node: node.sync("fwd_post", lambda module, args, out: out.bfloat16().float()),
    ),
    (
        "gpt2: detached",
        f"{GPT2}.mlp.c_proj",
        lambda node: node.sync("fwd_post", lambda module, args, out: out.detach()),
    ),
):
    plant(_name, _path)(acted(_path, _act))


class Swapped(FusedQKV):
    """Packs the key where the query belongs."""

    def weight_sources(self) -> dict[str, Source]:
        return {
            f"fused_linear.{name}": Source((f"1.{name}", f"0.{name}", f"2.{name}"))
            for name in ("weight", "bias")
        }


@plant("bert: query and key swapped in a fusion", f"{BERT}.attention.self.Swapped_0")
def _swapped_fusion(sch: Schedule) -> None:
    attention = sch[f"{BERT}.attention.self"]
    attention.trace(tracer="huggingface")

    def projection(x: Tensor, shape: Any) -> Tensor:
        return slapo.call_module("query|key|value", x).view(shape).transpose(1, 2)

    attention.replace(Swapped(32, 4), attention.find(projection))


@plant("bert: query and key swapped", f"{BERT}.attention.self.query")
def _swapped(sch: Schedule) -> None:
    attention = sch[f"{BERT}.attention.self"].mod
    attention.query, attention.key = attention.key, attention.query


@plant("llama: gate and up swapped", f"{LLAMA}.mlp.gate_proj")
def _swapped_values(sch: Schedule) -> None:
    mlp = sch[f"{LLAMA}.mlp"].mod
    with torch.no_grad():
        gate, up = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
        mlp.gate_proj.weight.copy_(up)
        mlp.up_proj.weight.copy_(gate)


@plant("bert: a square weight transposed", f"{BERT}.attention.output.dense")
def _transposed(sch: Schedule) -> None:
    layer = sch[f"{BERT}.attention.output.dense"].mod
    layer.weight.data = layer.weight.data.t().contiguous()


@plant("gpt2: the head is untied", "lm_head", "transformer.wte")
def _untied(sch: Schedule) -> None:
    head = sch["lm_head"].mod
    head.weight = nn.Parameter(head.weight.detach().clone())


@plant("conv: running variance", "blocks.0.bn1")
def _running(sch: Schedule) -> None:
    sch["blocks.0.bn1"].mod.reset_running_stats()
    sch["blocks.0.bn1"].mod.running_var.mul_(2)


@plant("conv: a buffer in another dtype", "blocks.0.bn1")
def _buffer_dtype(sch: Schedule) -> None:
    norm = sch["blocks.0.bn1"].mod
    norm.running_mean = norm.running_mean.double()


@plant("gpt2: hooks are lost", f"{GPT2}.attn", f"{GPT2}.attn.c_attn", ranks=2)
def _lost_hooks(sch: Schedule) -> None:
    Steps(FAMILIES["gpt2"]).apply(sch)
    sch[f"{GPT2}.attn"].mod._forward_pre_hooks.clear()


@plant("conv: channels are not summed", "blocks.1.conv2", ranks=2)
def _channels(sch: Schedule) -> None:
    conv_channels(sch, skip="forward")


@plant("conv: gradients of channels are not summed", "blocks.1.conv1", ranks=2)
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
