"""Right schedules of models that pack heads in ways of their own pass; one line less does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from tests.distributed import run_distributed
from tests.sharding.families import HIDDEN, VOCABULARY, causal_inputs

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

Schedule = slapo.Schedule
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def falcon() -> nn.Module:
    """Groups of query heads, each with its key and its value, chosen by index."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2)
    return FalconForCausalLM(config)


def phi3() -> nn.Module:
    """Query, key and value are blocks of two sizes; heads are counted by the config."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0, intermediate_size=64)
    return Phi3ForCausalLM(config)


@dataclass
class Splitter:
    """Splits two layers and what is between them; one sum of gradients may be left out."""

    sch: Schedule
    left_out: str = ""

    def split(self, path: str, column: str, row: str, argument: str | None, **cut: Any) -> Schedule:
        node = self.sch[path]
        node[column].shard("weight", axis=0, **cut)
        node[row].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        if path != self.left_out:
            node.sync("bwd_post", "all_reduce", argument=argument)
        return node


def of_falcon(splitter: Splitter) -> None:
    for path in ("transformer.h.0", "transformer.h.1"):
        attention = splitter.split(
            f"{path}.self_attention", "query_key_value", "dense", "hidden_states"
        )
        attention.set("num_heads", whole=4).set("num_kv_heads", whole=2)
        splitter.split(f"{path}.mlp", "dense_h_to_4h", "dense_4h_to_h", None)


def of_phi3(splitter: Splitter) -> Iterator[Schedule]:
    for path in ("model.layers.0", "model.layers.1"):
        attention = splitter.split(
            f"{path}.self_attn", "qkv_proj", "o_proj", "hidden_states", blocks=[32, 16, 16]
        )
        yield attention.set("num_key_value_heads", whole=2)
        splitter.split(f"{path}.mlp", "gate_up_proj", "down_proj", None, blocks=2)


def with_own_configs(splitter: Splitter) -> None:
    for attention in of_phi3(splitter):
        own = copy.copy(attention.mod.config)
        own.num_attention_heads //= attention.world_size
        attention.set("config", own)


def with_one_config(splitter: Splitter) -> None:
    list(of_phi3(splitter))
    splitter.sch.mod.config.num_attention_heads //= splitter.sch.world_size


FALCON, PHI3 = "transformer.h.1.self_attention", "model.layers.1.self_attn"
#: Model, its right schedule, and the attention of which a sum of gradients is left out.
CASES: list[tuple[Callable[[], nn.Module], Callable[[Splitter], None], str]] = [
    (falcon, of_falcon, FALCON),
    (phi3, with_own_configs, PHI3),
    (phi3, with_one_config, PHI3),
]


def verdicts(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Of each case, the module that Verify names: of the right schedule, and of the wrong one."""
    return [
        tuple(named(make, apply, left_out) for left_out in ("", at)) for make, apply, at in CASES
    ]


def named(make: Callable[[], nn.Module], apply: Callable[[Splitter], None], left_out: str) -> str:
    torch.manual_seed(0)
    sch = slapo.create_schedule(make())
    try:
        with slapo.Verify(sch, causal_inputs(3, 7)):
            apply(Splitter(sch, left_out))
    except slapo.VerificationError as error:
        return error.suspect or str(error)
    return ""


def test_right_schedules_pass_and_wrong_ones_do_not() -> None:
    for found in run_distributed(verdicts, 2):
        assert [right for right, _ in found] == [""] * len(CASES)
        for (_, wrong), (*_, attention) in zip(found, CASES, strict=True):
            assert wrong.startswith(attention)
