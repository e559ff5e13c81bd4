"""Fill the tensors of a model from a folder: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slapo.weights.folders import Found
from slapo.weights.holdings import Held
from slapo.weights.pieces import Pieced
from slapo.weights.provenance import origin_at
from slapo.weights.slots import Slot


class Loader:
    """Reads values for tensors on meta, and for those that have some."""

    def __init__(self, found: Found) -> None:
        self.found = found
        #: ids of tensors that were made from what was read for them
        self.made: set[int] = set()
        #: true if the folder is more precise than what was filled from it
        self.has_rounded = False

    def value_of(self, slot: Slot, device: torch.device) -> Tensor | None:
        """This rank's part of a tensor; None if the folder does not have it."""
        origin = origin_at(slot.owner, slot.leaf)
        if not self._has(origin):
            return None
        ((_, here),) = Held(slot.name, slot.tensor, origin, slot.spec).parts()
        return self._rounded(self._read(here), slot.tensor.dtype).to(device)

    @torch.no_grad()
    def fill(self, held: Iterable[Held]) -> None:
        """Read, in place, what was not made from it in this build."""
        for item in held:
            if id(item.tensor) not in self.made and self._has(item.origin):
                for values, here in item.parts():
                    if values.numel():
                        values.copy_(self._rounded(self._read(here), values.dtype))
        self.made.clear()

    def _has(self, origin: Pieced | None) -> bool:
        return origin is not None and all(
            name in self.found.originals for name, _ in origin.needs()
        )

    def _rounded(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        self.has_rounded |= torch.promote_types(values.dtype, dtype) != dtype
        return values.to(dtype)

    def _read(self, here: Pieced) -> Tensor:
        return here.read(self.found.read)
