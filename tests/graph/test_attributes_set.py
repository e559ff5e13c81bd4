"""Whatever is changed after a trace acts at the next call, as in the plain module."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.served import assert_alike, make, number_of_captures, rewritten
from tests.versions import guards_classes

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
GAIN = 2.0


class Config:
    def __init__(self) -> None:
        self.use_cache, self.name = True, "a"
        self.rope: dict[str, Any] = {"full": {"theta": 2.0}}


def amplified(module: Any, x: Tensor) -> Tensor:
    return _scaled(x, module.strength)


def _scaled(x: Tensor, by: float) -> Tensor:
    return x * by * GAIN


class Settled(nn.Module):
    """Reads attributes of every kind, from containers, configs, globals and through functions."""

    shadowed = 3.0
    half = property(
        lambda self: self.whole / 2, lambda self, value: setattr(self, "whole", 2 * value)
    )

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()
        self.whole, self.count, self.lora, self.config = 4.0, 0, None, Config()
        self.table, self.strength, self.window = {"a": 1.0, "b": 2.0}, 2.0, (2.0, 3.0)
        self.masks, self.names, self.weights = [torch.ones(8)], {"a", "b"}, torch.full((8,), 2.0)
        self.layers, self.chain = nn.ModuleList([nn.Softsign(), Twice()]), nn.Sequential(Twice())
        self.choice = nn.ModuleDict({"a": Twice()})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.register_buffer("shift", None)
        self.shadowed, self.note = 4.0, "a"

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x)) * self.half * self.table["a"] * self.shadowed * self.weights
        y = y * (1 - self.drop.p) * (2 if isinstance(self.act, nn.GELU) else 3)
        for optional in (self.shift, getattr(self, "extra", None), self.fc.bias):
            y = y if optional is None else y + optional
        y = amplified(self, y) * self.masks[0]
        y = y * self.config.rope["full"]["theta"] * self.window[0] * len(self.names)
        for layer in (*self.layers, *self.choice.values()):
            y = layer(y)
        for scale in self.scales:
            y = y * scale * scale.shape[0]
        y = y * 3 if y.dtype == torch.float64 else y
        y = self.chain(y) if self.lora is None else self.chain(y) + self.lora(x)
        return y * 2 if self.fc.weight.requires_grad else y

    def use(self) -> None:
        self.count += 1


class Twice(nn.Module):
    by = 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


#: What is done to a module after its trace.
CHANGES: dict[str, Callable[[Any], object]] = {
    "no shadow": lambda m: delattr(m, "shadowed"),
    "lora": lambda m: setattr(m, "lora", nn.Tanh()),
    "half": lambda m: setattr(m, "half", 3.0),
    "whole as a tensor": lambda m: setattr(m, "whole", torch.ones(8)),
    "extra": lambda m: setattr(m, "extra", torch.ones(8)),
    "act": lambda m: setattr(m, "act", nn.ReLU()),
    "act of another setting": lambda m: setattr(m, "act", nn.GELU("tanh")),
    "drop.p": lambda m: setattr(m.drop, "p", 0.1),
    "fc.bias": lambda m: setattr(m.fc, "bias", None),
    "an attribute of a layer": lambda m: setattr(m.layers[1], "by", 5),
    "table['a']": lambda m: m.table.update(a=3.0),
    "a buffer": lambda m: m.register_buffer("shift", torch.ones(8)),
    "__dict__": lambda m: m.__dict__.update(whole=3.0, strength=4.0, window=(3.0, 3.0)),
    "masks[0]": lambda m: m.masks.__setitem__(0, torch.zeros(8)),
    "masks in place": lambda m: m.masks[0].mul_(3),
    "names": lambda m: m.names.add("c"),
    "rope": lambda m: m.config.rope["full"].update(theta=3.0),
    "requires_grad": lambda m: m.fc.weight.requires_grad_(False),
    "weights": lambda m: setattr(m, "weights", torch.full((8,), 3.0)),
    "weights in place": lambda m: m.weights.mul_(3),
    "a layer more": lambda m: m.layers.append(Twice()),
    "a choice more": lambda m: m.choice.update({"b": Twice()}),
    "a scale more": lambda m: m.scales.append(nn.Parameter(torch.zeros(8))),
    "another shape": lambda m: m.scales.__setitem__(0, nn.Parameter(torch.ones(1))),
    "a layer less": lambda m: m.layers.__delitem__(1),
    "another layer": lambda m: m.layers.__setitem__(1, nn.ReLU()),
    "another chain": lambda m: setattr(m, "chain", nn.Sequential(nn.ReLU())),
    "a hook": lambda m: m.layers[1].register_forward_hook(lambda *a: a[-1] * 3),
    "a hook of a leaf": lambda m: m.fc.register_forward_hook(lambda *a: a[-1] * 3),
    "a backward hook": lambda m: m.chain.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "a hook of its own": lambda m: m.register_forward_hook(lambda *a: a[-1] + 1),
    "double": lambda m: m.double(),
}


@pytest.fixture(scope="module")
def settled() -> Any:
    """A traced module, and its captures for copies of it."""
    return rewritten(Settled(), X)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_acts_at_the_next_call(change: str, settled: Any) -> None:
    module = copy.deepcopy(settled)
    plain = Settled()
    plain.load_state_dict(module.state_dict())
    assert_alike(module, plain, X)
    for each in (module, plain):
        CHANGES[change](each)
    assert_alike(module, plain, X.double() if change == "double" else X)


def test_a_change_that_no_forward_reads_needs_no_capture() -> None:
    plain = Settled()
    module = rewritten(copy.deepcopy(plain), X)
    assert_alike(module, plain, X)
    module.use()
    module.count = 7
    del module.note
    module.lora, module.half = None, 2.0
    module.config.name, module.config.use_cache = "b", False
    module.drop, module.fc.added_later = nn.Dropout(0.5), 2
    assert_alike(module, plain, X)
    assert number_of_captures(module) == 1


def test_a_change_back_finds_the_first_capture_again() -> None:
    plain = Settled()
    module = rewritten(copy.deepcopy(plain), X)
    for whole in (2.0, 3.0, 2.0, 3.0):
        module.whole = plain.whole = whole
        assert_alike(module, plain, X)
    assert number_of_captures(module) == 2


# --- globals, functions and classes --------------------------------------------------------------
class Gains(nn.Module):
    gain = 2.0

    @classmethod
    def twice(cls) -> float:
        return 2 * cls.gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.__class__.gain * self.twice()


with_a_factor = functools.partial(torch.mul, other=2.0)
SETTINGS = types.ModuleType("settings")
SETTINGS.gain = 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("forward", "owner", "name", "new"),
    [
        (amplified, None, "_scaled", lambda x, by: x * by),
        (lambda self, x: with_a_factor(x), None, "with_a_factor", lambda x: x * 7),
        (amplified, None, "GAIN", 3.0),
        (lambda self, x: x * SETTINGS.gain, SETTINGS, "gain", 3.0),
        pytest.param(Gains.forward, Gains, "gain", 3.0, marks=guards_classes),
    ],
)
def test_a_global_that_is_set_is_read(
    forward: Any, owner: Any, name: str, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = Gains() if owner is Gains else make(forward)
    plain.strength = 2.0
    module = rewritten(copy.deepcopy(plain), X)
    assert_alike(module, plain, X)
    with monkeypatch.context() as patch:
        patch.setattr(owner or sys.modules[__name__], name, new)
        assert_alike(module, plain, X)
    assert_alike(module, plain, X)


class Aliased:
    """As configs of Transformers look attributes up."""

    attribute_map = {"width": "n"}  # noqa: RUF012

    def __init__(self) -> None:
        self.n = 2.0

    def __getattribute__(self, name: str) -> Any:
        aliases = super().__getattribute__("attribute_map")
        return super().__getattribute__(aliases.get(name, name))


@guards_classes
def test_a_config_that_looks_its_values_up() -> None:
    plain: Any = make(lambda self, x: x * self.config.width)
    plain.config = Aliased()
    module = rewritten(copy.deepcopy(plain), X)
    assert_alike(module, plain, X)
    module.config.n = plain.config.n = 5.0
    assert_alike(module, plain, X)


# --- tensors that are neither parameters nor buffers ---------------------------------------------
class Weighing(nn.Module):
    """Has tensors that are neither parameters nor buffers, and moves one of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.full((8,), 2.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Weighing:
        self.weights = fn(self.weights)
        return super()._apply(fn, *args)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights


@pytest.mark.parametrize("nest", [lambda m: m, nn.Sequential])
def test_a_plain_tensor_may_be_moved_and_set(nest: Any) -> None:
    plain = nest(Weighing())
    module = rewritten(copy.deepcopy(plain), X)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        expected = copy.deepcopy(plain)
        assert_alike(each.double(), expected.double(), X.double())
        for m in (each, expected):
            list(m.modules())[-1].weights = torch.full((8,), 3.0)
        assert_alike(each, expected, X)
