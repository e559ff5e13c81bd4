"""What ends each half of a transformer's layer: bias, dropout, residual and norm in one."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.errors import MissingPackageError
from slapo.hooks import has_forward_hooks
from slapo.op.plain import is_plain

BACKENDS = ("auto", "torch", "triton")
KINDS = ("layer", "rms")
#: What the kernels of Triton take; a row lies in the registers of one program.
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HIDDEN = 8192


@overload
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    kind: str = "layer",
    return_sum: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    kind: str = "layer",
    return_sum: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    kind: str = "layer",
    return_sum: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``norm(residual + dropout(x + bias))``, as one kernel each way on CUDA.

    Parameters
    ----------
    x
        ``(..., hidden)``: what a layer adds to the residual stream.
    residual
        Of the same shape.
    weight, norm_bias
        ``(hidden,)``: of the norm. An RMS norm has no bias.
    bias
        ``(hidden,)``: of the layer that made `x`, where that has not added it.
    p
        Probability that an element is zeroed, from 0 to 1.
    training
        Whether any is.
    eps
        Added to the variance, or to the mean of squares.
    kind
        ``"layer"``, as ``torch.nn.LayerNorm``; or ``"rms"``, as :class:`slapo.op.RMSNorm`.
    return_sum
        Whether to return ``residual + dropout(x + bias)`` too, which is the residual of the next
        block in layers that normalise first.
    backend
        ``"torch"``: operation by operation. ``"triton"``: kernels of this package, on CUDA, for
        float32 and half precision, and up to 8192 features. ``"auto"``: these where they can be
        had, else torch's; within ``torch.compile``, which makes such a kernel itself, torch's too.

    Returns
    -------
    Tensor or tuple of Tensor
        The norm, ``(..., hidden)``; with `return_sum` a pair of it and the sum.

    Raises
    ------
    ValueError
        For shapes that do not fit, or what the named backend cannot do.
    MissingPackageError
        If it is not installed.

    Notes
    -----
    Bytes that cross memory for an element of half precision in training, with dropout: operation
    by operation 15 forward and 11 backward (15 where the norm's backward is two kernels, as on
    CUDA), by the kernels 8 and 8. A `bias` adds 4 and 2 to the former, and nothing to the latter.
    Kept for the backward pass are 3 bytes and 2: which elements are zeroed is not kept. It follows
    from one number out of torch's generator on the device, so random states that a schedule forks,
    and those that a checkpoint puts back, hold. They are others than ``F.dropout`` would zero.

    Examples
    --------
    >>> x, residual = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    >>> out = dropout_add_norm(x, residual, torch.ones(4), torch.zeros(4))
    >>> torch.allclose(out, F.layer_norm(residual + x, (4,)))
    True
    """
    what = "dropout_add_norm"
    _check(what, x, residual, {"weight": weight, "norm_bias": norm_bias, "bias": bias})
    _check_settings(what, p, kind, norm_bias, backend)
    operands = [each for each in (x, residual, weight, norm_bias, bias) if each is not None]
    p = p if training else 0.0
    if chosen(backend, operands) == "triton":
        return _by_triton(x, residual, weight, norm_bias, bias, p, eps, kind, return_sum)
    out, total = _by_torch(x, residual, weight, norm_bias, bias, p, eps, kind)
    return (out, total) if return_sum else out


def chosen(backend: str, operands: list[Tensor]) -> str:
    """``"torch"`` or ``"triton"``: what runs for these operands.

    Parameters
    ----------
    backend
        As for :func:`dropout_add_norm`.
    operands
        Of one dtype or several; the first has the features.

    Raises
    ------
    ValueError
        If kernels are asked for by name, and cannot take these.
    MissingPackageError
        If they are, and Triton is not installed.

    Examples
    --------
    >>> chosen("auto", [torch.ones(2, 4)])
    'torch'
    """
    if backend == "torch":
        return backend
    if backend == "auto" and not is_plain(*operands):
        return "torch"
    error = _refusal(operands)
    if error is not None and backend == "triton":
        raise error
    return "triton" if error is None else "torch"


def _refusal(operands: list[Tensor]) -> Exception | None:
    """Why the kernels cannot take these; None if they can."""
    x = operands[0]
    types = {each.dtype for each in operands}
    # The interpreter, by which the kernels are tested.
    is_interpreted = x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        return MissingPackageError(
            "dropout_add_norm by 'triton' needs the package 'triton', which is not installed; "
            "install it, or take 'torch'"
        )
    if (x.device.type != "cuda" or torch.version.hip) and not is_interpreted:
        return ValueError(
            f"dropout_add_norm by 'triton' runs on CUDA only, and x is on {x.device}; take "
            "'torch' elsewhere"
        )
    if not types.issubset(_TYPES):
        return ValueError(
            f"dropout_add_norm by 'triton' takes {_named(_TYPES)}, and was given "
            f"{_named(types)}; take 'torch'"
        )
    if not 0 < x.shape[-1] <= _MAX_HIDDEN:
        return ValueError(
            f"dropout_add_norm by 'triton' takes 1 to {_MAX_HIDDEN} features, and x has "
            f"{x.shape[-1]}; take 'torch'"
        )
    return None if is_interpreted else _refusal_of_device(x, types)


def _refusal_of_device(x: Tensor, types: set[torch.dtype]) -> Exception | None:
    least = (8, 0) if torch.bfloat16 in types else (7, 0)
    capability = torch.cuda.get_device_capability(x.device)
    if capability >= least:
        return None
    return ValueError(
        f"dropout_add_norm by 'triton' takes {_named(types)} from compute capability {least} on, "
        f"and {x.device} has {capability}; take 'torch'"
    )


def _named(types: Any) -> str:
    return ", ".join(sorted(str(each) for each in types))


def _check(what: str, x: Tensor, residual: Tensor, vectors: dict[str, Tensor | None]) -> None:
    if x.dim() == 0 or x.shape != residual.shape:
        raise ValueError(
            f"{what}: x of shape {tuple(x.shape)} and residual of shape {tuple(residual.shape)} do "
            "not fit; pass two of (..., hidden)"
        )
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{what}: {name} of shape {tuple(vector.shape)} does not fit x of shape "
                f"{tuple(x.shape)}; pass one number for each of its {x.shape[-1]} features"
            )
    given = {"x": x, "residual": residual, **vectors}
    devices = {name: str(each.device) for name, each in given.items() if each is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{what}: tensors lie on {devices}; move them to one device")
    integers = [n for n, t in given.items() if t is not None and not t.is_floating_point()]
    if integers:
        raise ValueError(f"{what}: {integers} are no floating-point numbers; cast them")


def _check_settings(what: str, p: float, kind: str, norm_bias: Tensor | None, backend: str) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{what}: p is {p}; pass a probability from 0 to 1")
    if kind not in KINDS:
        raise ValueError(f"{what}: no norm is called {kind!r}; pass one of {list(KINDS)}")
    if kind == "rms" and norm_bias is not None:
        raise ValueError(f"{what}: an RMS norm has no bias; leave norm_bias out")
    if backend not in BACKENDS:
        raise ValueError(f"{what} by {backend!r} is not known; pass one of {list(BACKENDS)}")


def _by_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    p: float,
    eps: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The reference: the norm and the sum."""
    total = F.dropout(x if bias is None else x + bias, p) + residual
    shape, precise = total.shape[-1:], torch.promote_types(total.dtype, torch.float32)
    if kind == "rms":  # rounded where RMSNorm rounds
        return weight * F.rms_norm(total.to(precise), shape, None, eps).to(total.dtype), total
    # The norm takes parameters of the type of the sum, or of a wider one.
    weight = weight.to(torch.promote_types(weight.dtype, total.dtype))
    norm_bias = None if norm_bias is None else norm_bias.to(weight.dtype)
    return F.layer_norm(total, shape, weight, norm_bias, eps), total


def _by_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    p: float,
    eps: float,
    kind: str,
    return_sum: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm, and the sum if it is asked for."""
    from slapo.op import residual_triton as kernels  # Triton takes a second to import

    sum_type = torch.promote_types(x.dtype, residual.dtype)
    if bias is not None:
        sum_type = torch.promote_types(sum_type, bias.dtype)
    out_type = sum_type
    if kind == "rms":
        out_type = torch.promote_types(sum_type, weight.dtype)
    elif x.is_cuda and torch.is_autocast_enabled("cuda"):
        out_type = torch.float32  # as torch's norm, which autocast runs so
    settings = kernels.Settings(
        p=float(p),
        eps=eps,
        is_rms=kind == "rms",
        sum_type=sum_type,
        out_type=out_type,
        returns_sum=return_sum,
        is_training=torch.is_grad_enabled(),
    )
    out, total = kernels.dropout_add_norm(x, residual, weight, norm_bias, bias, settings)
    return out if total is None else (out, total)


class DenseDropoutAddNorm(nn.Module):
    """``LayerNorm(dropout(dense(x)) + residual)``: what ends each half of a layer of BERT.

    All after `dense` is one kernel each way on CUDA, by :func:`dropout_add_norm`; the bias of
    `dense` stays with its product, which adds it for nothing. Where something else is to happen
    at a child, by a hook, a wrapper or another class in its place, each is called as it is, and so
    they are on other devices, in a trace and within ``torch.compile``.

    Parameters
    ----------
    in_features
        Of the input of `dense`.
    hidden_size
        Of its output, and of the residual.
    p
        Probability that an element of that output is zeroed in training.
    eps
        Of the norm.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    backend : str
        As for :func:`dropout_add_norm`.

    Examples
    --------
    >>> block = DenseDropoutAddNorm(4, 8)
    >>> block(torch.ones(2, 3, 4), torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    backend = "auto"

    def __init__(
        self,
        in_features: int,
        hidden_size: int,
        p: float = 0.1,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dense: nn.Module = nn.Linear(in_features, hidden_size, device=device, dtype=dtype)
        self.LayerNorm: nn.Module = nn.LayerNorm(hidden_size, eps, device=device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(p)

    @classmethod
    def like(cls, module: nn.Module) -> DenseDropoutAddNorm:
        """The same block with the same children, under the same names.

        Parameters
        ----------
        module
            With children ``dense``, ``LayerNorm`` and ``dropout``, and nothing else, such as
            Transformers' ``BertOutput``.

        Raises
        ------
        ValueError
            If it has others, or parameters of its own.

        Examples
        --------
        >>> block = DenseDropoutAddNorm(4, 8)
        >>> DenseDropoutAddNorm.like(block).dense is block.dense
        True
        """
        children = dict(module.named_children())
        own = [*module._parameters, *module._buffers]
        own += ["forward"] if "forward" in vars(module) else []
        if sorted(children) != ["LayerNorm", "dense", "dropout"] or own:
            raise ValueError(
                f"DenseDropoutAddNorm.like({type(module).__name__}): its children are "
                f"{sorted(children)}, and what is its own {own}; pass a module of dense, "
                "dropout and LayerNorm alone"
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, child in children.items():  # in their order, which is that of the parameters
            new.add_module(name, child)
        new.training = module.training
        return new

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """``(..., in_features)`` and the residual ``(..., hidden_size)`` -> the latter."""
        states: Tensor = self.dense(hidden_states)
        norm, dropout = self.LayerNorm, self.dropout
        if not self._is_fused(states, input_tensor):
            return cast(Tensor, norm(dropout(states) + input_tensor))
        assert isinstance(norm, nn.LayerNorm)
        assert isinstance(dropout, nn.Dropout)
        return dropout_add_norm(
            states,
            input_tensor,
            norm.weight,
            norm.bias,
            p=dropout.p,
            training=dropout.training,
            eps=norm.eps,
            backend="triton",
        )

    def _is_fused(self, states: Tensor, residual: Tensor) -> bool:
        """Whether one kernel does the same as the children."""
        norm = self.LayerNorm
        if torch.compiler.is_compiling():
            return False
        if not (_is_as_made(norm, nn.LayerNorm) and _is_as_made(self.dropout, nn.Dropout)):
            return False
        operands = [states, residual, *norm.parameters()]
        # Of others, as a trace gives, nothing may be asked.
        if not all(isinstance(each, Tensor) for each in operands):
            return False
        has_weight = len(operands) > 2 and operands[2].shape == states.shape[-1:]
        if not has_weight or states.shape != residual.shape:
            return False
        return chosen(self.backend, operands) == "triton"


def _is_as_made(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether calling the module does what its class does, and no more.

    Engines that gather parameters where they are used do so by hooks, or by another ``forward``.
    """
    forward = getattr(module.forward, "__func__", None)
    return type(module) is cls and forward is cls.forward and not has_forward_hooks(module)
