"""Tensor parallelism by a table: path of modules -> words, each one or two primitives.

========================  =====================================================================
``columns``               Shard all tensors of a layer by output features. ``columns(3)``: three
                          equal blocks, as packed queries, keys and values; ``columns(a, b)``:
                          blocks of these sizes; ``columns(parts=n)``: n heads of keys or values,
                          which several ranks hold if there are more ranks.
``rows``                  Shard the weight of a layer by input features, and sum its output.
``shard(name, axis)``     Shard one tensor; further arguments are blocks as for ``columns``.
``experts``               Shard every expert of packed weights, and sum the gradients of states and
                          routing weights.
``sum``                   Sum the output over the ranks.
``whole(axis)``           Gather the input along a sharded axis, and scatter the output there.
``gather``                With sharded tokens, gather those of the input, which every rank then uses
                          in the same way, as routers do.
``sum_grad(a, b)``        Sum the gradients of these arguments of the module; none stands for all.
                          ``read=c``: the output of another stack, whose gradient is summed here
                          only if a pipeline stage may end in between.
``sum_output_grad``       Sum the gradient of the output.
``partial(weight)``       Sum the gradient of a replicated parameter at each step.
``divide(num_heads)``     Divide attributes by the number of ranks; ``config.num_heads`` is an entry
                          of a config, which is copied for the module, and ``x.shape[-1]`` is a size
                          that the forward reads off an argument.
``regroup(groups, n)``    Set the number of query heads for each of n heads of keys, if there are
                          more ranks than these.
``fork_rng``              Draw different random values on each rank, if dropout draws any.
========================  =====================================================================

Block sizes are integers, or formulas of attributes such as ``num_heads*head_dim``. Each name is
looked up from the layer outward; the nearest module with that attribute is used. With sequence
parallelism sums gather and scatter tokens, whose axis is ``sum_grad(axis=0)`` and ``rows(axis=0)``
where the layer has merged them with the batch.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from slapo.errors import with_nearest
from slapo.history import contains
from slapo.model_schedule.recipe import TOKENS, Recipe, Stack
from slapo.model_schedule.tensor_parallel import (
    split_column,
    split_experts,
    split_row,
    spread_tokens,
    sum_output,
)
from slapo.node import EINOPS, config_entries
from slapo.primitives.set import SIZE
from slapo.schedule import Schedule
from slapo.selection import compile_glob
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_NAMES = (
    "columns rows shard experts sum whole gather sum_grad sum_output_grad partial divide regroup "
    "fork_rng"
)
_KNOWN = frozenset(_NAMES.split())
_KEYWORDS = {"columns": {"parts"}, "rows": {"axis"}, "sum_grad": {"axis", "read"}}
#: Word -> minimum number of arguments.
_NEEDED = {"shard": 2, "whole": 1, "regroup": 2}
#: Words that set attributes. They come last, as block sizes refer to those of the full model.
OF_ATTRIBUTES = ("divide", "regroup")
#: Words where replicated inputs enter a sharded block.
OF_ENTRIES = ("sum_grad", "gather")
#: Words for parameters of the module.
OF_PARAMETERS = ("columns", "rows", "shard", "experts", "partial")


class Word(NamedTuple):
    """A word of a table, and its arguments as expressions."""

    name: str
    arguments: list[ast.expr]
    keywords: dict[str, ast.expr]

    @property
    def names(self) -> list[str]:
        """The arguments as text."""
        return [ast.unparse(each) for each in self.arguments]


def words_of(text: str) -> list[Word]:
    """Parse the words of an entry; ValueError for unknown or malformed words.

    Examples
    --------
    >>> [word.name for word in words_of("columns(num_heads*head_dim, 8), sum")]
    ['columns', 'sum']
    """
    try:
        # Words have the syntax of Python's calls, so its parser gives nested arguments and errors.
        found = ast.parse(f"[{text}]", mode="eval").body.elts  # type: ignore[attr-defined]
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a list of words: {error.msg}") from None
    words: list[Word] = []
    for each in found:
        call = each if isinstance(each, ast.Call) else ast.Call(each, [], [])
        word, keywords = ast.unparse(call.func), {k.arg or "**": k.value for k in call.keywords}
        is_taken = keywords.keys() <= _KEYWORDS.get(word, set())
        if word not in _KNOWN or not is_taken or len(call.args) < _NEEDED.get(word, 0):
            shown, known = ast.unparse(each), sorted(_KNOWN)
            rest = f"{shown!r} in {text!r} is not a word of a table; the words are {known}"
            raise ValueError(with_nearest(word, known, rest))
        words.append(Word(word, call.args, keywords))
    return words


@dataclass(frozen=True)
class Entry:
    """A module of a table, and its words."""

    node: Schedule
    words: list[Word]

    def has(self, names: Collection[str]) -> bool:
        """Return whether one of these words is among its words."""
        return any(word.name in names for word in self.words)


def entries_of(
    base: Schedule, table: Iterable[tuple[str, str]]
) -> tuple[list[Entry], dict[str, list[Word]]]:
    """Return the entries of a table for a model, and the paths without a module with their words.

    Paths are relative to `base`; ``*`` stands for any one part of a path.
    """
    #: last part of a path -> whole paths with their words, as all layers repeat a few last parts
    wanted: defaultdict[str, list[tuple[str, list[Word]]]] = defaultdict(list)
    for paths, text in table:
        for path in paths.split() or [""]:
            last = path.rpartition(".")[2]
            wanted["*" if {"*", "?"} & {*last} else last].append((path, words_of(text)))
    found: list[Entry] = []
    matched: set[str] = set()
    seen: set[tuple[int, int]] = set()  # a module registered at several paths is one module
    for path, node in base.named_schedules():
        for wish, words in (*wanted[path.rpartition(".")[2]], *wanted["*"]):
            is_match = wish == path or (wish and path and compile_glob(wish).fullmatch(path))
            if is_match and (id(words), id(node.mod)) not in seen:
                seen.add((id(words), id(node.mod)))
                matched.add(wish)
                found.append(Entry(node, words))
    pairs = (pair for each in wanted.values() for pair in each)
    return found, {path: words for path, words in pairs if path not in matched}


def split(
    base: Schedule,
    recipe: Recipe,
    stacks: list[tuple[Stack, list[Schedule]]],
    tokens: bool,
    in_stages: bool,
) -> None:
    """Shard and sync the modules that the table of a recipe names.

    With `tokens`, tokens are sharded too, between these modules. With `in_stages`, a pipeline stage
    may end between any two layers. Raises ValueError if a kernel has replaced a named module.
    """
    found, absent = entries_of(base, recipe.table)
    gone = [path for path, words in absent.items() if {word.name for word in words} - {"fork_rng"}]
    if gone:  # a kernel draws its own random values, but does not sum
        raise ValueError(
            f"kernels have replaced {gone}, which the table names; leave these out of the table, "
            "or keep them by kernels=False and attn_op_name=None"
        )
    run = _Split(base, stacks, found, tokens, in_stages, proven=recipe.proven)
    # Hooks run in the order of their registration. These gather before any word's pre-hook, and
    # spread_tokens() below scatters after any word's post-hook.
    for block in run.wholes:
        block.sync("fwd_pre", "all_gather", axis=TOKENS, tensor_parallel_output_grad=False)
    for later in (False, True):
        for entry in found:
            for word in entry.words:
                if (word.name in OF_ATTRIBUTES) == later:
                    run.apply(entry.node, word)
    if tokens:
        run.spread_tokens()


class _Split:
    """One application of a table."""

    def __init__(
        self,
        base: Schedule,
        stacks: list[tuple[Stack, list[Schedule]]],
        found: list[Entry],
        tokens: bool,
        in_stages: bool,
        proven: bool,
    ) -> None:
        self.base, self.stacks, self.in_stages = base, stacks, in_stages
        layers = [layer for _, each in stacks for layer in each] if tokens else []
        #: blocks of layers whose input has all tokens on every rank, and modules that gather them
        self.wholes = [
            child
            for layer in ([] if proven else layers)
            for child in layer.child.values()
            if innermost(child.mod)._modules and _needs_wholes(child, found)
        ]
        self.gathered = [block.path for block in self.wholes]
        self._layers, self._wholes = {layer.path for layer in layers}, {*self.gathered}

    def _token_axis(self, node: Schedule, word: Word) -> int | None:
        """Return the axis of the tokens if they are sharded around a module, else None."""
        if not is_within(node.path, self._layers) or is_within(node.path, self._wholes):
            return None
        return int(ast.literal_eval(word.keywords["axis"])) if "axis" in word.keywords else TOKENS

    def apply(self, node: Schedule, word: Word) -> None:
        """Apply one word; sharded tokens are gathered before and scattered after it."""
        name, names = word.name, word.names
        axis = self._token_axis(node, word)
        if name == "columns":
            parts = word.keywords.get("parts")
            count = None if parts is None else number_of(node, parts)
            split_column(node, _blocks(node, word.arguments), count)
        elif name == "shard":
            blocks = _blocks(node, word.arguments[2:])
            node.shard(names[0], axis=ast.literal_eval(word.arguments[1]), blocks=blocks)
        elif name == "experts":
            split_experts(node)
        elif name in ("rows", "sum"):
            if name == "rows":
                split_row(node)
            sum_output(node, axis)
        elif name == "sum_grad":
            read = word.keywords.get("read") if self.in_stages else None
            self._sum_gradients(node, names, [ast.unparse(read)] if read else [], axis)
        elif name == "gather":
            if axis is not None:
                node.sync("fwd_pre", "all_gather", axis=axis, tensor_parallel_output_grad=False)
                self.gathered.append(node.path)
        elif name == "whole":
            axis = ast.literal_eval(word.arguments[0])
            # The module computes the same on every rank, so each has the full gradient of the
            # gathered input: its own slice suffices, and a sum would multiply it by the ranks.
            node.sync("fwd_pre", "all_gather", axis=axis, tensor_parallel_output_grad=False)
            node.sync("fwd_post", "scatter", axis=axis)
        elif name == "sum_output_grad":
            kind = "all_reduce_grad" if axis is None else "all_gather"
            node.sync("fwd_post", kind, **({} if axis is None else {"axis": axis}))
        elif name == "partial":
            for parameter in names:
                node.annotate(parameter, "partial_grad", True)
        elif name == "fork_rng":
            if getattr(node.mod, "p", None) != 0.0:  # else it needs no seed
                node.fork_rng()
        elif name == "regroup":
            _regroup(node, names[0], number_of(node, word.arguments[1]))
        else:
            _divide(node, names)

    def _sum_gradients(
        self, node: Schedule, names: list[str], reads: list[str], axis: int | None
    ) -> None:
        """Sum the gradients of a module's inputs; `reads` never have sharded tokens."""
        takes = inspect.signature(node.mod.forward).parameters
        if len(takes) == 1 and not set(names) <= takes.keys():
            names = []  # a kernel has replaced the module, and its input has another name
        if axis is not None:
            node.sync("fwd_pre", "all_gather", axis=axis, argument=names or None)
            self.gathered.append(node.path)
            names = []  # the gather sums their gradients
        if axis is None or reads:
            node.sync("bwd_post", "all_reduce", argument=[*names, *reads] or None)

    def spread_tokens(self) -> None:
        """Shard tokens from the first layer to the last."""
        for block in self.wholes:
            block.sync("fwd_post", "scatter", axis=TOKENS)
        gathered = set(self.gathered)

        def sees_all(layer: Schedule, name: str) -> bool:
            path = f"{layer.path}.{name}" if name else layer.path
            if is_within(path, gathered):
                return True  # also parts of torch's layers, which are no nodes
            return bool(shards_of(innermost((layer[name] if name else layer).mod)))

        for stack, layers in self.stacks:
            spread_tokens(self.base, stack, layers, sees_all)


def is_within(path: str, around: set[str]) -> bool:
    """Return whether a module or an enclosing one is among the given ones."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in around for count in range(1, len(parts) + 1))


def _needs_wholes(block: Schedule, found: list[Entry]) -> bool:
    """Return whether a block takes tokens other than at its single entry, or stays replicated."""
    inside = [entry for entry in found if contains(block.path, entry.node.path)]
    said = [(e.node.path, word.name, len(word.arguments)) for e in inside for word in e.words]
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
    of_configs: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        config, _, entry = name.partition(".")
        if SIZE.fullmatch(name):
            node.set(name)
        elif entry:
            of_configs[config].append(entry)
        else:  # `whole` lets set() divide by the ranks and refuse a remainder
            node.set(name, whole=getattr(node.mod, name))
    for name, entries in of_configs.items():
        config = copy.copy(getattr(node.mod, name))  # all layers and the model share one
        own = config_entries(name, config) or {}
        for entry in entries:
            if entry in own:  # a frozen dataclass has no setattr()
                own[entry] //= node.world_size
            else:  # a config of Transformers maps further names to its own
                setattr(config, entry, getattr(config, entry) // node.world_size)
        node.set(name, config)
        if hasattr(node.mod, EINOPS):
            node.set(EINOPS, tuple(own.items()))


def _regroup(node: Schedule, name: str, heads: int) -> None:
    """Set the query heads of this rank for its one head of keys, which other ranks hold too."""
    if heads < node.world_size:
        node.set(name, getattr(node.mod, name) * heads // node.world_size)


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
    # Not eval(): a table is data, and its names are looked up on several modules.
    if isinstance(formula, ast.BinOp) and type(formula.op) in _OPERATORS:
        left, right = (value_of(each, around) for each in (formula.left, formula.right))
        return _OPERATORS[type(formula.op)](left, right)
    if isinstance(formula, ast.Constant):
        return int(formula.value)  # type: ignore[arg-type]
    path = ast.unparse(formula)
    for module in around:
        value = attribute_at(module, path)
        if isinstance(value, int):
            return value
    raise ValueError(
        f"{ast.unparse(formula)!r} is an attribute of no module from {type(around[0]).__name__} "
        "outward; fix the table"
    )


def attribute_at(module: nn.Module, path: str) -> Any:
    """Return an attribute, or an entry of a config by its dotted path; None if there is none."""
    value: Any = module
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value
