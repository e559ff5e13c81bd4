"""Many layers: captures are shared, so that time grows linearly and slowly with the layers."""

import pytest
import torch
from torch import nn

import slapo
from slapo.graph.trace import capture
from slapo.graph.trace.module import rewrite, trace_of
from tests.effort import calls_of
from tests.graph.served import Nothing
from tests.graph.zoo import FAMILIES, each_layer


def tiny_llama(layers: int) -> nn.Module:
    return FAMILIES["llama"].build(num_hidden_layers=layers)


def trace_container(layers: int) -> None:
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(tiny_llama(layers))
    assert sch.trace_until("model", tracer="huggingface")


def flat_layers(layers: int) -> tuple[nn.Module, slapo.Schedule]:
    model = tiny_llama(layers)
    sch = slapo.create_schedule(model)
    for path, layer in each_layer(model, FAMILIES["llama"]):
        assert sch[path].trace(tracer="huggingface", flatten=True)
        rewrite(layer, Nothing())
    return model, sch


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trace", "trace of a container", "first call"])
def test_work_is_linear_in_the_layers(what: str) -> None:
    inputs = FAMILIES["llama"].inputs(2, 9, False)

    def work(layers: int) -> int:
        if what == "trace":
            return calls_of(lambda: flat_layers(layers))
        if what == "trace of a container":
            return calls_of(lambda: trace_container(layers))
        model, _ = flat_layers(layers)
        return calls_of(lambda: model(**inputs, use_cache=False))

    work(2)
    few, some, many = map(work, (6, 12, 24))
    first, second = (some - few) / 6, (many - some) / 12
    assert first > 0
    assert second < 1.15 * first


def test_equal_layers_are_captured_once_for_each_kind_of_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[nn.Module] = []
    original = capture.capture
    monkeypatch.setattr(
        capture, "capture", lambda root, *a, **k: (made.append(root), original(root, *a, **k))[1]
    )
    model, _ = flat_layers(6)
    assert len(made) == 1
    with torch.no_grad():
        for batch in (2, 3, 2):
            model(**FAMILIES["llama"].inputs(batch, 9, False), use_cache=False)
    assert len(made) <= 3
    assert all(len(trace_of(layer).known) == 1 for _, layer in each_layer(model, FAMILIES["llama"]))


def test_a_long_chain_runs_one_layer_only() -> None:
    family = FAMILIES["gpt2"]
    model = family.build(num_hidden_layers=24)
    runs: list[nn.Module] = []

    def note(module: nn.Module, args: object) -> None:
        runs.append(module)

    for _, layer in each_layer(model, family):
        layer.register_forward_pre_hook(note)
    sch = slapo.create_schedule(model)
    given = family.inputs(3, 13, False)
    assert sch.trace_until("transformer", tracer="huggingface", example_inputs=given)
    assert len(runs) <= 4
    assert len(set(runs)) <= 2  # the first layer's input differs from the others'
