"""Random schedules of many primitives: what is accepted trains as one process does.

``python -m tests.check.fuzz mixed 500`` runs them; see :mod:`tests.check.fuzz`.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.sharding.state import shards_of
from slapo.sharding.steps import carried_by
from slapo.verify.numeric.rank_sync import RankSync
from slapo.wrapper import innermost
from tests.check.mixed_models import MODELS, Batch, Model, loss_of
from tests.check.mixed_moves import Move, Steps, cut, other_primitives, tensor_parallel
from tests.check.verdicts import Verdict
from tests.distributed import RankFailure, run_distributed

#: Relative to the change of a parameter in all steps; losses are of float32.
TOLERANCE = 1e-5
MICRO_BATCHES = 2

#: What is said, and what is true.
Pair = tuple[Verdict, Verdict]


class Crash(Exception):
    """A primitive failed, and not by an error that a user can understand."""


@dataclass
class Plan:
    """All decisions of a seed."""

    seed: int
    name: str
    is_cut: bool
    spreads: bool
    optimizer: Callable[..., torch.optim.Optimizer]
    choose: random.Random
    odds: float
    disorder: float
    moves: list[Move] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    #: address -> a tensor, and its name in the model that is scheduled
    tensors: dict[int, tuple[Tensor, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Plan:
        choose = random.Random(f"mixed {seed}")
        name = choose.choice(list(MODELS))
        is_cut = choose.random() < 0.15
        spreads = not is_cut and name != "convnet" and choose.random() < 0.15
        adam = functools.partial(torch.optim.AdamW, lr=0.03, eps=0.1)
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return cls(
            seed,
            name,
            is_cut,
            spreads,
            choose.choice((adam, sgd)),
            choose,
            choose.choice((0.0, 0.0, 0.02, 0.06)),
            choose.choice((0.5, 3.0, 10.0)),
        )

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    def batches(self) -> list[Batch]:
        """Of other values, and other sizes where a pipeline does not fix them."""
        length, samples = (6, 3) if self.spreads else (7, 3)
        if self.is_cut:
            return [self.model.batch(MICRO_BATCHES * samples, length, seed) for seed in (1, 2, 3)]
        sizes = ((samples, length), (5, length + 2), (samples, length))
        return [self.model.batch(*size, seed) for seed, size in enumerate(sizes)]

    def example(self) -> Batch:
        return self.model.batch(3, 6 if self.spreads else 7, 9)

    def note(self, model: nn.Module, names: Collection[str]) -> None:
        """Remember what is called by one of `names`: a fusion to come may move it."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in names and not tensor.is_meta:
                self.tensors[tensor.data_ptr()] = tensor, name

    def apply(self, sch: slapo.Schedule, is_cut: bool) -> None:
        """Choose the moves, and carry out those that are not refused.

        With `is_cut` a stage ends where it is traced for that. An error that is none of this
        library's, nor of wrong arguments, is a `Crash`.
        """
        choose = self.choose
        steps = Steps(self.model.family, self.spreads, choose, self.odds)
        tracer = "pytorch" if self.name in ("transformer", "convnet") else "huggingface"
        moves = list(tensor_parallel(sch, steps))
        moves += other_primitives(sch, choose, choose.randint(0, 8), tracer)
        moves.sort(key=lambda move: move.phase + choose.uniform(0, self.disorder))
        if self.is_cut:
            end, inputs = choose.choice(self.model.ends), self.model.batch(6, 7, 4)[0]
            place = choose.choice((len(moves), len(moves), choose.randint(0, len(moves))))
            model, ends = self.model, (end,) if is_cut else ()
            run = functools.partial(cut, model=model, ends=ends, tracer=tracer, inputs=inputs)
            moves.insert(place, Move("cut", f"after {end}", 5, run))
        self.decisions, names = steps.decisions, sch.mod.state_dict().keys()
        self.note(sch.mod, names)
        for move in moves:
            self._carry_out(sch, move)
            self.note(sch.mod, names)

    def _carry_out(self, sch: slapo.Schedule, move: Move) -> None:
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if move.run(sch) is False:  # a trace warns
                    raise ValueError(str(told[-1].message) if told else "it was not traced")
            self.done.append(str(move))
        except (slapo.SlapoError, ValueError, TypeError, KeyError) as error:
            self.refused.append((str(move), str(error)))
        except RuntimeError as error:
            if "would be lost" not in str(error):
                raise Crash(f"{move}: {type(error).__name__}: {error}") from error
            self.refused.append((str(move), str(error)))
        except Exception as error:
            raise Crash(f"{move}: {type(error).__name__}: {error}") from error

    def told(self) -> str:
        """What was done, for a reader."""
        wrong = f" [{'; '.join(self.decisions)}]" if self.decisions else ""
        how = f"{self.name}{' spread' * self.spreads}{' cut' * self.is_cut}"
        return f"{how}: {'; '.join(self.done)}{wrong}"


# --- one seed ------------------------------------------------------------------------------------
def judged(rank: int, world_size: int, seeds: list[int]) -> list[Pair]:
    """What is said and true, in a job of two processes; of four for seeds with cuts."""
    logging.disable(logging.ERROR)
    # In float32 the rounding of another order of sums moves a ReLU over its edge for some seeds.
    torch.set_default_dtype(torch.float64)
    mesh = slapo.init_mesh(pp=world_size // 2, tp=2, device="cpu")
    slapo.set_random_seed(1, mesh=mesh)
    found = []
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(judge(Plan.of(seed), mesh))
    return found


def judge(plan: Plan, mesh: Any) -> Pair:
    """Schedule, check, build and train the model of a plan."""
    seed = plan.seed
    sch, original = _scheduled(plan, mesh)
    if isinstance(sch, Verdict):
        return sch, sch
    said = Verdict(seed, "accepted", plan.told())
    inputs, targets = plan.example()
    try:
        slapo.check(sch, inputs, lambda output: loss_of(output, targets))
    except slapo.SlapoError as error:
        said = Verdict(seed, "refused", f"{plan.told()} || {error}")
    except Exception as error:
        said = Verdict(seed, "crash", f"{plan.told()} || {type(error).__name__}: {error}")
    is_cut = any(move.startswith("cut") for move in plan.done)
    if is_cut and said.said == "accepted":
        true = _trained_by_engine(plan, sch, original, mesh)
    elif is_cut:  # of stages that do not fit together some would wait for others
        again = Plan.of(seed)
        true = _trained(again, *_scheduled(again, mesh, is_cut=False), mesh)
    else:
        true = _trained(plan, sch, original, mesh)
    return replace(said, done=tuple(plan.done), refused=tuple(plan.refused)), true


def _scheduled(plan: Plan, mesh: Any, is_cut: bool = True) -> tuple[Any, nn.Module]:
    model = plan.model.build()
    original = copy.deepcopy(model)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    try:
        plan.apply(sch, is_cut)
    except Crash as crash:
        return Verdict(plan.seed, "crash", f"{plan.told()} || {crash}"), original
    return sch, original


def _trained(plan: Plan, sch: slapo.Schedule, original: nn.Module, mesh: Any) -> Verdict:
    """Steps of a loop as a user writes it."""
    try:
        model, _ = slapo.build(sch)
    except slapo.SlapoError as error:
        return Verdict(plan.seed, "not built", str(error))
    except Exception as error:
        return Verdict(plan.seed, "crash", f"build: {type(error).__name__}: {error}")
    peers = RankSync(mesh["tp"].get_group())
    try:
        with peers.reported():
            with carried_by(peers.carry_out):
                losses = list(steps_of(model, plan))
            peers.meet("end")
    except Exception as error:
        return Verdict(plan.seed, "error", f"{type(error).__name__}: {error}")
    before = copy.deepcopy(original)
    wanted = list(steps_of(original, plan))
    return _compared(plan, losses, wanted, parts_of(model), before, original)


def _trained_by_engine(plan: Plan, sch: slapo.Schedule, original: nn.Module, mesh: Any) -> Verdict:
    """Steps of the engine of target "torch"."""
    try:
        engine, _ = slapo.build(
            sch,
            target="torch",
            mesh=mesh,
            loss_fn=loss_of,
            optimizer=plan.optimizer,
            micro_batches=MICRO_BATCHES,
        )
    except slapo.SlapoError as error:
        return Verdict(plan.seed, "not built", str(error))
    except Exception as error:
        return Verdict(plan.seed, "crash", f"build: {type(error).__name__}: {error}")
    try:
        losses = [engine.train_batch(iter([batch])).item() for batch in plan.batches()]
    except Exception as error:
        return Verdict(plan.seed, "error", f"{type(error).__name__}: {error}")
    before = copy.deepcopy(original)
    wanted = list(steps_of(original, plan, MICRO_BATCHES))
    return _compared(plan, losses, wanted, parts_of_engine(engine), before, original)


def steps_of(model: nn.Module, plan: Plan, parts: int = 1) -> Iterator[float]:
    """Losses of steps; each on a batch in equal parts."""
    optimizer = plan.optimizer(list(model.parameters()))
    for inputs, targets in plan.batches():
        optimizer.zero_grad()
        total = 0.0
        size = len(targets) // parts
        for start in range(0, size * parts, size):
            part = slice(start, start + size)
            output = model(**{name: value[part] for name, value in inputs.items()})
            loss = loss_of(output, targets[part]) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


#: Name in the original -> this rank's value, and how it is sliced.
Parts = dict[str, tuple[Tensor, Any]]


def parts_of(model: nn.Module) -> Parts:
    """Parameters and buffers, by the name of each that holds them."""
    found: Parts = {}
    modules = [(path, innermost(outer)) for path, outer in model.named_modules()]
    specs = {  # one that is tied may stand in a module that was replaced since
        id(getattr(module, leaf)): spec
        for _, module in modules
        for leaf, spec in shards_of(module).items()
    }
    for path, module in modules:
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found[f"{path}.{leaf}" if path else leaf] = value, specs.get(id(value))
    return found


def parts_of_engine(engine: Any) -> Parts:
    from tests.runtimes.alone import specs_of

    specs = specs_of(engine)
    return {name: (value, specs.get(name)) for name, value in engine.state_dict().items()}


def _compared(
    plan: Plan,
    losses: list[float],
    wanted: list[float],
    parts: Parts,
    before: nn.Module,
    after: nn.Module,
) -> Verdict:
    """Over all ranks: losses, and values by how much they were to change."""
    apart = {"losses": max(abs(a - b) for a, b in zip(losses, wanted, strict=True))}
    start, end = before.state_dict(), after.state_dict()
    changes = {name: float((end[name] - start[name]).abs().max()) for name in end}
    largest = max(changes.values())
    found = set()
    for held, (value, spec) in parts.items():
        _, moved = plan.tensors.get(value.data_ptr(), (value, ""))
        name = held if held in end else moved  # fused modules hold it elsewhere
        if not name:
            continue
        found.add(name)
        whole = end[name]
        part = spec.slice(whole) if spec is not None else whole
        if part.shape != value.shape:
            return Verdict(plan.seed, "wrong", f"{name} is of shape {tuple(value.shape)}")
        # A gradient that cancels, as that for the bias of keys, has rounding alone.
        scale = max(changes[name], 3e-2 * largest)
        apart[name] = float((value.detach() - part).abs().max()) / scale
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else 1e9)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (apart[worst], worst, found))
    missing = set(end) - {name for _, _, names in told for name in names}
    if missing:
        return Verdict(plan.seed, "wrong", f"nothing has {sorted(missing)[:3]}")
    most, name, _ = max(told, key=lambda each: each[0] if each[0] == each[0] else 1e9)
    is_equal = all(each[0] < TOLERANCE for each in told)
    return Verdict(plan.seed, "equal" if is_equal else "wrong", f"{most:.2g} {name}")


# --- many seeds ----------------------------------------------------------------------------------
def compared(seeds: list[int]) -> list[Pair]:
    """What is said and what is true of all seeds, in their order.

    That a job hangs or dies is told of the seed that did it.
    """
    import transformers.modeling_utils  # noqa: F401  # so that no process has to

    cuts = [seed for seed in seeds if Plan.of(seed).is_cut]
    others = [seed for seed in seeds if seed not in cuts]
    found = [*_of_job(2, others), *_of_job(4, cuts)]
    return sorted(found, key=lambda pair: pair[0].seed)


def _of_job(world_size: int, seeds: list[int]) -> list[Pair]:
    if not seeds:
        return []
    try:
        timeout = 60 + 10 * len(seeds)
        return run_distributed(judged, world_size, seeds, timeout=timeout)[0]  # type: ignore[no-any-return]
    except RankFailure as failure:
        if len(seeds) == 1:
            verdict = Verdict(seeds[0], "crash", f"job: {failure}")
            return [(verdict, verdict)]
        half = len(seeds) // 2
        return [*_of_job(world_size, seeds[:half]), *_of_job(world_size, seeds[half:])]
