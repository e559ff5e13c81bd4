"""The two models of a verification, with state common to both models and all ranks."""

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
from slapo.verify.numeric.harness import full_tensors
from slapo.verify.numeric.origins import Origins
from slapo.verify.numeric.rank_sync import RankSync
from slapo.weights.slots import Slot, slots

#: Noise relative to a nonzero constant, or its largest absolute value for zero.
_NOISE = 0.1
#: Constants above this are left alone, as stand-ins for infinity.
_LARGEST = 1e3


@dataclass
class ModelPair:
    """The shared state of all runs of a verification."""

    sch: Schedule
    #: the copy from entry
    reference: nn.Module
    #: origins of the scheduled model's tensors in the copy
    origins: Origins
    peers: RankSync
    #: length of the history on entry
    start: int
    #: arguments of `Verify`
    args: Any
    kwargs: Any
    loss_fn: Callable[[Any], Tensor] | None
    rtol: float | None
    #: full tensors for both models, by the original's names
    full: dict[str, Tensor] = field(default_factory=dict)
    #: this rank's parts: for the copy, for the scheduled model by its names, and for its compiled
    #: modules by id
    original: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    compiled: dict[int, Tensor] = field(default_factory=dict)

    def load(self, device: torch.device) -> None:
        """Set the values for both models; constant tensors get noise."""
        self.full = _perturbed(self.reference, full_tensors(self.reference, self.sch.group))
        with torch.no_grad():
            self.original = {
                p.name: p.spec.slice(self.full[p.name]) if p.spec else self.full[p.name]
                for p in slots(self.reference)
            }
        self.values = self.origins.values(self.full, device)
        self.compiled = self.origins.compiled_values(self.full)

    def records(self) -> list[Record]:
        """Primitives applied in the block."""
        return self.sch.history[self.start :]

    def of_all_ranks(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return [value] if self.sch.group is None else gathered(value, self.sch.group)

    def any_rank(self, condition: bool) -> bool:
        """Return True if a condition holds on any rank."""
        return any(self.of_all_ranks(condition))

    def largest(self, value: float) -> float:
        """Maximum over ranks, so that all ranks report the same."""
        return max(self.of_all_ranks(value))

    def first(self, findings: Sequence[Any]) -> list[Any]:
        """Findings of the first rank that has some, so that all ranks report the same."""
        return next(filter(None, self.of_all_ranks(list(findings))), [])

    def error(
        self, said: str, path: str = "", suspect: str = "", further: str = "", advice: str = ""
    ) -> VerificationError:
        """Error with the primitives that were applied there in the block."""
        finding = Finding(said, path, suspect, None, advice, further)
        return finding.error(VerificationError, "Verify", self.sch, self.records())


def _perturbed(model: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors by name; constant ones with noise."""
    # A zero bias hides that it is added twice, norms of ones hide a swap, a zero projection hides
    # everything before it. No schedule may rely on such values: training changes them.
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for slot in slots(model):
        value = full[slot.name]
        if _is_free(slot) and _is_constant(value):
            # Tied parameters must stay equal.
            key = id(slot.tensor)
            if key not in made:
                made[key] = value + _noise(value, slot.name)
            value = made[key]
        found[slot.name] = value
    return found


def _is_free(slot: Slot) -> bool:
    """Return True for parameters and batch statistics, which may take other values."""
    if not slot.tensor.is_floating_point():
        return False
    if isinstance(slot.tensor, nn.Parameter):
        return True
    # Other buffers are masks and positions.
    return isinstance(slot.owner, _NormBase) and slot.leaf in ("running_mean", "running_var")


def _is_constant(value: Tensor) -> bool:
    if value.numel() == 0 or value.is_meta:
        return False
    low, high = value.aminmax()
    return bool(low == high) and abs(float(low)) <= _LARGEST


def _noise(value: Tensor, name: str) -> Tensor:
    # Not ``hash(name)``, which differs between processes: all ranks must perturb alike.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
    constant = abs(float(value.flatten()[0]))
    # For a matrix, the noise is so small that its product with a vector keeps the vector's scale.
    at_zero = _NOISE if value.dim() < 2 else min(_NOISE, value[0].numel() ** -0.5)
    return (drawn * (constant * _NOISE or at_zero)).to(value.device, value.dtype)
