"""Spaces: what they ask for, how many points they hold, what is refused."""

import time
from typing import Any

import pytest

from slapo.autotune import Refused, Space
from slapo.autotune.space import Choices, survey
from tests.autotune.landscape import layouts


def test_all_points_are_found_once() -> None:
    found = survey(layouts)
    assert found.size == len(found.points) == 1960
    assert len({point.key for point in found.points}) == found.size
    assert found.is_complete
    assert all(p.values["tp"] * p.values["pp"] * p.values["dp"] == 64 for p in found.points)


def test_a_refusal_leaves_out_what_comes_after_it() -> None:
    asked = []

    def space(choose: Choices) -> dict[str, Any] | None:
        tp = choose("tp", [1, 2, 3])
        if tp == 3:
            raise Refused("8 heads on 3 ranks")
        asked.append(tp)
        micro = choose("micro", [1, 2])
        return None if (tp, micro) == (2, 2) else {"tp": tp, "micro": micro}

    found = survey(space)
    assert [tuple(point.values.values()) for point in found.points] == [(1, 1), (1, 2), (2, 1)]
    assert found.refused == {"8 heads on 3 ranks": 1, "the space returned None": 1}
    assert asked == [1, 1, 2, 2]


def test_a_constraint_leaves_points_out() -> None:
    assert survey(layouts, lambda point: point["dp"] == 64).size == 3 * 5 * 4 * 2


def test_of_large_spaces_points_are_drawn() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        return {name: choose(name, range(10)) for name in "abcdefgh"}

    found = survey(space, limit=300)
    assert not found.is_complete
    assert found.size == 10**8
    assert len({point.values["a"] for point in found.points}) == 10
    assert [p.key for p in survey(space, limit=300).points] == [p.key for p in found.points]


def test_the_size_of_large_spaces_is_estimated() -> None:
    def space(choose: Choices) -> dict[str, Any]:
        first = choose("first", range(20))
        return {"first": first, "rest": choose("rest", range(1 + 10 * first))}

    exact = survey(space).size
    assert exact == 20 + 10 * 190
    assert survey(space, limit=500).size == pytest.approx(exact, rel=0.15)


def test_spaces_that_ask_the_same_have_the_same_questions() -> None:
    def other(choose: Choices) -> dict[str, Any]:
        return {**layouts(choose), "bucket": choose("bucket", [1, 2])}

    assert survey(layouts).questions == survey(layouts, lambda p: p["tp"] > 1).questions
    assert survey(layouts).questions != survey(other).questions


def test_long_lists_of_candidates_have_short_names() -> None:
    found = survey(lambda choose: {"a": choose("a", range(1000))})
    (name,) = found.questions
    assert name.startswith("a of 0 .. 999 (1000, ")


def test_spaces_of_symbols() -> None:
    space = Space({"a": 2})
    first = space.create_symbol("a", [1, 2])
    assert space.create_symbol("a", [1, 2]) is first is space["a"]
    assert space.is_fixed()
    second = space.create_symbol("b", [first.val, 5])
    assert not space.is_fixed()
    assert space.next_open() is second
    assert ("b" in space, "c" in space, len(space)) == (True, False, 2)
    assert space.to_dict() == {"a": 2, "b": 2}


def test_candidates_that_can_be_read_once() -> None:
    assert survey(lambda choose: {"k": choose("k", (n for n in (1, 2)))}).size == 2


def test_equal_candidates_keep_their_types() -> None:
    """As questions are kept, and 1, 1.0 and True are equal."""
    for values in ([1, 2], [1.0, 2.0], [True, 2]):
        point = survey(lambda choose, values=values: {"a": choose("a", values)}).points[0]  # type: ignore[misc]
        assert type(point.values["a"]) is type(values[0])


def test_long_lists_of_candidates_are_read_once() -> None:
    started = time.process_time()
    survey(lambda choose: {"a": choose("a", range(10_000)), "b": choose("b", range(10_000))})
    assert time.process_time() - started < 5
