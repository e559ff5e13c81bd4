"""Drafts of many models: are they equal to one process, and how much do they shard.

``python -m benchmark drafts``: small random models of families with a recipe, of families without
one, of every config class of Transformers that carries a tensor-parallel plan (``--all``: that runs
on tokens, an image or a sound), and own ones. Two processes derive a schedule from each, and
compare with the model as it was: outputs, loss, every gradient; once more with tokens sharded
between the blocks; and by the recipe of the family, if there is one. ``slapo.draft`` for four ranks
is timed and checked in one process.
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
from benchmark.draft_cases import GROUPS, NO_PLANS, PLANS, Case, cases
from benchmark.draft_ranks import EQUAL, NOT_RUNNABLE, SEVERITY, WRONG, Pair, Verdict, alone
from benchmark.measure import Result, Target

#: Column of the table -> options of the schedule.
WAYS: dict[str, dict[str, Any]] = {
    "draft": {"key": "draft"},
    "tokens": {"key": "draft", "sequence_parallel": True},
    "recipe": {},  # the key is the model's
}
#: At least so large a share of the models that run is equal: of drafts, and with tokens sharded.
PROMISED = {"draft": 0.97, "tokens": 0.80}
#: At least so large a share of the drafts for four ranks passes the check.
PROMISED_CHECKS = 0.95
#: Columns of the table for each way.
_HEAD = "gradient | share | collectives"
#: A message in the table has at most so many characters.
SHOWN = 200


def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark drafts`` is followed by."""
    parser = argparse.ArgumentParser(
        "python -m benchmark drafts", description="Drafts of many models, on two ranks and four."
    )
    parser.add_argument("--only", default="", help="families, with commas between; default: all")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="%(default)s")
    parser.add_argument(
        "--all", action="store_true", help="configs of Transformers without a plan, too: an hour"
    )
    options = parser.parse_args(arguments)
    every = cases((PLANS, NO_PLANS) if options.all else (PLANS,))
    families = options.only.split(",") if options.only else []
    unknown = [name for name in families if name not in {each.family for each in every}]
    if unknown:
        parser.error(f"no model of {unknown}; families are {sorted({e.family for e in every})}")
    chosen = [each for each in every if not families or each.family in families]
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    rows = measure(chosen, say)
    for line in summary(rows):
        say(line)
    command = shlex.join(["python", "-m", "benchmark", "drafts", *arguments])
    for path in write(rows, command, options.results, whole=not families):
        say(f"wrote {path}")


def measure(chosen: Iterable[Case], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row of the table for each case."""
    chosen, rows = list(chosen), []
    with Pair() as pair:
        for number, case in enumerate(chosen, 1):
            found = row(case, pair)
            # Most configs without a plan are parts of models, or need inputs of their own.
            if case.group != NO_PLANS or found["draft"] != NOT_RUNNABLE:
                rows.append(found)
            words = ", ".join(f"{way} {found[way]}" for way in WAYS if found[way])
            say(f"{case.family}/{case.name} ({number} of {len(chosen)}): {words}")
    return rows


def row(case: Case, pair: Pair) -> dict[str, Any]:
    """One case in all ways; what one process cannot run is not tried on two."""
    first = pair.judge(case, WAYS["draft"])
    about: dict[str, Any] = {
        "group": case.group,
        "family": case.family,
        "config": case.name,
        "model": first.model,
        "variant": "" if first.variant is None else first.variant,
    }
    runs = first.word != NOT_RUNNABLE
    for way, options in WAYS.items():
        each = first
        if way == "recipe":
            known = runs and case.key
            each = pair.judge(case, {"key": case.key}, first.variant) if known else Verdict("")
        elif way != "draft":
            each = pair.judge(case, options, first.variant) if runs else Verdict(NOT_RUNNABLE)
        about |= {
            way: each.word,
            f"{way}_output": _figure(each.output),
            f"{way}_gradient": _figure(each.gradient),
            f"{way}_said": " ".join(each.said.split())[:SHOWN],
            f"{way}_share": "" if each.share is None else round(each.share, 3),
            f"{way}_collectives": "" if each.collectives is None else each.collectives,
            f"{way}_seconds": each.seconds,
        }
    return about | (alone(case, first.variant) if runs else {})


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def counted(rows: Iterable[dict[str, Any]], way: str) -> str:
    """How many of each word, the best first."""
    counts = Counter(each[way] for each in rows)
    order = (EQUAL, *(word for word in SEVERITY if word != EQUAL))
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table comes to, in lines."""
    lines = []
    for group in GROUPS:
        own = [each for each in rows if each["group"] == group]
        ways = [way for way in WAYS if counted(own, way)]
        lines += [f"{group}: {way}: {counted(own, way)}" for way in ways]
    tried = [each["check_4"] for each in rows if each.get("check_4")]
    checked = [each for each in rows if each.get("seconds_4")]
    seconds, alone = (
        sorted(float(each[name]) for each in checked) or [0.0]
        for name in ("seconds_4", "seconds_alone_4")
    )
    lines.append(
        f"slapo.draft for 4 ranks: {tried.count('passes')} of {len(tried)} pass the check; seconds "
        f"without the check {alone[len(alone) // 2]:.2f} (median), {alone[-1]:.1f} (most), with it "
        f"{seconds[len(seconds) // 2]:.2f}, {seconds[-1]:.1f}"
    )
    return [*lines, beside_recipes(rows)]


def beside_recipes(rows: Sequence[dict[str, Any]]) -> str:
    """How many drafts shard as much as recipes do, with as few collectives."""
    both = [each for each in rows if each["recipe"] == each["draft"] == EQUAL]
    shares = [float(each["draft_share"]) - float(each["recipe_share"]) for each in both]
    counts = [int(each["draft_collectives"]) - int(each["recipe_collectives"]) for each in both]
    return (
        f"of {len(both)} models with a recipe, the draft shards as much in "
        f"{sum(share > -0.01 for share in shares)}, with as few collectives in "
        f"{sum(count <= 0 for count in counts)}"
    )


# --- what is kept --------------------------------------------------------------------------------
def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """None wrong; and as many equal as promised, as what is lacking to it."""
    found = []
    running = [each for each in rows if each["draft"] != NOT_RUNNABLE]
    for way, least in PROMISED.items():
        words = Counter(each[way] for each in running)
        found.append(Target(f"{way}: wrong in silence", words[WRONG], 0))
        lacking = len(running) - words[EQUAL]
        most = int((1 - least) * len(running))
        found.append(Target(f"{way}: not equal, of {len(running)}", lacking, most))
    refused = sum(each["check_4"] != "passes" for each in running)
    most = int((1 - PROMISED_CHECKS) * len(running))
    return [*found, Target(f"draft for 4 ranks: refused, of {len(running)}", refused, most)]


def write(rows: list[dict[str, Any]], command: str, folder: Path, whole: bool) -> list[Path]:
    """``drafts.csv`` and ``drafts.md``; the targets where all cases were asked."""
    names = list(dict.fromkeys(name for each in rows for name in each))
    rows = [{name: each.get(name, "") for name in names} for each in rows]
    paths = report.write("drafts", Result(rows, targets(rows) if whole else []), command, folder)
    table = folder / "drafts.md"
    table.write_text(markdown(rows, command))
    return [*paths, table]


def markdown(rows: Sequence[dict[str, Any]], command: str) -> str:
    """The table for people, with the message where something is not equal."""
    about = report.environment(command)
    lines = [
        "# Drafts, on two ranks and four",
        "",
        f"`{command}`, {about['date'][:10]}, torch {about['torch']}, transformers "
        f"{about['transformers']}, gloo. Small random models in float32, train mode; the largest "
        "difference from one process, relative to the largest gradient of the parameter.",
        "",
        *(f"- {line}" for line in summary(rows)),
        "",
        "Share: of the elements of all parameters, sharded. Collectives: of one forward and one "
        "backward pass. Four ranks: `slapo.draft(ranks=4)` in one process, seconds without its "
        "check and with it.",
        "",
        "| config | model | "
        + " | ".join(f"{way} | {_HEAD}" for way in WAYS)
        + " | four ranks | share | seconds | with check | said |",
        "|---|---|" + "---|" * 4 * len(WAYS) + "---|" * 5,
    ]
    for each in rows:
        said = " / ".join(
            dict.fromkeys(each[f"{way}_said"] for way in WAYS if each[way] not in (EQUAL, ""))
        ).replace("|", "\\|")
        cells = [each["config"], each["model"]]
        for way in WAYS:
            cells += [each[way], *(each[f"{way}_{name}"] for name in _HEAD.split(" | "))]
        cells += [
            each.get(name, "") for name in ("check_4", "share_4", "seconds_alone_4", "seconds_4")
        ]
        lines.append(f"| {' | '.join(map(str, [*cells, said]))} |")
    return "\n".join(lines) + "\n"


def stored(folder: Path = report.RESULTS) -> list[dict[str, str]]:
    """Rows that a run has left."""
    with (folder / "drafts.csv").open(newline="") as file:
        return list(csv.DictReader(file))
