"""Whether Verify can be fooled, whether it refuses what is right, and what it costs.

The mistakes and the right schedules are those of :mod:`tests.verify.planted` and
:mod:`tests.verify.right`; each is scheduled under Verify, on as many gloo processes as it needs.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slapo
from benchmark import report
from benchmark.measure import Progress, Result, Target, timed

#: Rounds of a cost's measurement, and tokens of a batch.
ROUNDS, TOKENS = 7, (4, 64)
#: Of what a plain pass of both models takes, Verify may take so much.
LIMIT = 3.0
#: A message in a table has at most so many characters.
SHOWN = 200


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark verify`` is followed by."""
    parser = argparse.ArgumentParser("python -m benchmark verify", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some of each, one round of costs")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    logging.disable(logging.WARNING)
    planted = measure_planted(options.quick, say)
    right = measure_right(options.quick, say)
    left_out = measure_left_out(options.quick, say)
    cost = measure_cost(options.quick, say)
    targets = _targets(planted, right, left_out, cost)
    for target in targets:
        say(str(target))
    command = shlex.join(["python", "-m", "benchmark", "verify", *arguments])
    tables = {
        "verify_planted": Result(planted),
        "verify_right": Result(right),
        "verify_left_out": Result(left_out),
        "verify_cost": Result(cost, targets),
    }
    for name, result in tables.items():
        for path in report.write(name, result, command, options.results):
            say(f"wrote {path}")
    page = options.results / "verify.md"
    page.write_text(page_of(planted, right, left_out, cost, targets, command))
    say(f"wrote {page}")


# --- mistakes and right schedules -----------------------------------------------------------------
def measure_planted(quick: bool, say: Progress) -> list[dict[str, Any]]:
    """A row for each mistake: whether it is caught, and what is named first."""
    from tests.verify.planted import PLANTED, is_right

    rows = []
    for name, ranks, (message, place) in _run_all(PLANTED, "planted", quick, say):
        rows.append(
            {
                "mistake": name,
                "ranks": ranks,
                "caught": bool(message),
                "place": place,
                "right_place": bool(message) and is_right(name, place),
                "message": _short(message),
            }
        )
    return rows


def measure_right(quick: bool, say: Progress) -> list[dict[str, Any]]:
    """A row for each right schedule: whether it is refused."""
    from tests.verify.right import RIGHT

    return [
        {"schedule": name, "ranks": ranks, "refused": bool(message), "message": _short(message)}
        for name, ranks, (message, _) in _run_all(RIGHT, "right", quick, say)
    ]


def measure_left_out(quick: bool, say: Progress) -> list[dict[str, Any]]:
    """A row for each line of the right schedules that is left out, on two ranks."""
    from benchmark.verify_left_out import all_outcomes
    from tests.distributed import run_distributed
    from tests.sharding.families import FAMILIES

    rows: list[dict[str, Any]] = []
    for family in list(FAMILIES)[:1] if quick else FAMILIES:
        for spread in (False, True):
            rows += run_distributed(all_outcomes, 2, family, spread, timeout=1200)[0]
            say(f"left out: {family}, {len(rows)} lines so far")
    return rows


def _run_all(
    table: Mapping[str, Any], kind: str, quick: bool, say: Progress
) -> Iterator[tuple[str, int, tuple[str, str]]]:
    """Name, ranks, message and place of every case, those of as many ranks in one job."""
    from tests.distributed import run_distributed

    for ranks in sorted({case.ranks for case in table.values()}):
        names = [name for name, case in table.items() if case.ranks == ranks]
        names = names[::10] if quick else names
        say(f"{kind}: {len(names)} on {ranks} ranks")
        told = run_distributed(messages_of, ranks, kind, names, timeout=1200)
        for number, name in enumerate(names):
            yield name, ranks, told[0][number]


def messages_of(rank: int, world_size: int, kind: str, names: Sequence[str]) -> list[Any]:
    """What Verify says on this rank, and the place that it names."""
    from tests.verify import planted, right

    logging.disable(logging.WARNING)
    if kind == "planted":
        return [planted.caught(name) for name in names]
    return [(right.refused(name), "") for name in names]


def _short(message: str) -> str:
    # Without the lines of the program that it quotes, whose paths are those of this machine.
    text = " ".join(message.partition("; primitives applied there")[0].split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# --- cost -----------------------------------------------------------------------------------------
def measure_cost(quick: bool, say: Progress) -> list[dict[str, Any]]:
    """A row for each model: medians of Verify and of a pass of both models, taken in turns."""
    rows = []
    for name, make in _models().items():
        pairs = [_once(make) for _ in range(2 if quick else ROUNDS + 1)][1:]
        verify = statistics.median(pair[0] for pair in pairs)
        plain = statistics.median(pair[1] for pair in pairs)
        rows.append(
            {
                "model": name,
                "verify_cpu_ms": round(1e3 * verify, 1),
                "plain_cpu_ms": round(1e3 * plain, 1),
                "ratio": round(verify / plain, 2),
                "rounds": len(pairs),
            }
        )
        say(f"cost: {name}: {rows[-1]['ratio']} times a pass of both models")
    return rows


def _models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models of some size: of tiny ones the cost is that of Python."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    tokens = torch.randint(1, 2000, TOKENS, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    common: dict[str, Any] = {"vocab_size": 2000, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_embd=256, n_layer=4, n_head=8, n_positions=64, use_cache=False, **common)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    llama = LlamaConfig(intermediate_size=768, use_cache=False, **sizes, **common)
    bert = BertConfig(intermediate_size=1024, vocab_size=2000, **sizes)
    return {
        "GPT-2, 4 layers of 256": lambda: (GPT2LMHeadModel(gpt2), batch),
        "Llama, 4 layers of 256": lambda: (LlamaForCausalLM(llama), batch),
        "BERT, 4 layers of 256": lambda: (BertForMaskedLM(bert), batch),
    }


def _once(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[float, float]:
    """Processor time of Verify, and of a forward and backward of both models."""
    model, batch = make()
    other, _ = make()
    sch = slapo.create_schedule(model)

    def verify() -> None:
        with slapo.Verify(sch, batch):
            pass

    def plain() -> None:
        for each in (model, other):
            each(**batch).loss.backward()

    return timed(verify)[0].cpu, timed(plain)[0].cpu


# --- figures --------------------------------------------------------------------------------------
def _targets(
    planted: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]],
    cost: Sequence[Mapping[str, Any]],
) -> list[Target]:
    missed = sum(not row["caught"] for row in planted)
    wrong = sum(not row["right_place"] for row in planted)
    ratio = statistics.median(row["ratio"] for row in cost)
    lacking = [row for row in left_out if row["changes"]]
    silent = sum(not row["caught"] for row in lacking)
    elsewhere = sum(row["near"] == "elsewhere" for row in lacking)
    return [
        Target(f"mistakes that pass, of {len(planted)}", missed, 0),
        Target(f"places that are wrong, of {len(planted)}", wrong, 0.1 * len(planted)),
        Target(f"lines left out that pass, of {len(lacking)} that change numbers", silent, 0),
        Target(f"places far from the line, of {len(lacking)}", elsewhere, 0.1 * len(lacking)),
        Target(f"right schedules refused, of {len(right)}", sum(r["refused"] for r in right), 0),
        Target("cost in passes of both models, the median", ratio, LIMIT),
    ]


def page_of(
    planted: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]],
    cost: Sequence[Mapping[str, Any]],
    targets: Sequence[Target],
    command: str,
) -> str:
    """The tables as a page."""
    about = report.environment(command)
    versions = ", ".join(f"{k} {about[k]}" for k in ("python", "torch", "transformers", "slapo"))
    parts = [
        "# What Verify catches, and what it lets pass",
        f"Written by `{command}` on {about['date']} ({versions}, {about['cores']} cores). The "
        "models are tiny ones of Transformers with random weights, and a small convolutional "
        "network.",
        "\n".join(f"- {target}" for target in targets),
        "## Mistakes",
        _table(planted, ("mistake", "ranks", "caught", "place", "right_place")),
        "## Lines left out",
        "Of the right tensor-parallel schedules each line is left out in turn, but for those of "
        "the first layers, and of `fork_rng`. In brackets those that change numbers; near are "
        "those of which the module, one around it or one inside it is named first. Every line is "
        "in `verify_left_out.csv`.",
        _table(_counted(left_out), ("family", "parallel", "lines", "caught", "near")),
        "## Right schedules",
        _table(right, ("schedule", "ranks", "refused")),
        "## Cost",
        "Processor time of `Verify` and of one forward and backward pass of both models, in turns.",
        _table(cost, ("model", "verify_cpu_ms", "plain_cpu_ms", "ratio")),
    ]
    return "\n\n".join(parts) + "\n"


def _counted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines left out by family and kind."""
    found = []
    for key in dict.fromkeys((row["family"], row["parallel"]) for row in rows):
        some = [row for row in rows if (row["family"], row["parallel"]) == key]
        counts = {
            "lines": f"{len(some)} ({sum(row['changes'] for row in some)})",
            "caught": sum(row["caught"] for row in some),
            "near": sum(row["near"] in ("exact", "around", "inside") for row in some),
        }
        found.append({"family": key[0], "parallel": key[1], **counts})
    return found


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"`{value}`" if "." in str(value) and isinstance(value, str) else str(value)

    lines = [" | ".join(column.replace("_", " ") for column in columns)]
    lines += [" | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row[column]) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
