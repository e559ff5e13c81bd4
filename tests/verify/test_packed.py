"""Right schedules of models that pack heads in ways of their own pass; one line less does not.

Falcon has groups of query heads, each with its key and its value, chosen by index. Of Phi-3 query,
key and value are blocks of two sizes, and heads are counted by the config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import slapo
from tests.distributed import run_distributed
from tests.model_schedule.draft_models import STRANGERS
from tests.model_schedule.models import tokens

pytestmark = pytest.mark.distributed

Schedule = slapo.Schedule


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


#: Model, its right schedule, and the attention of which a sum of gradients is left out.
CASES: list[tuple[str, Callable[[Splitter], None], str]] = [
    ("falcon", of_falcon, "transformer.h.1.self_attention"),
    ("phi3", with_own_configs, "model.layers.1.self_attn"),
    ("phi3", with_one_config, "model.layers.1.self_attn"),
]


def verdicts(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Of each case, the module that Verify names: of the right schedule, and of the wrong one."""
    return [(named(*case[:2], ""), named(*case)) for case in CASES]


def named(name: str, apply: Callable[[Splitter], None], left_out: str) -> str:
    sch = slapo.create_schedule(STRANGERS[name].build(num_hidden_layers=2))
    try:
        with slapo.Verify(sch, tokens(3, 7)):
            apply(Splitter(sch, left_out))
    except slapo.VerificationError as error:
        return error.suspect or str(error)
    return ""


def test_right_schedules_pass_and_wrong_ones_do_not() -> None:
    for found in run_distributed(verdicts, 2):
        for (right, wrong), (*_, attention) in zip(found, CASES, strict=True):
            assert right == ""
            assert wrong.startswith(attention)
