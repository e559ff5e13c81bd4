"""Export of a model from any layout to a Hugging Face folder, without gathering it."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.agreement import all_ranks_or_none, communication_device, gathered, has_peers
from slapo.errors import SlapoError
from slapo.weights.files import TensorFile, progress_bar, temporary_of
from slapo.weights.folders import ADAPTERS, INDEX, has_adapters, on_disk, skeleton_of
from slapo.weights.holdings import Held, check_origins
from slapo.weights.pieces import Box, Pieced, box_of, index_of, lengths, overlap
from slapo.weights.provenance import Original

_WHAT = "save_pretrained"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
# Maximum number of pending sends; each keeps a copy of its data.
_AT_ONCE = 8


def size_in_bytes(text: str | int) -> int:
    """Convert a size such as ``"5GB"`` (decimal, as in Transformers) to bytes.

    Examples
    --------
    >>> size_in_bytes("5GB"), size_in_bytes("1MiB"), size_in_bytes(300)
    (5000000000, 1048576, 300)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", str(text).upper())
    if found is None:
        raise ValueError(f'max_shard_size is {text!r}; pass bytes, or a string such as "5GB"')
    number, unit, binary = found.groups()
    base = _UNITS[unit] if not binary else 1024 ** "_KMGT".index(unit or "_")
    return int(float(number) * base)


def export(
    original: Original,
    held: Sequence[Held],
    folder: Path,
    max_shard_size: int,
    dtype: torch.dtype | None,
    overwrite: bool,
) -> None:
    """Write the folder: each rank writes some files, and fetches missing parts from the others."""
    all_ranks_or_none(_WHAT, lambda: check_origins(_WHAT, held))
    # Each step below runs in all_ranks_or_none(): a rank that raised alone would leave the others
    # waiting in the next collective.
    exchange = Exchange(held)
    kept = {n: t for n, t in exchange.dtypes.items() if dtype is None or not t.is_floating_point}
    cast = {n: dtype for n in exchange.dtypes if n not in kept and dtype is not None}
    disk = all_ranks_or_none(_WHAT, lambda: on_disk(original, {**kept, **cast}))
    _check_whole(exchange, disk)
    adapters = has_adapters(original, exchange.dtypes)
    if adapters:
        all_ranks_or_none(_WHAT, lambda: _check_trained(held, disk))
    # PEFT reads one file.
    files = {ADAPTERS: list(disk)} if adapters else _shared_out(disk, max_shard_size)
    temporary = temporary_of(folder)
    on_first_rank = exchange.rank == 0
    all_ranks_or_none(
        _WHAT, lambda: _start(folder, temporary, overwrite) if on_first_rank else None
    )
    world = dist.get_world_size() if has_peers() else 1
    owners = {name: number % world for number, name in enumerate(files)}
    mine = [name for name in files if owners[name] == exchange.rank]
    opened: dict[str, TensorFile] = {}
    try:
        all_ranks_or_none(_WHAT, lambda: _create(opened, temporary, mine, files, disk))
        # An error is kept until all ranks have left the exchange, and is raised in _close().
        error = _write(exchange, disk, files, owners, opened)
        all_ranks_or_none(_WHAT, lambda: _close(opened, error))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        for file in opened.values():
            file.__exit__()
    all_ranks_or_none(
        _WHAT,
        lambda: (
            _finish(original, disk, files, temporary, folder, overwrite) if on_first_rank else None
        ),
    )


def _check_whole(exchange: Exchange, disk: Mapping[str, Pieced]) -> None:
    lacking = [n for n, t in disk.items() if any(exchange.lacks(*need) for need in t.needs())]
    if lacking:
        raise SlapoError(
            f"save_pretrained: the ranks do not hold all of {lacking[:5]}; call it on every "
            "rank, with the engine or model returned by slapo.build"
        )


def _check_trained(held: Sequence[Held], disk: Mapping[str, Pieced]) -> None:
    written = {name for tensor in disk.values() for name, _ in tensor.needs()}
    left = [
        str(piece.leaf)
        for item in held
        if item.tensor.requires_grad and item.origin is not None
        for piece in item.origin.pieces
        if piece.leaf not in written
    ]
    if left:
        raise SlapoError(
            f"save_pretrained: {left[:5]} are trained, but not in the adapters, and only "
            "adapters are written; freeze them, or merge_and_unload() first and save the full "
            "model"
        )


def _shared_out(disk: Mapping[str, Pieced], limit: int) -> dict[str, list[str]]:
    """Assign tensors to files of at most `limit` bytes, unless a single tensor is larger."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in disk.items():
        bytes_ = tensor.numel() * tensor.dtype.itemsize
        if parts[-1] and size + bytes_ > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{k:05d}-of-{count:05d}.safetensors": part for k, part in enumerate(parts, 1)}


def _start(folder: Path, temporary: Path, overwrite: bool) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise SlapoError(
            f"save_pretrained: {folder} is not empty; pass a new folder, or overwrite=True"
        )
    if folder.exists() and not folder.is_dir():
        raise SlapoError(f"save_pretrained: {folder} is a file; pass a folder")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _create(
    opened: dict[str, TensorFile],
    temporary: Path,
    mine: Sequence[str],
    files: Mapping[str, Sequence[str]],
    disk: Mapping[str, Pieced],
) -> None:
    for name in mine:
        room = {key: (disk[key].shape, disk[key].dtype) for key in files[name]}
        opened[name] = TensorFile.create(temporary / name, room)


def _write(
    exchange: Exchange,
    disk: Mapping[str, Pieced],
    files: Mapping[str, Sequence[str]],
    owners: Mapping[str, int],
    opened: Mapping[str, TensorFile],
) -> Exception | None:
    """Write the values; continue after an error, as other ranks wait for their data."""
    error: Exception | None = None
    bar = progress_bar(_WHAT, sum(t.numel() * t.dtype.itemsize for t in disk.values()))
    # One tensor of each file in turn, so that all owners have work.
    for row in zip_longest(*([(name, key) for key in keys] for name, keys in files.items())):
        for name, key in filter(None, row):
            tensor, owner = disk[key], owners[name]
            values: dict[tuple[str, Box], Any] = {
                need: exchange.fetch(*need, owner, exchange.dtypes[need[0]])
                for need in tensor.needs()
            }
            if owner == exchange.rank and error is None:
                try:
                    whole = tensor.read(partial(_given, values))
                    opened[name].write(key, box_of(whole.shape), whole)
                except Exception as raised:
                    error = raised
            bar.update(tensor.numel() * tensor.dtype.itemsize)
    exchange.finish()
    bar.close()
    return error


def _given(values: Mapping[tuple[str, Box], Tensor], name: str, box: Box) -> Tensor:
    return values[name, box]


def _close(opened: Mapping[str, TensorFile], error: Exception | None) -> None:
    if error is not None:
        raise error
    for file in opened.values():
        file.sync()


def _finish(
    original: Original,
    disk: Mapping[str, Pieced],
    files: Mapping[str, Sequence[str]],
    temporary: Path,
    folder: Path,
    overwrite: bool,
) -> None:
    """Write configs and the index, then give the complete folder its name."""
    if ADAPTERS in files:
        _write_config_of_adapters(original, temporary)
    elif original.is_of_transformers:
        _write_configs(original, disk, temporary)
    if len(files) > 1:
        total = sum(t.numel() * t.dtype.itemsize for t in disk.values())
        metadata = {"total_parameters": _parameters(original), "total_size": total}
        where = {key: name for name, keys in files.items() for key in keys}
        text = json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True)
        (temporary / INDEX).write_text(text + "\n")
    if overwrite and folder.is_dir():
        _replace(temporary, folder, full=ADAPTERS not in files)
        return
    if folder.is_dir():
        folder.rmdir()  # raises if files came in the meantime
    os.rename(temporary, folder)


def _replace(temporary: Path, folder: Path, full: bool) -> None:
    """Replace the weights and configs of a folder; its other files stay, such as a tokenizer's."""
    # Weights in other files than the new ones would be read too. Adapters leave the base model's.
    for pattern in ("adapter_*", *(("*model*.safetensors*", "*model*.bin*") if full else ())):
        for path in folder.glob(pattern):
            path.unlink()
    for path in temporary.iterdir():
        os.replace(path, folder / path.name)
    temporary.rmdir()


def _write_configs(original: Original, disk: Mapping[str, Pieced], folder: Path) -> None:
    config = copy.deepcopy(original.config)
    # The model may be an instance of a class of this library, which from_pretrained() does not
    # know.
    config.architectures = [original.cls.__name__]
    config.dtype = next((t.dtype for t in disk.values() if t.dtype.is_floating_point), None)
    config.save_pretrained(folder)
    if original.generation_config is not None:
        original.generation_config.save_pretrained(folder)


def _write_config_of_adapters(original: Original, folder: Path) -> None:
    ((_, config),) = copy.deepcopy(original.adapters or {}).items()
    config.inference_mode = True  # as PEFT writes it
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(original.config, "name_or_path", None)
    config.save_pretrained(folder)


def _parameters(original: Original) -> int:
    model = skeleton_of(original) if original.is_of_transformers else None
    # Tied parameters count once in Transformers' index, and a skeleton has these ties.
    if model is None:
        return sum(shape.numel() for shape, _ in original.tensors.values())
    return sum(p.numel() for p in model.parameters())


# --- boxes of other ranks ------------------------------------------------------------------------
class Exchange:
    """Exchange that all ranks create and use in the same order; only box lists are gathered."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._mine: dict[tuple[str, Box], Tensor] = {}
        self._buffers = set[str]()
        for item in held:
            for piece, values in item.pieces():
                # Replicas of a parameter have equal values, so any of them will do.
                self._mine.setdefault((str(piece.leaf), piece.source), values)
                if item.is_buffer:
                    self._buffers.add(str(piece.leaf))
        offered = [(name, box, values.dtype) for (name, box), values in self._mine.items()]
        self.rank = dist.get_rank() if has_peers() else 0
        self._device = communication_device(None) if has_peers() else None
        #: name -> box -> ranks that have it
        self._holders: dict[str, dict[Box, list[int]]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for rank, (boxes, buffers) in enumerate(gathered((offered, self._buffers), None)):
            self._buffers |= buffers
            for name, box, dtype in boxes:
                self._holders.setdefault(name, {}).setdefault(box, []).append(rank)
                self.dtypes.setdefault(name, dtype)
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    def lacks(self, name: str, box: Box) -> bool:
        """Return whether a part of a box is on no rank, or in two overlapping boxes."""
        parts = (overlap(part, box) for part in self._holders.get(name, {}))
        # Equal boxes are one entry. Disjoint ones add up to a covered box; overlapping ones add up
        # to more, and their box is refused.
        have = sum(torch.Size(lengths(part)).numel() for part in parts if part is not None)
        return have != torch.Size(lengths(box)).numel()

    def fetch(self, name: str, box: Box, owner: int, dtype: torch.dtype) -> Tensor | None:
        """Return the values of a box on the CPU of rank `owner`; None on other ranks."""
        values = torch.empty(lengths(box), dtype=dtype) if self.rank == owner else None
        for part, ranks in self._holders[name].items():
            shared = overlap(part, box)
            if shared is None:
                continue
            # All ranks walk the same needs in the same order. So both ends of the earliest
            # unfinished transfer are always at it, and blocking receives cannot wait in a cycle.
            any_rank = owner in ranks and name not in self._buffers
            sender = owner if any_rank else ranks[0]
            here = None
            if self.rank == sender:
                here = self._mine[name, part][index_of(shared, part)].to(dtype)
            if sender != owner:
                here = self._sent(here, lengths(shared), dtype, sender, owner)
            if values is not None and here is not None:
                values[index_of(shared, box)] = here.cpu()
        return values

    def finish(self) -> None:
        """Wait until everything is received."""
        while self._pending:
            self._wait()

    def _sent(
        self, values: Tensor | None, shape: list[int], dtype: torch.dtype, sender: int, owner: int
    ) -> Tensor | None:
        # As bytes, since gloo does not send bfloat16.
        if values is not None:
            carried = values.to(self._device).contiguous().view(-1).view(torch.uint8)
            # isend() reads the buffer until wait(), so the pair keeps it alive.
            self._pending.append((dist.isend(carried, owner), carried))
            if len(self._pending) > _AT_ONCE:
                self._wait()
        elif self.rank == owner:
            size = torch.Size(shape).numel() * dtype.itemsize
            carried = torch.empty(size, dtype=torch.uint8, device=self._device)
            dist.recv(carried, sender)
            return carried.view(dtype).view(shape)
        return None

    def _wait(self) -> None:
        work, _ = self._pending.pop(0)
        if work is not None:
            work.wait()
