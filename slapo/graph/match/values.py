"""Equality of pattern values and graph values."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from slapo.graph.trace.nodes import CONTAINERS, inner_pairs


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are the same node, the same weight or equal constants."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or _same_tensor(one, other)
    if isinstance(one, CONTAINERS):
        inner = inner_pairs(one, other)
        return inner is not None and all(same_value(a, b) for a, b in inner)
    # ``2`` and ``2.0`` scale alike, but ``True`` is no number: ``keepdim=True`` is not ``dim=1``.
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (one, other))
    return (numbers and _equal(one, other)) or same_constant(one, other)


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two values are the same node or tensor, or equal constants of one type."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (fx.Node, torch.Tensor)):
        return False
    if isinstance(one, CONTAINERS):
        inner = inner_pairs(one, other)
        return inner is not None and all(same_constant(a, b) for a, b in inner)
    return _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    """Compare two objects whose ``==`` may not give a truth value; a NaN equals a NaN."""
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dtype, shape and values on any device; meta tensors have no values."""
    if one.dtype != other.dtype or one.shape != other.shape or one.is_meta or other.is_meta:
        return False
    here, there = one.detach(), other.detach().to(one.device)
    try:
        return bool(((here == there) | ((here != here) & (there != there))).all())
    except RuntimeError:  # dtypes without comparison
        return False


def same_settings(wanted: nn.Module, module: nn.Module) -> bool:
    """Compare the settings of two modules of a class; modules with parameters are all equal."""
    if wanted is module or next(wanted.parameters(), None) is not None:
        return True
    ones, others = dict(wanted.named_modules()), dict(module.named_modules())
    return ones.keys() == others.keys() and all(
        type(one) is type(others[path]) and same_value(_settings(one), _settings(others[path]))
        for path, one in ones.items()
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that determine its result."""
    skipped = {"training", "inplace"}
    if isinstance(module, _DropoutNd):
        skipped.add("p")  # a dropout matches any probability
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in skipped}
