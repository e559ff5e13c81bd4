"""Every family of Transformers models, cut in stages: outputs and gradients as before."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import slapo
from slapo.pipeline import generate_pipeline_partition
from tests.graph.zoo import FAMILIES


def cut_in_the_middle(sch: slapo.Schedule, containers: list[str]) -> None:
    """After the first half of the calls of layers; of the first of several calls of one layer."""
    last = containers[-1] if containers else ""
    targets = [str(n.target) for n in sch[last].mod.graph.find_nodes(op="call_module")]
    layers = [t for t in targets if any(part.isdigit() for part in t.split("."))] or targets
    middle = layers[max(0, len(layers) // 2 - 1)]
    call = 0 if targets.count(middle) > 1 else None
    sch[f"{last}.{middle}" if last else middle].cut_pipeline_stage(call=call)


def compare(name: str, stages: Any, reference: Any, labels: bool, arguments: Any) -> None:
    family = FAMILIES[name]
    for batch, length in ((3, 9), (2, 13), (5, 7)):
        inputs = family.inputs(batch, length, labels)
        got, expected = stages(**inputs, **arguments), reference(**inputs, **arguments)
        assert type(got) is type(expected)
        pair = [out.loss if labels else out[0].float().pow(2).mean() for out in (got, expected)]
        torch.testing.assert_close(pair[0], pair[1])
        for model, value in zip((stages, reference), pair, strict=True):
            model.zero_grad()
            value.backward()
        gradients = {n: p.grad for s in stages.stages for n, p in s.named_parameters()}
        for parameter_name, parameter in reference.named_parameters():
            if parameter.grad is not None and parameter_name in gradients:
                torch.testing.assert_close(gradients[parameter_name], parameter.grad)


#: With labels every family; without them, whose outputs then are logits, one of each kind.
CASES: list[Any] = [
    pytest.param(name, True, marks=[pytest.mark.wide] if number % 3 else [])
    for number, name in enumerate(sorted(FAMILIES))
]
CASES += [(name, False) for name in ("bert", "llama", "resnet", "t5")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "labels"), CASES)
def test_two_stages(name: str, labels: bool) -> None:
    family = FAMILIES[name]
    model = family.build()
    reference = copy.deepcopy(model)
    cached = "use_cache" in type(model).forward.__code__.co_varnames
    arguments = {"use_cache": False} if cached else {}
    sch = slapo.create_schedule(model)
    containers = [path for path in family.chain if path]
    torch.manual_seed(0)
    assert sch.trace_until(
        containers or "",
        tracer="huggingface",
        concrete_args=arguments,
        example_inputs=family.inputs(3, 9, labels),
    )
    cut_in_the_middle(sch, containers)
    if name == "t5":  # at three depths
        sch["encoder"].cut_pipeline_stage()
        sch["encoder.block.0"].cut_pipeline_stage()
    generate_pipeline_partition(sch)
    assert len(sch.mod.stages) == (4 if name == "t5" else 2)
    compare(name, sch.mod, reference, labels, arguments)
    assert list(sch.mod.state_dict()) == list(reference.state_dict())
    sch.mod.load_state_dict(reference.state_dict())
