"""Planted mistakes are refused, in the right place; two processes say that they are mistakes."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import slapo
from slapo.sharding.checks import check_modules
from slapo.verify.placement import PlacementError, check
from tests.check import planted
from tests.check.fuzz import Verdict, computed_by_ranks, fake_world, model_of
from tests.check.planted import Case, names_the_place
from tests.distributed import run_distributed
from tests.sharding.families import FAMILIES

#: Mistakes about random numbers: two processes that drop nothing compute the same.
RANDOM = ("dropout_not_forked", "whole_dropout_forked")


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    return FAMILIES[case.family].inputs(3, 6 if case.sequence_parallel else 7)


def judge(case: Case) -> tuple[str, list[str], str] | None:
    """Who refuses a planted mistake, its places, and the message; None where it does not apply."""
    torch.manual_seed(0)
    steps = case.steps()
    sch = slapo.create_schedule(FAMILIES[case.family].build(0.1))
    try:
        steps.apply(sch)
        check_modules(sch.mod)
    except (slapo.SlapoError, ValueError) as error:
        return "primitive", steps.places, str(error)
    if not steps.places:
        return None
    try:
        check(sch, inputs_of(case))
    except PlacementError as error:
        named = [path for path in (error.suspect, error.path) if path]
        return " ".join(named), steps.places, str(error)
    return "", steps.places, ""


def truths(rank: int, world_size: int, cases: list[Case]) -> list[Verdict]:
    """What two processes compute, without dropout."""
    logging.disable(logging.ERROR)
    slapo.set_random_seed(1, tp_rank=rank)
    found = []
    for number, case in enumerate(cases):
        model = model_of(FAMILIES[case.family])
        original = copy.deepcopy(model)
        sch = slapo.create_schedule(model)
        case.steps().apply(sch)
        found.append(computed_by_ranks(number, sch, original, inputs_of(case)))
    return found


@pytest.fixture(scope="module")
def judged() -> dict[Case, tuple[str, list[str], str]]:
    with fake_world():
        found = {case: judge(case) for case in planted.cases()}
    return {case: said for case, said in found.items() if said is not None}


def test_every_mistake_is_planted_somewhere(
    judged: dict[Case, tuple[str, list[str], str]],
) -> None:
    assert {case.mistake for case in judged} == set(planted.MISTAKES)
    assert {case.family for case in judged} == set(FAMILIES)


def test_all_are_refused(judged: dict[Case, tuple[str, list[str], str]]) -> None:
    assert [str(case) for case, (said, _, _) in judged.items() if not said] == []


def test_the_right_module_is_named(judged: dict[Case, tuple[str, list[str], str]]) -> None:
    wrong = {}
    for case, (said, places, message) in judged.items():
        if said == "primitive":
            right = any(f"{place!r}" in message or f'"{place}"' in message for place in places)
        else:
            right = any(names_the_place(path, places) for path in said.split())
        if not right:
            wrong[str(case)] = message
    assert len(wrong) <= 0.05 * len(judged), wrong


@pytest.mark.slow
@pytest.mark.distributed
def test_they_are_mistakes(judged: dict[Case, tuple[str, list[str], str]]) -> None:
    """A check that refuses whatever it is given would pass the tests above."""
    cases = [
        case
        for case, (said, _, _) in judged.items()
        if said != "primitive" and case.mistake not in RANDOM
    ]
    true = run_distributed(truths, 2, cases, timeout=280)[0]
    right = [str(cases[verdict.seed]) for verdict in true if verdict.said == "equal"]
    assert right == []
