"""Gradients that ranks lack, hold twice or hold in half precision: sums of them, and norms.

Those of whole runs are compared with one process in test_engine.py and test_layouts.py.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import slapo
from slapo.framework_dialect.gradient_check import GradientCheck
from slapo.framework_dialect.gradients import (
    clip_factor,
    global_norm,
    reduce_gradients,
    scale_gradients,
    sum_copies,
)
from slapo.mesh import init_mesh, new_group
from slapo.sharding import reduce_forward_output
from tests.graph.served import make as module_of
from tests.runtimes import contract
from tests.runtimes.alone import Alone
from tests.runtimes.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(3)
def test_gradients_missing_on_some_ranks_are_zeros(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    params = [Parameter(torch.zeros(3, dtype=dtype)) for _ in range(4)]
    params[2].requires_grad_(False)
    # The first on all ranks, the second on rank 1 only, the last on none.
    params[0].grad = torch.full((3,), 1.0 + rank, dtype=dtype)
    if rank == 1:
        params[1].grad = torch.full((3,), 6.0, dtype=dtype)
    reduce_gradients(params, dist.group.WORLD, bucket_bytes=16)
    assert gradients(params) == [[2.0] * 3, [2.0] * 3, None, None]


def gradients(params: list[Parameter]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in params]


@on_ranks(4)
def test_half_precision_is_added_in_float32() -> None:
    param = Parameter(torch.zeros(1, dtype=torch.bfloat16))
    # In bfloat16 256 + 1 is 256 again, so that its sum would be 256 for any number of ones.
    first = dist.get_rank() == 0
    param.grad = torch.tensor([256.0 if first else 1.0], dtype=torch.bfloat16)
    reduce_gradients([param], dist.group.WORLD)
    # (256 + 3) / 4 = 64.75, which is rounded once, to a multiple of 0.5.
    assert gradients([param]) == [[65.0]]


@on_ranks(3)
def test_ties_with_several_copies_and_missing_gradients() -> None:
    """Two ties: the first on all ranks and twice on rank 0, the second on rank 2 alone."""
    rank, group = dist.get_rank(), new_group([0, 1, 2])
    shared = [Parameter(torch.zeros(2)) for _ in range(2 if rank == 0 else 1)]
    if rank == 0:
        shared[0].grad, shared[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    if rank == 1:
        shared[0].grad = torch.tensor([100.0, 200.0])
    sum_copies(shared, group)
    assert gradients(shared) == [[111.0, 222.0]] * len(shared)
    if rank == 2:
        own = [Parameter(torch.zeros(2)) for _ in range(2)]
        own[1].grad = torch.tensor([5.0, 6.0])
        sum_copies(own, None)
        assert gradients(own) == [[5.0, 6.0], [5.0, 6.0]]


def test_copies_on_one_rank_keep_gradients_of_their_own() -> None:
    first, second = Parameter(torch.zeros(2)), Parameter(torch.ones(2))
    sum_copies([first, second], None)
    assert first.grad is None
    assert second.grad is None
    second.grad = torch.tensor([3.0, 4.0])
    sum_copies([first, second], None)
    assert first.grad is not None
    assert first.grad is not second.grad
    scale_gradients([first, second], clip_factor(torch.tensor(5.0), 1.0))
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0.8]))


def test_norm_without_gradients_and_of_mixed_types() -> None:
    assert float(global_norm([])) == 0.0
    params = [Parameter(torch.ones(2, dtype=t)) for t in (torch.bfloat16, torch.float32)]
    assert float(global_norm(params)) == 0.0
    params[0].grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    params[1].grad = torch.tensor([2.0, 4.0])
    assert float(global_norm([*params, params[0]])) == pytest.approx(5.0, abs=1e-6)


def own_slice(rows: Tensor, bias: Tensor, sums: bool) -> nn.Module:
    """A layer that its author has sharded by hand: each rank holds some of the rows."""

    def forward(self: Any, x: Tensor) -> Tensor:
        part = torch.nn.functional.linear(x, self.weight).square().sum()
        return (reduce_forward_output(part) if sums else part) + self.bias.square().sum()

    layer = module_of(forward)
    layer.weight, layer.bias = nn.Parameter(rows), nn.Parameter(bias)
    return nn.Sequential(layer)


@on_ranks(2)
def test_a_slice_that_a_user_has_made_counts_once_it_is_said_to_be_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)
    batches = [(torch.randn(2, 3, generator=generator), None) for _ in range(3)]
    mesh, clip = init_mesh(tp=2, device="cpu"), 0.5
    rows = weight.chunk(2)[dist.get_rank()]

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        return output

    sch = slapo.create_schedule(own_slice(rows.clone(), bias.clone(), True), group=mesh["tp"])
    sch["0"].annotate("weight", "orig_shape", weight.shape)
    options = {"loss_fn": loss_fn, "optimizer": contract.sgd, "clip_grad_norm": clip}
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, **options)
    whole = own_slice(weight, bias, False)
    reference = Alone(whole, loss_fn, contract.sgd, clip=clip)
    for batch in batches:
        loss = engine.train_batch(iter([batch])).item()
        assert abs(loss / reference.step(batch) - 1) < 1e-5
        assert abs(float(engine.grad_norm) / reference.norms[-1] - 1) < 1e-5
    assert min(reference.norms) > clip


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@on_ranks(2)
def test_a_gradient_with_nan_hides_no_difference(ranks: tuple[int, ...]) -> None:
    """The first parameter has it on some ranks; the gradients of the second differ."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    check = GradientCheck(model, dist.group.WORLD)
    check.note("0.weight", torch.full((2, 2), float("nan") if rank in ranks else 1.0))
    check.note("1.weight", torch.full((2, 2), 1.0 + rank))
    named = "'1.weight', '0.weight'" if ranks == (1,) else "'1.weight'"
    with pytest.raises(slapo.PlacementError, match=f"the gradients of {named}, which are"):
        check.compare()
