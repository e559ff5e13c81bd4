"""The key of a call: all that Python can ask of its arguments, sizes above 1 aside.

It is exact on purpose: a call with another key is captured anew, never refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slapo.graph.trace.nests import parts

_PLAIN = (bool, int, float, str)
_HASHABLE = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class _Same:
    """An object that equals itself alone; it stays alive, so its identity is not given away."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def call_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], within_compile: bool = False
) -> tuple[Any, ...]:
    """Everything that Python can ask of the arguments of a call, sizes above 1 aside.

    Parameters
    ----------
    args, kwargs
        The arguments, as the caller split them: decorated forwards look at that.
    within_compile
        True within somebody's ``torch.compile``, which guards on autocast itself.

    Examples
    --------
    >>> x, y = torch.ones(3, 5), torch.ones(2, 7)
    >>> call_key((x,), {}) == call_key((y,), {}), call_key((x,), {}) == call_key((), {"input": x})
    (True, False)
    """
    seen: list[Tensor] = []
    exact = not within_compile
    key = (_key(args, seen, exact), _key(kwargs, seen, exact), torch.is_grad_enabled())
    if within_compile:
        return key
    return (*key, torch.is_inference_mode_enabled(), _autocast(), collected_keys())


def _autocast() -> tuple[Any, ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple([torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices])


def collected_keys() -> tuple[str, ...]:
    """The outputs that a model of Transformers collects by hooks in the call under way."""
    home = sys.modules.get("transformers.utils.output_capturing")
    active = home._active_collector.get() if home is not None else None
    return tuple(active) if active else ()


def _key(value: Any, seen: list[Tensor], exact: bool) -> Any:
    if isinstance(value, Tensor):
        alias = next((k for k, other in enumerate(seen) if other is value), len(seen))
        seen.append(value)
        small = tuple([s if s < 2 else 2 for s in value.shape])  # 0 and 1 are cases of their own
        return (small, value.dtype, value.device, value.requires_grad, alias)
    if value is None:
        return None
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value) if exact else value
    elements = parts(value)
    if elements is not None:
        return (kind, *[(key, _key(item, seen, exact)) for _, key, item in elements])
    if isinstance(value, _HASHABLE) or not exact:
        return value
    return _Same(value)


def size_check(conditions: Iterable[str]) -> Callable[[Any, Any], bool]:
    """A function of ``(args, kwargs)`` that tells whether all conditions hold."""
    text = " and ".join(f"({condition})" for condition in conditions) or "True"
    check: Callable[[Any, Any], bool] = eval(  # written by torch's shape engine
        f"lambda args, kwargs: {text}", {"math": math, "torch": torch}
    )
    return check


class Tree:
    """The modules below one, and of their tensors all that Python may have read at a capture.

    Dynamo sees no tensor of the modules that stay calls, though what these return follows from
    them. Values may change.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        modules = [m for m in self._modules if not isinstance(m, torch.jit.ScriptModule)]
        self._children = [m._modules for m in modules]
        self._tensors = [t for m in modules for t in (m._parameters, m._buffers) if t]
        self._before = self._now()

    def _now(self) -> Any:
        children = [child for table in self._children for child in table.values()]
        tensors = (tensor for table in self._tensors for tensor in table.values())
        return children, [t if t is None else (t.dtype, t.requires_grad, t.shape) for t in tensors]

    def modes(self) -> tuple[bool, ...]:
        """Train or eval mode of each module."""
        return tuple([module.training for module in self._modules])

    def is_as_before(self) -> bool:
        """Whether nothing of it has changed."""
        return bool(self._now() == self._before)
