"""Right schedules of which one line is left out: mistakes that were not chosen by hand.

Of the first layers nothing is left out, as the second ones are alike. Left out as well are lines of
``fork_rng``, which do not change numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from slapo.verify.numeric.harness import gathered_gradients
from tests.sharding.families import FAMILIES, Steps
from tests.verify.models import build, inputs
from tests.verify.planted import place_of

_LINES = ("shard", "sync", "annotate", "set")


@dataclass(frozen=True)
class Line:
    """One line of a schedule: its number, the node's path and the call."""

    number: int
    path: str
    call: str


@contextmanager
def without(number: int) -> Iterator[list[Line]]:
    """Leave out the so manieth line, -1 for none; the list fills with all of them."""
    found: list[Line] = []
    inside: list[str] = []
    originals = {name: getattr(slapo.Schedule, name) for name in _LINES}

    def noted(name: str) -> Any:
        def method(node: slapo.Schedule, *args: Any, **kwargs: Any) -> Any:
            if inside:  # another primitive's doing
                return originals[name](node, *args, **kwargs)
            given = [*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
            found.append(Line(len(found), node.path, f"{name}({', '.join(given)})"))
            if found[-1].number == number:
                return node
            inside.append(name)
            try:
                return originals[name](node, *args, **kwargs)
            finally:
                inside.pop()

        return method

    for name in _LINES:
        setattr(slapo.Schedule, name, noted(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(slapo.Schedule, name, original)


def lines_of(family: str, spread: bool) -> list[Line]:
    """Those that are left out in turn; on several ranks."""
    sch = slapo.create_schedule(build(family))
    with without(-1) as found:
        Steps(FAMILIES[family], spread).apply(sch)
    return [line for line in found if not _is_of_first_layer(line.path)]


def _is_of_first_layer(path: str) -> bool:
    parts = path.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return bool(numbers) and numbers[0] == "0"


def outcome(family: str, spread: bool, line: Line) -> dict[str, Any]:
    """What Verify says without a line.

    Returns
    -------
    dict
        ``caught``; ``changes``, whether numbers differ at all, which is looked at where Verify lets
        it pass; ``place``, what is named first; ``near``: ``"exact"``, ``"around"`` or ``"inside"``
        what was left out, or ``"elsewhere"``.
    """
    sch = slapo.create_schedule(build(family))
    message = place = ""
    try:
        with slapo.Verify(sch, inputs(family)), without(line.number):
            Steps(FAMILIES[family], spread).apply(sch)
    except (slapo.SlapoError, ValueError) as error:
        message, place = str(error), place_of(error)
    changes = bool(message) or _changes_numbers(family, spread, line)
    return {
        "caught": bool(message),
        "changes": changes,
        "place": place,
        "near": _nearness(place, line.path) if message else "",
    }


def _nearness(place: str, path: str) -> str:
    if path in (place, place.rpartition(".")[0]):
        return "exact"
    if place and path.startswith(f"{place}."):
        return "around"
    return "inside" if place.startswith(f"{path}.") else "elsewhere"


# --- without Verify -------------------------------------------------------------------------------
def _changes_numbers(family: str, spread: bool, line: Line) -> bool:
    """Whether a schedule without a line gives another loss or other gradients, by hand."""
    original, scheduled = _double(family), _double(family)
    sch = slapo.create_schedule(scheduled)
    with without(line.number):
        Steps(FAMILIES[family], spread).apply(sch)
    wanted, given = (_gradients(model, inputs(family), sch) for model in (original, scheduled))
    return any(
        name not in given
        or float((given[name] - grad).abs().max()) > 1e-5 * float(grad.abs().max() + 1e-3)
        for name, grad in wanted.items()
    )


def _double(family: str) -> nn.Module:
    model = build(family, dropout=0.0)
    model = model if family == "mixtral" else model.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return model.eval()


def _gradients(model: nn.Module, example: Any, sch: slapo.Schedule) -> dict[str, Tensor]:
    loss = model(**example).loss
    loss.backward()
    return {"loss": loss.detach(), **gathered_gradients(model, sch.group)}


def all_outcomes(rank: int, world_size: int, family: str, spread: bool) -> list[dict[str, Any]]:
    """A row for each line."""
    logging.disable(logging.WARNING)  # which each of the schedules would repeat
    slapo.set_random_seed(0)
    rows = []
    for line in lines_of(family, spread):
        kind = "sequence" if spread else "tensor"
        row = {"family": family, "parallel": kind, "path": line.path, "left_out": line.call}
        rows.append(row | outcome(family, spread, line))
    return rows
