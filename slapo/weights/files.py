"""Safetensors files by boxes: only the bytes of a box are read or written.

Format: eight bytes with the length of the header, the header in JSON (name -> dtype, shape, offsets
of the values), and the values.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.errors import SlapoError
from slapo.weights.pieces import Box, lengths

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
# For runs of at most _SHORT bytes a system call takes longer than reading the bytes between runs,
# if rows are at most _CLOSE times as long. _BLOCK bytes are read at once.
_SHORT, _CLOSE, _BLOCK = 2**15, 16, 2**22

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to errors of calls on an open file."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def temporary_of(folder: Path) -> Path:
    """Return the folder to write to until it is complete."""
    return folder.with_name(f"{folder.name}.tmp")


def progress_bar(what: str, total: int | None = None, unit: str = "B") -> Any:
    """Return a progress bar on the first rank, shown after one second."""
    hub: Any = importlib.import_module("torch.hub")
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    # The hub's stand-in for a missing tqdm has no delay and prints each update.
    disable = not is_first or hub.tqdm.__module__ == hub.__name__
    return hub.tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", delay=1.0, disable=disable
    )


class TensorFile:
    """An open safetensors file, also a context manager; raises SlapoError if cut off or damaged."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path, self.bytes_read = path, 0
        self._fd = os.open(path, os.O_RDONLY) if fd is None else fd
        # Closed with the object, for callers that keep it while they read.
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._entries, self._start = self._read_header()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @classmethod
    def create(
        cls, path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> TensorFile:
        """Create a file with room for `tensors`, whose values are written later in any order."""
        for name, (_, dtype) in tensors.items():
            if dtype not in _NAMES:
                raise SlapoError(
                    f"{name!r} is {dtype}, which safetensors files cannot hold; pass a model of "
                    "another dtype, such as complex64"
                )
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        # The order of safetensors' own writer keeps values aligned.
        order = sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
        for name, (shape, dtype) in order:
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # The format allows trailing blanks in the header; values then start at a multiple of eight
        # bytes.
        text += b" " * (-len(text) % 8)
        # O_EXCL: two jobs that write to one folder must not mix their values.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with _naming(path):
                # A full disk raises here, before any work; macOS cannot reserve space.
                reserve = getattr(os, "posix_fallocate", lambda fd, _, size: os.ftruncate(fd, size))
                reserve(fd, 0, 8 + len(text) + at)
                os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        found = _DTYPES.get(self._entries[name]["dtype"])
        if found is None:
            raise SlapoError(
                f"{self.path}: {name!r} has dtype {self._entries[name]['dtype']}, which this "
                "version cannot read"
            )
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values in a box."""
        values = torch.empty(lengths(box), dtype=self.dtype(name))
        if not self._read_rows(name, box, values):
            self._move(name, box, values, os.preadv)
        self.bytes_read += values.nbytes
        return values

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Write values to a box."""
        self._move(name, box, values.to(self.dtype(name)).contiguous(), os.pwritev)

    def sync(self) -> None:
        """Flush the file to disk."""
        with _naming(self.path):
            os.fsync(self._fd)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > size - 8:
            raise SlapoError(f"{self.path} has {size} bytes and is not a complete safetensors file")
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            sizes = [math.prod(entry["shape"]) for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SlapoError(f"{self.path}: the header is damaged ({error})") from error
        promised = 8 + length + max(ends, default=0)
        # An interrupted download leaves a shorter file with an intact header.
        if promised != size or not all(n >= 0 for n in sizes):
            raise SlapoError(
                f"{self.path} has {size} bytes, but its header says {promised}; the file is "
                "truncated or damaged: copy it again"
            )
        return header, 8 + length

    def _read_rows(self, name: str, box: Box, values: Tensor) -> bool:
        """Read some columns of a matrix with short runs close together; return False for others.

        Blocks of rows are read including the bytes between runs, instead of one system call per
        run.
        """
        shape, item = self.shape(name), values.element_size()
        if len(shape) != 2 or not values.numel():
            return False
        (top, bottom), (left, right) = box
        run, row = (right - left) * item, shape[1] * item
        if run > _SHORT or row > _CLOSE * run or run == row:
            return False
        first = self._start + int(self._entries[name]["data_offsets"][0]) + left * item
        target = values.view(-1).view(torch.uint8).view(-1, run)
        at_once = max(1, _BLOCK // row)
        scratch = torch.empty(min(at_once, bottom - top) * row, dtype=torch.uint8)
        for start in range(top, bottom, at_once):
            count = min(at_once, bottom - start)
            # The last row ends with its run, so that nothing behind the tensor is read.
            size = (count - 1) * row + run
            self._transfer(name, scratch[:size], first + start * row, os.preadv)
            target[start - top :][:count] = scratch.as_strided((count, run), (row, 1))
        return True

    def _move(self, name: str, box: Box, values: Tensor, move: Callable[..., int]) -> None:
        """Transfer the contiguous byte runs of a box."""
        if not values.numel():
            return
        shape, item = self.shape(name), values.element_size()
        # Axes from here on are full, so one run covers all of them.
        axis = len(shape)
        while axis and box[axis - 1] == (0, shape[axis - 1]):
            axis -= 1
        strides = [math.prod(shape[k + 1 :]) * item for k in range(len(shape))]
        outer = box[: max(axis - 1, 0)]
        first = self._start + int(self._entries[name]["data_offsets"][0])
        # One run covers the full axes and the range of the axis before them; `outer` enumerates
        # runs.
        length = values.nbytes // math.prod(lengths(outer))
        if axis:
            first += box[axis - 1][0] * strides[axis - 1]
        flat = values.view(-1).view(torch.uint8)
        for number, index in enumerate(product(*(range(*bounds) for bounds in outer))):
            at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            self._transfer(name, flat[number * length :][:length], at, move)

    def _transfer(self, name: str, flat: Tensor, at: int, move: Callable[..., int]) -> None:
        # A system call may transfer less than requested, at most 2 GiB on Linux.
        run = memoryview(flat.numpy())  # type: ignore[arg-type]
        while run:
            with _naming(self.path):
                moved = move(self._fd, [run], at)
            if moved <= 0:
                raise SlapoError(f"{self.path} ends within {name!r}; copy the file again")
            run, at = run[moved:], at + moved
