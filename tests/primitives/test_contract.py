"""What every primitive owes its users, as one suite over all of them."""

import inspect
import pydoc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import slapo
from slapo import Schedule
from slapo.primitives.base import is_builtin
from tests.fingerprint import fingerprint
from tests.primitives.models import Block, Stack

GOLDEN = Path(__file__).parent.parent / "golden" / "primitives.txt"


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
    """How to call one primitive rightly; ``tests/golden/mistakes`` has the calls that fail."""

    call: Callable[[Schedule], Any]
    make: Callable[[], Schedule] = stack
    path: str = "layers.1.fc1"
    returns: Any = "node"


CASES: dict[str, Case] = {
    "annotate": Case(lambda s: s.annotate("weight", "kind", 3)),
    "checkpoint": Case(lambda s: s.checkpoint()),
    "compile": Case(lambda s: s.compile(backend="eager")),
    "cut_pipeline_stage": Case(lambda s: s.cut_pipeline_stage(), traced_stack, "layers.1"),
    "decompose": Case(lambda s: s.decompose()),
    "fork_rng": Case(lambda s: s.fork_rng()),
    "fuse": Case(
        lambda s: s.fuse(gelu_of_fc1(s), compiler=None, name="Fused"), traced_block, path=""
    ),
    "replace": Case(lambda s: s.replace(nn.Linear(4, 8))),
    "replace_all": Case(
        lambda s: s.replace_all(nn.Linear, lambda path, m, k: nn.Identity(), k=2), path="layers.1"
    ),
    "set": Case(lambda s: s.set("p", 0.5), path="layers.1.drop"),
    "shard": Case(lambda s: s.shard("weight", axis=0)),
    "sync": Case(lambda s: s.sync("fwd_post", "all_gather", axis=-1)),
    "trace": Case(lambda s: s.trace(flatten=True), path="layers.1", returns=True),
    "trace_until": Case(lambda s: s.trace_until("layers.1"), path="", returns=True),
}


@pytest.fixture(params=sorted(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_primitive_has_a_case() -> None:
    builtin = {n for n, c in slapo.list_primitives(name_only=False).items() if is_builtin(c)}
    assert builtin == set(CASES)


def test_what_users_see(update_golden: bool) -> None:
    """Signature, record, and line in the printed schedule: ``--update-golden`` writes them."""
    text = "\n".join(map(seen, sorted(CASES)))
    if update_golden:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def seen(name: str) -> str:
    case = CASES[name]
    sch = case.make()
    before = len(sch.history)
    case.call(sch[case.path])
    (record,) = sch.history[before:]
    assert (record.path, record.primitive) == (case.path, name)
    assert record.location == f"{__file__}:{case.call.__code__.co_firstlineno}"
    assert sch[case.path].history is sch.history
    (printed,) = [line for line in str(sch).splitlines() if f"{name}(" in line]
    return f"{name}({', '.join(parameters_of(name))})\n{record.call()}\n{printed.strip('|` -')}\n"


def parameters_of(name: str) -> list[str]:
    sch = stack()
    on_node, on_class = (
        [p for p in inspect.signature(getattr(owner, name)).parameters if p != "self"]
        for owner in (sch, Schedule)
    )
    assert on_node == on_class
    assert name in dir(sch)
    assert inspect.getattr_static(Schedule, name) is not None  # a type checker sees it too
    return on_node


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


def test_wrong_arguments_say_what_it_takes(name: str) -> None:
    case = CASES[name]
    sch = case.make()
    before = fingerprint(sch)
    takes_any = "kwargs" in parameters_of(name)
    method = getattr(sch[case.path], name)
    with pytest.raises(TypeError, match=name):
        method(**({} if takes_any else {"nonsense": 1}))
    assert fingerprint(sch) == before
