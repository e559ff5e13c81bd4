"""Effects of one call: its writes, the tensors its result may view, and its random draws.

Torch declares the effects of its operators in schemas and tags. This table has the calls without
them: Python operators, other functions, and modules. An opaque module writes to its inputs only if
its ``inplace`` is true. Suspecting all modules would refuse every chain in a residual block, whose
input is read again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.dropout import _DropoutNd

from slapo.graph.trace.nodes import ModuleLookup, called_name, nodes_in
from slapo.wrapper import innermost

MARKS = "slapo_effects"
"""Key of ``node.meta``: what a call does that a rewrite has put instead of operations."""

FUNCTIONS = ("call_function", "call_method")

_WRITING = {  # functions of the module operator, and methods such as __iadd__
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
    *("irshift", "isub", "itruediv", "ixor", "setitem"),
}
# Their schemas omit the writes to running statistics.
_STATISTICS = ("batch_norm", "instance_norm")
#: Names whose result may share memory with an operand, which their schemas do not show: casts may
#: return the tensor itself.
_VIEWING = {
    *("H", "T", "__getitem__", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool"),
    *("broadcast_tensors", "byte", "cdouble", "cfloat", "chalf", "char", "data", "double"),
    *("einsum", "float", "getattr", "getitem", "half", "int", "long", "meshgrid", "pos", "short"),
    *("type", "type_as"),
}
#: Modules that may return their input or a view of it; dropout does in eval mode.
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd)
_DRAWING = {
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("gumbel_softmax", "manual_seed", "multi_head_attention_forward", "seed", "set_rng_state"),
}


class _Facts(NamedTuple):
    """Effects by schemas and tags; operands by position (None: keyword only) and name."""

    written: list[tuple[int | None, str]]
    viewed: list[tuple[int | None, str]]
    tags: set[torch.Tag]


def written_operands(node: fx.Node, modules: ModuleLookup) -> list[fx.Node]:
    """Return the operands that a call changes in place, each once.

    Functions outside torch are assumed to follow the convention: a name that ends with ``_``, or an
    argument ``inplace`` or ``out``.

    >>> gm = fx.symbolic_trace(lambda x, y: x.add_(y))
    >>> [written_operands(n, gm.get_submodule) for n in gm.graph.find_nodes(op="call_method")]
    [[x]]
    """
    said = node.op == "call_module" and _writes_input(modules(str(node.target)))
    if said or "writes" in node.meta.get(MARKS, ()):
        return node.all_input_nodes
    return _nodes(_written(node)) if node.op in FUNCTIONS else []


def viewed_operands(node: fx.Node, modules: ModuleLookup) -> list[fx.Node]:
    """Return the operands that a value may share memory with, including written ones."""
    viewed: Iterable[Any] = ()
    if node.op == "call_module":
        viewed = node.args[:1] if _passes_on(modules(str(node.target))) else ()
    elif node.op in FUNCTIONS:
        viewed = _viewed(node)
    return _nodes((*written_operands(node, modules), *viewed))


def changes_sizes(node: fx.Node) -> bool:
    """Return whether an in-place method changes the sizes of what it writes to."""
    return torch.Tag.inplace_view in _facts(node).tags


def draws_random_numbers(node: fx.Node) -> bool:
    """Return whether a function draws or seeds random values; disabled dropout does not."""
    name = called_name(node)
    if name == "scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0) != 0)
    if "dropout" in name:
        training = _argument(node, 2, "training", node.kwargs.get("train", True))
        return training is not False and bool(_argument(node, 1, "p", 0.5) != 0)
    return name in _DRAWING or torch.Tag.nondeterministic_seeded in _facts(node).tags


def _written(node: fx.Node) -> Iterator[Any]:
    name = called_name(node)
    yield node.kwargs.get("out")
    ends_so = name.endswith("_") and not name.startswith("_")
    if ends_so or name.strip("_") in _WRITING or node.kwargs.get("inplace") is True:
        yield _operand(node, 0, "input")
    if name in _STATISTICS:  # their positional order differs
        yield from (*node.args[1:5], *(node.kwargs.get(f"running_{k}") for k in ("mean", "var")))
    # `F.embedding` rescales the rows that it looks up, in the table itself.
    if node.kwargs.get("max_norm") is not None:
        yield from (*node.args[1:], *node.kwargs.values())
    for index, argument in _facts(node).written:
        yield _operand(node, index, argument)


def _viewed(node: fx.Node) -> Iterator[Any]:
    name = called_name(node)
    if name in _VIEWING or "dropout" in name:  # dropout returns its input in eval mode
        yield from (*node.args, *node.kwargs.values())
    for index, argument in _facts(node).viewed:
        yield _operand(node, index, argument)


def _writes_input(module: nn.Module) -> bool:
    """Return whether a module declares that it changes its input."""
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
    """Return whether a module may return its input, or a view of it."""
    module = innermost(module)
    if isinstance(module, nn.Sequential):
        return all(map(_passes_on, module))
    return isinstance(module, _PASSING) or _writes_input(module)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes_in(tuple(values))))


def _facts(node: fx.Node) -> _Facts:
    target: Any = node.target
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        home = str(getattr(target, "__module__", None) or "torch").split(".")[0]
        is_of_torch = node.op == "call_method" or home in ("torch", "_operator")
        target = called_name(node) if is_of_torch else ""
    return _facts_of(target)


@lru_cache(maxsize=4096)
def _facts_of(named: str | OpOverload | OpOverloadPacket) -> _Facts:
    """Merge the declared effects of all overloads, as a graph often omits which one it calls."""
    found: Any = named
    if isinstance(named, str):
        found = getattr(torch.ops.aten, named, None) if named.isidentifier() else None
    overloads = [found] if isinstance(found, OpOverload) else []
    # names such as "__lt__" find attributes of every object
    if isinstance(found, OpOverloadPacket):
        overloads = [getattr(found, name) for name in found.overloads()]
    written, viewed = dict[tuple[int | None, str], None](), dict[tuple[int | None, str], None]()
    for schema in (overload._schema for overload in overloads):
        gives_view = any(value.alias_info is not None for value in schema.returns)
        for index, argument in enumerate(schema.arguments):
            key = (None if argument.kwarg_only else index, argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written[key] = None
            if argument.alias_info is not None and gives_view:
                viewed[key] = None
    return _Facts([*written], [*viewed], {tag for overload in overloads for tag in overload.tags})


def _operand(node: fx.Node, index: int | None, name: str) -> Any:
    """Look up an argument; a schema's ``self`` may be passed as ``input``."""
    other = {"self": "input", "input": "self"}.get(name, name)
    return _argument(node, index, name, node.kwargs.get(other))


def _argument(node: fx.Node, index: int | None, name: str, default: Any) -> Any:
    if index is not None and index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)
