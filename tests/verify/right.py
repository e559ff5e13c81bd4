"""Correct schedules that Verify must let pass, over families, ranks, dtypes and initializations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.op import FusedQKV
from tests.sharding.families import FAMILIES, Steps
from tests.verify.models import build, initialize, inputs
from tests.verify.planted import conv_channels

Schedule = slapo.Schedule


@dataclass(frozen=True)
class Right:
    """One correct schedule."""

    #: of the model
    family: str
    #: how many processes
    ranks: int
    #: name in `SCHEDULES`
    schedule: str
    #: see :func:`tests.verify.models.initialize`
    init: str = "default"
    #: of the parameters
    dtype: torch.dtype = torch.float32
    #: the mode that the model is in
    training: bool = True

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mode = "" if self.training else ", eval"
        return f"{self.family}: {self.schedule}, {self.ranks} ranks, {dtype}, {self.init}{mode}"


SCHEDULES: dict[str, Callable[[Schedule, str], object]] = {}


def scheduled(apply: Any) -> Any:
    SCHEDULES[apply.__name__.replace("_", " ")] = apply
    return apply


@scheduled
def tensor_parallel(sch: Schedule, family: str) -> None:
    if family == "conv":
        conv_channels(sch)
    else:
        Steps(FAMILIES[family]).apply(sch)


@scheduled
def sequence_parallel(sch: Schedule, family: str) -> None:
    Steps(FAMILIES[family], sequence_parallel=True).apply(sch)


@scheduled
def checkpoints(sch: Schedule, family: str) -> None:
    stacks = () if family == "conv" else FAMILIES[family].stacks
    for pattern in [stack.layers for stack in stacks] or ["blocks.*"]:
        sch.select(pattern).checkpoint()


@scheduled
def tensor_parallel_and_checkpoints(sch: Schedule, family: str) -> None:
    tensor_parallel(sch, family)
    checkpoints(sch, family)


@scheduled
def decomposed(sch: Schedule, family: str) -> None:
    for path, module in list(sch.mod.named_modules()):
        if type(module) is nn.Linear and module.bias is not None and "decoder" not in path:
            sch[path].decompose()


@scheduled
def fused_bias_and_activation(sch: Schedule, family: str) -> None:
    """BERT's by way of TorchScript, whose parameters cannot be exchanged."""
    for node in sch.select("bert.encoder.layer.*.intermediate"):
        node["dense"].decompose()
        node.trace(flatten=True)
        node.fuse(node.find(lambda x, b: F.gelu(b + x)), compiler="TorchScript")


@scheduled
def fused_query_key_value(sch: Schedule, family: str) -> None:
    def projection(x: Tensor, shape: Any) -> Tensor:
        return slapo.call_module("query|key|value", x).view(shape).transpose(1, 2)

    for attention in sch.select("bert.encoder.layer.*.attention.self"):
        attention.trace(tracer="huggingface")
        attention.replace(FusedQKV(32, 4), attention.find(projection))


@scheduled
def traced(sch: Schedule, family: str) -> None:
    if family == "conv":
        sch.trace(recursive=True)
        return
    for path in ("transformer.h.*.mlp", "model.layers.*.mlp", "bert.encoder.layer.*.output"):
        for node in (
            sch.select(path) if path.split(".")[0] in dict(sch.mod.named_children()) else []
        ):
            node.trace(tracer="huggingface")


@scheduled
def replaced_with_its_weights(sch: Schedule, family: str) -> None:
    for path, module in list(sch.mod.named_modules()):
        if type(module) is nn.Linear and path.endswith(("gate_proj", "dense", "wi")):
            sizes = module.in_features, module.out_features, module.bias is not None
            new = nn.Linear(*sizes, dtype=module.weight.dtype)
            new.load_state_dict(module.state_dict())
            sch[path].replace(new)


RIGHT: dict[str, Right] = {}


def _all() -> Iterator[Right]:
    half = torch.bfloat16
    for family in FAMILIES:
        for schedule in ("tensor parallel", "sequence parallel"):
            for init in ("default", "large", "zero"):
                yield Right(family, 2, schedule, init)
            yield Right(family, 2, schedule, dtype=half)
        yield Right(family, 2, "tensor parallel and checkpoints", "large")
        yield Right(family, 1, "checkpoints")
        yield Right(family, 2, "tensor parallel", training=False)
    for family in ("gpt2", "bert", "t5"):  # of four heads, all with a key and a value
        for schedule in ("tensor parallel", "sequence parallel"):
            yield Right(family, 4, schedule, "large")
            yield Right(family, 4, schedule, dtype=half)
    for family in ("llama", "qwen3", "bert", "t5"):
        yield Right(family, 1, "replaced with its weights")
        yield Right(family, 1, "replaced with its weights", dtype=half)
    yield Right("bert", 1, "fused bias and activation")
    yield Right("bert", 1, "fused bias and activation", dtype=half)
    for dtype in (torch.float32, half):  # of twelve layers
        yield Right("deep gpt2", 2, "tensor parallel", "large", dtype)
        yield Right("deep gpt2", 2, "sequence parallel", "large", dtype)
    for init in ("default", "large"):
        yield Right("bert", 1, "fused query key value", init)
    for family in ("gpt2", "llama", "qwen3", "bert", "conv"):
        yield Right(family, 1, "traced")
        yield Right(family, 1, "traced", training=False)
    for family in ("llama", "bert"):
        yield Right(family, 1, "decomposed", "large")
    for ranks, schedule in ((1, "checkpoints"), (1, "decomposed"), (2, "tensor parallel")):
        for init in ("default", "large", "zero"):
            yield Right("conv", ranks, schedule, init)
        yield Right("conv", ranks, schedule, dtype=half)


RIGHT.update({str(case): case for case in _all()})


def refused(name: str, **options: Any) -> str:
    """What Verify says of a correct schedule; empty as it should be."""
    case = RIGHT[name]
    model = build(case.family)
    initialize(model, case.init)
    model.to(case.dtype).train(case.training)
    example = inputs(case.family)
    if isinstance(example, Tensor):
        example = example.to(case.dtype)
    sch = slapo.create_schedule(model)
    try:
        with slapo.Verify(sch, example, **options):
            SCHEDULES[case.schedule](sch, case.family.removeprefix("deep "))
    except slapo.SlapoError as error:
        return str(error)
    return ""
