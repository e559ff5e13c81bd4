"""Loading of a model from a folder: each rank reads the parts that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slapo.weights.files import progress_bar
from slapo.weights.folders import Found
from slapo.weights.holdings import Held
from slapo.weights.pieces import Pieced
from slapo.weights.provenance import origin_at
from slapo.weights.slots import Slot


class Loader:
    """Reads values for tensors on meta and for materialized ones."""

    def __init__(self, found: Found) -> None:
        self.found = found
        #: ids of tensors that were created from the values read for them
        self.made: set[int] = set()
        #: True if the folder is more precise than a tensor filled from it
        self.has_rounded = False
        #: False if another rank reads and sends the values
        self.reads = True
        self._bar: Any = None

    def has(self, slot: Slot) -> bool:
        """Return whether the folder has a tensor."""
        return self._has(origin_at(slot))

    def value_of(self, slot: Slot, device: torch.device) -> Tensor:
        """Return this rank's part of a tensor in the folder."""
        origin = origin_at(slot)
        ((_, here),) = Held(slot.name, slot.tensor, origin, slot.spec).parts()
        dtype = slot.tensor.dtype
        # A buffer for the broadcast that follows; its dtype and rounding are noted as by the
        # reader.
        if not self.reads:
            self._note(here, dtype)
            return torch.zeros(here.shape, dtype=dtype, device=device)
        return self._read(here, dtype).to(device)

    @torch.no_grad()
    def fill(self, held: Iterable[Held]) -> None:
        """Read, in place, the tensors that this build did not create from the folder."""
        for item in held:
            if id(item.tensor) not in self.made and self._has(item.origin):
                for values, here in item.parts():
                    if values.numel():
                        values.copy_(self._read(here, values.dtype))
        self.made.clear()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _has(self, origin: Pieced | None) -> bool:
        return origin is not None and all(
            name in self.found.originals for name, _ in origin.needs()
        )

    def _read(self, here: Pieced, dtype: torch.dtype) -> Tensor:
        self._note(here, dtype)
        if self._bar is None:
            self._bar = progress_bar("load_pretrained")
        values = here.read(self.found.read)
        self._bar.update(values.nbytes)
        return values.to(dtype)

    def _note(self, here: Pieced, dtype: torch.dtype) -> None:
        stored = (self.found.originals[name].dtype for name, _ in here.needs())
        self.has_rounded |= any(torch.promote_types(each, dtype) != dtype for each in stored)
