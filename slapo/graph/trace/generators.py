"""Random generators of the process: a trace leaves them alone, and so must what it traces.

Draws of tensors are operations, which a graph holds. A seed, a state that is put back and a number
of Python's own are not: they would happen while tracing, and never again.
"""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.cuda.random

from slapo.errors import TraceError
from slapo.graph.trace.regions import refusing
from slapo.random import tracker_kept

SEED_REFUSED = (
    "the forward seeds a random generator, or reads or sets its state, which a graph cannot hold; "
    "do so outside of the forward, or make the module that does it a leaf"
)
DRAW_REFUSED = (
    "the forward draws random numbers of {} outside of a tensor operation, which would be "
    "constants of a graph; draw them with torch on a tensor, or make the module that does it a leaf"
)
#: How a line of a forward reads that seeds or draws, for the reason why a capture fails there.
_SEEDS = re.compile(
    r"\b(manual_seed(_all)?|initial_seed|[gs]et_rng_state(_all)?|fork_rng)\b"
    r"|\b(torch|random|cuda)\.seed(_all)?\("
)
_DRAWS = re.compile(r"(?<!torch\.)\brandom\.\w+\(")
#: For the time of a trace, so that a forward's own seed is a change whatever was seeded before.
_SEED = 195_936_478
#: All functions of torch for the generators of CUDA go through one of these.
_CUDA_ENTRIES = ("_lazy_call", "_lazy_init")


@contextmanager
def generators_kept() -> Iterator[Callable[[], None]]:
    """After the block the process draws the numbers it would have drawn without.

    Yields
    ------
    callable
        Refuses, by a TraceError, that something was drawn or seeded since the block began.
    """
    with ExitStack() as stack:
        # What runs under a fork of the tracker needs a state there, seeded by the user or not yet.
        stack.enter_context(tracker_kept())
        checks = [stack.enter_context(keep()) for keep in (_torch_kept, _python_kept, _numpy_kept)]

        def check() -> None:
            for each in checks:
                each()

        yield check


@contextmanager
def _torch_kept() -> Iterator[Callable[[], None]]:
    generators = [torch._C.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [generator.get_state() for generator in generators]
    torch._C.default_generator.manual_seed(_SEED)
    before = [_bytes_of(generator) for generator in generators]

    def check() -> None:
        if [_bytes_of(generator) for generator in generators] != before:
            raise TraceError(DRAW_REFUSED.format("torch"))

    try:
        yield check
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _bytes_of(generator: torch.Generator) -> bytes:
    """Modes of torch, fake tensors among them, have no part in it."""
    with torch.utils._python_dispatch._disable_current_modes():
        return generator.get_state().numpy().tobytes()


@contextmanager
def _python_kept() -> Iterator[Callable[[], None]]:
    state = random.getstate()
    random.seed(_SEED)
    before = random.getstate()

    def check() -> None:
        if random.getstate() != before:
            raise TraceError(DRAW_REFUSED.format("Python"))

    try:
        yield check
    finally:
        random.setstate(state)


@contextmanager
def _numpy_kept() -> Iterator[Callable[[], None]]:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        yield lambda: None
        return
    state = numpy.random.get_state()
    numpy.random.seed(_SEED)
    before = numpy.random.get_state()

    def check() -> None:
        now = numpy.random.get_state()
        if (now[1] != before[1]).any() or now[2:] != before[2:]:
            raise TraceError(DRAW_REFUSED.format("NumPy"))

    try:
        yield check
    finally:
        numpy.random.set_state(state)


@contextmanager
def cuda_not_started() -> Iterator[None]:
    """Within the block dynamo does not start CUDA, to save a state that nobody has drawn from.

    A process that has started it cannot fork.
    """
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        yield
        return
    with mock.patch.object(torch.cuda, "get_rng_state", _no_state):
        yield


def _no_state(device: Any = "cuda") -> None:
    if torch.compiler.is_dynamo_compiling():  # asked by the forward that is captured
        raise TraceError(SEED_REFUSED)


# --- what is seen when it happens ----------------------------------------------------------------
@contextmanager
def refuse_seeds() -> Iterator[None]:
    """Within the block this thread may not seed torch, nor use generators of Python's."""
    stand_in = _Refusing(torch.random.default_generator)
    with ExitStack() as stack:
        enter = stack.enter_context
        # Functions find it here when they are called, however a forward has imported them.
        enter(mock.patch.object(torch.random, "default_generator", stand_in))
        for name in _CUDA_ENTRIES:
            refused = refusing(getattr(torch.cuda.random, name), SEED_REFUSED)
            enter(mock.patch.object(torch.cuda.random, name, refused))
        for name in ("random", "getrandbits"):
            drawn = refusing(getattr(random.Random, name), DRAW_REFUSED.format("Python"))
            enter(mock.patch.object(random.Random, name, drawn))
        yield


class _Refusing:
    """A generator whose methods are refused to one thread."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise TraceError(SEED_REFUSED)
        return getattr(self._generator, name)


# --- what a capture says -------------------------------------------------------------------------
def reason_in(line: str) -> str | None:
    """Why a capture has failed at this line, where generators are the reason."""
    if _SEEDS.search(line):
        return SEED_REFUSED
    return DRAW_REFUSED.format("Python or NumPy") if _DRAWS.search(line) else None


def check_target(target: Any) -> None:
    """Refuse a node that would seed, or draw from another generator than the forward does.

    Dynamo has torch draw what NumPy would.

    Raises
    ------
    TraceError
        If a function in a captured graph is one of these.
    """
    function = getattr(target, "f", target)
    home = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", "")
    if home.startswith("torch._numpy") and home.rpartition(".")[2] == "random":
        raise TraceError(SEED_REFUSED if name == "seed" else DRAW_REFUSED.format("NumPy"))
    if home in ("torch.random", "torch.cuda.random"):
        raise TraceError(SEED_REFUSED)
