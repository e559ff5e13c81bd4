"""`slapo.check` beyond planted mistakes: what it runs on, what it leaves alone, what it says."""

import copy
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

import slapo
from slapo.agreement import gathered
from slapo.sharding import masked, reduce_from_group
from slapo.sharding.steps import STEPS
from slapo.verify.placement import PlacementError, check, register_place_rule, rules
from slapo.verify.placement import fake_parameters as stand_ins
from slapo.verify.placement.call import RULES, independent_along
from slapo.verify.placement.place import Place
from tests.check.planted import Case
from tests.check.verdicts import fake_world
from tests.graph.served import make
from tests.runtimes.ranks import error_of, on_ranks
from tests.sharding.families import FAMILIES, Steps
from tests.sharding.parallel_models import CASES

HIDDEN = 12


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_world():
        yield


class Block(nn.Module):
    """A pair of layers around a function."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 20), nn.Linear(20, HIDDEN)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def split(sch: slapo.Schedule, *left_out: str) -> slapo.Schedule:
    sch["fc1"].shard("weight", axis=0).shard("bias", axis=0)
    if "backward" not in left_out:
        sch["fc1"].sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1)
    if "forward" not in left_out:
        sch["fc2"].sync("fwd_post", "all_reduce")
    return sch


def split_block(act: Callable[[Tensor], Tensor] = F.gelu) -> slapo.Schedule:
    return split(slapo.create_schedule(Block(act)))


X = torch.randn(3, 5, HIDDEN, requires_grad=True)


def refused(sch: slapo.Schedule, inputs: Any = X, **kwargs: Any) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        check(sch, inputs, **kwargs)
    return caught.value


# --- right schedules -----------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_right_schedule_passes(name: str, world_size: int) -> None:
    torch.manual_seed(0)
    with fake_world(world_size, world_size - 1):
        sch = slapo.create_schedule(CASES[name].make())
        CASES[name].schedule(sch)
        check(sch, CASES[name].inputs())


@pytest.mark.parametrize("spreads", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_schedule_of_a_family_passes(family: str, spreads: bool) -> None:
    for world_size in (2, 4):  # of four ranks each has one head
        with fake_world(world_size, world_size - 1):
            if family in ("llama", "qwen3", "mixtral") and world_size == 4:
                continue  # two heads of keys
            sch = slapo.create_schedule(FAMILIES[family].build(0.1))
            Steps(FAMILIES[family], spreads).apply(sch)
            for layer in sch.select(FAMILIES[family].stacks[0].layers)[:1]:
                layer.checkpoint()
            check(sch, FAMILIES[family].inputs(3, 12 if spreads else 7))


ACTIVATIONS = ["celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"]
ACTIVATIONS += ["leaky_relu", "logsigmoid", "mish", "relu6", "selu", "sigmoid", "silu", "softplus"]
ACTIVATIONS += ["softshrink", "softsign", "tanhshrink"]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(two_ranks: None, act: str) -> None:
    check(split_block(getattr(F, act)), X)


def test_autocast(two_ranks: None) -> None:
    def act(x: Tensor) -> Tensor:
        return F.gelu(x.float()).to(x.dtype)

    with torch.autocast("cpu", torch.bfloat16):
        check(split_block(act), X)


def test_a_model_without_memory(two_ranks: None) -> None:
    sch = split(slapo.create_schedule(Block().to("meta")))
    check(sch, X)
    assert all(param.is_meta for param in sch.mod.parameters())
    sch = slapo.create_schedule(Block().to("meta"))
    assert refused(split(sch, "backward")).suspect == "fc1"


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "mixtral"])
def test_on_fakes(two_ranks: None, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Larger models run without numbers, where Transformers takes other branches."""
    monkeypatch.setattr(stand_ins, "REAL_BYTES", 0)
    inputs = FAMILIES[family].inputs(3, 7)
    sch = slapo.create_schedule(FAMILIES[family].build(0.1))
    Steps(FAMILIES[family]).apply(sch)
    check(sch, inputs)
    for mistake in ("no_forward_sync", "no_backward_sync", "head_size_cut", "mask_of_rank_0"):
        sch = slapo.create_schedule(FAMILIES[family].build(0.1))
        Case(mistake, family, False).steps().apply(sch)
        assert refused(sch, inputs).path


@pytest.mark.parametrize("compiler", ["inductor", "TorchScript", None])
def test_what_was_fused(two_ranks: None, compiler: str | None) -> None:
    sch = slapo.create_schedule(Block())
    sch["fc1"].decompose()
    sch.fuse(sch.find(lambda x, b: F.gelu(x + b)), compiler=compiler)
    assert refused(split(sch, "backward")).suspect == "fc1"
    sch["norm"].sync("fwd_post", "all_reduce_grad")
    check(sch, X)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_of_the_models_own(two_ranks: None, is_reentrant: bool) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=is_reentrant)

    sch = slapo.create_schedule(make(forward, block=Block()))
    split(sch["block"], "backward")
    assert refused(sch).suspect == "block.fc1"
    sch["block.fc1"].sync("bwd_post", "all_reduce")
    check(sch, X)


# --- what is left alone --------------------------------------------------------------------------
def test_nothing_is_changed(two_ranks: None) -> None:
    """``tests/golden/mistakes/check.txt`` shows the same of refusals."""
    model = nn.Sequential(Block(), nn.BatchNorm1d(5), nn.Dropout(0.5)).eval()
    model[1].weight.grad = torch.ones(5)
    before = copy.deepcopy(model.state_dict())
    parameters, hooks = list(model.parameters()), len(model[0].fc1._forward_pre_hooks)
    random, forked = torch.random.get_rng_state(), slapo.get_rng_tracker().get_states()
    sch = slapo.create_schedule(model)
    check(sch, X)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(model[1].weight.grad, torch.ones(5))
    assert model[0].fc1.weight.grad is None
    assert X.grad is None
    assert not model.training
    assert len(model[0].fc1._forward_pre_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), random)
    after = slapo.get_rng_tracker().get_states()
    assert after.keys() == forked.keys()
    assert all(torch.equal(after[name][d], s) for name in forked for d, s in forked[name].items())
    assert nn.Module.__call__.__qualname__.startswith("Module.")


def test_statistics_in_a_compiled_fusion_stay() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU()))
    sch.trace()
    sch.fuse(sch.find(lambda x: F.relu(slapo.call_module("1", x))), compiler="TorchScript")
    before = copy.deepcopy(sch.mod.state_dict())
    check(sch, torch.randn(3, 8))
    with slapo.Verify(sch, (torch.randn(3, 8),)):
        sch["0"].checkpoint()
    assert len(before) == 7
    assert all(torch.equal(before[name], v) for name, v in sch.mod.state_dict().items())


# --- what it says --------------------------------------------------------------------------------
def test_layers_of_one_input_are_summed_where_it_enters(two_ranks: None) -> None:
    layers = {name: nn.Linear(HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")}
    heads = make(lambda self, x: self.out(self.q(x) * self.k(x) + self.v(x)), **layers)
    sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(HIDDEN), heads))
    for name in ("q", "k", "v"):
        sch["1"][name].shard("weight", axis=0).shard("bias", axis=0)
    sch["1.out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    error = refused(sch)
    assert 'add sch["1"].sync("bwd_post", "all_reduce")' in str(error)
    error.remedy.apply(sch)  # type: ignore[attr-defined]
    check(sch, X)


def test_a_number_of_a_config_that_is_divided_in_place(two_ranks: None) -> None:
    """The run as one process has the numbers of before; the config may be of any class."""

    def grouped(self: Any, x: Tensor) -> Any:
        heads = self.fc1(x).unflatten(-1, (self.config.heads, -1))
        return self.fc2(heads.softmax(-1).flatten(-2))

    model: Any = make(grouped, fc1=nn.Linear(HIDDEN, 20), fc2=nn.Linear(20, HIDDEN))
    model.config = types.SimpleNamespace(heads=2)
    sch = split(slapo.create_schedule(model))
    assert "in one process" in str(refused(sch))
    model.config.heads = 1
    check(sch, X)


# --- what models and hooks do by themselves ------------------------------------------------------
def reduced_by(hook: Callable[[Tensor], Any]) -> slapo.Schedule:
    sch = slapo.create_schedule(Block())
    sch["fc1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].replace(nn.Linear(20, HIDDEN, bias=False)).shard("weight", axis=1)
    sch["fc2"].mod.register_forward_hook(lambda module, args, out: hook(out))
    return sch


def all_reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, op)
    return total


def test_gathers_of_torch_in_a_hook(two_ranks: None) -> None:
    """Their name is another one in a later torch."""
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    error = refused(reduced_by(lambda out: gather(out, 0, dist.group.WORLD)[:3]))
    assert "slapo.sharding" in str(error)


# torch warns of what has no gradient, as it would in training.
@pytest.mark.filterwarnings("ignore:c10d..allreduce_:UserWarning")
def test_collectives_of_torch_in_a_hook(two_ranks: None) -> None:
    check(reduced_by(all_reduced), X)
    assert "that is not a partial sum" in str(
        refused(reduced_by(lambda out: all_reduced(all_reduced(out))))
    )
    assert "not a sum over the ranks" in str(
        refused(reduced_by(lambda out: all_reduced(out, dist.ReduceOp.MAX)))
    )


def test_a_share_of_a_bias_is_one_over_the_ranks_of_the_schedule() -> None:
    with fake_world(4, 1):
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        sch = slapo.create_schedule(Block(), group=pair)
        sch["fc1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["fc2"].fork_rng()  # so that the sum is formed around the layer
        sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        check(sch, X)


def spread_table(start: int, mask: Callable[[Tensor, int, int], Tensor]) -> slapo.Schedule:
    layers = OrderedDict(table=nn.Embedding(24, HIDDEN), out=nn.Linear(HIDDEN, 5))
    sch = slapo.create_schedule(nn.Sequential(layers))
    sch["table"].shard("weight", axis=0)
    foreign: list[Tensor] = []

    def before(module: Any, args: Any) -> Any:
        foreign[:] = [(args[0] < start) | (args[0] >= start + 12)]
        return (mask(args[0], start, 12),)

    def after(module: Any, args: Any, out: Tensor) -> Tensor:
        return reduce_from_group(out.masked_fill(foreign[0].unsqueeze(-1), 0.0))

    sch["table"].sync("fwd_pre", before).sync("fwd_post", after)
    return sch


TOKENS = torch.randint(0, 24, (3, 7))


def test_tokens_masked_by_hand(two_ranks: None) -> None:
    """This is rank 1, which has rows 12 to 23."""
    check(spread_table(12, masked), TOKENS)
    error = refused(spread_table(0, masked), TOKENS)
    assert error.path == "table"
    assert "rank 1 has rows 12 to 23 of the table, and the mask keeps tokens 0 to 11" in str(error)
    by_hand = spread_table(12, lambda tokens, start, count: (tokens - start).clamp(0, count - 1))
    assert "masked" in str(refused(by_hand, TOKENS))


@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_uneven_shares(world_size: int, rank: int) -> None:
    """On every rank, where the last has the least: 25, 25, 25 and 22 rows, 6, 6, 6 and 3."""
    tokens = torch.randint(0, 97, (3, 7))

    def split(*left_out: str, total: int | None = 21) -> slapo.Schedule:
        layers = OrderedDict(table=nn.Embedding(97, 8), up=nn.Linear(8, 21), out=nn.Linear(21, 5))
        sch = slapo.create_schedule(nn.Sequential(layers))
        sch["table"].shard("weight", 0, uneven=True)
        if "table" not in left_out:
            sch["table"].sync("fwd_post", "all_reduce")
        sch["up"].shard("weight", 0, uneven=True).shard("bias", 0, uneven=True)
        if "up" not in left_out:
            sch["up"].sync("bwd_post", "all_reduce")
        keep = {"tensor_parallel_output_grad": False}
        if "out" not in left_out:
            sch["out"].sync("fwd_pre", "all_gather", axis=-1, **keep, total=total)
        return sch

    with fake_world(world_size, rank):
        check(split(), tokens)
        error = refused(split(total=None), tokens)
        assert (error.path, error.suspect) == ("out", "out")
        assert "its slices are uneven, 21 in all, but total=None; pass total=21" in str(error)
        assert refused(split("up"), tokens).suspect == "up"
        assert refused(split("out"), tokens).suspect == "out"
        with pytest.raises(slapo.SlapoError, match="nothing masks the tokens of other ranks"):
            check(split("table"), tokens)


def test_random_numbers(two_ranks: None) -> None:
    sch = split_block(nn.Dropout(0.1))
    assert refused(sch).path == "act"
    sch["act"].fork_rng()
    check(sch, X)
    check(split_block(nn.Dropout(0.0)), X)


# --- rules ---------------------------------------------------------------------------------------
@torch.library.custom_op("slapo_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: twice(grad))


def test_an_operation_of_ones_own(two_ranks: None) -> None:
    register_place_rule(torch.ops.slapo_tests.twice, lambda call: call.places[0])
    try:
        check(split_block(twice), X)  # type: ignore[arg-type]
    finally:
        del RULES["slapo_tests::twice"]
    register_place_rule("slapo_tests::twice", lambda call: torch.distributed.tensor.Shard(-1))
    check(split_block(twice), X)  # type: ignore[arg-type]
    register_place_rule("slapo_tests::twice", independent_along(0))
    try:
        assert "mixes what is along" in str(refused(split_block(twice)))  # type: ignore[arg-type]
    finally:
        del RULES["slapo_tests::twice"]


class Kernel(torch.autograd.Function):
    """As around a kernel that torch does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        launch(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = torch.empty(grad.shape)
        launch(grad, out)
        return out


def launch(x: Tensor, out: Tensor) -> None:
    jit = sys.modules["triton.runtime.jit"]
    jit.JITFunction().run(x, out)  # type: ignore[attr-defined]


class JITFunction:
    __name__ = "doubled"

    def run(self, x: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            out.copy_(2 * x)


def test_a_kernel_of_triton(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    monkeypatch.setattr(rules, "_FUNCTIONS", {})
    run = JITFunction.run
    error = refused(split_block(Kernel.apply))
    assert "a Triton kernel" in str(error)
    assert "doubled of (3, 5, 10)" in str(error)
    assert JITFunction.run is run
    alike: Callable[[Any], Place] = lambda call: call.places[0]  # noqa: E731
    register_place_rule(Kernel, alike, backward=alike)
    check(split_block(Kernel.apply), X)
    assert Kernel.forward.__qualname__ == "Kernel.forward"
    register_place_rule(Kernel, independent_along(0, 1), backward=alike)
    assert "Kernel" in str(refused(split_block(Kernel.apply)))


# --- on processes --------------------------------------------------------------------------------
@on_ranks(2, timeout=60)
def test_inputs_that_are_malformed_on_one_rank() -> None:
    inputs = object() if dist.get_rank() == 1 else X
    assert "example_inputs" in error_of(lambda: check(split_block(), inputs))


@on_ranks(2)
def test_all_ranks_hear_the_same() -> None:
    rank = dist.get_rank()
    slapo.set_random_seed(3, tp_rank=rank)
    check(spread_table(12 * rank, masked), TOKENS)
    error = refused(spread_table(0, masked), TOKENS)  # a mask that is right on rank 0 alone
    assert error.path == "table"
    zero, one = gathered(str(error), None)
    assert zero == one
    sch = split_block()
    check(sch, X)
    slapo.build(sch)


# --- build ---------------------------------------------------------------------------------------
def test_build_checks_first(two_ranks: None) -> None:
    sch = split(slapo.create_schedule(Block()), "backward")
    with pytest.raises(ValueError, match="no example inputs; pass check=example_inputs"):
        slapo.build(sch, check=True)
    with pytest.raises(PlacementError, match="bwd_post"):
        slapo.build(sch, check=X)
    with pytest.raises(PlacementError, match="bwd_post"):
        slapo.build(sch, check=True)  # what the check has seen is known
    sch["fc1"].sync("bwd_post", "all_reduce")
    slapo.build(sch, check=True)


def test_inputs_of_a_trace_serve_build() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    sch = slapo.create_schedule(model)
    assert sch.trace(tracer="dynamo", example_inputs=torch.ones(2, 4))
    slapo.build(sch, check=True)


def test_inputs_of_verify_serve_build_and_those_of_a_part_do_not() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(4, 6)), nn.Linear(6, 3)))
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["0"].checkpoint()
    with slapo.Verify(sch["1"], torch.ones(2, 6)):
        sch["1"].decompose()
    check(sch["1"], torch.ones(2, 6))
    slapo.build(sch, check=True)


@dataclass
class Answer:
    """An output that pytree knows nothing of."""

    logits: Tensor


class Wrapped(Block):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


def test_outputs_are_opened(two_ranks: None) -> None:
    check(split(slapo.create_schedule(Wrapped(Answer))), X)
    sch = split(slapo.create_schedule(Wrapped(Answer)), "backward")
    assert "bwd_post" in str(refused(sch))
    sch = split(slapo.create_schedule(Wrapped(lambda x: types.SimpleNamespace(value=x))))
    check(sch, X, lambda output: output.value.sum())


class Lazy(Block):
    """Computes once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(1, 2, x.shape[-1])
            self.register_buffer("late", x.detach().mean())
        self.seen["x"] = x
        return super().forward(x) * self.table


@pytest.mark.parametrize("fakes", [False, True])
def test_nothing_that_was_kept_of_a_run_stays(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, fakes: bool
) -> None:
    if fakes:
        monkeypatch.setattr(stand_ins, "REAL_BYTES", 0)
    sch = split(slapo.create_schedule(Lazy()))
    check(sch, X)
    assert sch.mod.table is None
    assert sch.mod.seen == {}
    assert "late" not in dict(sch.mod.named_buffers())


def test_verify_keeps_nothing_of_its_runs() -> None:
    sch = slapo.create_schedule(Lazy())
    with slapo.Verify(sch, X):
        sch["fc1"].decompose()
    assert sch.mod.table is None
    assert "late" not in dict(sch.mod.named_buffers())


def test_the_guide_tells_what_steps_take_and_give() -> None:
    said = {"replicate": "`Replicate()`", "partial": "`Partial()`", "masked": "masked tokens"}
    said |= {"part": "a part of a shared slice's gradient", "share": "that gradient"}

    def side(kind: str, along: str) -> str:
        return f"`Shard({along})`" if kind == "shard" else said[kind]

    rows = [
        f"| `{s.name}` | {side(s.takes, s.takes_along)} | {side(s.gives, s.gives_along)} |"
        for s in STEPS
    ]
    text = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    assert "\n".join(["| step | takes | gives |", "| --- | --- | --- |", *rows]) in text


class SharedKeys(nn.Module):
    """Heads share one head of keys and values, or two: neighbors, or each second."""

    def __init__(self, shared: int, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n) for n in (32, 4 * shared, 4 * shared))
        self.heads, self.shared, self.groups, self.how = 8, shared, 8 // shared, how
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.k, self.v))
        if self.how == "expanded":
            k, v = (part.expand(-1, -1, self.heads, -1) for part in (k, v))
        if self.how == "neighbors" and self.groups > 1:
            k, v = (part.repeat_interleave(self.groups, 2) for part in (k, v))
        if self.how == "each second" and self.groups > 1:
            k, v = (part.repeat(1, 1, self.groups, 1) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.how == "by the kernel")
        return self.out(mixed.transpose(1, 2).flatten(2))


def split_queries(sch: slapo.Schedule, tagged: bool = True) -> None:
    """Each rank has some of the queries of all heads of keys."""
    blocks = sch.mod.shared
    sch["q"].shard("weight", axis=0, blocks=blocks).shard("bias", axis=0, blocks=blocks)
    sch["out"].shard("weight", axis=1, blocks=blocks).sync("fwd_post", "all_reduce")
    sch.sync("bwd_post", "all_reduce").set("heads", whole=8).set("groups", whole=8 // blocks)
    for keys in "kv" if tagged else "":
        sch[keys].annotate("weight", "partial_grad", True).annotate("bias", "partial_grad", True)


KEYS = [(1, "by the kernel"), (1, "expanded"), (2, "by the kernel"), (2, "neighbors")]


@on_ranks(2)
def test_keys_that_heads_share() -> None:
    for shared, how in KEYS:
        torch.manual_seed(0)
        sch, x = slapo.create_schedule(SharedKeys(shared, how)), torch.randn(3, 5, 16)
        with slapo.Verify(sch, x):
            split_queries(sch)
        check(sch, x)


@pytest.mark.parametrize(
    ("shared", "how", "ranks", "is_right"),
    [
        (1, "by the kernel", 4, True),
        (1, "expanded", 4, True),
        (2, "by the kernel", 4, True),  # one head of queries for each head of keys
        (2, "each second", 2, False),
        # Nothing of how keys are repeated in one process is left on four ranks.
        (2, "neighbors", 4, False),
        (2, "each second", 4, False),
    ],
)
def test_shared_keys_without_numbers(shared: int, how: str, ranks: int, is_right: bool) -> None:
    x = torch.randn(3, 5, 16)
    with fake_world(ranks, ranks - 1):
        sch = slapo.create_schedule(SharedKeys(shared, how))
        split_queries(sch)
        if is_right:
            check(sch, x)
        else:
            refused(sch, x)


@pytest.mark.parametrize("how", ["by the kernel", "expanded"])
def test_keys_that_are_not_tagged(how: str) -> None:
    with fake_world(4, 3):
        sch = slapo.create_schedule(SharedKeys(1, how))
        split_queries(sch, tagged=False)
        error = refused(sch, torch.randn(3, 5, 16))
    assert error.suspect in ("k", "v")
    assert f'sch["{error.suspect}"].annotate("weight", "partial_grad", True)' in str(error)
