"""The table of operators: for each its spellings, its defaults, and what does not matter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Op:
    """An operator: its canonical name, and how its arguments are compared."""

    name: str
    #: parameters that may be left out, with the value that this means
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: compared only if a pattern states them
    free: frozenset[str] = frozenset()
    #: never compared
    ignored: frozenset[str] = frozenset()
    #: sizes: compared only where both sides spell them out
    sizes: frozenset[str] = frozenset()
    #: two parameters whose values may change places
    swap: tuple[str, str] | None = None


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator: its parameters in positional order.

    The last may be ``*name``, which takes all remaining positional arguments.
    """

    op: Op
    params: tuple[str, ...]
    inplace: bool = False


@dataclass(frozen=True)
class ModuleSpelling:
    """A module class that computes an operator; `attributes` stand for parameters."""

    op: Op
    attributes: tuple[str, ...]


_PLAIN_ACTIVATIONS = (
    *("abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sin", "sqrt", "square"),
    *("hardsigmoid", "hardswish", "logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid"),
    *("silu", "softsign", "tanh"),
)

FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}
MODULES: dict[type[nn.Module], ModuleSpelling] = {}


def _spell(
    op: Op, params: str, *functions: Callable[..., Any], methods: str = "", inplace: bool = False
) -> None:
    """List spellings that share one order of parameters."""
    spelling = Spelling(op, tuple(params.split()), inplace)
    FUNCTIONS.update(dict.fromkeys(functions, spelling))
    METHODS.update(dict.fromkeys(methods.split(), spelling))


def _activation(name: str, params: str = "input", **defaults: Any) -> Op:
    """List an operator on one tensor under all homes it has: ``F``, ``torch``, method, ``F.f_``."""
    op = Op(name, {"inplace": False, **defaults}, ignored=frozenset({"inplace"}))
    homes = [getattr(home, name) for home in (F, torch) if hasattr(home, name)]
    has_method = hasattr(torch.Tensor, name)
    _spell(op, f"{params} inplace", *homes, methods=name if has_method else "")
    written = [getattr(home, f"{name}_") for home in (F, torch) if hasattr(home, f"{name}_")]
    has_method = hasattr(torch.Tensor, f"{name}_")
    _spell(op, params, *written, methods=f"{name}_" if has_method else "", inplace=True)
    return op


def _binary(
    name: str, symbol: str = "", extra: str = "", swaps: bool = False, **defaults: Any
) -> None:
    """List ``torch.name``, ``x.name``, ``x.name_`` and, if it has one, the Python operator.

    `symbol` is the operator's name in :mod:`operator`; `extra` are parameters after the operands.
    """
    op = Op(name, defaults, swap=("input", "other") if swaps else None)
    _spell(op, f"input other {extra}", getattr(torch, name), methods=name)
    if hasattr(torch.Tensor, f"{name}_"):
        _spell(op, f"input other {extra}", methods=f"{name}_", inplace=True)
    if not symbol:
        return
    bare = symbol.rstrip("_")
    _spell(op, "input other", getattr(operator, symbol), methods=f"__{bare}__")
    _spell(op, "other input", methods=f"__r{bare}__")
    if hasattr(operator, f"i{bare}"):
        _spell(
            op, "input other", getattr(operator, f"i{bare}"), methods=f"__i{bare}__", inplace=True
        )


def _list_activations() -> None:
    """List operators that work element by element on one tensor."""
    for name in _PLAIN_ACTIVATIONS:
        _activation(name)
    _activation("elu", "input alpha", alpha=1.0)
    _activation("gelu", "input approximate", approximate="none")
    _activation("leaky_relu", "input negative_slope", negative_slope=0.01)
    _activation("softplus", "input beta threshold", beta=1, threshold=20)
    _spell(FUNCTIONS[torch.neg].op, "input", operator.neg, methods="__neg__")
    _spell(FUNCTIONS[torch.abs].op, "input", operator.abs, methods="__abs__")


def _list_arithmetic() -> None:
    """List operators on two operands."""
    _binary("add", "add", "alpha", swaps=True, alpha=1)
    _binary("mul", "mul", swaps=True)
    _binary("sub", "sub", "alpha", alpha=1)
    _binary("div", "truediv", "rounding_mode", rounding_mode=None)
    _binary("floor_divide", "floordiv")
    _binary("remainder", "mod")
    _binary("bitwise_and", "and_", swaps=True)
    _binary("bitwise_or", "or_", swaps=True)
    _binary("bitwise_xor", "xor", swaps=True)
    for name in ("eq", "ne"):
        _binary(name, name, swaps=True)
    for name in ("ge", "gt", "le", "lt"):
        _binary(name, name)
    for name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor"):
        _binary(name, swaps=True)
    power = Op("pow")
    _spell(power, "input exponent", torch.pow, operator.pow, methods="pow __pow__")
    _spell(power, "exponent input", methods="__rpow__")
    matmul = Op("matmul")
    _spell(matmul, "input other", torch.matmul, operator.matmul, methods="matmul __matmul__")
    _spell(matmul, "other input", methods="__rmatmul__")
    _spell(Op("bmm"), "input mat2", torch.bmm, methods="bmm")


def _list_shapes() -> None:
    """List operators that move values or change shapes."""
    reshape = Op("reshape", sizes=frozenset({"shape"}))
    _spell(reshape, "input *shape", torch.reshape, methods="reshape view")
    expand = Op("expand", {"implicit": False}, sizes=frozenset({"shape"}))
    _spell(expand, "input *shape", methods="expand")
    _spell(Op("permute"), "input *dims", torch.permute, methods="permute")
    transpose = Op("transpose", swap=("dim0", "dim1"))
    _spell(transpose, "input dim0 dim1", torch.transpose, torch.swapaxes, methods="transpose")
    flatten = Op("flatten", {"start_dim": 0, "end_dim": -1})
    _spell(flatten, "input start_dim end_dim", torch.flatten, methods="flatten")
    _spell(Op("unsqueeze"), "input dim", torch.unsqueeze, methods="unsqueeze")
    _spell(Op("squeeze", {"dim": None}), "input dim", torch.squeeze, methods="squeeze")
    _spell(Op("size", {"dim": None}), "input dim", methods="size")
    _spell(Op("getitem"), "input index", operator.getitem, methods="__getitem__")
    _spell(Op("cat", {"dim": 0}), "tensors dim", torch.cat, torch.concat, torch.concatenate)
    _spell(Op("stack", {"dim": 0}), "tensors dim", torch.stack)
    _spell(Op("chunk", {"dim": 0}), "input chunks dim", torch.chunk, methods="chunk")
    split = Op("split", {"dim": 0})
    _spell(split, "tensor split_size_or_sections dim", torch.split)
    _spell(split, "tensor split_size_or_sections dim", methods="split")
    fill = Op("masked_fill")
    _spell(fill, "input mask value", torch.masked_fill, methods="masked_fill")
    _spell(fill, "input mask value", methods="masked_fill_", inplace=True)


def _list_reductions() -> None:
    """List sums, means and softmax."""
    for name in ("sum", "mean"):
        op = Op(name, {"dim": None, "keepdim": False, "dtype": None})
        _spell(op, "input dim keepdim dtype", getattr(torch, name), methods=name)
    for name in ("softmax", "log_softmax"):
        op = Op(name, {"dim": None, "dtype": None}, ignored=frozenset({"_stacklevel"}))
        _spell(op, "input dim dtype", getattr(torch, name), methods=name)
        _spell(op, "input dim _stacklevel dtype", getattr(F, name))


def _list_layers() -> None:
    """List the functions behind layers with weights, and dropout."""
    dropout = Op(
        "dropout",
        {"p": 0.5, "training": True, "inplace": False},
        free=frozenset({"p", "training"}),
        ignored=frozenset({"inplace"}),
    )
    _spell(dropout, "input p training inplace", F.dropout)
    _spell(dropout, "input p training", torch.dropout)
    norm = Op(
        "layer_norm",
        {"weight": None, "bias": None, "eps": 1e-5},
        ignored=frozenset({"cudnn_enable"}),
        sizes=frozenset({"normalized_shape"}),
    )
    params = "input normalized_shape weight bias eps"
    _spell(norm, params, F.layer_norm)
    _spell(norm, f"{params} cudnn_enable", torch.layer_norm)
    rms = Op("rms_norm", {"weight": None, "eps": None}, sizes=frozenset({"normalized_shape"}))
    _spell(rms, "input normalized_shape weight eps", F.rms_norm, torch.rms_norm)
    _spell(Op("linear", {"bias": None}), "input weight bias", F.linear)
    attention = Op(
        "scaled_dot_product_attention",
        {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
        free=frozenset({"dropout_p"}),
    )
    params = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    _spell(attention, params, F.scaled_dot_product_attention)


def _list_modules() -> None:
    """List the module classes that spell an operator."""
    plain = {
        nn.GELU: "gelu approximate",
        nn.ELU: "elu alpha",
        nn.LeakyReLU: "leaky_relu negative_slope",
        nn.Softplus: "softplus beta threshold",
        nn.Hardsigmoid: "hardsigmoid",
        nn.Hardswish: "hardswish",
        nn.LogSigmoid: "logsigmoid",
        nn.Mish: "mish",
        nn.ReLU: "relu",
        nn.ReLU6: "relu6",
        nn.SELU: "selu",
        nn.Sigmoid: "sigmoid",
        nn.SiLU: "silu",
        nn.Softsign: "softsign",
        nn.Tanh: "tanh",
        nn.Softmax: "softmax dim",
        nn.LogSoftmax: "log_softmax dim",
        nn.Flatten: "flatten start_dim end_dim",
        nn.Dropout: "dropout p training",
        nn.LayerNorm: "layer_norm normalized_shape weight bias eps",
        nn.RMSNorm: "rms_norm normalized_shape weight eps",
        nn.Linear: "linear weight bias",
    }
    ops = {spelling.op.name: spelling.op for spelling in FUNCTIONS.values()}
    for kind, text in plain.items():
        name, *attributes = text.split()
        MODULES[kind] = ModuleSpelling(ops[name], tuple(attributes))


_list_activations()
_list_arithmetic()
_list_shapes()
_list_reductions()
_list_layers()
_list_modules()
