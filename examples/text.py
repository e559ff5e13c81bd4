"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256
#: Token that stands for a hidden byte, in masked language modeling.
MASK = 256
#: A multiple of 64, so that ranks can share the rows evenly.
VOCABULARY = 320


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first `limit` bytes of the library's top-level modules, in alphabetical order.

    Returns
    -------
    Tensor
        Of shape ``(bytes,)``, integers from 0 to 255.
    """
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:limit]), dtype=torch.uint8).long()


class Batches:
    """Random windows of the text; the same for the same seed.

    Parameters
    ----------
    text
        Tokens, of shape ``(bytes,)``.
    batch, length
        Windows per batch, and their length.
    masked
        Hide 15 % of the tokens and ask for them; else ask for the next token everywhere.
    seed
        Of the choice of windows.
    """

    def __init__(self, text: Tensor, batch: int, length: int, masked: bool, seed: int = 7) -> None:
        self.text, self.batch, self.length, self.masked = text, batch, length, masked
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> dict[str, Tensor]:
        """Arguments for the model: each of shape ``(batch, length)``."""
        last = len(self.text) - self.length
        starts = torch.randint(last, (self.batch,), generator=self.generator)
        tokens = torch.stack([self.text[s : s + self.length] for s in starts.tolist()])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if not self.masked:
            return {**inputs, "labels": tokens}
        hidden = torch.rand(tokens.shape, generator=self.generator).to(tokens.device) < 0.15
        inputs["input_ids"] = tokens.masked_fill(hidden, MASK)
        return {**inputs, "labels": tokens.masked_fill(~hidden, -100)}


class Windows(Dataset[dict[str, Tensor]]):
    """Pieces of the text, one behind the other, as a data set for trainers.

    Parameters
    ----------
    length
        Bytes in each.
    """

    def __init__(self, length: int) -> None:
        self.pieces = standard_library(limit=1_000_000).split(length)[:-1]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample as a model takes it."""
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}
