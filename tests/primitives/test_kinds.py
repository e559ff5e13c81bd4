"""Rewrites hold for every kind of call: both modes, masks or none, copies, gradients."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo
from slapo import Schedule
from slapo.errors import TraceError
from tests.graph.rewrites import SideBySide, outcome
from tests.graph.served import make

SIZE = 4


class Layer(nn.Module):
    """Attention without softmax, then an MLP; a mask and the mode change what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(SIZE, 8), nn.Linear(8, SIZE)
        self.p = 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        h = F.dropout(scores @ v, self.p, self.training)
        return self.fc2(F.gelu(self.fc1(h))) + x


def attention(value: Tensor, scores: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(scores @ value, p, training)


def dropped(v: Any, s: Any, p: Any, training: Any) -> Any:  # not in the order of first use
    return F.dropout(s @ v, p, training)


def mlp(x: Any) -> Any:
    return F.gelu(slapo.call_module("fc1", x))


def replaced(sch: Schedule) -> None:
    sch.replace(attention, sch.find(dropped))


def horizontal(sch: Schedule) -> None:
    sch.replace(SideBySide(sch.mod.q, sch.mod.k, sch.mod.v), sch.find("[qkv]$"), name="QKV")


def by_hand(sch: Schedule) -> None:
    sch.replace(torch.tanh, [[("", n) for n in sch.mod.graph.nodes if "gelu" in n.name]])
    sch.replace(F.gelu, sch.find(lambda x: torch.tanh(x)))


def fused(sch: Schedule) -> None:
    sch.fuse(sch.find(lambda s, v: F.dropout(s @ v)), name="DropoutOf")
    sch.fuse(sch.find(mlp), compiler=None, name="GeluOf")


def checkpointed(sch: Schedule) -> None:
    sch.checkpoint(sch.find(lambda s, v: F.dropout(s @ v)))
    sch.checkpoint(sch.find(mlp))
    sch.replace(nn.GELU(), sch.find(lambda x: F.gelu(x)))  # within the second checkpoint


def everything(sch: Schedule) -> None:
    horizontal(sch)
    sch.checkpoint(sch.find(mlp))
    sch.replace(nn.GELU(), sch.find(lambda x: F.gelu(x)))
    replaced(sch)
    sch.fuse(sch.find_node(lambda n: n.target is attention)[:1], compiler=None)


def twice(sch: Schedule) -> None:
    """Modules that one rewrite adds and another takes out again."""
    sch.replace(nn.GELU(), sch.find(lambda x: F.gelu(x)))
    sch.replace(nn.Sequential(sch.mod.fc1, nn.GELU()), sch.find(mlp_of_modules), name="Up")
    sch.fuse(sch.find(lambda s, v: F.dropout(s @ v)), compiler=None)
    sch.checkpoint(sch.find(lambda x, y: slapo.call_module("FusedModule_0", x, y)))
    sch.replace(Attend(0.5), sch.find("CheckPointWrapper_0"))


def mlp_of_modules(x: Any) -> Any:
    return slapo.call_module("GELU_0", slapo.call_module("fc1", x))


class Attend(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, scores: Tensor, value: Tensor) -> Tensor:
        return F.dropout(scores @ value, self.p, self.training)


SCHEDULES = (twice, replaced, horizontal, by_hand, fused, checkpointed, everything)


def calls() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(3)
    x, mask = torch.randn(2, 3, SIZE), torch.randn(2, 3, 3)
    return [(x,), (x, mask), (torch.randn(1, 5, SIZE),), (x, mask[:1])]


@pytest.mark.parametrize("traced", ["with inputs", "by proxies"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kind_of_call(schedule: Callable[[Schedule], None], traced: str) -> None:
    model = Layer()
    reference = Layer()
    for (_, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        q.data = p.data  # the same memory tells the parameters whose names change
    sch = slapo.create_schedule(model)
    if traced == "with inputs":
        sch.trace(tracer="huggingface", example_inputs=calls()[0])
    else:
        sch.trace(leaf_modules=["Linear"])
    schedule(sch)
    names = list(sch.mod.state_dict())
    for training in (True, False, True):
        for args in calls():
            expected = outcome(reference.train(training), *args)
            torch.testing.assert_close(outcome(sch.mod.train(training), *args), expected)
    assert list(sch.mod.state_dict()) == names
    clones = [copy.deepcopy(sch.mod)]
    if schedule is not fused:  # TorchScript pickles no modules
        clones.append(pickle.loads(pickle.dumps(sch.mod)))
    for clone in clones:
        for training in (True, False):
            torch.manual_seed(7)
            expected = reference.train(training)(*calls()[1])
            torch.manual_seed(7)
            torch.testing.assert_close(clone.train(training)(*calls()[1]), expected)


def test_a_rewrite_without_a_place_is_an_error_of_that_call() -> None:
    sch = slapo.create_schedule(Layer())
    x, mask = calls()[1]
    sch.trace(tracer="huggingface", example_inputs=(x, mask))
    sch.replace(masked_twice, sch.find(lambda q, k, m: q @ k.transpose(-1, -2) + m))
    sch.mod(x, mask)
    message = r"the replacement by function masked_twice at .*test_kinds.py:\d+ cannot be applied"
    with pytest.raises(TraceError, match=message):
        sch.mod(x)
    sch.mod(x, mask)


def masked_twice(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) + 2 * m


def calls_it_again_in_training(self: Any, x: Tensor) -> Tensor:
    h = F.gelu(self.fc(x))
    return self.out(h) + self.fc(h) if self.training else self.out(h)


def test_a_module_that_another_kind_of_call_still_needs() -> None:
    layers = {name: nn.Linear(SIZE, SIZE) for name in ("fc", "out")}
    model: Any = make(calls_it_again_in_training, **layers).eval()
    sch = slapo.create_schedule(model)
    sch.trace(tracer="huggingface", example_inputs=(torch.randn(2, SIZE),))
    new = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())
    sch.replace(new, sch.find(lambda x: F.gelu(slapo.call_module("fc", x))))
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(sch.mod(x), model.out(new(x)))
    with pytest.raises(
        TraceError, match=r"also uses 'fc' \(at fc_1\), which a rewrite has removed"
    ):
        sch.mod.train()(x)
    torch.testing.assert_close(sch.mod.eval()(x), model.out(new(x)))


def test_the_mode_of_modules_that_rewrites_have_taken_out() -> None:
    inner = make(lambda self, x: F.dropout(x, 0.5, self.training))
    sch = slapo.create_schedule(make(lambda self, x: self.inner(x) * 2, inner=inner))
    sch.trace(flatten=True, tracer="huggingface", example_inputs=(torch.randn(2, SIZE),))
    sch.replace(own_dropout, sch.find(lambda x, p, training: F.dropout(x, p, training)))
    x = torch.ones(8, SIZE)
    assert not torch.equal(sch.mod(x), 2 * x)
    assert torch.equal(sch.mod.eval()(x), 2 * x)
    assert not torch.equal(sch.mod.train()(x), 2 * x)


def own_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p, training)


# --- which operations of another graph are meant -------------------------------------------------
X = torch.randn(3, SIZE)


def traced(forward: Any, **children: nn.Module) -> Schedule:
    sch = slapo.create_schedule(make(forward, **children))
    assert sch.trace()
    return sch


def gelus_of_sums(self: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = F.gelu(x + 1)
    return x if self.training else 2 * x


def test_matches_of_one_search_are_replaced_one_by_one() -> None:
    sch = traced(gelus_of_sums)
    gelus, sums = sch.find(lambda x: F.gelu(x)), sch.find(lambda x: x + 1)
    sch.replace(torch.tanh, gelus[2]).replace(torch.sin, sums[2]).replace(torch.tanh, gelus[0])
    sch.replace(torch.cos, sch.find(lambda x: F.gelu(x))[1])
    wanted = torch.cos(torch.tanh(torch.sin(F.gelu(torch.tanh(X + 1) + 1))) + 1)
    torch.testing.assert_close(sch.mod(X), wanted)
    torch.testing.assert_close(sch.mod.eval()(X), 2 * wanted)
    graphs = [each for each in gc.get_objects() if type(each) is fx.Graph]
    assert not any("_slapo_found" in vars(each) for each in graphs)  # it keeps erased nodes alive


def writes_in_eval_mode(self: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x * y
    if not self.training:
        y.add_(1)
    return h.relu()


def test_a_rewrite_that_may_not_be_done_is_refused() -> None:
    sch = traced(writes_in_eval_mode)
    sch.replace(lambda a, b: (a * b).relu(), sch.find(lambda a, b: (a * b).relu()))
    assert torch.equal(sch.mod(X, X), X * X)
    with pytest.raises(TraceError, match=r"cannot be applied.*'mul' would move past 'add_'"):
        sch.mod.eval()(X, X.clone())


def sines(self: Any, x: Tensor) -> Tensor:
    for _ in range(4 if self.training else 3):
        x = torch.sin(x)
    return x


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nodes_picked_by_hand_that_other_matches_would_overlap(place: int) -> None:
    sch = traced(sines)
    chain = list(sch.mod.graph.nodes)[1 + place : 3 + place]
    sch.replace(torch.cos, [[("", node) for node in chain]])
    for x in (X, X.double()):
        wanted = x
        for step in range(3):
            wanted = torch.cos(wanted) if step == place else torch.sin(wanted)
        torch.testing.assert_close(sch.mod(x), wanted)
    with pytest.raises(TraceError, match="2 matches there, and 3 in the graph that is shown"):
        sch.mod.eval()(X)


@pytest.mark.parametrize("compiler", ["TorchScript", None, "inductor"])
def test_a_fusion_shares_its_modules_with_those_of_other_texts(compiler: str | None) -> None:
    """Their weights, and the mode of each module."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.fc(x) - 2 * x)) * self.scale

    plain: Any = make(forward, fc=nn.Linear(SIZE, SIZE), drop=nn.Dropout(0.5))
    plain.scale = 2.0
    sch = slapo.create_schedule(copy.deepcopy(plain))
    sch.fuse(sch.find(dropout_of_gelu), compiler=compiler)
    sch.mod.scale = plain.scale = 3.0
    with torch.no_grad():
        for parameter in (*sch.mod.parameters(), *plain.parameters()):
            parameter.mul_(3.0)
    assert (sch.mod(X) == 0).any()
    torch.testing.assert_close(sch.mod.eval()(X), plain.eval()(X))


def dropout_of_gelu(x: Any, scale: Any) -> Any:
    gelu = F.gelu(slapo.call_module("fc", x) - 2 * x)
    return slapo.call_module("drop", gelu) * scale
