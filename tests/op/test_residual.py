"""Bias, dropout, residual and norm in one: the reference, the choice, what kernels compile to.

The kernels themselves run in ``residual_kernels.py``: by Triton's interpreter, or on CUDA.
"""

from __future__ import annotations

import copy
import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import slapo
from slapo.op import residual
from slapo.op.norm import RMSNorm
from slapo.op.residual import DenseDropoutAddNorm, chosen, dropout_add_norm

ROOT = Path(__file__).parent.parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
SLOW = pytest.mark.slow
EXACT = {"rtol": 0.0, "atol": 0.0}
HALVES = (torch.float16, torch.bfloat16)


class End(nn.Module):
    """As ``BertOutput`` of Transformers."""

    def __init__(self, features: int, hidden: int, p: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(features, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(p)
        nn.init.normal_(self.LayerNorm.weight)
        nn.init.normal_(self.LayerNorm.bias)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


def operands(shape: tuple[int, ...], kind: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """``x, residual, weight, norm_bias, bias``."""
    made = [torch.randn(shape), torch.randn(shape)]
    made += [torch.randn(shape[-1:]) for _ in range(3)]
    found: list[Any] = [each.to(dtype).requires_grad_() for each in made]
    if kind == "rms":
        found[3] = None
    return found


def unfused(given: list[Any], kind: str, p: float, eps: float) -> Tensor:
    """By modules, one after the other."""
    x, rest, weight, norm_bias, bias = given
    hidden, dtype = len(weight), weight.dtype
    norm: Any = RMSNorm(hidden, eps, dtype=dtype)
    if kind == "layer":
        norm = nn.LayerNorm(hidden, eps, dtype=dtype)
        norm.bias = None if norm_bias is None else nn.Parameter(norm_bias.detach())
    del norm.weight  # in its place the operand itself, for its gradient
    norm.weight = weight
    if norm_bias is not None:
        del norm.bias
        norm.bias = norm_bias
    return norm(nn.Dropout(p)(x if bias is None else x + bias) + rest)


# --- the reference -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", residual.KINDS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 8), (7, 1), (5,), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_the_reference_is_the_modules_one_after_the_other(
    kind: str, p: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = operands(shape, kind, dtype)
    torch.manual_seed(3)
    wanted = unfused(given, kind, p, 1e-3)
    torch.manual_seed(3)
    x, rest, weight, norm_bias, bias = given
    found = dropout_add_norm(x, rest, weight, norm_bias, bias=bias, p=p, eps=1e-3, kind=kind)
    # Bit by bit; but RMSNorm turns doubles into float32.
    near = {"rtol": 1e-5, "atol": 1e-5} if (dtype, kind) == (torch.float64, "rms") else EXACT
    torch.testing.assert_close(found, wanted, **near)
    inputs = [each for each in given if each is not None]
    scale = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, inputs, scale)
    grads = torch.autograd.grad(found, inputs, scale)
    torch.testing.assert_close(grads, wanted_grads, **near)


def test_what_is_left_out() -> None:
    x, rest, weight, norm_bias, _ = operands((3, 8), "layer")
    wanted = F.layer_norm(x + rest, (8,), weight)
    assert torch.equal(dropout_add_norm(x, rest, weight), wanted)
    out, total = dropout_add_norm(x, rest, weight, norm_bias, return_sum=True)
    assert torch.equal(total, x + rest)
    assert torch.equal(out, F.layer_norm(total, (8,), weight, norm_bias))
    still = dropout_add_norm(x, rest, weight, p=0.9, training=False)
    assert torch.equal(still, wanted)
    assert torch.equal(dropout_add_norm(x, rest, weight, p=1.0), F.layer_norm(rest, (8,), weight))


@pytest.mark.parametrize("kind", residual.KINDS)
def test_gradients_by_differences(kind: str) -> None:
    given = [each for each in operands((3, 5), kind, torch.float64) if each is not None]

    def run(x: Tensor, rest: Tensor, weight: Tensor, *biases: Tensor) -> Any:
        norm_bias = biases[0] if kind == "layer" else None
        return dropout_add_norm(
            x, rest, weight, norm_bias, bias=biases[-1], kind=kind, return_sum=True
        )

    assert torch.autograd.gradcheck(run, given)


def test_mixed_types_promote_as_autocast_makes_them() -> None:
    x, rest, weight, norm_bias, _ = operands((3, 8), "layer")
    out, total = dropout_add_norm(x.bfloat16(), rest, weight, norm_bias, return_sum=True)
    assert out.dtype == total.dtype == torch.float32
    halves = (x.bfloat16(), rest.bfloat16())
    assert dropout_add_norm(*halves, weight, norm_bias).dtype == torch.bfloat16
    assert dropout_add_norm(*halves, weight, kind="rms").dtype == torch.float32
    assert dropout_add_norm(x, rest, weight.bfloat16()).dtype == torch.float32


# --- errors, and the choice ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residual": torch.ones(3, 4)}, r"residual of shape \(3, 4\) do not fit"),
        ({"x": torch.tensor(1.0), "residual": torch.tensor(1.0)}, r"x of shape \(\)"),
        ({"weight": torch.ones(3)}, r"weight of shape \(3,\) does not fit x"),
        ({"norm_bias": torch.ones(1)}, r"norm_bias of shape \(1,\) does not fit x"),
        ({"bias": torch.ones(2, 4)}, r"bias of shape \(2, 4\) does not fit x"),
        ({"bias": torch.ones(4, device="meta")}, "move them to one device"),
        ({"residual": torch.ones(2, 4, dtype=torch.int64)}, r"\['residual'\] are no floating"),
        ({"p": 1.5}, "p is 1.5; pass a probability"),
        ({"kind": "batch"}, r"no norm is called 'batch'; pass one of \['layer', 'rms'\]"),
        ({"kind": "rms", "norm_bias": torch.ones(4)}, "an RMS norm has no bias"),
        ({"backend": "cuda"}, r"by 'cuda' is not known; pass one of \['auto'"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], said: str) -> None:
    given = {"x": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4)}
    with pytest.raises(ValueError, match=said):
        dropout_add_norm(**{**given, **changes})


def test_a_kernel_by_name_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4)
    if HAS_TRITON:
        with pytest.raises(ValueError, match="runs on CUDA only, and x is on cpu; take 'torch'"):
            dropout_add_norm(x, x, torch.ones(4), backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(slapo.errors.MissingPackageError, match="needs the package 'triton'"):
        dropout_add_norm(x, x, torch.ones(4), backend="triton")
    assert dropout_add_norm(x, x, torch.ones(4)).shape == x.shape


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors under fakes lie on CUDA, of which torch is told that there is some."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def on_card(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([on_card(2, 4)], ""),
        ([on_card(2, 4), on_card(4, dtype=torch.float16)], ""),
        ([on_card(2, 8192)], ""),
        ([on_card(2, 4, dtype=torch.float64)], "takes torch.bfloat16.* and was given torch.floa"),
        ([on_card(2, 8193)], "takes 1 to 8192 features, and x has 8193"),
        ([on_card(2, 0)], "takes 1 to 8192 features, and x has 0"),
        ([on_card(2, 4, dtype=torch.bfloat16)], r"from compute capability \(8, 0\) on"),
    ],
)
def test_what_kernels_take(a_card: None, tensors: list[Tensor], said: str) -> None:
    if said:
        with pytest.raises(ValueError, match=said):
            chosen("triton", tensors)
        assert chosen("auto", tensors) == "torch"
    else:
        assert chosen("triton", tensors) == "triton"
    assert chosen("torch", tensors) == "torch"


def test_triton_is_not_imported() -> None:
    code = (
        "import sys, torch, slapo.op\n"
        "x = torch.ones(2, 4)\n"
        "slapo.op.dropout_add_norm(x, x, torch.ones(4))\n"
        "slapo.op.DenseDropoutAddNorm(4, 4)(x, x)\n"
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- the module ----------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_the_one_it_was_made_of(p: float, training: bool) -> None:
    end = End(6, 10, p).train(training)
    new = DenseDropoutAddNorm.like(end)
    assert new.training is training
    assert [*new.state_dict()] == [*end.state_dict()]
    assert [n for n, _ in new.named_parameters()] == [n for n, _ in end.named_parameters()]
    assert all(new.get_submodule(name) is child for name, child in end.named_children())
    x, rest = torch.randn(3, 5, 6), torch.randn(3, 5, 10)
    for each in (new, copy.deepcopy(new)):
        results = []
        for module in (end, each):
            torch.manual_seed(3)
            module.zero_grad()
            out = module(x, rest)
            out.square().sum().backward()
            results.append([out, *(p.grad for p in module.parameters())])
        assert all(map(torch.equal, *results))


def test_the_module_by_itself() -> None:
    module = DenseDropoutAddNorm(4, 8, p=0.2, eps=1e-3, dtype=torch.bfloat16)
    assert (module.dropout.p, module.LayerNorm.eps) == (0.2, 1e-3)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert module(x, torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.ReLU()])
def test_what_is_no_such_module(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"DenseDropoutAddNorm.like\("):
        DenseDropoutAddNorm.like(module)


def fused(module: DenseDropoutAddNorm, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the module would call the kernel, of tensors that it takes."""
    monkeypatch.setattr(residual, "_refusal", lambda operands: None)
    x = torch.ones(2, 8)
    return module._is_fused(x, x)


def test_the_kernel_is_for_children_that_do_no_more_than_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made() -> Any:
        return DenseDropoutAddNorm.like(End(6, 8))

    assert fused(made(), monkeypatch)
    module = made()  # as of a row layer
    module.dense.register_forward_hook(lambda module, args, output: output)
    assert fused(module, monkeypatch)
    for name in ("LayerNorm", "dropout"):
        module = made()
        module.get_submodule(name).register_forward_hook(lambda module, args, output: None)
        assert not fused(module, monkeypatch)
        module = made()
        module.get_submodule(name).forward = lambda x: x
        assert not fused(module, monkeypatch)
        sch = slapo.create_schedule(made())
        sch[name].checkpoint()
        assert not fused(sch.mod, monkeypatch)
        module = made()
        setattr(module, name, nn.Identity())
        assert not fused(module, monkeypatch)
    module = made()
    module.LayerNorm = nn.LayerNorm(8, elementwise_affine=False)
    assert not fused(module, monkeypatch)
    module.LayerNorm = nn.LayerNorm((2, 8))
    assert not fused(module, monkeypatch)
    module = made()
    assert not module._is_fused(torch.ones(2, 8), torch.ones(1, 8))
    module.LayerNorm = nn.LayerNorm(8, bias=False)
    assert fused(module, monkeypatch)
    module.backend = "torch"
    assert not fused(module, monkeypatch)


def test_traced_and_compiled() -> None:
    end = End(6, 8)
    x, rest = torch.randn(3, 6), torch.randn(3, 8)
    wanted = end(x, rest)
    sch = slapo.create_schedule(DenseDropoutAddNorm.like(end))
    sch.trace()
    assert [node.op for node in sch.mod.graph.nodes].count("call_module") == 3
    assert torch.equal(sch.mod(x, rest), wanted)
    compiled = torch.compile(DenseDropoutAddNorm.like(end), fullgraph=True)
    torch.testing.assert_close(compiled(x, rest), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(DenseDropoutAddNorm.like(end)(x, rest), end(x, rest))


# --- kernels -------------------------------------------------------------------------------------
@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["one_feature or left_out", pytest.param("", marks=SLOW)])
def test_kernels_by_the_interpreter(part: str) -> None:
    """In a process of its own: Triton asks how it is to run when it is imported."""
    said = run_kernels({**os.environ, "TRITON_INTERPRET": "1"}, "-k", part)
    assert "skipped" not in said


@needs_triton
@pytest.mark.gpu
def test_kernels_on_a_card() -> None:
    run_kernels({**os.environ, "TRITON_INTERPRET": "0"})


def run_kernels(env: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        [*command, "tests/op/residual_kernels.py"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that compiles, with a cache of its own."""
    pytest.importorskip("triton")
    from tests.op import residual_figures

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return residual_figures


def check_figures(module: Any, case: Any) -> dict[str, Any]:
    """What must hold on any card."""
    from slapo.op.residual_triton import residents_of

    found = module.figures(case)
    # The longest rows take all the registers that there are.
    assert found.spilled <= (32 if case.hidden > 4096 else 0), (case, found)
    assert found.shared <= module.SHARED, (case, found)
    if case.kernel == "backward":
        programs = residents_of(found.warps)[0]
        assert found.resident >= programs * found.warps, (case, found)
        assert programs * found.shared <= module.SHARED, (case, found)
    # Where rows begin at multiples of 16 bytes: 16 at a time, but of less than a warp's rows.
    assert found.widest_load == (16 if case.hidden > 256 or case.dtype == "fp32" else 8)
    return {**vars(case), **vars(found)}


@needs_triton
@pytest.mark.parametrize("arch", [70, 80, 90])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_compiled_ahead_of_time(figures: Any, arch: int, kernel: str) -> None:
    for dtype in figures.ARCHITECTURES[arch]:
        check_figures(figures, figures.Case(kernel, "layer", dtype, 1024, arch))


@needs_triton
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_what_is_left_out_is_compiled_away(figures: Any, kernel: str) -> None:
    case = figures.Case(kernel, "layer", "bf16", 1000, 80)
    least = {
        "forward": ["bias_ptr", "norm_bias_ptr", "seed_ptr", "sum_ptr", "mean_ptr", "scale_ptr"],
        "backward": ["sum_grad_ptr", "seed_ptr", "x_grad_ptr", "bias_parts_ptr"],
    }
    small = figures.compiled(case, absent=least[kernel])
    assert small.asm["cubin"]
    assert len(small.asm["ptx"]) < len(figures.compiled(case).asm["ptx"]) / 1.5
    assert "mul.hi.u32" not in small.asm["ptx"]


@needs_triton
@SLOW
def test_the_table_of_figures(figures: Any, update_golden: bool) -> None:
    """Registers are the assembler's affair, and so compared for the version that wrote them.

    Of two sizes, one of them the longest: all of them take minutes.
    """
    import triton

    cases = list(figures.cases())
    if update_golden:
        figures.write([check_figures(figures, case) for case in cases])
    said, *lines = figures.TABLE.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    table = {tuple(row[key] for key in vars(cases[0])): row for row in rows}
    assert list(table) == [tuple(map(str, vars(case).values())) for case in cases]
    for case in cases:
        if case.hidden in (768, max(figures.HIDDEN)):
            found = {name: str(value) for name, value in check_figures(figures, case).items()}
            if f"triton {triton.__version__}:" in said:
                assert table[tuple(map(str, vars(case).values()))] == found
