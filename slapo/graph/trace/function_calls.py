"""Calls of ``torch.autograd.Function`` as nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class FunctionApply:
    """Target of a node that calls ``function.apply``.

    It has the names that generated code needs, compares by the function, pickles by reference to
    it, and stays one node when the graph is traced symbolically.

    Parameters
    ----------
    function
        A subclass of ``torch.autograd.Function``.
    """

    function: Any

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``function.apply(*args, **kwargs)``."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", self, args, kwargs)
        return self.function.apply(*args, **kwargs)
