"""Slices of tensors: which part of a parameter or buffer a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """How one tensor is sharded.

    Parameters
    ----------
    axis
        The sharded axis, not negative.
    full_shape
        Shape before sharding.
    blocks
        Sizes of the blocks along `axis` that are split one by one, in the full tensor; one block
        of the axis's whole size for a plain tensor, three equal ones for a packed QKV.
    rank, world_size
        This rank's place in the group.
    """

    axis: int
    full_shape: torch.Size
    blocks: tuple[int, ...]
    rank: int
    world_size: int

    def slice(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor, as a tensor of its own."""
        parts = [
            block.narrow(self.axis, self.rank * size, size)
            for block, size in zip(
                full.split(list(self.blocks), self.axis), self._local_blocks(), strict=True
            )
        ]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.axis)

    def gather(self, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The full tensor from every rank's part; every rank of the group must call it."""
        if self.world_size == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local.contiguous(), group=group)
        split = [part.split(self._local_blocks(), self.axis) for part in parts]
        return torch.cat([rank[k] for k in range(len(self.blocks)) for rank in split], self.axis)

    def _local_blocks(self) -> list[int]:
        return [size // self.world_size for size in self.blocks]

    @property
    def local_shape(self) -> torch.Size:
        """Shape of each rank's part."""
        sizes = list(self.full_shape)
        sizes[self.axis] //= self.world_size
        return torch.Size(sizes)


def make_spec(
    shape: torch.Size, axis: int, blocks: int | Sequence[int], rank: int, world_size: int
) -> ShardSpec:
    """The spec for a tensor of `shape`.

    Raises
    ------
    ValueError
        If the axis does not exist, blocks do not fill it, or a block is not divisible.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"axis {axis} does not exist in shape {tuple(shape)}; "
            f"pass one of {list(range(len(shape)))}"
        )
    axis %= len(shape)
    sizes = _block_sizes(shape[axis], blocks)
    bad = [size for size in sizes if size % world_size]
    if bad:
        kind = "size" if len(sizes) == 1 else "block size"
        raise ValueError(
            f"{kind} {bad[0]} is not divisible by world_size {world_size}; "
            "pick a group whose size divides it, or pad the tensor"
        )
    return ShardSpec(axis, shape, sizes, rank, world_size)


def _not_sizes(blocks: int | Sequence[int]) -> bool:
    return not isinstance(blocks, int) and not all(isinstance(size, int) for size in blocks)


def _block_sizes(size: int, blocks: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(blocks, bool) or not isinstance(blocks, (int, Sequence)) or _not_sizes(blocks):
        raise TypeError(
            f"blocks must be a number of equal blocks or their sizes, integers, got {blocks!r}"
        )
    if isinstance(blocks, int):
        if blocks < 1 or size % blocks:
            raise ValueError(
                f"size {size} does not hold {blocks} equal blocks; pass a divisor of it, "
                "or the sizes of the blocks"
            )
        return (size // blocks,) * blocks
    sizes = tuple(int(b) for b in blocks)
    if sum(sizes) != size or min(sizes, default=0) < 1:
        raise ValueError(
            f"block sizes {list(sizes)} do not add up to {size}; pass the size of every block"
        )
    return sizes
