"""Random schedules: the check says what two processes compute. More by ``tests.check.fuzz``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.check.fuzz import compared, is_false_alarm, is_miss


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["tensor", "sequence", "shared"])
@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 200), marks=pytest.mark.wide)], ids=len
)
def test_no_miss_and_no_false_alarm(kind: str, seeds: range) -> None:
    pairs = compared(kind, list(seeds))
    assert [said for said, true in pairs if is_miss(said, true)] == []
    assert [said for said, true in pairs if is_false_alarm(said, true)] == []
    counts = Counter((said.said, true.said) for said, true in pairs)
    assert counts["accepted", "equal"] >= len(seeds) // 8, counts  # neither always yes
    assert counts["refused", "wrong"] >= len(seeds) // 12, counts  # nor always no
