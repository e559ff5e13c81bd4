"""How two records differ, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from slapo.history import Record, spelled

_Step = tuple[int, Record]


def describe_difference(first: Sequence[Record], second: Sequence[Record]) -> str:
    """A line for each difference, in order of the steps; empty where there is none."""
    only_first, only_second = _unmatched(first, second)
    found = list(_moved(only_first, only_second))
    found += _changed(only_first, only_second)
    found += [(step, 0, _missing(step, record, "second")) for step, record in only_first]
    found += [(step, 1, _missing(step, record, "first")) for step, record in only_second]
    return "\n".join(line for *_, line in sorted(found))


def _unmatched(
    first: Sequence[Record], second: Sequence[Record]
) -> tuple[list[_Step], list[_Step]]:
    """The steps of each that have no partner at the same place of the other."""
    one, other = ([(record.call(), record.identity) for record in side] for side in (first, second))
    left: list[_Step] = []
    right: list[_Step] = []
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind != "equal":
            left += ((step, first[step]) for step in range(start, end))
            right += ((step, second[step]) for step in range(other_start, other_end))
    return left, right


def _moved(left: list[_Step], right: list[_Step]) -> Iterator[tuple[int, int, str]]:
    """Takes the equal ones that stand elsewhere out of both."""
    for step, record in list(left):
        partner = next((pair for pair in right if pair[1].same_as(record)), None)
        if partner is not None:
            left.remove((step, record))
            right.remove(partner)
            yield step, 0, f"step {step}: {record.call()} is step {partner[0]} in the second"


def _changed(left: list[_Step], right: list[_Step]) -> Iterator[tuple[int, int, str]]:
    """Takes those of one primitive on one module out of both, in their order."""
    for step, record in list(left):
        key = (record.path, record.primitive)
        partner = next((p for p in right if (p[1].path, p[1].primitive) == key), None)
        if partner is not None:
            left.remove((step, record))
            right.remove(partner)
            yield step, 0, _difference(step, record, *partner)


def _difference(step: int, first: Record, other_step: int, second: Record) -> str:
    where = f"step {step}" + (f" ({other_step} in the second)" if other_step != step else "")
    names = [*first.arguments, *(n for n in second.arguments if n not in first.arguments)]
    told = [
        f"{name} is {first.arguments.get(name, 'not given')} in the first and "
        f"{second.arguments.get(name, 'not given')} in the second"
        for name in names
        if first.arguments.get(name) != second.arguments.get(name)
    ]
    same_names = "a module or function of that name is another one in the second"
    call = f"{spelled(first.path)}.{first.primitive}" if told else first.call()
    return f"{where}: {call}: {'; '.join(told) or same_names}"


def _missing(step: int, record: Record, side: str) -> str:
    of = "" if side == "second" else " of the second"
    return f"step {step}{of}: {record.call()} is missing in the {side}"
