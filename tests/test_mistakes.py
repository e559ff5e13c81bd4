"""What users are told of their mistakes: golden files, written by ``--update-golden``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo import Schedule
from slapo.framework_dialect import registry
from slapo.primitives import base
from tests.distributed import run_distributed
from tests.fingerprint import fingerprint
from tests.mistakes import TABLE, Mistake, of_entry_points, of_primitives, of_records, stack

__all__ = ["of_entry_points", "of_primitives", "of_records"]  # importing them has filled the table

GOLDEN = Path(__file__).parent / "golden" / "mistakes"


@dataclass
class Told:
    """What came of a mistake."""

    error: str
    message: str
    #: what of the schedule and the model is another thing than before
    changed: list[str]


def commit(function: Mistake) -> Told:
    """Make a mistake."""
    torch.manual_seed(0)
    sch, go_on = prepare(function)
    before = fingerprint(sch) if sch is not None else {}
    try:
        go_on()
    except Exception as error:
        after = fingerprint(sch) if sch is not None else {}
        changed = [key for key in before | after if before.get(key) != after.get(key)]
        # A KeyError's own text is its argument in quotes.
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        return Told(type(error).__name__, stable(text), changed)
    raise AssertionError(f"{function.__name__} went unnoticed")


@pytest.fixture(autouse=True)
def nothing_but_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages list what there is, and other tests, and examples, register more of it."""
    for name, primitive in list(base._REGISTRY.items()):
        if not base.is_builtin(primitive):
            monkeypatch.delitem(base._REGISTRY, name)
    for key in list(registry._DIALECTS):
        if key[1] not in ("deepspeed", "megatron", "torch"):
            monkeypatch.delitem(registry._DIALECTS, key)


def prepare(function: Mistake) -> tuple[Schedule | None, Callable[[], Any]]:
    """The schedule before the mistake, and the mistake itself."""
    if inspect.isgeneratorfunction(function):
        steps = function()
        return next(steps), lambda: next(steps, None)
    sch = stack()
    return sch, lambda: function(sch)


def stable(text: str) -> str:
    """A message without what differs between machines, runs and versions of this file."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = re.sub(r"\S*/(\w+\.py):\d+", r"\1", text)
    text = re.sub(r"\S*/(\w+\.json)", r"\1", text)
    return re.sub(r"by \S+ where \S+ is allowed", "by ... where ... is allowed", text)


def commit_all(rank: int, world_size: int) -> dict[str, Told]:
    chosen = [f for (_, ranks), functions in TABLE.items() if ranks > 1 for f in functions]
    return {function.__name__: commit(function) for function in chosen}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Told]]:
    """Of all mistakes that need two ranks: one job."""
    return run_distributed(commit_all, 2)


def source_of(function: Mistake) -> str:
    """The lines that are wrong."""
    lines = inspect.getsource(function).splitlines()
    begin = "yield" if inspect.isgeneratorfunction(function) else "def "
    start = next(k for k, line in enumerate(lines) if line.strip().startswith(begin))
    return textwrap.dedent("\n".join(lines[start + 1 :])).strip("\n")


def check(group: str, told: dict[Mistake, Told], update: bool) -> None:
    """Compare with the golden file."""
    entries = [
        f"# {function.__name__.replace('_', ' ')}\n"
        f"{textwrap.indent(source_of(function), '    ')}\n{it.error}: {it.message}\n"
        for function, it in told.items()
    ]
    text = "\n".join(entries)
    file = GOLDEN / f"{group}.txt"
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"{file} is missing; run pytest with --update-golden"
    assert text == file.read_text()


@pytest.mark.parametrize("group", [group for group, ranks in TABLE if ranks == 1])
def test_what_users_are_told(group: str, update_golden: bool) -> None:
    told = {}
    for function in TABLE[group, 1]:
        told[function] = commit(function)
        if dist.is_initialized():
            dist.destroy_process_group()
    check(group, told, update_golden)
    check_parts(told)


@pytest.mark.distributed
@pytest.mark.parametrize("group", [group for group, ranks in TABLE if ranks > 1])
def test_what_users_of_two_ranks_are_told(
    group: str, on_two_ranks: list[dict[str, Told]], update_golden: bool
) -> None:
    first, second = ({f: told[f.__name__] for f in TABLE[group, 2]} for told in on_two_ranks)
    check(f"{group}_on_two_ranks", first, update_golden)
    check_parts(first)
    check_parts(second)
    assert [it.error for it in first.values()] == [it.error for it in second.values()]


# --- the parts of a message ----------------------------------------------------------------------
#: Says what to do, or what there is to choose from.
REMEDY = re.compile(
    r"(?:[;:,.?] |- )(?:(?:and|or) )?"
    r"(?:add|apply|bind|build|call|choose|create|cut|decompose|derive|fix|fuse|keep|launch|leave|look"
    r"|make|name|pad|pass|pick|replace|replay|return|set|shard|take|trace|use|write)\b"
    r"|did you mean"
    r"|\b(?:known|nearest paths|there|classes|parameters|primitives) are |it has \['|\btakes [([]"
    r"|children are items|the module's attribute is|\.trace\(flatten=True\)|\.decompose\(\)"
    r"|primitives applied there:\n|must be the same on every rank"
)
#: A value: in quotes, in brackets, a number, or what was given.
VALUE = re.compile(r"'[^']+'|\"[^\"]+\"|\[.*\]|\d|\bgot \w+|\w+=\w+")


def check_parts(told: dict[Mistake, Told]) -> None:
    """What was wrong, the values and a remedy, as far as a machine can see them."""
    for function, it in told.items():
        name = function.__name__
        assert it.changed == [], name
        assert VALUE.search(it.message), (name, it.message)
        assert REMEDY.search(it.message), (name, it.message)


def test_the_table() -> None:
    names = [function.__name__ for functions in TABLE.values() for function in functions]
    assert len(names) == len(set(names))
    files = {f"{group}{'_on_two_ranks' if ranks > 1 else ''}.txt" for group, ranks in TABLE}
    assert {file.name for file in GOLDEN.iterdir()} == files
    assert set(base._BUILTIN) <= {group for group, _ in TABLE}
