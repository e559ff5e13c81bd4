"""``slapo.fit``: the training loop around an engine."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo.agreement import communication_device, has_peers
from slapo.errors import require_count
from slapo.framework_dialect import Engine
from slapo.framework_dialect.optimizers import check_scheduler
from slapo.logger import get_logger
from slapo.saving.steps import checkpoints
from slapo.utils.signals import NotedSignals
from slapo.weights.files import progress_bar

logger = get_logger("slapo")

#: Metric name -> value, for one step.
Metrics = dict[str, float]
#: A function of (step, metrics), TensorBoard's ``SummaryWriter``, or a run of Weights & Biases.
Log = Any


def fit(
    engine: Engine,
    data: Iterable[Any],
    *,
    steps: int,
    eval_data: Iterable[Any] | None = None,
    eval_every: int | None = None,
    scheduler: Any = None,
    save: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int = 2,
    log: Log | Sequence[Log] | None = None,
    log_every: int = 1,
) -> list[Metrics]:
    """Train to a number of steps, with progress, evaluation, saving and resuming.

    Every rank calls it. With ``save`` it continues from the last complete step in that folder, so
    the same call resumes a job that was killed, also at another layout. Ctrl-C and SIGTERM finish
    the current step, save, and return; one sent more than five seconds later acts as usual.

    Parameters
    ----------
    engine
        Engine of :func:`slapo.build`.
    data
        ``(inputs, targets)`` as for ``engine.train_batch``. Data that can be iterated again, such
        as a ``DataLoader``, restarts at its end. Data with ``state_dict`` and ``load_state_dict``
        is resumed by these; for other data, the batches of earlier steps are skipped.
    steps
        Total number of optimizer steps, including those before a resumed one.
    eval_data
        Batches for ``engine.eval_batch``, all of them each time; their mean loss is ``eval_loss``.
    eval_every
        Steps between evaluations; by default only at the end.
    scheduler
        Scheduler that is stepped after each step that is not skipped, if ``build`` was given none.
        It is saved and resumed with the engine.
    save
        Folder of the saved steps.
    save_every
        Steps between saves; by default only at the end.
    keep
        Number of latest steps that are kept.
    log
        Called on the first rank as ``log(step, metrics)``. Also accepts a TensorBoard
        ``SummaryWriter``, a run of Weights & Biases, or a list of several loggers.
    log_every
        Steps between calls of `log`.

    Returns
    -------
    list of dict
        For each step of this call: ``loss``, ``seconds``, ``samples_per_second``,
        ``tokens_per_second`` (with ``input_ids``), ``grad_norm`` (if the engine measures it),
        ``lr``, ``memory_gib`` (the peak of this rank), ``eval_loss`` (if it was computed).

    Raises
    ------
    ValueError
        If a number of steps is not a positive integer, or data ends before `steps`.

    Examples
    --------
    >>> import slapo, torch
    >>> sch = slapo.create_schedule(torch.nn.Linear(4, 1))
    >>> engine, _ = slapo.build(sch, target="torch", mesh=slapo.init_mesh(device="cpu"),
    ...     loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    >>> data = [(torch.ones(2, 4), torch.ones(2, 1))]
    >>> history = fit(engine, data, steps=3)
    >>> len(history), engine.step_count
    (3, 3)
    """
    counts = {"steps": steps, "eval_every": eval_every, "save_every": save_every}
    for name, value in {**counts, "log_every": log_every, "keep": keep}.items():
        if value is not None:
            require_count(f"fit: {name}", value)
    if scheduler is not None:
        check_scheduler(scheduler)
    logs = log if isinstance(log, (list, tuple)) else [log]
    loop = _Loop(engine, data, [each for each in logs if each is not None], scheduler)
    loop.resume(save)
    saved = engine.step_count
    noted = loop.asked if save is not None else nullcontext()
    with noted, progress_bar("fit", steps, "step") as bar:
        bar.update(engine.step_count)
        while engine.step_count < steps and not loop.has_stopped():
            metrics = loop.step()
            done = engine.step_count
            if scheduler is not None and engine.was_step_applied:
                scheduler.step()
            if eval_data is not None and _is_due(done, eval_every, steps):
                metrics["eval_loss"] = loop.evaluate(eval_data)
            if _is_due(done, log_every, steps):
                bar.update(done - bar.n)
                bar.set_description(f"fit: loss {metrics['loss']:.4g}")
                loop.say(metrics)
            if save is not None and save_every and _is_due(done, save_every, steps):
                # In the background while training goes on; the last one must be complete on return.
                loop.save(save, keep, wait=done == steps)
                saved = done
        if save is not None and engine.step_count > saved:
            loop.save(save, keep)
    return loop.history


def _is_due(done: int, every: int | None, steps: int) -> bool:
    return done == steps or bool(every and done % every == 0)


class _Loop:
    """State of one call of :func:`fit`."""

    def __init__(
        self, engine: Engine, data: Iterable[Any], logs: Sequence[Log], scheduler: Any
    ) -> None:
        self.engine, self.data, self.logs, self.scheduler = engine, data, logs, scheduler
        self.history: list[Metrics] = []
        #: the data, if it saves and restores its own position
        self.state: Any = data if hasattr(data, "state_dict") else None
        self._iterator: Iterator[Any] | None = None
        self._is_first = not has_peers() or dist.get_rank() == 0
        self.asked = NotedSignals()

    # --- data ------------------------------------------------------------------------------------
    def resume(self, run: Any) -> None:
        """Resume from the last complete step of a run, if there is one."""
        if run is not None and Path(run).is_dir() and checkpoints(run):
            with self._scheduler_in_engine():
                notes = self.engine.load(run, data=self.state).notes
            if self._is_first:
                said = "".join(f"; {note}" for note in notes)
                logger.info("fit: resumes from step %d of %s%s", self.engine.step_count, run, said)
        for _ in range(self.engine.step_count if self.state is None else 0):
            self._next()

    def save(self, run: Any, keep: int, wait: bool = True) -> None:
        """Save the engine, the data's position and the scheduler."""
        with self._scheduler_in_engine():
            self.engine.save(run, data=self.state, keep=keep, wait=wait)

    @contextmanager
    def _scheduler_in_engine(self) -> Iterator[None]:
        """Let the engine save and load the loop's scheduler."""
        # Only for these calls: an engine steps its own scheduler, and earlier than the loop, which
        # still reads the step's learning rate.
        own = self.engine.scheduler
        self.engine.scheduler = self.scheduler if own is None else own
        try:
            yield
        finally:
            self.engine.scheduler = own

    def _next(self) -> Any:
        """Return the next batch; data that can be iterated again restarts."""
        # Twice at most, as data that ends at once would restart forever.
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.data)
            for batch in self._iterator:
                return batch
            again = iter(self.data)
            # An iterator or generator returns itself and cannot restart.
            self._iterator = None if again is self._iterator else again
        raise ValueError(
            f"fit: data ended after {self.engine.step_count} steps; pass more data, or an iterable "
            "that can restart, such as a list or a DataLoader"
        )

    # --- steps -----------------------------------------------------------------------------------
    def step(self) -> Metrics:
        """Run one step, and return its metrics."""
        counts: Metrics = {}

        def counted() -> Iterator[Any]:
            # Counted on the way: the engine takes the batch from the iterator itself.
            batch = self._next()
            counts.update(_counts(batch[0], self.engine.mesh["dp"].size()))
            yield batch

        start = time.perf_counter()
        metrics = {"loss": float(self.engine.train_batch(counted()))}
        seconds = metrics["seconds"] = time.perf_counter() - start
        metrics |= {f"{name}_per_second": count / seconds for name, count in counts.items()}
        if self.engine.grad_norm is not None:
            metrics["grad_norm"] = float(self.engine.grad_norm)
        groups = getattr(self.engine.optimizer, "param_groups", None) or [{}]
        metrics |= {"lr": float(groups[0]["lr"])} if "lr" in groups[0] else {}
        metrics["memory_gib"] = _peak() / 2**30
        self.history.append(metrics)
        return metrics

    def evaluate(self, data: Iterable[Any]) -> float:
        """Return the mean loss over batches of equal weight."""
        batches = map(iter, ([batch] for batch in data))
        losses = [float(self.engine.eval_batch(batch)) for batch in batches]  # type: ignore[arg-type]
        if not losses:
            raise ValueError("fit: eval_data is empty; pass a list of batches or a DataLoader")
        return sum(losses) / len(losses)

    def say(self, metrics: Metrics) -> None:
        """Call the logs on the first rank."""
        step = self.engine.step_count
        for log in self.logs if self._is_first else ():
            if hasattr(log, "add_scalar"):
                for name, value in metrics.items():
                    log.add_scalar(name, value, step)
            elif hasattr(log, "log"):
                log.log(metrics, step=step)
            else:
                log(step, metrics)

    def has_stopped(self) -> bool:
        """Return whether any rank was asked to stop, so that all stop after the same step."""
        asked = torch.tensor(self.asked.number)
        if has_peers():
            asked = asked.to(communication_device(None))
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked and self._is_first:
            name = signal.Signals(int(asked)).name
            logger.warning("fit: %s after step %d; saving", name, self.engine.step_count)
        return bool(asked)


def _counts(inputs: Any, replicas: int) -> Metrics:
    """Number of samples in a step, and of tokens if there are ``input_ids``."""
    leaves: Any = [inputs] if isinstance(inputs, Tensor) else inputs
    leaves = leaves.values() if isinstance(leaves, dict) else leaves
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    found = {"samples": float(replicas * len(tensors[0]))} if tensors else {}
    return found | ({"tokens": float(replicas * ids.numel())} if isinstance(ids, Tensor) else {})


def _peak() -> float:
    """Peak memory of this rank in bytes: of its accelerator, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # ru_maxrss is in bytes on macOS, and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024.0 * peak
