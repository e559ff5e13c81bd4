"""Modules whose sizes follow from values: what they are taken to return, and its trial on data.

Experts that pick their tokens cannot run on tensors without data. They are taken to return a tensor
like their first input, as mixtures of experts do, and a graph above relies on that; so each such
module is run on small random numbers before the capture ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from slapo.graph.trace.leaf_outputs import CallForm, TensorForm, forms_of, structure
from slapo.graph.trace.modes import other_mode
from slapo.graph.trace.trees import hint, tensors

#: Of the normal numbers that a module is tried on.
_SCALES = (1.0, -1.0, 100.0, -100.0)


@dataclass(frozen=True)
class _Guess:
    module: nn.Module
    call: CallForm
    result: Tensor


@dataclass
class Guesses:
    """The guesses of one capture.

    Parameters
    ----------
    run
        ``run(path, args, kwargs)``: what the module at `path` returns for data.
    device
        Where the model is.
    """

    run: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    device: torch.device | None
    count: int = 0
    _untried: dict[tuple[str, bool], _Guess] = field(default_factory=dict)
    _tried: set[tuple[str, bool]] = field(default_factory=set)

    def make(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """A tensor like the first one given, None if none is."""
        given = tensors([args, kwargs])
        if not given:
            return None
        self.count += 1
        result = torch.empty_like(given[0]).requires_grad_(trains(module, given[0]))
        key = (path, module.training)
        with torch._C.DisableTorchFunction():
            new = _Guess(module, CallForm.of(args, kwargs), result)
            if key not in self._tried and (
                key not in self._untried or _size(new) < _size(self._untried[key])
            ):
                self._untried[key] = new
        return result

    def refuted(self) -> str | None:
        """How data show that a guess is wrong; None if none is. Each is tried once."""
        untried, self._untried = self._untried, {}
        for (path, training), guess in untried.items():
            is_other = guess.module.training is not training
            with other_mode(guess.module) if is_other else nullcontext():
                found = self._difference(path, guess)
            if found is not None:
                return (
                    f"what {path!r} returns depends on values, not on sizes alone: tried on random "
                    f"numbers, {found}. A graph above it would compute with a wrong size; make the "
                    "module that calls it a leaf (leaf_modules=[...] or traceable = False), or let "
                    "the child return a tensor of the shape of its input"
                )
            self._tried.add((path, training))
        return None

    def _difference(self, path: str, guess: _Guess) -> str | None:
        """Runs on numbers of both signs, small and large: a choice by value is seen in one."""
        expected = forms_of(guess.result, hint)
        on_meta = self.device is None or self.device.type == "meta"
        device = "cpu" if on_meta else str(self.device)
        for scale in _SCALES:
            try:
                with no_python_dispatcher(), _disable_current_modes(), torch.device(device):
                    args, kwargs = guess.call.with_numbers(guess.call.hints, device)
                    found = self.run(path, *_filled((args, kwargs), scale))
                    forms = forms_of(found, int)
            except Exception as error:
                return f"it fails: {error}"
            alike = list(map(_extent, forms)) == list(map(_extent, expected))
            if not alike or structure(found) != structure(guess.result):
                return f"it returns {_shown(forms)} where {_shown(expected)} was expected"
        return None


def trains(module: nn.Module, like: Tensor) -> bool:
    """Whether what a module makes of a tensor requires a gradient."""
    if not torch.is_grad_enabled() or not like.is_floating_point():
        return False
    return like.requires_grad or any(p.requires_grad for p in module.parameters())


def _size(guess: _Guess) -> int:
    given = tensors([guess.call.args, guess.call.kwargs])
    return sum(math.prod(map(hint, tensor.shape)) for tensor in given)


def _filled(value: Any, scale: float) -> Any:
    """Write numbers into all tensors of a value: normal ones, zeros for integers, truth values."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors(value):
        tensor.detach_()
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu") * scale)
        else:
            tensor.fill_(scale > 0 and tensor.dtype == torch.bool)
    return value


def _extent(form: Any) -> Any:
    return (form.sizes, form.dtype) if isinstance(form, TensorForm) else form


def _shown(forms: tuple[Any, ...]) -> str:
    said = [
        f"{str(f.dtype).removeprefix('torch.')}{list(f.sizes)}"
        if isinstance(f, TensorForm)
        else repr(f[1])
        for f in forms
    ]
    return ", ".join(said) or "nothing"
