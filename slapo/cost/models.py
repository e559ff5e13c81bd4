"""Models on meta with few layers, which represent large ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.example_inputs import example_inputs
from slapo.model_schedule.stage_cuts import layer_costs
from slapo.weights.slots import replacements

#: A Transformers config, or a function that makes the model.
Source = Any

#: Attributes for the position of a layer, which do not affect its kind.
_PLACES = frozenset(
    "layer_idx layer_id layer_index layer_number block_idx idx index".split()  # noqa: SIM905
)
#: Transformers' head classes for training; the first one that supports the config is used.
_HEADS = ("MaskedLM", "CausalLM", "Seq2SeqLM", "ImageTextToText", "ImageClassification")


@dataclass
class Stack:
    """A list of layers; the small model has those with the indices `kept`.

    `stand_ins` maps each layer of the full model to the position in `kept` of an equal layer.
    """

    path: str
    kept: list[int]
    stand_ins: list[int]


@dataclass
class ReducedModel:
    """A model of few layers on meta; `costs`, `parameters` and `dtype` describe the full model.

    `costs` maps each layer's path to its number of matrix parameters. `ties` has the groups of
    names that shared a parameter before :func:`untie`.
    """

    model: nn.Module
    stacks: list[Stack]
    costs: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    dtype: torch.dtype = torch.float32
    ties: list[set[str]] = field(default_factory=list)


def whole_on_meta(source: Source) -> nn.Module:
    """Build the full model of a config or a function, on meta and in training mode."""
    is_config = hasattr(source, "model_type")
    made: Any = None
    try:
        with torch.device("meta"):
            if is_config:
                made = for_training(source)
            elif callable(source) and not isinstance(source, nn.Module):
                made = source()
    except (ArithmeticError, AttributeError, RuntimeError, AssertionError) as error:
        name = getattr(source, "__name__", type(source).__name__)
        raise ValueError(
            f"{name} cannot make a model: {type(error).__name__}: {str(error)[:400]}"
        ) from error
    if not isinstance(made, nn.Module):
        given = f"made a {type(made).__name__}" if made is not None else f"is {source!r:.80}"
        raise TypeError(
            f"model_config {given}; pass a Transformers config, or a function without arguments "
            "that returns an nn.Module"
        )
    return made.train()


def for_training(config: Any) -> nn.Module:
    """Build a model with its family's training head and random weights."""
    import transformers

    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in getattr(config, "architectures", None) or []:
        kind: Any = getattr(transformers, name, None)
        if kind is not None and ("For" in name or name.endswith("LMHeadModel")):
            named: nn.Module = kind._from_config(config)
            return named
    first = ["Seq2SeqLM"] if getattr(config, "is_encoder_decoder", False) else []
    for head in (*first, *_HEADS):
        kind = getattr(transformers, f"AutoModelFor{head}")
        if type(config) in kind._model_mapping:
            made: nn.Module = kind.from_config(config)
            return made
    raise TypeError(
        f"{type(config).__name__} has no head for language modeling or images that the dry run "
        "supports; set config.architectures, or pass a function that makes the model"
    )


def training_inputs(model: Any, batch: int = 3, length: int = 13) -> dict[str, Tensor]:
    """Return CPU training inputs of a Transformers model, labels included."""
    others = {"pixel_values", "input_features", "input_values"}
    name = getattr(model, "main_input_name", None)
    several = others.intersection(inspect.signature(model.forward).parameters) - {name}
    if name not in ("input_ids", "pixel_values") or several:
        raise TypeError(
            f"cannot tell which inputs {type(model).__name__} expects; pass inputs=f, where "
            "f(batch) returns a dict of all its training inputs, labels included"
        )
    sizes: Any = {"batch": batch, "length": length, "decoder_length": length}
    dtype = torch.get_default_dtype()
    return example_inputs(model, **sizes, labels=True, dtype=dtype, device="cpu")


def check_length(model: Any, length: int) -> None:
    """Refuse samples longer than the position table, since fake tensors raise no error."""
    words = getattr(model, "get_input_embeddings", lambda: None)()
    for name in ("max_position_embeddings", "max_target_positions"):
        stated = getattr(getattr(model, "config", None), name, None)
        if not isinstance(stated, int):
            continue
        rows = []
        for module in model.modules():
            count = module.num_embeddings if isinstance(module, nn.Embedding) else 0
            if stated <= count <= stated + 2 and module is not words:  # OPT's has two more rows
                # RoBERTa's positions start after the padding row.
                before = 0 if module.padding_idx is None else module.padding_idx + 1
                rows.append(min(stated, count - before))
        rows += [stated for b in model.buffers() if b.dim() == 2 and len(b) == stated]
        if rows and length > min(rows):
            raise ValueError(
                f"seq_len={length}, but {type(model).__name__} has {min(rows)} positions; pass "
                f"seq_len={min(rows)} or less, or a config with more {name}"
            )


# --- few layers instead of many -------------------------------------------------------------------
def shrink(model: nn.Module, few: bool = True) -> ReducedModel:
    """Keep the first and last layer of each list, and one of each kind between, in place.

    Layers of one kind have equal modules, plain attributes, and names, shapes and dtypes of
    parameters. ``few=False`` keeps all layers.
    """
    trained = (p for p in model.parameters() if p.is_floating_point() and p.requires_grad)
    dtype = next((p.dtype for p in trained), torch.float32)
    count = sum(p.numel() for p in model.parameters())
    lists = list(_lists(model))
    paths = [f"{path}.{number}" for path, layers in lists for number in range(len(layers))]
    costs = dict(zip(paths, layer_costs(model, paths), strict=True)) if paths else {}
    stacks = [_shrink(model, path, layers, few) for path, layers in lists]
    return ReducedModel(model, stacks, costs, count, dtype)


def untie(small: ReducedModel, together: Collection[frozenset[str]] = ()) -> ReducedModel:
    """Copy a model without tied parameters, as in pipeline stages; `together` stays tied."""
    names: dict[int, set[str]] = {}
    for name, parameter in small.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    ties = [group for group in names.values() if len(group) > 1]
    if not ties:
        return small
    model = copy.deepcopy(small.model)
    for group in ties:
        twins: dict[Any, nn.Parameter] = {}
        for name in sorted(group):
            path, _, leaf = name.rpartition(".")
            own = model.get_parameter(name)
            key = next((names for names in together if name in names), name)
            if key not in twins:
                twins[key] = nn.Parameter(own.detach().clone(), own.requires_grad)
            model.get_submodule(path)._parameters[leaf] = twins[key]
    return replace(small, model=model, ties=ties)


def _lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of at least two layers, of at most two classes."""
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if (
            isinstance(child, nn.ModuleList)
            and len(child) > 1
            and len({type(layer) for layer in child}) <= 2
            and all(any(True for _ in layer.parameters()) for layer in child)
        ):
            yield path, child
        else:
            yield from _lists(child, path)


def _shrink(model: nn.Module, path: str, layers: nn.ModuleList, few: bool) -> Stack:
    numbers = list(range(len(layers)))
    if not few:
        return Stack(path, numbers, numbers)
    # The first of a kind represents it; the first and last of the list represent only themselves.
    kinds = [_kind(layer) for layer in layers]
    firsts = {kinds[n]: n for n in reversed(numbers[1:-1])}
    stand_ins = [numbers[0], *(firsts[kind] for kind in kinds[1:-1]), numbers[-1]]
    kept = sorted(set(stand_ins))
    if len(kept) < len(layers):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList(layers[n] for n in kept))
        _shorten_config(getattr(model, "config", None), len(layers), kept)
    return Stack(path, kept, [kept.index(n) for n in stand_ins])


def _kind(layer: nn.Module) -> Any:
    plain = (bool, int, float, str, tuple, type(None))
    parts = []
    for name, module in layer.named_modules():
        values = {
            k: v for k, v in vars(module).items() if isinstance(v, plain) and k not in _PLACES
        }
        own = {k: p for k, p in module._parameters.items() if p is not None}
        shapes = [(k, p.shape, p.dtype, p.requires_grad) for k, p in own.items()]
        parts.append((name, type(module), repr(sorted(values.items())), tuple(shapes)))
    return tuple(parts)


def _shorten_config(config: Any, count: int, kept: Sequence[int]) -> None:
    """Shorten config lists with one entry per layer to the kept layers."""
    for each in (config, getattr(config, "text_config", None)):
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)) and len(value) == count:
                setattr(each, name, type(value)(value[n] for n in kept))


def on_fakes(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model on meta with fake CPU tensors; ties stay."""
    with mode:
        fakes = replacements(model, lambda tensor: torch.empty_like(tensor, device="cpu"))
    return copy.deepcopy(model, fakes)
