"""A first capture by dynamo, made once in the server that ranks are forked from.

It fills caches of torch and sympy, which takes a second of each process that captures anything.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import slapo


def _capture() -> None:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    sch = slapo.create_schedule(GPT2LMHeadModel(config))
    sch.trace_until("transformer", tracer="huggingface")
    torch._dynamo.reset()


_capture()
