"""What an optimizer keeps and does, found by letting it step on fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.cost.meter import Kernel, Meter, is_of_many
from slapo.errors import SlapoError

#: Of a parameter that stands for others: a square matrix, as some optimizers take nothing else.
_SIDE = 1 << 10
_ELEMENTS = _SIDE * _SIDE


@dataclass(frozen=True)
class Update:
    """An optimizer's costs for each element of a parameter.

    Parameters
    ----------
    state
        Bytes that it keeps.
    of_each, of_previous, of_all
        Bytes that a step needs beyond them, for each element: of the parameter that it works on, of
        the one before it, whose intermediate results are not gone yet, and of all together, where
        it works on all at a time.
    kernels
        Of a step, for one parameter of a million elements.
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
        dtype: torch.dtype = torch.float32,
        accelerator: bool = False,
    ) -> Update:
        """Let an optimizer step on parameters that hold no numbers.

        Parameters
        ----------
        optimizer
            From a list of parameters to an optimizer, as :func:`slapo.build` takes it.
        dtype
            Of the parameters that it steps on.
        accelerator
            Whether they lie on one, where torch's optimizers work on all of them at a time unless
            they are told otherwise.

        Raises
        ------
        TypeError
            If it is no function, or returns no optimizer.
        SlapoError
            If the optimizer cannot step without numbers.

        Examples
        --------
        >>> Update.of(torch.optim.AdamW).state
        8.0
        >>> Update.of(torch.optim.SGD).state
        0.0
        """
        if not callable(optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; pass a function from a list of "
                "parameters to an optimizer, such as torch.optim.AdamW"
            )
        state, one, kernels = _stepped(optimizer, 1, dtype, accelerator)
        two, three = (_stepped(optimizer, count, dtype, accelerator)[1] for count in (2, 3))
        of_all = max(three - two, 0)
        of_previous = max(two - one - of_all, 0)
        return cls(
            state=float(round(state / _ELEMENTS, 2)),
            of_each=(one - of_all) / _ELEMENTS,
            of_previous=of_previous / _ELEMENTS,
            of_all=of_all / _ELEMENTS,
            kernels=kernels,
        )

    def kernels_for(self, elements: Iterable[int]) -> list[Kernel]:
        """Those of a step on parameters of so many elements; some work on all at a time."""
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
        """Bytes of a step on parameters of so many elements, in their order."""
        pairs = zip(elements, [0, *elements], strict=False)
        most = max((self.of_each * e + self.of_previous * before for e, before in pairs), default=0)
        return round(most + self.of_all * sum(elements))


def _stepped(
    make: Callable[[list[Any]], torch.optim.Optimizer],
    count: int,
    dtype: torch.dtype,
    accelerator: bool,
) -> tuple[int, int, tuple[Kernel, ...]]:
    """Bytes of state, bytes beyond it at the worst moment of the second step, its kernels."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(_SIDE, _SIDE, dtype=dtype)) for _ in range(count)]
        optimizer = make(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer(parameters) returned a {type(optimizer).__name__}; it must return a "
                "torch.optim.Optimizer"
            )
        for group in optimizer.param_groups if accelerator else ():
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with Meter(fakes=True) as meter:
            meter.hold([*parameters, *(p.grad for p in parameters if p.grad is not None)])
            before = meter.alive
            try:
                optimizer.step()
                kept = meter.alive
                meter.peak, meter.kernels = meter.alive, []
                optimizer.step()
            except Exception as error:
                raise SlapoError(
                    f"{type(optimizer).__name__} could not step without numbers: "
                    f"{type(error).__name__}: {str(error)[:200]}; pass another optimizer that "
                    "keeps as much for each parameter"
                ) from error
        return kept - before, meter.peak - kept, tuple(meter.kernels)
