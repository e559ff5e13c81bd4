"""Exchange of boxes of original tensors between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.agreement import communication_device, gathered, has_peers
from slapo.weights.holdings import Held
from slapo.weights.pieces import Box, index_of, lengths, overlap

# Maximum number of pending sends; each keeps a copy of its data.
_AT_ONCE = 8


class Exchange:
    """Exchange that all ranks create and use in the same order; only box lists are gathered."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._mine: dict[tuple[str, Box], Tensor] = {}
        for item in held:
            for piece, values in item.pieces():
                self._mine.setdefault((str(piece.leaf), piece.source), values)
        offered = [(name, box, values.dtype) for (name, box), values in self._mine.items()]
        self.rank = dist.get_rank() if has_peers() else 0
        self._device = communication_device(None) if has_peers() else None
        #: name -> box -> ranks that have it
        self._holders: dict[str, dict[Box, list[int]]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for rank, boxes in enumerate(gathered(offered, None)):
            for name, box, dtype in boxes:
                self._holders.setdefault(name, {}).setdefault(box, []).append(rank)
                self.dtypes.setdefault(name, dtype)
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    def lacks(self, name: str, box: Box) -> bool:
        """Return whether a part of a box is on no rank, or in two overlapping boxes."""
        parts = (overlap(part, box) for part in self._holders.get(name, {}))
        have = sum(torch.Size(lengths(part)).numel() for part in parts if part is not None)
        return have != torch.Size(lengths(box)).numel()

    def fetch(self, name: str, box: Box, owner: int, dtype: torch.dtype) -> Tensor | None:
        """Return the values of a box on the CPU of rank `owner`; None on other ranks."""
        values = torch.empty(lengths(box), dtype=dtype) if self.rank == owner else None
        for part, ranks in self._holders[name].items():
            shared = overlap(part, box)
            if shared is None:
                continue
            sender = owner if owner in ranks else ranks[0]
            here = None
            if self.rank == sender:
                here = self._mine[name, part][index_of(shared, part)].to(dtype)
            if sender != owner:
                here = self._sent(here, lengths(shared), dtype, sender, owner)
            if values is not None and here is not None:
                values[index_of(shared, box)] = here.cpu()
        return values

    def finish(self) -> None:
        """Wait until everything is received."""
        while self._pending:
            self._wait()

    def _sent(
        self, values: Tensor | None, shape: list[int], dtype: torch.dtype, sender: int, owner: int
    ) -> Tensor | None:
        # As bytes, since gloo does not send bfloat16.
        if values is not None:
            carried = values.to(self._device).contiguous().view(-1).view(torch.uint8)
            self._pending.append((dist.isend(carried, owner), carried))
            if len(self._pending) > _AT_ONCE:
                self._wait()
        elif self.rank == owner:
            size = torch.Size(shape).numel() * dtype.itemsize
            carried = torch.empty(size, dtype=torch.uint8, device=self._device)
            dist.recv(carried, sender)
            return carried.view(dtype).view(shape)
        return None

    def _wait(self) -> None:
        work, _ = self._pending.pop(0)
        if work is not None:
            work.wait()
