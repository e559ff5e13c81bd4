"""Schedules as data: every primitive goes through a file, and what no file can hold is refused."""

import functools
import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

pytest.importorskip("transformers")

import slapo
from examples import parallel_models
from slapo import Schedule, ScheduleRecord
from slapo.history import identify
from slapo.primitives import base
from slapo.primitives.base import is_builtin
from slapo.record import keep
from slapo.utils.common import get_hooks
from tests.check.verdicts import fake_world
from tests.graph.served import make
from tests.mistakes import saved
from tests.primitives.models import Block, Stack
from tests.sharding.packed import MLP, Packed


# --- what schedules name --------------------------------------------------------------------------
def make_tanh(path: str, module: nn.Module, factor: float = 1.0) -> nn.Module:
    return Scaled(factor)


def double(module: nn.Module, args: tuple[Any, ...], output: Tensor, factor: float = 2.0) -> Tensor:
    return factor * output


def reversed_arguments(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return (x, *rest)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


class Scaled(nn.Module):
    """Keeps what its constructor takes."""

    def __init__(self, factor: float, kinds: tuple[str, ...] = ("tanh",)) -> None:
        super().__init__()
        self.factor, self.kinds = factor, kinds

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * torch.tanh(x)


class Heads(nn.Module):
    """Knows a number."""

    def __init__(self, heads: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.inner, self.sizes = heads, inner, (heads, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.inner is None else self.inner(x)


def subtracts() -> nn.Module:
    return make(lambda self, x, y: torch.sin(x) - torch.cos(y) + torch.sin(y))


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


# --- every primitive ------------------------------------------------------------------------------
def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return cls(size=8).eval()


stack, block = (functools.partial(made, cls) for cls in (Stack, Block))


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


# Dynamo of torch 2.14 asks intermediates for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    again = check_round_trip(stack, SCHEDULES[name], tmp_path / "record.json")
    sch = slapo.create_schedule(stack())
    SCHEDULES[name](sch)
    assert name not in CASES or name in {record.primitive for record in sch.history}
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


def test_matches_side_by_side(tmp_path: Path) -> None:
    """Several subgraphs at once, and weights that come from those of the modules replaced."""

    def schedule(sch: Schedule) -> None:
        sch.trace()
        sch.replace(Packed(), sch.find(gate_or_up))

    again = check_round_trip(gated, schedule, tmp_path / "record.json")
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(again.mod(x), gated()(x))


def gated() -> nn.Module:
    torch.manual_seed(1)
    return MLP()


def gate_or_up(x: Any) -> Any:
    return slapo.call_module("gate|up", x)


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


def test_functions_are_the_same_in_every_process() -> None:
    """Sets of constants have another order there, and objects another address."""

    def made(kinds: str, group: object) -> Any:
        names: dict[str, Any] = {"group": group}
        exec(f"def hook(module, args, output, group=group): return output in {kinds}", names)
        return names["hook"]

    first = identify(made("{0, 8}", object()))
    assert first == identify(made("{8, 0}", object()))
    assert first != identify(made("{0, 9}", object()))


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
class Pair(NamedTuple):
    one: int
    other: int


def test_refused_when_saved(tmp_path: Path) -> None:
    """And not before; ``tests/golden/mistakes/save.txt`` has all that is refused."""
    sch = slapo.create_schedule(stack())
    sch.sync("fwd_post", lambda module, args, output: output)
    line = re.escape(sch.history[-1].location)
    message = "is '<lambda>', a lambda"
    with pytest.raises(slapo.SlapoError, match=rf"- step 0, sch.*# {line}: .*{message}"):
        sch.record.save(tmp_path / "record")
    assert list(tmp_path.iterdir()) == []
    other = stack()
    with pytest.raises(slapo.SlapoError, match=message):
        slapo.replay(other, sch.record)
    assert not slapo.create_schedule(other).history  # without a warning: nothing was begun


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
def acts(scale: float = 0.5) -> Any:
    model: Any = make(lambda self, x: F.gelu(x * self.scale).transpose(0, 1))
    model.scale = scale
    return model


def scaled_gelu(x: Any, scale: Any) -> Any:
    return F.gelu(x * scale).transpose(0, 1)


def scaled_tanh(x: Tensor, scale: float) -> Tensor:
    return torch.tanh(x * scale).transpose(0, 1)


def difference(second: Any, first: Any) -> Any:
    return torch.sin(second) - torch.cos(first)


def test_a_graph_with_other_edges() -> None:
    sch = slapo.create_schedule(subtracts())
    sch.replace(torch.sub, sch.find(difference))
    again = slapo.replay(
        make(lambda self, x, y: torch.sin(y) - torch.cos(x) + torch.sin(y)), sch.record
    )
    x, y = torch.ones(2), torch.zeros(2)
    torch.testing.assert_close(again.mod(x, y), y - x + torch.sin(y))


def test_constants_of_the_other_model_are_taken() -> None:
    sch = slapo.create_schedule(acts())
    sch.replace(scaled_tanh, sch.find(scaled_gelu))
    again = slapo.replay(acts(0.25), sch.record)
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


def two_steps(sch: Schedule) -> None:
    sch["layers.0"].checkpoint()
    sch.replace_all(nn.Dropout, make_tanh)


def test_a_function_that_is_another_one_now() -> None:
    edited = saved(two_steps, lambda data: data["steps"][1].update(identity="of before"))
    with pytest.warns(
        UserWarning, match="step 1, .*replace_all.*differs from the recorded one"
    ) as caught:
        slapo.replay(stack(), edited, allow=["tests"])
    assert caught[0].filename == __file__


def test_a_file_can_be_edited() -> None:
    edited = saved(two_steps, lambda data: data["steps"].pop(0))
    history = slapo.replay(stack(), edited, allow=["tests"]).history
    assert [record.primitive for record in history] == ["replace_all"]


# --- other numbers of ranks -----------------------------------------------------------------------
def recorded_on_two(schedule: Callable[[Schedule], Any]) -> ScheduleRecord:
    with fake_world():
        sch = slapo.create_schedule(stack())
        schedule(sch)
        return sch.record


def heads_and_shards(sch: Schedule) -> None:
    set_(sch)
    for layer in sch.select("layers.*"):
        layer["fc1.inner"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        layer["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


@pytest.mark.parametrize("size", [1, 4])
def test_other_numbers_of_ranks(size: int) -> None:
    record = recorded_on_two(heads_and_shards)
    with fake_world(size):
        sch = slapo.replay(stack(), record, allow=["tests"])
    assert sch["layers.0.fc1.inner"].mod.weight.shape == (16 // size, 8)
    assert (sch["layers.1.fc1"].mod.heads, sch["layers.1.fc1"].mod.sizes) == (
        8 // size,
        (4 // size, 8 // size),
    )
    assert sch.digest() == record.digest()


def make_of(name: str) -> Callable[[], nn.Module]:
    """Makes a small model of Transformers, with the same values each time."""
    sizes = parallel_models.Sizes(64, layers=2, heads=8, length=16, vocabulary=96)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return parallel_models.FAMILIES[name].build(sizes).eval()

    return make


def outputs_and_gradients(sch: Schedule) -> list[Tensor]:
    tokens = torch.arange(14).view(2, 7)
    logits = sch.mod(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    logits.square().mean().backward()
    return [logits, *(p.grad for p in sch.mod.parameters())]


@pytest.mark.parametrize(("ranks", "stages"), [(4, 1), (1, 2)], ids=["ranks", "stages"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers(name: str, ranks: int, stages: int, tmp_path: Path) -> None:
    """Sharded, from a record of two ranks; or cut, with example inputs as a part of the record."""
    make, path = make_of(name), tmp_path / "record.json"

    def schedule(sch: Schedule) -> None:
        slapo.set_random_seed(7, tp_rank=sch.rank)
        family = parallel_models.FAMILIES[name]
        parallel_models.schedule(sch, family, stages=stages, checkpoint_ratio=0.5)

    with fake_world(min(ranks, 2)):
        check_round_trip(make, schedule, path)
    with fake_world(ranks):
        sch, again = slapo.create_schedule(make()), slapo.replay(make(), path, allow=["tests"])
        schedule(sch)
        assert again.digest() == sch.digest()
        for one, other in zip(sch.mod.modules(), again.mod.modules(), strict=True):
            hooks = [{mode: len(h) for mode, h in get_hooks(m).items()} for m in (one, other)]
            assert hooks[0] == hooks[1]
        both = outputs_and_gradients(sch), outputs_and_gradients(again)
        torch.testing.assert_close(*both, rtol=0, atol=0)


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
