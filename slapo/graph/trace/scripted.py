"""Outputs of TorchScript modules, which cannot run on symbolic sizes without pinning them.

Such a module (``fuse`` makes them) is run on fake tensors whose symbolic sizes are replaced by
large primes, one for each. In the output's sizes the primes say which symbols they come from.
"""

from __future__ import annotations

from itertools import count
from math import isqrt
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from slapo.graph.trace.trees import map_leaves, tensors


class PrimeSizes:
    """Symbolic sizes <-> primes.

    Examples
    --------
    >>> sizes = PrimeSizes()
    >>> sizes.number(7), sizes.size(7)
    (7, 7)
    """

    def __init__(self) -> None:
        self._primes = (n for n in count(1009, 2) if all(n % d for d in range(3, isqrt(n) + 1, 2)))
        self._symbols: dict[int, torch.SymInt] = {}
        self._numbers: dict[Any, int] = {}

    def number(self, size: Any) -> int:
        """What stands in for a size."""
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            return int(size)
        expression = size.node.expr
        if expression not in self._numbers:
            self._numbers[expression] = next(self._primes)
            self._symbols[self._numbers[expression]] = size
        return self._numbers[expression]

    def size(self, number: int) -> Any:
        """The size that a number in the output stands for; products are taken apart."""
        found: Any = 1
        for prime, symbol in self._symbols.items():
            while number and number % prime == 0:
                found, number = found * symbol, number // prime
        return found * number


def scripted_output(
    call: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool
) -> Any:
    """What a TorchScript module returns for fake arguments of symbolic sizes.

    Where it takes no other size than that of the example in the last dimensions (weights have
    fixed sizes), these are pinned to it, which becomes a guard.
    """
    try:
        return _run(call, module, args, kwargs, trains)
    except RuntimeError:
        for tensor in tensors([args, kwargs]):
            if tensor.dim() and isinstance(size := tensor.shape[-1], torch.SymInt):
                torch._check(size == size.node.hint)
        return _run(call, module, args, kwargs, trains)


def _run(
    call: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool
) -> Any:
    sizes = PrimeSizes()

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return sizes.number(value) if isinstance(value, torch.SymInt) else value
        shape = [sizes.number(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def symbolic(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = [sizes.size(size) for size in value.shape]
        output = torch.empty(shape, dtype=value.dtype, device=value.device)
        return output.requires_grad_(trains and value.is_floating_point())

    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        result = call(module, *map_leaves(args, stand_in), **map_leaves(kwargs, stand_in))
    return map_leaves(result, symbolic)
