"""Planted mistakes: refused in the right place, wrong on two processes, and found by bisect."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.agreement import gathered
from slapo.sharding.checks import check_modules
from slapo.verify.bisect import Blame, bisect
from slapo.verify.placement import PlacementError, check
from tests.check import planted
from tests.check.fuzz import Verdict, computed_by_ranks, model_of
from tests.check.planted import Case, names_the_place
from tests.check.verdicts import fake_world
from tests.distributed import run_distributed
from tests.runtimes.ranks import error_of, on_ranks
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


# --- slapo.bisect --------------------------------------------------------------------------------
def applied(family: str, mistake: str, spreads: bool = False) -> tuple[Blame, list[str]]:
    places: list[str] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        return FAMILIES[family].build(0.1)

    def schedule(sch: slapo.Schedule) -> None:
        steps = Case(mistake, family, spreads).steps()
        steps.apply(sch)
        places[:] = steps.places

    blame = bisect(make, schedule, FAMILIES[family].inputs(3, 6 if spreads else 7))
    assert blame is not None
    return blame, places


@pytest.mark.parametrize(
    ("family", "mistake", "kind"),
    [
        ("gpt2", "no_backward_sync", "missing"),
        ("gpt2", "wrong_axis", "different"),
        ("llama", "no_forward_sync", "missing"),
        ("bert", "no_backward_sync", "missing"),
        ("bert", "only_one_column_split", "missing"),
        ("gpt2", "logits_gradient_summed", "different"),
        ("llama", "dropout_not_forked", "missing"),
        ("llama", "norm_not_tagged", "missing"),  # under sequence parallelism
        ("mixtral", "not_in_blocks", "different"),
        ("t5", "states_not_summed", "different"),
        ("qwen3", "inner_norm_not_tagged", "missing"),
    ],
)
def test_a_planted_mistake(family: str, mistake: str, kind: str) -> None:
    with fake_world():
        blame, places = applied(family, mistake, spreads=mistake == "norm_not_tagged")
    assert blame.kind == kind, blame
    assert names_the_place(blame.call.split('"')[1], places), blame


def test_a_missing_call_stands_behind_those_of_its_module() -> None:
    with fake_world():
        blame, _ = applied("gpt2", "no_forward_sync")
    assert blame.call == 'sch["transformer.h.1.attn.c_proj"].sync("fwd_post", "all_reduce")'
    assert blame.record is not None
    assert blame.record.path == "transformer.h.1.attn.c_proj"
    assert blame.record.primitive == "shard"
    assert str(blame) == f"the schedule is right with {blame.call} after {blame.record}"


def test_a_hook_of_the_function_itself() -> None:
    with fake_world():
        blame, _ = applied("gpt2", "summed_twice")
    assert blame.kind == "beside"
    assert "code other than primitives" in str(blame)


def make_stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))


def bisected(schedule: Callable[[slapo.Schedule], Any]) -> Blame | None:
    return bisect(make_stack, schedule, torch.linspace(-1, 1, 20).view(5, 4))


def test_in_one_process_by_verify() -> None:
    def schedule(sch: slapo.Schedule) -> None:
        sch["0.0"].decompose()
        sch["1"].checkpoint()
        sch["1.1"].replace(nn.GELU(approximate="tanh"))
        sch["2.0"].decompose()

    blame = bisected(schedule)
    assert blame is not None
    assert (blame.kind, blame.record and blame.record.path) == ("surplus", "1.1")


def test_a_right_schedule() -> None:
    assert bisected(lambda sch: sch["0.0"].decompose()) is None


def test_what_no_single_change_mends() -> None:
    def schedule(sch: slapo.Schedule) -> None:
        sch["0.0"].decompose()
        for layer in "12":
            sch[f"{layer}.1"].replace(nn.ReLU())

    blame = bisected(schedule)
    assert blame is not None
    assert blame.kind == "since"
    assert blame.record is not None
    assert blame.record.path == "1.1"
    assert "the schedule is wrong from" in str(blame)


@on_ranks(2)
def test_on_processes() -> None:
    def schedule(sch: slapo.Schedule) -> None:
        for layer in sch.select("*"):
            layer["0"].shard("weight", axis=0).shard("bias", axis=0)
            layer["0"].sync("bwd_post", "all_reduce")
            if layer.path != "1":
                layer.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)

    blame = bisected(schedule)
    assert blame is not None
    assert blame.kind == "missing"
    assert 'sch["1"].sync("fwd_post", "all_gather"' in blame.call
    assert gathered(blame.call, None) == [blame.call] * 2


@on_ranks(2, timeout=60)
def test_a_function_that_raises_on_one_rank() -> None:
    def schedule(sch: slapo.Schedule) -> None:
        sch["0.0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        if sch.rank == 1:
            raise ValueError("not on this rank")

    told = error_of(lambda: bisect(make_stack, schedule, torch.randn(3, 8)))
    assert "not on this rank" in told


def test_the_same_call_is_missing_everywhere() -> None:
    def schedule(sch: slapo.Schedule) -> None:
        for layer in sch.select("transformer.h.*"):
            mlp = layer["mlp"]
            mlp["c_fc"].shard("weight", axis=1).shard("bias", axis=0)
            mlp["c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")

    with fake_world():
        family = FAMILIES["gpt2"]
        blame = bisect(lambda: family.build(0.0), schedule, family.inputs(3, 7))
    assert blame is not None
    assert blame.kind == "missing"
    assert blame.call.count("bwd_post") == 2
