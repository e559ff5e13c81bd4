"""Checks for replicas that use different layers, for example if one has no images."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.agreement import extremes, on_every_rank
from slapo.errors import SlapoError
from slapo.framework_dialect.batches import Batch


def calls_differ(batch: Batch, group: dist.ProcessGroup) -> bool:
    """Return whether replicas pass different arguments. A collective of the replicas."""
    # Arguments and flags select the layers of a call. Shapes do not, and may differ between
    # replicas.
    given = [
        (name, value if isinstance(value, bool) else None)
        for name, value in (*enumerate(batch.args), *sorted(batch.kwargs.items()))
        if value is not None
    ]
    largest, smallest = extremes(torch.tensor([zlib.crc32(repr(given).encode())]), group)
    return bool(largest != smallest)


def used_in(loss: Tensor) -> set[int]:
    """Ids of the parameters that a backward pass from a loss reaches."""
    # A walk over the autograd graph. Each AccumulateGrad node has its parameter in `variable`.
    found: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead += [before for before, _ in node.next_functions]
    return found


def refuse_unlike_use(
    named: Iterable[tuple[str, nn.Parameter]],
    used: set[int],
    group: dist.ProcessGroup,
    remedy: str,
) -> None:
    """Raise on every rank if replicas use different parameters. A collective of the replicas."""
    pairs = list(named)
    mask = torch.tensor([int(id(parameter) in used) for _, parameter in pairs])
    largest, smallest = extremes(mask, group)
    odd = [pairs[i][0] for i in (largest != smallest).nonzero().flatten().tolist()]
    if odd:
        raise on_every_rank(
            SlapoError(
                f"replicas use different parameters: {odd[:4]} take part in the loss of only "
                f"some replicas, and {remedy}"
            )
        )


@contextmanager
def entering_alike(
    root: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup, remedy: str
) -> Iterator[None]:
    """Compare the order in which replicas enter units, which then gather their parameters."""
    names = {id(module): name for name, module in root.named_modules()}

    def meet(place: int, *_: Any) -> None:
        largest, smallest = (int(found) for found in extremes(torch.tensor([place]), group))
        if largest != smallest:
            at = [names[id(units[i])] if i < len(units) else "" for i in (smallest, largest)]
            where = [repr(name) if name else "the end of the model" for name in at]
            raise on_every_rank(
                SlapoError(
                    f"replicas run different layers: one has reached {where[0]} and another "
                    f"{where[1]}, and {remedy}"
                )
            )

    handles = [
        # Before FSDP2's own pre-hook, which gathers the unit's parameters.
        unit.register_forward_pre_hook(partial(meet, place), prepend=True)
        for place, unit in enumerate(units)
        if unit is not root
    ]
    # A replica that skips the last units meets the others here.
    handles.append(root.register_forward_hook(partial(meet, len(units))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
