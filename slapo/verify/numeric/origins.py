"""Where the tensors of a scheduled model come from: names, values and gradients of the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.schedule import Schedule
from slapo.verify.numeric.harness import gradient_of
from slapo.weights.slots import Slot, compiled_parameters, slots


class Origins:
    """The tensors of a model by the names that a copy has from before it was scheduled."""

    def __init__(self, sch: Schedule, reference: nn.Module) -> None:
        self._sch, self._reference = sch, reference
        self.original_names = {slot.name for slot in slots(reference)}
        self._known_as: dict[str, str] = {}  # name now -> name in the original
        self._kept = [p.tensor for p in slots(sch.mod)]  # so that ids stay theirs
        self._names = {id(p.tensor): p.name for p in slots(sch.mod)}

    def values(self, full: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """This rank's slices of the original's tensors, by the names of the scheduled model."""
        found: dict[str, Tensor] = {}
        for slot in slots(self._sch.mod):
            self._known_as[slot.name] = self.original_name(slot)
            value = self._original(slot, full)
            if value is not None:
                with torch.no_grad():
                    found[slot.name] = slot.spec.slice(value) if slot.spec else value
            elif slot.tensor.is_meta:
                raise SlapoError(
                    f"Verify: {slot.name!r} is on meta and nothing says how it comes from the "
                    "original's parameters; let its module define weight_sources()"
                )
            else:
                found[slot.name] = slot.tensor.detach().to(device)
        return found

    def _original(self, slot: Slot, full: Mapping[str, Tensor]) -> Tensor | None:
        """The full value that the tensor at `slot` has in the original; None if it has none."""
        shape = slot.full_shape
        source = self.source_of(slot.name)
        if source is not None:
            value: Tensor = source[0].pack([full[name] for name in source[1]])
        else:
            name = self.original_name(slot)
            if name not in full:
                return None
            value = full[name]
        return value if value.shape == shape else None

    def names_by_tensor(self) -> dict[int, str]:
        """Identity of a tensor on entry -> its name."""
        return self._names

    def compiled_values(self, full: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Values of parameters that a fusion took into compiled code, by their identities."""
        params = compiled_parameters(self._sch.mod)
        return {id(p): full[self._names[id(p)]] for p in params.values() if id(p) in self._names}

    def original_name(self, slot: Slot) -> str:
        """The name that a tensor had on entry; a fusion moves parameters to another module."""
        if slot.name in self.original_names:
            return slot.name
        return self._names.get(id(slot.tensor), slot.name)

    def source_of(self, name: str) -> tuple[Any, list[str]] | None:
        """How the parameter is made from the original's: source and names from here."""
        prefix = f"{self._sch.path}." if self._sch.path else ""
        found = self._sch.state.sources.get(prefix + name)
        if found is None or not all(n.startswith(prefix) for n in found[1]):
            return None
        names = [n[len(prefix) :] for n in found[1]]
        # A copy taken after the replacement has the new parameter itself.
        return (found[0], names) if all(n in self.original_names for n in names) else None

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the scheduled model, by the original's names."""
        found: dict[str, Tensor] = {}
        originals = {slot.name: slot for slot in slots(self._reference)}
        for slot in slots(self._sch.mod):
            if not isinstance(slot.tensor, nn.Parameter):
                continue
            grad = gradient_of(slot.tensor)
            if slot.spec is not None:
                grad = slot.spec.gather(grad, self._sch.group)
            source = self.source_of(slot.name)
            if source is not None:
                sizes = [source[0].size_of(originals[n].tensor) for n in source[1]]
                found.update(zip(source[1], source[0].unpack(grad, sizes), strict=True))
            else:
                found[self._known_as.get(slot.name, slot.name)] = grad
        for param in compiled_parameters(self._sch.mod).values():
            name = self._names.get(id(param))
            if name is not None:
                found.setdefault(name, gradient_of(param))
        return found
