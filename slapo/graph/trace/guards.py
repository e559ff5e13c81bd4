"""What a recorded graph demands of a call: sizes, shapes and the structure of containers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo.graph.trace.expressions import (
    Formula,
    Size,
    evaluate,
    follow,
    formula_text,
    path_text,
)
from slapo.graph.trace.trees import parts


@dataclass(frozen=True)
class SizeGuard:
    """A limit on the sizes of the inputs that a recorded graph relies on.

    Parameters
    ----------
    text
        The limit as a user would write it.
    relation
        The same as a formula; see :mod:`slapo.graph.trace.expressions`.

    Examples
    --------
    >>> guard = SizeGuard.of(("<=", Size(("ids",), 1), 64))
    >>> guard.text
    'ids.size(1) <= 64'
    >>> guard.holds({"ids": torch.zeros(2, 65)})
    False
    """

    text: str
    relation: Formula = field(default=True, repr=False)

    @classmethod
    def of(cls, relation: Formula) -> SizeGuard:
        """The guard for a formula."""
        return cls(formula_text(relation), relation)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """Whether a call fits; `bound` is parameter name -> argument of this call."""
        try:
            return bool(evaluate(self.relation, bound))
        except (LookupError, TypeError, AttributeError):
            return False  # no such tensor in this call, or one of fewer dimensions

    def parameters(self) -> set[str]:
        """Names of the parameters that the guard is about."""
        found: set[str] = set()
        waiting: list[Any] = [self.relation]
        while waiting:
            item = waiting.pop()
            if isinstance(item, tuple):
                waiting += item
            elif isinstance(item, Size):
                found.add(str(item.path[0]))
        path: tuple[Any, ...] = getattr(self, "path", ())
        return found | {str(path[0])} if path else found


@dataclass(frozen=True)
class UnlessNone(SizeGuard):
    """A guard that concerns a parameter only when it is given."""

    parameter: str = ""
    guard: SizeGuard = field(default_factory=lambda: SizeGuard(""))

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        return bound.get(self.parameter) is None or self.guard.holds(bound)

    def parameters(self) -> set[str]:
        """See :meth:`SizeGuard.parameters`."""
        return self.guard.parameters()


@dataclass(frozen=True)
class TensorGuard(SizeGuard):
    """A parameter is a tensor of as many dimensions as it was traced with, none of them empty.

    The shape engine takes for granted that sizes are not 0, so Python code that asks
    ``x.size(0) == 0`` leaves no trace of its question; hence an empty tensor is refused.
    """

    path: tuple[Any, ...] = ()
    rank: int = 0

    @classmethod
    def at(cls, path: tuple[Any, ...], rank: int) -> TensorGuard:
        """The guard for the tensor at `path`."""
        return cls(
            f"{path_text(path)} is a non-empty tensor of {rank} dimensions", True, path, rank
        )

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            value = follow(bound, self.path)
        except (LookupError, TypeError):
            return False
        return isinstance(value, torch.Tensor) and value.dim() == self.rank and 0 not in value.shape


@dataclass(frozen=True)
class DtypeGuard(SizeGuard):
    """A tensor by whose dtype the traced code has decided has the same dtype."""

    path: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def at(cls, path: tuple[Any, ...], dtype: torch.dtype) -> DtypeGuard:
        """The guard for the tensor at `path`."""
        return cls(f"{path_text(path)} is a tensor of {dtype}", True, path, dtype)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            return bool(follow(bound, self.path).dtype is self.dtype)
        except (LookupError, TypeError, AttributeError):
            return False


@dataclass(frozen=True)
class GradGuard(SizeGuard):
    """A tensor that requires a gradient, or does not, as the traced code has asked."""

    path: tuple[Any, ...] = ()
    requires_grad: bool = False

    @classmethod
    def at(cls, path: tuple[Any, ...], requires_grad: bool) -> GradGuard:
        """The guard for the tensor at `path`."""
        what = "requires a gradient" if requires_grad else "requires no gradient"
        return cls(f"{path_text(path)} {what}", True, path, requires_grad)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            return bool(follow(bound, self.path).requires_grad is self.requires_grad)
        except (LookupError, TypeError, AttributeError):
            return False


@dataclass(frozen=True)
class StructureGuard(SizeGuard):
    """A container argument has the structure, and the non-tensor values, it was traced with."""

    path: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    values: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def at(cls, path: tuple[Any, ...], value: Any) -> StructureGuard:
        """The guard for the container `value`, one level of it."""
        elements = _entries(value) or []
        keys = tuple(p.key for p in elements)
        plain = tuple(
            (p.key, p.value)
            for p in elements
            if parts(p.value) is None and not isinstance(p.value, torch.Tensor)
        )
        text = f"{path_text(path)} has the entries {list(keys)}"
        if plain:
            text += " with " + ", ".join(f"{key!r}: {item!r}" for key, item in plain)
        return cls(text, True, path, keys, plain)

    def holds(self, bound: Mapping[str, Any]) -> bool:
        """See :meth:`SizeGuard.holds`."""
        try:
            value = follow(bound, self.path)
            elements = _entries(value)
        except (LookupError, TypeError):
            return False
        if elements is None or tuple(p.key for p in elements) != self.keys:
            return False
        given = {p.key: p.value for p in elements}
        return all(_equal(given[key], item) for key, item in self.values)


def _entries(value: Any) -> list[Any] | None:
    """Parts of a container; a keyword argument that is None counts as not given."""
    elements = parts(value)
    if elements is None or not isinstance(value, dict):
        return elements
    return [part for part in elements if part.value is not None]


def _equal(given: Any, traced: Any) -> bool:
    if given is traced:
        return True
    return not isinstance(given, torch.Tensor) and type(given) is type(traced) and given == traced
