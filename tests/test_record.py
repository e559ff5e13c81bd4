"""Schedules as data: every primitive goes through a file, and what no file can hold is refused."""

from __future__ import annotations

import copy
import functools
import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo
from slapo import Schedule, ScheduleRecord
from slapo.primitives import base
from slapo.primitives.base import is_builtin
from slapo.record import keep
from tests.distributed import run_distributed
from tests.fingerprint import fingerprint
from tests.primitives.models import Attention, Block, DataDependent, Stack


# --- what schedules name --------------------------------------------------------------------------
def make_tanh(path: str, module: nn.Module, factor: float = 1.0) -> nn.Module:
    return Scaled(factor)


def double(module: nn.Module, args: tuple[Any, ...], output: Tensor, factor: float = 2.0) -> Tensor:
    return factor * output


def reversed_arguments(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return (x, *rest)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def subtracted(first: Tensor, second: Tensor, scale: float = 1.0) -> Tensor:
    return scale * (first - second)


class Scaled(nn.Module):
    """Keeps what its constructor takes."""

    def __init__(self, factor: float, kinds: tuple[str, ...] = ("tanh",)) -> None:
        super().__init__()
        self.factor, self.kinds = factor, kinds

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * torch.tanh(x)


class Hidden(nn.Module):
    """Keeps what its constructor takes under another name."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self._factor * x


class Heads(nn.Module):
    """Knows a number."""

    def __init__(self, heads: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.inner, self.sizes = heads, inner, (heads, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.inner is None else self.inner(x)


class Subtracts(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) - torch.cos(y) + torch.sin(y)


class ScalePrimitive(slapo.Primitive):
    """A user's own, whose arguments come in every way."""

    @staticmethod
    def name() -> str:
        return "scale"

    @staticmethod
    def apply(sch: Schedule, first: float, /, *rest: float, by: Any = None, **more: Any) -> None:
        with torch.no_grad():
            sch.mod.weight.mul_(first * sum(rest) * sum(more.values()))
        if by is not None:
            sch.mod.register_forward_hook(by)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", {**base._REGISTRY, "scale": ScalePrimitive})


def world(rank: int, size: int) -> Any:
    """This process is one rank of a group whose collectives do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@pytest.fixture
def fake_group() -> Iterator[Callable[[int, int], Any]]:
    yield world
    if dist.is_initialized():
        dist.destroy_process_group()


# --- every primitive ------------------------------------------------------------------------------
def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return cls(size=8).eval()


stack, block, attention = (functools.partial(made, cls) for cls in (Stack, Block, Attention))


def annotate(sch: Schedule) -> None:
    sch["layers.1.fc1"].annotate("weight", "kind", {"a": (1, 2.5), "b": [None, True, float("inf")]})
    sch["layers.0.fc1"].annotate("weight", "kind", {torch.float32: slice(1, None), "c": {1, 2}})
    sch["layers.0.fc1"].annotate("bias", "lies_on", torch.device("cpu"))


def checkpoint(sch: Schedule) -> None:
    sch["layers.0"].checkpoint(order_args_fn=reversed_arguments)
    sch["layers.1"].trace(flatten=True)
    sch["layers.1"].checkpoint(sch["layers.1"].find(gelu_of_fc1))


def cut(sch: Schedule) -> None:
    sch.trace(recursive=False)
    sch["layers.1"].cut_pipeline_stage()


def decompose_and_fuse(sch: Schedule) -> None:
    for layer in sch.select("layers.*"):
        layer["fc1"].decompose()
        layer.trace(flatten=True)
        layer.fuse(layer.find(bias_gelu), compiler=None, name="BiasGelu")


def replace(sch: Schedule) -> None:
    sch["layers.0.drop"].replace(nn.Dropout(0.25, inplace=True))
    sch["layers.1.drop"].replace(Scaled(2.0, kinds=("tanh", "x")))
    sch["layers.2.drop"].replace(nn.Sequential(nn.GELU("tanh"), Scaled(0.5)))
    with slapo.init_empty_weights():
        sch["head"].replace(nn.Linear(8, 8))  # takes over the values
    sch.select("layers.*.fc2").replace(kept_or_scaled)


def kept_or_scaled(path: str, module: nn.Module) -> nn.Module:
    return nn.Sequential(module, Scaled(3.0)) if path == "layers.0.fc2" else nn.Linear(16, 8)


def replace_in_graphs(sch: Schedule) -> None:
    sch["layers.0"].replace(torch.tanh, sch["layers.0"].find(gelu))
    sch["layers.1"].replace(F.relu, sch["layers.1"].find_node(is_gelu)[0])
    sch.trace()
    (match,) = [m for m in sch.find(gelu) if m[0][0] == "layers.2"]
    sch.replace(F.leaky_relu, match, concrete_args={"negative_slope": 0.5})


def gelu(x: Any) -> Any:
    return F.gelu(x)


def gelu_of_fc1(x: Any) -> Any:
    return F.gelu(slapo.call_module("fc1", x))


def is_gelu(node: fx.Node) -> bool:
    return "gelu" in node.name


def replace_all(sch: Schedule) -> None:
    sch.replace_all(nn.Dropout, make_tanh, factor=2.0)


def set_(sch: Schedule) -> None:
    sch["layers.0.drop"].set("p", 0.5)
    sch.select("layers.*.fc1").replace(with_heads).set("heads", whole=8)
    sch["layers.1.fc1"].set("sizes", whole=(4, 8))


def with_heads(path: str, module: nn.Module) -> nn.Module:
    return Heads(8, module)


def shard_and_sync(sch: Schedule) -> None:
    for layer in sch.select("layers.*"):
        layer["fc1"].shard("weight", axis=0, blocks=(8, 8)).shard("bias", 0, blocks=2)
        layer["fc1"].sync("bwd_post", "all_reduce")
        layer["fc2"].shard("weight", axis=1, blocks=2).sync("fwd_post", "all_reduce")
        layer.sync("fwd_post", double)
        layer["fc2"].sync("fwd_post", functools.partial(double, factor=3.0))


def trace(sch: Schedule) -> None:
    sch["layers.0"].trace(leaf_modules={"Dropout", "fc1"}, flatten=True)
    sch["layers.1"].trace(tracer="huggingface", example_inputs={"x": torch.randn(2, 8)})
    sch["layers.2"].trace(tracer="huggingface", example_inputs=(torch.ones(2, 8),))


def trace_until(sch: Schedule) -> None:
    sch.trace_until(["layers.1"], concrete_args={})
    sch["layers.0"].cut_pipeline_stage()


def fork_rng(sch: Schedule) -> None:
    sch["layers.0.drop"].fork_rng()


def compile_(sch: Schedule) -> None:
    sch.select("layers.*.fc1").compile(backend="eager", dynamic=True)


#: Builtin primitives -> schedules that have them.
CASES: dict[str, Callable[[Schedule], None]] = {
    "annotate": annotate,
    "checkpoint": checkpoint,
    "compile": compile_,
    "cut_pipeline_stage": cut,
    "decompose": decompose_and_fuse,
    "fork_rng": fork_rng,
    "fuse": decompose_and_fuse,
    "replace": replace,
    "replace_all": replace_all,
    "set": set_,
    "shard": shard_and_sync,
    "sync": shard_and_sync,
    "trace": trace,
    "trace_until": trace_until,
}
SCHEDULES = {**CASES, "replace in graphs": replace_in_graphs}


def test_every_primitive_has_a_case() -> None:
    builtin = {n for n, c in slapo.list_primitives(name_only=False).items() if is_builtin(c)}
    assert builtin == set(CASES)
    for name, schedule in CASES.items():
        sch = slapo.create_schedule(stack())
        schedule(sch)
        assert name in {record.primitive for record in sch.history}


def check_round_trip(
    make: Callable[[], nn.Module], schedule: Callable[[Schedule], None], path: Path
) -> Schedule:
    """The replayed schedule and model are those that were recorded."""
    sch = slapo.create_schedule(make())
    schedule(sch)
    sch.record.save(path)
    loaded = ScheduleRecord.load(path)
    assert str(loaded) == str(sch.record)
    assert loaded.digest() == sch.digest()
    assert loaded.diff(sch.record) == ""
    again = slapo.replay(make(), path, allow=["tests"])
    assert again.digest() == sch.digest()
    assert print_of(again) == print_of(sch)
    assert [str(record) for record in again.history] == [str(record) for record in sch.history]
    assert {n: type(m).__name__ for n, m in again.mod.named_modules()} == {
        n: type(m).__name__ for n, m in sch.mod.named_modules()
    }
    again.record.save(path)  # once more, from what was loaded
    assert ScheduleRecord.load(path).diff(sch.record) == ""
    return again


def print_of(sch: Schedule) -> str:
    return re.sub(r"0x\w+", "", str(sch))


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    again = check_round_trip(stack, SCHEDULES[name], tmp_path / "record.json")
    sch = slapo.create_schedule(stack())
    SCHEDULES[name](sch)
    for mode in (True, False):
        x = torch.randn(3, 8)
        outputs = []
        for model in (sch.mod.train(mode), again.mod.train(mode)):
            torch.manual_seed(2)
            slapo.set_random_seed(3)
            outputs.append(model(x))
            outputs[-1].sum().backward()
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
    grads = [{n: p.grad for n, p in s.mod.named_parameters()} for s in (sch, again)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_an_empty_record(tmp_path: Path) -> None:
    again = check_round_trip(stack, lambda sch: None, tmp_path / "record.json")
    assert len(again.record) == 0
    assert str(again.record) == ""


def test_searches_are_made_when_the_program_made_them(tmp_path: Path) -> None:
    """Each of the later searches would find less than the program has found."""

    def schedule(sch: Schedule) -> None:
        sch.trace(flatten=True)
        gelus, layers = sch.find(gelu), sch.find(r"layers\.\d\.fc1")
        for match in reversed(gelus):
            sch.replace(torch.tanh, match)
        sch.replace(Scaled(2.0), sch.find_node(r"layers\.\d\.fc2")[1])
        for match in layers[1:]:
            sch.replace(nn.Identity(), match)

    again = check_round_trip(stack, schedule, tmp_path / "record.json")
    called = [n.target for n in again.mod.graph.nodes if n.op == "call_module"]
    assert "layers.0.fc1" in called
    assert "layers.1.fc2" not in called
    assert len(again.mod.graph.find_nodes(op="call_function", target=torch.tanh)) == 3


def test_the_record_shows_the_search() -> None:
    sch = slapo.create_schedule(block())
    sch.replace(torch.tanh, sch.find(gelu))
    assert sch.history[-1].arguments["target_ops"] == "[find(gelu)[0]]"
    sch.replace(nn.Linear(8, 16), sch.find("fc1")[0])
    assert sch.history[-1].arguments["target_ops"] == "find('fc1')[0]"


def test_a_pattern_that_is_another_one_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sch = slapo.create_schedule(block())
    sch.replace(torch.tanh, sch.find(gelu))
    sch.record.save(tmp_path / "record")

    def other(x: Any) -> Any:
        return F.gelu(x) * 1

    other.__qualname__ = "gelu"
    monkeypatch.setitem(globals(), "gelu", other)
    with pytest.raises(slapo.SlapoError, match=r"find\(gelu\) finds 0 matches here, but found 1"):
        slapo.replay(block(), tmp_path / "record", allow=["tests"])


def test_bindings_by_name(tmp_path: Path) -> None:
    """The graph has the operands the other way round than the replacement takes them."""

    def schedule(sch: Schedule) -> None:
        sch.replace(subtracted, sch.find(difference), concrete_args={"scale": -1.0})

    again = check_round_trip(Subtracts, schedule, tmp_path / "record.json")
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(again.mod(x, y), x - y + torch.sin(y))


def difference(second: Any, first: Any) -> Any:
    return torch.sin(second) - torch.cos(first)


def test_matches_side_by_side(tmp_path: Path) -> None:
    """Several subgraphs at once, and weights that come from those of the modules replaced."""

    def schedule(sch: Schedule) -> None:
        sch.replace(FusedThree(8), sch.find(any_projection))

    again = check_round_trip(attention, schedule, tmp_path / "record.json")
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(again.mod(x), attention()(x))


def any_projection(x: Any) -> Any:
    return slapo.call_module("q|k|v", x)


class FusedThree(nn.Module):
    """Three projections of one input, whose values are those of the modules it replaces."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(3 * size, size))
        self.bias = nn.Parameter(torch.empty(3 * size))

    def weight_sources(self) -> dict[str, Any]:
        from slapo.weights.provenance import Source

        return {name: Source(tuple(f"{k}.{name}" for k in range(3))) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight, self.bias).chunk(3, -1)


def test_a_schedule_with_everything(tmp_path: Path) -> None:
    def schedule(sch: Schedule) -> None:
        sch["layers.1.fc1"].decompose()
        sch.trace(flatten=True)
        for match in sch.find(gelu)[:1]:
            sch.replace(nn.GELU("tanh"), match, name="Approximate")
        sch.fuse(sch.find(bias_gelu), name="BiasGelu")
        sch.checkpoint(sch.find(last_residual))
        sch["head"].checkpoint()
        sch["layers.1.drop"].cut_pipeline_stage()

    again = check_round_trip(stack, schedule, tmp_path / "record.json")
    assert again["layers.1.drop"].metadata.primitives["cut_pipeline_stage"] == {"enabled": True}


def last_residual(x: Any, y: Any) -> Any:
    return slapo.call_module(r"layers\.2\.drop", x) + y


@pytest.mark.usefixtures("registered")
def test_a_primitive_of_the_users(tmp_path: Path) -> None:
    def schedule(sch: Schedule) -> None:
        sch["head"].scale(2.0, 3.0, 4.0, by=double, a=1, b=2)

    again = check_round_trip(stack, schedule, tmp_path / "record.json")
    torch.testing.assert_close(again["head"].mod.weight, 42 * stack().head.weight)


def test_a_root_with_a_path(tmp_path: Path) -> None:
    sch = slapo.create_schedule(stack(), path="model")
    sch["head"].checkpoint()
    sch.record.save(tmp_path / "record")
    again = slapo.replay(stack(), tmp_path / "record", allow=["tests"])
    assert again.digest() == sch.digest()
    assert again["head"].path == "model.head"


def test_text_and_order_of_sets_are_the_same_in_every_process() -> None:
    sch = slapo.create_schedule(stack())
    sch["head"].annotate("bias", "kinds", {"b", "a", "c"})
    assert sch.history[0].arguments["value"] == "{'a', 'b', 'c'}"


# --- what is kept ---------------------------------------------------------------------------------
def test_later_changes_do_not_reach_the_record() -> None:
    sch = slapo.create_schedule(stack())
    value = {"a": [1]}
    sch["head"].annotate("bias", "kind", value)
    value["a"].append(2)
    assert sch.history[0].arguments["value"] == "{'a': [1]}"
    again = slapo.replay(stack(), sch.record)
    assert again["head"].mod.bias.kind == {"a": [1]}
    again["head"].mod.bias.kind["a"].append(3)
    assert slapo.replay(stack(), sch.record)["head"].mod.bias.kind == {"a": [1]}


def test_a_record_is_of_its_moment() -> None:
    sch = slapo.create_schedule(stack())
    before = sch.record
    sch["head"].checkpoint()
    assert (len(before), len(sch.record)) == (0, 1)


def test_nothing_is_kept_alive() -> None:
    sch = slapo.create_schedule(stack())
    old = weakref.ref(sch["head"].mod)
    new = nn.Linear(8, 8)
    weights = weakref.ref(new.weight)
    sch["head"].replace(new)
    sch["layers.0"].trace()
    found = sch["layers.0"].find(lambda x: F.gelu(x))
    graph = weakref.ref(found[0][0][1].graph)
    sch["layers.0"].replace(torch.tanh, found)
    sch["layers.0"].replace(nn.Identity())
    sch["head"].replace(nn.Identity())
    del new, found
    gc.collect()
    assert (old(), weights(), graph()) == (None, None, None)


# --- what no file can hold ------------------------------------------------------------------------
def changed(new: nn.Module, change: Callable[[Any], Any]) -> Callable[[Schedule], Any]:
    """Puts a copy of a module in, after a change."""

    def apply(sch: Schedule) -> None:
        other = copy.deepcopy(new)
        change(other)
        sch["head"].replace(other)

    return apply


def one_at_two_places(sch: Schedule) -> None:
    new = nn.GELU()
    sch["head"].replace(new)
    sch["layers.0.drop"].replace(new)


def holds_old_weight(sch: Schedule) -> None:
    new = nn.Linear(8, 8, bias=False)
    new.weight = sch["head"].mod.weight
    sch["head"].replace(new)


def local_class(sch: Schedule) -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    sch["head"].replace(Local())


def tied_by_hand(sch: Schedule) -> None:
    with slapo.init_empty_weights():
        new = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    new[1].weight = new[0].weight
    sch["head"].replace(new)


#: Beside those of ``tests/mistakes/of_records.py``.
REFUSED: dict[str, tuple[Callable[[Schedule], Any], str]] = {
    "callable object": (
        lambda s: s.sync("fwd_post", Hooks()),
        "sync_op_or_fn is 'Hooks', an object of Hooks; pass a top-level function of an importable",
    ),
    "partial of a lambda": (
        lambda s: s.sync("fwd_post", functools.partial(lambda k, m, a, o: o, 1)),
        "sync_op_or_fn is '<lambda>', a lambda",
    ),
    "module with the old one in it": (
        lambda s: s["head"].replace(nn.Sequential(s["head"].mod, nn.ReLU())),
        "its '0' is in the model already",
    ),
    "module at two places": (one_at_two_places, "it is in the model already"),
    "tied module": (tied_by_hand, "a Sequential that was changed after it was created"),
    "frozen module": (
        changed(nn.Linear(8, 8, device="meta"), lambda m: m.requires_grad_(False)),
        "a Linear that was changed after it was created",
    ),
    "module with an old weight": (holds_old_weight, "it holds the model's own 'weight'"),
    "changed module": (
        changed(Scaled(2.0), lambda m: vars(m).update(factor=3.0, kinds=("a", "b"), extra="more")),
        "that was changed after it was created",
    ),
    "module with a hook": (
        changed(nn.GELU(), lambda m: m.register_forward_hook(double)),
        r"hooks were registered on it \(forward_hooks\)",
    ),
    "module of a local class": (local_class, "its class local_class.<locals>.Local cannot be"),
    "argument under another name": (
        lambda s: s["head"].replace(Hidden(2.0)),
        r"or stores an argument under another name",
    ),
    "argument that is gone": (
        changed(Scaled(2.0), lambda m: delattr(m, "factor")),
        "does not rebuild it .*missing 1 required",
    ),
    "parameter": (
        lambda s: s["head"].annotate("bias", "mask", nn.Parameter(torch.zeros(2))),
        "a Parameter, which has no text form",
    ),
    "object": (
        lambda s: s["head"].annotate("bias", "mask", [Hooks.Config()]),
        r"an object of Hooks.Config; pass plain values",
    ),
    "key": (
        lambda s: s["head"].annotate("bias", "mask", {(1, Hooks.Config()): 1, print: 2}),
        "an object of Hooks.Config",
    ),
}


class Pair(NamedTuple):
    one: int
    other: int


class Hooks:
    class Config:
        """Of which nothing is known."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_saved(name: str, tmp_path: Path) -> None:
    apply, message = REFUSED[name]
    sch = slapo.create_schedule(stack())
    apply(sch)  # and not before
    line = re.escape(sch.history[-1].location)
    with pytest.raises(slapo.SlapoError, match=rf"- step \d, sch.*# {line}: .*{message}"):
        sch.record.save(tmp_path / "record")
    assert list(tmp_path.iterdir()) == []
    other = stack()
    with pytest.raises(slapo.SlapoError, match=message):
        slapo.replay(other, sch.record)
    assert not slapo.create_schedule(other).history  # without a warning: nothing was begun


def test_all_that_is_refused_is_told(tmp_path: Path) -> None:
    sch = slapo.create_schedule(stack())
    for layer in sch.select("layers.*"):
        layer.sync("fwd_post", lambda m, a, o: o).sync("fwd_post", lambda m, a, o: o)
    with pytest.raises(slapo.SlapoError, match=r"(?s)step 0.*step 4.*\(and 1 more\)"):
        sch.record.save(tmp_path / "record")


def test_names_that_mean_something_else() -> None:
    sch = slapo.create_schedule(stack())

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output

    hook.__qualname__ = "double"
    assert (
        "not the object that is imported as tests.test_record:double" in keep(hook, sch).problem()
    )
    assert keep(double, sch).encode() == "tests.test_record:double"
    assert keep(torch.Tensor.view, sch).encode() == "torch:Tensor.view"
    assert keep(ScheduleRecord.load, sch).revive(sch) == ScheduleRecord.load
    assert "a named tuple, Pair; pass a tuple" in keep(Pair(1, 2), sch).problem()


# --- names in a file ------------------------------------------------------------------------------
def step_with(**arguments: Any) -> dict[str, Any]:
    """A step of a file that replaces the first layer."""
    return {
        "path": "0",
        "primitive": "replace",
        "arguments": arguments,
        "positional": 0,
        "location": "somewhere.py:1",
    }


TOUCH = {"partial": [{"import": "os:system"}, {"tuple": []}, {"dict": {}}]}
HARMFUL = {
    "a program as a module": {"module": {"class": "subprocess:Popen", "args": [["touch", "made"]]}},
    "a function that makes a module": {"made_by": [{"import": "os:system"}, "Linear"]},
    "a partial of one": {"made_by": [TOUCH, "Linear"]},
    "by way of torch": {"made_by": [{"import": "torch:os.system"}, "Linear"]},
    "a class of torch that is no module": {"module": {"class": "torch:Generator"}},
    "a loader of torch": {"made_by": [{"import": "torch.hub:load"}, "Linear"]},
    "a loader at the top of torch": {"made_by": [{"import": "torch:load"}, "Linear"]},
    "a download of Transformers": {
        "made_by": [{"import": "transformers:AutoModel.from_pretrained"}, "Linear"]
    },
    "a program of slapo": {"made_by": [{"import": "slapo.autotune.trial:run_command"}, "Linear"]},
    "a builtin": {"made_by": [{"import": "torch:builtins.exec"}, "Linear"]},
    "a module of the search path": {"module": {"class": "imported_by_accident:Linear"}},
    "a function that is called a dtype": {"torch": "load"},
}


@pytest.mark.parametrize("argument", HARMFUL.values(), ids=HARMFUL)
def test_a_file_cannot_run_what_it_names(
    argument: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_accident.py").write_text("raise SystemExit('it was imported')\n")
    steps = [step_with(new_mod={"import": "torch:relu"}), step_with(new_mod=argument)]
    head = {"format": "slapo.schedule", "version": 1, "world_size": 1}
    (tmp_path / "record").write_text(json.dumps({**head, "steps": steps}))
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((slapo.SlapoError, ValueError), match=r"may only name|not a dtype"):
        slapo.replay(model, tmp_path / "record")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported_by_accident.py", "record"]
    assert type(model[0]) is nn.Linear


def test_packages_that_a_caller_allows(tmp_path: Path) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].sync("fwd_post", double)
    sch.record.save(tmp_path / "record")
    with pytest.raises(slapo.SlapoError, match=r"pass allow=\['tests'\]"):
        slapo.replay(nn.Sequential(nn.Linear(2, 2)), tmp_path / "record")
    for allow in (["tests"], "tests"):
        model = nn.Sequential(nn.Linear(2, 2))
        assert slapo.replay(model, tmp_path / "record", allow=allow).digest() == sch.digest()
    # Of the program that made it, nothing has to be allowed.
    assert slapo.replay(nn.Sequential(nn.Linear(2, 2)), sch.record).digest() == sch.digest()


# --- replay on another model ----------------------------------------------------------------------
def refused(
    model: nn.Module, record: Any, error: type[Exception], message: str, **given: Any
) -> None:
    """The replay is refused, and the model is unchanged."""
    sch = slapo.create_schedule(model)
    before = fingerprint(sch)
    with pytest.raises(error, match=message):
        slapo.replay(model, record, **given)
    assert fingerprint(sch) == before


class Acts(nn.Module):
    def __init__(self, act: nn.Module, scale: float = 0.5) -> None:
        super().__init__()
        self.act, self.scale = act, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.scale).transpose(0, 1)


def scaled_gelu(x: Any, scale: Any) -> Any:
    return F.gelu(x * scale).transpose(0, 1)


def scaled_tanh(x: Tensor, scale: float) -> Tensor:
    return torch.tanh(x * scale).transpose(0, 1)


def scaled_into_tanh(sch: Schedule) -> None:
    sch.replace(scaled_tanh, sch.find(scaled_gelu))


@pytest.mark.parametrize("other", [Acts(nn.ReLU()), nn.Sequential(nn.GELU())])
def test_a_model_that_the_record_does_not_fit(other: nn.Module) -> None:
    sch = slapo.create_schedule(Acts(nn.GELU()))
    scaled_into_tanh(sch)
    refused(other, sch.record, slapo.SlapoError, "finds 0 matches here, but found 1 when")


def test_a_graph_with_other_edges() -> None:
    sch = slapo.create_schedule(Subtracts())
    sch.replace(torch.sub, sch.find(difference))
    again = slapo.replay(SubtractsOthers(), sch.record)
    x, y = torch.ones(2), torch.zeros(2)
    torch.testing.assert_close(again.mod(x, y), y - x + torch.sin(y))


class SubtractsOthers(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(y) - torch.cos(x) + torch.sin(y)


def test_no_graph() -> None:
    sch = slapo.create_schedule(block())
    sch.trace()
    sch.replace(torch.tanh, sch.find(gelu))
    record = ScheduleRecord(sch.history[1:])
    message = r"sch is not traced here, but find\(gelu\)\[0\] was found in a graph"
    refused(block(), record, slapo.SlapoError, message)


def test_constants_of_the_other_model_are_taken() -> None:
    sch = slapo.create_schedule(Acts(nn.GELU()))
    scaled_into_tanh(sch)
    again = slapo.replay(Acts(nn.GELU(), scale=0.25), sch.record)
    for each, scale in ((sch, 0.5), (again, 0.25)):
        expected = torch.tanh(torch.full((2, 2), scale))
        torch.testing.assert_close(each.mod(torch.ones(2, 2)), expected)


def test_sizes_of_weights_may_be_others(tmp_path: Path) -> None:
    """Recorded on a small model, replayed on a large one."""
    sch = slapo.create_schedule(Stack(size=4))
    for layer in sch.select("layers.*"):
        layer.fuse(layer.find(gelu_of_fc1), compiler=None)
    sch.record.save(tmp_path / "record")
    assert (
        slapo.replay(Stack(size=12), tmp_path / "record", allow=["tests"]).digest() == sch.digest()
    )


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda sch: sch.find(lambda x: F.gelu(x)), "a match of a pattern that is a lambda, which"),
        (lambda sch: sch.find_node(lambda n: "gelu" in n.name)[0], "pattern that is a lambda"),
        (lambda sch: [("", n) for n in sch.mod.graph.nodes if "gelu" in n.name], "picked by hand"),
        (lambda sch: list(sch.find(gelu)[0]), "picked by hand"),
    ],
)
def test_matches_that_no_file_can_hold(pick: Any, message: str, tmp_path: Path) -> None:
    sch = slapo.create_schedule(block())
    sch.trace()
    found = pick(sch)
    sch.replace(torch.tanh, found)
    assert "%gelu" in sch.history[-1].arguments["target_ops"]
    with pytest.raises(slapo.SlapoError, match=message):
        sch.record.save(tmp_path / "record")
    node = next(iter(sch.mod.graph.nodes))
    assert "an object of Node" in keep(node, sch).problem()


def test_a_trace_that_fails() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Sequential(nn.ReLU())))
    sch["0"].trace()
    model = nn.Sequential(DataDependent())
    message = r"step 0 .*sch\[\"0\"\].trace\(\) failed, see the warning"
    with pytest.warns(UserWarning, match="could not be traced"):
        refused(model, sch.record, slapo.SlapoError, message)


def test_a_function_that_is_another_one_now(tmp_path: Path) -> None:
    edited = saved(tmp_path, lambda data: data["steps"][1].update(identity="of before"))
    with pytest.warns(
        UserWarning, match="step 1, .*replace_all.*differs from the recorded one"
    ) as caught:
        slapo.replay(stack(), edited, allow=["tests"])
    assert caught[0].filename == __file__


def saved(path: Path, edit: Callable[[Any], None] = lambda data: None) -> Path:
    """A file of two steps, with a change."""
    sch = slapo.create_schedule(stack())
    sch["layers.0"].checkpoint()
    sch.replace_all(nn.Dropout, make_tanh)
    file = path / "record.json"
    sch.record.save(file)
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    return file


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("steps"), "'steps' is missing; write it again"),
        (lambda d: d["steps"].append(3), "step 2: "),
        (lambda d: d["steps"][0].update(path=3), r"path, primitive and location are \[3, "),
        (
            lambda d: d["steps"][0]["arguments"].update(x={"lambda": "x"}),
            "step 0: {'lambda': 'x'} is not an argument of a record",
        ),
    ],
)
def test_files_that_are_not_right(edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleRecord.load(saved(tmp_path, edit))


def test_a_file_can_be_edited(tmp_path: Path) -> None:
    edited = saved(tmp_path, lambda data: data["steps"].pop(0))
    assert [r.primitive for r in slapo.replay(stack(), edited, allow=["tests"]).history] == [
        "replace_all"
    ]


# --- other numbers of ranks -----------------------------------------------------------------------
def recorded_on_two(schedule: Callable[[Schedule], Any]) -> ScheduleRecord:
    world(1, 2)
    sch = slapo.create_schedule(stack())
    schedule(sch)
    return sch.record


def heads_and_shards(sch: Schedule) -> None:
    set_(sch)
    for layer in sch.select("layers.*"):
        layer["fc1.inner"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        layer["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


@pytest.mark.parametrize("size", [1, 4])
def test_other_numbers_of_ranks(fake_group: Any, size: int) -> None:
    record = recorded_on_two(heads_and_shards)
    fake_group(size - 1, size)
    sch = slapo.replay(stack(), record, allow=["tests"])
    assert sch["layers.0.fc1.inner"].mod.weight.shape == (16 // size, 8)
    assert (sch["layers.1.fc1"].mod.heads, sch["layers.1.fc1"].mod.sizes) == (
        8 // size,
        (4 // size, 8 // size),
    )
    assert sch.digest() == record.digest()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            lambda s: s["layers.0.drop"].replace(Heads(2)).set("heads", 2),
            r"at world_size 2, and \[2\] may differ at .*; record select\(path\)",
        ),
        (
            lambda s: s.select("layers.*.drop").replace(make_heads).set("heads", 4),
            r"step 3, .*\.set\(name='heads', value=4\).* 2, .*\[4\] may differ "
            r".*set\('heads', whole=",
        ),
        (
            lambda s: s.replace_all(nn.Dropout, make_tanh, factor=2),
            r"\[2\] may differ at world_size 4",
        ),
    ],
)
def test_numbers_of_a_rank_are_refused(
    fake_group: Any, schedule: Callable[[Schedule], Any], message: str
) -> None:
    record = recorded_on_two(schedule)
    assert slapo.replay(stack(), record, allow=["tests"]).digest() == record.digest()
    fake_group(0, 4)
    with pytest.raises(slapo.SlapoError, match=message):
        slapo.replay(stack(), record, allow=["tests"])


def make_heads(path: str, module: nn.Module) -> nn.Module:
    return Heads(8)


def test_whole_numbers_that_are_not_divisible(fake_group: Any) -> None:
    world(0, 3)
    sch = slapo.create_schedule(nn.Sequential(Heads(8)))
    with pytest.raises(ValueError, match="whole=8 of 'heads' is not divisible by world_size 3"):
        sch["0"].set("heads", whole=8)
    assert sch["0"].set("heads", whole=6).mod.heads == 2


# --- differences ----------------------------------------------------------------------------------
def record_of(*lines: str) -> ScheduleRecord:
    sch = slapo.create_schedule(stack())
    for line in lines:
        eval(line, {**globals(), "sch": sch})
    return sch.record


BASE = (
    'sch["layers.0.fc1"].shard("weight", axis=0)',
    'sch["layers.0"].sync("fwd_post", double)',
    'sch["layers.1"].checkpoint()',
    'sch["layers.1.drop"].replace(nn.GELU())',
)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (BASE, ""),
        (BASE[:2] + BASE[3:], '@@ -3 +2,0 @@\n-sch["layers.1"].checkpoint()'),
        ((*BASE, 'sch["head"].checkpoint()'), '@@ -4,0 +5 @@\n+sch["head"].checkpoint()'),
        (
            ('sch["head"].shard("weight", axis=1)', *BASE[1:]),
            "@@ -1 +1 @@\n-sch[\"layers.0.fc1\"].shard(tensor_name='weight', axis=0)\n"
            "+sch[\"head\"].shard(tensor_name='weight', axis=1)",
        ),
    ],
)
def test_differences(lines: tuple[str, ...], text: str, tmp_path: Path) -> None:
    first, second = record_of(*BASE), record_of(*lines)
    assert first.diff(second) == text
    second.save(tmp_path / "record")
    assert first.diff(ScheduleRecord.load(tmp_path / "record")) == text
    assert bool(second.diff(first)) is bool(text)


def test_modules_of_one_class_differ_by_their_fingerprint() -> None:
    other = record_of(*BASE[:3], 'sch["layers.1.drop"].replace(nn.GELU("tanh"))')
    line = r'sch\["layers.1.drop"\].replace\(new_mod=GELU\)  # \w{16}'
    assert re.fullmatch(rf"@@ -4 \+4 @@\n-{line}\n\+{line}", record_of(*BASE).diff(other))


def test_what_is_compared() -> None:
    record = record_of(*BASE)
    assert [r.primitive for r in record[1:3]] == ["sync", "checkpoint"]
    assert (
        slapo.replay(stack(), record[:2], allow=["tests"]).digest()
        == record[:2].digest()
        != record.digest()
    )
    assert str(record).splitlines()[2].startswith('2: sch["layers.1"].checkpoint()  # <string>:1')
    assert repr(record) == "<ScheduleRecord of 4 primitives, world_size 1>"


# --- models of Transformers, on real ranks --------------------------------------------------------
def losses(sch: Schedule, family: Any) -> list[float]:
    """Of three steps."""
    model, _ = slapo.build(sch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    tokens = torch.randint(0, 96, (2, 7))
    inputs, targets = family.batch(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    )
    found = []
    for _ in range(3):
        loss = family.loss(model(**inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_both(rank: int, world_size: int, name: str, path: str, save: bool) -> tuple[Any, ...]:
    """Losses of the schedule and of its replay, and their digests."""
    from examples import parallel_models

    family = parallel_models.FAMILIES[name]
    sizes = parallel_models.Sizes(64, layers=2, heads=8, length=16, vocabulary=96)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(family.build(sizes))
    slapo.set_random_seed(7, tp_rank=rank)
    sch = slapo.create_schedule(models[0])
    parallel_models.schedule(sch, family, checkpoint_ratio=0.5)
    if save:
        sch.record.save(path)
    dist.barrier()
    again = slapo.replay(models[1], path, allow=["tests"])
    return losses(sch, family), losses(again, family), sch.digest(), again.digest()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_on_two_and_four_ranks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.modeling_utils")
    path = str(tmp_path / "record")
    on_two = run_distributed(train_both, 2, name, path, True)
    on_four = run_distributed(train_both, 4, name, path, False)
    for expected, got, digest, replayed in on_two + on_four:
        assert got == expected
        assert replayed == digest == on_two[0][2]
        assert got[-1] < got[0]
    torch.testing.assert_close(on_two[0][0], on_four[0][0], rtol=1e-4, atol=1e-5)


def test_a_cut_model_of_transformers(tmp_path: Path) -> None:
    """Example inputs are part of the record."""
    pytest.importorskip("transformers.modeling_utils")
    from examples import parallel_models

    family = parallel_models.FAMILIES["gpt2"]
    sizes = parallel_models.Sizes(16, layers=2, heads=2, length=16, vocabulary=32)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return family.build(sizes).eval()

    def schedule(sch: Schedule) -> None:
        parallel_models.schedule(sch, family, stages=2, checkpoint_ratio=0.5)

    again = check_round_trip(make, schedule, tmp_path / "record.json")
    tokens = torch.randint(0, 32, (3, 5))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    torch.testing.assert_close(again.mod(**given).logits, make()(**given).logits)
