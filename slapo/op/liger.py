"""Kernels of the package liger-kernel, and the tensors that they support.

Functions are called individually, because the package's own patches change every model of a
process. It is imported for the first tensor with a kernel.

Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, cast

import torch
from torch import Tensor

from slapo.errors import MissingPackageError
from slapo.logger import get_logger
from slapo.op.dispatch import is_graph_kept, is_plain, refuse_graph

logger = get_logger()

#: Dtypes that the kernels compute in float32; others would lose precision.
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Maximum number of columns in one block of the kernels.
_WIDEST = 65536
#: Activation -> name of the functions for a product with it.
_PRODUCTS = {"silu": "swiglu", "gelu": "geglu"}
_INSTEAD = "schedule the model with kernels=False"
#: Functions that this module calls.
_CALLED = (
    *(f"{name}_{way}" for name in _PRODUCTS.values() for way in ("forward", "backward")),
    "LigerRMSNormFunction",
)


def fits(*tensors: Tensor) -> bool:
    """Return True if the package is installed and has kernels for these tensors."""
    return _misfit(*tensors) is None and operations() is not None


def check_fits(what: str, *tensors: Tensor) -> None:
    """Raise for unsupported tensors, if the caller named the package explicitly."""
    if operations() is None:
        raise MissingPackageError(
            f"{what} by 'liger' needs the packages liger-kernel and triton; install them (pip "
            "install 'slapo[kernels]'), or use 'torch'"
        )
    misfit = _misfit(*tensors)
    if misfit is not None:
        raise ValueError(f"{what} by 'liger': {misfit}; use 'torch', or 'auto'")


def _misfit(*tensors: Tensor) -> str | None:
    """Reason why the kernels do not support these tensors, or None."""
    if not is_plain(*tensors):
        return "its kernels do not support compilers, tracing or this kind of tensor"
    first = tensors[0]
    if first.device.type != "cuda":
        return f"its kernels run on CUDA, but the tensors are on {first.device.type!r}"
    if first.dtype not in _TYPES:
        return f"its kernels compute in float32, but the tensors are {first.dtype}"
    if not first.numel() or not first.dim() or first.shape[-1] > _WIDEST:
        return f"its kernels take 1 to {_WIDEST} columns, but the shape is {tuple(first.shape)}"
    if any(each.shape != first.shape or each.dtype != first.dtype for each in tensors):
        found = [(tuple(each.shape), each.dtype) for each in tensors]
        return f"its kernels need one shape and dtype, but the tensors are {found}"
    return None


@functools.cache
def operations() -> Any:
    """Import ``liger_kernel.ops``; None if it or triton is missing or the version differs."""
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return None
    try:
        found = importlib.import_module("liger_kernel.ops")
    except Exception as error:
        logger.warning("liger-kernel cannot be imported, using torch instead: %s", error)
        return None
    lacking = [name for name in _CALLED if not hasattr(found, name)]
    if lacking:
        logger.warning("liger-kernel has no %s, using torch instead", lacking)
    return None if lacking else found


class GatedByLiger(torch.autograd.Function):
    """``act(gate) * up`` for ``"silu"`` or ``"gelu"``, for tensors that :func:`fits` accepts."""

    # Calls the functions: the backward pass of the package's class always overwrites its inputs.

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.act = act
        product: Tensor = getattr(operations(), f"{_PRODUCTS[act]}_forward")(gate, up)[2]
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_graph(f"{ctx.act}(gate) * up by liger-kernel", _INSTEAD)
        gate, up = ctx.saved_tensors
        is_shared = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        operands = [_to_write(each, is_shared) for each in (gate, up)]
        backward = getattr(operations(), f"{_PRODUCTS[ctx.act]}_backward")
        of_gate, of_up = backward(*operands, grad.contiguous())
        # Autograd does not see kernel writes; other functions may have saved these tensors too.
        torch.autograd.graph.increment_version(operands)
        return of_gate, of_up, None


def _to_write(saved: Tensor, is_shared: bool) -> Tensor:
    """Return the tensor, or a copy if its values are still needed."""
    # The kernels write the gradients over their operands. Two views of one storage may overlap;
    # leaves belong to the caller.
    is_needed = is_graph_kept() or is_shared or saved.is_leaf
    return saved.detach().clone() if is_needed else saved.detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Compute the RMS norm; rounded as Llama's without an offset, as Gemma's with one."""
    mode = "gemma" if offset else "llama"
    # Not in place: the incoming gradient may also be the residual's.
    output = operations().LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    if output.grad_fn is not None:
        # Checked where its backward pass starts, since the package's function cannot be changed.
        output.grad_fn.register_prehook(
            lambda grads: refuse_graph("an RMS norm by liger-kernel", _INSTEAD)
        )
    return cast(Tensor, output)
