"""What the class of a traced module does of its own, and what setting attributes of one does."""

from __future__ import annotations

import copy
import pickle
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
