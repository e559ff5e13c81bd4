"""Few layers that represent the many of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

#: Attributes for the position of a layer, which do not affect its kind.
_PLACES = frozenset(
    "layer_idx layer_id layer_index layer_number block_idx idx index".split()  # noqa: SIM905
)


@dataclass
class ReducedStack:
    """A list of layers; the small model has those with the indices `kept`.

    `stand_ins` maps each layer of the full model to the position in `kept` of an equal layer.
    """

    path: str
    kept: list[int]
    stand_ins: list[int]


def keep_few_layers(model: nn.Module, few: bool = True) -> list[ReducedStack]:
    """Keep the first and last layer of each list, and one of each kind between, in place.

    Layers of one kind have equal modules, plain attributes, and names, shapes and dtypes of
    parameters. ``few=False`` keeps all layers.
    """
    return [_keep_few(model, path, layers, few) for path, layers in list(layer_lists(model))]


def layer_lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of at least two layers, of at most two classes."""
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if (
            isinstance(child, nn.ModuleList)
            and len(child) > 1
            and len({type(layer) for layer in child}) <= 2
            and all(layer is not None and any(True for _ in layer.parameters()) for layer in child)
        ):
            yield path, child
        else:
            yield from layer_lists(child, path)


def _keep_few(model: nn.Module, path: str, layers: nn.ModuleList, few: bool) -> ReducedStack:
    numbers = list(range(len(layers)))
    if not few:
        return ReducedStack(path, numbers, numbers)
    # The first of a kind represents it; the first and last of the list represent only themselves.
    kinds = [_kind(layer) for layer in layers]
    firsts = {kinds[n]: n for n in reversed(numbers[1:-1])}
    stand_ins = [numbers[0], *(firsts[kind] for kind in kinds[1:-1]), numbers[-1]]
    kept = sorted(set(stand_ins))
    if len(kept) < len(layers):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList(layers[n] for n in kept))
        # ``num_hidden_layers`` may stay: Transformers slices the list of layers by it. Lists such
        # as ``layer_types`` are indexed by a layer's position in the list.
        shorten_config(getattr(model, "config", None), len(layers), kept)
    return ReducedStack(path, kept, [kept.index(n) for n in stand_ins])


def _kind(layer: nn.Module) -> Any:
    plain = (bool, int, float, str, tuple, list, type(None), FunctionType, BuiltinFunctionType)
    parts = []
    for name, module in layer.named_modules():
        # Functions count by identity: layers with different activations are of different kinds.
        values = {
            k: v for k, v in vars(module).items() if isinstance(v, plain) and k not in _PLACES
        }
        own = {k: p for k, p in module._parameters.items() if p is not None}
        shapes = [(k, p.shape, p.dtype, p.requires_grad) for k, p in own.items()]
        parts.append((name, type(module), repr(sorted(values.items())), tuple(shapes)))
    return tuple(parts)


def shorten_config(config: Any, count: int, kept: Sequence[int]) -> None:
    """Shorten config lists with one entry per layer to the kept layers."""
    for each in (config, getattr(config, "text_config", None)):
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)) and len(value) == count:
                setattr(each, name, type(value)(value[n] for n in kept))
