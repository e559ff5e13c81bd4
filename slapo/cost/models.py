"""Models without memory, of few layers, that stand in for large ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.errors import MissingPackageError

#: A config of Transformers, or a function that makes the model.
Source = Any

#: Numbers that tell a layer's place, not its kind.
_PLACES = frozenset(
    "layer_idx layer_id layer_index layer_number block_idx idx index".split()  # noqa: SIM905
)


@dataclass
class Stack:
    """A list of layers, and those that stand in for all of them.

    Parameters
    ----------
    path
        Of the list.
    count
        Layers of the whole model.
    kept
        Numbers of those that the small model has, in order.
    stand_ins
        For each layer of the whole model, the place in `kept` of the one that is like it.
    """

    path: str
    count: int
    kept: list[int]
    stand_ins: list[int]


@dataclass
class Small:
    """A model of few layers on meta, and what it says of the whole one.

    Parameters
    ----------
    model
        On meta; to be copied.
    stacks
        In the order in which they are defined.
    costs
        Path of each layer of the whole model -> parameters in its matrices.
    head
        Those of each module outside the layers, by path.
    parameters
        Of the whole model.
    dtype
        In which it computes.
    ties
        Names of parameters that are one, where each place was given its own.
    """

    model: nn.Module
    stacks: list[Stack]
    costs: dict[str, float] = field(default_factory=dict)
    head: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    dtype: torch.dtype = torch.float32
    ties: list[set[str]] = field(default_factory=list)


def whole_on_meta(source: Source) -> nn.Module:
    """The model that a config or a function stands for, on meta and in training mode.

    Raises
    ------
    TypeError
        If it makes none.
    """
    if isinstance(source, nn.Module):
        raise TypeError(
            f"model_config is a model, a {type(source).__name__}; pass its config, or a function "
            "without arguments that makes it"
        )
    try:
        with torch.device("meta"):
            made = source() if _is_maker(source) else for_training(source)
    except (ArithmeticError, AttributeError, RuntimeError, AssertionError) as error:
        name = getattr(source, "__name__", type(source).__name__)
        raise ValueError(
            f"{name} makes no model: {type(error).__name__}: {str(error)[:400]}"
        ) from error
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"model_config made a {type(made).__name__}; pass a config of Transformers, or a "
            "function without arguments that returns an nn.Module"
        )
    return made.train()


def _is_maker(source: Source) -> bool:
    return callable(source) and not hasattr(source, "model_type")


def for_training(config: Any) -> nn.Module:
    """A model with the head that its family is trained with, random weights.

    The class that ``config.architectures`` names, where it says one; else language modelling, for
    encoders masked, or classification of images.

    Parameters
    ----------
    config
        Of Transformers.

    Raises
    ------
    MissingPackageError
        Without ``transformers``.
    TypeError
        If it is no config, or of a family without such a head.

    Examples
    --------
    >>> from transformers import BertConfig
    >>> small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> type(for_training(BertConfig(**small))).__name__
    'BertForMaskedLM'
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "models of configs need transformers: pip install 'slapo[hf]'"
        ) from error
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(
            f"model_config is a {type(config).__name__}; pass a config of Transformers, or a "
            "function without arguments that returns an nn.Module"
        )
    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in getattr(config, "architectures", None) or []:
        kind = getattr(transformers, name, None)
        if kind is not None and ("For" in name or name.endswith("LMHeadModel")):
            named: nn.Module = kind._from_config(config)
            return named
    kinds: list[Any] = [
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForImageClassification,
    ]
    if getattr(config, "is_encoder_decoder", False):
        kinds.insert(0, transformers.AutoModelForSeq2SeqLM)
    for kind in kinds:
        if type(config) in kind._model_mapping:
            made: nn.Module = kind.from_config(config)
            return made
    raise TypeError(
        f"{type(config).__name__} has no head for language modelling or images that this knows; "
        "set config.architectures, or pass a function that makes the model"
    )


def example_inputs(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    """What a model of Transformers is trained with, labels included.

    Parameters
    ----------
    batch, length
        Samples, and tokens of each (of a decoder as many).

    Raises
    ------
    TypeError
        If the model takes neither tokens nor images.

    Examples
    --------
    >>> from transformers import GPT2Config
    >>> model = for_training(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=32))
    >>> {name: tuple(t.shape) for name, t in example_inputs(model, 2, 8).items()}
    {'input_ids': (2, 8), 'labels': (2, 8), 'attention_mask': (2, 8)}
    """
    name = getattr(model, "main_input_name", None)
    config: Any = getattr(model, "config", None)
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.zeros(batch, getattr(config, "num_channels", 3), height, width)
        return {name: images, "labels": torch.zeros(batch, dtype=torch.long)}
    takes = inspect.signature(model.forward).parameters
    if name == "input_ids" and {"pixel_values", "input_features", "input_values"} & set(takes):
        raise TypeError(
            f"{type(model).__name__} takes images or sound beside tokens; pass inputs=f, where "
            "f(batch) returns a dict of all that it is trained with, labels included"
        )
    if name != "input_ids":
        raise TypeError(
            f"{type(model).__name__} says not what it takes; pass inputs=f, where f(batch) returns "
            "a dict of tensors that the model is called with, labels included"
        )
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": tokens + 1}


def check_length(model: nn.Module, length: int) -> None:
    """Refuse samples for which a model has no positions: without numbers nothing would fail.

    Raises
    ------
    ValueError
        If its table of positions is shorter.
    """
    config: Any = getattr(model, "config", None)
    names = ("max_position_embeddings", "max_target_positions")
    stated = [n for n in names if isinstance(getattr(config, n, None), int)]
    words = getattr(model, "get_input_embeddings", lambda: None)()
    for name in stated:
        positions = getattr(config, name)
        rows = [r for m in model.modules() if m is not words for r in _rows(m, positions)]
        if rows and length > min(rows):
            raise ValueError(
                f"seq_len={length}, and {type(model).__name__} has {min(rows)} positions; pass "
                f"seq_len={min(rows)} or less, or a config with more {name}"
            )


def _rows(module: nn.Module, positions: int) -> Iterator[int]:
    """Of a module's table of so many positions, how many a sample can use."""
    if isinstance(module, nn.Embedding):
        count = module.num_embeddings
        if positions <= count <= positions + 2:  # OPT's has two more
            # Positions count from behind the padding's, as RoBERTa has them.
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            yield min(positions, count - before)
        return
    for table in module.buffers(recurse=False):
        if table.dim() == 2 and table.shape[0] == positions:
            yield positions


# --- few layers in place of many ------------------------------------------------------------------
def shrink(model: nn.Module, few: bool = True) -> Small:
    """Keep of each list of layers the first, the last, and one of each kind between them.

    Layers are of one kind if they have the same modules, the same parameters by name, shape and
    type, and the same plain attributes. In place: the model is the small one afterwards.

    Parameters
    ----------
    model
        On meta.
    few
        False keeps all layers.

    Examples
    --------
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))
    >>> small = shrink(Net())
    >>> small.stacks[0].kept, small.stacks[0].stand_ins
    ([0, 1, 9], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    >>> len(small.model.layers)
    3
    """
    unique = {id(p): p for p in model.parameters()}
    small = Small(model, [], parameters=sum(p.numel() for p in unique.values()))
    floating = (p.dtype for p in unique.values() if p.is_floating_point() and p.requires_grad)
    small.dtype = next(floating, torch.float32)
    lists = list(_lists(model))
    inside = {id(m) for _, each in lists for m in each.modules()}
    for path, layers in lists:
        for number, layer in enumerate(layers):
            small.costs[f"{path}.{number}"] = _matrices(layer)
        small.stacks.append(_shrink(model, path, layers, few))
    for path, module in model.named_modules():
        if id(module) not in inside and module._parameters:
            small.head[path] = _matrices(module)
    return small


def untie(small: Small, together: Collection[frozenset[str]] = ()) -> Small:
    """A copy in which each place has a parameter of its own, as pipeline stages have.

    Parameters
    ----------
    small
        Stays as it is.
    together
        Names that stay tied to each other, as they lie in one stage.

    Examples
    --------
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    ...         self.head.weight = self.table.weight
    >>> untied = untie(shrink(Net()))
    >>> [sorted(names) for names in untied.ties], len(list(untied.model.parameters()))
    ([['head.weight', 'table.weight']], 2)
    """
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


def _matrices(module: nn.Module) -> float:
    return float(sum(p.numel() for p in module.parameters() if p.dim() > 1))


def _lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of two layers or more that are alike in class."""
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
    count = len(layers)
    if not few:
        return Stack(path, count, list(range(count)), list(range(count)))
    kinds = [_kind(layer) for layer in layers]
    inner: dict[Any, int] = {}
    for number in range(1, count - 1):
        inner.setdefault(kinds[number], number)
    kept = sorted({0, count - 1, *inner.values()})
    stand_ins = [
        kept.index(number if number in (0, count - 1) else inner[kinds[number]])
        for number in range(count)
    ]
    if len(kept) < count:
        container = model.get_submodule(path.rpartition(".")[0])
        setattr(container, path.rpartition(".")[2], nn.ModuleList(layers[n] for n in kept))
        _shorten_config(getattr(model, "config", None), count, kept)
    return Stack(path, count, kept, stand_ins)


def _kind(layer: nn.Module) -> Any:
    parts = []
    for name, module in layer.named_modules():
        plain = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, tuple, type(None)))
            and key not in _PLACES
            and _is_plain(value)
        ]
        shapes = [
            (key, tuple(p.shape), p.dtype, p.requires_grad)
            for key, p in module._parameters.items()
            if p is not None
        ]
        parts.append((name, type(module), tuple(sorted(plain, key=str)), tuple(shapes)))
    return tuple(parts)


def _is_plain(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _shorten_config(config: Any, count: int, kept: Sequence[int]) -> None:
    """Lists with an entry for each layer have one for each that is kept."""
    configs = [config, getattr(config, "text_config", None)]
    for each in configs:
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)) and len(value) == count and len(kept) < count:
                setattr(each, name, type(value)(value[n] for n in kept))


# --- fakes --------------------------------------------------------------------------------------
def on_fakes(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model on meta whose tensors say that they lie on the CPU, and have no memory."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                new: Tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    copied = copy.deepcopy(model)
    for module in copied.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for table in tables:
            for name, value in table.items():
                if isinstance(value, Tensor):
                    table[name] = fake(value)
    return copied


def fake_inputs(inputs: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    """Inputs of the same shapes; what is no tensor stays."""
    return {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


Inputs = Callable[[int], Mapping[str, Any]]
