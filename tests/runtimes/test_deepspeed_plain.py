"""Scripts written for DeepSpeed: topology and config in, its own engine and optimizer out."""

import copy
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slapo
from slapo.agreement import gathered
from tests.runtimes.alone import cut
from tests.runtimes.contract import Model, alone, data, loss_fn, scheduled, seeded, sgd
from tests.runtimes.ranks import error_of, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
}


def loss_of_tuple(output: Tensor, labels: tuple[Tensor]) -> Tensor:
    return loss_fn(output, labels[0])  # DeepSpeed hands labels over as a tuple


def refused(**options: Any) -> str:
    given = {"config": CONFIG, "optimizer": sgd, **options}
    sch = slapo.create_schedule(Model())
    return error_of(lambda: slapo.build(sch, target="deepspeed", **given))


def topology_of(pp: int, tp: int, dp: int) -> Any:
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return PipeModelDataParallelTopology(pp, tp, dp)


@on_ranks(3)
def test_a_pipeline_by_topology() -> None:
    """Three stages: the one in the middle never sees a batch."""
    topology = topology_of(3, 1, 1)
    reference = alone(clip=0.3)
    sch = scheduled(seeded(), dist.new_subgroups(1)[0], stages=3)
    config = copy.deepcopy(CONFIG)
    given = {"topology": topology, "loss_fn": loss_of_tuple, "optimizer": sgd}
    engine, optimizer = slapo.build(sch, target="deepspeed", config=config, **given)
    assert type(engine).__mro__[1].__name__ == "PipelineEngine"
    assert optimizer is engine.optimizer
    assert config == CONFIG
    for batch in data(2):
        parts = [((ids,), [targets]) for ids, targets in cut(batch, 2)]
        value, logits = engine.eval_batch(iter(parts), return_logits=True)
        evaluated, _ = reference.evaluate(batch)
        loss = engine.train_batch(data_iter=iter(parts))
        assert abs(loss.item() - reference.step(batch)) < 1e-5
        assert abs(value.item() - evaluated) < 1e-5
        assert isinstance(logits, Tensor) == (dist.get_rank() == 2)
    text = refused(topology=topology)
    assert "loss_fn" in text
    assert "pipe=3" in text
    given = {"topology": topology, "loss_fn": loss_fn}
    assert "gradient_accumulation_steps" in refused(micro_batches=2, **given)
    text = refused(config={**CONFIG, "zero_optimization": {"stage": 2}}, **given)
    assert "ZeRO stage 2 does not fit pp=3" in text
    text = refused(topology=topology_of(2, 1, 1), loss_fn=loss_fn)
    assert "2 processes" in text
    assert "has 3" in text


def train(
    config: dict[str, Any], tp: int = 1, topology: Any = None, tolerance: float = 1e-5
) -> None:
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    dp = dist.get_world_size() // tp
    reference = alone(optimizer=torch.optim.AdamW, parts=dp, clip=0.3, dtype=dtype)
    model = seeded()
    sch = scheduled(model, dist.group.WORLD) if tp > 1 else slapo.create_schedule(model)
    engine, _ = slapo.build(sch, target="deepspeed", config=config, topology=topology)
    for batch in data(3):
        ids, targets = cut(batch, dp)[dist.get_rank() if dp > 1 else 0]
        loss = loss_fn(engine(ids), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        assert abs(mean.item() / 2 - reference.step(batch)) < tolerance


@on_ranks(2)
def test_zero_and_tensor_parallelism_by_config() -> None:
    topology = topology_of(1, 2, 1)
    # DeepSpeed's own calls: this engine is its own.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    zero = {stage: {**base, "zero_optimization": {"stage": stage}} for stage in (0, 3)}
    bf16 = {**zero[0], "bf16": {"enabled": True}}
    for config in zero.values():
        train(config)
    train(zero[0], tp=2)
    train(zero[0], tp=2, topology=topology)
    # Adam's first steps divide by gradients' own size; a step more is a tenth of the change.
    train(bf16, tolerance=5e-3)
    sch = scheduled(Model(), dist.group.WORLD)
    text = error_of(lambda: slapo.build(sch, target="deepspeed", config=bf16))
    assert "ZeRO stage 1" in text
    assert "bf16" in text


@on_ranks(2)
def test_options_are_read_or_refused() -> None:
    """Replicas from other seeds, other configurations, and options that go with a mesh."""
    topology_of(1, 1, 2)  # sets DeepSpeed up
    for name in ("nonfinite", "check_batches"):
        text = f"deepspeed: {name}= needs mesh=; without it, leave it out, or write"
        assert text in refused(**{name: "error"})
    text = "sync_replicated is 'yes'; pass True or False"
    assert refused(sync_replicated="yes") == f"TypeError: {text}"
    rank = dist.get_rank()
    text = refused(config={**CONFIG, "gradient_clipping": 0.1 + rank})
    assert "build(target='deepspeed'): config differs between ranks" in text
    torch.manual_seed(rank)
    given = {"config": copy.deepcopy(CONFIG), "optimizer": sgd, "sync_replicated": True}
    engine, _ = slapo.build(slapo.create_schedule(Model()), target="deepspeed", **given)
    sums = gathered([p.detach().float().sum().item() for p in engine.module.parameters()], None)
    assert sums[0] == sums[1]
