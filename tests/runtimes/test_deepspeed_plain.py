"""Scripts written for DeepSpeed: topology and config in, its own engine and optimizer out."""

import copy
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from tests.distributed import run_distributed
from tests.runtimes.alone import cut as cut_batch
from tests.runtimes.deepspeed_models import SGD, Model, alone, batches, cut, loss_fn, shard

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
}


def loss_of_tuple(output: dict[str, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
    # DeepSpeed hands labels over as a tuple.
    return loss_fn(output, {"labels": labels[0], "more": [labels[1]]})


def micro_batches(batch: Any, count: int) -> list[Any]:
    (ids, flags), targets = batch
    pieces = [t.chunk(count) for t in (ids, flags, targets["labels"], *targets["more"])]
    return [((i, f), [y, w]) for i, f, y, w in zip(*pieces, strict=True)]


def refused(**options: Any) -> str:
    try:
        slapo.build(slapo.create_schedule(Model()), target="deepspeed", **options)
    except (ValueError, TypeError, slapo.SlapoError) as error:
        return str(error)
    return "nothing"


def pipeline(rank: int, world: int) -> dict[str, Any]:
    """Three stages: the one in the middle never sees a batch."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=1, num_dp=1)
    torch.manual_seed(0)
    model = Model()
    reference = alone(model, parts=2, clip=0.3)
    sch = slapo.create_schedule(model, group=dist.new_subgroups(1)[0])
    cut(sch, 3)
    config = copy.deepcopy(CONFIG)
    engine, optimizer = slapo.build(
        sch,
        target="deepspeed",
        topology=topology,
        config=config,
        loss_fn=loss_of_tuple,
        optimizer=SGD,
    )
    losses, evals, logits = [], [], None
    for batch in batches(1, 2, size=4):
        data = micro_batches(batch, 2)
        value, logits = engine.eval_batch(iter(data), return_logits=True)
        loss = engine.train_batch(data_iter=iter(data))
        wanted = reference.step(batch)
        losses.append(abs(loss.item() - wanted))
        evals.append(abs(value.item() - wanted))
    errors = [
        refused(topology=topology, config=CONFIG, optimizer=SGD),
        refused(topology=topology, config=CONFIG, loss_fn=loss_fn, micro_batches=2),
        refused(
            topology=topology,
            config={**CONFIG, "zero_optimization": {"stage": 2}},
            loss_fn=loss_fn,
            optimizer=SGD,
        ),
        refused(
            topology=PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1),
            config=CONFIG,
            loss_fn=loss_fn,
        ),
    ]
    return {
        "losses": max(losses),
        "evals": max(evals),
        "engine": type(engine).__mro__[1].__name__,
        "optimizer": optimizer is engine.optimizer,
        "config": config == CONFIG,
        "logits": type(logits).__name__,
        "errors": errors,
    }


def test_a_pipeline_by_topology() -> None:
    results = run_distributed(pipeline, 3, timeout=200)
    for found in results:
        assert max(found["losses"], found["evals"]) < 1e-5, found
        assert found["engine"] == "PipelineEngine"
        assert found["optimizer"]
        assert found["config"]
        assert "loss_fn" in found["errors"][0]
        assert "pipe=3" in found["errors"][0]
        assert "gradient_accumulation_steps" in found["errors"][1]
        assert "ZeRO stage 2 does not go with pp=3" in found["errors"][2]
        assert "2 processes" in found["errors"][3]
        assert "has 3" in found["errors"][3]
    assert [found["logits"] for found in results] == ["NoneType", "NoneType", "dict"]


def whole(config: dict[str, Any], topology: Any, tp: int) -> float:
    torch.manual_seed(0)
    model = Model()
    if config.get("zero_optimization", {}).get("stage") == 3:
        model.temperature = nn.Parameter(model.temperature.detach().reshape(1))
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    dp = dist.get_world_size() // tp
    reference = alone(copy.deepcopy(model).to(dtype), torch.optim.AdamW, dp, clip=0.3)
    group = dist.group.WORLD if tp > 1 else None
    sch = slapo.create_schedule(model, group=group)
    if tp > 1:
        shard(sch)
    engine, _ = slapo.build(sch, target="deepspeed", config=config, topology=topology)
    errors = []
    for batch in batches(dp, 3):
        inputs, targets = cut_batch(batch, dp)[dist.get_rank() if dp > 1 else 0]
        loss = loss_fn(engine(*inputs), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        errors.append(abs(mean.item() / 2 - reference.step(batch)))
    return max(errors)


def unpipelined(rank: int, world: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed's own calls: this engine is its own.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    zero = [{**config, "zero_optimization": {"stage": stage}} for stage in (0, 3)]
    sharded = slapo.create_schedule(Model(), group=dist.new_subgroups(1)[0])
    return {
        "dp": [whole(one, None, 1) for one in zero],
        "tp": [whole(zero[0], None, 2)],
        "topology": [whole(zero[0], PipeModelDataParallelTopology(1, 2, 1), 2)],
        "bf16": [whole({**zero[0], "bf16": {"enabled": True}}, None, 1)],
        "clip": refused_sharded({**zero[0], "bf16": {"enabled": True}}),
        "group": sharded.world_size,
    }


def refused_sharded(config: dict[str, Any]) -> str:
    sch = slapo.create_schedule(Model(), group=dist.group.WORLD)
    shard(sch)
    try:
        slapo.build(sch, target="deepspeed", config=config)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_zero_and_tensor_parallelism_by_config() -> None:
    for found in run_distributed(unpipelined, 2, timeout=200):
        for kind in ("dp", "tp", "topology"):
            assert max(found[kind]) < 1e-5, found
        # Adam's first steps divide by gradients' own size; a step more is a tenth of the change.
        assert max(found["bf16"]) < 5e-3, found
        assert "ZeRO stage 1" in found["clip"]
        assert "bf16" in found["clip"]


def refused_or_equal(rank: int, world: int) -> dict[str, str]:
    """Replicas from other seeds, other configurations, and options that go with a mesh."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {
        "nonfinite": refused(config=CONFIG, optimizer=SGD, nonfinite="error"),
        "check_batches": refused(config=CONFIG, optimizer=SGD, check_batches=False),
        "sync": refused(config=CONFIG, optimizer=SGD, sync_replicated="yes"),
        "config": refused(config={**CONFIG, "gradient_clipping": 0.1 + rank}, optimizer=SGD),
    }
    torch.manual_seed(rank)
    sch = slapo.create_schedule(Model())
    engine, _ = slapo.build(
        sch, target="deepspeed", config=copy.deepcopy(CONFIG), optimizer=SGD, sync_replicated=True
    )
    sums = [p.detach().float().sum().item() for p in engine.module.parameters()]
    return {**found, "sums": str(sums)}


@pytest.mark.distributed
@pytest.mark.slow
def test_options_are_read_or_refused() -> None:
    ranks = run_distributed(refused_or_equal, 2)
    for found in ranks:
        for name in ("nonfinite", "check_batches"):
            assert f"deepspeed: {name}= goes with mesh=; without one, leave it out" in found[name]
        assert found["sync"] == "sync_replicated is 'yes'; pass True or False"
        assert "build(target='deepspeed'): config differs between ranks" in found["config"]
        assert found["sums"] == ranks[0]["sums"]
