"""The kernels of ``dropout_add_norm`` by Triton's interpreter on the CPU, or compiled on CUDA.

``test_residual.py`` runs this file in a process of its own, and so may you:

    TRITON_INTERPRET=1 python -m pytest tests/op/residual_kernels.py
    CUDA_VISIBLE_DEVICES=0 python -m pytest tests/op/residual_kernels.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpreterBuilder

import slapo
from slapo.model_schedule import apply_schedule
from slapo.op import residual, residual_triton
from slapo.op.residual import DenseDropoutAddNorm, dropout_add_norm
from tests.distributed import run_distributed
from tests.model_schedule.equality import difference
from tests.model_schedule.models import MODELS, tokens

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not IS_INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1, or CUDA", allow_module_level=True)

of_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
EPS = 1e-3
#: Sums are in another order, and rounded at other places: once, where torch rounds three times.
NEAR = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 8e-2, "atol": 8e-2},
}
SHAPES = [(3, 7, 37), (1, 64), (31, 3), (13,), (3, 300), (0, 16)]
NAMES = ("x", "residual", "weight", "norm_bias", "bias")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Tensors lie where the kernels run."""
    with torch.device("cpu" if IS_INTERPRETED else "cuda"):
        yield


def operands(
    shape: tuple[int, ...], kind: str = "layer", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """By name; an RMS norm has no bias."""
    sizes = [shape, shape, *[shape[-1:]] * 3]
    made = {name: torch.randn(size) for name, size in zip(NAMES, sizes, strict=True)}
    found: dict[str, Any] = {n: each.to(dtype).requires_grad_() for n, each in made.items()}
    if kind == "rms":
        del found["norm_bias"]
    return found


def run(given: dict[str, Any], seed: int = 5, **settings: Any) -> tuple[Tensor, Tensor]:
    """The norm and the sum, with what dropout zeroes from the seed."""
    torch.manual_seed(seed)
    backend = settings.pop("backend", "triton")
    return dropout_add_norm(
        **{"return_sum": True, "eps": EPS, **settings}, **given, backend=backend
    )


def mask_of(shape: tuple[int, ...], p: float, seed: int = 5) -> Tensor:
    """Which elements are kept: read off from the sum of zeros and dropped ones."""
    given = {"x": torch.ones(shape), "residual": torch.zeros(shape)}
    _, total = run({**given, "weight": torch.ones(shape[-1:])}, seed, p=p)
    kept = total != 0
    torch.testing.assert_close(total, kept / (1 - p))
    return kept


def expected(given: dict[str, Any], p: float, **settings: Any) -> tuple[Tensor, Tensor]:
    """By torch, with the mask that the kernel takes."""
    given = dict(given)
    bias = given.pop("bias", None)
    x = given.pop("x") if bias is None else given.pop("x") + bias
    if p:
        x = (x * mask_of(tuple(x.shape), p) / (1 - p)).to(x.dtype)
    return run({"x": x, **given}, backend="torch", **settings)


# --- numbers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", residual.KINDS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NEAR)
def test_numbers(kind: str, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = operands(shape, kind, dtype)
    found, wanted = run(given, p=p, kind=kind), expected(given, p, kind=kind)
    torch.testing.assert_close(found, wanted, **NEAR[dtype])
    scales = [torch.randn_like(each) for each in found]
    inputs = [*given.values()]
    grads = torch.autograd.grad(found, inputs, scales)
    wanted_grads = torch.autograd.grad(wanted, inputs, scales)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        size = wanted_grad.abs().max().item() if wanted_grad.numel() else 0.0
        near = NEAR[dtype]
        # Sums over rows are as near as the largest is.
        torch.testing.assert_close(
            grad, wanted_grad, rtol=near["rtol"], atol=near["atol"] * max(size, 1.0)
        )


@pytest.mark.parametrize("kind", residual.KINDS)
def test_one_feature(kind: str) -> None:
    given = operands((7, 1), kind)
    found, wanted = run(given, kind=kind), run(given, kind=kind, backend="torch")
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("left_out", [(), ("bias",), ("norm_bias",), ("bias", "norm_bias")])
@pytest.mark.parametrize("return_sum", [False, True])
def test_what_is_left_out(left_out: tuple[str, ...], return_sum: bool) -> None:
    given = {n: each for n, each in operands((5, 20)).items() if n not in left_out}
    torch.manual_seed(5)
    settings: dict[str, Any] = {"p": 0.2, "eps": EPS, "return_sum": return_sum}
    found = dropout_add_norm(**given, **settings, backend="triton")
    assert isinstance(found, tuple) is return_sum
    out = found[0] if return_sum else found
    wanted, _ = expected(given, 0.2)
    torch.testing.assert_close(out, wanted, **NEAR[torch.float32])
    grads = torch.autograd.grad(out.square().sum(), [*given.values()])
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [*given.values()])
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_by_itself(name: str, p: float) -> None:
    given = {n: t.detach().requires_grad_(n == name) for n, t in operands((5, 20)).items()}
    found, wanted = run(given, p=p)[0], expected(given, p)[0]
    scale = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, given[name], scale)
    (wanted_grad,) = torch.autograd.grad(wanted, given[name], scale)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_two_are_no_memory_of_both() -> None:
    """Without dropout they are the same numbers; what is added to one is not added to the other."""
    given = operands((5, 20))
    for _ in range(2):
        run(given)[0].square().sum().backward()
    wanted = [each.grad for each in given.values()]
    given = {n: each.detach().requires_grad_() for n, each in given.items()}
    for _ in range(2):
        run(given, backend="torch")[0].square().sum().backward()
    torch.testing.assert_close(wanted, [t.grad for t in given.values()], rtol=1e-4, atol=1e-4)
    assert given["x"].grad.data_ptr() != given["residual"].grad.data_ptr()


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_results_is_used(used: int) -> None:
    given = operands((5, 20))
    inputs = [given["x"], given["residual"]]
    found, wanted = run(given, p=0.2)[used], expected(given, 0.2)[used]
    scale = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, scale)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, inputs, scale))


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("kind", residual.KINDS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients_by_differences(kind: str, p: float) -> None:
    given = operands((2, 3), kind)

    def results(*tensors: Tensor) -> Any:
        return run(dict(zip(given, tensors, strict=True)), p=p, kind=kind)

    inputs = [*given.values()]
    assert torch.autograd.gradcheck(results, inputs, eps=1e-2, atol=2e-2, rtol=2e-2)


def test_rows_that_do_not_lie_side_by_side() -> None:
    x = torch.randn(20, 3, 5, requires_grad=True)
    rest = torch.randn(3, 1, 20, requires_grad=True)
    vector = torch.randn(40, requires_grad=True)

    def given(contiguous: bool) -> dict[str, Tensor]:
        made = {"x": x.permute(1, 2, 0), "residual": rest.expand(3, 5, 20)}
        made |= {"weight": vector[::2], "norm_bias": vector[1::2]}
        return {n: t.contiguous() for n, t in made.items()} if contiguous else made

    found, wanted = run(given(False)), run(given(True), backend="torch")
    torch.testing.assert_close(found, wanted)
    # Gradients of sums are one number, expanded; of a slice, rows apart.
    loss, wanted_loss = (out.sum() + total[..., 3:7].sum() for out, total in (found, wanted))
    inputs = (x, rest, vector)
    grads = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted_loss, inputs))
    wide = torch.randn(7, 64)
    apart = {"x": wide[:, :20], "residual": wide[:, 30:50], "weight": torch.ones(20)}
    torch.testing.assert_close(run(apart), run(apart, backend="torch"))


@pytest.mark.parametrize("types", ["xrwnb", "x", "xb", "xr", "wn", "r"])
@pytest.mark.parametrize("kind", residual.KINDS)
def test_mixed_types(kind: str, types: str) -> None:
    """As under autocast: a product in half precision, the rest in float32; and other mixtures."""
    given = {
        n: each.detach().to(torch.bfloat16 if n[0] in types else torch.float32).requires_grad_()
        for n, each in operands((5, 20), kind).items()
    }
    found, wanted = run(given, kind=kind), run(given, kind=kind, backend="torch")
    torch.testing.assert_close(found, wanted, **NEAR[torch.bfloat16])
    scales = [torch.randn_like(each) for each in found]
    grads = torch.autograd.grad(found, [*given.values()], scales)
    for grad, operand in zip(grads, given.values(), strict=True):
        assert grad.dtype == operand.dtype


def test_nothing_is_kept_where_nothing_is_differentiated() -> None:
    given = operands((5, 20))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.no_grad():
            out = dropout_add_norm(**given, eps=EPS, backend="triton")
    assert isinstance(out, Tensor)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected(given, 0.0)[0])
    assert kept == []


def test_there_is_no_gradient_of_the_gradient() -> None:
    given = operands((5, 20))
    (grad,) = torch.autograd.grad(run(given)[0].square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- dropout -------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    kept = mask_of((100, 160), p).float()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * deviation / kept.numel() ** 0.5
    for axis, count in ((0, 100), (1, 160)):  # no column, and no row, is apart
        assert (kept.mean(axis) - (1 - p)).abs().max() < 5 * deviation / count**0.5
    centred = (kept - kept.mean()) / kept.std()
    for shift in [(0, 1), (1, 0), (0, 2), (0, 4), (1, 1)]:
        correlation = (centred * centred.roll(shift, (0, 1))).mean()
        assert abs(correlation) < 5 / kept.numel() ** 0.5


def test_other_numbers_of_the_generator_other_elements() -> None:
    shape = (16, 48)
    assert torch.equal(mask_of(shape, 0.5, seed=1), mask_of(shape, 0.5, seed=1))
    both = mask_of(shape, 0.5, seed=1) == mask_of(shape, 0.5, seed=2)
    assert 0.4 < both.float().mean() < 0.6
    ones, zeros = torch.ones(shape), torch.zeros(shape)
    first, second = (
        dropout_add_norm(ones, zeros, ones[0], p=0.5, return_sum=True, backend="triton")[1]
        for _ in range(2)
    )
    assert not torch.equal(first, second)


def test_the_extremes() -> None:
    given = operands((5, 20))
    same = expected(given, 0.0)
    torch.testing.assert_close(run(given, p=0.7, training=False), same)
    state = torch.get_rng_state()
    dropout_add_norm(**given, p=0.7, training=False, backend="triton")
    assert torch.equal(torch.get_rng_state(), state)
    _, total = run(given, p=1.0)
    assert torch.equal(total, given["residual"])
    (grad,) = torch.autograd.grad(total.sum(), given["x"])
    assert not grad.any()


def test_the_backward_pass_zeroes_the_same_elements() -> None:
    given = operands((9, 37))
    _, total = run(given, p=0.5)
    kept = mask_of((9, 37), 0.5)
    x_grad, bias_grad = torch.autograd.grad(total, [given["x"], given["bias"]], torch.ones(9, 37))
    assert torch.equal(x_grad, 2.0 * kept)
    assert torch.equal(bias_grad, (2.0 * kept).sum(0))


def test_a_forked_state_is_drawn_from() -> None:
    given = operands((9, 37))
    masks = []
    for rank in (0, 1):
        slapo.set_random_seed(3, tp_rank=rank)
        for fork in (False, True):
            with slapo.random.get_rng_tracker().fork() if fork else torch.enable_grad():
                total = dropout_add_norm(**given, p=0.5, return_sum=True, backend="triton")[1]
            masks.append((total - given["residual"]).abs() < 1e-6)
    outside, inside, other_outside, other_inside = masks
    assert torch.equal(outside, other_outside)
    assert not torch.equal(inside, other_inside)


def test_a_checkpoint_zeroes_the_same_elements_again() -> None:
    given = operands((9, 37))

    def loss(*tensors: Tensor) -> Tensor:
        out, total = dropout_add_norm(*tensors, p=0.5, return_sum=True, backend="triton")
        return (out.square() + total).sum()

    names = ("x", "residual", "weight", "norm_bias")
    results = []
    for wrapped in (loss, lambda *tensors: checkpoint(loss, *tensors, use_reentrant=False)):
        torch.manual_seed(3)
        found = wrapped(*(given[n] for n in names))
        torch.rand(5)
        results.append((found, *torch.autograd.grad(found, [given[n] for n in names])))
    assert all(map(torch.equal, *results))


# --- bytes ---------------------------------------------------------------------------------------
class Traffic(TorchDispatchMode):
    """Bytes that operations of torch read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in func.name():
            outs = result if isinstance(result, tuple) else (result,)
            self.bytes += sum(t.nbytes for t in (*args, *outs) if isinstance(t, Tensor))
        return result


@contextmanager
def kernel_traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that kernels load and store, as the interpreter carries them out."""
    count = [0]

    def watched(name: str, mask_at: int) -> Callable[..., Any]:
        original = getattr(InterpreterBuilder, name)

        def call(self: Any, pointers: Any, *args: Any, **kwargs: Any) -> Any:
            size = pointers.dtype.scalar.element_ty.primitive_bitwidth // 8
            mask = args[mask_at] if len(args) > mask_at else None
            taken = pointers.data.size if mask is None else int(numpy.sum(mask.data))
            count[0] += size * taken
            return original(self, pointers, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, watched(name, mask_at))
        yield count


def unfused(x: Tensor, rest: Tensor, norm: nn.LayerNorm, bias: Tensor | None, p: float) -> Tensor:
    """As it runs on CUDA, where dropout is one kernel that keeps a boolean for each element."""
    if bias is not None:
        x = x + bias
    if p:
        x = torch.native_dropout(x, p, True)[0]
    return norm(x + rest)


@of_interpreter
@pytest.mark.parametrize(
    ("p", "has_bias", "by_torch", "by_kernels"),
    [
        (0.1, False, (15, 11), (8, 8)),
        (0.0, False, (10, 6), (8, 6)),
        (0.1, True, (19, 13), (8, 8)),
    ],
)
def test_bytes_for_an_element(
    p: float,
    has_bias: bool,
    by_torch: tuple[int, int],
    by_kernels: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that the docstring gives, of bfloat16, but for what parameters and statistics add."""
    rows, hidden = 32, 1024
    given = operands((rows, hidden), dtype=torch.bfloat16)
    norm = nn.LayerNorm(hidden, dtype=torch.bfloat16)
    scale = torch.randn(rows, hidden).bfloat16()
    names = ("x", "residual", "weight", "norm_bias") + (("bias",) if has_bias else ())
    inputs = [given[n] for n in names]
    unfused_inputs = [*inputs[:2], norm.weight, norm.bias, *inputs[4:]]
    found = []
    with Traffic() as traffic:
        out = unfused(*inputs[:2], norm, given["bias"] if has_bias else None, p)
        found.append(traffic.bytes)
        torch.autograd.grad(out, unfused_inputs, scale)
        found.append(traffic.bytes - found[0])
    with kernel_traffic(monkeypatch) as count:
        result = dropout_add_norm(**{n: given[n] for n in names}, p=p, backend="triton")
        found.append(count[0])
        torch.autograd.grad(result, inputs, scale)
        found.append(count[0] - found[2])
    # What is of the parameters' size: read for each row, from a cache, and by each program of the
    # backward pass, which writes its part of their gradients in float32.
    programs = residual_triton.residents_of(residual_triton.block_of(hidden)[1])[0]
    parameters = len(names) - 2
    found[2] -= 2 * parameters * rows * hidden
    found[3] -= programs * hidden * (2 + 4 * parameters)
    per_element = [number / scale.numel() for number in found]
    # The rest is of each row: statistics and the seed; and of torch's norm, parameters.
    assert per_element == pytest.approx([*by_torch, *by_kernels], abs=0.4)


def test_bytes_that_are_kept() -> None:
    given = operands((64, 512), dtype=torch.bfloat16)
    norm = nn.LayerNorm(512, dtype=torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= 64 * 512:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    found = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unfused(given["x"], given["residual"], norm, None, 0.1)
        found.append(sum(kept.values()) / given["x"].numel())
        kept.clear()
        names = ("x", "residual", "weight", "norm_bias")
        dropout_add_norm(**{n: given[n] for n in names}, p=0.1, backend="triton")
        found.append(sum(kept.values()) / given["x"].numel())
    assert found == [3, 2]


# --- the module, and recipes ---------------------------------------------------------------------
@contextmanager
def by_kernels() -> Iterator[list[int]]:
    """Blocks go by the kernels; counts launches."""
    launched = [0]
    original = residual_triton.dropout_add_norm

    def counted(*args: Any) -> Any:
        launched[0] += 1
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseDropoutAddNorm, "backend", "triton")
        patch.setattr(residual_triton, "dropout_add_norm", counted)
        yield launched


#: Of four layers, two ends each; a checkpoint of all runs them twice.
MODES: list[tuple[dict[str, Any], int]] = [
    ({}, 8),
    ({"ckpt_ratio": 1.0}, 16),
    ({"sequence_parallel": True}, 8),
]


@of_interpreter
@pytest.mark.parametrize(
    ("key", "options", "launches"), [("bert", *MODES[0]), ("bert", *MODES[1]), ("roberta", {}, 8)]
)
def test_a_recipe(key: str, options: dict[str, Any], launches: int) -> None:
    with by_kernels() as launched:
        found = difference(key, options)
    assert max(found.values()) < 5e-6, found
    assert launched[0] == launches


def on_ranks(rank: int, world_size: int) -> list[tuple[float, int]]:
    found = []
    for options, _ in MODES:
        with by_kernels() as launched:
            largest = max(difference("bert", options, dist.group.WORLD).values())
        found.append((largest, launched[0]))
    return found


@of_interpreter
def test_a_recipe_on_two_ranks() -> None:
    """Products of ranks are summed before, and the bias of the layer is added once."""
    for found in run_distributed(on_ranks, 2, timeout=250):
        assert [launches for _, launches in found] == [launches for _, launches in MODES]
        assert max(largest for largest, _ in found) < 5e-6


def dropped(rank: int, world_size: int) -> list[Tensor]:
    """Hidden states after each layer in train mode, with dropout by the kernels."""
    slapo.set_random_seed(3, tp_rank=rank)
    model = MODELS["bert"].build(hidden_dropout_prob=0.2)
    with by_kernels() as launched:
        sch = apply_schedule(model, "bert", group=dist.group.WORLD)
        output = slapo.build(sch)[0](**tokens(3, 9), output_hidden_states=True)
    assert launched[0] == 8
    return [*output.hidden_states, output.logits]


@of_interpreter
def test_dropout_keeps_the_ranks_together() -> None:
    first, second = run_distributed(dropped, 2)
    assert all(map(torch.equal, first, second))
