"""Effects of sharding a tensor, as a table by class of module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from slapo.sharding.layout import PARTIAL, REPLICATE, Layout, Placement, shard


@dataclass(frozen=True)
class Effect:
    """Consequences of sharding one tensor along one axis.

    Parameters
    ----------
    sizes
        Attributes that hold the size of that axis.
    layout
        Known layout of the module's activations after sharding.
    divides
        Further attributes that are divided by the world size.
    means_all
        True if a tensor of one element applies to all channels, so that no slice may have one
        element.
    """

    sizes: tuple[str, ...]
    layout: Layout
    divides: tuple[str, ...] = ()
    means_all: bool = False


Rule = Callable[[nn.Module, str, int], Effect]


def _column(size: str, axis: int = -1) -> Effect:
    return Effect((size,), Layout(REPLICATE, shard(axis)))


def _row(size: str, axis: int = -1) -> Effect:
    return Effect((size,), Layout(shard(axis), PARTIAL))


def _table(entries: dict[tuple[str, int], Effect]) -> Rule:
    def rule(module: nn.Module, tensor: str, axis: int) -> Effect:
        return entries.get((tensor, axis), UNKNOWN)

    return rule


UNKNOWN = Effect((), Layout())

_LINEAR = _table(
    {
        ("weight", 0): _column("out_features"),
        ("bias", 0): _column("out_features"),
        ("weight", 1): _row("in_features"),
    }
)
#: GPT-2's layer: a linear layer with a transposed weight.
_CONV1D_HF = _table(
    {("weight", 1): _column("nf"), ("bias", 0): _column("nf"), ("weight", 0): _row("nx")}
)
_BILINEAR_COLUMN = _column("out_features")
_EMBEDDING = _table(
    {
        ("weight", 0): Effect(("num_embeddings",), Layout(REPLICATE, PARTIAL, vocabulary=True)),
        ("weight", 1): _column("embedding_dim"),
    }
)
_PRELU = _table({("weight", 0): Effect(("num_parameters",), Layout(), means_all=True)})


def _conv(dims: int, weight_axes: tuple[int, int]) -> Rule:
    """`weight_axes`: the axes of output and input channels in the weight."""
    channel = -1 - dims
    out_axis, in_axis = weight_axes

    def rule(module: nn.Module, tensor: str, axis: int) -> Effect:
        grouped = getattr(module, "groups", 1) > 1
        if tensor == "bias" or (tensor == "weight" and axis == out_axis):
            if not grouped:
                return _column("out_channels", channel)
            if out_axis == 0:  # each rank gets complete groups and their input channels
                both = Layout(shard(channel), shard(channel))
                return Effect(("out_channels",), both, ("in_channels", "groups"))
        if tensor == "weight" and axis == in_axis and not grouped:
            return _row("in_channels", channel)
        if grouped:
            raise ValueError(
                f"axis {axis} of {tensor!r} of a grouped {type(module).__name__} "
                f"(groups={module.groups}) cannot be sharded; shard axis 0 of a convolution, "
                "which gives each rank whole groups"
            )
        return UNKNOWN

    return rule


def _per_channel(size: str, axis: int | None, divides: tuple[str, ...] = ()) -> Rule:
    both = Placement("shard", axis)
    effect = Effect((size,), Layout(both, both), divides)

    def rule(module: nn.Module, tensor: str, axis: int) -> Effect:
        return effect if axis == 0 else UNKNOWN

    return rule


def _normalizes_over_axis(module: nn.Module, tensor: str, axis: int) -> Effect:
    raise ValueError(
        f"{type(module).__name__} normalizes over the axis of its {tensor!r}: normalizing a slice "
        "alone would change the result; keep it whole"
    )


def _splits_heads_itself(module: nn.Module, tensor: str, axis: int) -> Effect:
    raise ValueError(
        f"{type(module).__name__} splits its weights by full sizes; replace it with a module that "
        "has separate projections, and shard those"
    )


def _holds_flat_weights(module: nn.Module, tensor: str, axis: int) -> Effect:
    raise ValueError(
        f"{type(module).__name__} computes with a list of its weights, which a slice of {tensor!r} "
        "would not reach; replace it with your own cells and shard those"
    )


def _bag(module: nn.Module, tensor: str, axis: int) -> Effect:
    if axis == 1:
        return _column("embedding_dim")
    raise ValueError(
        "an EmbeddingBag cannot be sharded by rows: its mean and maximum need all tokens of a bag; "
        "shard axis 1, or use nn.Embedding"
    )


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _LINEAR,
    nn.Embedding: _EMBEDDING,
    nn.Conv1d: _conv(1, (0, 1)),
    nn.Conv2d: _conv(2, (0, 1)),
    nn.Conv3d: _conv(3, (0, 1)),
    nn.ConvTranspose1d: _conv(1, (1, 0)),
    nn.ConvTranspose2d: _conv(2, (1, 0)),
    nn.ConvTranspose3d: _conv(3, (1, 0)),
    # The class takes inputs with or without a length, so the position of the channels, counted from
    # the end, is unknown.
    nn.BatchNorm1d: _per_channel("num_features", None),
    nn.BatchNorm2d: _per_channel("num_features", -3),
    nn.BatchNorm3d: _per_channel("num_features", -4),
    nn.SyncBatchNorm: _per_channel("num_features", None),
    nn.InstanceNorm1d: _per_channel("num_features", -2),
    nn.InstanceNorm2d: _per_channel("num_features", -3),
    nn.InstanceNorm3d: _per_channel("num_features", -4),
    nn.Bilinear: _table({("weight", 0): _BILINEAR_COLUMN, ("bias", 0): _BILINEAR_COLUMN}),
    nn.EmbeddingBag: _bag,
    nn.RNNBase: _holds_flat_weights,
    nn.MultiheadAttention: _splits_heads_itself,
    nn.GroupNorm: _per_channel("num_channels", None, ("num_groups",)),
    nn.PReLU: _PRELU,
    nn.LayerNorm: _normalizes_over_axis,
    nn.RMSNorm: _normalizes_over_axis,
}

#: Classes outside torch by qualified name, so that nothing is imported for them.
_FOREIGN: dict[str, Rule] = {"transformers.pytorch_utils.Conv1D": _CONV1D_HF}


def register_shard_rule(cls: type[nn.Module], rule: Rule) -> None:
    """Register the effects of sharding for a class of your own.

    Parameters
    ----------
    cls
        The class; subclasses inherit the rule unless they have their own.
    rule
        ``rule(module, tensor_name, axis) -> Effect``; it may raise ``ValueError``.
    """
    _RULES[cls] = rule


def tensor_of_size(module: nn.Module, name: str) -> tuple[str, int] | None:
    """The tensor and axis whose size an attribute repeats, or None."""
    for tensor, value in module._parameters.items():
        for axis in range(0 if value is None else value.dim()):
            with suppress(ValueError):  # raised if this axis cannot be sharded
                if name in effect_of(module, tensor, axis).sizes:
                    return tensor, axis
    return None


def effect_of(module: nn.Module, tensor: str, axis: int) -> Effect:
    """Effect of sharding `tensor` of `module` along `axis`, by the nearest known class."""
    for cls in type(module).__mro__:
        rule = _RULES.get(cls) or _FOREIGN.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is not None:
            return rule(module, tensor, axis)
    return UNKNOWN
