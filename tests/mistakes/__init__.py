"""Mistakes that users make, by what they called. See :mod:`tests.test_mistakes`.

A mistake is a function of a schedule of :class:`Stack`; or a generator, where there is more to
prepare: up to its ``yield`` all is well, after it comes the mistake. What it yields is the schedule
that the mistake must not change, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
import transformers
from torch import nn

import slapo
from slapo import Schedule
from tests.primitives.models import Stack

Mistake = Callable[..., Iterator[Schedule | None] | None]
#: (what the user called, number of ranks) -> mistakes
TABLE: dict[tuple[str, int], list[Mistake]] = {}


def mistake(group: str, ranks: int = 1) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        TABLE.setdefault((group, ranks), []).append(function)
        return function

    return add


def stack() -> Schedule:
    return slapo.create_schedule(Stack())


def gelu(x: Any) -> Any:
    return F.gelu(x)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=12,
        n_head=3,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama(heads: int = 4, kv_heads: int = 1) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()
