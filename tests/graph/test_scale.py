"""Containers of very large models on meta: traced within seconds, in time linear in the layers."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import slapo
from slapo.graph.trace.module import TracedModule
from tests.graph.zoo import FAMILIES, transformers

#: CPU seconds for one trace. It takes 2 to 3 on a slow core; this leaves room for a busy machine,
#: and still is less than what the trace took when layers ran on symbols.
SECONDS = 4.0
MEGABYTES = 200


def gpt2(layers: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))


def llama_70b(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_llama(layers: int) -> nn.Module:
    return FAMILIES["llama"].build(num_hidden_layers=layers)


def trace(build: Callable[[int], nn.Module], layers: int, path: str) -> tuple[nn.Module, float]:
    """The traced model, and the CPU time of the trace alone."""
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(build(layers))
    start = time.process_time()
    assert sch.trace_until(path, tracer="huggingface")
    return sch.mod, time.process_time() - start


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "layers", "path"),
    [(gpt2, 96, "transformer"), (llama_70b, 80, "model")],
    ids=["gpt2-96", "llama-70b"],
)
def test_large_containers_are_traced_within_the_budget(
    build: Callable[[int], nn.Module], layers: int, path: str
) -> None:
    trace(tiny_llama, 2, "model")  # lazy imports, caches of torch
    gc.collect()
    before = resident_megabytes()
    model, seconds = trace(build, layers, path)
    container = model.get_submodule(path)
    assert isinstance(container, TracedModule)
    calls = [str(n.target) for n in container.graph.find_nodes(op="call_module")]
    assert sum(target.rpartition(".")[2].isdigit() for target in calls) == layers
    assert all(p.device.type == "meta" for p in model.parameters())
    assert seconds < SECONDS
    assert resident_megabytes() - before < MEGABYTES


@pytest.mark.slow
def test_time_per_layer_does_not_grow() -> None:
    trace(tiny_llama, 2, "model")  # lazy imports, caches of torch
    times = {
        n: statistics.median(trace(tiny_llama, n, "model")[1] for _ in range(3)) for n in (24, 96)
    }
    assert times[96] / 96 < 1.5 * times[24] / 24


@pytest.mark.slow
def test_work_is_linear_in_the_layers() -> None:
    """Calls of functions, which no other process disturbs, from 24 to 48 to 96 layers."""

    def calls(layers: int) -> int:
        with slapo.init_empty_weights():
            sch = slapo.create_schedule(tiny_llama(layers))
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            assert sch.trace_until("model", tracer="huggingface")
        finally:
            sys.setprofile(None)
        return count

    calls(2)
    few, some, many = map(calls, (24, 48, 96))
    first, second = (some - few) / 24, (many - some) / 48
    assert first > 0
    assert second < 1.1 * first
