"""``sch.find`` and ``sch.find_node``: what schedules see of the matcher."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo
from slapo.graph.match.find import Matches, Subgraph
from slapo.pattern import call_module
from tests.fingerprint import fingerprint, refused
from tests.graph.served import make
from tests.primitives.models import Attention, Block, Stack


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
    without_modules = slapo.create_schedule(make(lambda self, x: -x))
    assert "no graph here calls a module" in without_modules.find("fc").why


def test_matches_in_children_name_their_parent() -> None:
    sch = slapo.create_schedule(Stack(2))
    found = sch.find(lambda x: F.gelu(call_module("fc1", x)))
    assert names(found) == [[(f"layers.{k}", "fc1"), (f"layers.{k}", "gelu")] for k in range(2)]
    sch.fuse(found[1], compiler=None)
    assert "layers.1.FusedModule_0" in sch


def test_nodes() -> None:
    sch = slapo.create_schedule(Stack(2))
    sch.trace()
    by_name = sch.find_node("fc")
    assert [(parent, node.name) for parent, node in by_name] == [
        (f"layers.{k}", name) for k in range(2) for name in ("fc1", "fc2")
    ]
    by_predicate = sch.find_node(lambda node: node.target is F.gelu)
    assert [parent for parent, _ in by_predicate] == ["layers.0", "layers.1"]


# --- a search that finds nothing changes nothing ---


def flagged() -> nn.Module:
    """Takes another way for another flag: a graph holds for one of them."""

    def forward(self: Any, x: Tensor, double: bool = False, mask: Tensor | None = None) -> Tensor:
        x = self.block(x) if mask is None else self.block(x) * mask
        return x * 2 if double else x

    return make(forward, block=Block())


NOTHING = [
    ("find", lambda x: torch.erfinv(x)),
    ("find", "nothing"),
    ("find_node", "nothing"),
    ("find_node", lambda node: False),
]


def flagged_schedule() -> Any:
    """With what a trace moves or renews: hooks, wrappers, tags, notes, other graphs."""
    sch = slapo.create_schedule(nn.Sequential(flagged(), Block(), nn.Linear(4, 4)))
    sch["0.block.fc1"].mod.register_forward_hook(lambda module, args, out: out)
    sch["0"].mod.register_forward_pre_hook(lambda module, args: None)
    sch["0.block.drop"].checkpoint()
    sch["2"].annotate("weight", "key", 1)
    sch["1"].trace()
    return sch


@pytest.mark.parametrize("path", ["", "0", "0.block"])
@pytest.mark.parametrize(("verb", "pattern"), NOTHING)
def test_finding_nothing_changes_nothing(path: str, verb: str, pattern: Any) -> None:
    sch = flagged_schedule()
    x, mask = torch.randn(3, 4), torch.ones(4)
    model = sch["0"].mod
    wanted = model(x, double=True), model(x, mask=mask), model(x)
    before, module, nodes = fingerprint(sch), sch[path].mod, dict(sch.named_schedules())
    hooks = model._forward_pre_hooks
    node_of_a_graph = next(iter(sch["1"].mod.graph.nodes))

    assert getattr(sch[path], verb)(pattern) == []

    assert sch[path].mod is module
    assert dict(sch.named_schedules()) == nodes
    assert fingerprint(sch) == before
    assert sch["0"].mod._forward_pre_hooks is hooks
    assert next(iter(sch["1"].mod.graph.nodes)) is node_of_a_graph
    got = model(x, double=True), model(x, mask=mask), model(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    sch["0"].replace(flagged())  # the tree is as usable as it was
    assert sch["0.block.fc1"].is_current


def test_a_predicate_that_fails_changes_nothing() -> None:
    sch = flagged_schedule()
    with refused(sch, AttributeError, "nothing"):
        sch["0"].find_node(lambda node: node.nothing)


def test_a_wrapped_module_is_left_too() -> None:
    sch = slapo.create_schedule(nn.Sequential(flagged()))
    sch["0"].checkpoint()
    before, inner = fingerprint(sch), sch["0"].mod.mod
    assert sch["0"].find("nothing") == []
    assert sch["0"].mod.mod is inner
    assert fingerprint(sch) == before
    assert len(sch["0"].find("block")) == 1
    assert isinstance(sch["0"].mod.mod, fx.GraphModule)


# --- bindings, and why there are none ---


def test_matches_know_what_the_arguments_stand_for() -> None:
    scaled = make(lambda self, x, y: F.gelu((x - y) * 3.0))
    sch = slapo.create_schedule(nn.Sequential(scaled))
    matches = sch["0"].find(lambda a, b, s: F.gelu((b - a) * s))
    x, y = sch["0"].mod.graph.find_nodes(op="placeholder")
    (match,) = matches
    assert isinstance(matches, Matches)
    assert isinstance(match, Subgraph)
    assert match.bindings == {"a": y, "b": x, "s": 3.0}
    assert match == [("", node) for node in sch["0"].mod.graph.nodes if node.op == "call_function"]
    assert repr(matches) == "[[('', sub), ('', mul), ('', gelu)]]"
    assert matches.why == ""
    assert [call.bindings for call in slapo.create_schedule(Block()).find("fc1")] == [{}]


def test_an_empty_result_says_why_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    sch = slapo.create_schedule(nn.Sequential(Block()))
    with caplog.at_level(logging.INFO, logger="slapo"):
        found = sch["0"].find(lambda x: torch.tanh(call_module("fc1", x)))
    assert found == []
    assert found.why.startswith("1 of 2 operations of the pattern were found together")
    assert "call_module('fc1') at fc1; tanh was not: in its place is gelu" in found.why
    assert repr(found) == f"[] ({found.why})"
    with pytest.raises(IndexError, match="list index"):
        sch["0"].find("fc1")[1]
    assert f'sch["0"].find found [] ({found.why})' in caplog.text


def test_the_reason_is_of_the_graphs_that_were_searched() -> None:
    found = slapo.create_schedule(Stack(2)).find(lambda x: torch.tanh(call_module("fc1", x)))
    assert "fc1 in the graph of 'layers.0'; tanh was not: in its place is gelu" in found.why
    assert "are hidden" not in found.why  # the layers are opaque now, and were not


def test_the_reason_is_not_worked_out_where_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(
        "slapo.graph.match.find.why_no_call", lambda *args: calls.append(args) or "because"
    )
    sch = slapo.create_schedule(Block())
    sch.trace()
    logger = logging.getLogger("slapo")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()
    found = sch.find("nothing")
    assert calls == []
    assert found.why == found.why == "because"
    assert len(calls) == 1
    logger.manager._clear_cache()
