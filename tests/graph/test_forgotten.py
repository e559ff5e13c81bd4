"""Primitives below a traced and rewritten module act at its next call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.graph.trace.module import rewrite, trace_of
from tests.graph.served import Nothing, assert_alike, make, number_of_captures, scheduled

IDS = torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """Python reads shapes, classes, biases and attributes of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x)) / self.up.weight.shape[0] * y_factor(self.act)
        y = y.view(y.size(0), y.size(1), 2, -1).flatten(2)
        y = y + 1 if self.up.bias is None else y
        return self.down(y) * self.scale * y.shape[-1]


def y_factor(act: nn.Module) -> int:
    return 2 if isinstance(act, nn.GELU) else 3


class Outer(nn.Module):
    """A traced root, a layer in a list, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(12, 8), nn.ModuleList([Inner(), Inner()])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = x + layer(x)
        y = self.head(x)
        return y / y.shape[-1] + self.head.weight.shape[0]


def shard(sch: Any) -> None:
    """A half of the columns in each process: here the first, whose sums are not reduced."""
    sch["layers.0.up"].shard("weight", axis=0)
    sch["layers.0.up"].shard("bias", axis=0)
    sch["layers.0.down"].shard("weight", axis=1)


PRIMITIVES: dict[str, Callable[[Any], object]] = {
    "replace a child": lambda sch: sch["layers.0.act"].replace(nn.ReLU()),
    "replace a layer": lambda sch: sch["layers.1"].replace(nn.Linear(8, 8)),
    "set": lambda sch: sch["layers.1"].set("scale", 5.0),
    "sync": lambda sch: sch["layers.0"].sync("fwd_post", lambda module, args, output: output * 3),
    "checkpoint": lambda sch: sch["layers.1"].checkpoint(),
    "shard": shard,
    "shard a tied table": lambda sch: sch["emb"].shard("weight", axis=0),
}
#: What is traced, and how.
WAYS: dict[str, tuple[list[str], dict[str, bool]]] = {
    "recursive": ([""], {}),
    "the root": ([""], {"recursive": False}),
    "the root and a layer": (["layers.0", ""], {"recursive": False}),
    "flat": ([""], {"flatten": True}),
}


def schedule(model: nn.Module, traced: list[str], **options: Any) -> Any:
    sch = slapo.create_schedule(model)
    for path in traced:
        example = IDS if not path else torch.randn(3, 5, 8)
        assert sch[path].trace(tracer="huggingface", example_inputs=example, **options)
        rewrite(sch[path].mod, Nothing())
    return sch


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "between calls"])
@pytest.mark.parametrize(
    ("primitive", "way"),
    [
        (primitive, way)
        for primitive in PRIMITIVES
        for way in WAYS
        if way != "flat" or "shard" in primitive  # flat, the layers are no calls
    ],
)
def test_a_primitive_below_acts_at_the_next_call(primitive: str, way: str, called: bool) -> None:
    model = Outer()
    plain = copy.deepcopy(model)
    paths, options = WAYS[way]
    schedules = schedule(model, paths, **options), slapo.create_schedule(plain)
    if called:
        assert_alike(model, plain, IDS)
    for each in schedules:
        torch.manual_seed(0)
        PRIMITIVES[primitive](each)
    for ids in (IDS % 6, IDS[:2] % 6):
        assert_alike(*(each.mod for each in schedules), ids, rtol=1e-6)
    assert model.head.weight.shape[0] == (6 if primitive == "shard a tied table" else 12)


def test_primitives_elsewhere_keep_captures_of_siblings_alive() -> None:
    model = Outer()
    sch = schedule(model, ["layers.0", "layers.1"], flatten=True)
    model(IDS)
    sch["layers.0"].set("scale", 5.0)
    assert number_of_captures(model.layers[0]) == 0
    assert number_of_captures(model.layers[1]) == 1


def test_siblings_whose_leaves_differ_share_nothing() -> None:
    def holds(width: int) -> nn.Module:
        wide = make(lambda s, x: x[..., : s.width])
        wide.width = width  # type: ignore[assignment]
        return make(lambda s, x: (y := s.wide(x)).sum(-1) / y.shape[-1], wide=wide)

    model, x = nn.Sequential(holds(2), holds(6)), torch.randn(3, 8)
    _, plain = scheduled(model, "0", "1", recursive=False, example_inputs=x)
    for module, expected in zip(model, plain, strict=True):
        assert_alike(module, expected, x)


# --- rules at work -------------------------------------------------------------------------------
def test_a_replacement_and_then_a_shard_of_what_it_left() -> None:
    model = Outer()
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    layer = sch["layers.0"]
    assert layer.trace(tracer="huggingface", flatten=True, example_inputs=torch.randn(3, 5, 8))
    layer.replace(nn.GELU(), layer.find(r"act"))
    for each in (IDS, IDS[:1]):
        assert_alike(model, plain, each)
    assert "act" not in dict(model.layers[0].named_children())
    sch["layers.0.up"].replace(nn.Linear(8, 16, bias=False))
    plain.layers[0].up = copy.deepcopy(model.layers[0].up)
    assert_alike(model, plain, IDS)


def test_what_python_reads_of_a_child_that_a_rewrite_took_out() -> None:
    """The child is seen in captures to come, and asked nothing at calls."""
    model = Outer()
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    layer = sch["layers.0"]
    assert layer.trace(tracer="huggingface", flatten=True, example_inputs=torch.randn(3, 5, 8))
    up = copy.deepcopy(model.layers[0].up)
    layer.replace(up, layer.find(r"up"))
    for batch in (IDS, IDS[:2], IDS):
        assert torch.equal(model(batch), plain(batch))
    assert number_of_captures(model.layers[0]) == 1
    assert trace_of(model.layers[0]).parked.keys() == {"up"}
