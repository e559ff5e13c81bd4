"""Axis rules against the rules of the check: what a draft shards, the check accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import slapo
from tests.check.test_operations import ACROSS, BY_SIZE, LOOK_RIGHT, SLICE_BY_SLICE, Base, X

#: Functions of slices, by their names or numbers.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{table}-{number if inside.__name__ == '<lambda>' else inside.__name__}": inside
        for table, functions in {"by slices": SLICE_BY_SLICE, "across": ACROSS}.items()
        for number, inside in enumerate(functions)
    },
    **LOOK_RIGHT,
    **BY_SIZE,
}


def draws_for_slices(name: str) -> bool:
    """Return True for functions that are written for a model that is split."""
    is_random = name in ("by slices-random_mask", "by slices-random_coins")
    return is_random or name.startswith("one coin for a sample")


@pytest.mark.parametrize("name", sorted(n for n in FUNCTIONS if not draws_for_slices(n)))
def test_what_a_draft_shards_passes_the_check(name: str) -> None:
    drafted = slapo.draft(Base(FUNCTIONS[name]), X)
    assert drafted.verdict is None
    # Numbers and branches that go by a size are seen where it is compared with one process's.
    by_size = ("over all ranks, and", "invalid for input of size", "must match the size")
    refused = [why for why in drafted.given_up if "check:" in why]
    assert all(any(said in why for said in by_size) for why in refused), refused
