"""Tensor-parallel split of any model, derived from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo.derive.axes import Axis, Chosen, Term, axes_in, blocks_of, is_sharded, keep_whole
from slapo.derive.choose import choose
from slapo.derive.collectives import Collectives, ImpossibleError, place
from slapo.derive.sizes import Key, UnfitNumbersError, divided_attributes
from slapo.derive.trace import Trace, trace
from slapo.example_inputs import text_config
from slapo.graph.trace.leaves import is_torch_leaf
from slapo.history import contains, numberless
from slapo.sharding.sync_hooks import input_names

#: Maximum number of choices, each without the axes that made the previous one impossible.
_TRIES = 24


@dataclass
class Derivation:
    """The sharded axes, the collectives for them, and the attributes to divide."""

    found: Trace
    ranks: int
    chosen: Chosen
    collectives: Collectives
    #: attributes of modules that are divided by the number of ranks
    divided: list[Key]
    #: modules that gather their input and scatter their output: path -> axis
    gathering: dict[str, int]
    #: paths of embeddings sharded by rows, and of the layers that make logits
    tables: list[str]
    heads: list[str]
    #: names of axes that were given up, and the reasons
    banned: set[str]
    given_up: list[str]

    def sharded(self) -> Iterator[tuple[str, int, list[Term]]]:
        """Yield each sharded parameter or buffer once: name, axis, and the blocks along it."""
        seen: set[int] = set()
        for name, number in self.found.parameters.items():
            if number in seen or self.is_of_vocabulary(name):
                continue
            seen.add(number)
            for axis, term in enumerate(self.found.values[number].dims):
                if is_sharded(term, self.chosen):
                    yield name, axis, blocks_of(term, self.chosen) or [term]

    def is_of_vocabulary(self, name: str) -> bool:
        """Return whether a parameter belongs to a vocabulary table or the head."""
        return name.rpartition(".")[0] in (*self.tables, *self.heads)

    def free_axes(self) -> list[Axis]:
        """Return the axes of trained parameters that are free to be sharded."""
        trained = [v for v in self.found.values if v.is_parameter and v.needs_grad]
        axes = (axis for value in trained for term in value.dims for axis in axes_in(term))
        return [axis for axis in dict.fromkeys(axes) if not axis.whole]

    def axes_below(self, path: str, outside: bool = False) -> list[str]:
        """Return the axes of the sharded dimensions of a module's parameters, or of all others."""
        found: dict[str, None] = {}
        for name, number in self.found.parameters.items():
            if contains(path, name) != outside:
                dims = (t for t in self.found.values[number].dims if is_sharded(t, self.chosen))
                # All factors: heads that do not fit are not saved by sharding each head.
                found |= {axis.name: None for term in dims for axis in axes_in(term)}
        return list(found)

    def share(self) -> float:
        """Return the fraction of all parameter bytes that is sharded."""
        total = sharded = 0
        sizes = _bytes_of(self.found)
        split = {self.found.parameters[name] for name, _, _ in self.sharded()}
        split |= {n for name, n in self.found.parameters.items() if self.is_of_vocabulary(name)}
        for number, size in sizes.items():
            total += size
            sharded += size if number in split else 0
        return sharded / max(1, total)

    def left_whole(self) -> dict[str, list[str]]:
        """Return the replicated parameters of two or more dimensions, with a reason per axis."""
        split = {self.found.parameters[name] for name, _, _ in self.sharded()}
        found: dict[str, list[str]] = {}
        for name, number in self.found.parameters.items():
            value = self.found.values[number]
            if number in split or self.is_of_vocabulary(name) or not value.needs_grad:
                continue
            split.add(number)
            if len(value.dims) > 1:
                found[name] = [self._why(term) for term in value.dims]
        return found

    def _why(self, term: Term) -> str:
        axes = list(axes_in(term))
        if not axes:
            return "has size 1"
        free = [axis for axis in axes if not (axis.whole or axis.size % self.ranks)]
        if free and all(axis.name in self.banned for axis in free):
            return "given up"
        if free:
            return "excluded by the axes that are sharded"
        whys = {
            axis.whole or f"{axis.size} is not divisible by {self.ranks}": None for axis in axes
        }
        return "; ".join(whys)


def derive(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: int,
    banned: set[str],
) -> Derivation:
    """Derive a split for a number of ranks.

    A norm over all features of a layer keeps that layer replicated. Such a norm gathers its input
    and scatters its output if more bytes can be sharded then. `banned` has names of axes that stay
    replicated.
    """
    plain = _derive(model, args, kwargs, ranks, banned, frozenset())
    norms = _norms_behind_whole_layers(plain)
    # A norm over all heads needs the whole projection before it, which then stays whole with its
    # block.
    gathering = _derive(model, args, kwargs, ranks, banned, norms) if norms else plain
    return gathering if gathering.share() > plain.share() else plain


def _norms_behind_whole_layers(derivation: Derivation) -> frozenset[str]:
    """Return modules with only vectors that take the output of a replicated layer."""
    layers = {name.rpartition(".")[0] for name in derivation.left_whole()}
    ends: set[int] = set()
    found: set[str] = set()
    for node in derivation.found.nodes:
        call = node.call
        if node.kind == "exit" and call.path in layers:
            ends |= set(node.outputs)
        elif node.kind == "entry" and call.is_leaf and ends.issuperset(node.inputs):
            own = [parameter.dim() for parameter in call.module.parameters()]
            found |= {call.path} if own and max(own) == 1 else set()
    return frozenset(found)


def _derive(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: int,
    banned: set[str],
    gathering: frozenset[str],
) -> Derivation:
    tables, heads = vocabulary(model)
    found = trace(model, args, kwargs, heads, gathering)
    own = {*tables, *heads}
    # A table whose weight another module reads, as one that adds all positions, is no vocabulary.
    tables = [path for path in tables if _users(found, f"{path}.weight") <= own]
    tables = [path for path in tables if _looks_up_its_input(found, path)]
    heads = {p: size for p, size in heads.items() if _users(found, f"{p}.weight") <= own}
    for path in (*tables, *heads):
        for name in ("weight", "bias"):
            number = found.parameters.get(f"{path}.{name}")
            for term in found.values[number].dims if number is not None else ():
                keep_whole(term, f"a dimension of {path!r}, whose rows are those of the vocabulary")
    used = {number for node in found.nodes for number in node.inputs}
    for number in set(found.parameters.values()) - used:
        for term in found.values[number].dims:
            keep_whole(term, "used by no operation")
    for path, module in model.named_modules():
        # Recurrent layers pass their weights as a list, and parts of torch's layers are no nodes.
        has_parts = next(module.children(), None) is not None
        if isinstance(module, nn.RNNBase) or (has_parts and is_torch_leaf(module)):
            for name, number in found.parameters.items():
                for term in found.values[number].dims if contains(path, name) else ():
                    keep_whole(term, f"used by a kernel of {type(module).__name__}")
    _name_axes(found)
    sizes, banned, given_up = _bytes_of(found), set(banned), list[str]()
    # Without any axis nothing is impossible, so the last try succeeds.
    for number in range(_TRIES):
        chosen = {} if number == _TRIES - 1 else choose(found, sizes, ranks, banned)
        try:
            collectives = place(found, chosen)
            divided = divided_attributes(found.uses, found.attributes, found.read, chosen, ranks)
            gathered = _gathered_axes(found, chosen, gathering)
            break
        except (ImpossibleError, UnfitNumbersError) as error:
            given_up.append(str(error))
            # By name, which a later derivation of the same model on any rank gives to the same
            # axis.
            names = {axis.name for axis in error.axes} or {axis.name for axis in chosen}
            banned |= names
    own_heads = list(heads)
    return Derivation(
        found, ranks, chosen, collectives, divided, gathered, tables, own_heads, banned, given_up
    )


def _gathered_axes(found: Trace, chosen: Chosen, gathering: frozenset[str]) -> dict[str, int]:
    """Return path of a gathering module -> the axis sharded around it, counted from the last."""
    axes: dict[str, int] = {}
    for node in found.nodes:
        if node.kind == "entry" and node.call.path in gathering:
            dims = found.values[node.inputs[0]].dims
            for number, term in enumerate(dims):
                if not is_sharded(term, chosen):
                    continue
                if len(blocks_of(term, chosen) or ()) != 1:
                    why = f"{node.call.path!r} would gather several blocks"
                    raise ImpossibleError(why, [each for each in axes_in(term) if each in chosen])
                axes[node.call.path] = number - len(dims)
    return axes


def _name_axes(found: Trace) -> None:
    """Name the axes that views have made after the first parameter that has them."""
    for name, number in found.parameters.items():
        for dim, term in enumerate(found.values[number].dims):
            for place_in_dim, axis in enumerate(axes_in(term)):
                axis.name = axis.name or f"{name}:{dim}:{place_in_dim}"


def _bytes_of(found: Trace) -> dict[int, int]:
    """Return the bytes of each parameter, by the index of its value."""
    sizes: dict[int, int] = {}
    for name, parameter in found.model.named_parameters():
        number = found.parameters.get(name)
        if number is not None:
            sizes[number] = parameter.numel() * parameter.element_size()
    return sizes


def _users(found: Trace, name: str) -> set[str]:
    """Return the paths of the modules that compute with a parameter."""
    number = found.parameters[name]
    nodes = (node for node in found.nodes if node.kind == "operation")
    return {node.call.path for node in nodes if number in node.inputs}


def _looks_up_its_input(found: Trace, path: str) -> bool:
    """Return False for a table that makes its indices itself, such as Marian's of positions."""
    # Hooks around a table turn its first argument into rows of this rank.
    weight, given = found.parameters[f"{path}.weight"], set[int]()
    for node in found.nodes:
        if node.call.path != path:
            continue
        if node.kind == "entry" and node.name == input_names(node.call.module)[0][0]:
            given.update(node.outputs)
        elif node.kind == "operation" and weight in node.inputs and not given & {*node.inputs}:
            return False
    return True


def vocabulary(model: nn.Module) -> tuple[list[str], dict[str, int]]:
    """Return the paths of vocabulary tables, and the size of each layer that makes logits.

    They are handled separately: rows are sharded unevenly, and logits are gathered.
    """
    text = text_config(getattr(model, "config", None))
    outside = [(p, m) for p, m in model.named_modules() if numberless(p) == p]  # outside all lists
    tables = {p: m for p, m in outside if isinstance(m, nn.Embedding)}
    largest = max((table.num_embeddings for table in tables.values()), default=0)
    size = getattr(text, "vocab_size", None) or largest
    heads = {p: size for p, m in outside if type(m) is nn.Linear and m.out_features == size}
    own = [p for p, m in tables.items() if m.num_embeddings == size and not any(m.children())]
    return own, heads if size else {}
