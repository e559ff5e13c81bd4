"""Slices of tensors: the part of a parameter or buffer that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.sharding.groups import lengthened, share_of


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
        Sizes of the separately sharded blocks along `axis` in the full tensor: one block of the
        full size for a plain tensor, three equal ones for a packed QKV. If the number of ranks does
        not divide a block, it is cut as by ``torch.chunk``.
    rank, world_size
        This rank's position in the group.
    copies
        Number of consecutive ranks that hold each part; above one if there are fewer parts than
        ranks, as for key and value heads.
    """

    axis: int
    full_shape: torch.Size
    blocks: tuple[int, ...]
    rank: int
    world_size: int
    copies: int = 1

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.world_size // self.copies

    @property
    def copy(self) -> int:
        """Index of this rank among those that hold its part."""
        return self.rank % self.copies

    def share(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """Start and length of a rank's part of a block of `size`; the default is this rank."""
        rank = self.rank if rank is None else rank
        return share_of(size, rank // self.copies, self.parts)

    def slice(self, full: Tensor) -> Tensor:
        """Return this rank's part of the full tensor, as a separate tensor."""
        parts = [
            block.narrow(self.axis, *self.share(size))
            for block, size in zip(
                full.split(list(self.blocks), self.axis), self.blocks, strict=True
            )
        ]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.axis)

    def pad(self, local: Tensor) -> Tensor:
        """Return a tensor of the full shape with this rank's part and zeros."""
        full = local.new_zeros(self.full_shape)
        blocks = full.split(list(self.blocks), self.axis)
        parts = local.split(self.local_blocks(), self.axis)
        for block, size, part in zip(blocks, self.blocks, parts, strict=True):
            block.narrow(self.axis, *self.share(size)).copy_(part)
        return full

    def gather(self, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the full tensor from all parts; every rank of the group must call it."""
        if self.world_size == 1:
            return local
        # The first rank has the longest part, and all_gather needs equal shapes.
        local = lengthened(local, self.axis, sum(self.local_blocks(0)))
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local.contiguous(), group=group)
        split = []
        for rank, part in list(enumerate(parts))[:: self.copies]:
            sizes = self.local_blocks(rank)
            split.append(part.narrow(self.axis, 0, sum(sizes)).split(sizes, self.axis))
        # Block by block: in a packed QKV, all ranks' parts of Q come before those of K.
        return torch.cat([rank[k] for k in range(len(self.blocks)) for rank in split], self.axis)

    def local_blocks(self, rank: int | None = None) -> list[int]:
        """Sizes of a rank's part of each block; the default is this rank."""
        return [self.share(size, rank)[1] for size in self.blocks]

    @property
    def start(self) -> int:
        """Start of this rank's part of the first block."""
        return self.share(self.blocks[0])[0]

    @property
    def is_uneven(self) -> bool:
        """Return True if the ranks' parts differ in size."""
        return any(size % self.parts for size in self.blocks)

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's part."""
        sizes = list(self.full_shape)
        sizes[self.axis] = sum(self.local_blocks())
        return torch.Size(sizes)


@dataclass(frozen=True)
class Cut:
    """Arguments of ``Schedule.shard`` that determine how a tensor is sliced."""

    axis: int
    blocks: int | Sequence[int] = 1
    uneven: bool = False
    parts: int | None = None


def make_spec(shape: torch.Size, cut: Cut, rank: int, world_size: int) -> ShardSpec:
    """Return the spec for a tensor of `shape`."""
    axis = cut.axis
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"axis {axis} does not exist in shape {tuple(shape)}; "
            f"pass one of {list(range(len(shape)))}"
        )
    axis %= len(shape)
    sizes = _block_sizes(shape[axis], cut.blocks)
    copies = 1 if cut.parts is None else _copies(sizes, cut.parts, world_size)
    bad = [size for size in sizes if size % (world_size // copies)]
    if bad and cut.uneven:
        _check_uneven(sizes, world_size)
    elif bad:
        kind = "size" if len(sizes) == 1 else "block size"
        raise ValueError(
            f"{kind} {bad[0]} is not divisible by world_size {world_size}; pick a group whose size "
            "divides it, or pass uneven=True, as for a vocabulary: the last rank gets less"
        )
    return ShardSpec(axis, shape, sizes, rank, world_size, copies)


def _copies(blocks: tuple[int, ...], parts: int, world_size: int) -> int:
    """Number of ranks that hold each part, with at most `parts` parts, such as heads."""
    bad = [size for size in blocks if size % parts]
    if bad:
        raise ValueError(
            f"size {bad[0]} has no {parts} equal parts; pass the actual number of heads"
        )
    if max(parts, world_size) % min(parts, world_size):
        raise ValueError(
            f"{parts} parts cannot be spread evenly over {world_size} ranks; pick a group whose "
            f"size divides {parts}, or is a multiple of it"
        )
    return max(1, world_size // parts)


def _check_uneven(blocks: tuple[int, ...], world_size: int) -> None:
    """Raise unless every rank gets a part, and the same share of each block."""
    if len(set(blocks)) > 1:
        raise ValueError(
            f"blocks of sizes {list(blocks)} cannot be sharded unevenly over {world_size} ranks, "
            "as a rank's shares of them would differ; pick a group whose size divides them"
        )
    if not share_of(blocks[0], world_size - 1, world_size)[1]:
        longest = share_of(blocks[0], 0, world_size)[1]
        raise ValueError(
            f"size {blocks[0]} in parts of {longest} leaves nothing for the last of {world_size} "
            "ranks; pick a smaller group, or keep the tensor whole"
        )


def _block_sizes(size: int, blocks: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(blocks, int):
        if blocks < 1 or size % blocks:
            raise ValueError(
                f"size {size} does not hold {blocks} equal blocks; pass a divisor of it, "
                "or the sizes of the blocks"
            )
        return (size // blocks,) * blocks
    if sum(blocks) != size or min(blocks, default=0) < 1:
        raise ValueError(
            f"block sizes {list(blocks)} do not add up to {size}; pass the size of every block"
        )
    return tuple(blocks)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    # isinstance would import torch.distributed.tensor, which takes a second.
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "device_mesh")
