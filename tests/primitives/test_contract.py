"""What every primitive owes its users, as one suite over all of them."""

import inspect
import pydoc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import slapo
from slapo import Schedule
from slapo.primitives.base import is_builtin
from tests.fingerprint import fingerprint
from tests.primitives.models import Block, Stack


def stack() -> Schedule:
    return slapo.create_schedule(Stack().eval())


def traced_block() -> Schedule:
    sch = slapo.create_schedule(Block().eval())
    sch.trace()
    return sch


def traced_stack() -> Schedule:
    sch = stack()
    sch.trace(recursive=False)
    return sch


def gelu_of_fc1(sch: Schedule) -> Any:
    return sch.find(lambda x: F.gelu(slapo.call_module("fc1", x)))


@dataclass
class Case:
    """How to call one primitive rightly; ``tests/golden/mistakes`` has the calls that fail.

    `call` stands on one line, so that the line it is called from is the function's first.
    """

    call: Callable[[Schedule], Any]
    arguments: dict[str, str]
    make: Callable[[], Schedule] = stack
    path: str = "layers.1.fc1"
    signature: tuple[str, ...] = ()
    returns: Any = field(default="node")


CASES: dict[str, Case] = {
    "annotate": Case(
        lambda s: s.annotate("weight", "kind", 3),
        {"param_name": "'weight'", "key": "'kind'", "value": "3"},
        signature=("param_name", "key", "value"),
    ),
    "checkpoint": Case(
        lambda s: s.checkpoint(),
        {},
        signature=("subgraph", "order_args_fn", "use_reentrant"),
    ),
    "compile": Case(
        lambda s: s.compile(backend="eager"),
        {"backend": "'eager'"},
        signature=("fullgraph", "dynamic", "backend", "mode"),
    ),
    "cut_pipeline_stage": Case(
        lambda s: s.cut_pipeline_stage(),
        {},
        signature=("call",),
        make=traced_stack,
        path="layers.1",
    ),
    "decompose": Case(lambda s: s.decompose(), {}),
    "fork_rng": Case(lambda s: s.fork_rng(), {}),
    "fuse": Case(
        lambda s: s.fuse(gelu_of_fc1(s), compiler=None, name="Fused"),
        {"subgraph": "[[%fc1, %gelu]]", "compiler": "None", "name": "'Fused'"},
        make=traced_block,
        path="",
        signature=("subgraph", "compiler", "name"),
    ),
    "replace": Case(
        lambda s: s.replace(nn.Linear(4, 8)),
        {"new_mod": "Linear"},
        signature=("new_mod", "target_ops", "name", "concrete_args", "fn_or_mod"),
    ),
    "replace_all": Case(
        lambda s: s.replace_all(nn.Linear, lambda path, m, k: nn.Identity(), k=2),
        {"cls": "Linear", "make_fn": "<lambda>", "k": "2"},
        path="layers.1",
        signature=("cls", "make_fn", "kwargs"),
    ),
    "set": Case(
        lambda s: s.set("p", 0.5),
        {"name": "'p'", "value": "0.5"},
        path="layers.1.drop",
        signature=("name", "value", "whole"),
    ),
    "shard": Case(
        lambda s: s.shard("weight", axis=0),
        {"tensor_name": "'weight'", "axis": "0"},
        signature=("tensor_name", "axis", "blocks", "uneven", "parts"),
    ),
    "sync": Case(
        lambda s: s.sync("fwd_post", "all_gather", axis=-1),
        {"mode": "'fwd_post'", "sync_op_or_fn": "'all_gather'", "axis": "-1"},
        signature=("mode", "sync_op_or_fn", "kwargs"),
    ),
    "trace": Case(
        lambda s: s.trace(flatten=True),
        {"flatten": "True"},
        path="layers.1",
        signature=(
            "recursive",
            "flatten",
            "tracer",
            "leaf_modules",
            "concrete_args",
            "config",
            "example_inputs",
        ),
        returns=True,
    ),
    "trace_until": Case(
        lambda s: s.trace_until("layers.1"),
        {"paths": "'layers.1'"},
        path="",
        signature=("paths", "tracer", "concrete_args", "config", "example_inputs"),
        returns=True,
    ),
}


@pytest.fixture(params=sorted(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_primitive_has_a_case() -> None:
    builtin = {n for n, c in slapo.list_primitives(name_only=False).items() if is_builtin(c)}
    assert builtin == set(CASES)


def test_the_signature_is_visible(name: str) -> None:
    case = CASES[name]
    sch = stack()
    for method in (getattr(sch, name), getattr(Schedule, name)):
        parameters = [p for p in inspect.signature(method).parameters if p != "self"]
        assert tuple(parameters) == case.signature
    assert name in dir(sch)
    assert inspect.getattr_static(Schedule, name) is not None  # a type checker sees it too


def test_help_is_the_manual(name: str) -> None:
    primitive = slapo.list_primitives(name_only=False)[name]
    manual = pydoc.render_doc(getattr(stack(), name), renderer=pydoc.plaintext)
    first_line = inspect.getdoc(primitive).splitlines()[0]
    assert first_line in manual
    assert "Examples" in manual
    assert first_line in pydoc.render_doc(primitive, renderer=pydoc.plaintext)


def test_it_returns_what_stands_at_the_path(name: str) -> None:
    case = CASES[name]
    sch = case.make()
    result = case.call(sch[case.path])
    if case.returns == "node":
        assert result is sch[case.path]
        assert result.mod is sch.get_module(case.path)
        # Chains: the next primitive acts on the same path.
        assert result.annotate is not None
        assert result.path == case.path
    else:
        assert result == case.returns


def test_it_is_recorded_with_arguments_and_the_callers_line(name: str) -> None:
    case = CASES[name]
    sch = case.make()
    before = len(sch.history)
    case.call(sch[case.path])
    assert len(sch.history) == before + 1
    record = sch.history[-1]
    assert (record.path, record.primitive) == (case.path, name)
    assert dict(record.arguments) == case.arguments
    assert record.location == f"{__file__}:{_line_of(case.call)}"
    assert sch[case.path].history is sch.history


def _line_of(call: Callable[..., Any]) -> int:
    return call.__code__.co_firstlineno


def test_it_is_printed_at_its_path(name: str) -> None:
    case = CASES[name]
    sch = case.make()
    case.call(sch[case.path])
    text = str(sch)
    noted = [line for line in text.splitlines() if f"{name}(" in line]
    assert len(noted) == 1, text
    expected = case.path.rsplit(".", 1)[-1] if case.path else type(sch.mod).__name__
    assert f"{expected}:" in noted[0] or noted[0].startswith(expected)


def test_wrong_arguments_say_what_it_takes(name: str) -> None:
    case = CASES[name]
    sch = case.make()
    before = fingerprint(sch)
    takes_any = any(p == "kwargs" for p in case.signature)
    method = getattr(sch[case.path], name)
    with pytest.raises(TypeError, match=name):
        method(**({} if takes_any else {"nonsense": 1}))
    assert fingerprint(sch) == before


def test_metadata_of_an_unknown_primitive_is_a_key_error() -> None:
    sch = stack()
    assert sch.metadata.primitives["shard"] == {}
    with pytest.raises(KeyError, match="no primitive is called 'shards'"):
        sch.metadata.primitives["shards"]
