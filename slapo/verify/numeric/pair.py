"""The two models of a verification, with what is the same for both of them and on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from slapo.agreement import gathered
from slapo.errors import VerificationError
from slapo.history import Record
from slapo.schedule import Schedule
from slapo.verify.finding import Finding
from slapo.verify.numeric.harness import full_tensors, local_tensors
from slapo.verify.numeric.origins import Origins
from slapo.verify.numeric.rank_sync import RankSync
from slapo.weights.slots import Slot, slots

#: Relative to a constant that is not zero, and at most so much beside zero.
_NOISE = 0.1
#: What is larger stands for infinity.
_LARGEST = 1e3


@dataclass
class ModelPair:
    """The shared state of all runs of a verification."""

    sch: Schedule
    #: the copy from entry
    reference: nn.Module
    #: where the tensors of the scheduled model come from in the copy
    origins: Origins
    peers: RankSync
    #: length of the history on entry
    start: int
    args: Any = ()
    kwargs: Any = None
    #: as `Verify` takes them
    loss_fn: Callable[[Any], Tensor] | None = None
    rtol: float | None = None
    #: tensors that both models get, whole, by the original's names
    full: dict[str, Tensor] = field(default_factory=dict)
    #: this rank's share of them: of the copy, of the scheduled model by its names, and of its
    #: compiled modules by identity
    original: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    compiled: dict[int, Tensor] = field(default_factory=dict)

    def load(self, device: torch.device) -> None:
        """Values for both sides, of which the constant ones get noise."""
        full = _perturbed(self.reference, full_tensors(self.reference, self.sch.group))
        self.full, self.original = full, local_tensors(self.reference, full)
        self.values = self.origins.values(self.full, device)
        self.compiled = self.origins.compiled_values(self.full)

    def records(self) -> list[Record]:
        """Primitives that were applied in the block."""
        return self.sch.history[self.start :]

    def of_all_ranks(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        return [value] if self.sch.group is None else gathered(value, self.sch.group)

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank."""
        return any(self.of_all_ranks(condition))

    def largest(self, value: float) -> float:
        """The largest of the ranks' values: all of them tell the same."""
        return max(self.of_all_ranks(value))

    def first(self, findings: Sequence[Any]) -> list[Any]:
        """Findings of the first rank that has some, so that all ranks report the same."""
        return next(filter(None, self.of_all_ranks(list(findings))), [])

    def error(
        self, said: str, path: str = "", suspect: str = "", further: str = "", advice: str = ""
    ) -> VerificationError:
        """The error for what is wrong, with what was applied there in the block."""
        finding = Finding(said, path, suspect, None, advice, further)
        return finding.error(VerificationError, "Verify", self.sch, self.records())


def _perturbed(model: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors by name, the constant ones with noise.

    A bias of zeros hides that it is added twice, norms of ones that two were swapped, a projection
    of zeros whatever stands before it. No schedule may rely on such values: training changes them.
    """
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for slot in slots(model):
        value = full[slot.name]
        if _is_free(slot) and _is_constant(value):
            key = id(slot.tensor)
            if key not in made:
                made[key] = value + _noise(value, slot.name)
            value = made[key]
        found[slot.name] = value
    return found


def _is_free(slot: Slot) -> bool:
    """Return whether a tensor may take other values: parameters, and statistics of batches.

    Other buffers are masks and positions.
    """
    if not slot.tensor.is_floating_point():
        return False
    if isinstance(slot.tensor, nn.Parameter):
        return True
    return isinstance(slot.owner, _NormBase) and slot.leaf in ("running_mean", "running_var")


def _is_constant(value: Tensor) -> bool:
    if value.numel() == 0 or value.is_meta:
        return False
    low, high = value.aminmax()
    return bool(low == high) and abs(float(low)) <= _LARGEST


def _noise(value: Tensor, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
    constant = abs(float(value.flatten()[0]))
    # Of a matrix, so much that its product with a vector stays of the vector's size.
    at_zero = _NOISE if value.dim() < 2 else min(_NOISE, value[0].numel() ** -0.5)
    return (drawn * (constant * _NOISE or at_zero)).to(value.device, value.dtype)
