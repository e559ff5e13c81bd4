"""Runs the Python of the README and of ``docs``, and compares what it prints with what they show.

The blocks of a page run in order and share one namespace. A block ```` ```text ```` right after one
of Python is its output; ``...`` in it stands for anything. A comment in front of a block of Python
says how it is run:

``<!-- not run -->``
    Not at all.
``<!-- 2 processes -->``
    On so many ranks of one gloo group, in a namespace of such blocks; rank 0 is compared. The group
    is there already, so that ``init_process_group`` and ``destroy_process_group`` do nothing.
``<!-- examples/file.py -->``
    Not here: the block is that file, and the tests of the examples run it.
"""

import contextlib
import doctest
import io
import re
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.nn import functional

import slapo
from slapo.derive import rules
from slapo.model_schedule import registry
from slapo.primitives import base
from slapo.verify.placement import call
from tests.distributed import run_distributed

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]
TEXTS = [*PAGES, "CONTRIBUTING.md"]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*) -->\n)?"
    r"```python\n(?P<code>.*?)^```\n"
    r"(?:\n*```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of Python.

    Parameters
    ----------
    line
        Where its code begins in the page.
    code, output
        The block, and what it shall print.
    processes
        How many run it; 0 for none.
    file
        Which file of the repository it shows.
    """

    line: int
    code: str
    output: str
    processes: int
    file: str = ""


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            line=text[: found.start("code")].count("\n") + 1,
            code=found["code"],
            output=found["output"] or "",
            processes=_processes(found["mark"]),
            file=found["mark"] if _is_file(found["mark"]) else "",
        )
        for found in _BLOCK.finditer(text)
    ]


def _is_file(mark: str | None) -> bool:
    return mark is not None and mark.endswith(".py")


def _processes(mark: str | None) -> int:
    if mark is None:
        return 1
    counted = re.fullmatch(r"(\d+) processes", mark)
    if counted is None and mark != "not run" and not _is_file(mark):
        raise ValueError(
            f"unknown mark {mark!r}; known are 'not run', '<number> processes' and a file"
        )
    return int(counted[1]) if counted else 0


def run_blocks(page: str, processes: int) -> Iterator[tuple[Block, str]]:
    """Run those blocks of a page that so many processes run; gives what each prints."""
    # Captures and records import what a page defines.
    module = sys.modules["page"] = types.ModuleType("page")
    for block in blocks_of(page):
        if block.processes != processes:
            continue
        # In front of it as many empty lines as the page has: tracebacks show the right one.
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, vars(module))
        yield block, printed.getvalue()


def run_blocks_on_rank(rank: int, world_size: int, page: str) -> list[tuple[Block, str]]:
    """The same on one of several ranks."""
    with mock.patch.multiple(
        dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT
    ):
        return list(run_blocks(page, world_size))


def check_output(page: str, block: Block, printed: str) -> None:
    """Fail unless a block printed what the page shows."""
    checker = doctest.OutputChecker()
    if checker.check_output(block.output, printed, doctest.ELLIPSIS):
        return
    example = doctest.Example(block.code, block.output)
    difference = checker.output_difference(example, printed, doctest.REPORT_NDIFF)
    pytest.fail(f"{page}, block at line {block.line}:\n{difference}", pytrace=False)


def skip_without_packages(page: str) -> None:
    """Skip a page whose blocks import what is not installed."""
    if any(re.search(r"^from (transformers|examples)\b", b.code, re.M) for b in blocks_of(page)):
        # Before the first ranks start: they are forked from a process that has it, then.
        pytest.importorskip("transformers.modeling_utils")


@pytest.fixture
def registries_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages may register primitives, recipes and rules, and set seeds, for themselves alone."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))
    # DeepSpeed's ZeRO 3 puts a function of its own there, for the whole process.
    linear = mock.patch.object(functional, "linear", functional.linear)
    with mock.patch.dict(call.RULES), mock.patch.dict(rules.RULES), linear:
        yield
    slapo.get_rng_tracker().reset()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("registries_kept")
def test_blocks_print_what_the_page_shows(page: str) -> None:
    skip_without_packages(page)
    for block, printed in run_blocks(page, processes=1):
        check_output(page, block, printed)


_PARALLEL = [
    (page, count)
    for page in PAGES
    for count in sorted({block.processes for block in blocks_of(page)} - {0, 1})
]


@pytest.mark.distributed
@pytest.mark.parametrize(("page", "processes"), _PARALLEL)
def test_blocks_on_several_processes(page: str, processes: int) -> None:
    skip_without_packages(page)
    for block, printed in run_distributed(run_blocks_on_rank, processes, page)[0]:
        check_output(page, block, printed)


_FILES = [(page, block) for page in PAGES for block in blocks_of(page) if block.file]


@pytest.mark.parametrize(("page", "block"), _FILES, ids=[block.file for _, block in _FILES])
def test_shown_files_are_those_of_the_repository(page: str, block: Block) -> None:
    if block.code != (ROOT / block.file).read_text():
        pytest.fail(f"{page}, block at line {block.line}: {block.file} says something else")


def test_all_primitives_are_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [name for name in base._BUILTIN if f"| `.{name}(" not in text]
    assert not missing


def test_all_names_are_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.rst").read_text()
    named = set(re.findall(r":: (?:[\w.]+\.)?(\w+)", text))
    assert set(slapo.__all__) <= named
    assert {base._REGISTRY[name].__name__ for name in base._BUILTIN} <= named


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing


def test_tables_of_the_site_have_rows() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "conf.py"))["_table"]
    text = (ROOT / "docs/tables.md").read_text()
    marks = [*re.finditer(r"<!-- table (\w+): (.*) -->", text)]
    assert len(marks) == text.count("<!-- table")
    for mark in marks:
        head, _, *rows = table(mark).splitlines()
        assert len(rows) > 20, mark[0]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {head.count("|")}, mark[0]


@pytest.mark.parametrize("page", TEXTS)
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named <= known
