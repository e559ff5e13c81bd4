"""Samples and tokens in one dimension: a gather there gives rows in the order of the ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.sharding import reduce_from_group
from slapo.verify.placement import PlacementError, check
from tests.check.test_operations import difference
from tests.check.verdicts import fake_world
from tests.graph.served import make
from tests.runtimes.ranks import on_ranks
from tests.sharding.parallel_models import HIDDEN, column

BATCH, LENGTH = 7, 12
X = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_world(request.param):
        yield request.param


Inside = Callable[[Tensor], Tensor]


class Rows(nn.Module):
    """A pair that is split, and a function of the rows before it: by themselves, or not."""

    def __init__(self, before: Inside) -> None:
        super().__init__()
        self.start, self.mid = nn.Identity(), nn.Identity()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        rows = self.mid(x.reshape(-1, HIDDEN)) * self.scale
        rows = self.fc2(F.gelu(self.fc1(self.before(rows))))
        return rows.view(x.shape)


def rows(model: nn.Module) -> slapo.Schedule:
    sch = slapo.create_schedule(model)
    sch["start"].sync("fwd_post", "scatter", axis=1)
    sch["mid"].sync("fwd_post", "all_gather", axis=0, tensor_parallel_output_grad=False)
    column(sch, "fc1").sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=0)
    sch.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
    return sch


def same(h: Tensor) -> Tensor:
    return h


def half_of_features(h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([a, b.exp()], -1)


def samples(h: Tensor) -> Tensor:
    return h.view(BATCH, -1, h.shape[-1])


#: Before the pair, where features are whole.
BY_ROWS: dict[str, Inside] = {
    "nothing": same,
    "softmax": lambda h: h.softmax(-1),
    "layer norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "centered": lambda h: h - h.mean(-1, keepdim=True),
    "largest": lambda h: h * h.amax(-1).unsqueeze(1),
    "halves": half_of_features,
    "heads": lambda h: h.view(-1, 3, 4).tanh().flatten(1),
    "transposed": lambda h: (h.t().contiguous() * 2).t(),
    "dropout": lambda h: F.dropout(h, 0.0),
    "with their sum": lambda h: h + h.sum(0),
}
BY_ORDER: dict[str, Inside] = {
    "samples": lambda h: samples(h).cumsum(1).flatten(0, 1),
    "their mean": lambda h: h + samples(h).mean(1).repeat_interleave(LENGTH, 0),
    "one": lambda h: h + h[8],
    "those before": lambda h: F.pad(h, (0, 0, 1, 0))[:-1] + h,
    "positions": lambda h: h + torch.arange(float(len(h)))[:, None],
    "running": lambda h: h.cumsum(0),
    "rolled": lambda h: h.roll(1, 0),
    "twice": lambda h: torch.cat([h, h])[5 : 5 + len(h)],
    "each other": lambda h: (h @ h.t()).tril() @ h,
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_what_is_computed_by_rows_passes(ranks: int, name: str) -> None:
    check(rows(Rows(BY_ROWS[name])), X)


@pytest.mark.parametrize("name", BY_ORDER)
def test_what_needs_their_order_is_refused(ranks: int, name: str) -> None:
    with pytest.raises(
        PlacementError, match="in the ranks' order, but it needs the order of one process"
    ):
        check(rows(Rows(BY_ORDER[name])), X)


@pytest.mark.parametrize("layout", [(2,), (4,)], ids=str)
@on_ranks()
def test_so_it_is(layout: Any) -> None:
    """Outputs and gradients are those of one process, or not."""
    torch.manual_seed(0)
    found = {
        name: difference(Rows(before).double(), X.double(), rows)
        for name, before in {**BY_ROWS, **BY_ORDER}.items()
    }
    assert {name for name, apart in found.items() if apart < 1e-3} == set(BY_ROWS), found


def test_an_output_in_another_order_is_refused(ranks: int) -> None:
    def loss(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.end(self.start(x).flatten(0, 1)), labels.flatten())

    sch = slapo.create_schedule(make(loss, start=nn.Identity(), end=nn.Linear(HIDDEN, 5)))
    sch["start"].sync("fwd_post", "scatter", axis=1)
    sch["end"].sync("fwd_post", "all_gather", axis=0, tensor_parallel_output_grad=False)
    for name in ("weight", "bias"):
        sch["end"].annotate(name, "partial_grad", True)
    with pytest.raises(
        PlacementError, match="in the ranks' order, but it needs the order of one process"
    ):
        check(sch, (X, torch.randint(0, 5, (BATCH, LENGTH))))


def test_another_sum_in_between_is_refused(ranks: int) -> None:
    sch = rows(Rows(same))
    sch["fc1"].mod.register_forward_hook(lambda module, args, output: reduce_from_group(output))
    with pytest.raises(PlacementError, match="takes a partial sum"):
        check(sch, X)
