"""Heads of keys and values that are fewer than ranks: held by several, and trained as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.check import PlacementError, check
from slapo.sharding.state import shards_of
from tests.check.verdicts import fake_world
from tests.distributed import run_distributed
from tests.sharding.parallel_models import HIDDEN, GroupedHeads, grouped_heads

X = torch.randn(3, 7, HIDDEN)


def llama(kind: str = "llama") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=4, use_cache=False, **sizes))
    return LlamaForCausalLM(LlamaConfig(attention_bias=True, use_cache=False, **sizes))


def split(sch: slapo.Schedule) -> None:
    for layer in sch.select("model.layers.*"):
        attention = layer["self_attn"]
        for name in "qkv":
            node = attention[f"{name}_proj"]
            for leaf, _ in list(node.mod.named_parameters()):
                node.shard(leaf, 0, parts=None if name == "q" else 2)
        for norm in ("q_norm", "k_norm"):
            if norm in attention:
                attention[norm].annotate("weight", "partial_grad", True)
        attention["o_proj"].shard("weight", 1).sync("fwd_post", "all_reduce")
        attention.sync("bwd_post", "all_reduce")
        own = max(1, 2 // sch.world_size)
        attention.set("num_key_value_groups", 8 // sch.world_size // own)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (4, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def trained(rank: int, world_size: int, kind: str) -> list[tuple[float, float]]:
    """Losses and norms of some steps, ours and those of one process."""
    model, whole = llama(kind), llama(kind)
    sch = slapo.create_schedule(model)
    with slapo.Verify(sch, tokens()):
        split(sch)
    built, _ = slapo.build(sch)
    found = []
    steps = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (built, whole)]
    for _ in range(3):
        losses = [each(**tokens()).loss for each in (built, whole)]
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
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_training(kind: str) -> None:
    for found in run_distributed(trained, 4, kind):
        for mine, theirs in found:
            assert mine == pytest.approx(theirs, rel=1e-4)


def by_engine(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[float], float]:
    """Losses of an engine, and how far a gathered key weight is from that of one process."""
    from slapo import init_mesh

    mesh = init_mesh(tp=world_size)
    model = llama()
    sch = slapo.create_schedule(model, group=mesh["tp"])
    split(sch)

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        clip_grad_norm=0.5,
        **options,
    )
    given = tokens()
    batch = (given["input_ids"], given["labels"])
    losses = [engine.train_batch(iter([batch])).item() for _ in range(3)]
    whole = llama()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        loss_fn(whole(given["input_ids"]), given["labels"]).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    key = sch["model.layers.0.self_attn.k_proj"].mod
    found = shards_of(key)["weight"].gather(key.weight.detach(), sch.group)
    target = whole.get_parameter("model.layers.0.self_attn.k_proj.weight").detach()
    return losses, float((found - target).abs().max())


@pytest.mark.distributed
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["whole", "micro-batches"])
def test_an_engine_sums_once_a_step(options: dict[str, Any]) -> None:
    for losses, apart in run_distributed(by_engine, 4, options):
        assert losses[-1] < losses[0]
        assert apart < 1e-5


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
        assert "'0.weight' has different values on tensor-parallel ranks of one part" in message


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
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.out = nn.Linear(HIDDEN, 4), nn.Linear(4, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.v(x))

    with fake_world(4, 3):
        sch = slapo.create_schedule(Values())
        sch["v"].shard("weight", 0, parts=2).shard("bias", 0, parts=2).sync(
            "bwd_post", "all_reduce"
        )
        sch["out"].shard("weight", 1, parts=2).sync("fwd_post", "all_reduce")
        with pytest.raises(PlacementError, match="would each count it"):
            check(sch, X)
        with pytest.raises(ValueError, match="each part on 2 ranks, which no collective"):
            sch["v"].sync("fwd_post", "all_gather", axis=-1)
