"""``sch.find`` and ``sch.find_node``: what schedules see of the matcher."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo
from slapo.pattern import Pattern, call_module
from tests.fingerprint import fingerprint
from tests.primitives.models import Attention, Block, DataDependent, Stack


def names(matches: Any) -> list[list[tuple[str, str]]]:
    return [[(parent, node.name) for parent, node in match] for match in matches]


def test_it_traces_if_needed_and_says_so() -> None:
    sch = slapo.create_schedule(Block())
    sch.find("fc1")
    assert isinstance(sch.mod, fx.GraphModule)
    assert [record.primitive for record in sch.history] == ["trace"]
    sch.find("fc2")
    assert len(sch.history) == 1


def test_a_string_is_a_regex_on_module_calls() -> None:
    sch = slapo.create_schedule(Attention())
    assert names(sch.find("[qkv]$")) == [[("", "q")], [("", "k")], [("", "v")]]
    assert names(sch.find("nothing")) == []


def test_matches_in_children_name_their_parent() -> None:
    sch = slapo.create_schedule(Stack(2))
    found = sch.find(lambda x: F.gelu(call_module("fc1", x)))
    assert names(found) == [[(f"layers.{k}", "fc1"), (f"layers.{k}", "gelu")] for k in range(2)]
    sch.fuse(found[1], compiler=None)
    assert "layers.1.FusedModule_0" in sch


def test_functional_and_module_forms_are_the_same() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) + F.gelu(x * 2)

    sch = slapo.create_schedule(Both())
    for pattern in (lambda x: F.gelu(x), nn.GELU()):
        assert len(sch.find(pattern)) == 2


def test_operands_swap_and_bystanders_do_not_hide() -> None:
    class Busy(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = torch.sin(x)
            b = torch.cos(y)
            c = a * 2
            d = b + torch.tanh(y)
            return torch.relu(y + c) + d

    sch = slapo.create_schedule(Busy())
    assert names(sch.find(lambda a, b: torch.relu(torch.sin(a) * 2 + b))) == [
        [("", "sin"), ("", "mul"), ("", "add_1"), ("", "relu")]
    ]


def test_a_value_used_twice_is_not_two_values() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x + x)

    sch = slapo.create_schedule(Same())
    assert len(sch.find(lambda a: F.gelu(a + a))) == 1


def test_matches_do_not_overlap() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.sin(torch.sin(x)))

    sch = slapo.create_schedule(Chain())
    assert len(sch.find(lambda x: torch.sin(torch.sin(x)))) == 1


def test_a_pattern_object() -> None:
    class BiasAct(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(call_module("fc1", x))

    sch = slapo.create_schedule(Block())
    assert names(sch.find(BiasAct())) == [[("", "fc1"), ("", "gelu")]]


def test_nodes() -> None:
    sch = slapo.create_schedule(Stack(2))
    sch.trace()
    by_name = sch.find_node("fc")
    assert [(parent, node.name) for parent, node in by_name] == [
        (f"layers.{k}", name) for k in range(2) for name in ("fc1", "fc2")
    ]
    by_predicate = sch.find_node(lambda node: node.target is F.gelu)
    assert [parent for parent, _ in by_predicate] == ["layers.0", "layers.1"]


def test_bad_patterns() -> None:
    sch = slapo.create_schedule(Block())
    sch.trace()
    before = fingerprint(sch)
    with pytest.raises(ValueError, match="no regular expression"):
        sch.find("(")
    with pytest.raises(ValueError, match="no regular expression"):
        sch.find_node("[")
    for bad in (3, None):
        with pytest.raises(TypeError):
            sch.find(bad)
        with pytest.raises(TypeError):
            sch.find_node(bad)
    assert fingerprint(sch) == before


def test_what_cannot_be_traced_is_an_error_that_says_how() -> None:
    sch = slapo.create_schedule(nn.Sequential(DataDependent()))
    before = fingerprint(sch)
    with pytest.raises(slapo.SlapoError, match=r'sch\["0"\].find: .*not traced') as info:
        sch["0"].find("fc")
    # The reasons of both tracers, and what to pass.
    assert "tracer='pytorch'" in str(info.value)
    assert "tracer='huggingface'" in str(info.value)
    assert "pass example_inputs" in str(info.value)
    assert fingerprint(sch) == before
