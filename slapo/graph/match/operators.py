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
    """One way to write an operator.

    ``params`` are its parameters in positional order. The last may be ``*name``, which takes all
    remaining positional arguments. For a class of modules they are attributes of the module.
    """

    op: Op
    params: tuple[str, ...]
    inplace: bool = False


FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}
MODULES: dict[type[nn.Module], Spelling] = {}


def _spell(
    op: Op, params: str, *functions: Callable[..., Any], methods: str = "", inplace: bool = False
) -> None:
    """List spellings that share one order of parameters."""
    spelling = Spelling(op, tuple(params.split()), inplace)
    FUNCTIONS.update(dict.fromkeys(functions, spelling))
    METHODS.update(dict.fromkeys(methods.split(), spelling))


def _operator(op: Op, params: str, *functions: Callable[..., Any]) -> Op:
    """List an operator as `functions`, ``torch.name`` and ``x.name``, as far as these exist."""
    homes = [getattr(torch, op.name)] if hasattr(torch, op.name) else []
    methods = op.name if hasattr(torch.Tensor, op.name) else ""
    _spell(op, params, *homes, *functions, methods=methods)
    return op


def _activation(name: str, params: str = "", **defaults: Any) -> None:
    """List an operator on each element of one tensor, also as ``F.name`` and as ``name_``."""
    op = Op(name, {"inplace": False, **defaults}, ignored=frozenset({"inplace"}))
    functions = [getattr(F, name)] if hasattr(F, name) else []
    _operator(op, f"input {params} inplace", *functions)
    written = [getattr(home, f"{name}_") for home in (F, torch) if hasattr(home, f"{name}_")]
    methods = f"{name}_" if hasattr(torch.Tensor, f"{name}_") else ""
    _spell(op, f"input {params}", *written, methods=methods, inplace=True)


def _binary(
    name: str, symbol: str = "", extra: str = "", swaps: bool = False, **defaults: Any
) -> None:
    """List an operator on two operands, also as ``x.name_`` and as the Python operator.

    `symbol` is its name in :mod:`operator`; `extra` are parameters after the operands.
    """
    op = Op(name, defaults, swap=("input", "other") if swaps else None)
    _operator(op, f"input other {extra}")
    if hasattr(torch.Tensor, f"{name}_"):
        _spell(op, f"input other {extra}", methods=f"{name}_", inplace=True)
    if symbol:
        bare = symbol.rstrip("_")
        _spell(op, "input other", getattr(operator, symbol), methods=f"__{bare}__")
        _spell(op, "other input", methods=f"__r{bare}__")
        written = [getattr(operator, f"i{bare}")] if hasattr(operator, f"i{bare}") else []
        methods = f"__i{bare}__" if written else ""
        _spell(op, "input other", *written, methods=methods, inplace=True)


def _list_arithmetic() -> None:
    """List operators that work element by element, and products of matrices."""
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
    _spell(FUNCTIONS[torch.neg].op, "input", operator.neg, methods="__neg__")
    _spell(FUNCTIONS[torch.abs].op, "input", operator.abs, methods="__abs__")
    _binary("add", "add", "alpha", swaps=True, alpha=1)
    _binary("mul", "mul", swaps=True)
    _binary("sub", "sub", "alpha", alpha=1)
    _binary("div", "truediv", "rounding_mode", rounding_mode=None)
    _binary("floor_divide", "floordiv")
    _binary("remainder", "mod")
    for name in ("and", "or", "xor"):
        _binary(f"bitwise_{name}", name if name == "xor" else f"{name}_", swaps=True)
    for name in ("eq", "ne"):
        _binary(name, name, swaps=True)
    for name in ("ge", "gt", "le", "lt"):
        _binary(name, name)
    for name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor"):
        _binary(name, swaps=True)
    power = _operator(Op("pow"), "input exponent", operator.pow)
    _spell(power, "input exponent", methods="__pow__")
    _spell(power, "exponent input", methods="__rpow__")
    matmul = _operator(Op("matmul"), "input other", operator.matmul)
    _spell(matmul, "input other", methods="__matmul__")
    _spell(matmul, "other input", methods="__rmatmul__")
    _operator(Op("bmm"), "input mat2")


def _list_shapes() -> None:
    """List operators that move values or change shapes."""
    shape = frozenset({"shape"})
    _spell(_operator(Op("reshape", sizes=shape), "input *shape"), "input *shape", methods="view")
    _operator(Op("expand", {"implicit": False}, sizes=shape), "input *shape")
    _operator(Op("permute"), "input *dims")
    _operator(Op("transpose", swap=("dim0", "dim1")), "input dim0 dim1", torch.swapaxes)
    _operator(Op("flatten", {"start_dim": 0, "end_dim": -1}), "input start_dim end_dim")
    _operator(Op("unsqueeze"), "input dim")
    _operator(Op("squeeze", {"dim": None}), "input dim")
    _operator(Op("size", {"dim": None}), "input dim")
    _spell(Op("getitem"), "input index", operator.getitem, methods="__getitem__")
    _operator(Op("cat", {"dim": 0}), "tensors dim", torch.concat, torch.concatenate)
    _operator(Op("stack", {"dim": 0}), "tensors dim")
    _operator(Op("chunk", {"dim": 0}), "input chunks dim")
    _operator(Op("split", {"dim": 0}), "tensor split_size_or_sections dim")
    fill = _operator(Op("masked_fill"), "input mask value")
    _spell(fill, "input mask value", methods="masked_fill_", inplace=True)


def _list_layers() -> None:
    """List reductions, attention, and the functions behind layers."""
    for name in ("sum", "mean"):
        _operator(
            Op(name, {"dim": None, "keepdim": False, "dtype": None}), "input dim keepdim dtype"
        )
    for name in ("softmax", "log_softmax"):
        op = Op(name, {"dim": None, "dtype": None}, ignored=frozenset({"_stacklevel"}))
        _operator(op, "input dim dtype")
        _spell(op, "input dim _stacklevel dtype", getattr(F, name))
    dropout = Op(
        "dropout",
        {"p": 0.5, "training": True, "inplace": False},
        free=frozenset({"p", "training"}),
        ignored=frozenset({"inplace"}),
    )
    _spell(_operator(dropout, "input p training"), "input p training inplace", F.dropout)
    sizes = frozenset({"normalized_shape"})
    defaults = {"weight": None, "bias": None, "eps": 1e-5}
    norm = Op("layer_norm", defaults, ignored=frozenset({"cudnn_enable"}), sizes=sizes)
    params = "input normalized_shape weight bias eps"
    _spell(_operator(norm, f"{params} cudnn_enable"), params, F.layer_norm)
    rms = Op("rms_norm", {"weight": None, "eps": None}, sizes=sizes)
    _operator(rms, "input normalized_shape weight eps", F.rms_norm)
    _operator(Op("linear", {"bias": None}), "input weight bias", F.linear)
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    attention = Op(
        "scaled_dot_product_attention",
        {**defaults, "enable_gqa": False},
        free=frozenset({"dropout_p"}),
    )
    params = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    _operator(attention, params, F.scaled_dot_product_attention)


def _list_modules() -> None:
    """List the module classes that spell an operator: attributes that stand for parameters."""
    attributes: dict[type[nn.Module], str] = {
        **dict.fromkeys((nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Mish, nn.ReLU), ""),
        **dict.fromkeys((nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softsign, nn.Tanh), ""),
        nn.GELU: "approximate",
        nn.ELU: "alpha",
        nn.LeakyReLU: "negative_slope",
        nn.Softplus: "beta threshold",
        nn.Softmax: "dim",
        nn.LogSoftmax: "dim",
        nn.Flatten: "start_dim end_dim",
        nn.Dropout: "p training",
        nn.LayerNorm: "normalized_shape weight bias eps",
        nn.RMSNorm: "normalized_shape weight eps",
        nn.Linear: "weight bias",
    }
    ops = {spelling.op.name.replace("_", ""): spelling.op for spelling in FUNCTIONS.values()}
    for kind, names in attributes.items():
        MODULES[kind] = Spelling(ops[kind.__name__.lower()], tuple(names.split()))


_list_arithmetic()
_list_shapes()
_list_layers()
_list_modules()
