"""Kernels of the package liger-kernel: where they are used, and what they are guarded by.

Its functions are called one by one, as its own patches hold for every model of a process. Nothing
of it is imported before the first tensor that it has a kernel for.

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
from slapo.op.cross_entropy import is_graph_kept
from slapo.op.dispatch import is_plain

logger = get_logger()

#: What its kernels compute in float32; others would lose precision.
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Columns that one block of its kernels can hold.
_WIDEST = 65536
#: Activation -> name of the functions for a product with it.
_PRODUCTS = {"silu": "swiglu", "gelu": "geglu"}
#: What is called of the package.
_CALLED = (
    *(f"{name}_{way}" for name in _PRODUCTS.values() for way in ("forward", "backward")),
    "LigerRMSNormFunction",
)


def fits(*tensors: Tensor) -> bool:
    """Whether its kernels take these here: on CUDA, of one shape and type, and it is installed.

    Under a compiler they are not used: that fuses the same operations by itself.

    Parameters
    ----------
    *tensors
        ``(..., columns)``.

    Examples
    --------
    >>> fits(torch.ones(2, 3))
    False
    """
    return _misfit(*tensors) is None and operations() is not None


def check_fits(what: str, *tensors: Tensor) -> None:
    """Refuse where :func:`fits` says no.

    Parameters
    ----------
    what
        The function that was asked for these kernels by name.

    Raises
    ------
    MissingPackageError
        If liger-kernel or triton is not installed.
    ValueError
        If they do not take the tensors.
    """
    if operations() is None:
        raise MissingPackageError(
            f"{what} by 'liger' needs the packages liger-kernel and triton; install them "
            "(pip install 'slapo[kernels]'), or take 'torch'"
        )
    misfit = _misfit(*tensors)
    if misfit is not None:
        raise ValueError(f"{what} by 'liger': {misfit}; take 'torch', or 'auto'")


def _misfit(*tensors: Tensor) -> str | None:
    """Why its kernels do not take these; None where they do."""
    if not is_plain(*tensors):
        return "a compiler, a trace or a kind of tensor that its kernels do not know"
    first = tensors[0]
    if first.device.type != "cuda":
        return f"its kernels run on CUDA, and the tensors are on {first.device.type!r}"
    if first.dtype not in _TYPES:
        return f"its kernels compute in float32, and the tensors are {first.dtype}"
    if not first.numel() or not first.dim() or first.shape[-1] > _WIDEST:
        return f"its kernels take 1 to {_WIDEST} columns, and the shape is {tuple(first.shape)}"
    if any(each.shape != first.shape or each.dtype != first.dtype for each in tensors):
        found = [(tuple(each.shape), each.dtype) for each in tensors]
        return f"its kernels take one shape and type, and the tensors are {found}"
    return None


@functools.cache
def operations() -> Any:
    """``liger_kernel.ops``; None where it or triton is not installed, or it is another version."""
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return None
    try:
        found = importlib.import_module("liger_kernel.ops")
    except Exception as error:
        logger.warning("liger-kernel cannot be imported, torch computes in its place: %s", error)
        return None
    lacking = [name for name in _CALLED if not hasattr(found, name)]
    if lacking:
        logger.warning("liger-kernel has no %s, torch computes in its place", lacking)
    return None if lacking else found


class GatedByLiger(torch.autograd.Function):
    """``act(gate) * up`` for tensors that :func:`fits`; `act` is ``"silu"`` or ``"gelu"``.

    Of its functions rather than its class: the backward pass writes over what it was given.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:  # noqa: D102
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.act = act
        product: Tensor = getattr(operations(), f"{_PRODUCTS[act]}_forward")(gate, up)[2]
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: D102
        refuse_graph(f"{ctx.act}(gate) * up by liger-kernel")
        gate, up = ctx.saved_tensors
        is_shared = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        operands = [_to_write(each, is_shared) for each in (gate, up)]
        backward = getattr(operations(), f"{_PRODUCTS[ctx.act]}_backward")
        of_gate, of_up = backward(*operands, grad.contiguous())
        # Kernels write unseen: who else kept these for a backward pass is to be told.
        torch.autograd.graph.increment_version(operands)
        return of_gate, of_up, None


def _to_write(saved: Tensor, is_shared: bool) -> Tensor:
    """The tensor if nothing else needs its numbers, or a copy."""
    is_needed = is_graph_kept() or is_shared or saved.is_leaf
    return saved.detach().clone() if is_needed else saved.detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMS norm of what :func:`fits`, rounded as Llama's without an offset, as Gemma's with one."""
    mode = "gemma" if offset else "llama"
    # Not in place: the gradient that it is given may be the residual's too.
    output = operations().LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    if output.grad_fn is not None:
        output.grad_fn.register_prehook(_refuse_graph_of_norm)
    return cast(Tensor, output)


def _refuse_graph_of_norm(grads: Any) -> None:
    refuse_graph("an RMS norm by liger-kernel")


def refuse_graph(what: str) -> None:
    """Raise where a gradient is to have a gradient: kernels are no operations of autograd."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the gradient of {what} has no gradient of its own (create_graph=True); schedule the "
            "model with kernels=False where you need one"
        )
