"""Cutting models in stages: what runs where, what crosses, and that nothing changes in value."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.graph.trace import capture
from slapo.pipeline import StageTie, analyze_tie_weights
from slapo.pipeline import generate_pipeline_partition as partition
from slapo.pipeline.boundaries import ShapeProbe, describe_tensors
from slapo.pipeline.ties import ties_of_stages
from tests.graph.served import make
from tests.primitives.models import TwoLayers


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x)) * mask.unsqueeze(-1)


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return self.norm(x)


class Model(nn.Module):
    """A tied head, sizes that are used at the end, a module that is never called."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.encoder = Encoder(layers)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        self.unused = nn.Linear(2, 3)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.size(0), ids.size(1)
        x = self.encoder(self.emb(ids), (ids > 3).to(torch.float32))
        return (self.head(x) * self.scale).view(batch * length, -1)


def cut(model: nn.Module, containers: Any, *paths: str, **kwargs: Any) -> slapo.Schedule:
    sch = slapo.create_schedule(model)
    assert sch.trace_until(containers, **kwargs)
    for path in paths:
        sch[path].cut_pipeline_stage()
    return partition(sch)


def ids() -> Tensor:
    return torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(0))


def test_stages_get_what_they_or_later_ones_need() -> None:
    sch = cut(Model(), "encoder", "encoder.layer.0", "encoder.layer.2")
    first, second, third = sch.mod.stages
    assert list(sch.child) == ["submod_0", "submod_1", "submod_2"]
    assert first.received == ("ids",)
    # The ids for their sizes, which are no tensors; the mask until the last layer; one state.
    assert first.sent == ("ids", "to", "encoder_layer_0")
    assert second.received == first.sent
    assert second.sent == ("ids", "to", "encoder_layer_2")
    assert third.sent == ()
    names = [[n for n, _ in stage.named_parameters()] for stage in sch.mod.stages]
    assert names[1] == [f"encoder.layer.{i}.fc.{n}" for i in (1, 2) for n in ("weight", "bias")]
    assert "encoder.norm.weight" in names[2]
    assert not any(n.startswith("unused") for n in names[1] + names[2])


def test_state_dict_is_that_of_the_model() -> None:
    model = Model()
    reference = copy.deepcopy(model)
    sch = cut(model, "encoder", "encoder.layer.0")
    assert list(sch.mod.state_dict()) == list(reference.state_dict())
    for name, value in sch.mod.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    other = {name: torch.randn_like(t) for name, t in reference.state_dict().items()}
    other["head.weight"] = other["emb.weight"]
    sch.mod.load_state_dict(other)
    reference.load_state_dict(other)
    assert torch.equal(sch.mod(ids()), reference(ids()))
    del other["encoder.norm.bias"]
    with pytest.raises(RuntimeError, match=r"encoder\.norm\.bias"):
        sch.mod.load_state_dict(other)


def test_ties_are_found_in_one_pass() -> None:
    sch = cut(Model(), "encoder", "encoder.layer.0", "encoder.layer.1")
    tie = StageTie(((0, "emb.weight"), (2, "head.weight")))
    assert sch.mod.ties == ties_of_stages(sch.mod.stages) == (tie,)
    (places,) = analyze_tie_weights(sch.mod, True).values()
    assert places == {(name, stage) for stage, name in tie.members}
    assert (tie.stages, tie.owner) == ((0, 2), 0)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x, mask)
        return self.head(x)


@pytest.mark.parametrize(("calls", "stages"), [([None], 4), ([0], 2), ([1], 2), ([2, 0], 3)])
def test_a_module_that_is_called_several_times(calls: list[int | None], stages: int) -> None:
    model = Shared()
    sch = slapo.create_schedule(model)
    sch.trace_until("")
    for call in calls:
        sch["block"].cut_pipeline_stage(call=call)
    partition(sch)
    x, mask = torch.randn(2, 3, 8), torch.ones(2, 3)
    assert len(sch.mod.stages) == stages
    assert torch.equal(sch.mod(x, mask), Shared.forward(model, x, mask))
    owners = {name for tie in sch.mod.ties for _, name in tie.members}
    assert owners == {"block.fc.weight", "block.fc.bias"}


# --- values and gradients --------------------------------------------------------------------
def by_parts(self: Any, ids: Tensor) -> Tensor:
    """Its parts are in a dict, as in nanoGPT: a module that is never called."""
    x = self.parts["emb"](ids)
    for layer in self.parts["h"]:
        x = layer(x)
    return x


def grouped() -> nn.Module:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    parts = nn.ModuleDict({"emb": nn.Embedding(16, 8), "h": layers})
    return make(by_parts, parts=parts)


def of_two(forward: Any) -> Any:
    """Makes a model of two layers."""
    return lambda: make(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def masked(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.b(self.a(x * mask)) + torch.arange(x.size(1), device=x.device)


class AsksForOne(TwoLayers):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.a(x if x.size(0) == 1 else -x)
        return self.b(y) + scale if x.size(0) == 1 else self.b(y) * scale


def scan(self: Any, x: Tensor) -> Tensor:
    """Loops over the tokens, as the slow path of Mamba does."""
    return torch.stack([self.fc(x[:, k]) for k in range(x.size(1))], 1)


def short_scan(self: Any, x: Tensor) -> Tensor:
    return scan(self, x)[:, :9] if x.size(1) > 9 else scan(self, x)


def scans(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    y = self.b(self.a(x))
    return y + torch.arange(y.size(1), dtype=y.dtype)[:, None]


def two_scans(last: Any = scan) -> nn.Module:
    return make(scans, a=make(scan, fc=nn.Linear(4, 4)), b=make(last, fc=nn.Linear(4, 4)))


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.a(x)
    return self.b(x)


def writes_to_the_sent(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).mul_(3.0))


def writes_through_a_view(self: Any, x: Tensor) -> Tensor:
    base = x * 2
    y = self.a(x)
    base[:, :1].add_(1.0)
    return self.b(y) + base


def pair() -> nn.Module:
    return make(lambda self, x: (x + 1, x * 2))


def takes_apart(self: Any, x: Tensor) -> Tensor:
    parts = self.a(x)
    return self.b(parts[0]) + parts[1]


@dataclass
class Cut:
    """A model, its calls, what is given to the trace, what is traced, and where it is cut."""

    build: Callable[[], nn.Module]
    calls: list[Any]
    example: Any = None
    containers: str = ""
    at: tuple[str, ...] = ("a",)


X, SCALE = torch.randn(3, 4), torch.full((4,), 3.0)
STRIDED = (torch.randn(6, 8)[:2, :4], torch.randn(4, 5).t(), torch.randn(1, 4).expand(3, 4))
CUT = {
    "sizes, a mask and a tie": Cut(
        Model, [(ids(),)], None, "encoder", ("encoder.layer.0", "encoder.layer.1")
    ),
    "a dict of modules": Cut(grouped, [(ids(),)], None, "parts", ("parts.h.0",)),
    "a dict of modules, from the root": Cut(grouped, [(ids(),)], at=("parts.h.0",)),
    "a tensor that the example gives twice": Cut(
        of_two(masked), [(X, torch.zeros(3, 4)), (X, X)], [X, X]
    ),
    "other strides": Cut(of_two(masked), [(x, x) for x in STRIDED], [X, X.clone()]),
    **{
        f"a question for a batch of one, traced with {batch}": Cut(
            AsksForOne,
            [(torch.randn(samples, 4), SCALE) for samples in (1, 5, 2, 1)],
            [torch.randn(batch, 4), SCALE],
        )
        for batch in (1, 2, 3)
    },
    "sizes that only a layer asks for": Cut(
        two_scans,
        [(torch.randn(shape),) for shape in ((3, 5, 4), (2, 11, 4), (1, 7, 4))],
        [torch.randn(3, 5, 4)],
    ),
    "the kernel of a convolution": Cut(
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 4, 3)),
        [(torch.randn(batch, 3, 8, 8),) for batch in (1, 3, 40)],
        [torch.randn(2, 3, 8, 8)],
        at=("0",),
    ),
    "no gradient": Cut(
        lambda: nn.Sequential(of_two(without_gradient)(), nn.Linear(4, 4)),
        [(X,)],
        (X,),
        "0",
        ("0",),
    ),
    "a write to what was sent": Cut(of_two(writes_to_the_sent), [(X,)], (X,)),
    "a write through a view": Cut(of_two(writes_through_a_view), [(X,)], (X,)),
    "a module that writes to what it receives": Cut(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        [(X,)],
        at=("0",),
    ),
    "a pair that is taken apart": Cut(
        lambda: make(takes_apart, a=pair(), b=nn.Linear(4, 4)), [(X,)]
    ),
    "a pair for a module": Cut(
        lambda: nn.Sequential(pair(), make(lambda s, two: two[0] + two[1]), nn.Linear(4, 4)),
        [(X,)],
        (X,),
        at=("0",),
    ),
}


def run_apart(module: Any, args: Any) -> Tensor:
    """Forward and backward as over several processes: what a stage gets are leaves."""
    received, steps = module.bind(args, {}), []
    for stage in module.stages:
        sent = stage(*received)
        steps.append((received, sent if stage.sent else [sent]))
        if stage.sent:
            assert all(type(t) is Tensor for t in sent)
            # A view of what was received, never that itself.
            assert not {id(t) for t in sent} & {id(t) for t in received}
            received = [t.detach().requires_grad_(t.is_floating_point()) for t in sent]
    grads: list[Any] = [torch.ones_like(sent)]
    for received, ends in reversed(steps):
        for end, grad in zip(ends, grads, strict=True):
            if grad is not None and end.requires_grad:
                end.backward(grad, retain_graph=True)
        grads = [t.grad for t in received]
    return sent


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: t.grad for name, t in module.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("name", CUT)
def test_stages_compute_what_the_model_does(name: str) -> None:
    """Together, copied, pickled, and each for itself."""
    case = CUT[name]
    model = case.build()
    given = {} if case.example is None else {"example_inputs": case.example}
    sch = cut(copy.deepcopy(model), case.containers, *case.at, **given)
    assert list(sch.mod.state_dict()) == list(model.state_dict())
    for training in (True, False):
        model.train(training), sch.mod.train(training)
        again = [copy.deepcopy(sch.mod)]
        if type(model).__module__ == __name__:  # others are of classes without a name
            again.append(pickle.loads(pickle.dumps(sch.mod)))
        for args in case.calls:
            model.zero_grad(), sch.mod.zero_grad()
            # Stages receive contiguous tensors, which a kernel may sum in another order.
            wanted = model(*(arg.contiguous() for arg in args))
            wanted.sum().backward()
            for module in (sch.mod, *again):
                assert torch.equal(module(*args), wanted)
            assert torch.equal(run_apart(sch.mod, args), wanted)
            torch.testing.assert_close(gradients(sch.mod), gradients(model))


def test_what_stages_send_beside_their_results() -> None:
    sch = cut(two_scans(), "", "a", example_inputs=[torch.randn(3, 5, 4)])
    assert set(sch.mod.stages[0].sent) == {"x", "like_input"}, "the result is checked where it is"
    sch = cut(CUT["a pair that is taken apart"].build(), "", "a")
    assert len(sch.mod.stages[0].sent) == 2


# --- inputs ----------------------------------------------------------------------------------
def test_inputs_are_bound_as_the_model_does() -> None:
    model = of_two(lambda self, x, y, flag=False: self.b(self.a(x)) + y)()
    sch = cut(copy.deepcopy(model), "", "a", concrete_args={"flag": False})
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    assert [id(t) for t in sch.mod.bind((), {"y": y, "x": x})] == [id(x), id(y)]
    assert torch.equal(sch.mod(x, y=y), model(x, y))
    with pytest.raises(slapo.SlapoError, match=r"\['y'\] are missing"):
        sch.mod(x)
    for given, shown in (
        ((x, y, True), "flag is True, but the stages were cut for False"),
        ((x, y, x), r"flag is a torch\.float32 tensor"),
        ((x, None), r"\['y'\] are missing or not tensors {'y': 'NoneType'}"),
    ):
        with pytest.raises(slapo.SlapoError, match=shown):
            sch.mod(*given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        sch.mod(x, y, z=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        sch.mod(x, y, False, 1)


def halves(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    return self.b(x * 2 if not self.training and x.size(1) > 8 else x)


def pooled(self: Any, x: Tensor, scale: Tensor) -> Tensor:
    of_one = x.size(0) == 1
    y = self.b(self.a(x.sum(0)))
    return y + scale if of_one else y * scale


@pytest.mark.parametrize(
    ("build", "example", "served", "refused", "condition"),
    [
        (partial(two_scans, short_scan), (3, 13, 4), (2, 13, 4), (2, 7, 4), ""),
        (of_two(halves), (3, 5, 4), (3, 5, 4), (3, 9, 4), r".*x.size\(\)\[1\]"),
        (of_two(pooled), (3, 4), (5, 4), (1, 4), r"x.size\(\)\[0\] != 1; pass such"),
    ],
    ids=["a layer that may cut its input", "sizes of eval mode", "a batch that no stage sees"],
)
def test_sizes_that_stages_cannot_serve_are_refused(
    build: Any, example: Any, served: Any, refused: Any, condition: str
) -> None:
    model = build()
    more = [SCALE] if len(example) == 2 else []
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[torch.randn(example), *more])
    if len(example) == 3:  # what eval mode asks about is no condition of training
        x = torch.randn(3, 13 if example[1] == 13 else 9, 4)
        assert torch.equal(sch.mod(x), model(x))
    sch.mod.eval(), model.eval()
    x = torch.randn(served)
    assert torch.equal(sch.mod(x, *more), model(x, *more))
    with pytest.raises(slapo.SlapoError, match=f"support only inputs with {condition}"):
        sch.mod(torch.randn(refused), *more)


def test_stages_run_on_another_device_than_they_were_captured_on() -> None:
    with torch.device("meta"):
        model, x = of_two(masked)(), torch.randn(2, 4)
    sch = cut(model, "", "a", example_inputs=[x, x])
    here, plain = sch.mod.to_empty(device="cpu"), of_two(masked)()
    here.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(here(x, x), plain(x, x))


# --- what cannot be cut: golden/mistakes/generate_pipeline_partition.txt has more -------------
def test_a_part_of_a_model_has_no_stages() -> None:
    sch = slapo.create_schedule(Model())
    with pytest.raises(ValueError, match="starts at the root"):
        partition(sch["encoder"])


def test_a_replacement_that_writes_to_what_it_receives() -> None:
    sch = slapo.create_schedule(of_two(writes_to_the_sent)())
    sch.trace_until("")
    sch.replace(lambda x: x.mul_(3.0), sch.find(lambda x: x.mul_(3.0)))
    sch["a"].cut_pipeline_stage()
    partition(sch)
    torch.testing.assert_close(run_apart(sch.mod, (X,)), sch.mod(X))


def test_a_stage_with_a_script() -> None:
    """Its parameters keep their names; the probe, which cannot give it others, changes none."""
    script = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    sch = slapo.create_schedule(nn.Sequential(script, nn.ReLU(), nn.Linear(6, 4)))
    sch.trace_until("")
    sch["1"].cut_pipeline_stage()
    partition(sch)
    first = sch.mod.stages[0]
    assert sch.mod.first_name(0, "0.0.weight") == "0.0.weight"
    received = describe_tensors(first.received, [torch.ones(3, 4)])
    (sent,) = ShapeProbe(first, torch.device("cpu")).run(received)
    assert sent.shape == (3, 6)
    assert script[1].num_batches_tracked == 0
    assert sch.mod(torch.ones(3, 4)).shape == (3, 4)


class ByMode(nn.Module):
    """In eval mode the forward, or a layer of it, does something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), LeafByMode(how), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if self.how == "tuple" and isinstance(y, tuple):
            y = y[0] + y[1].mean()
        if self.how == "asks" and not self.training:
            y = -y
        return self.last(y) * y.size(0)


class LeafByMode(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.how == "sets" and not self.training:
            self.seen = True
        if self.training or self.how in ("alike", "asks", "sets"):
            return F.dropout(y, 0.5, self.training)
        return (y, y * 2) if self.how == "tuple" else y[1:]


@pytest.mark.parametrize("how", ["alike", "asks", "tuple", "rows", "sets"])
def test_one_capture_serves_both_modes_where_nothing_tells_them_apart(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = []
    plain = capture.capture
    monkeypatch.setattr(capture, "capture", lambda *a, **k: captures.append(1) or plain(*a, **k))
    model, x = ByMode(how), torch.randn(5, 4)
    sch = cut(copy.deepcopy(model), "", "first", example_inputs=[x])
    assert len(captures) == (1 if how == "alike" else 2)
    for module in (sch.mod, model):
        module.eval()
    assert torch.equal(sch.mod(x), model(x))
    for module in (sch.mod, model):
        module.train()
    assert torch.equal(seeded_call(sch.mod, x), seeded_call(model, x))


def seeded_call(module: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return module(x)
