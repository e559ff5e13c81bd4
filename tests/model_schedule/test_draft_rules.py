"""Axis rules against the rules of the check: what a draft shards, the check accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import slapo
from tests.check.test_operations import (
    ACROSS,
    BY_SIZE,
    LOOK_RIGHT,
    SLICE_BY_SLICE,
    Base,
    X,
    number_for_each_sample,
)

#: Functions of slices but for those that are written for a model that is split.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: inside
    for name, inside in {**SLICE_BY_SLICE, **ACROSS, **LOOK_RIGHT, **BY_SIZE}.items()
    if name not in ("random mask", "random coins") and not name.startswith("one coin for a sample")
}
FUNCTIONS["number for each sample"] = number_for_each_sample


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_what_a_draft_shards_passes_the_check(name: str) -> None:
    drafted = slapo.draft(Base(FUNCTIONS[name]), X)
    assert drafted.verdict is None
    # Numbers and branches that go by a size are seen where it is compared with one process's.
    by_size = ("over all ranks, and", "invalid for input of size", "must match the size")
    refused = [why for why in drafted.given_up if "check:" in why]
    assert all(any(said in why for said in by_size) for why in refused), refused
