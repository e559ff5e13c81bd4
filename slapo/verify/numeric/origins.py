"""Mapping from tensors of a scheduled model to tensors of a copy made before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.schedule import Schedule
from slapo.verify.numeric.harness import gradient_of
from slapo.weights.pieces import Box, Piece, index_of, lengths, overlap
from slapo.weights.provenance import origin_at
from slapo.weights.slots import Slot, compiled_parameters, slots


class Origins:
    """Tensors of a scheduled model by the names in a copy made before scheduling.

    Both derive from the model as it was first scheduled, and boxes of its tensors link the two. A
    tensor with values set by its author corresponds to the tensor of the same name in the copy.
    """

    def __init__(self, sch: Schedule, reference: nn.Module) -> None:
        self._sch = sch
        self.original_names = {slot.name for slot in slots(reference)}
        self._kept = [p.tensor for p in slots(sch.mod)]  # keeps their ids valid
        #: id of a tensor on entry -> its name
        self.names = {id(p.tensor): p.name for p in slots(sch.mod)}
        #: tensor of the first model -> box of it -> its place in the copy
        self._places: dict[str, dict[Box, tuple[str, Piece]]] = {}
        for slot in slots(sch.mod):
            origin = origin_at(slot)
            for piece in () if origin is None else origin.pieces:
                if isinstance(piece.leaf, str):
                    places = self._places.setdefault(piece.leaf, {})
                    places.setdefault(piece.source, (slot.name, piece))

    def parts_of(self, slot: Slot) -> list[str]:
        """The tensors of the copy that a tensor derives from; empty for a new tensor."""
        found = self._parts(slot)
        if found is None:
            name = self.original_name(slot)
            return [name] if name in self.original_names else []
        return found

    def is_kept(self, slot: Slot) -> bool:
        """Return True for the tensor from before, or one matched by name only."""
        is_made = self._parts(slot) is not None
        return not is_made or self.names.get(id(slot.tensor)) == slot.name

    def value(self, slot: Slot, full: Mapping[str, Tensor]) -> Tensor | None:
        """Full value of a tensor from the copy's values, or None."""
        origin = origin_at(slot)
        if origin is not None and self._parts(slot) is not None:
            value = origin.read(lambda leaf, box: self._read(leaf, box, full))
        else:
            found = full.get(self.original_name(slot))
            if found is None:
                return None
            value = found
        return value if value.shape == slot.full_shape else None

    def values(self, full: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """This rank's slices of the original's tensors, by the names of the scheduled model."""
        found: dict[str, Tensor] = {}
        for slot in slots(self._sch.mod):
            value = self.value(slot, full)
            if value is not None:
                with torch.no_grad():
                    found[slot.name] = slot.spec.slice(value) if slot.spec else value
            elif slot.tensor.is_meta:
                raise SlapoError(
                    f"Verify: {slot.name!r} is on meta, and its module does not declare how it "
                    "derives from the original's parameters; define weight_sources() there"
                )
            else:
                found[slot.name] = slot.tensor.detach().to(device)
        return found

    def compiled_values(self, full: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Values of parameters inside compiled code, by id."""
        params = compiled_parameters(self._sch.mod)
        return {id(p): full[self.names[id(p)]] for p in params.values() if id(p) in self.names}

    def original_name(self, slot: Slot) -> str:
        """The name of a tensor on entry; a fusion moves parameters to another module."""
        if slot.name in self.original_names:
            return slot.name
        return self.names.get(id(slot.tensor), slot.name)

    def gradients(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full gradients of the scheduled model by the original's names, from the chain rule."""
        grads: dict[Slot | str, Tensor] = {}
        for slot in {id(slot.tensor): slot for slot in slots(self._sch.mod)}.values():
            if isinstance(slot.tensor, nn.Parameter):
                grad = gradient_of(slot.tensor)
                spec = slot.spec
                grads[slot] = grad if spec is None else spec.gather(grad, self._sch.group)
        for param in compiled_parameters(self._sch.mod).values():
            if id(param) in self.names:
                grads[self.names[id(param)]] = gradient_of(param)
        # Use the precision of the run.
        dtypes = [grad.dtype for grad in grads.values()]
        # The gradient of the original follows from the function that makes a tensor from the
        # original's values: run it on leaves, and send the tensor's gradient back through it.
        leaves = {
            id(t): t.detach().to(reduce(torch.promote_types, dtypes, t.dtype)).requires_grad_()
            for t in full.values()
            if t.is_floating_point() or t.is_complex()
        }
        given = {name: leaves.get(id(t), t) for name, t in full.items()}
        with torch.enable_grad():
            for at, grad in grads.items():
                value = given[at] if isinstance(at, str) else self.value(at, given)
                if value is not None and value.requires_grad:
                    value.backward(grad)
        return {name: t.grad for name, t in given.items() if t.grad is not None}

    def _parts(self, slot: Slot) -> list[str] | None:
        """Names in the copy that cover a tensor's origin; None if they do not."""
        origin, found = origin_at(slot), dict[str, None]()
        if origin is None:
            return None
        for leaf, box in origin.needs():
            # Pieces in the copy are disjoint, so counting elements shows if they cover the box.
            left = torch.Size(lengths(box)).numel()
            for source, (name, _) in self._places.get(leaf, {}).items():
                shared = overlap(source, box)
                if shared is not None:
                    found[name] = None
                    left -= torch.Size(lengths(shared)).numel()
            if left:
                return None
        return list(found)

    def _read(self, leaf: str, box: Box, full: Mapping[str, Tensor]) -> Tensor:
        values = None
        for source, (name, piece) in self._places[leaf].items():
            shared = overlap(source, box)
            if shared is None:
                continue
            found = piece.to_source(full[name][index_of(piece.place)])[index_of(shared, source)]
            if shared == box:
                return found
            if values is None:
                values = found.new_zeros(lengths(box))
            values[index_of(shared, box)] = found
        assert values is not None, "asked for covered tensors only"
        return values
