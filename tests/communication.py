"""Counts collectives where torch hands them to a process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(CommDebugMode):
    """Torch's counter without its watch over modules, which fails on some calls of a schedule's."""

    def __enter__(self) -> Collectives:
        tracker = self.advanced_module_tracker
        tracker.name, tracker.module_parents_dict["Global"] = "Global", []
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)

    def counts(self) -> Counter[str]:
        """Name of a collective -> how often it was called."""
        return Counter({str(op).rpartition(".")[2]: n for op, n in self.get_comm_counts().items()})
