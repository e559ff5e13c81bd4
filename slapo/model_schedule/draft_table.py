"""A derivation written as a recipe: tables of paths and words."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from slapo.derive.axes import Term, axes_in, is_sharded, size_of
from slapo.derive.collectives import is_row_layer
from slapo.derive.derivation import Derivation
from slapo.derive.sizes import formula_of
from slapo.errors import SlapoError
from slapo.history import contains, numberless
from slapo.model_schedule.auto import OF_LAYERS, lists_of_layers
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.splits import value_of
from slapo.selection import compile_glob
from slapo.verify.placement.pointwise import DRAWS
from slapo.weights.slots import own_slots


def recipe_of_derivation(derivation: Derivation, base: str) -> Recipe:
    """Convert a derivation to a recipe with paths relative to the base model.

    Raises SlapoError if a vocabulary table is outside the base model.
    """
    model = derivation.found.model
    words = _Words(derivation).by_path()
    within = f"{base}." if base else ""
    outside = [path for path in derivation.tables if not f"{path}.".startswith(within)]
    if outside:
        raise SlapoError(
            f"draft: {type(model).__name__} shards {outside} outside its base model {base!r}, "
            "where paths of recipes start; schedule these with primitives"
        )
    every = [f"{path}.".removeprefix(within)[:-1] for path, _ in model.named_modules()]
    stacks = tuple(
        Stack(path, last=_last(derivation, within, path))
        for path in lists_of_layers(model.get_submodule(base))
    )
    refuses = {} if stacks else dict.fromkeys(OF_LAYERS, "the draft found no list of layers")
    if stacks and not words:  # every rank would compute whole layers on its own tokens
        refuses["sequence_parallel"] = "the draft shards no layer"
    around = [p for p in words if any(contains(p, within + stack.layers) for stack in stacks)]
    if around:
        refuses["pipeline_cuts"] = f"gradients are summed around all layers, at {around}"
    return Recipe(
        stacks=stacks,
        embeddings=" ".join(path.removeprefix(within) for path in derivation.tables),
        heads=" ".join(derivation.heads),
        counts="",
        refuses=refuses,
        splits=_globbed({f"{p}.".removeprefix(within)[:-1]: w for p, w in words.items()}, every),
    )


def _last(derivation: Derivation, within: str, path: str) -> str:
    """Return the path of the norm that takes the last layer's output and runs once, else ``""``."""
    nodes = derivation.found.nodes
    count = len(derivation.found.model.get_submodule(within + path))  # type: ignore[arg-type]
    # Follows the last layer's output through modules that take nothing else, such as a dropout, up
    # to the first norm. Recorded nodes are in order of execution, so one pass suffices.
    final, outputs = f"{within}{path}.{count - 1}", set[int]()
    for node in nodes:
        goes_on = bool(outputs) and outputs.issuperset(node.inputs)
        if node.kind == "exit" and (goes_on or node.call.path == final):
            outputs |= set(node.outputs)
        elif node.kind == "entry" and goes_on and _is_norm(node.call.module):
            norm = node.call.path
            # Sharded tokens are gathered behind this norm. A norm that also runs elsewhere would
            # gather tokens that were never scattered.
            calls = {id(each.call) for each in nodes if each.call.path == norm}
            is_one = norm.startswith(within) and len(calls) == 1
            return norm.removeprefix(within) if is_one else ""
    return ""


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module may be a norm, unlike a dropout or empty module in front of one."""
    return bool(module._parameters) or "Norm" in type(module).__name__


def _globbed(words: Mapping[str, str], every: list[str]) -> dict[str, str]:
    """Merge equal entries of layers into one pattern, if it matches no other modules."""
    alike: dict[str, set[str | None]] = {}
    found: dict[str, str] = {}
    for path, said in words.items():
        pattern = numberless(path)
        if pattern not in alike:
            # A star stands for a name too. Modules without an entry count as different.
            matches = compile_glob(pattern).fullmatch
            alike[pattern] = {words.get(each) for each in every if matches(each)}
        found[pattern if alike[pattern] == {said} else path] = said
    return found


class _Words:
    """Words of each module."""

    def __init__(self, derivation: Derivation) -> None:
        self.derivation, self.model = derivation, derivation.found.model
        self.sums = dict(derivation.collectives.sums)
        self.said: defaultdict[str, list[str]] = defaultdict(list)

    def by_path(self) -> dict[str, str]:
        """Return path -> words, in module order."""
        self._shards()
        # Sums that ``rows`` stands for are gone by now.
        for path in self.sums:
            self.said[path].append("sum")
        for path, axis in self.derivation.gathering.items():
            self.said[path].append(f"whole({axis})")
        self._gradients()
        self._numbers()
        self._draws()
        order = [path for path, _ in self.model.named_modules()]
        return {path: ", ".join(self.said[path]) for path in order if path in self.said}

    def _shards(self) -> None:
        """Add words for layers sharded by columns or rows, and for single tensors."""
        shards: defaultdict[str, dict[str, tuple[int, list[Term]]]] = defaultdict(dict)
        for name, axis, blocks in self.derivation.sharded():
            owner, _, leaf = name.rpartition(".")
            shards[owner][leaf] = axis, blocks
        for owner, tensors in shards.items():
            module = self.model.get_submodule(owner)
            out = 1 if type(module).__name__ == "Conv1D" else 0
            blocks_of = {leaf: self._blocks(owner, each) for leaf, (_, each) in tensors.items()}
            axes = {leaf: axis for leaf, (axis, _) in tensors.items()}
            dims = {slot.leaf: slot.tensor.dim() for slot in own_slots(module)}
            # ``columns`` shards all tensors of the layer, so a layer with a replicated one is
            # listed by tensor.
            own = {leaf: out if count > 1 else 0 for leaf, count in dims.items() if count}
            is_row = axes == {"weight": 1 - out} and is_row_layer(module)
            if axes == own and len(set(blocks_of.values())) == 1:
                shown = next(iter(blocks_of.values()))
                self.said[owner].append(f"columns({shown})" if shown else "columns")
            elif is_row and owner in self.sums and not blocks_of["weight"]:
                self.said[owner].append("rows")
                del self.sums[owner]
            else:
                for leaf, axis in axes.items():
                    more = f", {blocks_of[leaf]}" if blocks_of[leaf] else ""
                    self.said[owner].append(f"shard({leaf}, {axis}{more})")

    def _gradients(self) -> None:
        """Add words for gradients summed at modules and for replicated parameters."""
        placed, arguments = self.derivation.collectives, defaultdict[str, list[str]](list)
        for path, name in placed.gradients:
            if name:
                arguments[path].append(name)
            else:
                self.said[path].append("sum_output_grad")
        self._say("sum_grad", {path: sorted(names) for path, names in arguments.items()})
        partial: defaultdict[str, list[str]] = defaultdict(list)
        seen: set[int] = set()
        for name, number in self.derivation.found.parameters.items():
            # Tied parameters have one number and one gradient, which is summed once. Gradients of
            # tables are summed by the vocabulary's own hooks.
            is_new = number in placed.partial and number not in seen
            if is_new and not self.derivation.is_of_vocabulary(name):
                seen.add(number)
                partial[name.rpartition(".")[0]].append(name.rpartition(".")[2])
        self._say("partial", partial)

    def _numbers(self) -> None:
        """Add words for divided attributes of modules and of their configs."""
        divided: defaultdict[str, list[str]] = defaultdict(list)
        for path, name in self.derivation.divided:
            divided[path].append(name)
        self._say("divide", divided)

    def _draws(self) -> None:
        """Add ``fork_rng`` where random values are drawn for sharded tensors, as in dropout."""
        chosen, found = self.derivation.chosen, self.derivation.found
        for node in found.nodes:
            if node.kind == "operation" and node.name in DRAWS:
                path, dims = node.call.path, found.values[node.outputs[0]].dims
                if any(is_sharded(term, chosen) for term in dims):
                    self.said[path] += [] if "fork_rng" in self.said[path] else ["fork_rng"]

    def _say(self, word: str, arguments: Mapping[str, list[str]]) -> None:
        for path, names in arguments.items():
            self.said[path].append(f"{word}({', '.join(names)})")

    # --- blocks ---------------------------------------------------------------------------------
    def _blocks(self, owner: str, blocks: list[Term]) -> str:
        """Return ``""`` for one block, the number of equal ones, or sizes as formulas."""
        sizes = [size_of(block) for block in blocks]
        if len(set(sizes)) == 1:
            return str(len(sizes)) if len(sizes) > 1 else ""
        paths = [owner]
        while paths[-1]:
            paths.append(paths[-1].rpartition(".")[0])
        around = [self.model.get_submodule(path) for path in paths]
        # Keys and values of a head have the same sharded axes and the same size.
        alike = [(size_of(block), *self._sharded_axes(block)) for block in blocks]
        formulas: dict[Any, str] = {}
        for key, block, size in zip(alike, blocks, sizes, strict=True):
            formula = formula_of(block, self.derivation.found.uses)
            if formula is not None and _gives(str(formula), size, around):
                formulas.setdefault(key, str(formula))
        return ", ".join(formulas.get(key, str(n)) for key, n in zip(alike, sizes, strict=True))

    def _sharded_axes(self, block: Term) -> Iterator[str]:
        return (axis.name for axis in axes_in(block) if axis in self.derivation.chosen)


def _gives(formula: str, size: int, around: list[nn.Module]) -> bool:
    """Return whether a formula, read from the layer outward, has the intended value."""
    try:
        return value_of(ast.parse(formula, mode="eval").body, around) == size
    except ValueError:
        return False
