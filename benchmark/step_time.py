"""Whether a scheduled model without a changed kernel trains as fast as the original.

The original, a copy of it and scheduled models take steps in turn (A B C A B C ...), so what else
runs on the machine disturbs all alike. Of two equal models one came out up to two per cent
slower in a run; so the reference is the mean of the original and its copy.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from benchmark.measure import Progress, Result, Target, Times, timed
from benchmark.models import Transformer, hf_gpt2

Step = Callable[[], None]

VOCAB_SIZE = 1000
LIMIT = 1.02


def run(quick: bool, progress: Progress) -> Result:
    """Compare training steps of each model with those of its scheduled forms."""
    layers, hidden, batch, rounds = (1, 16, (2, 5), 1) if quick else (4, 256, (4, 64), 60)
    result = Result()
    torch.manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, batch)
    cases: dict[str, Callable[[], dict[str, nn.Module]]] = {
        "gpt2_like": lambda: _forms_of_small(Transformer(layers, hidden, 4, VOCAB_SIZE))
    }
    if importlib.util.find_spec("transformers"):
        cases["hf_gpt2"] = lambda: _forms_of_hf(hf_gpt2(layers, hidden, VOCAB_SIZE), ids)
    for case, make_forms in cases.items():
        forms = make_forms()
        progress(f"{case}: scheduled")
        times = _in_turns({name: _step(model, ids) for name, model in forms.items()}, rounds)
        for name in forms:
            row = _row(case, name, times, rounds)
            result.rows.append(row)
            progress(f"{case}, {name}: {row['cpu_ratio']:.4f} of the unscheduled CPU time")
            if name not in ("original", "copy"):
                result.targets.append(Target(f"{case}, {name}", row["cpu_ratio"], LIMIT))
    return result


def _forms_of_small(model: nn.Module) -> dict[str, nn.Module]:
    """A graph per layer; a graph of everything, children included; one flat graph."""
    per_layer = slapo.create_schedule(copy.deepcopy(model))
    per_layer.select("layers.*").trace()
    recursive = slapo.create_schedule(copy.deepcopy(model))
    flat = slapo.create_schedule(copy.deepcopy(model))
    _check(recursive.trace() and flat.trace(flatten=True))
    built = {"per_layer": per_layer, "recursive": recursive, "flat": flat}
    return _with_original(model, built)


def _forms_of_hf(model: nn.Module, ids: Tensor) -> dict[str, nn.Module]:
    """By the tracer that records runs: model and backbone; everything; one flat graph."""
    containers = slapo.create_schedule(copy.deepcopy(model))
    recursive = slapo.create_schedule(copy.deepcopy(model))
    flat = slapo.create_schedule(copy.deepcopy(model))
    inputs = {"input_ids": ids}
    _check(containers.trace_until("transformer", tracer="huggingface", example_inputs=inputs))
    _check(recursive.trace(tracer="huggingface", example_inputs=inputs))
    _check(flat.trace(tracer="huggingface", flatten=True, example_inputs=inputs))
    built = {"containers": containers, "recursive": recursive, "flat": flat}
    return _with_original(model, built)


def _check(traced: bool) -> None:
    if not traced:
        raise RuntimeError("a model could not be traced; see the warning")


def _with_original(model: nn.Module, schedules: dict[str, slapo.Schedule]) -> dict[str, nn.Module]:
    built = {name: slapo.build(sch)[0] for name, sch in schedules.items()}
    return {"original": model, "copy": copy.deepcopy(model), **built}


def _step(model: nn.Module, ids: Tensor) -> Step:
    """Forward, backward and optimizer."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        output: Any = model(ids)
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _in_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[Times]]:
    """Times of each step; who begins a round changes, as the first one finds colder caches."""
    names = list(steps)
    for step in steps.values():
        step()
        step()
    times: dict[str, list[Times]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(timed(steps[name], collect=False)[0])
    return times


def _row(case: str, name: str, times: dict[str, list[Times]], rounds: int) -> dict[str, Any]:
    rounds_of = zip(times[name], times["original"], times["copy"], strict=True)
    ratios = [
        (2 * own.cpu / (one.cpu + other.cpu), 2 * own.wall / (one.wall + other.wall))
        for own, one, other in rounds_of
    ]
    return {
        "model": case,
        "form": name,
        "rounds": rounds,
        "cpu_ms": round(1e3 * median(t.cpu for t in times[name]), 3),
        "wall_ms": round(1e3 * median(t.wall for t in times[name]), 3),
        "cpu_ratio": round(median(cpu for cpu, _ in ratios), 4),
        "wall_ratio": round(median(wall for _, wall in ratios), 4),
    }
