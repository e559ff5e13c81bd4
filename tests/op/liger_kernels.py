"""Kernels of liger-kernel without a GPU: run by Triton's interpreter, or compiled for one.

    python -m tests.op.liger_kernels interpret
    python -m tests.op.liger_kernels compile FOLDER

A process of its own, as Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo.op import liger
from slapo.op.mlp import gated_gelu, gated_silu

#: Of prime sizes, of one column, and as wide as models have them.
SHAPES = [(3, 5, 17), (7, 1), (1, 64), (2, 1376)]


def take_all() -> None:
    """Have the kernels take what they would on CUDA."""
    liger._misfit = lambda *tensors: None


def norm_of_llama(x: Tensor, weight: Tensor) -> Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, None, 1e-3).to(x.dtype)


def norm_of_gemma(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), 1e-3).to(x.dtype)


#: Name -> function, reference, whether the second operand is a weight.
FUNCTIONS: dict[str, tuple[Any, Any, bool]] = {
    "silu": (gated_silu, lambda gate, up: F.silu(gate) * up, False),
    "gelu": (gated_gelu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, False),
    "llama": (lambda x, w: liger.rms_norm(x, w, 1e-3, 0.0), norm_of_llama, True),
    "gemma": (lambda x, w: liger.rms_norm(x, w, 1e-3, 1.0), norm_of_gemma, True),
}


def interpret() -> None:
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    # What the interpreter lacks, and a compiler has: numbers as scalars, and functions of CUDA.
    convert = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
    take_all()
    for name, (function, reference, has_weight) in FUNCTIONS.items():
        # Not bfloat16: the interpreter multiplies its bits as integers.
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
            for shape in SHAPES:
                first = (3 * torch.randn(shape)).to(dtype).requires_grad_()
                second = torch.randn(shape[-1:] if has_weight else shape).to(dtype).requires_grad_()
                compare(function, reference, (first, second), tolerance)
        print(name, "equal", flush=True)


def compare(function: Any, reference: Any, inputs: tuple[Tensor, ...], tolerance: float) -> None:
    kept = [each.detach().clone() for each in inputs]
    found, wanted = function(*inputs), reference(*inputs)
    assert found.dtype == wanted.dtype
    assert "Liger" in type(found.grad_fn).__name__
    grad = torch.randn_like(wanted)
    grads = torch.autograd.grad(found, inputs, grad)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad)
    for one, other in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(one, other) for one, other in zip(inputs, kept, strict=True))


def compile_all() -> None:
    """The launches that our functions make, with their arguments, as code for each architecture."""
    take_all()
    with launches() as made:
        for name, (function, _, has_weight) in FUNCTIONS.items():
            for dtype in (torch.float32, torch.bfloat16):
                # Short rows of many heads take other kernels of the norms than wide ones.
                for shape in [(2, 1376), *([(1 << 15, 128)] if has_weight else [])]:
                    first = torch.zeros(shape, dtype=dtype).requires_grad_()
                    second = first.detach()[0].clone() if has_weight else torch.zeros_like(first)
                    made.clear()
                    function(first, second.requires_grad_()).sum().backward()
                    assert len(made) == 2, [kernel.__name__ for kernel, *_ in made]
                    for kernel, arguments, options in made:
                        compile_one(name, kernel, arguments, options)


@contextmanager
def launches() -> Iterator[list[tuple[Any, dict[str, Any], dict[str, Any]]]]:
    """What is launched while the block runs, in place of being run."""
    from triton.runtime.jit import JITFunction

    made: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def note(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False))
        given.update({name: kwargs.pop(name) for name in self.arg_names if name in kwargs})
        made.append((self, given, kwargs))

    run, JITFunction.run = JITFunction.run, note
    try:
        yield made
    finally:
        JITFunction.run = run


def compile_one(name: str, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    signature, constants = {}, {}
    for number, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        else:
            signature[parameter.name] = mangle_type(value)
    source = ASTSource(kernel, signature, constants)
    kind = next(each.dtype for each in arguments.values() if isinstance(each, Tensor))
    for arch in (70, 80, 90):
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        size, shared = len(made.asm["cubin"]), made.metadata.shared
        print(name, kernel.__name__, kind, f"sm_{arch}", size, shared, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "compile":
        os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
        compile_all()
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        interpret()
