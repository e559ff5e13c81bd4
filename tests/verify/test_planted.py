"""Verify catches planted mistakes and names the right place; it lets right schedules pass.

A part of the two tables; ``python -m benchmark verify`` runs all of them.
"""

import logging
from collections.abc import Iterator

import pytest

from tests.distributed import run_distributed
from tests.verify.planted import PLANTED, caught, is_right
from tests.verify.right import RIGHT, refused

#: Of the mistakes in one process all run; of those on several ranks, and of the right schedules,
#: every one of so many.
EVERY = 3

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def messages(rank: int, world: int, names: list[str]) -> list[tuple[str, str]]:
    return [caught(name) for name in names]


def refusals(rank: int, world: int, names: list[str]) -> list[str]:
    return [refused(name) for name in names]


def of_ranks(table: dict[str, object], ranks: int, every: int = 1) -> list[str]:
    return [name for name, case in table.items() if case.ranks == ranks][::every]  # type: ignore[attr-defined]


def check_planted(names: list[str], told: list[tuple[str, str]]) -> None:
    found = dict(zip(names, told, strict=True))
    assert [name for name, (message, _) in found.items() if not message] == []
    assert {name: said for name, said in found.items() if not is_right(name, said[1])} == {}


def test_mistakes_in_one_process() -> None:
    names = of_ranks(PLANTED, 1)
    check_planted(names, messages(0, 1, names))


def test_mistakes_on_two_ranks() -> None:
    names = of_ranks(PLANTED, 2, EVERY)
    for told in run_distributed(messages, 2, names):
        check_planted(names, told)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_right_schedules_pass(ranks: int) -> None:
    names = of_ranks(RIGHT, ranks, EVERY)
    told = refusals(0, 1, names) if ranks == 1 else run_distributed(refusals, ranks, names)[0]
    assert dict(zip(names, told, strict=True)) == dict.fromkeys(names, "")
