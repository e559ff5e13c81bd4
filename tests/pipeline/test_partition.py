"""Cutting models in stages: what runs where, what crosses, and that nothing changes in value."""

from __future__ import annotations

import copy
import pickle
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
from tests.primitives.models import OneLayer, TwoLayers


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


class Grouped(nn.Module):
    """Its parts are in a dict, as in nanoGPT: a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.parts = nn.ModuleDict({"emb": nn.Embedding(16, 8), "h": layers})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["emb"](ids)
        for layer in self.parts["h"]:
            x = layer(x)
        return x


@pytest.mark.parametrize("container", ["", "parts"])
def test_a_dict_of_modules_is_looked_through(container: str) -> None:
    model = Grouped()
    wanted = model(ids())
    sch = cut(model, container, "parts.h.0")
    assert "parts.emb.weight" in sch["submod_0"].mod.state_dict()
    torch.testing.assert_close(sch.mod(ids()), wanted)


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


def test_a_stage_alone_sends_tensors_only() -> None:
    sch = cut(Model(), "encoder", "encoder.layer.0")
    given = ids()
    sent = sch.mod.stages[0](given)
    assert [type(t) for t in sent] == [Tensor] * 3
    assert all(t is not given for t in sent), "a view of the input, never the input itself"


def test_what_is_passed_through_has_a_history_of_its_own() -> None:
    sch = cut(Model(), "encoder", "encoder.layer.0", "encoder.layer.1")
    hidden = torch.randn(3, 5, 8, requires_grad=True)
    mask = torch.ones(3, 5, requires_grad=True)
    out = sch.mod.stages[1](ids(), mask, hidden)
    assert out[1] is not mask
    assert out[1].grad_fn is not None


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


# --- inputs ---------------------------------------------------------------------------------
def test_inputs_are_bound_as_the_model_does() -> None:
    class Two(TwoLayers):
        def forward(self, x: Tensor, y: Tensor, flag: bool = False) -> Tensor:
            return self.b(self.a(x)) + y

    model = Two()
    sch = cut(model, "", "a", concrete_args={"flag": False})
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    assert [id(t) for t in sch.mod.bind((), {"y": y, "x": x})] == [id(x), id(y)]
    assert torch.equal(sch.mod(x, y=y), Two.forward(model, x, y))
    with pytest.raises(slapo.SlapoError, match=r"\['y'\] are missing"):
        sch.mod(x)
    with pytest.raises(slapo.SlapoError, match="flag is True, but the stages were cut for False"):
        sch.mod(x, y, flag=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        sch.mod(x, y, z=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        sch.mod(x, y, False, 1)


class Masked(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x * mask)) + torch.arange(x.size(1), device=x.device)


def test_a_tensor_that_the_example_gives_twice_is_two_inputs() -> None:
    model, x = Masked(), torch.randn(2, 4)
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[x, x])
    assert sch.mod.inputs.names == ["x", "mask"]
    mask = torch.zeros(2, 4)
    assert torch.equal(sch.mod(x, mask), model(x, mask))
    assert torch.equal(sch.mod(x, x), model(x, x))


class AsksForOne(TwoLayers):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.a(x if x.size(0) == 1 else -x)
        return self.b(y) + scale if x.size(0) == 1 else self.b(y) * scale


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_model_that_asks_for_a_batch_of_one_serves_any(batch: int) -> None:
    model, scale = AsksForOne(), torch.full((4,), 3.0)
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[torch.randn(batch, 4), scale])
    for module in (sch.mod, pickle.loads(pickle.dumps(sch.mod)), copy.deepcopy(sch.mod)):
        for samples in (1, 5, 2, 1):
            x = torch.randn(samples, 4)
            assert torch.equal(module(x, scale), model(x, scale))
    assert torch.equal(sch.mod.eval()(x, scale), model(x, scale))


class Scan(OneLayer):
    """Loops over the tokens, as the slow path of Mamba does."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return torch.stack([self.fc(x[:, k]) for k in range(x.size(1))], 1)


class Short(Scan):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x)[:, :9] if x.size(1) > 9 else super().forward(x)


def scans(last: nn.Module) -> nn.Module:
    class Scans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scan(), last

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            y = self.b(self.a(x))
            return y + torch.arange(y.size(1), dtype=y.dtype)[:, None]

    return Scans()


def test_sizes_that_only_a_layer_asks_for_may_differ() -> None:
    model = scans(Scan())
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[torch.randn(3, 5, 4)])
    for shape in ((3, 5, 4), (2, 11, 4), (1, 7, 4)):
        x = torch.randn(shape)
        assert torch.equal(sch.mod(x, use_cache=False), model(x))
    assert set(sch.mod.stages[0].sent) == {"x", "like_input"}, "the result is checked where it is"


def test_a_layer_that_may_cut_its_input_asks_for_the_size() -> None:
    model = scans(Short())
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[torch.randn(3, 13, 4)])
    x = torch.randn(2, 13, 4)
    assert torch.equal(sch.mod(x), model(x))
    with pytest.raises(slapo.SlapoError, match="support only inputs with"):
        sch.mod(torch.randn(2, 7, 4))


def test_each_mode_asks_for_its_own_sizes() -> None:
    class Halves(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if not self.training and x.size(1) > 8:
                x = x * 2
            return self.b(x)

    model, short, long = Halves(), torch.randn(3, 5, 4), torch.randn(3, 9, 4)
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[short])
    assert torch.equal(sch.mod(long), model(long))
    sch.mod.eval()
    model.eval()
    assert torch.equal(sch.mod(short), model(short))
    with pytest.raises(slapo.SlapoError, match=r"support only inputs with .*x.size\(\)\[1\]"):
        sch.mod(long)


def test_stages_that_cannot_see_the_batch_refuse_one_sample() -> None:
    class Pooled(AsksForOne):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            of_one = x.size(0) == 1
            y = self.a(x.sum(0))
            return self.b(y) + scale if of_one else self.b(y) * scale

    model, scale = Pooled(), torch.full((4,), 3.0)
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[torch.randn(3, 4), scale])
    x = torch.randn(5, 4)
    assert torch.equal(sch.mod(x, scale), model(x, scale))
    with pytest.raises(
        slapo.SlapoError, match=r"support only inputs with x.size\(\)\[0\] != 1; pass such"
    ):
        sch.mod(x[:1], scale)


def test_inputs_of_other_strides_are_served() -> None:
    model, x = Masked(), torch.randn(3, 4)
    sch = cut(copy.deepcopy(model), "", "a", example_inputs=[x, x.clone()])
    for other in (torch.randn(6, 8)[:2, :4], torch.randn(4, 5).t(), torch.randn(1, 4).expand(3, 4)):
        torch.testing.assert_close(sch.mod(other, other), model(other, other))


def test_stages_run_on_another_device_than_they_were_captured_on() -> None:
    with torch.device("meta"):
        model, x = Masked(), torch.randn(2, 4)
    sch = cut(model, "", "a", example_inputs=[x, x])
    here, plain = sch.mod.to_empty(device="cpu"), Masked()
    here.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(here(x, x), plain(x, x))


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_which_kernel_a_convolution_takes_is_no_condition(batch: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 4, 3))
    sch = cut(copy.deepcopy(model), "", "0", example_inputs=[torch.randn(2, 3, 8, 8)])
    x = torch.randn(batch, 3, 8, 8)
    assert torch.equal(sch.mod(x), model(x))


# --- what cannot be cut: golden/mistakes/generate_pipeline_partition.txt has more -------------
def test_what_is_no_row_of_stages() -> None:
    sch = slapo.create_schedule(Model())
    sch["encoder"].trace(recursive=False)
    sch["encoder.layer.0"].cut_pipeline_stage()
    with pytest.raises(slapo.SlapoError, match="below the root, which is not traced"):
        partition(sch)
    sch = slapo.create_schedule(Model())
    sch.trace_until("encoder")
    with pytest.raises(slapo.SlapoError, match="no stage is cut"):
        partition(sch)
    with pytest.raises(ValueError, match="starts at the root"):
        partition(sch["encoder"])


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
        return self.c(x)


def test_a_cut_after_no_grad() -> None:
    sch = slapo.create_schedule(nn.Sequential(NoGrad(), nn.Linear(4, 4)))
    sch.trace_until("0", tracer="huggingface", example_inputs=(torch.ones(2, 4),))
    sch["0"].cut_pipeline_stage()
    partition(sch)
    sch.mod(torch.ones(2, 4)).sum().backward()
    gradients = {n: p.grad is not None for n, p in sch.mod.named_parameters()}
    assert not gradients["submod_0.0.a.weight"]
    assert gradients["submod_0.0.c.weight"]


class Scales(TwoLayers):
    """Writes to what its first layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).mul_(3.0))


def test_writing_to_what_an_earlier_stage_computed() -> None:
    """Of no other use there."""
    model = Scales()
    x = torch.randn(2, 4)
    expected = Scales.forward(model, x)
    sch = cut(model, "", "a", tracer="huggingface", example_inputs=(x,))
    hidden = sch.mod.stages[0](x)[0].detach().requires_grad_()
    assert torch.equal(sch.mod.stages[1](hidden), expected)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class TakesPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_tuples_are_taken_apart_where_they_arise() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.last = Pair(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            pair = self.pair(x)
            return self.last(pair[0]) + pair[1]

    sch = cut(Apart(), "", "pair")
    assert len(sch.mod.stages[0].sent) == 2
    whole = nn.Sequential(Pair(), TakesPair())
    sch = cut(whole, "", "0", tracer="huggingface", example_inputs=(torch.ones(2, 4),))
    assert torch.equal(sch.mod(torch.ones(2, 4)), torch.full((2, 4), 3.0))


class Views(TwoLayers):
    """Writes through a view that it makes after the cut."""

    def forward(self, x: Tensor) -> Tensor:
        base = x * 2
        y = self.a(x)
        base[:, :1].add_(1.0)
        return self.b(y) + base


def test_writing_through_a_view_of_the_same_stage() -> None:
    model, x = Views(), torch.randn(3, 4)
    expected = Views.forward(model, x)
    sch = cut(model, "", "a", tracer="huggingface", example_inputs=(x,))
    assert torch.equal(sch.mod(x), expected)


def test_a_module_that_writes_to_what_it_receives() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    sch = cut(model, "", "0")
    received = torch.randn(2, 4, requires_grad=True)
    out = sch.mod.stages[1](received)
    out.sum().backward()
    assert received.grad is not None


def test_a_replacement_that_writes_to_what_it_receives() -> None:
    sch = slapo.create_schedule(Scales())
    sch.trace_until("")
    sch.replace(lambda x: x.mul_(3.0), sch.find(lambda x: x.mul_(3.0)))
    sch["a"].cut_pipeline_stage()
    partition(sch)
    received = torch.randn(2, 4, requires_grad=True)
    sch.mod.stages[1](received).sum().backward()
    assert received.grad is not None


class Drops(nn.Module):
    """Asks for the mode itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, self.training)


def test_wrapped_modules_follow_the_mode() -> None:
    sch = slapo.create_schedule(nn.Sequential(Drops(), Drops(), nn.Linear(4, 4)).train())
    sch["0"].checkpoint().fork_rng()
    sch["1"].checkpoint()
    sch.trace_until("")
    for path in ("0", "1"):
        assert sch[path].mod.training
        assert sch[path].mod.mod.training
    for module in sch.mod.modules():
        module.training = False
    assert not sch["0"].mod.mod.mod.training
    sch.mod.train()
    assert sch["0"].mod.mod.mod.training


def test_parameters_that_torchscript_has_compiled_keep_their_names() -> None:
    script = torch.jit.script(nn.Linear(4, 6))
    sch = slapo.create_schedule(nn.Sequential(script, nn.Linear(6, 4), nn.ReLU()))
    sch.trace_until("")
    sch["1"].cut_pipeline_stage()
    partition(sch)
    assert sch.mod.first_name(0, "0.weight") == "0.weight"
    assert sch.mod(torch.ones(3, 4)).shape == (3, 4)


def test_what_a_stage_with_a_script_sends() -> None:
    """What TorchScript has compiled cannot be given other tensors for the probe."""
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)
    sch = slapo.create_schedule(nn.Sequential(*layers))
    sch.fuse(sch.find(lambda x: F.relu(x))[0], compiler="TorchScript")
    sch["FusedModule_0"].cut_pipeline_stage()
    partition(sch)
    first = sch.mod.stages[0]
    received = describe_tensors(first.received, [torch.ones(3, 4)])
    (sent,) = ShapeProbe(first, torch.device("cpu")).run(received)
    assert sent.shape == (3, 6)
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
