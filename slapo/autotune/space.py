"""Search spaces in plain Python: a function that asks for values and returns a point."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Maximum number of enumerated points; a larger space is sampled at random.
LIMIT = 4000


class TuneError(ValueError):
    """A search that cannot run as requested; the message names the fix.

    Examples
    --------
    >>> from slapo.autotune import tune
    >>> tune(lambda choose: None, run=lambda point: 1.0)
    Traceback (most recent call last):
    ...
    slapo.autotune.space.TuneError: the space is empty: the space returned None (1 times); ...
    """


class Refused(Exception):
    """Exception for a point that cannot run, raised in a space, constraint, prediction or trial.

    Examples
    --------
    >>> def space(choose):
    ...     tp = choose("tp", [1, 2, 3])
    ...     if 8 % tp:
    ...         raise Refused(f"8 heads cannot be split over {tp} ranks")
    ...     return {"tp": tp}
    >>> [point.values for point in survey(space).points]
    [{'tp': 1}, {'tp': 2}]
    """


@dataclass(frozen=True)
class Question:
    """A value that a space asks for: its candidates, and the parameter name in the study.

    The name contains the candidates, since a study refuses parameters with changing choices.
    """

    name: str
    values: tuple[Any, ...]
    key: str
    is_ordered: bool

    def label(self, position: int) -> int | str:
        """Return an answer in the study's form: the index of a number, or a value's text."""
        return position if self.is_ordered else json.dumps(self.values[position])


def _question(name: str, values: Sequence[Any]) -> Question:
    if isinstance(values, str | bytes | set | frozenset):
        raise TuneError(
            f"choose({name!r}, {values!r}): the candidates are a {type(values).__name__}, not an "
            "ordered list of values; write [...]"
        )
    kept = values if isinstance(values, range) else tuple(values)
    try:
        return _cached(name, kept, () if isinstance(kept, range) else tuple(map(type, kept)))
    except TypeError:  # lists as candidates are not hashable
        return _cached.__wrapped__(name, kept, ())


# A survey asks thousands of times, and a long list takes a millisecond. The key includes the types,
# since 1, 1.0 and True are equal.
@functools.lru_cache(maxsize=256)
def _cached(name: str, values: Sequence[Any], types: tuple[type, ...]) -> Question:
    shown = json.dumps(list(values))
    if len(shown) > 100:
        digest = hashlib.sha256(shown.encode()).hexdigest()[:8]
        first, last = json.dumps(values[0])[:30], json.dumps(values[-1])[:30]
        shown = f"{first} .. {last} ({len(values)}, {digest})"
    return Question(name, tuple(values), f"{name} of {shown}", are_numbers(values))


def are_numbers(values: Sequence[Any]) -> bool:
    """Return whether all values are numbers, which have an order."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


class Choices:
    """Argument of a space function; call it, or its method ``choose``, to ask for a value.

    Parameters
    ----------
    pick
        Function from a question to the index of the answer among the candidates.

    Examples
    --------
    >>> choose = Choices(lambda question: 0)
    >>> choose("tp", [1, 2, 4]), choose.choose("kernel", ["flash", "eager"])
    (1, 'flash')
    """

    def __init__(self, pick: Callable[[Question], int]) -> None:
        self._pick = pick
        self.taken: dict[str, tuple[Question, int]] = {}

    def choose(self, name: str, values: Sequence[Any]) -> Any:
        """Ask for one of `values`, which may depend on earlier answers.

        Parameters
        ----------
        name
            Name of the value. The same question has the same answer within a point.
        values
            Candidates, of types that JSON supports. An empty list refuses the point.
        """
        question = _question(name, values)
        if not question.values:
            raise Refused(f"{name!r} has no candidates")
        if name not in self.taken:
            self.taken[name] = question, self._pick(question)
        asked, position = self.taken[name]
        if asked != question:
            raise TuneError(
                f"{name!r} was chosen from {list(asked.values)} and then from "
                f"{list(question.values)} in the same point; rename the second choice"
            )
        return asked.values[position]

    __call__ = choose

    @property
    def values(self) -> dict[str, Any]:
        """Name -> the chosen value."""
        return {name: asked.values[position] for name, (asked, position) in self.taken.items()}


SpaceFunction = Callable[[Choices], "Mapping[str, Any] | None"]


@dataclass(frozen=True)
class Point:
    """The dict of a space, its answers by name, and these in the study's form."""

    values: dict[str, Any]
    choices: dict[str, Any]
    parameters: dict[str, int | str]

    @functools.cached_property
    def key(self) -> str:
        """Text that is equal for equal values."""
        return point_key(self.values)


def point_key(values: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal points, whatever the order of their names.

    Examples
    --------
    >>> point_key({"b": 1.0, "a": [2]}) == point_key({"a": [2], "b": 1})
    True
    """
    return json.dumps(_plain(values), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # A value that went through a database or a command line may come back as the other type.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def make_point(
    space: SpaceFunction, choices: Choices, constraint: Callable[[Any], Any] | None = None
) -> Point:
    """Get one point of a space; raises `Refused` for one that cannot run."""
    with configured("the space", lambda: f", after it chose {choices.values}"):
        values = space(choices)
    if values is None:
        raise Refused("the space returned None")
    with configured("the space", lambda: f", as it returned {values}"):
        json.dumps(dict(values))
    point = Point(
        dict(values),
        choices.values,
        {q.key: q.label(position) for q, position in choices.taken.values() if len(q.values) > 1},
    )
    with configured("the constraint", lambda: f", at {point.values}"):
        if constraint is not None and not constraint(dict(point.values)):
            raise Refused("the constraint is not met")
    return point


@contextlib.contextmanager
def configured(what: str, where: Callable[[], str] = str) -> Iterator[None]:
    """Turn errors of a user's function into a `TuneError` that names the function."""
    try:
        yield
    except (Refused, TuneError):
        raise
    except (Exception, SystemExit) as error:
        raise TuneError(
            f"{what} failed with {type(error).__name__}: {error}{where()}; raise "
            "slapo.autotune.Refused for invalid points"
        ) from error


def source_of(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source; empty for a method or partial, which has state."""
    if inspect.isfunction(function):
        with contextlib.suppress(OSError, TypeError):
            return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    return ""


@dataclass
class Survey:
    """The points of a space.

    If the survey is not complete, `points` are drawn at random and `size` is an estimate.
    `refused` counts points and branches by reason, `questions` are the parameters of the study.
    """

    points: list[Point] = field(default_factory=list)
    size: int = 0
    is_complete: bool = True
    refused: Counter[str] = field(default_factory=Counter)
    questions: set[str] = field(default_factory=set)


def survey(
    space: SpaceFunction,
    constraint: Callable[[Any], Any] | None = None,
    limit: int = LIMIT,
    seed: int = 0,
) -> Survey:
    """Enumerate a space, or draw `limit` points of a larger one; raise on an empty space."""
    found = _walk(space, constraint, limit)
    if not found.is_complete:
        _draw(space, constraint, limit, seed, found)
    if not found.points:
        reasons = "; ".join(f"{text} ({n} times)" for text, n in found.refused.most_common(3))
        what = "the space is empty"
        if not found.is_complete:
            what = f"none of {sum(found.refused.values())} samples of this large space gave a point"
        raise TuneError(
            f"{what}: {reasons or 'nothing was asked for'}; loosen the constraint or give more "
            "candidates"
        )
    return found


def _walk(space: SpaceFunction, constraint: Callable[[Any], Any] | None, limit: int) -> Survey:
    """Enumerate depth first: increment the last answer with a next candidate, restart later ones.

    A refusal cuts off all questions after it.
    """
    found, seen, path = Survey(), set[str](), list[int]()
    # Refused points do not count toward the limit, and a space may refuse almost all.
    for _ in range(4 * limit):
        answers = iter(path)
        choices = Choices(lambda question, answers=answers: next(answers, 0))  # type: ignore[misc]
        try:
            point = make_point(space, choices, constraint)
            if point.key not in seen:
                seen.add(point.key)
                found.points.append(point)
        except Refused as reason:
            found.refused[str(reason)] += 1
        taken = list(choices.taken.values())
        found.questions.update(question.key for question, _ in taken)
        while taken and taken[-1][1] + 1 == len(taken[-1][0].values):
            taken.pop()
        if not taken:
            found.size = len(found.points)
            return found
        path = [position for _, position in taken]
        path[-1] += 1
        if len(found.points) >= limit:
            break
    found.is_complete = False
    return found


def _draw(
    space: SpaceFunction,
    constraint: Callable[[Any], Any] | None,
    limit: int,
    seed: int,
    found: Survey,
) -> None:
    """Replace the points by random ones, and estimate the size of the space.

    The product of the numbers of candidates along a random walk is, on average, the number of
    walks (Knuth, Estimating the efficiency of backtrack programs, 1975).
    """
    generator = random.Random(seed)
    points: dict[str, Point] = {}
    total = 0.0
    for _ in range(limit):
        choices = Choices(lambda question: generator.randrange(len(question.values)))
        try:
            point = make_point(space, choices, constraint)
        except Refused as reason:
            if not found.points:  # for the error message of an empty space
                found.refused[str(reason)] += 1
            continue
        points.setdefault(point.key, point)
        total += math.prod(len(question.values) for question, _ in choices.taken.values())
    found.points = list(points.values()) or found.points
    found.size = max(round(total / limit), len(found.points))
