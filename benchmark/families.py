"""What works on forty families of Transformers that no test names.

Each is asked two things, each in a process of its own under a limit of time (``python -m
benchmark.families NAME CHECK``), because a trace may leave something behind in Transformers:

``containers``
    The modules above the layers are traced, the model is cut after its first layer, and the two
    stages are compared with the model as it was.
``flat``
    One layer becomes a graph, ``sch[layer].trace(flatten=True, tracer="huggingface")`` with nothing
    more said, and the model is called as its users call it.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import slapo
from benchmark import report
from benchmark.measure import Result, timed
from benchmark.more_families import FAMILIES, Family
from slapo.pipeline import generate_pipeline_partition

#: Seconds for one check of one family.
LIMIT = 180.0
#: Of the containers' trace; a layer's trace is given no size.
TRACED_SIZE = (3, 13)
SIZES = ((2, 21), (5, 7), (1, 9))
#: The same float32 kernels on the same numbers; sums of several paths may take another order.
RELATIVE, ABSOLUTE = 1e-5, 1e-6
#: Columns of the table that hold one.
OUTCOMES = ("containers", "flat", "flat_without_cache")
#: A message in the table has at most so many characters.
SHOWN = 160

EQUAL, REFUSED, CRASH, WRONG = "equal", "refused", "CRASH", "WRONG"
NOT_TRACED = "not traced"
#: From the best to the worst.
SEVERITY = (EQUAL, REFUSED, CRASH, WRONG)
#: Of a call that is not counted, because the original cannot do it either.
NO_CALL = "left out"


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark families`` is followed by."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    rows = []
    for number, name in enumerate(names, 1):
        rows.append(measure_apart(name))
        say(f"{name} ({number} of {len(names)}): {_in_a_line(rows[-1])}")
    for column in OUTCOMES:
        say(f"{column}: {_counted(row[column] for row in rows)}")
    directory = options.results or (None if options.only else report.RESULTS)
    if directory:
        command = shlex.join(["python", "-m", "benchmark", "families", *arguments])
        for path in report.write("families", Result(rows), command, directory):
            say(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmark families", description="Which families of Transformers work."
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="some of the families; default: all")
    parser.add_argument(
        "--results",
        type=Path,
        help=f"folder to write to; default: {report.RESULTS}, or with --only none",
    )
    return parser


def _in_a_line(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{column} {row[column]} ({row[f'{column}_s']} s)" for column in ("containers", "flat")
    )


def _counted(outcomes: Iterable[str]) -> str:
    """How many of each, whatever their messages and numbers."""
    counts = Counter(WRONG if o.startswith(WRONG) else o.split(":")[0] for o in outcomes)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


# --- one family in its processes -----------------------------------------------------------------
def measure_apart(name: str) -> dict[str, Any]:
    """Every check in a process of its own; what it did not come to is said in its place.

    Returns
    -------
    dict
        A line of the table. ``<check>_s`` is the processor time of the trace, and of the cut.
    """
    row = {"family": name, "kind": FAMILIES[name].kind}
    for check in CHECKS:
        row |= _check_apart(name, check)
    return row


def _check_apart(name: str, check: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmark.families", name, check],
            capture_output=True,
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **os.environ},
            timeout=LIMIT,
            cwd=Path(__file__).parents[1],
            check=False,
        )
    except subprocess.TimeoutExpired:
        failure = f"TIMEOUT after {LIMIT:g} s"
    else:
        if done.returncode == 0:
            columns: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return columns
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        failure = f"{CRASH}: the process ended with {done.returncode}: {_short(lines[-1])}"
    columns = {f"{check}_s": "", check: failure}
    if check == "flat":
        columns |= {"flat_without_cache": failure, "flat_detail": ""}
    return columns


def check_containers(family: Family) -> dict[str, Any]:
    """Trace down to the layers, cut after the first, compare.

    Returns
    -------
    dict
        ``containers``: ``"equal"``, or what went wrong first; ``containers_s``.
    """
    model = family.build()
    eager = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    spent, found = timed(lambda: _attempt(lambda: _cut_in_two(sch, family)))
    mask = family.masks[-1]
    for training in (False, True):
        if not found:
            outcomes = {
                s: compare(sch.mod, eager, _inputs(family, s, mask), training) for s in SIZES
            }
            worst = _of_all_sizes(outcomes)
            found = "" if worst == EQUAL else f"{worst}, {_mode(training)}"
    return {"containers_s": round(spent.cpu, 2), "containers": found or EQUAL}


def _cut_in_two(sch: Any, family: Family) -> str:
    traced = sch.trace_until(
        list(family.containers),
        tracer="huggingface",
        concrete_args={"use_cache": False} if _takes_cache(sch.mod) else {},
        example_inputs=_inputs(family, TRACED_SIZE, family.masks[-1]),
    )
    if not traced:
        return NOT_TRACED
    sch[f"{family.layers}.0"].cut_pipeline_stage()
    generate_pipeline_partition(sch)
    stages = len(sch.mod.stages)
    return "" if stages == 2 else f"{WRONG}: {stages} stages"


def check_flat(family: Family) -> dict[str, Any]:
    """Trace the second layer with no inputs given, call the model in the ways of its users.

    Returns
    -------
    dict
        ``flat``, all calls together: ``"equal"``, ``"equal+refused"``, ``"refused"``, ``"crash"``,
        ``"wrong"`` or ``"not traced"``; ``flat_without_cache``, those with ``use_cache=False``;
        ``flat_detail``, which calls did what; ``flat_s``.
    """
    model = family.build()
    eager = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    spent, problem = timed(lambda: _attempt(lambda: _trace_flat(sch, f"{family.layers}.1")))
    calls: dict[str, str] = {}
    for mask, training, default_cache in [] if problem else _calls(family, eager):
        outcomes = {
            size: compare(sch.mod, eager, _inputs(family, size, mask), training, default_cache)
            for size in (SIZES[:1] if default_cache else SIZES)
        }
        call = f"{mask}, default cache" if default_cache else mask
        calls[f"{call}, {_mode(training)}"] = _of_all_sizes(outcomes)
    without = [outcome for call, outcome in calls.items() if "default cache" not in call]
    reason, _, detail = problem.partition(": ")
    return {
        "flat_s": round(spent.cpu, 2),
        "flat": reason.lower() or _in_a_word(calls.values()),
        "flat_without_cache": reason.lower() or _in_a_word(without),
        "flat_detail": detail or _grouped(calls),
    }


#: Column of the table -> what finds it out, and others along with it.
CHECKS: dict[str, Callable[[Family], dict[str, Any]]] = {
    "containers": check_containers,
    "flat": check_flat,
}


def _trace_flat(sch: Any, path: str) -> str:
    if not sch[path].trace(flatten=True, tracer="huggingface"):
        return NOT_TRACED
    return "" if hasattr(sch[path].mod, "graph") else f"{WRONG}: no graph is in place"


def _inputs(family: Family, size: tuple[int, int], mask: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return family.inputs(*size, mask)


def _calls(family: Family, model: nn.Module) -> Iterator[tuple[str, bool, bool]]:
    """Mask, whether in train mode, whether the use of the cache is left to the model."""
    for default_cache in (False, True) if _has_cache(model) else (False,):
        for mask in family.masks:
            yield mask, False, default_cache
            yield mask, True, default_cache


def _attempt(step: Callable[[], str]) -> str:
    """What `step` returns and warns of, or how it failed; empty when all went well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            problem = step()
        except slapo.SlapoError as error:
            return f"{REFUSED}: {_short(error)}"
        except Exception as error:
            return f"{CRASH}: {type(error).__name__}: {_short(error)}"
    if problem != NOT_TRACED:
        return problem
    said = [str(w.message) for w in caught if "could not be traced" in str(w.message)]
    reason = said[-1].split("tracer='huggingface': ")[-1] if said else "no warning"
    return f"{problem}: {_short(re.sub(r' [(]/[^ ]*[)]', '', reason))}"  # no paths of this machine


# --- comparison ----------------------------------------------------------------------------------
def compare(
    model: nn.Module,
    eager: nn.Module,
    inputs: Mapping[str, Tensor],
    training: bool,
    default_cache: bool = False,
) -> str:
    """Outputs, caches included, and the gradients of all parameters, against the original.

    Returns
    -------
    str
        ``"equal"``, ``"refused: <message>"``, ``"WRONG <largest error>"`` or
        ``"CRASH: <type>: <message>"``; ``"left out: <message>"`` where the original fails.
    """
    flags = {} if default_cache or not _has_cache(eager) else {"use_cache": False}
    try:
        expected = run(eager, {**inputs, **flags}, training)
    except Exception as error:
        return f"{NO_CALL}: the original fails with {type(error).__name__}: {_short(error)}"
    try:
        got = run(model, {**inputs, **flags}, training)
    except slapo.SlapoError as error:
        return f"{REFUSED}: {_short(error)}"
    except Exception as error:
        return f"{CRASH}: {type(error).__name__}: {_short(error)}"
    if any(isinstance(t, FakeTensor) for part in (*expected, *got) for t in part.values()):
        return (
            f"{WRONG} values: fake tensors of the trace are met by real calls, of the original too"
        )
    wrong = [
        found
        for part, ours, theirs in zip(("output", "gradient"), got, expected, strict=True)
        if (found := _difference(part, ours, theirs))
    ]
    return max(wrong, key=_error_of, default=EQUAL)


def run(
    model: nn.Module, inputs: Mapping[str, Any], training: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of the output, and the gradients of the first one's mean square, by name."""
    model.train(training)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    output = model(**inputs)
    found = {type(output).__name__ + path: tensor for path, tensor in tensors(output)}
    next(t for t in found.values() if t.is_floating_point()).square().mean().backward()
    # Stages have names of their own; state dicts are those of the original.
    state = model.state_dict(keep_vars=True)
    gradients = {name: t.grad for name, t in state.items() if t.grad is not None}
    return {path: tensor.detach() for path, tensor in found.items()}, gradients


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in an output and in the caches that it carries, with their places."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value)).items()
    elif type(value).__module__.startswith("transformers."):
        items = vars(value).items()
    else:
        return
    for name, part in items:
        yield from tensors(part, f"{path}.{name}")


def _difference(part: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Empty where they are equal; small is measured by the largest number among them."""
    if got.keys() != expected.keys():
        odd = sorted(got.keys() ^ expected.keys())
        place = "only here" if odd[0] in got else "missing"
        return f"{WRONG} {part} {odd[0]} {place}, {len(odd)} in all"
    scale = max((float(t.double().abs().max()) for t in expected.values() if t.numel()), default=0)
    errors = {}
    for name, theirs in expected.items():
        ours = got[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = [f"{t.dtype} of {tuple(t.shape)}" for t in (ours, theirs)]
            return f"{WRONG} {part} {name} is {kinds[0]} for {kinds[1]}"
        ours, theirs = ours.double(), theirs.double()
        if not torch.isclose(ours, theirs, RELATIVE, ABSOLUTE * scale, equal_nan=True).all():
            errors[name] = float((ours - theirs).abs().max())
    if not errors:
        return ""
    worst = max(errors, key=lambda name: _rank(errors[name]))
    return f"{WRONG} {errors[worst]:.1e} of {scale:.1e} in {part} {worst}"


def _error_of(difference: str) -> float:
    """The number in a text of `_difference`; what has none is worse."""
    try:
        return _rank(float(difference.split()[1]))
    except ValueError:
        return math.inf


def _rank(error: float) -> float:
    """A NaN is larger than all."""
    return math.inf if math.isnan(error) else error


def _has_cache(model: nn.Module) -> bool:
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    by_config = getattr(getattr(model, "config", None), "use_cache", False)
    return _takes_cache(model) or (by_config and inspect.Parameter.VAR_KEYWORD in kinds)


def _takes_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


# --- words ---------------------------------------------------------------------------------------
def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _short(problem: object) -> str:
    return " ".join(str(problem).split())[:SHOWN]


def _kind(outcome: str) -> str:
    return next(kind for kind in (NO_CALL, *SEVERITY) if outcome.startswith(kind))


def _of_all_sizes(outcomes: Mapping[tuple[int, int], str]) -> str:
    """The worst; with its sizes where others had a better one."""
    if left_out := [outcome for outcome in outcomes.values() if _kind(outcome) == NO_CALL]:
        return left_out[0]
    worst = max(outcomes.values(), key=lambda outcome: SEVERITY.index(_kind(outcome)))
    where = [
        f"{batch}x{length}"
        for (batch, length), outcome in outcomes.items()
        if _kind(outcome) == _kind(worst)
    ]
    return worst if len(where) == len(outcomes) else f"{worst} [at {', '.join(where)} only]"


def _in_a_word(outcomes: Iterable[str]) -> str:
    kinds = {_kind(outcome) for outcome in outcomes} - {NO_CALL}
    worst = max(kinds, key=SEVERITY.index, default=NO_CALL)
    return "equal+refused" if kinds == {EQUAL, REFUSED} else worst.lower()


def _grouped(calls: Mapping[str, str]) -> str:
    """Calls of one outcome together."""
    groups: dict[str, list[str]] = {}
    for call, outcome in calls.items():
        groups.setdefault(outcome, []).append(call)
    good = len(groups.pop(EQUAL, []))
    counted = sum(_kind(outcome) != NO_CALL for outcome in calls.values())
    return " | ".join(
        [f"{good} of {counted} calls equal"]
        + [f"{' / '.join(which)} -> {outcome}" for outcome, which in groups.items()]
    )


if __name__ == "__main__":
    print(json.dumps(CHECKS[sys.argv[2]](FAMILIES[sys.argv[1]])))
