"""Leaves are run on numbers, not on symbols: the graph must be as good, in train and eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.errors import SlapoError
from slapo.graph.trace import captured_tree
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.versions import mode_is_a_flag


def make(forward: Callable[..., Any], **children: nn.Module) -> nn.Module:
    """A module with this forward (its first argument is the module) and these children."""
    module = type("Made", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def traced(module: nn.Module, *inputs: Tensor) -> TracedModule:
    """Its trace, with the children as leaves."""
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer="huggingface", recursive=False, example_inputs=inputs)
    return sch.mod


# --- sizes ---------------------------------------------------------------------------------------
def test_a_size_that_grows_in_large_steps_is_no_constant() -> None:
    pool = nn.AvgPool1d(16)
    module = make(lambda self, x: x.new_zeros(self.pool(x).size(1) * 2), pool=pool)
    assert traced(module, torch.ones(3, 20))(torch.ones(3, 100)).shape == (12,)


@pytest.mark.parametrize(("length", "other"), [(5, 6), (13, 21)])
def test_a_bound_within_a_leaf_is_met_as_the_example_meets_it(length: int, other: int) -> None:
    first = make(lambda self, x: x[:, :8] * 2)
    module = make(lambda self, x: x.new_zeros(self.first(x).size(1)), first=first)
    x = torch.ones(3, other)
    assert traced(module, torch.ones(3, length))(x).shape == module(x).shape


def test_sizes_that_a_leaf_needs_equal_are_a_guard_and_others_are_not() -> None:
    add = make(lambda self, x, y, z: x + y + z.sum())
    module = make(lambda self, x, y, z: self.add(x, y, z).view(-1, y.size(1)), add=add)
    mod = traced(module, torch.ones(3, 5), torch.ones(3, 5), torch.ones(3, 5))
    texts = {g.text for g in mod.contract.size_guards if "==" in g.text}
    assert texts == {"y.size(0) == x.size(0)", "y.size(1) == x.size(1)"}
    assert mod(torch.ones(2, 7), torch.ones(2, 7), torch.ones(4, 9)).shape == (2, 7)
    with pytest.raises(SlapoError, match=r"y.size\(1\) == x.size\(1\)"):
        mod(torch.ones(2, 7), torch.ones(2, 1), torch.ones(2, 7))


def test_products_of_sizes_and_plain_numbers_in_the_output_are_followed() -> None:
    merge = make(lambda self, x: {"rows": x.flatten(0, 1), "count": x.size(1), "two": (2, None)})

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.merge(x)
        return found["rows"].new_zeros(found["rows"].size(0)), x.new_zeros(
            found["count"] + found["two"][0]
        )

    module = make(forward, merge=merge)
    rows, count = traced(module, torch.ones(3, 5, 4))(torch.ones(2, 7, 4))
    assert (rows.shape, count.shape) == ((14,), (9,))


def test_outputs_lie_in_memory_as_those_of_the_leaf() -> None:
    turn = make(lambda self, x: x.transpose(1, 2))

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.turn(x)
        return y.transpose(1, 2).view(-1)  # which fails of a tensor that lies otherwise

    module = make(forward, turn=turn)
    x = torch.randn(2, 7, 3)
    assert torch.equal(traced(module, torch.ones(3, 5, 4))(x), module(x))


def test_outputs_that_require_gradients_may_be_changed_in_place() -> None:
    scaled = make(lambda self, x: x * self.fc.weight.sum(), fc=nn.Linear(5, 6))
    module = make(lambda self, x: self.scaled(x).add_(1), scaled=scaled)
    x = torch.randn(2, 7, 5)
    assert torch.equal(traced(module, torch.ones(3, 4, 5))(x), module(x))


class Wide(nn.Module):
    """Siblings differ in an attribute only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.size(0), self.width)


def test_siblings_with_other_attributes_do_not_share_a_template() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x.new_zeros(self.a(x).size(1) + 10 * self.b(x).size(1))

    mod = traced(make(forward, a=Wide(4), b=Wide(6)), torch.ones(3, 5))
    assert mod(torch.ones(2, 7)).shape == (64,)


# --- modes ---------------------------------------------------------------------------------------
@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The mode of each capture made."""
    modes: list[bool] = []
    original = captured_tree.capture

    def capture(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modes.append(module.training)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(captured_tree, "capture", capture)
    return modes


def test_a_mode_nobody_asks_for_is_not_recorded(captures: list[bool]) -> None:
    block = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    mod = traced(make(lambda self, x: self.block(x) + 1, block=block), torch.ones(3, 4))
    assert captures == [True]
    assert mod.contract.training is None


def test_a_mode_the_code_asks_for_is_recorded_too(captures: list[bool]) -> None:
    mod = traced(make(lambda self, x: F.dropout(x, 0.5, self.training)), torch.ones(3, 4))
    assert captures == [True, False]
    assert torch.equal(mod.eval()(torch.ones(2, 4)), torch.ones(2, 4))


def test_code_that_differs_between_modes_has_a_graph_for_each() -> None:
    module = make(lambda self, x: x.exp() if self.training else x)
    mod, x = traced(module, torch.ones(3, 4)), torch.ones(2, 4)
    assert torch.equal(mod.train()(x), x.exp())
    assert torch.equal(mod.eval()(x), x)


@pytest.mark.parametrize("symbolic", [False, True], ids=["template", "symbols"])
def test_a_leaf_whose_output_differs_between_modes_has_a_graph_for_each(symbolic: bool) -> None:
    """As the auxiliary heads of image models."""

    def forward(self: Any, x: Tensor) -> Any:
        x = F.avg_pool1d(x, 2) if symbolic else x  # halved sizes need a run on symbols
        return (x, x * 2) if self.training else x

    def outer(self: Any, x: Tensor) -> Tensor:
        found = self.heads(x)
        return found[0] + found[1] if isinstance(found, tuple) else found

    mod = traced(make(outer, heads=make(forward)), torch.ones(3, 4, 6))
    assert torch.equal(mod(torch.ones(2, 4, 8)), torch.full((2, 4, 4 if symbolic else 8), 3.0))
    expected = torch.ones(2, 4, 4 if symbolic else 8)
    assert torch.equal(mod.eval()(torch.ones(2, 4, 8)), expected)


class Merging(nn.Module):
    """In eval mode it computes with other attributes."""

    scale = 1.0

    def train(self, mode: bool = True) -> Merging:
        self.scale = 1.0 if mode else 2.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Reversed(nn.Module):
    """Its flag is a property, whose reads nobody sees."""

    @property
    def training(self) -> bool:
        return self.__dict__["flag"]

    @training.setter
    def training(self, flag: bool) -> None:
        self.__dict__["flag"] = flag

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("kind", [Merging, Reversed])
def test_modes_are_compared_where_reads_of_the_flag_do_not_tell(
    kind: type[nn.Module], captures: list[bool]
) -> None:
    module = kind()
    module.train()
    eager = kind().eval()
    assert not mode_is_a_flag(module)
    assert module.training
    mod = traced(module, torch.ones(3, 4))
    assert captures == [True, False]
    assert torch.equal(mod.eval()(torch.ones(2, 4)), eager(torch.ones(2, 4)))
