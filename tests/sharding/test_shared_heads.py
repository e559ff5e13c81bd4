"""Heads of keys and values that are fewer than ranks: held by several, and trained as one."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.sharding.tags import SHARERS
from slapo.verify.placement import PlacementError, check
from tests.check.verdicts import fake_world
from tests.distributed import run_distributed
from tests.runtimes.alone import Alone, compare
from tests.runtimes.cuda_standin import cuda_on_cpu
from tests.runtimes.layouts import adam, megatron_adam, sgd
from tests.sharding.families import SHARED, Steps, tokens
from tests.sharding.parallel_models import HIDDEN, GroupedHeads, grouped_heads

X = torch.randn(3, 7, HIDDEN)
LLAMA = "llama, 8 heads"


def test_a_group_of_an_earlier_world_is_not_used_again() -> None:
    """It may outlive its world, in a cycle of references that Python has not collected yet."""
    kept = []
    for _ in range(2):
        with fake_world(4):
            sch = slapo.create_schedule(nn.Linear(4, 4))
            sch.shard("weight", axis=0, parts=2)
            kept.append(getattr(sch.mod.weight, SHARERS).group)
    assert kept[0] is not kept[1]


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return SHARED[family].build(dropout=0.0)


def inputs() -> dict[str, Tensor]:
    ids = tokens(4, 7)
    return {"input_ids": ids, "labels": ids}


def trained(rank: int, world_size: int, family: str) -> list[tuple[float, float]]:
    """Losses and norms of some steps, ours and those of one process."""
    slapo.set_random_seed(3, tp_rank=rank)  # attention draws from a state of its own
    model, whole = model_of(family), model_of(family)
    sch = slapo.create_schedule(model)
    with slapo.Verify(sch, inputs()):
        Steps(SHARED[family]).apply(sch)
    built, _ = slapo.build(sch)
    found = []
    steps = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (built, whole)]
    for _ in range(3):
        losses = [each(**inputs()).loss for each in (built, whole)]
        for loss in losses:
            loss.backward()
        norms = [
            slapo.clip_grad_norm_(built, 0.5),
            nn.utils.clip_grad_norm_(whole.parameters(), 0.5),
        ]
        found += [(losses[0].item(), losses[1].item()), (norms[0].item(), norms[1].item())]
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("family", [LLAMA, "qwen3, 8 heads"])
def test_training(family: str) -> None:
    for found in run_distributed(trained, 4, family):
        for mine, theirs in found:
            assert mine == pytest.approx(theirs, rel=1e-4)


def by_engine(
    rank: int, world_size: int, target: str, ways: list[tuple[int, dict[str, Any]]]
) -> list[dict[str, float]]:
    """How far losses, norms and values of each engine are from those of one process."""
    with cuda_on_cpu() if target == "megatron" else nullcontext():
        return [_apart(target, *way) for way in ways]


def _apart(target: str, replicas: int, options: dict[str, Any]) -> dict[str, float]:
    mesh = slapo.init_mesh(dp=replicas, tp=8 // replicas, device="cpu")
    slapo.set_random_seed(3, mesh=mesh)
    sch = slapo.create_schedule(model_of(LLAMA), group=mesh["tp"])
    Steps(SHARED[LLAMA]).apply(sch)
    distributed = "distributed_optimizer" in options  # which is of Megatron-Core's own Adam
    options = {
        "optimizer": megatron_adam() if distributed else sgd,
        "clip_grad_norm": 0.1,
        **options,
    }
    engine, _ = slapo.build(sch, target=target, mesh=mesh, loss_fn=loss_of, **options)
    ids = tokens(4, 7)
    alone = Alone(model_of(LLAMA), loss_of, adam if distributed else sgd, clip=0.1)
    return compare(engine, alone, [((ids,), ids)] * 3)


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


#: Replicas of eight processes, and options.
WAYS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "torch": [
        (1, {}),
        (2, {"micro_batches": 2}),
        (2, {"data_parallel": "fsdp"}),
        (4, {"data_parallel": "fsdp", "micro_batches": 1}),
    ],
    "deepspeed": [
        (1, {}),
        (2, {"zero": 1}),
        (2, {"zero": 2, "micro_batches": 2}),
        (2, {"zero": 3}),
    ],
    # Whose groups are made once.
    "megatron": [(2, {"micro_batches": 2}), (2, {"distributed_optimizer": True})],
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("target", list(WAYS))
def test_engines(target: str) -> None:
    if target != "torch":
        pytest.importorskip({"megatron": "megatron.core"}.get(target, target))
    for found in run_distributed(by_engine, 8, target, WAYS[target], timeout=280):
        assert [max(each.values()) < 2e-5 for each in found] == [True] * len(WAYS[target]), found


def unseeded(rank: int, world_size: int) -> str:
    torch.manual_seed(rank)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8, bias=False)))
    sch["0"].shard("weight", 0, parts=2)
    with pytest.raises(slapo.SlapoError) as caught:
        slapo.build(sch)
    return str(caught.value)


@pytest.mark.distributed
def test_what_ranks_share_is_the_same() -> None:
    for message in run_distributed(unseeded, 4):
        assert "'0.weight' has different values on tensor-parallel ranks of one shard" in message


def test_copies_and_pickles_keep_the_sum() -> None:
    with fake_world(4, 3):
        sch = slapo.create_schedule(GroupedHeads())
        grouped_heads(sch)
        again = copy.deepcopy(sch.mod)
        assert again.k.weight.sharers.ranks == (2, 3)
        assert again.k.weight._backward_hooks


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("heads", [4, 8])
def test_mistakes_are_refused(heads: int, eager: bool) -> None:
    with fake_world(4, 3):
        sch = slapo.create_schedule(GroupedHeads(heads, eager=eager))
        for name in "qkv":
            parts = None if name == "q" else 2
            sch[name].shard("weight", 0, parts=parts).shard("bias", 0, parts=parts)
        sch["out"].shard("weight", 1).sync("fwd_post", "all_reduce")
        sch.set("groups", heads // 4)
        with pytest.raises(PlacementError):  # neither bwd_post nor the norm's sum
            check(sch, X)


def test_a_row_layer_counts_what_ranks_share_twice() -> None:
    with fake_world(4, 3):
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(HIDDEN, 4), nn.Linear(4, HIDDEN)))
        values = sch["0"].shard("weight", 0, parts=2).shard("bias", 0, parts=2)
        values.sync("bwd_post", "all_reduce")
        sch["1"].shard("weight", 1, parts=2).sync("fwd_post", "all_reduce")
        with pytest.raises(PlacementError, match="would each count it"):
            check(sch, X)
