"""Tests whose body runs on each process of a job, so that its asserts hold on every rank."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest

from tests.distributed import Job, run_distributed

#: Target -> package that it needs.
RUNTIMES = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron.core"}

Body = Callable[..., None]

_for_life = contextlib.ExitStack()


def on_ranks(world: int | None = None, timeout: float = 200) -> Callable[[Body], Body]:
    """A test on several processes; by default on as many as its `layout` has.

    Its arguments are fixtures and parameters as of any test. A `target` is skipped where its
    package is missing, and for Megatron-Core the CPU answers instead of CUDA.
    """

    def decorate(job: Body) -> Body:
        def test(**given: Any) -> None:
            target = given.get("target")
            if target is not None:
                pytest.importorskip(RUNTIMES[target])
            processes = world or prod(given["layout"])
            run_distributed(_run, processes, job.__module__, job.__name__, given, timeout=timeout)

        test.__signature__ = inspect.signature(job)  # type: ignore[attr-defined]
        return _as_test(test, job)

    return decorate


def on_ranks_by_rows(
    rows: Sequence[tuple[Any, ...]], timeout: float = 280
) -> Callable[[Body], Body]:
    """A test of rows ``(target, layout, *others)``, which are the arguments of its body.

    Those of one target and as many processes run in one job, and a row that fails is named.
    Megatron-Core's groups are made once, for one layout.
    """
    jobs: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        target, layout = row[:2]
        size = "x".join(map(str, layout)) if target == "megatron" else f"{prod(layout)}"
        jobs.setdefault(f"{target}-{size}", []).append(row)

    def decorate(body: Body) -> Body:
        names = list(inspect.signature(body).parameters)

        def test(rows: list[tuple[Any, ...]]) -> None:
            target, layout = rows[0][:2]
            pytest.importorskip(RUNTIMES[target])
            job = Job(prod(layout), timeout)
            given = [dict(zip(names, row, strict=True)) for row in rows]
            job.each(*((body.__module__, body.__name__, row) for row in given))(_run)
            job.run()

        named = pytest.mark.parametrize("rows", jobs.values(), ids=list(jobs))
        return named(_as_test(test, body))

    return decorate


def _as_test(test: Body, body: Body) -> Body:
    test.job = body  # type: ignore[attr-defined]
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return pytest.mark.distributed(test)


def _run(rank: int, world: int, module: str, name: str, given: dict[str, Any]) -> None:
    if given.get("target") == "megatron":
        stand_in_for_cuda()
    getattr(importlib.import_module(module), name).job(**given)


@functools.cache  # a job may run several tests
def stand_in_for_cuda() -> None:
    """Until the process ends, the CPU answers instead of CUDA."""
    from tests.runtimes.cuda_standin import cuda_on_cpu

    _for_life.enter_context(cuda_on_cpu())


def error_of(act: Callable[[], Any]) -> str:
    """The error that this rank meets, with the name of its class."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
