"""The tensor-parallel plans of Transformers, and drafts of the same models.

``python -m benchmark plans``: each config class with a ``base_model_tp_plan`` makes a tiny random
model, which two processes split by the plan (``"auto"``) and by what they derive from the model
(``"draft"``), and compare with the model as it was: outputs, loss, every gradient; and once more
with tokens sharded between the blocks. The share of the parameters that is sharded and the number
of collectives are counted on the way.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmark import report
from benchmark.measure import Result, Target
from benchmark.plan_models import Case, cases
from benchmark.plan_ranks import EQUAL, NOT_RUNNABLE, SEVERITY, WRONG, Pair, Verdict

#: Column of the table -> options of the schedule.
WAYS: dict[str, dict[str, Any]] = {
    "plan": {"key": "auto"},
    "tokens": {"key": "auto", "sequence_parallel": True},
    "draft": {"key": "draft"},
    "draft_tokens": {"key": "draft", "sequence_parallel": True},
}
#: At least so many are equal, with tokens sharded too or not.
PROMISED = {"plan": 105, "tokens": 85, "draft": 105, "draft_tokens": 60}
#: Columns of the table for each way.
_HEAD = "gradient | share | collectives"
#: A message in the table has at most so many characters.
SHOWN = 200


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark plans`` is followed by."""
    parser = argparse.ArgumentParser(
        "python -m benchmark plans", description="Every plan that Transformers carries."
    )
    parser.add_argument("--only", default="", help="families, with commas between; default: all")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="%(default)s")
    options = parser.parse_args(arguments)
    every = cases()
    families = options.only.split(",") if options.only else []
    unknown = [name for name in families if name not in {each.family for each in every}]
    if unknown:
        parser.error(f"no plan in {unknown}; names are those of the folders of Transformers")
    chosen = [each for each in every if not families or each.family in families]
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    rows = measure(chosen, say)
    for way in WAYS:
        say(f"{way}: {counted(rows, way)}")
    say(beside_plans(rows))
    command = shlex.join(["python", "-m", "benchmark", "plans", *arguments])
    for path in write(rows, command, options.results, whole=not families):
        say(f"wrote {path}")


def measure(chosen: Iterable[Case], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row of the table for each case."""
    chosen, rows = list(chosen), []
    with Pair() as pair:
        for number, case in enumerate(chosen, 1):
            rows.append(row(case, pair))
            words = ", ".join(f"{way} {rows[-1][way]}" for way in WAYS)
            say(f"{case.family}/{case.name} ({number} of {len(chosen)}): {words}")
    return rows


def row(case: Case, pair: Pair) -> dict[str, Any]:
    """One case in all ways; what one process cannot run is not tried on two."""
    verdicts: dict[str, Verdict] = {}
    variant = None
    for way, options in WAYS.items():
        if variant is None and verdicts:
            verdicts[way] = Verdict(NOT_RUNNABLE)
        else:
            verdicts[way] = pair.judge(case, options, variant)
            variant = verdicts[way].variant
    first = verdicts["plan"]
    about = {
        "family": case.family,
        "config": case.name,
        "model": first.model,
        "variant": "" if first.variant is None else first.variant,
    }
    for way, each in verdicts.items():
        about |= {
            way: each.word,
            f"{way}_output": _figure(each.output),
            f"{way}_gradient": _figure(each.gradient),
            f"{way}_said": " ".join(each.said.split())[:SHOWN],
            f"{way}_share": "" if each.share is None else round(each.share, 3),
            f"{way}_collectives": "" if each.collectives is None else each.collectives,
            f"{way}_seconds": each.seconds,
        }
    return about


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def counted(rows: Iterable[dict[str, Any]], way: str) -> str:
    """How many of each word, the best first."""
    counts = Counter(each[way] for each in rows)
    order = (EQUAL, *(word for word in SEVERITY if word != EQUAL))
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


# --- what is kept --------------------------------------------------------------------------------
def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """None wrong; and as many equal as promised, as what is lacking to it."""
    found = []
    for way, least in PROMISED.items():
        words = Counter(each[way] for each in rows)
        found.append(Target(f"{way}: wrong in silence", words[WRONG], 0))
        lacking, most = len(rows) - words[EQUAL], len(rows) - least
        found.append(Target(f"{way}: not equal, of {len(rows)}", lacking, most))
    return found


def beside_plans(rows: Sequence[dict[str, Any]]) -> str:
    """How many drafts shard as much as plans do, with as few collectives."""
    both = [each for each in rows if each["plan"] == each["draft"] == EQUAL]
    shares = [float(each["draft_share"]) - float(each["plan_share"]) for each in both]
    counts = [int(each["draft_collectives"]) - int(each["plan_collectives"]) for each in both]
    as_good = [share > -0.01 and count <= 0 for share, count in zip(shares, counts, strict=True)]
    return (
        f"of {len(both)} models that are equal both ways, the draft shards as much with no more "
        f"collectives in {sum(as_good)}, less in {sum(share < -0.01 for share in shares)}, more "
        f"in {sum(share > 0.01 for share in shares)}, and has more collectives in "
        f"{sum(count > 0 for count in counts)}"
    )


def write(rows: list[dict[str, Any]], command: str, folder: Path, whole: bool) -> list[Path]:
    """``plans.csv`` and ``plans.md``; the targets where all cases were asked."""
    paths = report.write("plans", Result(rows, targets(rows) if whole else []), command, folder)
    table = folder / "plans.md"
    table.write_text(markdown(rows, command))
    return [*paths, table]


def markdown(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The table for people, with the message where something is not equal."""
    about = report.environment(command)
    lines = [
        "# Plans of Transformers, and drafts, on two ranks",
        "",
        f"`{command}`, {about['date'][:10]}, torch {about['torch']}, transformers "
        f"{about['transformers']}, gloo. Tiny random models in float32, batch 3, length 13 (12 "
        "with tokens sharded), padding mask, train mode; the largest difference from one "
        "process, relative to the largest output and to the largest gradient of the parameter.",
        "",
        *(f"- {way}: {counted(rows, way)}, of {len(rows)}" for way in WAYS),
        f"- {beside_plans(rows)}",
        "",
        "Share: of the elements of all parameters, sharded. Collectives: of one forward and one "
        "backward pass.",
        "",
        "| config | model | " + " | ".join(f"{way} | {_HEAD}" for way in WAYS) + " | said |",
        "|---|---|" + "---|" * 4 * len(WAYS) + "---|",
    ]
    for each in rows:
        said = " / ".join(
            dict.fromkeys(each[f"{way}_said"] for way in WAYS if each[way] != EQUAL)
        ).replace("|", "\\|")
        cells = [each["config"], each["model"]]
        for way in WAYS:
            cells += [each[way], *(each[f"{way}_{name}"] for name in _HEAD.split(" | "))]
        lines.append(f"| {' | '.join(map(str, [*cells, said]))} |")
    return "\n".join(lines) + "\n"


def stored(folder: Path = report.RESULTS) -> list[dict[str, str]]:
    """Rows that a run has left."""
    with (folder / "plans.csv").open(newline="") as file:
        return list(csv.DictReader(file))
