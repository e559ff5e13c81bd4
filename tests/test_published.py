"""What scripts written for the published Slapo import and rely on."""

import importlib
import operator
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import slapo
from slapo.op import Print
from slapo.op.print import show
from slapo.pattern import call_module
from slapo.utils.common import get_hooks
from slapo.utils.report import profile_perf, report_memory
from tests.graph.served import make
from tests.primitives.models import Computes
from tests.runtimes.ranks import on_ranks
from tests.sharding.parallel_models import Case
from tests.sharding.test_tensor_parallel import check_case

NAMES = {
    "slapo.sharding.sync_ops": [
        "all_gather_forward_output",
        "reduce_scatter_forward_output",
        "scatter_forward_output",
        "reduce_forward_output",
        "reduce_backward_grad",
    ],
    "slapo.sharding": ["all_gather_forward_output", "reduce_backward_grad"],
    "slapo.random": [
        "CudaRNGStatesTracker",
        "get_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
        "_CUDA_RNG_STATE_TRACKER",
    ],
    "slapo.pipeline": ["analyze_tie_weights"],
    "slapo.model_schedule": ["gen_embedding_hooks"],
    "slapo.model_schedule.gpt2": ["gen_embedding_hooks"],
    "slapo.framework_dialect.deepspeed.pipeline": ["analyze_tie_ranks"],
    "slapo.framework_dialect": ["get_dialect_cls"],
    "slapo": ["Symbol", "Space", "Database"],
    "slapo.autotune": ["Symbol", "Space", "Database"],
    "slapo.autotune.tune": ["Symbol", "Space", "Database"],
    "slapo.op": ["Print"],
    "slapo.env": ["setup", "cleanup", "execute"],
    "slapo.initialization": ["init_empty_weights"],
    "slapo.utils.report": ["report_memory", "profile_perf"],
    "slapo.utils.common": ["get_hooks", "transfer_hooks", "is_lambda_function"],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_names_by_their_import_paths(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


BOUND = (
    "pattern op pipeline random initialization tracer sharding utils env framework_dialect "
    "autotune utils.report utils.common framework_dialect.deepspeed.pipeline.analyze_tie_ranks"
)


def test_a_plain_import_binds_the_modules() -> None:
    """In a process of its own: the tests have imported more than a script does."""
    code = f"import slapo\nfor name in {BOUND.split()}: eval(f'slapo.{{name}}')"
    subprocess.run([sys.executable, "-c", code], check=True)


def shows(self: Any, x: Tensor) -> Tensor:
    self.show(x, "before")  # nothing uses it
    Print()(x.sum(), f"{x.dim()} dims" if isinstance(x.dim(), int) else "dims", "in all")
    x = Print()(x * 2, "shape", x.shape, "mean", x.mean(), "of")
    return x + 1


TRACERS = ["pytorch", "huggingface", "dynamo"]


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_is_printed_is_of_the_run(tracer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a module or none, and of any values that the forward makes."""
    sch = slapo.create_schedule(make(shows, show=Print()))
    assert sch.trace(tracer=tracer, example_inputs=(torch.zeros(1, 2),))
    assert len(sch.find_node(lambda n: n.target is show)) in (2, 3)
    sch.replace(torch.sub, sch.find_node(lambda n: n.target is operator.add)[0])
    sch.mod.graph.eliminate_dead_code()
    sch.mod.recompile()
    capsys.readouterr()
    for number in (1, 3):
        found = sch.mod(torch.full((1, 2), float(number)))
        assert torch.equal(found, torch.full((1, 2), 2.0 * number - 1))
        shown = capsys.readouterr().out
        assert shown.count(f"before tensor([[{number}., {number}.]])") == 1
        assert f"in all tensor({2 * number}.)" in shown
        assert f"shape torch.Size([1, 2]) mean tensor({number}.) of tensor([[{2 * number}." in shown


def test_memory_is_a_number(caplog: pytest.LogCaptureFixture) -> None:
    kept = torch.ones(2**18)
    found = report_memory("here", report_gc=True)
    if not torch.accelerator.is_available():
        assert found == 0.0
    assert found + 1.0 > 0
    assert "known to Python: " in caplog.messages[0]
    assert "on cpu" in caplog.messages[0]
    assert kept.sum() == 2**18


@pytest.mark.parametrize(
    "inputs", [torch.ones(64, 512), (torch.ones(64, 512),), {"input": torch.ones(64, 512)}]
)
def test_where_the_time_goes(inputs: Any) -> None:
    model = nn.Linear(512, 512)
    table = profile_perf(model, inputs, backward=True)
    assert "aten::addmm" in table  # one of the ten that take longest, at this size
    assert model.weight.grad is not None


# --- how it behaves -----------------------------------------------------------------------------
class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) + 1


class Kept(Inner):
    pass


def outer() -> Any:
    middle = make(lambda self, x: self.kept(self.b(x)), b=Inner(), kept=Kept())
    return make(lambda self, x: self.a(x), a=middle)


@pytest.mark.parametrize("tracer", TRACERS)
def test_inlined_modules_below_a_child_are_no_nodes(tracer: str) -> None:
    model = outer()
    sch = slapo.create_schedule(model)
    inner = model.a.b
    x = torch.randn(2, 4)
    expected = model(x)
    assert sch["a"].trace(flatten=True, tracer=tracer, example_inputs=x)
    assert sch["a.b"].mod is inner
    assert "a.b.c" not in sch
    with pytest.raises(KeyError, match="inlined"):
        sch["a.b.c"]
    assert sch["a"].get_module("b") is inner
    assert sch["a.b"].get_module("c") is sch.get_module("a.b.c") is inner.c
    with pytest.raises(slapo.SlapoError, match="'b' was inlined"):
        sch["a.b"].checkpoint()
    # What the graph still calls is a node, under the name it is called by.
    assert sch["a.b.c.0"].mod is inner.c[0]
    assert list(sch["a"].child) == ["b", "kept"]
    assert list(sch["a.b"].child) == ["c.0", "c.1"]
    assert torch.equal(sch.mod(x), expected)
    sch["a.b.c.1"].replace(nn.Identity())
    assert not torch.equal(sch.mod(x), expected)


@pytest.mark.parametrize("name", ["a.kept", "Kept"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_named_leaves_are_leaves_of_the_schedule(name: str, tracer: str) -> None:
    sch = slapo.create_schedule(outer())
    inputs = torch.randn(2, 4)
    assert sch.trace(flatten=True, tracer=tracer, leaf_modules=[name], example_inputs=inputs)
    assert list(sch.child) == ["a"]
    assert list(sch["a"].child) == ["b.c.0", "b.c.1", "kept"]
    assert not isinstance(sch["a.kept"].mod, fx.GraphModule)
    assert not sch["a.kept"].child
    assert "a.kept.c" not in sch


def test_code_is_that_of_the_graph() -> None:
    sch = slapo.create_schedule(outer())
    assert sch.trace(flatten=True)
    assert "self.a.b.c" in sch.mod.code
    sch.mod(torch.randn(2, 4))
    sch.replace(torch.sin, sch.find_node("a.b.c.1")[0])
    assert "torch.sin" in sch.mod.code
    assert "torch.sin" in str(sch.mod)
    sch.mod(torch.randn(2, 4))
    assert "torch.sin" in str(sch.mod)


def shard_by_columns(node: slapo.Schedule) -> None:
    node.shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")


def shard_by_rows(node: slapo.Schedule) -> None:
    node.shard("weight", axis=1).sync("fwd_post", "all_reduce")


@pytest.mark.parametrize("shard", [shard_by_columns, shard_by_rows])
def test_decompose_after_a_shard_that_made_nothing_smaller(
    shard: Callable[[slapo.Schedule], None],
) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    weight, x = sch.mod[0].weight, torch.randn(3, 4)
    expected = sch.mod(x)
    shard(sch["0"])
    sch["0"].decompose()
    assert sch["0"].mod.weight is weight
    assert sch["0"].metadata.primitives["shard"]
    model, _ = slapo.build(sch)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match="sharded already"):
        sch["0"].shard("weight", axis=0)


def test_hooks_of_a_chain_go_to_what_replaces_it() -> None:
    parts = OrderedDict(first=nn.Linear(4, 4), last=nn.ReLU())
    model, seen = nn.Sequential(parts), []
    model.first.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.first.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.last.register_forward_hook(lambda *_: seen.append("post"))
    sch = slapo.create_schedule(model)
    subgraph = sch.find(lambda x: call_module("last", call_module("first", x)))
    new = Computes(lambda x: torch.relu(x * 2))
    sch.replace(new, subgraph)
    sch.mod(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]
    hooks = get_hooks(new)
    assert [len(hooks[mode]) for mode in ("fwd_pre", "fwd_post", "bwd_post")] == [1, 1, 1]


def test_a_node_is_built_by_itself() -> None:
    with slapo.init_empty_weights():
        model = outer()
    sch = slapo.create_schedule(model)
    sch["a.b"].checkpoint()
    built, optimizer = slapo.build(sch["a.b"])
    assert built is sch["a.b"].mod
    assert optimizer is None
    assert not any(p.is_meta for p in built.parameters())
    assert all(p.is_meta for p in model.a.kept.parameters())
    sch["a"].checkpoint()
    with pytest.raises(slapo.SlapoError, match=r'sch\["a"\]\.checkpoint'):
        slapo.build(sch["a.b"])


# --- names that scripts use ----------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels may be there")
@pytest.mark.parametrize(
    "name", ["native_flash_attn", "flash_attn", "cuda", "native_xformers", "cutlass", "triton"]
)
def test_kernels_that_are_not_here(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="slapo"):
        op = slapo.op.FlashAttentionOp(name, apply_causal_mask=True)
    assert op.attn_op_name == "auto"
    assert f'attn_op_name={name!r} means "auto" here' in caplog.text
    x = torch.randn(2, 5, 4, 8)
    assert torch.equal(op(x, x, x), slapo.op.FlashAttentionOp("auto", True)(x, x, x))


def test_a_tag_is_listed_at_the_root() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].annotate("weight", "foo", "bar")
    assert list(sch.metadata.param_tags) == ["foo"]


def test_the_tracker_of_random_states() -> None:
    from slapo.random import (
        _CUDA_RNG_STATE_TRACKER,
        CudaRNGStatesTracker,
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
        tracker_kept,
    )

    assert _CUDA_RNG_STATE_TRACKER is slapo.get_rng_tracker()
    assert isinstance(slapo.get_rng_tracker(), CudaRNGStatesTracker)
    tracker = CudaRNGStatesTracker()
    tracker.set_states({"s": 123})
    assert tracker.get_states() == {"s": 123}
    tracker.fork("not there")  # and not entered
    with tracker_kept():
        seeds = {model_parallel_cuda_manual_seed(3, rank, True) for rank in range(4)}
        assert len(seeds) == 4
        assert list(get_cuda_rng_tracker().get_states()) == ["model-parallel-rng"]
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(2)
        assert not torch.equal(inside, torch.rand(2))


def tokens() -> nn.Module:
    layers = {"fc1": nn.Linear(8, 16), "act": nn.GELU(), "fc2": nn.Linear(16, 8)}
    return nn.Sequential(OrderedDict(layers))


def by_a_function(sch: slapo.Schedule) -> None:
    """A function takes the rank's part of the tokens, and a gather undoes it."""
    rank, ranks = sch.rank, sch.world_size
    sch["fc1"].sync("fwd_pre", lambda module, args: (args[0].chunk(ranks, 1)[rank],))
    sch["fc1"].sync("fwd_pre", "all_gather", axis=1)
    sch["fc1"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", 1).sync("fwd_post", "reduce_scatter", axis=1)
    sch.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)


def fused() -> nn.Module:
    return nn.Sequential(OrderedDict(mlp=slapo.op.FusedMLP(8, 16, "relu", 0.0)))


def by_columns_and_rows(sch: slapo.Schedule) -> None:
    """The activation and the dropout of these layers act once, on the sum."""
    sch["mlp.fc_in"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["mlp.fc_out"].shard("weight", 1).sync("fwd_post", "all_reduce")


@on_ranks(2)
def test_sequence_parallel_by_a_function_and_a_fused_mlp() -> None:
    for build, schedule in ((tokens, by_a_function), (fused, by_columns_and_rows)):
        check_case(Case(build, schedule, lambda: torch.randn(3, 6, 8)))
