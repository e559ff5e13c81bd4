"""Dropout, residual and norm in one: the plain path, the choice of the kernel, its compilation.

``residual_kernels.py`` compares the kernel with the plain path, in a process of its own.
"""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertOutput

import slapo
from slapo.op import residual
from slapo.op.residual import DenseDropoutAddNorm, dropout_add_norm
from tests.entries import Entries
from tests.op.processes import run
from tests.versions import interprets_loops

#: In a process of its own: Triton reads the variable when it is imported.
KERNELS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/op/residual_kernels.py")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def end_of_block(features: int, hidden: int, p: float = 0.0) -> Any:
    sizes = {"intermediate_size": features, "hidden_size": hidden, "num_attention_heads": 1}
    end = BertOutput(BertConfig(**sizes, hidden_dropout_prob=p))
    nn.init.normal_(end.LayerNorm.weight)
    nn.init.normal_(end.LayerNorm.bias)
    return end


# --- the function --------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 8), (5,), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_plain_path_is_the_modules_one_after_the_other(
    p: float, shape: tuple[int, ...], dtype: torch.dtype, training: bool
) -> None:
    norm, dropout = nn.LayerNorm(shape[-1], 1e-3, dtype=dtype), nn.Dropout(p).train(training)
    nn.init.normal_(norm.weight)
    x, rest = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    inputs, scale = [x, rest, norm.weight, norm.bias], torch.randn(shape, dtype=dtype)
    torch.manual_seed(3)
    wanted = norm(dropout(x) + rest)
    torch.manual_seed(3)
    found = dropout_add_norm(*inputs, p=p, training=training, eps=1e-3)
    assert torch.equal(found, wanted)
    grads, wanted_grads = (torch.autograd.grad(out, inputs, scale) for out in (found, wanted))
    assert all(map(torch.equal, grads, wanted_grads))


def test_mixed_types_promote_as_autocast_makes_them() -> None:
    x, rest, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    assert torch.equal(dropout_add_norm(x, rest, weight), F.layer_norm(x + rest, (8,), weight))
    assert dropout_add_norm(x.bfloat16(), rest, weight).dtype == torch.float32
    assert dropout_add_norm(x.bfloat16(), rest.bfloat16(), weight).dtype == torch.bfloat16
    assert dropout_add_norm(x, rest, weight.bfloat16(), weight).dtype == torch.float32


def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 4), torch.ones(4), r"on \['cpu'\]; .* Pass backend='torch'"),
        (on_cuda(2, 4), torch.ones(4), r"on \['cpu', 'cuda:0'\]"),
        (
            on_cuda(2, 4, dtype=torch.float64),
            on_cuda(4),
            r"of \['torch.float32', 'torch.f",
        ),
        (on_cuda(2, 8193), on_cuda(8193), "got 8193 features"),
        (on_cuda(2, 0), on_cuda(0), "got 0 features"),
    ],
)
def test_tensors_without_a_kernel(
    x: Tensor, weight: Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert residual._unsupported(on_cuda(2, 4), on_cuda(4, dtype=torch.float16), None) is None
    with pytest.raises(ValueError, match=message):
        dropout_add_norm(x, x, weight, backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(slapo.errors.MissingPackageError, match="needs the package 'triton'"):
        dropout_add_norm(x, x, weight, backend="triton")


def test_triton_is_not_imported() -> None:
    code = (
        "import sys, torch, slapo.op\n"
        "slapo.op.DenseDropoutAddNorm(4, 4)(*torch.ones(2, 2, 4))\n"
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    run("-c", code)


# --- the module ----------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_the_one_it_was_made_of(p: float, training: bool) -> None:
    end = end_of_block(6, 10, p).train(training)
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


def test_traced_and_compiled() -> None:
    end = end_of_block(6, 8)
    x, rest = torch.randn(3, 6), torch.randn(3, 8)
    wanted = end(x, rest)
    sch = slapo.create_schedule(DenseDropoutAddNorm.like(end))
    sch.trace()
    assert [node.op for node in sch.mod.graph.nodes].count("call_module") == 3
    assert torch.equal(sch.mod(x, rest), wanted)
    compiled = torch.compile(DenseDropoutAddNorm.like(end), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, rest), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(DenseDropoutAddNorm.like(end)(x, rest), end(x, rest))


#: What is done to the end of a block, and what computes it then.
ENTRIES = Entries("fused_ends.txt", globals())


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_the_kernel_computes_unchanged_children_only(
    title: str, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    monkeypatch.setattr(residual, "_unsupported", lambda *operands: None)

    def tell(change: Any) -> str:
        end, x = DenseDropoutAddNorm.like(end_of_block(6, 8)), torch.ones(2, 8)
        change(end)
        assert not end._is_fused(x, x)  # off by default
        end.backend = "triton"
        assert not end._is_fused(x, x[:1])
        return "the kernel" if end._is_fused(x, x) else "the modules"

    ENTRIES.check(title, tell, update_golden)


# --- the kernel ----------------------------------------------------------------------------------
@needs_triton
@interprets_loops
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["gradient", pytest.param("", marks=pytest.mark.wide)])
def test_the_kernel_by_the_interpreter(part: str) -> None:
    assert "skipped" not in run(*KERNELS, "-k", part, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    run(*KERNELS, TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("absent", [(), ("bias_ptr", "seed_ptr")])
def test_compiled_ahead_of_time(
    kernel: str, arch: int, absent: tuple[str, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    """The interpreter accepts more than the compiler does. No GPU takes part."""
    import triton
    from triton.backends.compiler import GPUTarget

    from slapo.op import residual_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(residual_triton, f"{kernel}_kernel")
    constants = {"BLOCK": 1024, **{n: None for n in absent if n in function.arg_names}}
    special = {"seed_ptr": "*i64", "mean_ptr": "*fp32", "scale_ptr": "*fp32"}
    special |= {"p": "fp32", "factor": "fp32", "eps": "fp32", "size": "i32", "rows": "i32"}
    special |= {"weight_parts_ptr": "*fp32", "bias_parts_ptr": "*fp32"}
    signature = {n: special.get(n, "*bf16") for n in function.arg_names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = triton.compiler.ASTSource(function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"]
