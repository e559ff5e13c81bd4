"""The target "torch" beyond the contract: schedules, sharding, shapes that change, probes."""

import logging
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.agreement import gathered
from slapo.framework_dialect.pytorch import pipeline
from slapo.framework_dialect.pytorch.placement import SCHEDULES
from slapo.pipeline.boundaries import Boundaries, ShapeProbe, TensorMeta, describe_tensors
from tests.communication import Collectives
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone, compare, whole
from tests.runtimes.contract import VOCABULARY, build, loss_fn, make, seeded, sgd
from tests.runtimes.ranks import on_ranks


# --- probes --------------------------------------------------------------------------------------
def picks(self: Any, x: Tensor) -> Tensor:
    """Its shapes depend on data."""
    out = x.clone()
    chosen = (x.sum(-1) >= 0).nonzero().flatten()
    out[chosen] = self.fc(x[chosen])
    torch.rand(1)
    return out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))


def picked() -> nn.Module:
    return nn.Sequential(module_of(picks, fc=nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 4))


def _stages(model: nn.Module, path: str) -> Any:
    sch = slapo.create_schedule(model)
    sch.trace_until("")
    sch[path].cut_pipeline_stage()
    return slapo.pipeline.generate_pipeline_partition(sch).mod.stages


LIBRARY = torch.library.Library("slapo_test", "DEF")
LIBRARY.define("on_numbers(Tensor x) -> Tensor")


def not_on_meta(x: Tensor) -> Tensor:
    raise RuntimeError("not without numbers")


LIBRARY.impl("on_numbers", torch.clone, "CPU")
LIBRARY.impl("on_numbers", not_on_meta, "Meta")


class Numbers(nn.Module):
    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.slapo_test.on_numbers(x)
        return out


PROBED = {
    "norm and dropout": (normed, "2"),
    "values": (picked, "1"),
    "not without numbers": (lambda: nn.Sequential(Numbers(), nn.Linear(4, 4)), "0"),
}


@pytest.mark.parametrize("kind", PROBED)
def test_probes_leave_no_trace(kind: str) -> None:
    """Nor does torch log a traceback in red."""
    make, path = PROBED[kind]
    first, _ = _stages(make(), path)
    before = {n: t.clone() for n, t in first.state_dict().items()}
    state = torch.get_rng_state()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    theirs = logging.getLogger("torch._subclasses.fake_tensor")
    theirs.addHandler(handler)
    try:
        received = describe_tensors(first.received, (torch.ones(3, 4),))
        [sent] = ShapeProbe(first, torch.device("cpu")).run(received)
    finally:
        theirs.removeHandler(handler)
    needs_gradient = kind != "not without numbers"
    assert replace(sent, name="") == TensorMeta("", (3, 4), torch.float32, needs_gradient)
    assert sent.nbytes == 48
    assert logged == []
    assert torch.equal(state, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert type(value) is Tensor
        assert torch.equal(value, before[name]), name


def test_probes_say_why_a_stage_fails() -> None:
    first, _ = _stages(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "0")
    received = describe_tensors(("input",), (torch.ones(3, 5),))
    with pytest.raises(slapo.SlapoError, match=r"stage 0 fails on inputs of .*\(3, 5\)"):
        Boundaries({0: first}, 2, torch.device("cpu")).of(received)


# --- on several processes ------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    [*(("torch", name) for name in sorted(SCHEDULES)), ("deepspeed", "1f1b"), ("megatron", "1f1b")],
)
@on_ranks(2)
def test_lengths_may_change_from_batch_to_batch(target: str, name: str) -> None:
    """Batches of several lengths, with evaluations in between."""
    check_lengths(target, name)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble"])
@on_ranks(2)
def test_masks_are_packed_for_a_torch_that_sends_floats_only(name: str) -> None:
    """As before torch 2.12."""
    with patch.object(pipeline, "_SENDS_FLOATS_ONLY", True):
        engine = check_lengths("torch", name)
    assert any(any(run.layouts) for run in engine._runs.values())


def check_lengths(target: str, name: str) -> Any:
    stages = 2 if SCHEDULES[name].stages_per_rank == 1 else 4
    options = {"pipeline_schedule": name} if target == "torch" else {}
    engine = make(target, (2, 1, 1), stages=stages, **options)
    reference = Alone(seeded(), loss_fn, sgd)
    for length in (5, 3, 5):
        tokens = torch.arange(8 * length).view(8, length) % VOCABULARY
        batches = iter([({"ids": tokens}, tokens)] * 3)
        for _ in range(2):
            expected = reference.step((tokens, tokens))
            assert engine.train_batch(batches).item() == pytest.approx(expected, abs=1e-5)
        expected, _ = reference.evaluate((tokens, tokens))
        assert engine.eval_batch(batches).item() == pytest.approx(expected, abs=1e-5)
    return engine


def token_norm() -> nn.Module:
    """Sequence parallelism: the norm runs on a slice of the tokens."""
    layers = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    return module_of(lambda self, x: self.down(torch.relu(self.up(self.norm(x)))), **layers)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
@on_ranks(4)
def test_sequence_parallel_gradients(data_parallel: str, micro_batches: int) -> None:
    mesh = slapo.init_mesh(dp=2, tp=2, device="cpu")
    torch.manual_seed(0)
    model = token_norm()
    alone = Alone(model, lambda out, target: out.pow(2).mean(), sgd, clip=1e3)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    for name in ("weight", "bias"):
        sch["norm"].annotate(name, "sequence_parallel", True)
    sch["up"].shard("weight", 0).shard("bias", 0).sync("fwd_pre", "all_gather", axis=1)
    sch["down"].shard("weight", 1).sync("fwd_post", "reduce_scatter", axis=1)
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=lambda out, target: out.pow(2).mean(),
        optimizer=sgd,
        data_parallel=data_parallel,
        clip_grad_norm=1e3,
        micro_batches=micro_batches,
    )
    batch = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    tp, dp = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    part = batch[2 * dp : 2 * dp + 2, 3 * tp : 3 * tp + 3]
    with Collectives() as seen:
        for piece in part.chunk(micro_batches):
            # Each rank has half of the tokens, and the loss is the mean over all: half of its own.
            engine.backward(engine(piece).pow(2).mean() / 2 / micro_batches)
        before = seen.counts()["allreduce_"]
        engine.step()
    assert before == {"ddp": micro_batches, "fsdp": 0}[data_parallel]  # DDP's own
    # One for the gradients of the norm and of the bias of the layer by rows, one that compares what
    # is whole, the others for the length of the whole gradient.
    assert seen.counts()["allreduce_"] - before == {"ddp": 3, "fsdp": 4}[data_parallel]
    alone.step((batch, None))
    assert float(engine.grad_norm) == pytest.approx(alone.norms[0], rel=1e-5)
    expected = alone.state()
    for name in ("norm.weight", "down.bias"):
        mine = whole(model.get_parameter(name))
        assert (mine - expected[name]).abs().max().item() < 1e-6


# --- fine-tuning, initialization, modes, failures ------------------------------------------------
def encoder() -> nn.Module:
    """A model around the encoder of torch, which branches on its inputs."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return module_of(
        lambda self, ids: self.head(self.encoder(self.table(ids), src_key_padding_mask=ids == 0)),
        table=nn.Embedding(11, 8),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 11),
    )


@on_ranks(2)
def test_stages_within_an_encoder_of_torch() -> None:
    reference = Alone(encoder(), loss_fn, sgd)
    mesh = slapo.init_mesh(pp=2, device="cpu")
    sch = slapo.create_schedule(encoder(), mesh=mesh)
    sch.trace_until("encoder", example_inputs=[torch.ones(4, 5, dtype=torch.long)])
    sch["encoder.layers.0"].cut_pipeline_stage()
    given = {"loss_fn": loss_fn, "optimizer": sgd, "micro_batches": 2}
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
    ids = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))
    apart = compare(engine, reference, [(ids, ids), (ids[:4], ids[:4])])
    assert max(apart.values()) < 1e-6, apart
    evaluated = engine.eval_batch(iter([(ids, ids)])).item()
    assert evaluated == pytest.approx(reference.evaluate((ids, ids))[0], abs=1e-6)


@on_ranks(2)
def test_stages_made_on_meta_differ() -> None:
    mesh = slapo.init_mesh(pp=2, device="cpu")
    torch.manual_seed(0)
    with slapo.init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sch = slapo.create_schedule(model, group=mesh["tp"])
    sch.trace_until("")
    sch["1"].cut_pipeline_stage()
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss, micro_batches=2)
    own = {n: t.detach() for n, t in engine.state_dict().items() if n.endswith("weight")}
    weights = [tensor for found in gathered(own, None) for tensor in found.values()]
    assert len(weights) == 4
    for number, weight in enumerate(weights):
        assert not any(torch.equal(weight, other) for other in weights[:number])


@on_ranks(2)
def test_fsdp_with_ties_between_the_items_of_a_list() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    alone = Alone(model, F.mse_loss, sgd)
    engine = build(model, layout=(1, 2, 1), data_parallel="fsdp")
    x = torch.cat([torch.ones(2, 4), torch.ones(2, 4) * 2])
    assert max(compare(engine, alone, [(x, torch.zeros(4, 4))] * 3).values()) < 1e-5
    with pytest.raises(slapo.SlapoError, match="built with data_parallel"):
        build(model, layout=(1, 2, 1), data_parallel="fsdp")
