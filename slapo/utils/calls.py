"""From what users hand over to the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def as_call(inputs: Any, name: str = "example_inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments.

    Parameters
    ----------
    inputs
        A tensor, a tuple or list of positional arguments or a mapping of keyword arguments.
    name
        What it is called, for messages.

    Raises
    ------
    TypeError
        If it is something else.

    Examples
    --------
    >>> as_call({"n": 3})
    ((), {'n': 3})
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise TypeError(
        f"{name} must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"got {type(inputs).__name__}"
    )
