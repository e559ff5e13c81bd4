"""What the class of a traced module does of its own, and what setting attributes of one does."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.graph.trace.module import TracedModule

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
TRACERS = pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])


def traced(module: nn.Module, tracer: str = "pytorch", **kwargs: Any) -> Any:
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer=tracer, example_inputs=torch.randn(3, 8), **kwargs)
    assert isinstance(sch.mod, TracedModule)
    return sch.mod


def refused_after(change: Callable[[Any], object], gm: Any, where: str) -> None:
    """A call after the change is refused, and told what was changed."""
    gm(X)
    change(gm)
    with pytest.raises(slapo.SlapoError, match=f"{re.escape(where)}.*before the trace"):
        gm(X)


class Frozen(nn.Module):
    """Does something of its own at most of what is done to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.seen = nn.Linear(8, 8), nn.BatchNorm1d(8), 0

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "more": torch.ones(1)}

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "old.weight" in state:
            state[prefix + "fc.weight"] = state.pop(prefix + "old.weight")
        super()._load_from_state_dict(state, prefix, *args)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            if not name.startswith("bn"):
                yield name, parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Frozen:
        self.seen += 1
        return super()._apply(fn, *args)

    def extra_repr(self) -> str:
        return "frozen"

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> nn.Module:
        return self.fc

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self.fc, self.bn])

    def __contains__(self, value: object) -> bool:
        return value == 3


class FrozenChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Frozen()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@TRACERS
def test_methods_that_a_class_overrides_stay_its_own(tracer: str) -> None:
    gm, ref = traced(Frozen(), tracer), Frozen()
    assert gm.train() is gm
    assert (gm.training, gm.bn.training) == (True, False)
    assert list(gm.state_dict()) == list(ref.state_dict())
    assert [n for n, _ in gm.named_parameters()] == [n for n, _ in ref.named_parameters()]
    seen = gm.seen
    assert gm.double() is gm
    assert gm.float().seen == seen + 2
    assert (len(gm), gm[0], list(gm), 3 in gm) == (7, gm.fc, [gm.fc, gm.bn], True)
    assert "frozen" in repr(gm)


@TRACERS
def test_state_is_loaded_as_the_class_does_it(tracer: str) -> None:
    gm, ref = traced(Frozen().train(), tracer), Frozen()
    ref.seen = 5
    state = ref.state_dict()
    del state["more"]
    state["old.weight"] = state.pop("fc.weight")
    gm.load_state_dict(state)
    assert gm.seen == 5
    assert torch.equal(gm.train()(X), ref.train()(X))


def test_a_traced_child_is_trained_as_its_class_does_it() -> None:
    gm = traced(FrozenChild())
    assert isinstance(gm.inner, TracedModule)
    assert not gm.train().inner.bn.training


def test_copies_are_of_the_class_too() -> None:
    gm = traced(Frozen())
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), copy.deepcopy(gm.eval())):
        assert isinstance(other, Frozen)
        assert not other.train().bn.training
        assert isinstance(copy.deepcopy(other), Frozen)
        assert torch.equal(other(X), gm.train()(X))


class Called(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Codes(nn.Module):
    def code(self) -> int:
        return 3

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.graph(x)


@TRACERS
@pytest.mark.parametrize(
    ("kind", "name"), [(Called, "__call__"), (Codes, "code"), (Graphs, "graph")]
)
def test_names_that_a_graph_takes_are_refused(
    kind: type[nn.Module], name: str, tracer: str
) -> None:
    sch = slapo.create_schedule(kind())
    with pytest.warns(UserWarning, match=f"'{name}'"):
        assert not sch.trace(tracer=tracer, example_inputs=X)


def test_a_method_that_calls_the_module_runs_its_graph() -> None:
    class Lossy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() * 2

        def loss(self, x: Tensor) -> Tensor:
            return self(x).sum()

    sch = slapo.create_schedule(Lossy())
    sch.trace()
    sch.replace(nn.Identity(), sch.find(lambda x: x.relu()))
    assert torch.allclose(sch.mod.loss(X), (X * 2).sum())


# --- attributes ----------------------------------------------------------------------------------
class Config:
    def __init__(self) -> None:
        self.scale, self.use_cache, self.name = 2.0, True, "a"


class Settled(nn.Module):
    """Reads attributes of every kind."""

    factor = 2.0
    half = property(
        lambda self: self.whole / 2, lambda self, value: setattr(self, "whole", 2 * value)
    )

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()
        self.whole, self.count, self.lora, self.dtype = 4.0, 0, None, torch.float32
        self.table, self.sizes, self.config = {"a": 1.0, "b": 2.0}, [1.0, 2.0], Config()
        self.squash = torch.tanh
        self.register_buffer("shift", None)
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x)).to(self.dtype) * self.factor * self.half * self.table["a"]
        y = self.squash(y) * self.sizes[0] * self.config.scale * (1 - self.drop.p)
        y = y * self.fc.out_features * (2 if isinstance(self.act, nn.GELU) else 3)
        for optional in (self.shift, self.gain, getattr(self, "extra", None)):
            y = y if optional is None else y + optional
        if hasattr(self.fc, "added"):
            y = y + 1
        if self.fc.bias is not None:
            y = y + self.fc.bias
        return y if self.lora is None else y + self.lora(x)

    def use(self) -> None:
        self.count += 1


@TRACERS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", 5.0),
        ("lora", nn.Identity()),
        ("shift", torch.ones(8)),
        ("gain", nn.Parameter(torch.ones(8))),
        ("half", 3.0),
        ("whole", 3.0),
        ("whole", torch.ones(8)),
        ("extra", torch.ones(8)),
        ("dtype", torch.float64),
        ("squash", torch.sigmoid),
        ("table", {"a": 3.0}),
        ("act", nn.ReLU()),
    ],
)
def test_an_attribute_that_a_forward_reads_cannot_be_set(
    name: str, value: object, tracer: str
) -> None:
    gm = traced(Settled(), tracer)
    expected = gm.eval()(X)
    with pytest.raises(slapo.SlapoError, match="before the trace"):
        setattr(gm, name, value)
    assert torch.equal(gm(X), expected)


@TRACERS
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda gm: setattr(gm.drop, "p", 0.1), "drop.p"),
        (lambda gm: setattr(gm.fc, "out_features", 4), "fc.out_features"),
        (lambda gm: setattr(gm.fc, "bias", None), "fc.bias"),
        (lambda gm: setattr(gm.fc, "added", 1), "fc.added"),
        (lambda gm: setattr(gm.config, "scale", 3.0), "config.scale"),
        (lambda gm: gm.table.update(a=3.0), "table['a']"),
        (lambda gm: gm.sizes.clear(), "sizes[0]"),
        (lambda gm: gm.register_buffer("shift", X), "shift"),
        (lambda gm: gm.register_buffer("extra", X), "extra"),
        (lambda gm: gm.__dict__.update(whole=3.0), "whole"),
        (lambda gm: gm.__dict__.pop("whole"), "whole"),
    ],
)
def test_what_is_changed_behind_a_traced_module_is_seen_at_the_call(
    change: Callable[[Any], object], where: str, tracer: str
) -> None:
    gm = traced(Settled(), tracer)
    refused_after(change, gm, where)


# --- what lies deeper ----------------------------------------------------------------------------
GAIN = 2.0


def amplified(module: Any, x: Tensor) -> Tensor:
    return _scaled(x, module.strength)


def _scaled(x: Tensor, by: float) -> Tensor:
    return x * by * GAIN


class Deep(nn.Module):
    """Reads what lies in containers and configurations, in globals and through functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.strength, self.window = nn.Linear(8, 8), 2.0, (2.0, 3.0)
        self.masks, self.kept, self.factors = [torch.ones(8)], {"shift": torch.ones(8)}, [1.0, 2.0]
        self.config, self.names = Config(), {"a", "b"}
        self.config.rope, self.config.inner = {"full": {"theta": 2.0}}, Config()  # type: ignore

    def forward(self, x: Tensor) -> Tensor:
        config: Any = self.config
        y = amplified(self, self.fc(x)) * self.masks[0] + self.kept["shift"]
        for factor in self.factors:
            y = y * factor
        y = y * config.rope["full"]["theta"] * config.inner.scale * self.window[0]
        y = y * len(self.names)
        return y * 2 if self.fc.weight.requires_grad else y


@TRACERS
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda gm: gm.masks.__setitem__(0, torch.zeros(8)), "masks[0]"),
        (lambda gm: gm.kept.update(shift=torch.zeros(8)), "kept['shift']"),
        (lambda gm: gm.factors.append(3.0), "factors"),
        (lambda gm: gm.names.add("c"), "names"),
        (lambda gm: gm.config.rope["full"].update(theta=3.0), "config.rope['full']['theta']"),
        (lambda gm: gm.config.rope.clear(), "config.rope"),
        (lambda gm: setattr(gm.config.inner, "scale", 3.0), "config.inner.scale"),
        (lambda gm: gm.__dict__.update(strength=3.0), "strength"),
        (lambda gm: gm.__dict__.update(window=(3.0, 3.0)), "window[0]"),
        (lambda gm: gm.fc.weight.requires_grad_(False), "fc.weight"),
    ],
)
def test_what_is_changed_deep_inside_is_seen_at_the_call(
    change: Callable[[Any], object], where: str, tracer: str
) -> None:
    gm = traced(Deep(), tracer)
    assert torch.equal(gm(X), copy.deepcopy(gm)(X))
    refused_after(change, gm, where)


class Calls(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(8, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@TRACERS
@pytest.mark.parametrize("held", [False, True])
def test_a_global_that_a_forward_reads_may_not_change(
    held: bool, tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_function = Calls(lambda self, x: self.fc(x) * GAIN)
    gm = traced(by_function if held else Deep(), tracer)
    gm(X)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    with pytest.raises(slapo.SlapoError, match=r"global 'GAIN' .* is 3\.0, .* with 2\.0"):
        gm(X)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        return x * factor

    return scale


def helper(x: Tensor) -> Tensor:
    return x * 5.0


in_place_of_helper = lambda x: x * 3.0  # noqa: E731
closed = times(2.0)
with_a_factor = functools.partial(torch.mul, other=2.0)
activation = torch.tanh


@TRACERS
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("helper", lambda self, x: helper(self.fc(x))),
        ("_scaled", amplified),
        ("in_place_of_helper", lambda self, x: in_place_of_helper(self.fc(x))),
        ("closed", lambda self, x: closed(self.fc(x))),
        ("with_a_factor", lambda self, x: with_a_factor(self.fc(x))),
        ("activation", lambda self, x: activation(self.fc(x))),
    ],
)
def test_a_function_that_a_forward_calls_may_not_be_bound_anew(
    name: str, body: Any, tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Calls(body)
    module.strength = 2.0
    gm = traced(module, tracer)
    expected = module(X)
    assert torch.equal(gm(X), expected)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), name, times(7.0))
        with pytest.raises(slapo.SlapoError, match=rf"global '{name}' of .*before the trace"):
            gm(X)
    assert torch.equal(gm(X), expected)


@TRACERS
def test_a_trace_under_a_patch_is_refused_when_that_has_ended(
    tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "helper", lambda x: x * 7.0)
        gm = traced(Calls(lambda self, x: helper(self.fc(x))), tracer)
        gm(X)
    with pytest.raises(slapo.SlapoError, match=r"is .*\.helper, .* with .*<lambda>"):
        gm(X)


class ByHelpers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return helper(in_place_of_helper(self.fc(x)))


@TRACERS
def test_a_pickle_keeps_the_functions_that_have_a_name(
    tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = traced(ByHelpers(), tracer)
    again = pickle.loads(pickle.dumps(gm))
    assert torch.equal(again(X), gm(X))
    monkeypatch.setitem(globals(), "helper", times(5.0))
    with pytest.raises(slapo.SlapoError, match="global 'helper'"):
        again(X)


class Gains(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    @classmethod
    def twice(cls) -> float:
        return 2 * cls.gain


class ByClass(Gains):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.__class__.gain


class ByClassMethod(Gains):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.twice()


@TRACERS
@pytest.mark.parametrize("kind", [ByClass, ByClassMethod])
def test_attributes_that_a_class_is_asked_for_may_not_change(
    kind: type[Gains], tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = traced(kind(), tracer)
    gm(X)
    monkeypatch.setattr(kind, "gain", 3.0)
    with pytest.raises(slapo.SlapoError, match=r"'gain' is 3\.0, .* with 2\.0"):
        gm(X)


class Defaults:
    scale = 2.0


class Aliased:
    """As configs of Transformers look attributes up."""

    attribute_map = {"width": "n"}  # noqa: RUF012

    def __init__(self) -> None:
        self.n = 2.0

    def __getattribute__(self, name: str) -> Any:
        aliases = super().__getattribute__("attribute_map")
        return super().__getattribute__(aliases.get(name, name))


class Stored:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Computed:
    def __init__(self) -> None:
        self.half = 1.0

    @property
    def scale(self) -> float:
        return self.half * 2


@TRACERS
@pytest.mark.parametrize(
    ("config", "name", "set_name"),
    [
        (Defaults, "scale", "scale"),
        (Aliased, "width", "n"),
        (Stored, "scale", "scale"),
        (Computed, "scale", "half"),
    ],
)
def test_configs_that_look_their_values_up(
    config: type, name: str, set_name: str, tracer: str
) -> None:
    bodies = {
        "scale": lambda self, x: self.fc(x) * self.config.scale,
        "width": lambda self, x: self.fc(x) * self.config.width,
    }
    module = Calls(bodies[name])
    module.config = config()
    gm = traced(module, tracer)
    gm(X)
    setattr(gm.config, set_name, 5.0)
    with pytest.raises(slapo.SlapoError, match=rf"config\.{name}.* is (5|10)\.0"):
        gm(X)


SETTINGS = types.ModuleType("settings")
SETTINGS.gain = 2.0  # type: ignore[attr-defined]


@TRACERS
def test_globals_of_modules_and_classes_may_not_change(
    tracer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = traced(Calls(lambda self, x: self.fc(x) * SETTINGS.gain * Defaults.scale), tracer)
    gm(X)
    for owner, name in ((SETTINGS, "gain"), (Defaults, "scale")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, 3.0)
            with pytest.raises(slapo.SlapoError, match=rf"{name}' .* is 3\.0, .* with 2\.0"):
                gm(X)
    gm(X)


def doubled_if_it_trains(module: Any, x: Tensor) -> Tensor:
    trains = any(p.requires_grad for p in module.parameters())
    return x * 2 if trains else x


@TRACERS
def test_whether_any_parameter_trains(tracer: str) -> None:
    gm = traced(Calls(doubled_if_it_trains), tracer)
    gm(X)
    gm.requires_grad_(False)
    with pytest.raises(slapo.SlapoError, match=r"requires no gradient, .* requires a gradient"):
        gm(X)


# --- children ------------------------------------------------------------------------------------
class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.layers = nn.Linear(8, 8), nn.ModuleList([Twice(), Twice()])
        self.chain, self.table = nn.Sequential(Twice()), nn.ModuleDict({"a": Twice()})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for layer in (*self.layers, *self.table.values()):
            y = layer(y)
        for scale in self.scales:
            y = y * scale
        return self.chain(y)


@TRACERS
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda gm: gm.layers.append(Twice()), "layers"),
        (lambda gm: gm.table.update({"b": Twice()}), "table"),
        (lambda gm: gm.scales.append(nn.Parameter(torch.zeros(8))), "scales"),
        (lambda gm: gm.layers.__delitem__(1), "layers"),
    ],
)
def test_containers_of_children_keep_their_entries(
    change: Callable[[Any], object], where: str, flatten: bool, tracer: str
) -> None:
    gm = traced(Layers(), tracer, flatten=flatten)
    refused_after(change, gm, where)


@TRACERS
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda gm: gm.layers[0].register_forward_hook(lambda m, i, o: o * 3), "layers.0"),
        (lambda gm: gm.layers[0].register_forward_pre_hook(lambda m, i: None), "layers.0"),
        (lambda gm: gm.chain.register_full_backward_hook(lambda m, i, o: None), "chain"),
        (lambda gm: gm.layers.__setitem__(0, nn.ReLU()), "layers.0"),
        (lambda gm: setattr(gm, "chain", nn.Sequential(nn.ReLU())), "chain"),
    ],
)
def test_modules_that_are_part_of_the_graph_stay_what_they_were(
    change: Callable[[Any], object], where: str, tracer: str
) -> None:
    gm = traced(Layers(), tracer, flatten=True)
    refused_after(change, gm, where)


@TRACERS
def test_tensors_in_containers_may_be_changed_in_place(tracer: str) -> None:
    gm, ref = traced(Deep(), tracer), Deep()
    ref.load_state_dict(gm.state_dict())
    for module in (gm, ref):
        module.masks[0].mul_(3)
    assert torch.equal(gm(X), ref(X))


@TRACERS
def test_attributes_that_no_forward_reads_may_be_set(tracer: str) -> None:
    gm = traced(Settled(), tracer).eval()
    expected = gm(X)
    gm.use()
    gm.note = gm.count = 7
    gm.factor, gm.lora, gm.half = 2.0, None, 2.0
    gm.config.name, gm.config.use_cache = "b", False
    gm.drop = nn.Dropout(0.5)
    gm.fc.added_later = 2
    assert torch.equal(gm(X), expected)
    assert torch.equal(copy.deepcopy(gm)(X), expected)


@TRACERS
def test_an_attribute_that_a_forward_reads_cannot_be_deleted(tracer: str) -> None:
    class Shadowing(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.note = 2.0, "a"

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    gm = traced(Shadowing(), tracer)
    del gm.note
    with pytest.raises(slapo.SlapoError, match=r"with scale = 2\.0"):
        del gm.scale
    assert torch.equal(gm(X), X * 2)


@TRACERS
def test_attributes_of_children_that_are_part_of_the_graph(tracer: str) -> None:
    gm = traced(nn.Sequential(Settled(), nn.ReLU()), tracer, flatten=True)
    gm(X)
    child = gm.get_submodule("0")
    child.count = 9
    gm(X)
    child.lora = nn.Identity()
    with pytest.raises(slapo.SlapoError, match=r"'0\.lora' is a Identity"):
        gm(X)


def test_a_child_may_be_replaced_by_one_that_the_code_takes_alike() -> None:
    sch = slapo.create_schedule(Settled())
    sch.trace()
    sch["fc"].replace(nn.Linear(8, 8))
    sch["act"].replace(nn.GELU("tanh"))
    sch.mod(X)
    sch["act"].replace(nn.ReLU())
    with pytest.raises(slapo.SlapoError, match=r"'act' is a ReLU.* with a GELU"):
        sch.mod(X)


class Weighing(nn.Module):
    """Has tensors that are neither parameters nor buffers, and moves one of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.other = torch.full((8,), 2.0), torch.ones(8)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Weighing:
        self.weights = fn(self.weights)
        return super()._apply(fn, *args)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights


@TRACERS
@pytest.mark.parametrize("path", ["", "0"])
def test_a_plain_tensor_acts_when_it_is_set_or_is_refused(path: str, tracer: str) -> None:
    gm = traced(nn.Sequential(Weighing()) if path else Weighing(), tracer, flatten=True)
    for each in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        owner = each.get_submodule(path)
        owner.other = torch.zeros(8)
        assert torch.equal(each(X), X * 2)
        owner.weights = torch.full((8,), 3.0)
        if tracer == "pytorch":
            assert torch.equal(each(X), X * 3)
        else:
            with pytest.raises(slapo.SlapoError, match="weights' is another tensor"):
                each(X)


@TRACERS
def test_a_plain_tensor_may_be_moved(tracer: str) -> None:
    gm = traced(Weighing(), tracer).double()
    assert torch.equal(gm(X.double()), X.double() * 2)
    assert gm(X.double()).dtype == torch.float64


class FromSomewhere(nn.Module):
    """Traced modules have an attribute of this name as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.origin = nn.Linear(4, 4), "somewhere"

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_child_may_have_an_origin_of_its_own(flatten: bool) -> None:
    module = nn.Sequential(FromSomewhere(), nn.ReLU())
    x = torch.rand(3, 4)
    expected = module(x)
    sch = slapo.create_schedule(module)
    assert sch.trace(flatten=flatten)
    torch.testing.assert_close(sch.mod(x), expected)
