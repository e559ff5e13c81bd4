"""Parts of the original model's tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.sharding.slicing import ShardSpec, is_sharded
from slapo.weights.pieces import Box, Piece, Pieced, boxes_of_range, index_of
from slapo.weights.provenance import origin_at
from slapo.weights.slots import saved_slots

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class Held:
    """A tensor of this rank, and the origin of its full form."""

    name: str
    tensor: Tensor
    #: None if it comes from no original
    origin: Pieced | None
    spec: ShardSpec | None = None
    #: replicas may differ: each has statistics of its own batches, and the first one's are saved
    is_buffer: bool = False

    @property
    def here(self) -> Pieced:
        """Origin of this rank's slice."""
        whole: Any = self.origin
        found: Any = whole if self.spec is None else self.spec.slice(whole)
        return found

    def parts(self) -> Iterator[tuple[Tensor, Pieced]]:
        """Yield the values in this process, with their origins."""
        tensor, here = self.tensor.detach(), self.here
        # An engine may flatten or divide its module's parameters, and then keeps their layout
        # itself.
        if tensor.shape != here.shape:
            raise SlapoError(
                f"{self.name!r} has shape {tuple(tensor.shape)}, but this rank's part of it has "
                f"{tuple(here.shape)}; pass the engine returned by slapo.build, not its module"
            )
        if not is_sharded(tensor):
            yield tensor, here
            return
        share: Any = tensor
        yield share.to_local(), here.part(box_of_share(share))

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the pieces of originals held here, with views in the original layout."""
        for local, here in self.parts():
            for piece in here.pieces:
                if isinstance(piece.leaf, str):
                    yield piece, piece.to_source(local[index_of(piece.place)])


@dataclass
class HeldRange(Held):
    """`count` elements of a tensor from `start` on, stored in a flat one from `at` on."""

    start: int = 0
    at: int = 0
    count: int = 0

    @classmethod
    def of(cls, held: Held, tensor: Tensor, start: int, at: int, count: int) -> Self:
        """Make a range of a held tensor, stored in `tensor`."""
        return cls(held.name, tensor, held.origin, held.spec, held.is_buffer, start, at, count)

    def parts(self) -> Iterator[tuple[Tensor, Pieced]]:
        flat, here = self.tensor.detach().view(-1), self.here
        for begin, box in boxes_of_range(here.shape, self.start, self.start + self.count):
            part = here.part(box)
            found = flat.narrow(0, self.at + begin - self.start, part.numel())
            yield found.view(part.shape), part


def box_of_share(share: Any) -> Box:
    """Return the box of a DTensor that this process holds."""
    # An import at the top would load torch.distributed.tensor, which takes a second.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(
        share.shape, share.device_mesh, share.placements
    )
    return tuple((at, at + size) for at, size in zip(starts, sizes, strict=True))


def holdings(module: nn.Module) -> list[Held]:
    """Return each tensor of a module once."""
    found: dict[int, Held] = {}
    for slot in saved_slots(module):
        # Tied tensors are listed by their first name, which is also that of the origin.
        if id(slot.tensor) not in found:
            is_buffer = not isinstance(slot.tensor, nn.Parameter)
            found[id(slot.tensor)] = Held(
                slot.name, slot.tensor, origin_at(slot), slot.spec, is_buffer
            )
    return list(found.values())


def check_origins(what: str, held: Iterable[Held]) -> None:
    """Refuse tensors that do not come from the original model."""
    held = list(held)
    lost = [item.name for item in held if item.origin is None]
    if lost:
        raise SlapoError(
            f"{what}: {lost[:5]} come from no tensor of the original model, whose names are used "
            "for saving; declare weight_sources() in their module"
        )
    pieces = ((item.name, piece.leaf) for item in held for piece in item.origin.pieces)  # type: ignore[union-attr]
    made = list(dict.fromkeys(name for name, leaf in pieces if not isinstance(leaf, str)))
    if made:
        raise SlapoError(
            f"{what}: {made[:5]} are computed from tensors of the original model by code that "
            "cannot be inverted; only move values in weights_from() (cat, split, stack, "
            "transpose, slices)"
        )
