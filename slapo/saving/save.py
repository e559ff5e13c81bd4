"""Saving a training step: each rank writes a part of the state."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from slapo.agreement import all_ranks_or_none, gathered, has_peers, same_on_all_ranks
from slapo.errors import SlapoError
from slapo.logger import get_logger
from slapo.random import all_states
from slapo.saving.nests import encode
from slapo.saving.plan import Key, Offer, share_out
from slapo.saving.state import Mine, Trainer, collect, merged_groups, merged_numbers, original
from slapo.saving.steps import (
    Manifest,
    Saved,
    checksum,
    file_of,
    folder_of,
    keep_last,
    key_in_file,
    sync_folder,
)
from slapo.weights.files import TensorFile, progress_bar, temporary_of
from slapo.weights.holdings import check_origins
from slapo.weights.pieces import Box, box_of, index_of, lengths

logger = get_logger("slapo")

_WHAT = "engine.save"


class Saving:
    """A step that is saved, or being saved.

    Attributes
    ----------
    step : int
    path : Path
        Path of the step once it is complete.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self._write: Future[None] | None = None
        #: copied tensors, whose memory the next save of this engine reuses
        self.copies: dict[Any, Tensor] = {}

    def done(self) -> bool:
        """Return whether the save is complete or has failed."""
        return self._write is None or self._write.done()

    def result(self) -> Path:
        """Wait until the step is complete.

        Returns
        -------
        Path
            Path of the step.

        Raises
        ------
        SlapoError, OSError
            If it could not be saved.
        """
        if self._write is not None:
            self._write.result()
        return self.path

    def _start(self, write: Callable[[], None]) -> None:
        thread = ThreadPoolExecutor(1, "slapo-save")
        self._write = thread.submit(write)
        thread.shutdown(wait=False)  # it ends after this write


def save(
    engine: Trainer, run: Any, data: Any, keep: int | None, wait: bool, previous: Saving | None
) -> Saving:
    """See :meth:`slapo.framework_dialect.Engine.save`."""
    began = time.monotonic()
    run = Path(run).absolute()
    folder = folder_of(run, engine.step_count)
    alike = {"run": str(run), "step": engine.step_count, "keep": keep, "wait": wait}
    # Checks, copies of state and the plan come first, each agreed upon by all ranks. Only then is a
    # folder created.
    same_on_all_ranks(_WHAT, {**alike, "data": data is not None})
    all_ranks_or_none(_WHAT, lambda: _check(engine, data, keep))
    mine, own = all_ranks_or_none(_WHAT, lambda: (collect(engine), _own_state(engine, data)))
    # Here, not in the thread: creating a group is a collective of the world.
    group = None if wait or not has_peers() else engine.saving_group()
    rank = dist.get_rank() if has_peers() else 0
    place = [engine.mesh.get_local_rank(dim) for dim in ("pp", "dp", "tp")]
    odd, samples = list(mine.odd), engine.samples
    here = _Report(
        mine.offer(), mine.numbers, mine.groups, odd, mine.optimizer, samples, place, mine.buffers
    )
    everyone: list[_Report] = gathered(here, None)
    manifest = all_ranks_or_none(_WHAT, lambda: _describe(engine, everyone, data is not None))
    shapes = {name: tuple(shape) for name, (shape, _) in original(engine).tensors.items()}
    offers = [report.tensors for report in everyone]
    buffers = {name for report in everyone for name in report.buffers}
    shares = all_ranks_or_none(_WHAT, lambda: share_out(offers, shapes, buffers))
    own["odd"] = mine.odd
    tensors: list[Tensor] = []
    text = all_ranks_or_none(_WHAT, lambda: json.dumps(encode(own, tensors, "state")).encode())
    state = {f"own.{k}": tensor for k, tensor in enumerate(tensors)}
    # As a tensor, since a safetensors file has no other contents. bytearray is writable, as torch
    # wants it.
    state["own"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    job = _Job(rank, folder, manifest, _values(mine, shares[rank]), state, keep, group)
    all_ranks_or_none(_WHAT, lambda: _start(folder) if rank == 0 else None)
    saving = Saving(engine.step_count, folder)
    if wait:
        job.write()
        logger.info("saved %s in %.1f s", folder, time.monotonic() - began)
    else:
        room = {} if previous is None else previous.copies
        saving.copies = all_ranks_or_none(_WHAT, lambda: job.copy(room))
        saving._start(job.write)
    return saving


def _check(engine: Trainer, data: Any, keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(
            f"keep is {keep!r}; pass the number of last steps to keep, or None for all"
        )
    if data is not None and not callable(getattr(data, "state_dict", None)):
        raise TypeError(
            f"data is a {type(data).__name__} without state_dict(); pass the iterable of "
            "batches, such as torchdata's StatefulDataLoader, or leave it out"
        )
    scheduler = engine.scheduler
    if scheduler is not None and not callable(getattr(scheduler, "state_dict", None)):
        raise TypeError(
            f"lr_scheduler is a {type(scheduler).__name__} without state_dict(), so runs cannot "
            "resume; give it one, and load_state_dict()"
        )
    check_origins(_WHAT, engine.held())


@dataclass
class _Report:
    """A rank's description of its state, for the other ranks."""

    tensors: dict[Key, Offer]
    numbers: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    odd: list[str]
    optimizer: str | None
    samples: int
    place: list[int]
    buffers: set[str]


def _own_state(engine: Trainer, data: Any) -> dict[str, Any]:
    return {"random": all_states(), "data": None if data is None else data.state_dict()}


def _describe(engine: Trainer, everyone: Sequence[_Report], has_data: bool) -> Manifest:
    """Return the manifest without the boxes."""
    given, tensors = original(engine), dict[str, dict[str, Saved]]()
    dtypes = {key: dtype for report in everyone for key, (dtype, _) in report.tensors.items()}
    for report in everyone:
        wrong = [key for key, (dtype, _) in report.tensors.items() if dtype != dtypes[key]]
        if wrong:
            raise SlapoError(f"{_WHAT}: {wrong[0][1]!r} has different dtypes on the ranks")
    for (slot, name), dtype in dtypes.items():
        saved = Saved(list(given.tensors[name][0]), str(dtype).removeprefix("torch."))
        tensors.setdefault(slot, {})[name] = saved
    scheduler = None if engine.scheduler is None else _plain(engine.scheduler.state_dict())
    return Manifest(
        step=engine.step_count,
        # One rank of each replica: the first along pp and tp.
        samples=sum(report.samples for report in everyone if report.place[::2] == [0, 0]),
        places=[report.place for report in everyone],
        engine=engine.kind,
        versions={"slapo": sys.modules["slapo"].__version__, "torch": torch.__version__},
        model=described(engine),
        optimizer=next(filter(None, (report.optimizer for report in everyone)), None),
        groups=merged_groups([group for report in everyone for group in report.groups]),
        numbers=merged_numbers([report.numbers for report in everyone]),
        scheduler=scheduler,
        loss_scale=None if engine.loss_scale is None else list(engine.loss_scale),
        seed=torch.initial_seed(),
        has_data=has_data,
        odd=sorted({slot for report in everyone for slot in report.odd}),
        own={},
        tensors=tensors,
    )


def described(engine: Trainer) -> dict[str, Any]:
    """Return the model and its schedule, for comparison and display."""
    given = original(engine)
    config = given.config
    return {
        "class": given.cls.__qualname__,
        "config": None if config is None else json.loads(config.to_json_string(use_diff=False)),
        "schedule": [record.call() for record in engine.lowering.history],
    }


def _plain(state: Any) -> Any:
    """Encode a scheduler's state without its functions, which the resuming job has."""
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if not callable(value)}
    # Learning rates may be tensors.
    plain = pytree.tree_map_only(Tensor, Tensor.tolist, state)
    return encode(plain, [], "lr_scheduler.state_dict()")


def _values(mine: Mine, share: Mapping[Key, Sequence[Any]]) -> dict[tuple[Key, Box], Tensor]:
    """Views of the tensors that this rank writes."""
    return {
        (key, part): mine.values[key, box][index_of(part, box)]
        for key, parts in share.items()
        for part, box in parts
    }


def _start(folder: Path) -> None:
    if folder.exists():
        raise SlapoError(
            f"{_WHAT}: {folder} already exists, and steps are never overwritten; pass another "
            "run, or load that step"
        )
    temporary = temporary_of(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


@dataclass
class _Job:
    """The write that remains after planning; after `copy` it does not access the engine."""

    rank: int
    folder: Path
    manifest: Manifest
    values: dict[tuple[Key, Box], Tensor]
    own: dict[str, Tensor]
    keep: int | None
    group: dist.ProcessGroup | None

    def copy(self, room: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy the values, so that training can continue; reuses the memory in `room` if it fits.

        Most of the time of a copy is spent on newly allocated memory.
        """
        for key, value in self.values.items():
            copy = room.get(key)
            if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
                copy = torch.empty_like(value, device="cpu")
            self.values[key] = copy.copy_(value)
        self.own = {name: value.to("cpu", copy=True) for name, value in self.own.items()}
        return self.values

    def write(self) -> None:
        """Write the file of this rank; rank 0 completes the step. A collective."""
        temporary = temporary_of(self.folder)
        try:
            sums = self._agreed(lambda: self._write_file(temporary))
            everyone = gathered(sums, self.group)
            self._agreed(lambda: self._complete(temporary, everyone) if self.rank == 0 else None)
        except Exception:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _agreed(self, act: Any) -> Any:
        return all_ranks_or_none(_WHAT, act, self.group)

    def _write_file(self, temporary: Path) -> tuple[list[Any], dict[str, int]]:
        named = {key_in_file(key, box): (key, box) for key, box in self.values}
        tensors = {**{name: self.values[place] for name, place in named.items()}, **self.own}
        room = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        boxes, own = [], {}
        bar = progress_bar(_WHAT, sum(value.nbytes for value in self.values.values()))
        with TensorFile.create(temporary / file_of(self.rank), room) as file:
            for name, (key, box) in named.items():
                value = self.values[key, box].cpu().contiguous()
                file.write(name, box_of(value.shape), value)
                bar.update(value.nbytes)
                boxes.append((key, box, checksum(value)))
            for name, value in self.own.items():
                file.write(name, box_of(value.shape), value.cpu())
                own[name] = checksum(value)
            file.sync()
        bar.close()
        return boxes, own

    def _complete(self, temporary: Path, everyone: Sequence[Any]) -> None:
        for rank, (boxes, own) in enumerate(everyone):
            self.manifest.own[str(rank)] = own
            for (slot, name), box, value in boxes:
                place = [[start for start, _ in box], lengths(box), rank, value]
                self.manifest.tensors[slot][name].boxes.append(place)
        # A folder under its final name is complete: files and manifest are on disk before the
        # rename, which is atomic.
        self.manifest.write(temporary)
        sync_folder(temporary)
        os.rename(temporary, self.folder)
        sync_folder(self.folder.parent)
        if self.keep is not None:
            keep_last(self.folder.parent, self.keep)
