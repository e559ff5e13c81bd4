"""Places of a model's tensors, ties between them, and temporary replacements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost


@dataclass(frozen=True)
class Slot:
    """Place of a tensor: the module, its local name, and its full name."""

    owner: nn.Module
    leaf: str
    name: str = ""

    @property
    def tensor(self) -> Tensor:
        """The current tensor."""
        found: Tensor = getattr(self.owner, self.leaf)
        return found

    @property
    def spec(self) -> ShardSpec | None:
        """Its sharding, or None."""
        return shards_of(self.owner).get(self.leaf)

    @property
    def full_shape(self) -> torch.Size:
        """Its shape before sharding."""
        if self.spec is not None:
            return self.spec.full_shape
        # A slice that its author made may have this attribute.
        return torch.Size(getattr(self.tensor, "orig_shape", self.tensor.shape))

    def put(self, tensor: Tensor) -> None:
        """Set the tensor."""
        table: dict[str, Any] = (
            self.owner._parameters if self.leaf in self.owner._parameters else self.owner._buffers
        )
        table[self.leaf] = tensor


def own_slots(module: nn.Module, path: str = "") -> list[Slot]:
    """Return the slots of one module, located at `path`."""
    prefix = f"{path}." if path else ""
    tables = (module._parameters, module._buffers)
    return [
        Slot(module, leaf, prefix + leaf)
        for table in tables
        for leaf, tensor in table.items()
        if tensor is not None
    ]


def slots(model: nn.Module) -> list[Slot]:
    """Return every tensor of a model by all of its names, except those in TorchScript modules."""
    return [
        slot
        for path, module in model.named_modules(remove_duplicate=False)
        if not isinstance(innermost(module), torch.jit.ScriptModule)
        for slot in own_slots(innermost(module), path)
    ]


def saved_slots(model: nn.Module) -> Iterator[Slot]:
    """Yield every tensor of a state dict by all of its names, also those in TorchScript modules."""
    for path, outer in model.named_modules(remove_duplicate=False):
        module, prefix = innermost(outer), f"{path}." if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            tables = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            leaves = [leaf for table in tables for leaf, _ in table]
        else:
            own = (*module._parameters.items(), *module._buffers.items())
            left_out = module._non_persistent_buffers_set
            leaves = [leaf for leaf, t in own if t is not None and leaf not in left_out]
        yield from (Slot(module, leaf, prefix + leaf) for leaf in leaves)


def parameter_slot(model: nn.Module, name: str) -> Slot | None:
    """Return the slot of the parameter called `name`, or None if it is gone."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    table = module._parameters  # of a compiled module it has no `get`
    return Slot(module, leaf, name) if leaf in table and table[leaf] is not None else None


def compiled_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of TorchScript modules, which cannot be exchanged, by one name each."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            for leaf, param in module.named_parameters():
                found.setdefault(id(param), (f"{path}.{leaf}".lstrip("."), param))
    return dict(found.values())


def replacements(model: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """Return new tensors by the ids of a model's own, for ``copy.deepcopy``; ties stay."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    found: dict[int, Any] = {}
    for tensor in tensors:
        made = make(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        found[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return found


@contextmanager
def exchanged(
    places: Iterable[Slot], make: Callable[[Slot], Tensor], keeps_ties: bool = True
) -> Iterator[None]:
    """Replace the tensors of some slots within the block."""
    originals = [(slot, slot.tensor) for slot in places]
    made: dict[int, Tensor] = {}
    try:
        for slot, tensor in originals:
            if id(tensor) not in made or not keeps_ties:
                made[id(tensor)] = make(slot)
            slot.put(made[id(tensor)])
        yield
    finally:
        for slot, tensor in originals:
            slot.put(tensor)


# --- ties -----------------------------------------------------------------------------------------
class TieGroups:
    """Groups of names that refer to one parameter."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        groups = [frozenset(group) for group in names.values() if len(group) > 1]
        self._group_of = _by_name(groups)

    def __bool__(self) -> bool:
        return bool(self._group_of)

    def partners(self, name: str) -> frozenset[str]:
        """Return the other names of the parameter called `name`."""
        return self._group_of.get(name, frozenset()) - {name}

    def renamed(self, names: Mapping[str, str]) -> TieGroups:
        """Return the same groups with some names changed."""
        new = TieGroups.__new__(TieGroups)
        groups = [frozenset(names.get(n, n) for n in group) for group in self.groups()]
        new._group_of = _by_name(groups)
        return new

    def as_dict(self) -> dict[str, tuple[str, ...]]:
        """Return name -> other names, for tied parameters."""
        return {name: tuple(sorted(self.partners(name))) for name in self._group_of}

    def groups(self) -> Iterator[frozenset[str]]:
        """Yield each group of names once."""
        yield from dict.fromkeys(self._group_of.values())

    def names_under(self, path: str) -> Iterator[str]:
        """Return the tied names of the module at `path` and of its descendants."""
        prefix = f"{path}." if path else ""
        return (name for name in self._group_of if name.startswith(prefix))


def _by_name(groups: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return name -> group, in an order that is the same in every process."""
    return {name: group for group in groups for name in sorted(group)}


def check_ties(model: nn.Module, ties: TieGroups) -> None:
    """Check that the existing names of each group refer to one parameter."""
    for group in ties.groups():
        present = [slot for name in sorted(group) if (slot := parameter_slot(model, name))]
        if len({id(slot.tensor) for slot in present}) > 1:
            raise SlapoError(
                f"{', '.join(slot.name for slot in present)} were one parameter but are now "
                f"separate, with shapes {[tuple(slot.tensor.shape) for slot in present]}; schedule "
                "both sides alike, or untie them before create_schedule"
            )


class TiePlan:
    """Plan that keeps ties when a new module replaces others.

    A parameter of the new module with the old name becomes the tied one. A module that already
    holds the tied parameter, under any name, keeps it.
    """

    def __init__(
        self,
        model: nn.Module,
        ties: TieGroups,
        old_paths: Sequence[str],
        new_path: str,
        new: nn.Module,
    ) -> None:
        self.ties, self.new_path = ties, new_path
        self._renames: dict[str, str] = {}
        self._moves: list[tuple[Slot, Tensor]] = []
        held = {id(p): n for n, p in new.named_parameters(remove_duplicate=False)} if ties else {}
        leaving = {name: path for path in old_paths for name in ties.names_under(path)}
        for name, path in leaving.items():
            found = parameter_slot(model, name)
            stay = [p for p in ties.partners(name) if p not in leaving and parameter_slot(model, p)]
            if found is not None and stay:
                local = name[len(path) + 1 :] if path else name
                self._plan(name, local, found.tensor, new, held.get(id(found.tensor)), stay)

    def _plan(
        self,
        name: str,
        local: str,
        param: Tensor,
        new: nn.Module,
        held_as: str | None,
        partners: list[str],
    ) -> None:
        if held_as is not None:
            self._renames[name] = held_as
            return
        target = parameter_slot(new, local)
        if target is None or target.tensor.shape != param.shape:
            has = f"shape {tuple(target.tensor.shape)}" if target else "no such parameter"
            raise ValueError(
                f"{name!r} of shape {tuple(param.shape)} is tied to {partners}, but "
                f"{type(new).__name__} has {has} to replace it, which would break the tie; give "
                f"it a parameter {local!r} of that shape, or untie the two before create_schedule"
            )
        self._moves.append((target, param))
        self._renames[name] = local

    def carry_out(self) -> TieGroups:
        """Tie the new module; return the ties by their new names."""
        for slot, param in self._moves:
            slot.put(param)
        prefix = f"{self.new_path}." if self.new_path else ""
        return self.ties.renamed({old: prefix + new for old, new in self._renames.items()})
