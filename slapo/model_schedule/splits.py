"""Tensor parallelism by a table: path of modules -> words, each one or two primitives.

========================  =====================================================================
``columns``               Shard all tensors of a layer by output features. ``columns(3)``: three
                          equal blocks, as packed queries, keys and values; ``columns(a, b)``:
                          blocks of these sizes.
``rows``                  Shard the weight of a layer by input features, and sum its output.
``shard(name, axis)``     Shard one tensor; further arguments are blocks as for ``columns``.
``sum``                   Sum the output over the ranks.
``whole(axis)``           Gather the input along a sharded axis, and scatter the output there.
``sum_grad(a, b)``        Sum the gradients of these arguments of the module.
``sum_output_grad``       Sum the gradient of the output.
``partial(weight)``       Sum the gradient of a replicated parameter at each step.
``divide(num_heads)``     Divide attributes by the number of ranks; ``config.num_heads`` belongs to
                          the config, which is copied for the module.
``fork_rng``              Draw different random values on each rank.
========================  =====================================================================

Block sizes are integers, or formulas of attributes such as ``num_heads*head_dim``. Each name is
looked up from the layer outward; the nearest module with that attribute is used.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from slapo.errors import with_nearest
from slapo.history import contains
from slapo.model_schedule.recipe import TOKENS, Stack
from slapo.model_schedule.tensor_parallel import split_column, split_row, spread_tokens, sum_output
from slapo.schedule import Schedule
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost

#: A word and its arguments as expressions.
Word = tuple[str, list[ast.expr]]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_KNOWN = {"columns", "rows", "shard", "sum", "sum_grad", "sum_output_grad"}
_KNOWN |= {"partial", "divide", "fork_rng", "whole"}


def words_of(text: str) -> list[Word]:
    """Parse the words of an entry; ValueError for unknown or malformed words.

    Examples
    --------
    >>> [name for name, _ in words_of("columns(num_heads*head_dim, 8), sum")]
    ['columns', 'sum']
    """
    try:
        found = ast.parse(f"[{text}]", mode="eval").body.elts  # type: ignore[attr-defined]
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a list of words: {error.msg}") from None
    words: list[Word] = []
    for each in found:
        name = each.func if isinstance(each, ast.Call) else each
        if not isinstance(name, ast.Name) or name.id not in _KNOWN:
            known, word = sorted(_KNOWN), ast.unparse(name)
            rest = f"{word!r} in {text!r} is not a word of a table; the words are {known}"
            raise ValueError(with_nearest(word, known, rest))
        words.append((name.id, each.args if isinstance(each, ast.Call) else []))
    return words


def split(
    base: Schedule,
    splits: Mapping[str, str],
    stacks: Mapping[Stack, list[Schedule]],
    tokens: bool,
) -> None:
    """Shard and sync the modules that a table names.

    `splits` maps paths to words; ``*`` stands for any one part of a path. With `tokens`, tokens are
    sharded too, between the modules of the table. Raises ValueError for an unknown path or word.
    """
    found: list[tuple[Schedule, list[Word]]] = []
    for path, text in splits.items():
        found += [(node, words_of(text)) for node in (base.select(path) if path else [base])]
    run = _Split(base, stacks, found if tokens else None)
    for block in run.wholes:
        block.sync("fwd_pre", "all_gather", axis=TOKENS, tensor_parallel_output_grad=False)
    # Block sizes refer to the full model, so attributes are divided last.
    for later in (False, True):
        for node, words in found:
            for name, arguments in words:
                if (name == "divide") == later:
                    run.apply(node, name, arguments)
    if tokens:
        run.spread_tokens()


class _Split:
    """One application of a table; `found` are its words if tokens are sharded too."""

    def __init__(
        self,
        base: Schedule,
        stacks: Mapping[Stack, list[Schedule]],
        found: list[tuple[Schedule, list[Word]]] | None,
    ) -> None:
        self.base, self.stacks = base, stacks
        layers = [layer for each in stacks.values() for layer in each] if found else []
        #: blocks of layers whose input has all tokens on every rank, and modules that gather them
        self.wholes = [
            child
            for layer in layers
            for child in layer.child.values()
            if innermost(child.mod)._modules and found and _needs_wholes(child, found)
        ]
        self.gathered = [block.path for block in self.wholes]
        self._layers, self._wholes = {layer.path for layer in layers}, {*self.gathered}

    def _has_tokens(self, node: Schedule) -> bool:
        """Return whether tokens are sharded around a module."""
        return _is_within(node.path, self._layers) and not _is_within(node.path, self._wholes)

    def apply(self, node: Schedule, name: str, arguments: list[ast.expr]) -> None:
        """Apply one word; sharded tokens are gathered before and scattered after it."""
        names = [ast.unparse(each) for each in arguments]
        has_tokens = self._has_tokens(node)
        if name == "columns":
            split_column(node, _blocks(node, arguments))
        elif name == "shard":
            blocks = _blocks(node, arguments[2:])
            node.shard(names[0], axis=ast.literal_eval(arguments[1]), blocks=blocks)
        elif name in ("rows", "sum"):
            if name == "rows":
                split_row(node)
            sum_output(node, TOKENS if has_tokens else None)
        elif name == "sum_grad":
            takes = inspect.signature(node.mod.forward).parameters
            if len(takes) == 1 and not set(names) <= takes.keys():
                names = []  # a kernel has replaced the module, and its input has another name
            if has_tokens:
                node.sync("fwd_pre", "all_gather", axis=TOKENS, argument=names or None)
                self.gathered.append(node.path)
            else:
                node.sync("bwd_post", "all_reduce", argument=names or None)
        elif name == "whole":
            axis = ast.literal_eval(arguments[0])
            node.sync("fwd_pre", "all_gather", axis=axis, tensor_parallel_output_grad=False)
            node.sync("fwd_post", "scatter", axis=axis)
        elif name == "sum_output_grad":
            kind = "all_gather" if has_tokens else "all_reduce_grad"
            node.sync("fwd_post", kind, **({"axis": TOKENS} if has_tokens else {}))
        elif name == "partial":
            for parameter in names:
                node.annotate(parameter, "partial_grad", True)
        elif name == "fork_rng":
            node.fork_rng()
        else:
            _divide(node, names)

    def spread_tokens(self) -> None:
        """Shard tokens from the first layer to the last, as the regions of a recipe do."""
        for block in self.wholes:
            block.sync("fwd_post", "scatter", axis=TOKENS)
        gathered = set(self.gathered)

        def sees_all(layer: Schedule, name: str) -> bool:
            path = f"{layer.path}.{name}" if name else layer.path
            if _is_within(path, gathered):
                return True  # also parts of torch's layers, which are no nodes
            return bool(shards_of(innermost((layer[name] if name else layer).mod)))

        for stack, layers in self.stacks.items():
            spread_tokens(self.base, stack, layers, sees_all)


def _is_within(path: str, around: set[str]) -> bool:
    """Return whether a module or an enclosing one is among the given ones."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in around for count in range(1, len(parts) + 1))


def _needs_wholes(block: Schedule, found: list[tuple[Schedule, list[Word]]]) -> bool:
    """Return whether a block takes tokens other than at its single entry, or stays replicated."""
    inside = [(node.path, words) for node, words in found if contains(block.path, node.path)]
    said = [(path, name, len(given)) for path, words in inside for name, given in words]
    entries = [each for each in said if each[1] in ("sum_grad", "sum_output_grad")]
    sums = {(path, name) for path, name, _ in said if name in ("rows", "sum")}
    if any(name == "sum" and path != block.path for path, name in sums):
        return True  # experts, for example, may have merged the batch and token dimensions
    if sums and not entries:
        return False  # the preceding module gathers for several blocks
    return entries != [(block.path, "sum_grad", 1)]


def _blocks(node: Schedule, arguments: list[ast.expr]) -> Any:
    """Return the number of equal blocks, or the list of their sizes."""
    sizes = [number_of(node, each) for each in arguments]
    return sizes if len(sizes) > 1 else (sizes or [1])[0]


def _divide(node: Schedule, names: list[str]) -> None:
    own = [name for name in names if not name.startswith("config.")]
    for name in own:
        node.set(name, whole=getattr(node.mod, name))
    of_config = [name.removeprefix("config.") for name in names if name not in own]
    if of_config:
        config = copy.copy(node.mod.config)
        for name in of_config:
            setattr(config, name, getattr(config, name) // node.world_size)
        node.set("config", config)


def number_of(node: Schedule, formula: ast.expr) -> int:
    """Evaluate a formula for a layer."""
    around: list[Any] = []
    parent: Any = node
    while parent is not None:
        around.append(parent.mod)
        parent = parent.parent
    try:
        return value_of(formula, around)
    except ValueError as error:
        raise ValueError(f"{node.path!r}: {error}") from None


def value_of(formula: ast.expr, around: list[nn.Module]) -> int:
    """Evaluate a formula; names are attributes of the nearest module that has them."""
    if isinstance(formula, ast.BinOp) and type(formula.op) in _OPERATORS:
        left, right = (value_of(each, around) for each in (formula.left, formula.right))
        return _OPERATORS[type(formula.op)](left, right)
    if isinstance(formula, ast.Constant):
        return int(formula.value)  # type: ignore[arg-type]
    path = ast.unparse(formula).split(".")
    for module in around:
        value: Any = module
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(
        f"{ast.unparse(formula)!r} is an attribute of no module from {type(around[0]).__name__} "
        "outward; fix the table"
    )
