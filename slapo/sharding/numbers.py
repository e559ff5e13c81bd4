"""Global sizes that a sharded module has: in attributes, or of an input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo.history import Record, contains
from slapo.sharding.sync_hooks import input_names
from slapo.wrapper import ModuleWrapper, innermost

#: What reads the sizes of a tensor.
SIZES = (Tensor.size, Tensor.shape.__get__)  # type: ignore[attr-defined]
#: Names that models use for their number of heads.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads")
#: Sizes that do not depend on the number of heads.
_OF_ONE_HEAD = re.compile(r"head_(dim|size)|(groups|buckets|distance|idx|index)$")


def sizes_kept(module: nn.Module, path: str, records: Sequence[Record], world_size: int) -> str:
    """Describe the sizes of a module with shards below it; sharding does not adjust them."""
    below = [record for record in records if contains(path, record.path)]
    if not any(record.primitive == "shard" and record.path != path for record in below):
        return ""
    bare = innermost(module)
    known = {record.arguments["name"] for record in below if record.primitive == "set"}
    heads = [
        (name, getattr(bare, name, getattr(getattr(bare, "config", None), name, None)))
        for name in _HEADS
        if repr(name) not in known
    ]
    uneven = [f"{name}={n}" for name, n in heads if type(n) is int and n % world_size]
    if uneven:
        return (
            f"\nit holds shards, and {uneven[0]} cannot be split into whole heads over "
            f"{world_size} ranks; use a number of ranks that divides it, or keep its projections "
            "whole"
        )
    numbers = [
        f"{name}={value}"
        for name, value in vars(bare).items()
        if type(value) is int and value > 1 and name[0] != "_" and repr(name) not in known
        if not _OF_ONE_HEAD.search(name)
    ]
    if not numbers:
        return ""
    return (
        f"\nit holds shards, but keeps {', '.join(numbers)}: set full sizes to this rank's share, "
        f'as by sch["{path}"].set(name, whole=...), with whole heads on each rank'
    )


class LocalSize(ModuleWrapper):
    """Runs a module that reads one size of an argument as this rank's share of it.

    ``batch, length, width = x.shape`` is the size of the full hidden states; views of sharded
    projections need the width on this rank.
    """

    argument: str
    axis: int
    ranks: int

    def __init__(self, mod: nn.Module, argument: str, axis: int, ranks: int) -> None:
        super().__init__(mod)
        self.__dict__.update(argument=argument, axis=axis, ranks=ranks)  # not of the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = input_names(innermost(self.mod))[0]
        tensor = {**dict(zip(names, args, strict=False)), **kwargs}[self.argument]
        # Dynamo reads `x.shape` without asking modes.
        run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
        return run(self.mod, _Share(tensor, self.axis, self.ranks), args, kwargs)


def _run(mod: nn.Module, share: TorchFunctionMode, args: Any, kwargs: dict[str, Any]) -> Any:
    with share:
        return mod(*args, **kwargs)


class _Share(TorchFunctionMode):
    """Divides one size of a tensor where Python reads it."""

    def __init__(self, tensor: Tensor, axis: int, ranks: int) -> None:
        super().__init__()
        self.tensor, self.axis, self.ranks = tensor, axis % tensor.dim(), ranks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SIZES or args[0] is not self.tensor:
            return out
        if isinstance(out, Size):
            sizes = list(out)
            sizes[self.axis] = self._share(sizes[self.axis])
            return Size(sizes)
        axis = args[1] if len(args) > 1 else (kwargs or {})["dim"]
        return self._share(out) if axis % self.tensor.dim() == self.axis else out

    def _share(self, size: int) -> int:
        if size % self.ranks:
            raise ValueError(
                f"axis {self.axis} of an input of shape {tuple(self.tensor.shape)} is not "
                f"divisible by {self.ranks} ranks; use a number of ranks that divides it"
            )
        return size // self.ranks
