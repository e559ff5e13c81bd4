"""Memory and kernels of an optimizer, measured by steps on fake parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.cost.meter import Kernel, Meter, is_of_many
from slapo.errors import SlapoError

#: Side of the test parameter, which is square as some optimizers take square matrices only.
_SIDE = 1 << 10
_ELEMENTS = _SIDE * _SIDE


@dataclass(frozen=True)
class Update:
    """Costs of an optimizer per parameter element.

    Parameters
    ----------
    state
        Bytes of optimizer state.
    of_each, of_previous, of_all
        Temporary bytes of a step per element: of the current parameter, of the preceding one
        (intermediate results are freed late), and of all parameters together.
    kernels
        Kernels of a step for one parameter of a million elements.
    """

    state: float
    of_each: float
    of_previous: float
    of_all: float
    kernels: tuple[Kernel, ...] = ()

    @classmethod
    def of(
        cls,
        optimizer: Callable[[list[Any]], torch.optim.Optimizer],
        accelerator: bool = False,
    ) -> Update:
        """Measure an optimizer by steps on fake parameters.

        Parameters
        ----------
        optimizer
            Function from a list of parameters to an optimizer, as :func:`slapo.build` takes it.
        accelerator
            True for parameters on an accelerator. Torch's optimizers update all parameters at once
            there, unless configured otherwise.

        Raises
        ------
        TypeError
            If `optimizer` is not a function, or does not return an optimizer.
        SlapoError
            If the optimizer cannot step on fake tensors.

        Examples
        --------
        >>> Update.of(torch.optim.AdamW).state, Update.of(torch.optim.SGD).state
        (8.0, 0.0)
        """
        if not callable(optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; pass a function from a list of "
                "parameters to an optimizer, such as torch.optim.AdamW"
            )
        # A class makes the same optimizer at each call; a function may not.
        stepped = _stepped_by_class if isinstance(optimizer, type) else _stepped
        # Three counts for three unknowns: a third parameter adds only what a step keeps for all of
        # them; the second one also what is still there of the first.
        (state, one, kernels), (_, two, _), (_, three, _) = (
            stepped(optimizer, count, accelerator) for count in (1, 2, 3)
        )
        of_all = max(three - two, 0)
        return cls(
            state=round(state / _ELEMENTS, 2),
            of_each=(one - of_all) / _ELEMENTS,
            of_previous=max(two - one - of_all, 0) / _ELEMENTS,
            of_all=of_all / _ELEMENTS,
            kernels=kernels,
        )

    def kernels_for(self, elements: Iterable[int]) -> list[Kernel]:
        """Return the kernels of a step on parameters of these sizes; some work on all at once."""
        sizes = list(elements)
        return [
            replace(
                kernel,
                moved=kernel.moved * count // _ELEMENTS,
                elements=kernel.elements * count // _ELEMENTS,
            )
            for kernel in self.kernels
            for count in ([sum(sizes)] if is_of_many(kernel.name) else sizes)
        ]

    def working(self, elements: list[int]) -> int:
        """Return the temporary bytes of a step on parameters of these sizes, in order."""
        pairs = zip(elements, [0, *elements], strict=False)
        most = max((self.of_each * e + self.of_previous * before for e, before in pairs), default=0)
        return round(most + self.of_all * sum(elements))


def _stepped(
    make: Callable[[list[Any]], Any], count: int, accelerator: bool
) -> tuple[int, int, tuple[Kernel, ...]]:
    """Return the bytes of state, the bytes beyond it at the second step's peak, and its kernels."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(_SIDE, _SIDE)) for _ in range(count)]
        optimizer = make(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer(parameters) returned a {type(optimizer).__name__}; it must return a "
                "torch.optim.Optimizer"
            )
        for group in optimizer.param_groups if accelerator else ():
            # None is torch's default, which means True on an accelerator; the fakes here are on the
            # CPU.
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with Meter(fakes=True) as meter:
            meter.hold(tensor for p in parameters for tensor in (p, p.grad) if tensor is not None)
            before = meter.alive
            try:
                optimizer.step()
                # The first step creates the state, so the second one shows what a step takes.
                kept = meter.alive
                meter.peak, meter.kernels = meter.alive, []
                optimizer.step()
            except Exception as error:
                raise SlapoError(
                    f"{type(optimizer).__name__} could not step on fake tensors: "
                    f"{type(error).__name__}: {str(error)[:200]}; pass another optimizer with "
                    "the same state per parameter"
                ) from error
        return kept - before, meter.peak - kept, tuple(meter.kernels)


_stepped_by_class = functools.cache(_stepped)
