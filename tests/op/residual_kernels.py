"""The kernel of ``dropout_add_norm`` by Triton's interpreter on the CPU, or compiled on CUDA.

``test_residual.py`` runs this file in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/op/residual_kernels.py
    CUDA_VISIBLE_DEVICES=0 python -m pytest tests/op/residual_kernels.py
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import slapo
from slapo.op import residual, residual_triton
from slapo.op.residual import DenseDropoutAddNorm, dropout_add_norm
from tests.distributed import run_distributed
from tests.model_schedule.equality import difference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not IS_INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1, or CUDA", allow_module_level=True)

of_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
#: The kernel sums in another order, and rounds once where torch rounds three times.
NEAR = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
NAMES = ("x", "residual", "weight", "bias")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each program of the backward pass takes several rows."""
    monkeypatch.setattr(residual_triton, "_PROGRAMS", 4)
    with torch.device("cpu" if IS_INTERPRETED else "cuda"):
        yield


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    sizes = [shape, shape, shape[-1:], shape[-1:]]
    made = {name: torch.randn(size) for name, size in zip(NAMES, sizes, strict=True)}
    return {name: each.to(dtype).requires_grad_() for name, each in made.items()}


def mask_of(shape: tuple[int, ...], p: float, seed: int = 5) -> Tensor:
    """The elements that the kernel keeps, which are those that have a gradient."""
    x, scale = torch.ones(shape, requires_grad=True), torch.randn(shape)
    torch.manual_seed(seed)
    out = dropout_add_norm(x, scale, torch.ones(shape[-1:]), p=p, backend="triton")
    (grad,) = torch.autograd.grad(out, x, scale)
    return grad != 0


def both(given: dict[str, Any], p: float = 0.0) -> tuple[Tensor, Tensor]:
    """The norm by the kernel, and by torch with the same mask."""
    kept = mask_of(tuple(given["x"].shape), p) / (1 - p) if p else None
    torch.manual_seed(5)
    found = dropout_add_norm(**given, p=p, eps=1e-3, backend="triton")
    dropped = given["x"] if kept is None else (given["x"] * kept).to(given["x"].dtype)
    return found, dropout_add_norm(**{**given, "x": dropped}, eps=1e-3)


def compare(given: dict[str, Any], p: float = 0.0, near: float = NEAR[torch.float32]) -> None:
    """Outputs, and gradients of those operands that have one."""
    found, wanted = both(given, p)
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    inputs = [each for each in given.values() if each.requires_grad]
    scale = torch.randn_like(found)
    grads, wanted_grads = (torch.autograd.grad(out, inputs, scale) for out in (found, wanted))
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        # Sums over rows are as exact as their largest term.
        size = wanted_grad.abs().max().item() if wanted_grad.numel() else 0.0
        torch.testing.assert_close(grad, wanted_grad, rtol=near, atol=near * max(size, 1.0))


# --- values --------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 7, 37), (1, 64), (31, 3), (13,), (3, 300), (0, 16), (7, 1)])
@pytest.mark.parametrize("dtype", NEAR)
def test_values(p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(operands(shape, dtype), p if shape[-1] > 1 else 0.0, NEAR[dtype])


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_by_itself_and_without_a_bias(name: str, p: float) -> None:
    given = {n: t.detach().requires_grad_(n == name) for n, t in operands((5, 20)).items()}
    compare(given, p)
    if name != "bias":
        compare({n: each for n, each in given.items() if n != "bias"}, p)


def test_gradients_accumulate_apart() -> None:
    """Without dropout x and the residual have the same gradient."""
    given = operands((5, 20))
    for _ in range(2):
        dropout_add_norm(**given, backend="triton").square().sum().backward()
    twice = {n: each.detach().requires_grad_() for n, each in given.items()}
    (2 * dropout_add_norm(**twice).square().sum()).backward()
    for name in NAMES:
        torch.testing.assert_close(given[name].grad, twice[name].grad, rtol=1e-4, atol=1e-4)
    assert given["x"].grad.data_ptr() != given["residual"].grad.data_ptr()


def test_tensors_that_are_not_contiguous() -> None:
    vector = torch.randn(40, requires_grad=True)
    given = {
        "x": torch.randn(20, 3, 5, requires_grad=True).permute(1, 2, 0),
        "residual": torch.randn(3, 1, 20, requires_grad=True).expand(3, 5, 20),
        "weight": vector[::2],
        "bias": vector[1::2],
    }
    compare(given, 0.2)
    found, wanted = both(given)
    # The gradient of a sum is one expanded value.
    grads, wanted_grads = (torch.autograd.grad(out.sum(), vector) for out in (found, wanted))
    torch.testing.assert_close(grads, wanted_grads)


@pytest.mark.parametrize("halves", ["xrwb", "x", "xr", "wb", "r"])
def test_mixed_types(halves: str) -> None:
    """As under autocast, a product in half precision and the rest in float32."""
    given = {
        name: each.detach().to(torch.bfloat16 if name[0] in halves else None).requires_grad_()
        for name, each in operands((5, 20)).items()
    }
    compare(given, near=NEAR[torch.bfloat16])


def test_gradients_end_where_the_kernel_does() -> None:
    given = operands((5, 20))
    with torch.no_grad():
        assert not dropout_add_norm(**given, backend="triton").requires_grad
    out = dropout_add_norm(**given, backend="triton")
    for loss in (out.square().sum(), out.sum()):  # the gradient of the second is a constant
        with pytest.raises(RuntimeError, match="dropout_add_norm by triton is not differentiable"):
            torch.autograd.grad(loss, given["x"], create_graph=True, retain_graph=True)


# --- dropout -------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_share_that_is_kept_and_the_seed(p: float) -> None:
    kept = mask_of((100, 160), p).float()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * deviation / kept.numel() ** 0.5
    for axis, count in ((0, 100), (1, 160)):
        assert (kept.mean(axis) - (1 - p)).abs().max() < 5 * deviation / count**0.5
    centered = (kept - kept.mean()) / kept.std()
    for shift in [(0, 1), (1, 0), (0, 2), (0, 4), (1, 1)]:
        correlation = (centered * centered.roll(shift, (0, 1))).mean()
        assert abs(correlation) < 5 / kept.numel() ** 0.5
    assert torch.equal(mask_of((16, 48), p), mask_of((16, 48), p))
    assert not torch.equal(mask_of((16, 48), p), mask_of((16, 48), p, seed=2))


def test_the_extremes() -> None:
    given = operands((5, 20))
    state = torch.get_rng_state()
    still = dropout_add_norm(**given, p=0.7, training=False, backend="triton")
    torch.testing.assert_close(still, dropout_add_norm(**given))
    assert torch.equal(torch.get_rng_state(), state)
    out = dropout_add_norm(**given, p=1, backend="triton")
    torch.testing.assert_close(out, dropout_add_norm(**given, p=1))
    assert not torch.autograd.grad(out.square().sum(), given["x"])[0].any()


def test_a_forked_state_is_drawn_from() -> None:
    given = operands((9, 37))
    results = []
    for rank in (0, 1):
        slapo.set_random_seed(3, tp_rank=rank)
        for fork in (False, True):
            with slapo.random.get_rng_tracker().fork() if fork else torch.enable_grad():
                results.append(dropout_add_norm(**given, p=0.5, backend="triton"))
    outside, inside, other_outside, other_inside = results
    assert torch.equal(outside, other_outside)
    assert not torch.equal(inside, other_inside)


def test_a_checkpoint_zeroes_the_same_elements_again() -> None:
    given = [*operands((9, 37)).values()]

    def loss(*tensors: Tensor) -> Tensor:
        return dropout_add_norm(*tensors, p=0.5, backend="triton").pow(3).sum()

    results = []
    for wrapped in (loss, lambda *tensors: checkpoint(loss, *tensors, use_reentrant=False)):
        torch.manual_seed(3)
        found = wrapped(*given)
        torch.rand(5)
        results.append((found, *torch.autograd.grad(found, given)))
    assert all(map(torch.equal, *results))


# --- recipes -------------------------------------------------------------------------------------
@contextmanager
def by_the_kernel() -> Iterator[list[int]]:
    """Recipes' modules run the kernel; counts launches."""
    launched = [0]
    original = residual._by_triton

    def counted(*args: Any) -> Any:
        launched[0] += 1
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseDropoutAddNorm, "backend", "triton")
        patch.setattr(residual, "_by_triton", counted)
        yield launched


#: Four layers have two ends each; a checkpoint of all runs them twice.
MODES: list[tuple[str, dict[str, Any], int]] = [
    ("roberta", {}, 8),
    ("bert", {"ckpt_ratio": 1.0}, 16),
    ("bert", {"sequence_parallel": True}, 8),
]


def on_ranks(rank: int, world_size: int) -> None:
    for key, options, launches in MODES:
        with by_the_kernel() as launched:
            found = difference(key, options, dist.group.WORLD)
        assert max(found.values()) < 5e-6, found
        assert launched[0] == launches


@of_interpreter
def test_recipes_on_two_ranks() -> None:
    run_distributed(on_ranks, 2, timeout=250)
