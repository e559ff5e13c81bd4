"""Collectives against what one process computes from all ranks' tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slapo.sharding import collectives as c
from tests.distributed import Job

pytestmark = pytest.mark.distributed

# Sums of a few float64 numbers, in whatever order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def local_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    # Not contiguous: a transposed view of a larger tensor.
    base = torch.randn(*reversed(shape), generator=generator, dtype=torch.float64).to(dtype)
    return base.permute(*reversed(range(len(shape))))


def weight_like(rank: int, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(200 + rank)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def forward_backward(fn: Callable[[Tensor], Tensor], x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the output weighted by numbers of this rank's own."""
    before = x.clone()
    x.requires_grad_()
    y = fn(x)
    (y * weight_like(rank, y)).sum().backward()
    assert torch.equal(x.detach(), before), "the input has changed"
    assert x.grad is not None
    return y.detach(), x.grad


def apply(name: str, tensor: Tensor, group: Any, *args: Any) -> Tensor:
    return getattr(c, name)(tensor, group, *args)


# Forward of each collective, given all ranks' inputs: the list of all ranks' outputs.


def ref_reduce(xs: list[Tensor]) -> list[Tensor]:
    return [torch.stack(xs).sum(0)] * len(xs)


def ref_identity(xs: list[Tensor]) -> list[Tensor]:
    return xs


def ref_gather(xs: list[Tensor], axis: int, *_: Any) -> list[Tensor]:
    return [torch.cat(xs, axis)] * len(xs)


def ref_reduce_scatter(xs: list[Tensor], axis: int) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).chunk(len(xs), axis))


def ref_scatter(xs: list[Tensor], axis: int) -> list[Tensor]:
    return [x.chunk(len(xs), axis)[rank] for rank, x in enumerate(xs)]


def ref_all_to_all(xs: list[Tensor], split: int, concat: int) -> list[Tensor]:
    pieces = [x.chunk(len(xs), split) for x in xs]
    return [torch.cat([piece[rank] for piece in pieces], concat) for rank in range(len(xs))]


# name, arguments, forward reference, reference of the backward as a forward on the gradients
CASES = [
    ("reduce_from_group", (), ref_reduce, ref_identity, ()),
    ("copy_to_group", (), ref_identity, ref_reduce, ()),
    *[("all_gather", (a,), ref_gather, ref_reduce_scatter, (a,)) for a in (0, 1, 2, -1, -2)],
    *[("all_gather", (a, False), ref_gather, ref_scatter, (a,)) for a in (0, 1, -1)],
    *[("reduce_scatter", (a,), ref_reduce_scatter, ref_gather, (a,)) for a in (0, 1, 2, -1)],
    *[("scatter", (a,), ref_scatter, ref_gather, (a,)) for a in (0, 1, 2, -1)],
    *[
        ("all_to_all", (s, t), ref_all_to_all, ref_all_to_all, (t, s))
        for s, t in ((0, 1), (1, 0), (-1, -2), (-2, -1), (0, 2), (1, 1))
    ],
]
RESHARDS = [
    ("RR->RS", ref_scatter, (-1,), ref_gather, (-1,)),
    ("RR->SR", ref_scatter, (-2,), ref_gather, (-2,)),
    ("RS->RR", ref_gather, (-1,), ref_scatter, (-1,)),
    ("SR->RR", ref_gather, (-2,), ref_scatter, (-2,)),
    ("RS->SR", ref_all_to_all, (-2, -1), ref_all_to_all, (-1, -2)),
    ("SR->RS", ref_all_to_all, (-1, -2), ref_all_to_all, (-2, -1)),
]
SHAPE = (4, 12, 8)


def check(fn: Callable[[Tensor], Tensor], ranks: list[int], me: int, refs: tuple[Any, ...]) -> None:
    """Compare one collective among ``ranks`` with what its reference makes of all their inputs."""
    forward, forward_args, backward, backward_args = refs
    y, grad = forward_backward(fn, local_input(ranks[me], SHAPE), ranks[me])
    expected = forward([local_input(r, SHAPE) for r in ranks], *forward_args)
    torch.testing.assert_close(y, expected[me], **EXACT)
    assert y.is_contiguous() or fn.__name__ == "copy_to_group"
    weights = [weight_like(r, e) for r, e in zip(ranks, expected, strict=True)]
    torch.testing.assert_close(grad, backward(weights, *backward_args)[me], **EXACT)


def all_cases(ranks: list[int], me: int, group: Any) -> None:
    for name, args, forward, backward, backward_args in CASES:

        def fn(x: Tensor, name: str = name, args: tuple[Any, ...] = args) -> Tensor:
            return apply(name, x, group, *args)

        fn.__name__ = name
        check(fn, ranks, me, (forward, args, backward, backward_args))
    for spec, forward, args, backward, backward_args in RESHARDS:

        def change(x: Tensor, spec: str = spec) -> Tensor:
            return c.reshard(x, spec, group)

        check(change, ranks, me, (forward, args, backward, backward_args))


def on_the_world(rank: int, world_size: int) -> None:
    all_cases(list(range(world_size)), rank, None)


def on_subgroups(rank: int, world_size: int) -> None:
    """Two groups of ranks that are not neighbors; group rank and global rank differ."""
    members = [list(range(first, world_size, 2)) for first in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = rank % 2
    assert c.group_size(groups[mine]) == world_size // 2
    assert c.group_rank(groups[mine]) == members[mine].index(rank)
    all_cases(members[mine], members[mine].index(rank), groups[mine])
    with pytest.raises(ValueError, match="not a member"):
        c.group_size(groups[1 - mine])


def odd_sizes(rank: int, world_size: int) -> None:
    """Prime sizes everywhere but on the axis that is split; empty tensors; scalars."""
    x = torch.full((3, 7), float(rank))
    assert c.all_gather(x, None, 0).shape == (9, 7)
    assert torch.equal(c.all_gather(x, None, 1)[0], torch.arange(3.0).repeat_interleave(7))
    assert c.all_to_all(x, None, 0, 1).shape == (1, 21)
    assert torch.equal(c.reduce_scatter(x, None, 0), torch.full((1, 7), 3.0))
    assert c.reduce_from_group(torch.tensor(float(rank))).item() == 3.0
    assert c.all_gather(torch.ones(2, 0), None, 0).shape == (6, 0)
    assert c.all_gather(torch.ones(0, 2), None, 1).shape == (0, 6)


def uneven_shares(rank: int, world_size: int) -> None:
    """Slices as ``torch.chunk`` cuts them, there and back, with gradients of gradients."""
    wholes = [local_input(r, (3, 7, 5)) for r in range(world_size)]
    for axis in (1, -2, 1 if world_size == 4 else 2):
        size = wholes[0].shape[axis]

        def together(x: Tensor, axis: int = axis, size: int = size) -> Tensor:
            return c.all_gather(x, None, axis, total=size)

        slices = [w.chunk(world_size, axis)[r] for r, w in enumerate(wholes)]
        y, grad = forward_backward(together, slices[rank].clone(), rank)
        torch.testing.assert_close(y, torch.cat(slices, axis), **EXACT)
        assert y.is_contiguous()
        weights = [weight_like(r, y) for r in range(world_size)]
        torch.testing.assert_close(grad, ref_reduce_scatter(weights, axis)[rank], **EXACT)

        def sliced(x: Tensor, axis: int = axis, size: int = size) -> Tensor:
            return c.all_gather(x, None, axis, False, size)

        _, grad = forward_backward(sliced, slices[rank].clone(), rank)
        torch.testing.assert_close(grad, weights[rank].chunk(world_size, axis)[rank], **EXACT)
        for cut, made in ((c.scatter, ref_scatter), (c.reduce_scatter, ref_reduce_scatter)):
            x = wholes[rank].clone()
            y, grad = forward_backward(lambda x, a=axis, cut=cut: cut(x, None, a, True), x, rank)
            torch.testing.assert_close(y, made(wholes, axis)[rank], **EXACT)
            parts = [weight_like(r, part) for r, part in enumerate(made(wholes, axis))]
            torch.testing.assert_close(grad, torch.cat(parts, axis), **EXACT)
    x = slices[rank].clone().requires_grad_()
    (first,) = torch.autograd.grad(together(x).pow(3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6 * world_size * x.detach(), **EXACT)
    with pytest.raises(ValueError, match=r"has \d of 9, but the tensor of shape .* has \d along"):
        c.all_gather(x, None, axis, total=9)


def other_dtypes(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        xs = [local_input(r, SHAPE, dtype) for r in range(world_size)]
        y, grad = forward_backward(lambda x: c.reduce_scatter(x, None, 1), xs[rank].clone(), rank)
        # A sum of two is rounded once, in any order.
        assert torch.equal(y, ref_reduce_scatter(xs, 1)[rank])
        assert grad.dtype == y.dtype == dtype
    ids = torch.arange(6).reshape(2, 3) + 10 * rank
    both = c.all_gather(ids, None, 1)
    assert both.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]


def twice_and_twice_differentiated(rank: int, world_size: int) -> None:
    x = local_input(rank, SHAPE).requires_grad_()
    y = c.copy_to_group(x)
    total = c.reduce_from_group(y * y) + c.reduce_from_group(y)
    total.sum().backward()
    xs = [local_input(r, SHAPE) for r in range(world_size)]
    torch.testing.assert_close(x.grad, sum(2 * other + 1 for other in xs), **EXACT)

    x = local_input(rank, SHAPE).requires_grad_()
    gathered = c.all_gather(x, None, -1)
    (grad,) = torch.autograd.grad((gathered**3).sum(), x, create_graph=True)
    grad.sum().backward()
    # Every rank cubes the whole, so a slice gets a gradient of 3 x^2 from each of them.
    torch.testing.assert_close(grad, world_size * 3 * x**2, **EXACT)
    torch.testing.assert_close(x.grad, world_size * 6 * x.detach(), **EXACT)


def changed_in_place(rank: int, world_size: int) -> None:
    """What a caller does to a result does not reach the input."""
    for name, args in [
        ("reduce_from_group", ()),
        ("all_gather", (0,)),
        ("reduce_scatter", (0,)),
        ("scatter", (0,)),
        ("all_to_all", (0, 0)),
    ]:
        x = torch.arange(8.0).reshape(4, 2).requires_grad_()
        apply(name, x * 1.0, None, *args).add_(1.0).sum().backward()
        assert x.grad is not None
        base = torch.arange(8.0).reshape(4, 2)
        apply(name, base, None, *args).zero_()
        assert torch.equal(base, torch.arange(8.0).reshape(4, 2)), name


def sharded_mlp(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """Every collective once, in an order in which the shapes fit."""
    h = torch.nn.functional.gelu(c.copy_to_group(x, group) @ up) @ down
    h = c.reduce_from_group(h, group)
    h = c.all_gather(c.scatter(h, group, 0), group, 0)
    h = c.reshard(c.reduce_scatter(h, group, 0), "SR->RS", group)
    return c.reshard(h, "RS->RR", group)


def uneven_mlp(x: Tensor) -> Tensor:
    return c.all_gather(2 * c.scatter(x, None, 0, True), None, 0, False, 5)


def compiled(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank)
    up, down = torch.randn(8, 4), torch.randn(4, 8)
    torch.manual_seed(9)
    x = torch.randn(4, 8)
    for group in (None, groups[rank % 2]):

        def run(fn: Callable[..., Tensor], group: Any = group) -> tuple[Tensor, tuple[Tensor, ...]]:
            leaves = [t.clone().requires_grad_() for t in (x, up, down)]
            y = fn(*leaves, group)
            return y.detach(), torch.autograd.grad(y.pow(2).sum(), leaves)

        torch.compiler.reset()
        eager = run(sharded_mlp)
        captured = run(torch.compile(sharded_mlp, backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(captured, eager)
    for fn in (uneven_mlp, torch.compile(uneven_mlp, backend="aot_eager", fullgraph=True)):
        y = torch.randn(5, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(fn(y).sum(), y)
        torch.testing.assert_close(grad, torch.full((5, 3), 2.0))


def alone(rank: int, world_size: int) -> None:
    """A group of one in a larger world."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    x = torch.randn(3, 5)
    assert c.reduce_from_group(x, own) is x
    assert c.scatter(x, own, 0) is x


BY_TWO = [on_the_world, other_dtypes, twice_and_twice_differentiated, changed_in_place, alone]


@pytest.mark.parametrize(
    ("world_size", "workers"),
    [
        (2, BY_TWO),
        (3, [odd_sizes, uneven_shares]),
        (4, [on_the_world, on_subgroups, uneven_shares]),
        pytest.param(4, [compiled], marks=pytest.mark.slow),
    ],
    ids=["two ranks", "three ranks", "four ranks", "compiled"],
)
def test_on_ranks(world_size: int, workers: list[Callable[[int, int], None]]) -> None:
    job = Job(world_size)
    for worker in workers:
        job(worker)
    job.run()


def test_without_distributed_all_are_the_identity() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    assert c.group_size() == 1
    assert c.group_rank() == 0
    for name, args, *_ in CASES:
        if all(arg in (0, 1, -1, -2, False) for arg in args):
            assert apply(name, x, None, *args) is x
    for spec, *_ in RESHARDS:
        assert c.reshard(x, spec) is x


def test_too_few_dimensions() -> None:
    """Beside ``golden/mistakes/collectives.txt``."""
    with pytest.raises(ValueError, match="without dimensions has no axis 0"):
        c.all_gather(torch.ones(()), None, 0)
    with pytest.raises(ValueError, match=r"two dimensions or more, not one of shape \(4,\)"):
        c.reshard(torch.ones(4), "RR->RS")
