"""Training steps of a Llama over two ranks: recipes, DTensor's styles, Transformers' own plan.

Every side has the fused AdamW, which wants distributed and plain tensors in groups of their own.
Collectives are counted where torch hands them to a process group; a layer's are those that a model
with one layer more has in addition.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import slapo
from benchmark.kernel_cases import Case, check_losses
from benchmark.measure import Progress, Result, Target, on_ranks, peak_of, profiled_peak_of
from slapo.cost.meter import collective_name
from slapo.model_schedule import apply_schedule

#: Speed of the best of ours against each of the others.
FASTER = 1.3

Maker = Callable[[Case, str], nn.Module]


# --- sides ---------------------------------------------------------------------------------------
def ours(case: Case, folder: str, **options: Any) -> nn.Module:
    """A recipe over all ranks."""
    sch = apply_schedule(case.build(), case.key, group=dist.group.WORLD, **options)
    return slapo.build(sch)[0]


def styles(case: Case, folder: str, whole_logits: bool = True) -> nn.Module:
    """PyTorch's own styles on Llama.

    Parameters
    ----------
    whole_logits
        Otherwise they stay split by columns, and so does the loss, which is then not the model's
        own function but one that torch's ``loss_parallel`` takes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model: Any = case.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {path: ColwiseParallel() for path in columns}
    plan |= {path: RowwiseParallel() for path in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    head = ColwiseParallel(output_layouts=Replicate()) if whole_logits else split
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": embedding, "lm_head": head})
    if not whole_logits:
        model.loss_function = _loss_of_columns
    return model  # type: ignore[no-any-return]


def _loss_of_columns(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), moved.flatten())


def plan(case: Case, folder: str) -> nn.Module:
    """Transformers' own tensor parallelism."""
    import transformers
    from transformers.distributed import DistributedConfig

    cls = getattr(transformers, case.cls)
    config = DistributedConfig(tp_size=dist.get_world_size())
    model: nn.Module = cls.from_pretrained(folder, distributed_config=config)
    return model.train()


SIDES: dict[str, Maker] = {
    "ours": ours,
    "ours, columns of logits": functools.partial(ours, gather_logits=False),
    "ours, columns of logits, compiled layers": functools.partial(
        ours, gather_logits=False, compile=True
    ),
    "ours, fused loss": functools.partial(ours, fused_loss=True),
    "ours, fused loss, compiled layers": functools.partial(ours, fused_loss=True, compile=True),
    "DTensor": styles,
    "DTensor, loss_parallel": functools.partial(styles, whole_logits=False),
    "transformers": plan,
}
#: Those of a run with tiny models, and those whose collectives are counted.
FEW = ("ours", "DTensor", "transformers")
_NEEDS_ACCELERATE = "transformers"


def _loss_context(side: str) -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if "loss_parallel" in side else nullcontext()


# --- this process --------------------------------------------------------------------------------
def measure(
    case: Case, batches: Sequence[int], rounds: int, quick: bool, say: Progress
) -> dict[str, Result]:
    """Times of all sides, and the collectives of a layer."""
    sides = [side for side in (FEW if quick else SIDES) if _is_there(side, say)]
    times = Result()
    for batch in batches:
        _report(times, case, batch, rounds, sides_of(case, batch, rounds, sides, say)[0])
    return {"kernels_ranks": times, "kernels_collectives": count(case, say)}


@dataclass
class Taken:
    """By the steps of a side on one rank: seconds of each, passed and of the main thread; bytes."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0


def sides_of(
    case: Case, batch: int, rounds: int, sides: Sequence[str], say: Progress
) -> list[dict[str, Taken]]:
    """For each of two ranks, what sides take; those that can run here, in turns."""
    there = [side for side in sides if _is_there(side, say)]
    with tempfile.TemporaryDirectory() as folder:
        case.build().save_pretrained(folder)  # type: ignore[operator]
        found: list[dict[str, Taken]] = on_ranks(
            2, _time, (case, batch, rounds, folder, there), say
        )
    return found


def _is_there(side: str, say: Progress) -> bool:
    """Transformers' loader asks for another package."""
    if side != _NEEDS_ACCELERATE or importlib.util.find_spec("accelerate") is not None:
        return True
    say("transformers' own plan is left out: it needs the package accelerate")
    return False


def _report(result: Result, case: Case, batch: int, rounds: int, found: dict[str, Taken]) -> None:
    middle = {side: median(taken.wall) for side, taken in found.items()}
    best = min((side for side in found if side.startswith("ours")), key=lambda side: middle[side])
    for side, taken in found.items():
        ratio = median(a / b for a, b in zip(taken.wall, found[best].wall, strict=True))
        result.rows.append(
            {
                "model": case.key,
                "batch": batch,
                "side": side,
                "ranks": 2,
                "rounds": rounds,
                "seconds": round(middle[side], 4),
                "best_of_ours": best,
                "to_best_of_ours": round(ratio, 3),
                "peak_mib": round(taken.peak / 2**20, 1),
            }
        )
        if not side.startswith("ours"):
            what = f"{case.key}, batch {batch}, two ranks: time of {best} to {side}'s"
            result.targets.append(Target(what, 1 / ratio, 1 / FASTER))


def count(case: Case, say: Progress) -> Result:
    """Collectives of one layer, forward and backward, and what is handed to them."""
    result = Result()
    layers = "num_hidden_layers"
    few, more = (replace(case, settings={**case.settings, layers: n}) for n in (1, 2))
    sides = [side for side in FEW if _is_there(side, say)]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        few.build().save_pretrained(one)  # type: ignore[operator]
        more.build().save_pretrained(two)  # type: ignore[operator]
        found = on_ranks(2, _count, ((few, one), (more, two), sides), say)
    hidden = case.settings["hidden_size"]
    unit = 4 * case.length * hidden  # bytes of the activations between layers
    found["least"] = ({"all_reduce": 2}, {"all_reduce": 2}, 2 * unit, 2 * unit)
    for side, (forward, backward, there, back) in found.items():
        result.rows.append(
            {
                "model": case.key,
                "side": side,
                "ranks": 2,
                "forward": _words(forward),
                "backward": _words(backward),
                "forward_mib": round(there / 2**20, 3),
                "backward_mib": round(back / 2**20, 3),
                "activations_mib": round(unit / 2**20, 3),
            }
        )
    own = found["ours"]
    figure = f"{case.key}: what a layer of ours hands to collectives, to the least"
    result.targets.append(Target(figure, (own[2] + own[3]) / (4 * unit), 1.0))
    return result


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


# --- each rank -----------------------------------------------------------------------------------
def _join(rank: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _time(
    rank: int,
    case: Case,
    batch: int,
    rounds: int,
    folder: str,
    sides: Sequence[str],
    store: str,
    pipe: Any,
) -> None:
    _join(rank, store)
    inputs = case.inputs(batch, "cpu")
    steps = {side: _step(SIDES[side](case, folder), inputs, side) for side in sides}
    losses = {side: [step(), step()] for side, step in steps.items()}
    check_losses({"hf": losses["DTensor"], **losses})
    found = {side: Taken() for side in sides}
    for turn in range(rounds):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            steps[side]()
            found[side].cpu.append(time.thread_time() - cpu)
            found[side].wall.append(time.perf_counter() - wall)
        if rank == 0:
            pipe.send(f"two ranks, {case.key}, batch {batch}: round {turn + 1} of {rounds}")
    for side in sides:  # a mode of dispatch does not look into compiled code
        measure_of = profiled_peak_of if "compiled" in side else peak_of
        found[side].peak = measure_of(steps[side])
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        pipe.send(gathered)
    _leave()


def _step(model: nn.Module, inputs: dict[str, Tensor], side: str) -> Callable[[], float]:
    """Gives the loss."""
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-4, fused=True)

    def step() -> float:
        with _loss_context(side):
            loss = model(**inputs).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return value.item()  # type: ignore[no-any-return]

    return step


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Distributed tensors and plain ones: one kernel does not take both."""
    parameters = list(model.parameters())
    spread = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    return [{"params": group} for group in (spread, plain) if group]


def _count(
    rank: int,
    few: tuple[Case, str],
    more: tuple[Case, str],
    sides: Sequence[str],
    store: str,
    pipe: Any,
) -> None:
    _join(rank, store)
    found = {}
    for side in sides:
        small, large = (_traffic(side, *each) for each in (few, more))
        counts = [dict(b.calls - a.calls) for a, b in zip(small, large, strict=True)]
        sizes = [b.bytes - a.bytes for a, b in zip(small, large, strict=True)]
        found[side] = (*counts, *sizes)
        if rank == 0:
            pipe.send(f"two ranks, {side}: collectives of a layer are {counts}")
    if rank == 0:
        pipe.send(found)
    _leave()


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank hands to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Distributed tensors go on to where they are plain ones."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and not _NO_COLLECTIVES & set(name.split("_")):
            self.calls[collective_name(name)] += 1
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(t.nbytes for t in given if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


#: Words in names of operators that send nothing.
_NO_COLLECTIVES = {"wait", "wrap", "barrier"}


def _traffic(side: str, case: Case, folder: str) -> tuple[Traffic, Traffic]:
    """Forward and backward, of a second step."""
    model, inputs = SIDES[side](case, folder), case.inputs(1, "cpu")
    model(**inputs).loss.backward()
    model.zero_grad()
    with Traffic() as forward:
        loss = model(**inputs).loss
    with Traffic() as backward:
        loss.backward()
    return forward, backward
