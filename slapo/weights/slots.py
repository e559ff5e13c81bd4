"""Places of a model's tensors, and temporary replacements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
        param = self.owner._parameters.get(self.leaf)
        found = param if param is not None else self.owner._buffers[self.leaf]
        assert found is not None, "slots are made for tensors that exist"
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
