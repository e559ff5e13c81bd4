"""Description of a run, a saved step or a Hugging Face folder, as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from slapo.errors import SlapoError
from slapo.saving.steps import Manifest, Saved, Step, checkpoints, step_of
from slapo.weights.folders import MANIFEST, Folder

_SHOWN = 8


def inspect(path: Path, verify: bool = False) -> Iterator[str]:
    """Yield lines about a folder; with `verify`, also one about the checksums of each step."""
    if (path / MANIFEST).is_file() or step_of(path) is not None:
        yield from _step(path)
        if verify:
            yield _verified(path)
        return
    steps = checkpoints(path)
    if not steps:
        yield from _folder(path)
        return
    yield f"{path}: a run with {len(steps)} complete steps"
    for step in steps:
        yield f"  {step.name}  {_size(sum(p.stat().st_size for p in step.iterdir()))}"
        if verify:
            yield f"    {_verified(step)}"
    torn = sorted(p.name for p in path.glob("step_*.tmp"))
    if torn:
        yield f"  in progress or interrupted: {', '.join(torn)}"
    yield ""
    yield from _step(steps[-1])


def _step(path: Path) -> Iterator[str]:
    manifest = Manifest.read(path)
    model = manifest.model
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"{path}: step {manifest.step}, after {manifest.samples} samples"
    yield f"  model      {model['class']}{_kind(model['config'])}"
    yield f"  layout     {manifest.layout} on {manifest.engine}; {versions}"
    yield f"  optimizer  {manifest.optimizer or 'none'}{_options(manifest)}"
    for slot, named in manifest.tensors.items():
        yield f"  {slot or 'values':9}  {_tensors(named)}"
    for slot, kept in manifest.numbers.items():
        found = sorted(set(kept["values"].values()))
        yield f"  {slot:9}  {', '.join(f'{value:g}' for value in found[:_SHOWN])}"
    besides = [name for name in ("scheduler", "loss_scale") if getattr(manifest, name) is not None]
    besides += ["random states", *["data"] * manifest.has_data]
    yield f"  also       {', '.join(besides).replace('_', ' ')}"
    lines = model["schedule"]
    yield f"  schedule   {len(lines)} primitives"
    yield from (f"             {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"             and {len(lines) - _SHOWN} more"


def _folder(path: Path) -> Iterator[str]:
    with Folder(path) as folder:
        leaves, config = folder.leaves(), folder.config()
    classes = ", ".join(config.get("architectures") or []) or "no config.json"
    yield f"{path}: a Hugging Face folder: {classes}{_kind(config)}"
    named = {
        name: Saved(list(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for name, leaf in leaves.items()
    }
    yield f"  values     {_tensors(named)}"
    quantized = config.get("quantization_config")
    if quantized:
        yield f"  quantized  {json.dumps(quantized)[:200]}"


def _verified(path: Path) -> str:
    step = Step(path)
    try:
        size = sum(step.checked(rank) for rank in range(step.world))
    finally:
        step.close()
    return f"all checksums match ({_size(size)})"


def _kind(config: Any) -> str:
    return f" ({config['model_type']})" if config and config.get("model_type") else ""


def _options(manifest: Manifest) -> str:
    rates = [group["options"].get("lr") for group in manifest.groups]
    shown = ", ".join(f"{rate:g}" for rate in rates if isinstance(rate, (int, float)))
    return f", learning rate {shown}" if shown else ""


def _tensors(named: dict[str, Saved]) -> str:
    count = sum(prod(saved.shape) for saved in named.values())
    dtypes = Counter(saved.dtype for saved in named.values())
    size = sum(prod(s.shape) * _itemsize(s.dtype) for s in named.values())
    kinds = ", ".join(dtype for dtype, _ in dtypes.most_common())
    return f"{len(named)} tensors, {count:,} elements, {kinds}, {_size(size)}"


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise SlapoError(f"{dtype!r} is not a dtype of this torch")
    return found.itemsize


def _size(number: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    unit = units.pop()
    while number >= 1000 and units:
        number, unit = number / 1000, units.pop()
    return f"{number:.3g} {unit}"
