"""State that a rank has to save: boxes of original tensors, numbers and parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError
from slapo.saving.nests import decode, encode
from slapo.saving.plan import Key, Offer
from slapo.saving.steps import Manifest
from slapo.weights.holdings import Held
from slapo.weights.pieces import Box
from slapo.weights.provenance import Original, original_of

#: Keys of an optimizer's group that are not options.
_NO_OPTIONS = ("params", "param_names")


class Trainer(Protocol):
    """The part of an engine's interface that saving uses."""

    mesh: DeviceMesh
    lowering: Any
    scheduler: Any
    step_count: int
    samples: int

    @property
    def kind(self) -> str:
        """The runtime and its sharding."""

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        """Loss scale for float16, and the steps since it changed."""

    def held(self) -> list[Held]:
        """Tensors that the model computes with."""

    def cells(self) -> dict[int, list[Held]]:
        """Tensors that the optimizer steps on."""

    def steppers(self) -> AbstractContextManager[list[torch.optim.Optimizer]]:
        """Torch optimizers."""

    def fragments(self) -> Iterator[tuple[str, Held]]:
        """Tensors to save."""

    def slots_changed(self) -> None:
        """Notify that the tensors of the optimizer's state were replaced."""

    def set_loss_scale(self, scale: float, steps: int) -> None:
        """Set the loss scale."""

    def saving_group(self) -> Any:
        """Group of all ranks for a thread that saves."""


def original(engine: Trainer) -> Original:
    """Return the original model of the schedule."""
    found = original_of(engine.lowering.model)
    assert found is not None, "build writes it down"
    return found


def names_of(held: Held) -> list[str]:
    """Names of the original tensors that a full tensor consists of."""
    assert held.origin is not None, "asked before"
    return sorted({str(piece.leaf) for piece in held.origin.pieces})


@dataclass
class Mine:
    """This rank's part of the training state."""

    values: dict[tuple[Key, Box], Tensor] = field(default_factory=dict)
    #: slot -> dtype and values by names
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: slot -> name of a parameter -> state of another shape
    odd: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str | None = None
    #: names of buffers
    buffers: set[str] = field(default_factory=set)

    def offer(self) -> dict[Key, Offer]:
        """Return the dtype and the boxes of each tensor."""
        boxes: dict[Key, list[Box]] = {}
        dtypes = {}
        for (key, box), values in self.values.items():
            boxes.setdefault(key, []).append(box)
            dtypes[key] = values.dtype
        # Slots have the boxes of their parameter: sharing one object sends it once.
        same: dict[tuple[Box, ...], tuple[Box, ...]] = {}
        return {
            key: (dtypes[key], same.setdefault(tuple(each), tuple(each)))
            for key, each in boxes.items()
        }


def collect(engine: Trainer) -> Mine:
    """Return all state of this rank, as views."""
    mine = Mine()
    for slot, held in engine.fragments():
        for piece, values in held.pieces():
            mine.values.setdefault(((slot, str(piece.leaf)), piece.source), values)
            if held.is_buffer:
                mine.buffers.add(str(piece.leaf))
    cells = by_cell(engine)
    with engine.steppers() as steppers:
        mine.optimizer = class_of(steppers)
        for optimizer in steppers:
            _add_numbers(mine, optimizer, cells)
            mine.groups += groups_of(optimizer, cells)
    return mine


def class_of(steppers: Sequence[Any]) -> str | None:
    """Class names of the optimizers; None if there are none."""
    return " and ".join(type(each).__name__ for each in steppers) or None


def by_cell(engine: Trainer) -> dict[int, list[Held]]:
    """Id of a tensor that the optimizer steps on -> the parameters in it."""
    found: dict[int, list[Held]] = {}
    for kept in engine.cells().values():
        for item in kept:
            found.setdefault(id(item.tensor), []).append(item)
    return found


def has_form_of(cell: Tensor, slot: str, value: Any) -> bool:
    """Return whether a part of the optimizer's state has the layout of its cell."""
    # Adam's step count is a tensor without dimensions, as a scalar parameter is.
    is_number = slot == "step" and cell.dim() == 0
    return isinstance(value, Tensor) and value.shape == cell.shape and not is_number


def _add_numbers(mine: Mine, optimizer: Any, cells: Mapping[int, Sequence[Held]]) -> None:
    for cell, state in optimizer.state.items():
        inside = cells.get(id(cell))
        if inside is None:
            if state:
                raise SlapoError(
                    f"engine.save: {type(optimizer).__name__} keeps {sorted(state)} for a tensor "
                    "that is not a parameter of the model, which cannot be saved"
                )
            continue
        for slot, value in state.items():
            if has_form_of(cell, slot, value):
                continue
            if (isinstance(value, Tensor) and value.dim() == 0) or type(value) in (int, float):
                kind = str(value.dtype)[6:] if isinstance(value, Tensor) else type(value).__name__
                found = mine.numbers.setdefault(slot, {"dtype": kind, "values": {}})
                number = value.item() if isinstance(value, Tensor) else value
                for item in inside:
                    found["values"].update(dict.fromkeys(names_of(item), number))
            else:
                mine.odd.setdefault(slot, {})[inside[0].name] = value


def groups_of(optimizer: Any, cells: Mapping[int, Sequence[Held]]) -> list[dict[str, Any]]:
    """Options of an optimizer's groups, and the names that they apply to."""
    found = []
    for group in optimizer.param_groups:
        options = {}
        for name, value in group.items():
            if name in _NO_OPTIONS:
                continue
            try:
                plain = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
                options[name] = encode(plain, [], name)
            except SlapoError:
                continue  # for example a function; the resuming engine has its own
        held = [item for p in group["params"] for item in cells.get(id(p), ())]
        found.append({"options": options, "names": sorted({n for h in held for n in names_of(h)})})
    return found


def merged_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the groups of all ranks; groups with equal options become one."""
    found: list[dict[str, Any]] = []
    for group in groups:
        same = next((g for g in found if g["options"] == group["options"]), None)
        if same is None:
            found.append({"options": group["options"], "names": sorted(group["names"])})
        else:
            same["names"] = sorted({*same["names"], *group["names"]})
    return [group for group in found if group["names"]]


def merged_numbers(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the values of all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for slot, numbers in part.items():
            into = found.setdefault(slot, {"dtype": numbers["dtype"], "values": {}})
            into["values"].update(numbers["values"])
    return found


# --- in the other direction ----------------------------------------------------------------------
@dataclass
class Room:
    """State to create for a tensor that an optimizer steps on, before values are read."""

    slots: list[str]
    numbers: dict[str, float | int]


def room_for(inside: Sequence[Held], manifest: Manifest) -> Room:
    """Return the saved slots and values of the parameters in a tensor."""
    names = [name for item in inside for name in names_of(item)]
    slots = [
        slot
        for slot, named in manifest.tensors.items()
        if slot and any(name in named for name in names)
    ]
    numbers = {}
    for slot, kept in manifest.numbers.items():
        found = {kept["values"][name] for name in names if name in kept["values"]}
        if len(found) > 1:
            raise SlapoError(
                f"{inside[0].name!r} combines {names[:4]}, whose {slot!r} in the checkpoint is "
                f"{sorted(found)}, but the optimizer has one for all of it; resume with the "
                "schedule that saved it"
            )
        if found:
            numbers[slot] = found.pop()
    return Room(slots, numbers)


def make_room(
    optimizer: Any,
    rooms: Mapping[int, Room],
    options: Sequence[Mapping[str, Any]],
    odd: Mapping[int, Mapping[str, Any]],
    kinds: Mapping[str, str],
) -> None:
    """Set the options of an optimizer, and zeros for values that are read later."""
    packed = optimizer.state_dict()
    state, number = {}, 0
    for group, given, wanted in zip(
        optimizer.param_groups, packed["param_groups"], options, strict=True
    ):
        for name, value in wanted.items():
            if name in group:
                plain = decode(value, [])
                was = group[name]
                given[name] = torch.as_tensor(plain).to(was) if isinstance(was, Tensor) else plain
        for cell in group["params"]:
            room = rooms.get(id(cell), Room([], {}))
            found: dict[str, Any] = {slot: torch.zeros_like(cell) for slot in room.slots}
            for slot, value in room.numbers.items():
                dtype = getattr(torch, kinds[slot], None)
                # torch.int and torch.float are dtypes, but here the words stand for Python's
                # classes.
                is_tensor = isinstance(dtype, torch.dtype) and kinds[slot] not in ("int", "float")
                found[slot] = torch.tensor(value, dtype=dtype) if is_tensor else value
            found.update(odd.get(id(cell), {}))
            if found:
                state[number] = found
            number += 1
    packed["state"] = state
    # torch's own loading decides on devices and dtypes: AdamW keeps `step` on the CPU unless it is
    # fused or capturable.
    optimizer.load_state_dict(packed)
