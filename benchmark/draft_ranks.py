"""Two processes that schedule models, one after the other, and compare them with one process.

A process may fail where the other waits for it: a pair that does not agree, or is late, is ended,
and the next model gets a new one.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from benchmark.draft_cases import (
    EVEN_LENGTH,
    LENGTH,
    Case,
    NoModel,
    brief,
    first_that_runs,
    inputs_of,
    run,
)
from benchmark.measure import forkserver
from slapo.sharding.steps import Carrier, Step, carried_by

RANKS = 2
#: Seconds for one schedule; and for the second process, when the first has failed.
LIMIT, GRACE = 90.0, 3.0
#: Largest difference of outputs and of gradients, both relative to the largest of all.
OUTPUT, GRADIENT = 2e-5, 2e-4

EQUAL, REFUSED, FAILS, WRONG = "equal", "refused", "fails", "wrong"
NOT_RUNNABLE = "not runnable"
#: From the best to the worst, for two processes that do not agree.
SEVERITY = (NOT_RUNNABLE, EQUAL, REFUSED, FAILS, WRONG)


@dataclass(frozen=True)
class Verdict:
    """What became of a schedule.

    Parameters
    ----------
    word
        One of `SEVERITY`.
    said
        The error, or the parameter that differs most.
    model
        Name of the class.
    variant
        Number of its settings.
    output, gradient
        Largest relative differences.
    share
        Of the elements of all parameters, sharded.
    collectives
        Of one forward and one backward pass.
    seconds
        That it took.
    """

    word: str
    said: str = ""
    model: str = ""
    variant: int | None = None
    output: float | None = None
    gradient: float | None = None
    share: float | None = None
    collectives: int | None = None
    seconds: float = 0.0


# --- in the main process -------------------------------------------------------------------------
class Pair:
    """Two processes of a gloo group, which live as long as they agree."""

    def __init__(self) -> None:
        self._context = forkserver(__name__, "slapo.model_schedule", "transformers")
        self._scratch: Any = None
        self._ranks: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def judge(self, case: Case, options: Mapping[str, Any], variant: int | None = None) -> Verdict:
        """Schedule a model, and compare with it as it was.

        Parameters
        ----------
        options
            Of ``apply_schedule``.
        variant
            Number of the settings that are known to run; None searches.
        """
        start = time.monotonic()
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, dict(options), variant))
        verdicts = self._received(start + LIMIT)
        late = [rank for rank, each in enumerate(verdicts) if each is None]
        found = [each for each in verdicts if each is not None]
        if late:
            found.append(Verdict(FAILS, f"rank {late[0]} did not finish, or waits for the other"))
        words = {each.word for each in found}
        if len(words) > 1 or words & {FAILS}:
            self._end()
        told = [each for each in found if each.word != FAILS or each.model] or found
        worst = max(told, key=lambda each: SEVERITY.index(each.word))
        return replace(worst, seconds=round(time.monotonic() - start, 1))

    def _received(self, deadline: float) -> list[Verdict | None]:
        found: list[Verdict | None] = [None] * RANKS
        waiting = dict(zip(self._pipes, range(RANKS), strict=True))
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                found[rank] = _read(pipe)
                if found[rank].word == FAILS:  # type: ignore[union-attr]
                    deadline = min(deadline, time.monotonic() + GRACE)
        return found

    def _start(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        for rank in range(RANKS):
            own, theirs = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(rank, f"{self._scratch.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(own)

    def _end(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []
        if self._scratch is not None:
            self._scratch.cleanup()


def _read(pipe: Any) -> Verdict:
    try:
        verdict: Verdict = pipe.recv()
    except EOFError:
        return Verdict(FAILS, "a process ended without a word")
    return verdict


# --- in the two processes ------------------------------------------------------------------------
def serve(rank: int, store: str, pipe: Any) -> None:
    """Judge what comes through the pipe."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=2 * LIMIT),
    )
    with contextlib.suppress(EOFError):
        while True:
            case, options, variant = pipe.recv()
            pipe.send(_judged(case, options, variant))


def _judged(case: Case, options: dict[str, Any], variant: int | None) -> Verdict:
    length = EVEN_LENGTH if options.get("sequence_parallel") else LENGTH
    if variant is None and case.module:
        try:
            variant = first_that_runs(case.load(), partial(_try, length=length))
        except NoModel as error:
            return Verdict(NOT_RUNNABLE, str(error))
    variant = variant or 0
    model = case.build(variant)
    inputs = case.inputs(model, length)
    found = compared(model, inputs, {**options, "example_inputs": inputs})
    return replace(found, model=type(model).__name__, variant=variant)


def _try(model: nn.Module, length: int) -> None:
    first, _ = run(model, inputs_of(model, length))
    if not first.isfinite().all():
        raise ValueError("its outputs are not finite")


def compared(model: nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> Verdict:
    """Schedule a copy, run both, compare."""
    slapo.set_random_seed(7, tp_rank=dist.get_rank())
    mine = copy.deepcopy(model)
    try:
        sch = slapo.model_schedule.apply_schedule(mine, group=dist.group.WORLD, **options)
        built, _ = slapo.build(sch)
    except (ValueError, slapo.SlapoError) as error:
        return Verdict(REFUSED, brief(error))
    except Exception as error:
        return Verdict(FAILS, f"scheduling: {brief(error)}")
    wanted, loss = run(model, inputs)
    try:
        with carried_by(counting(counts := [])):
            found, new_loss = run(built, inputs)
        gradients = slapo.verify.numeric.harness.gathered_gradients(built, sch.group)
    except Exception as error:
        return Verdict(FAILS, brief(error))
    outputs = max(_difference(found, wanted), _difference(new_loss, loss))
    gradient, name = worst_gradient(model, gradients)
    right = outputs < OUTPUT and gradient < GRADIENT
    return Verdict(
        EQUAL if right else WRONG,
        name,
        output=outputs,
        gradient=gradient,
        share=sharded_share(built),
        collectives=len(counts),
    )


def counting(counts: list[str]) -> Carrier:
    """Carry out steps, and note the names of those that communicate."""

    def carry(step: Step, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        if step.communicates:
            counts.append(step.name)
        result: Tensor = function(*args, **kwargs)
        return result

    return carry


def sharded_share(model: nn.Module) -> float:
    """The share of the elements of all parameters that this rank has a slice of."""
    wholes = [
        (torch.Size(getattr(p, "orig_shape", p.shape)).numel(), p.numel())
        for p in model.parameters()
    ]
    return sum(w for w, own in wholes if w != own) / max(1, sum(w for w, _ in wholes))


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def worst_gradient(model: nn.Module, gradients: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to a parameter's own gradient, and which parameter's it is.

    A gradient below a hundredth of the model's largest is noise of that one, and is measured by it.
    """
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = {name: float(each.abs().max()) for name, each in wanted.items() if each.numel()}
    floor = 0.01 * max(largest.values())
    found = {
        name: float((gradients[name] - each).abs().max()) / max(largest[name], floor)
        if name in gradients
        else float("inf")
        for name, each in wanted.items()
        if name in largest
    }
    worst = max(found, key=lambda name: found[name])
    return found[worst], worst


# --- in one process ------------------------------------------------------------------------------
def alone(case: Case, variant: int | None) -> dict[str, Any]:
    """A draft for four ranks with its check: the verdict, the share, seconds."""
    model = case.build(variant or 0)
    inputs = case.inputs(model, LENGTH)
    start = time.perf_counter()
    try:
        slapo.draft(model, inputs, ranks=4, check=False)
    except ValueError:  # 4 ranks divide no axis
        return {"check_4": "refuses"}
    derived = time.perf_counter()
    drafted = slapo.draft(model, inputs, ranks=4)
    return {
        "seconds_alone_4": round(derived - start, 2),
        "seconds_4": round(time.perf_counter() - derived, 2),
        "check_4": "passes" if drafted.verdict is None else "refuses",
        "share_4": round(drafted.share, 3),
        "collectives_4": drafted.collectives,
    }
