"""Folders of a run: one for each saved step, either complete or absent.

``run/step_00000100/checkpoint.json``
    Written last: the description of the step, and for each tensor its boxes: offset, sizes, the
    rank whose file holds the box, and a checksum.
``run/step_00000100/rank_00000.safetensors``
    Boxes by ``slot:name@offset``, and state of this rank only.
``run/step_00000200.tmp/``
    Being written, or left by a job that was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo.errors import SlapoError
from slapo.saving.nests import decode
from slapo.saving.plan import Key
from slapo.weights.files import TensorFile, temporary_of
from slapo.weights.folders import MANIFEST
from slapo.weights.pieces import Box, box_of, index_of, lengths, overlap

FORMAT = 1

_STEP = re.compile(r"step_(\d{8,})")


def folder_of(run: Path, step: int) -> Path:
    """Folder of a step of a run."""
    return run / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None if it has none."""
    found = _STEP.fullmatch(folder.name)
    return None if found is None else int(found[1])


def checkpoints(run: str | os.PathLike[str]) -> list[Path]:
    """Return the complete steps that ``engine.save`` has written to a folder.

    Parameters
    ----------
    run
        The folder that was passed to ``engine.save``; it need not exist yet.

    Returns
    -------
    list of Path
        Oldest first; unfinished steps are left out.

    Examples
    --------
    >>> checkpoints("a_run_that_has_not_begun")
    []
    """
    run = Path(run)
    found = [p for p in (run.iterdir() if run.is_dir() else ()) if step_of(p) is not None]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=lambda p: step_of(p) or 0)


@dataclass
class Saved:
    """A tensor in a checkpoint."""

    shape: list[int]
    dtype: str
    #: offset, sizes, rank, checksum
    boxes: list[list[Any]] = field(default_factory=list)

    def places(self) -> Iterator[tuple[Box, int, int]]:
        """Yield each box with its rank and checksum."""
        for offset, sizes, rank, checksum in self.boxes:
            yield tuple((a, a + n) for a, n in zip(offset, sizes, strict=True)), rank, checksum


@dataclass
class Manifest:
    """Contents of ``checkpoint.json``."""

    step: int
    samples: int
    #: coordinates along pp, dp and tp of each rank
    places: list[list[int]]
    engine: str
    versions: dict[str, str]
    #: class, config and the lines of the schedule
    model: dict[str, Any]
    optimizer: str | None
    #: hyperparameters, and the original names that they apply to
    groups: list[dict[str, Any]]
    #: slot -> dtype and values by original names, for state that is one number per tensor
    numbers: dict[str, dict[str, Any]]
    scheduler: Any
    loss_scale: list[Any] | None
    seed: int
    #: true if the state of the data iterator was saved
    has_data: bool
    #: slots that do not have the shape of their tensors
    odd: list[str]
    #: rank -> checksums of the entries of its file that are not boxes
    own: dict[str, dict[str, int]]
    #: slot -> name -> tensor
    tensors: dict[str, dict[str, Saved]]
    format: int = FORMAT

    @property
    def layout(self) -> str:
        """Ranks along each dimension."""
        sizes = (len({place[axis] for place in self.places}) for axis in range(3))
        return ", ".join(f"{d}={n}" for d, n in zip(("pp", "dp", "tp"), sizes, strict=True))

    def write(self, folder: Path) -> None:
        """Write it, and flush it to disk."""
        with open(folder / MANIFEST, "w") as file:
            json.dump(self, file, default=vars)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a step."""
        path = folder / MANIFEST
        try:
            given = json.loads(path.read_text())
            if given["format"] != FORMAT:
                raise SlapoError(
                    f"{path} has format {given['format']}, but this slapo reads format {FORMAT}; "
                    "install the one that wrote it: "
                    f"{given.get('versions', {}).get('slapo', 'a newer one')}"
                )
            known = {f.name: given[f.name] for f in fields(cls)}
            known["tensors"] = {
                slot: {name: Saved(**each) for name, each in named.items()}
                for slot, named in known["tensors"].items()
            }
        except FileNotFoundError:
            raise SlapoError(
                f"{folder} has no {MANIFEST}: engine.save has not completed it"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SlapoError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        return cls(**known)


def key_in_file(key: Key, box: Box) -> str:
    """Name of a box in the file of a rank."""
    return f"{key[0]}:{key[1]}@{','.join(str(start) for start, _ in box)}"


def file_of(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank_{rank:05d}.safetensors"


def checksum(values: Tensor) -> int:
    """CRC-32 of the bytes of a tensor."""
    flat: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy())


class Step:
    """A complete step opened for reading; reads are local to a rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._files: dict[int, TensorFile] = {}

    def read(self, key: Key, box: Box) -> Tensor:
        """Assemble the values of a box from the saved boxes."""
        saved, values = self.manifest.tensors[key[0]][key[1]], None
        for there, rank, _ in saved.places():
            shared = there if there == box else overlap(there, box)
            if shared is None:
                continue
            starts = [start for start, _ in there]
            inner = tuple((a - at, b - at) for (a, b), at in zip(shared, starts, strict=True))
            found = self._file(rank).read(key_in_file(key, there), inner)
            if shared == box:
                return found
            if values is None:
                values = torch.empty(lengths(box), dtype=found.dtype)
            values[index_of(shared, box)] = found
        assert values is not None, "the plan has each element once"
        return values

    def own(self, rank: int) -> Any:
        """Return the state that belongs to one rank only."""
        names = self.manifest.own[str(rank)]
        tensors = [self._whole(rank, f"own.{k}") for k in range(len(names) - 1)]
        text: Any = self._whole(rank, "own").numpy()
        return decode(json.loads(text.tobytes()), tensors)

    def checked(self, rank: int) -> int:
        """Compare all checksums of a rank's file; return its size in bytes."""
        size, file = 0, self._file(rank)
        present = set(file.names())
        for name, expected in self._checksums[rank].items():
            if name not in present:
                raise SlapoError(f"{file.path} lacks {name!r}; the checkpoint is damaged")
            found = self._whole(rank, name)
            size += found.nbytes
            if checksum(found) != expected:
                raise SlapoError(
                    f"{file.path}: {name!r} is damaged (its checksum differs); use an earlier step"
                )
        return size

    @cached_property
    def _checksums(self) -> list[dict[str, int]]:
        """For each rank: name in its file -> checksum."""
        found = [dict(self.manifest.own.get(str(rank), {})) for rank in range(self.world)]
        for slot, named in self.manifest.tensors.items():
            for name, saved in named.items():
                for box, rank, expected in saved.places():
                    found[rank][key_in_file((slot, name), box)] = expected
        return found

    @property
    def world(self) -> int:
        """Number of ranks that saved the step."""
        return len(self.manifest.places)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.__exit__()

    def _whole(self, rank: int, name: str) -> Tensor:
        file = self._file(rank)
        return file.read(name, box_of(file.shape(name)))

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            path = self.folder / file_of(rank)
            if not path.is_file():
                raise SlapoError(
                    f"{self.folder} lacks {path.name}, which rank {rank} wrote; restore it, or "
                    "delete the folder to resume from the step before"
                )
            self._files[rank] = TensorFile(path)
        return self._files[rank]


def find(run_or_step: Path) -> Path:
    """Return the step: a folder of one, or the last one of a run."""
    if (run_or_step / MANIFEST).is_file() or step_of(run_or_step) is not None:
        return run_or_step
    found = checkpoints(run_or_step)
    if not found:
        there = sorted(p.name for p in run_or_step.iterdir()) if run_or_step.is_dir() else None
        what = "does not exist" if there is None else f"holds {there[:5] or 'nothing'}"
        raise SlapoError(
            f"{run_or_step} has no complete step of engine.save: it {what}; pass the folder that "
            "was passed to save, or a step in it"
        )
    return found[-1]


def keep_last(run: Path, count: int) -> None:
    """Remove all steps but the last `count`."""
    for folder in checkpoints(run)[:-count]:
        # Renamed first, so that a half-deleted step is not taken for a complete one.
        temporary = temporary_of(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        folder.rename(temporary)
        shutil.rmtree(temporary)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system supports it."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
