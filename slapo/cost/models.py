"""Models on meta with few layers, which represent large ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.example_inputs import example_inputs
from slapo.model_schedule.few_layers import ReducedStack, keep_few_layers, layer_lists
from slapo.model_schedule.stage_cuts import layer_costs
from slapo.weights.slots import replacements

#: A Transformers config, or a function that makes the model.
Source = Any

#: Transformers' head classes for training; the first one that supports the config is used.
_HEADS = ("MaskedLM", "CausalLM", "Seq2SeqLM", "ImageTextToText", "ImageClassification")


@dataclass
class ReducedModel:
    """A model of few layers on meta; `costs`, `parameters` and `dtype` describe the full model.

    `costs` maps each layer's path to its number of matrix parameters. `ties` has the groups of
    names that shared a parameter before :func:`untie`.
    """

    model: nn.Module
    stacks: list[ReducedStack]
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
    # BART is in the mapping of masked models as well, which would come first.
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


def shrink(model: nn.Module, few: bool = True) -> ReducedModel:
    """Keep the layers that represent all others, in place; ``few=False`` keeps all layers."""
    trained = (p for p in model.parameters() if p.is_floating_point() and p.requires_grad)
    dtype = next((p.dtype for p in trained), torch.float32)
    count = sum(p.numel() for p in model.parameters())
    paths = [
        f"{path}.{number}" for path, layers in layer_lists(model) for number in range(len(layers))
    ]
    costs = dict(zip(paths, layer_costs(model, paths), strict=True)) if paths else {}
    return ReducedModel(model, keep_few_layers(model, few), costs, count, dtype)


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


def on_fakes(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model on meta with fake CPU tensors; ties stay."""

    def fake(tensor: Tensor) -> Tensor:  # torch.empty_like of a real tensor takes ten times as long
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    with mode:
        fakes = replacements(model, fake)
    return copy.deepcopy(model, fakes)
