"""Wider dtypes for both models, so that rounding stays below real faults; else tolerances."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Largest allowed difference relative to the largest value. It covers rounding from another order
#: of summation, over a hundred times the spacing of float32.
RTOL = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}

#: Number of parametrized modules that a tolerance covers; beyond it, rounding grows like a random
#: walk.
_SHALLOW = 10

_CONVERSIONS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def rtol_for(dtype: torch.dtype, model: nn.Module) -> float:
    """Tolerance for a model that computes in a dtype; 0 for integers."""
    base = RTOL.get(dtype, 0.0)
    if dtype == torch.float64:
        return base
    depth = sum(1 for module in model.modules() if module._parameters)
    return base * max(1.0, math.sqrt(depth / _SHALLOW))


def is_compiled(model: nn.Module) -> bool:
    """Return True if parts of a model are TorchScript."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


def wider(*models: nn.Module) -> list[torch.dtype | None]:
    """Dtypes to run models in, best first; the last one, None, is the model's own.

    Compiled code keeps the dtypes that it was compiled for.
    """
    if any(map(is_compiled, models)):
        return [None]
    # Float32 is a second choice for half-precision models only; for others it is their own dtype.
    sizes = [t.dtype.itemsize for m in models for t in m.parameters() if t.is_floating_point()]
    return [torch.float64, *([torch.float32] if min(sizes, default=4) < 4 else []), None]


class Widened(TorchFunctionMode):
    """Gives requests for float32 or the model's dtypes a wider dtype while active.

    Norms and rotary embeddings compute in float32 for any dtype of the model. Their rounding would
    hide as much as that of a float32 model.
    """

    def __init__(self, wide: torch.dtype, dtypes: Collection[torch.dtype]) -> None:
        super().__init__()
        self.wide = wide
        self.dtypes = {d for d in (torch.float32, *dtypes) if d.itemsize < wide.itemsize}
        self.narrow: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _CONVERSIONS.get(func) in self.dtypes:
            return args[0].to(self.wide)
        args = tuple(self._wider(arg) for arg in args)
        kwargs = {name: self._wider(arg) for name, arg in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self._note(result, args)
        return result

    def _wider(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in self.dtypes:
            return self.wide
        return value

    def _note(self, result: Tensor, args: tuple[Any, ...]) -> None:
        if result.dtype.itemsize < self.wide.itemsize and any(
            isinstance(arg, Tensor) and arg.dtype == self.wide for arg in args
        ):
            self.narrow.add(result.dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of new tensors within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
