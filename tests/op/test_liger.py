"""Kernels of liger-kernel: what is asked of them, and that they compute it."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.op import liger
from slapo.op.mlp import GatedMLP, gated_gelu, gated_silu
from slapo.op.norm import RMSNorm
from tests.op.processes import run
from tests.op.test_mlp import MLP, numbers, same
from tests.op.test_norm import GemmaRMSNorm, LlamaRMSNorm, made
from tests.versions import interprets_loops, t5_takes_attention

needs_liger = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)


class Norm(torch.autograd.Function):
    """In the place of the package's, with its arguments."""

    calls: list[tuple[Any, ...]]

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool
    ) -> Tensor:
        Norm.calls.append((tuple(x.shape), eps, offset, mode, in_place))
        ctx.save_for_backward(x, w)
        ctx.rest = (eps, offset, mode)
        return Norm.reference(x, w, *ctx.rest)

    @staticmethod
    def reference(x: Tensor, w: Tensor, eps: float, offset: float, mode: str) -> Tensor:
        normed = F.rms_norm(x.float(), w.shape, None, eps)
        if mode == "gemma":
            return (normed * (offset + w.float())).to(x.dtype)
        return normed.to(x.dtype) * (offset + w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            output = Norm.reference(x, w, *ctx.rest)
        return *torch.autograd.grad(output, (x, w), grad), None, None, None, None


def overwriting(act: Any) -> dict[str, Any]:
    """Two functions as the package has them: the second writes over what it is given."""

    def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert gate.is_contiguous()
        assert up.is_contiguous()
        return gate, up, act(gate) * up

    def backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert grad.is_contiguous()
        operands = [each.detach().clone().requires_grad_() for each in (gate, up)]
        with torch.enable_grad():
            product = act(operands[0]) * operands[1]
        for each, own in zip((gate, up), torch.autograd.grad(product, operands, grad), strict=True):
            each.untyped_storage().copy_(own.contiguous().untyped_storage())  # unseen, as a kernel
        return gate, up

    return {"forward": forward, "backward": backward}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the package, of which tensors on CPU are taken here."""
    asked: list[Any] = []

    def noting(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            asked.append(name)
            return function(*args)

        return run

    def tanh_gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    functions = {
        f"{name}_{way}": noting(f"{name}_{way}", function)
        for name, act in (("swiglu", F.silu), ("geglu", tanh_gelu))
        for way, function in overwriting(act).items()
    }
    Norm.calls = asked
    package = SimpleNamespace(**functions, LigerRMSNormFunction=Norm)
    on_cpu = liger._misfit

    def misfit(*tensors: Tensor) -> str | None:
        found = on_cpu(*tensors)
        return None if found is not None and "run on CUDA" in found else found

    monkeypatch.setattr(liger, "_misfit", misfit)
    monkeypatch.setattr(liger, "operations", lambda: package)
    return asked


# --- which tensors -------------------------------------------------------------------------------
def test_which_tensors_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "operations", lambda: object())
    monkeypatch.setattr(liger, "is_plain", lambda *tensors: True)
    with FakeTensorMode():

        def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        x = on_cuda(2, 3)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert liger.fits(on_cuda(2, 3, dtype=dtype), on_cuda(2, 3, dtype=dtype))
        others = [on_cuda(2, 3, dtype=dtype) for dtype in (torch.float64, torch.int64)]
        shapes: list[tuple[int, ...]] = [(0, 3), (), (1, 65537)]
        for other in (*others, *(on_cuda(*shape) for shape in shapes), torch.empty(2, 3)):
            assert not liger.fits(other)
        assert not liger.fits(x, on_cuda(2, 3, dtype=torch.float16))
        assert not liger.fits(x, on_cuda(1, 3))
        monkeypatch.setattr(liger, "operations", lambda: None)
        assert not liger.fits(x)


def test_an_import_that_fails_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> Any:
        raise RuntimeError("another version")

    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(liger.importlib, "import_module", fail)
    assert liger.operations.__wrapped__() is None
    assert "another version" in caplog.text
    monkeypatch.setattr(liger.importlib, "import_module", lambda name: SimpleNamespace())
    assert liger.operations.__wrapped__() is None
    assert "has no ['swiglu_forward'" in caplog.text
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    assert liger.operations.__wrapped__() is None


# --- what is asked -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gated_blocks_ask_for_the_product(calls: list[Any], dtype: torch.dtype) -> None:
    for act, name in ((nn.SiLU(), "swiglu"), (nn.GELU(approximate="tanh"), "geglu")):
        block, x = MLP(act).to(dtype), torch.randn(3, 2, 5).to(dtype)
        calls.clear()
        wanted = numbers(block, x)
        assert calls == []
        found = numbers(GatedMLP.like(block), x)
        assert calls == [f"{name}_forward", f"{name}_backward"]
        same(found, wanted)


def test_no_kernel_where_hooks_hang_on_the_activation(calls: list[Any]) -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    block.act_fn.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert torch.equal(block(x), block.down_proj(2 * F.silu(block.gate_proj(x)) * block.up_proj(x)))
    assert calls == []


def test_hooks_of_the_layers_run(calls: list[Any]) -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    wanted = numbers(block, x)
    seen: list[str] = []
    block.up_proj.register_full_backward_hook(lambda *_: seen.append("backward"))
    block.gate_proj.register_forward_hook(lambda *_: seen.append("forward"))
    same(numbers(block, x), wanted)
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("function", [gated_silu, gated_gelu])
def test_nothing_is_overwritten_that_is_needed(calls: list[Any], function: Any) -> None:
    leaves = [torch.randn(3, 5, requires_grad=True) for _ in range(2)]
    kept = [each.detach().clone() for each in leaves]
    for operands in (leaves, [each * 1 for each in leaves]):
        output = function(*operands).sum()
        first = torch.autograd.grad(output, leaves, retain_graph=True)
        again = torch.autograd.grad(output, leaves)
        same(list(again), list(first))
    same(leaves, kept)
    operands = [each * 1 for each in leaves]
    copies = [each.detach().clone() for each in operands]
    function(*operands).sum().backward()
    assert not torch.equal(operands[0], copies[0])  # they are its own


@pytest.mark.parametrize("function", [gated_silu, gated_gelu])
def test_operands_may_be_the_same(calls: list[Any], function: Any) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    states = x * 1
    (found,) = torch.autograd.grad(function(states, states).sum(), x)
    plain = function(x, x, "torch").sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, x)[0])
    packed = torch.randn(6, 5, requires_grad=True)
    (found,) = torch.autograd.grad(function(*(packed * 1).chunk(2)).sum(), packed)
    plain = function(*packed.chunk(2), "torch").sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, packed)[0])


def test_operands_may_be_slices(calls: list[Any]) -> None:
    x = torch.randn(3, 10, requires_grad=True)
    found = gated_silu(*(x * 1).chunk(2, -1))
    (grad,) = torch.autograd.grad(found, x, torch.ones(1).expand(3, 5))
    gate, up = x.chunk(2, -1)
    wanted = F.silu(gate) * up
    assert torch.equal(found, wanted)
    assert torch.equal(grad, torch.autograd.grad(wanted.sum(), x)[0])
    assert calls == ["swiglu_forward", "swiglu_backward"]


def test_another_who_kept_an_operand_is_told(calls: list[Any]) -> None:
    x, y = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    gate = x * 1
    other = gate.exp() * gate.square()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (gated_silu(gate, y * 1) + other).sum().backward()


def test_no_gradient_of_a_gradient(calls: list[Any]) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    norm = RMSNorm(5, offset=1.0)
    for output in (gated_silu(x * 1, x * 2), gated_gelu(x * 1, x * 2), norm(x)):
        with pytest.raises(RuntimeError, match="kernels=False"):
            torch.autograd.grad(output.sum(), x, create_graph=True)
    assert norm(x).sum().backward() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "offset", "mode"), [(LlamaRMSNorm, 0.0, "llama"), (GemmaRMSNorm, 1.0, "gemma")]
)
def test_norms_ask_for_their_roundings(
    calls: list[Any], cls: type[nn.Module], offset: float, mode: str, dtype: torch.dtype
) -> None:
    original = made(cls, offset, 17, 1e-3).to(dtype)
    norm, x = RMSNorm.like(original, offset), torch.randn(3, 17).to(dtype)
    found = numbers(norm, x)
    assert calls == [((3, 17), 1e-3, offset, mode, False)]
    for one, other in zip(found, numbers(original, x), strict=True):
        torch.testing.assert_close(one, other)


def test_norms_that_torch_has_a_kernel_for_or_that_mix_types(calls: list[Any]) -> None:
    x = torch.randn(3, 8)
    for norm, states in (
        (RMSNorm(8), x),
        (RMSNorm(8), x.bfloat16()),
        (RMSNorm(8, dtype=torch.bfloat16), x),
    ):
        norm(states)
    assert calls == []
    # Gemma's result is of the type of its input, whatever its weight is.
    assert RMSNorm(8, offset=1.0)(x.bfloat16()).dtype == torch.bfloat16
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("key", "changes", "names"),
    [
        ("llama", {}, {"swiglu"}),
        ("gemma", {}, {"geglu", "gemma"}),
        pytest.param(
            "t5", {"feed_forward_proj": "gated-gelu"}, {"geglu"}, marks=t5_takes_attention
        ),
    ],
)
def test_recipes_ask_for_them(
    calls: list[Any], key: str, changes: dict[str, Any], names: set[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.model_schedule.equality import difference

    found = difference(key, {"ckpt_ratio": 0.5, "attn_op_name": "eager"}, **changes)
    assert max(found.values()) < 1e-5, found
    asked = {each.split("_")[0] if isinstance(each, str) else each[3] for each in calls}
    assert asked == names
    calls.clear()
    difference(key, {"kernels": False}, **changes)
    assert calls == []


# --- the kernels themselves ----------------------------------------------------------------------
@needs_liger
@interprets_loops
def test_kernels_in_the_interpreter() -> None:
    found = run("-m", "tests.op.liger_kernels").split()
    assert found[::2] == ["silu", "gelu", "llama", "gemma"]
