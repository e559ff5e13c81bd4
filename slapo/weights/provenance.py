"""Where the parameters of a new module come from, so that a replacement keeps the weights.

A module that takes the place of others may define ``weight_sources()``: for each of its
parameters, which of the originals' parameters make it up. The same declaration, read backwards,
gives the originals' parameters again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Source:
    """How one parameter is made from those of the originals.

    Parameters
    ----------
    names
        Parameters of the originals, as ``"<k>.<name>"`` for the k-th module that was replaced
        (in the order of the match), such as ``"0.weight"``.
    dim
        The axis along which several are concatenated.
    transpose
        Swap the last two axes first, as between ``nn.Linear`` and GPT-2's ``Conv1D``.

    Examples
    --------
    >>> q, k = torch.zeros(2, 4), torch.ones(2, 4)
    >>> packed = Source(("0.weight", "1.weight"), dim=0).pack([q, k])
    >>> packed.shape
    torch.Size([4, 4])
    >>> Source(("0.weight", "1.weight")).unpack(packed, [2, 2])[1].sum()
    tensor(8.)
    """

    names: tuple[str, ...]
    dim: int = 0
    transpose: bool = False

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The new parameter's value."""
        parts = [t.transpose(-1, -2) if self.transpose else t for t in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def size_of(self, original: Tensor) -> int:
        """How much of `dim` an original takes."""
        shape = original.transpose(-1, -2).shape if self.transpose else original.shape
        return shape[self.dim]

    def unpack(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The originals' values; `sizes` are theirs along `dim`."""
        parts = list(tensor.split(list(sizes), self.dim))
        return [p.transpose(-1, -2) if self.transpose else p for p in parts]


def declared_sources(module: nn.Module) -> dict[str, Source]:
    """The sources that `module` declares for its parameters; empty if it declares none."""
    declare: Any = getattr(module, "weight_sources", None)
    return dict(declare()) if callable(declare) else {}


def inherit_weights(new: nn.Module, originals: Sequence[nn.Module]) -> dict[str, Source]:
    """Give `new` the values of the modules it replaces, as far as it declares or allows.

    - Declared sources are packed into the new parameters.
    - Parameters of `new` on ``meta`` (which have no value of their own) take the original's
      parameter of the same name and shape, the very object, when one module is replaced.
    - Other parameters keep the values that their author gave them.
    """
    sources = declared_sources(new)
    tables = [dict(m.named_parameters(remove_duplicate=False)) for m in originals]
    for name, source in sources.items():
        _fill(new, name, source, tables)
    if len(originals) == 1 and not sources:
        _adopt_by_name(new, tables[0])
    return sources


def _fill(
    new: nn.Module, name: str, source: Source, tables: Sequence[Mapping[str, Tensor]]
) -> None:
    owner_path, _, leaf = name.rpartition(".")
    owner = new.get_submodule(owner_path)
    present = owner._parameters.get(leaf)
    if present is None:
        raise ValueError(f"{type(new).__name__}.weight_sources names {name!r}, not a parameter")
    parts = [_original(new, name, full, tables) for full in source.names]
    with torch.no_grad():
        value = source.pack(parts)
        if value.shape != present.shape:
            raise ValueError(
                f"{type(new).__name__}.{name} has shape {tuple(present.shape)}, but "
                f"{list(source.names)} make {tuple(value.shape)}"
            )
        owner._parameters[leaf] = nn.Parameter(
            value.detach().clone(), requires_grad=any(p.requires_grad for p in parts)
        )


def _original(
    new: nn.Module, name: str, full: str, tables: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    index, _, rest = full.partition(".")
    if index.isdigit() and int(index) < len(tables) and rest in tables[int(index)]:
        return tables[int(index)][rest]
    known = [f"{k}.{n}" for k, table in enumerate(tables) for n in table]
    raise ValueError(
        f"{type(new).__name__}.{name} comes from {full!r}, which the replaced modules lack; "
        f"they have {known}"
    )


def _adopt_by_name(new: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for path, module in new.named_modules():
        for leaf, present in list(module._parameters.items()):
            full = f"{path}.{leaf}" if path else leaf
            original = originals.get(full)
            if present is None or original is None or not present.is_meta:
                continue
            if isinstance(original, nn.Parameter) and original.shape == present.shape:
                module._parameters[leaf] = original


def dropped_values(new: nn.Module, original: nn.Module) -> list[str]:
    """Parameters of which the original has others, of the same name and shape, and other values.

    None where the new module says where its values come from.
    """
    if declared_sources(new):
        return []
    before = dict(original.named_parameters(remove_duplicate=False))
    return [
        name
        for name, p in new.named_parameters()
        if name in before
        and p is not before[name]
        and p.shape == before[name].shape
        and not (p.is_meta or before[name].is_meta)
        and not torch.equal(p.to(before[name].dtype), before[name])
    ]
