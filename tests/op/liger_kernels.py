"""Kernels of liger-kernel without a GPU: ``python -m tests.op.liger_kernels``.

A process of its own, as Triton decides when it is imported whether it interprets.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo.op import liger
from slapo.op.mlp import gated_gelu, gated_silu

#: Of prime sizes, of one column, and as wide as models have them.
SHAPES = [(3, 5, 17), (7, 1), (1, 64), (2, 1376)]


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
    liger._misfit = lambda *tensors: None  # they take what they would on CUDA
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


if __name__ == "__main__":
    torch.manual_seed(0)
    os.environ["TRITON_INTERPRET"] = "1"
    interpret()
