"""Table of operators: spellings, defaults, and arguments to ignore."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: arguments that are compared only if a pattern states them
FREE = frozenset({"p", "training", "dropout_p"})
#: arguments that are never compared
IGNORED = frozenset({"inplace", "_stacklevel", "cudnn_enable"})
#: size arguments, compared only if both sides are literals
SIZES = frozenset({"shape", "normalized_shape"})
#: arguments that are not compared if a pattern omits them
UNSTATED = FREE | IGNORED | SIZES


@dataclass(frozen=True)
class Op:
    """An operator: its canonical name, and how its arguments are compared."""

    name: str
    #: optional parameters with their defaults
    defaults: Mapping[str, Any]
    #: two parameters whose values may be swapped
    swap: tuple[str, str] | None = None


@dataclass(frozen=True)
class Spelling:
    """One spelling of an operator: its parameters in positional order.

    The last may be ``*name``, which takes all remaining positional arguments. For a module class,
    all but the first are attributes, if it has them.
    """

    op: Op
    params: tuple[str, ...]
    inplace: bool = False


FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}
MODULES: dict[type[nn.Module], Spelling] = {}


def _spell(op: Op, params: str, *names: str, inplace: bool = False) -> None:
    """Register names of an operator in torch, functional and Tensor, with one parameter order."""
    spelling = Spelling(op, tuple(params.split()), inplace)
    for name in names:
        # Names such as ``__add__`` are functions of the module operator, and methods.
        for home in (operator,) if name.startswith("__") else (torch, F):
            # A name may be a function of torch, of functional, a method, or several of these.
            if hasattr(home, name):
                FUNCTIONS[getattr(home, name)] = spelling
        if hasattr(torch.Tensor, name):
            METHODS[name] = spelling


def _operator(
    name: str, params: str, *synonyms: str, swap: tuple[str, str] | None = None, **defaults: Any
) -> Op:
    """Register an operator with the same parameters under all its names."""
    op = Op(name, defaults, swap)
    _spell(op, params, name, *synonyms)
    return op


def _activation(name: str, params: str = "", **defaults: Any) -> None:
    """Register an elementwise operator on one tensor, with an in-place form."""
    op = _operator(name, f"input {params} inplace", inplace=False, **defaults)
    _spell(op, f"input {params}", f"{name}_", inplace=True)


def _binary(
    name: str, symbol: str = "", extra: str = "", swaps: bool = False, **defaults: Any
) -> None:
    """Register an operator on two operands; `symbol` is its Python operator, if any."""
    swap = ("input", "other") if swaps else None
    op = _operator(name, f"input other {extra}", swap=swap, **defaults)
    _spell(op, f"input other {extra}", f"{name}_", inplace=True)
    if symbol:
        _spell(op, "input other", f"__{symbol}__")
        _spell(op, "other input", f"__r{symbol}__")
        _spell(op, "input other", f"__i{symbol}__", inplace=True)


def _list_arithmetic() -> None:
    """Register elementwise operators and matrix products."""
    for name in (
        *("abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sin", "sqrt"),
        *("square", "hardsigmoid", "hardswish", "logsigmoid", "mish", "relu", "relu6", "selu"),
        *("sigmoid", "silu", "softsign", "tanh"),
    ):
        _activation(name)
    _activation("elu", "alpha", alpha=1.0)
    _activation("gelu", "approximate", approximate="none")
    _activation("leaky_relu", "negative_slope", negative_slope=0.01)
    _activation("softplus", "beta threshold", beta=1, threshold=20)
    _spell(METHODS["neg"].op, "input", "__neg__")
    _spell(METHODS["abs"].op, "input", "__abs__")
    _binary("add", "add", "alpha", swaps=True, alpha=1)
    _binary("mul", "mul", swaps=True)
    _binary("sub", "sub", "alpha", alpha=1)
    _binary("div", "truediv", "rounding_mode", rounding_mode=None)
    _binary("floor_divide", "floordiv")
    _binary("remainder", "mod")
    for name in ("and", "or", "xor"):
        _binary(f"bitwise_{name}", name, swaps=True)
    for name in ("eq", "ne"):
        _binary(name, name, swaps=True)
    for name in ("ge", "gt", "le", "lt"):
        _binary(name, name)
    for name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor"):
        _binary(name, swaps=True)
    _spell(_operator("pow", "input exponent", "__pow__"), "exponent input", "__rpow__")
    _spell(_operator("matmul", "input other", "__matmul__"), "other input", "__rmatmul__")
    _operator("bmm", "input mat2")


def _list_shapes() -> None:
    """Register operators that move values or change shapes."""
    _operator("reshape", "input *shape", "view")
    _operator("expand", "input *shape", implicit=False)
    _operator("permute", "input *dims")
    _operator("transpose", "input dim0 dim1", "swapaxes", swap=("dim0", "dim1"))
    _operator("flatten", "input start_dim end_dim", start_dim=0, end_dim=-1)
    _operator("unsqueeze", "input dim")
    _operator("squeeze", "input dim", dim=None)
    _operator("size", "input dim", dim=None)
    _operator("getitem", "input index", "__getitem__")
    _operator("cat", "tensors dim", "concat", "concatenate", dim=0)
    _operator("stack", "tensors dim", dim=0)
    _operator("chunk", "input chunks dim", dim=0)
    _operator("split", "tensor split_size_or_sections dim", dim=0)
    fill = _operator("masked_fill", "input mask value")
    _spell(fill, "input mask value", "masked_fill_", inplace=True)


def _list_layers() -> None:
    """Register reductions, attention, and the functions of layers."""
    for name in ("sum", "mean"):
        _operator(name, "input dim keepdim dtype", dim=None, keepdim=False, dtype=None)
    for name in ("softmax", "log_softmax"):
        op = _operator(name, "input dim dtype", dim=None, dtype=None)
        # `F.softmax` has a parameter before `dtype` that `torch.softmax` lacks.
        FUNCTIONS[getattr(F, name)] = Spelling(op, ("input", "dim", "_stacklevel", "dtype"))
    _operator("dropout", "input p training inplace", p=0.5, training=True, inplace=False)
    params = "input normalized_shape weight bias eps cudnn_enable"
    _operator("layer_norm", params, weight=None, bias=None, eps=1e-5)
    _operator("rms_norm", "input normalized_shape weight eps", weight=None, eps=None)
    _operator("linear", "input weight bias", bias=None)
    _operator(
        "scaled_dot_product_attention",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    )


def _list_modules() -> None:
    """Register module classes that spell an operator."""
    # `nn.LayerNorm` spells `layer_norm`: class names in lower case are operator names without
    # underscores.
    spellings = {spelling.op.name.replace("_", ""): spelling for spelling in FUNCTIONS.values()}
    for kind in (
        *(nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU),
        *(nn.Sigmoid, nn.SiLU, nn.Softsign, nn.Tanh, nn.GELU, nn.ELU, nn.LeakyReLU, nn.Softplus),
        *(nn.Softmax, nn.LogSoftmax, nn.Flatten, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Linear),
    ):
        MODULES[kind] = spellings[kind.__name__.lower()]


_list_arithmetic()
_list_shapes()
_list_layers()
_list_modules()
