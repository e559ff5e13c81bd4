"""What users are told of their mistakes: ``tests/golden/mistakes``.

A file has the mistakes with one thing that users call. An entry is a title, lines of code, and what
is said of them, which ``--update-golden`` writes. Up to a ``yield`` all is well, after it comes the
mistake; what it yields is the schedule that the mistake must not change, if there is one. Without a
``yield`` the lines are about `sch`, a schedule of ``Stack``. Names are in :mod:`tests.mistakes`.
"""

import inspect
import re
import tempfile
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
from tests import mistakes
from tests.distributed import run_distributed
from tests.fingerprint import fingerprint

GOLDEN = Path(__file__).parent / "golden" / "mistakes"
ON_TWO_RANKS = sorted(GOLDEN.glob("*_on_two_ranks.txt"))
ALONE = sorted({*GOLDEN.iterdir()} - {*ON_TWO_RANKS})
#: Title, code, and what is said, which begins a line with the class of an error.
ENTRY = re.compile(
    r"^# (.+)\n((?:    .*\n|\n(?=\n?    ))+)((?:(?!# |    ).*\n)(?:(?!# ).*\n)*)?", re.M
)


@dataclass
class Mistake:
    """An entry of a file."""

    title: str
    code: str
    function: Callable[..., Any]


def read(file: Path) -> list[Mistake]:
    text, found = file.read_text(), []
    for entry in ENTRY.finditer(text):
        title, code, _ = entry.groups()
        name = re.sub(r"\W", "_", title)
        # The lines have the numbers that they have in the file.
        source = "\n" * text[: entry.start()].count("\n") + f"def {name}(sch=None):\n{code}"
        names = {**vars(mistakes), **mistakes.OTHERS}
        exec(compile(source, str(file), "exec"), names)
        found.append(Mistake(title, code, names[name]))
    return found


@dataclass
class Told:
    """What came of a mistake."""

    error: str
    message: str
    #: what of the schedule and the model is another thing than before
    changed: list[str]


def commit(mistake: Mistake) -> Told:
    """Make a mistake."""
    torch.manual_seed(0)
    sch, go_on = prepare(mistake.function)
    before = fingerprint(sch) if sch is not None else {}
    try:
        go_on()
    except Exception as error:
        after = fingerprint(sch) if sch is not None else {}
        changed = [key for key in before | after if before.get(key) != after.get(key)]
        # A KeyError's own text is its argument in quotes.
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        return Told(type(error).__name__, stable(text), changed)
    raise AssertionError(f"{mistake.title} went unnoticed")


def prepare(function: Callable[..., Any]) -> tuple[Schedule | None, Callable[[], Any]]:
    """The schedule before the mistake, and the mistake itself."""
    if inspect.isgeneratorfunction(function):
        steps = function()
        return next(steps), lambda: next(steps, None)
    sch = mistakes.stack()
    return sch, lambda: function(sch)


def stable(text: str) -> str:
    """A message without what differs between machines, runs and versions of a file."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = re.sub(r"\S*/(\w+\.(?:py|txt)):\d+", r"\1", text)
    text = re.sub(r"\S*/(\w+\.json)", r"\1", text)
    text = text.replace(str(Path.cwd()), "here")
    text = re.sub(rf"{tempfile.gettempdir()}/\w+/", "", text)
    return re.sub(
        r"by \S+( after .*)? where \S+ is allowed", r"by ...\1 where ... is allowed", text
    )


@pytest.fixture(autouse=True)
def nothing_but_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages list what there is, and other tests, and examples, register more of it."""
    for name, primitive in list(base._REGISTRY.items()):
        if not base.is_builtin(primitive):
            monkeypatch.delitem(base._REGISTRY, name)
    for key in list(registry._DIALECTS):
        if key[1] not in ("deepspeed", "megatron", "torch"):
            monkeypatch.delitem(registry._DIALECTS, key)


def commit_all(rank: int, world_size: int) -> dict[str, list[Told]]:
    return {file.stem: [commit(each) for each in read(file)] for file in ON_TWO_RANKS}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[Told]]]:
    """Of all mistakes that need two ranks: one job."""
    return run_distributed(commit_all, 2)


def check(file: Path, told: list[Told], update: bool) -> None:
    """Compare with the golden file."""
    entries = [
        f"# {each.title}\n{each.code}{it.error}: {it.message}\n"
        for each, it in zip(read(file), told, strict=True)
    ]
    text = "\n".join(entries)
    if update:
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("file", ALONE, ids=lambda file: file.stem)
def test_what_users_are_told(file: Path, update_golden: bool) -> None:
    if file.stem == "tune":
        pytest.importorskip("optuna")
    told = []
    for each in read(file):
        told.append(commit(each))
        if dist.is_initialized():
            dist.destroy_process_group()
    check(file, told, update_golden)
    check_parts(file, told)


@pytest.mark.distributed
@pytest.mark.parametrize("file", ON_TWO_RANKS, ids=lambda file: file.stem)
def test_what_users_of_two_ranks_are_told(
    file: Path, on_two_ranks: list[dict[str, list[Told]]], update_golden: bool
) -> None:
    first, second = (told[file.stem] for told in on_two_ranks)
    check(file, first, update_golden)
    check_parts(file, first)
    check_parts(file, second)
    for one, other in zip(first, second, strict=True):
        assert one.error == other.error
        assert one.message == other.message.replace("ranks are [1]", "ranks are [0]")


# --- the parts of a message ----------------------------------------------------------------------
#: Says what to do, or what there is to choose from.
REMEDY = re.compile(
    r"(?:[;:,.?] |- )(?:(?:and|or) )?"
    r"(?:add|apply|bind|build|call|change|check|checkpoint|choose|connect|copy|create|cut|declare"
    r"|decompose|derive|draft|fix|fuse|give|install|keep|launch|leave|look|loosen|make|move|name"
    r"|number|pad|pass|pick|put|raise|remove|rename|replace|replay|restore|return|run|schedule|see"
    r"|set|shard|start|take|trace|use|write)\b"
    r"|did you mean"
    r"|\b(?:known|nearest paths|there|candidates|classes|parameters|primitives) are |it has \['"
    r"|\btakes (?:[([]|a )|must be (?:a|one number)|must return|may name|; a pattern calls"
    r"|the graph calls '|supports \['|sizes (?:are|that fit: )|are required: |but the mesh has "
    r"|children are items|the module's attribute is|\.trace\(flatten=True\)|\.decompose\(\)"
    r"|primitives applied there:\n|must be the same on every rank|needs? (?:DeepSpeed|backward=)"
    # Of files that are damaged, which only another copy replaces.
    r"|is damaged|match its files|do not exist|not completed it|no weights|\) there, \("
)
#: A value: in quotes, in brackets, a number, a class, or what was given.
VALUE = re.compile(
    r"'[^']+'|\"[^\"]+\"|\[.*\]|\(\)|\d|\b(?:got|(?:is|made|returned) an?|is already) \w+"
    r"|\w+=|\w+[._/]\w+|<lambda>|: \w+ and \w+;|\b[A-Z][a-z]+[A-Z]\w+|\bon [A-Z]\w+:|is inf\b"
    r"|\w+ there, "
)


def check_parts(file: Path, told: list[Told]) -> None:
    """What was wrong, the values and a remedy, as far as a machine can see them."""
    for each, it in zip(read(file), told, strict=True):
        assert it.changed == [], each.title
        assert VALUE.search(it.message), (each.title, it.message)
        assert REMEDY.search(it.message), (each.title, it.message)


def test_every_primitive_has_mistakes() -> None:
    assert set(base._BUILTIN) <= {
        file.stem.removesuffix("_on_two_ranks") for file in GOLDEN.iterdir()
    }
