"""What a call writes to, what its result may be a view of, and whether it draws random numbers.

The one table of this. Torch itself says so of its operators: in their schemas and tags. Listed
here is only what has none: Python's operators, functions of ``torch.nn.functional`` that are no
operators, and modules. Of modules whose code cannot be seen it is believed that they write to an
input only if they say so by ``inplace``. To suspect every opaque module would refuse each chain
within a residual block, where the input of the block is read again behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.dropout import _DropoutNd

from slapo.graph.trace.nodes import ModuleLookup, called_name, nodes_in
from slapo.wrapper import innermost

MARKS = "slapo_effects"
"""Key of ``node.meta``: what a call does that a rewrite has put in the place of operations."""

FUNCTIONS = ("call_function", "call_method")

_IN_PLACE = (
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor", "setitem"),
)
_WRITING_FUNCTIONS = frozenset(getattr(operator, name) for name in _IN_PLACE)
_WRITING_METHODS = frozenset(f"__{name}__" for name in _IN_PLACE)
# Their running statistics are written to, which their schemas do not say.
_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_RESHAPING = frozenset(
    (
        *("as_strided_", "rename_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_"),
        *("swapdims_", "t_", "transpose_", "unsqueeze_"),
    )
)
_VIEWING = frozenset(  # their first operand
    (
        *("H", "T", "__getitem__", "align_as", "align_to", "bfloat16", "bool", "byte", "cdouble"),
        *("cfloat", "chalf", "char", "data", "double", "float", "getattr", "getitem", "half"),
        *("int", "long", "pos", "refine_names", "rename", "result_at", "short", "type", "type_as"),
    )
)
_VIEWING_ALL = frozenset(
    ("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "einsum", "meshgrid")
)
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd)
_DRAWING = frozenset(
    (
        *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
        *("gumbel_softmax", "manual_seed", "multi_head_attention_forward", "seed"),
        "set_rng_state",
    )
)


@dataclass(frozen=True)
class _Facts:
    """What schemas and tags say; arguments by position (None: only by name) and name."""

    written: tuple[tuple[int | None, str], ...] = ()
    viewed: tuple[tuple[int | None, str], ...] = ()
    draws: bool = False


def written_operands(node: fx.Node, modules: ModuleLookup) -> list[fx.Node]:
    """List the operands that a call changes in place.

    Of a function that torch does not know the convention is believed: its name ends with ``_``,
    or it takes ``inplace`` or ``out``.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.
    modules : callable
        Gives the module for the target of a ``call_module`` node, as ``gm.get_submodule`` does.

    Returns
    -------
    list of torch.fx.Node
        Each once.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, y: x.add_(y))
    >>> [written_operands(n, gm.get_submodule) for n in gm.graph.find_nodes(op="call_method")]
    [[x]]
    """
    said = node.op == "call_module" and _writes_input(modules(str(node.target)))
    if said or "writes" in node.meta.get(MARKS, ()):
        return node.all_input_nodes
    return _nodes(_written(node)) if node.op in FUNCTIONS else []


def viewed_operands(node: fx.Node, modules: ModuleLookup) -> list[fx.Node]:
    """List the operands that the value of a call may share memory with.

    Parameters
    ----------
    node : torch.fx.Node
        Any node.
    modules : callable
        Gives the module for the target of a ``call_module`` node.

    Returns
    -------
    list of torch.fx.Node
        Each once; those written to are among them, as they are what in-place calls return.
    """
    viewed: Iterable[Any] = ()
    if node.op == "call_module":
        viewed = node.args[:1] if _passes_on(modules(str(node.target))) else ()
    elif node.op in FUNCTIONS:
        viewed = _viewed(node)
    return _nodes((*written_operands(node, modules), *viewed))


def changes_sizes(node: fx.Node) -> bool:
    """Tell whether an in-place method changes the sizes of what it writes to."""
    return called_name(node) in _RESHAPING


def draws_random_numbers(node: fx.Node) -> bool:
    """Tell whether a function or method draws random numbers, or sets their state.

    Parameters
    ----------
    node : torch.fx.Node
        A ``call_function`` or ``call_method`` node.

    Returns
    -------
    bool
        False for dropout that a constant has switched off.
    """
    name = called_name(node)
    if name == "scaled_dot_product_attention":
        return not _is_zero(_argument(node, 4, "dropout_p", 0.0))
    if "dropout" in name:
        training = _argument(node, 2, "training", node.kwargs.get("train", True))
        return training is not False and not _is_zero(_argument(node, 1, "p", 0.5))
    return name in _DRAWING or _facts(node).draws


def _written(node: fx.Node) -> Iterator[Any]:
    name = called_name(node)
    yield node.kwargs.get("out")
    ends_so = name.endswith("_") and not name.startswith("_")
    if ends_so or name in _WRITING_METHODS or node.target in _WRITING_FUNCTIONS:
        yield _operand(node, 0, "input")
    if node.kwargs.get("inplace") is True:
        yield _operand(node, 0, "input")
    if name in _STATISTICS:  # by position they stand in several orders
        yield from (*node.args[1:5], *(node.kwargs.get(f"running_{k}") for k in ("mean", "var")))
    if node.kwargs.get("max_norm") is not None:
        yield from (*node.args[1:], *node.kwargs.values())
    for index, argument in _facts(node).written:
        yield _operand(node, index, argument)


def _viewed(node: fx.Node) -> Iterator[Any]:
    name = called_name(node)
    if name in _VIEWING or "dropout" in name:  # which returns its input in eval mode
        yield _operand(node, 0, "input")
    if name in _VIEWING_ALL:
        yield from (*node.args, *node.kwargs.values())
    for index, argument in _facts(node).viewed:
        yield _operand(node, index, argument)


def _writes_input(module: nn.Module) -> bool:
    """Tell whether a module says that it changes its input."""
    module = innermost(module)
    if getattr(module, "inplace", False) is True:
        return True
    if isinstance(module, nn.Sequential):
        for child in module:
            if _writes_input(child):
                return True
            if not _passes_on(child):
                return False
    return False


def _passes_on(module: nn.Module) -> bool:
    """Tell whether a module may return its input, or a view of it."""
    module = innermost(module)
    if isinstance(module, nn.Sequential):
        return all(map(_passes_on, module))
    return isinstance(module, _PASSING) or _writes_input(module)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes_in(tuple(values))))


def _facts(node: fx.Node) -> _Facts:
    """What torch says of the operator of a node."""
    target: Any = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _facts_of_operator(target)
    home = str(getattr(target, "__module__", None) or "torch")
    if node.op == "call_method" or home.split(".")[0] in ("torch", "_operator"):
        return _facts_by_name(called_name(node))
    return _Facts()


@lru_cache(maxsize=4096)
def _facts_by_name(name: str) -> _Facts:
    found = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    # Names such as "__lt__" may find what every object has.
    return _facts_of_operator(found) if isinstance(found, OpOverloadPacket) else _Facts()


@lru_cache(maxsize=4096)
def _facts_of_operator(operator: OpOverload | OpOverloadPacket) -> _Facts:
    if isinstance(operator, OpOverload):
        return _united([operator])
    return _united(getattr(operator, name) for name in operator.overloads())


def _united(overloads: Iterable[OpOverload]) -> _Facts:
    """Unite what is said of several overloads: a graph does not tell which one it calls."""
    written: dict[tuple[int | None, str], None] = {}
    viewed: dict[tuple[int | None, str], None] = {}
    draws = False
    for overload in overloads:
        schema = overload._schema
        gives_view = any(value.alias_info is not None for value in schema.returns)
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            key = (None if argument.kwarg_only else index, argument.name)
            if argument.alias_info.is_write:
                written[key] = None
            if gives_view:
                viewed[key] = None
        draws = draws or torch.Tag.nondeterministic_seeded in overload.tags
    return _Facts(tuple(written), tuple(viewed), draws)


def _operand(node: fx.Node, index: int | None, name: str) -> Any:
    """Look an argument up; what a schema calls ``self`` may go by ``input``."""
    other = {"self": "input", "input": "self"}.get(name, name)
    return _argument(node, index, name, node.kwargs.get(other))


def _argument(node: fx.Node, index: int | None, name: str, default: Any) -> Any:
    if index is not None and index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0
