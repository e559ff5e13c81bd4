"""Where the tensors of a scheduled model come from: names, values and gradients of the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.schedule import Schedule
from slapo.verify.setting import gradient_of
from slapo.verify.tensors import Place, compiled_parameters, places


class Origins:
    """The tensors of a model by the names that a copy has from before it was scheduled.

    Parameters
    ----------
    sch
        The schedule, as it is when the copy is taken.
    reference
        The copy.
    """

    def __init__(self, sch: Schedule, reference: nn.Module) -> None:
        self._sch, self._reference = sch, reference
        self.original_names = {place.name for place in places(reference)}
        self._known_as: dict[str, str] = {}  # name now -> name in the original
        self._kept = [p.tensor for p in places(sch.mod)]  # so that ids stay theirs
        self._names = {id(p.tensor): p.name for p in places(sch.mod)}

    def values(self, full: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """This rank's slices of the original's tensors, by the names of the scheduled model."""
        found: dict[str, Tensor] = {}
        for place in places(self._sch.mod):
            self._known_as[place.name] = self.original_name(place)
            value = self._original(place, full)
            if value is not None:
                with torch.no_grad():
                    found[place.name] = place.spec.slice(value) if place.spec else value
            elif place.tensor.is_meta:
                raise SlapoError(
                    f"Verify: {place.name!r} is on meta and nothing says how it comes from the "
                    "original's parameters; let its module define weight_sources()"
                )
            else:
                found[place.name] = place.tensor.detach().to(device)
        return found

    def _original(self, place: Place, full: Mapping[str, Tensor]) -> Tensor | None:
        """The full value that the tensor at `place` has in the original; None if it has none."""
        shape = place.spec.full_shape if place.spec else place.tensor.shape
        source = self.source_of(place.name)
        if source is not None:
            value: Tensor = source[0].pack([full[name] for name in source[1]])
        else:
            name = self.original_name(place)
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
        return {id(p): full[self._names[id(p)]] for p in params if id(p) in self._names}

    def original_name(self, place: Place) -> str:
        """The name that a tensor had on entry; a fusion moves parameters to another module."""
        if place.name in self.original_names:
            return place.name
        return self._names.get(id(place.tensor), place.name)

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
        originals = {place.name: place for place in places(self._reference)}
        for place in places(self._sch.mod):
            if not isinstance(place.tensor, nn.Parameter):
                continue
            grad = gradient_of(place.tensor)
            if place.spec is not None:
                grad = place.spec.gather(grad, self._sch.group)
            source = self.source_of(place.name)
            if source is not None:
                sizes = [source[0].size_of(originals[n].tensor) for n in source[1]]
                found.update(zip(source[1], source[0].unpack(grad, sizes), strict=True))
            else:
                found[self._known_as.get(place.name, place.name)] = grad
        for param in compiled_parameters(self._sch.mod):
            name = self._names.get(id(param))
            if name is not None:
                found.setdefault(name, gradient_of(param))
        return found
