"""Random states and attributes of modules are the same after a trace as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from slapo.random import tracker_kept


@contextmanager
def generators_kept() -> Iterator[None]:
    """After the block the process draws the numbers that it would have drawn without."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    generators = [torch._C.default_generator, *cuda]
    states = [(generator, generator.get_state()) for generator in generators]
    python = random.getstate()
    starts_cuda = torch.cuda.is_available() and not torch.cuda.is_initialized()
    try:
        # Dynamo saves the state of CUDA too; a process that has started CUDA cannot fork.
        with (
            mock.patch.object(torch.cuda, "get_rng_state", _no_state)
            if starts_cuda
            else contextlib.nullcontext(),
            tracker_kept(),
        ):
            yield
    finally:
        random.setstate(python)
        for generator, state in states:
            generator.set_state(state)


def _no_state(device: Any = "cuda") -> None:
    return None


@contextmanager
def attributes_kept(root: nn.Module) -> Iterator[list[tuple[Any, str]]]:
    """After the block the modules under `root` have the attributes that they had before.

    A forward may store things on its module, and on its config; a run on fake tensors would leave
    fake tensors there.
    """
    owners = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
    configs = (vars(m).get("config") for m in owners)
    objects = {id(o): o for o in (*owners, *configs) if hasattr(o, "__dict__")}.values()
    before = [(o, vars(o), dict(vars(o))) for o in objects]
    tables = [
        (o, name, table, table.copy())
        for o, _, state in before
        for name, table in state.items()
        if isinstance(table, (dict, list, set))
    ]
    changed: list[tuple[Any, str]] = []
    try:
        yield changed
    finally:
        for owner, state, was in before:
            if len(state) != len(was) or any(state.get(k) is not v for k, v in was.items()):
                names = {*state, *was}
                changed += [(owner, k) for k in names if state.get(k) is not was.get(k)]
                state.clear()
                state.update(was)
        for owner, name, table, content in tables:
            if not _same_items(table, content):
                changed.append((owner, name))
                table.clear()
                table.extend(content) if isinstance(table, list) else table.update(content)


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(before.get(key) is value for key, value in now.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))
