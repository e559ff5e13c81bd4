"""What published scripts rely on, with models of Transformers."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import assert_close

import slapo
from slapo.graph.trace.nests import tensors
from tests.graph.zoo import FAMILIES, each_layer
from tests.test_published import TRACERS


@pytest.mark.parametrize("part", ["layer", "attention"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_the_default_tracer_takes_parts_that_stand_alone(name: str, part: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    path, layer = next(each_layer(model, family))
    if part == "attention":
        path += "." + next(p for p, _ in layer.named_modules() if "att" in p.lower())
    module = model.get_submodule(path)
    inputs: dict[str, Any] = {"hidden_states": torch.randn(2, 5, 32)}
    if name == "llama":
        angles = torch.randn(2, 5, model.config.head_dim)
        inputs |= {"position_embeddings": (angles.cos(), angles.sin())}
        inputs |= {"attention_mask": None} if part == "attention" else {}
    expected = module(**inputs)
    sch = slapo.create_schedule(module)
    assert sch.trace(tracer="pytorch", flatten=True)
    assert isinstance(sch.mod, fx.GraphModule)
    got = sch.mod(**inputs)
    torch.testing.assert_close(tensors(got)[0], tensors(expected)[0])


#: With buffers on meta, too; the others so in the wide run.
DISTINCT = ("bert", "gpt2", "gpt2_classifier", "llama", "opt", "t5", "vit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "include_buffers"),
    [
        *((name, False) for name in FAMILIES),
        *((name, True) for name in DISTINCT),
        *(
            pytest.param(name, True, marks=pytest.mark.wide)
            for name in FAMILIES
            if name not in DISTINCT
        ),
    ],
)
def test_every_family_is_traced_without_memory(name: str, include_buffers: bool) -> None:
    family = FAMILIES[name]
    with slapo.init_empty_weights(include_buffers=include_buffers):
        model = family.build()
    cached = "use_cache" in inspect.signature(model.forward).parameters
    sch = slapo.create_schedule(model)
    assert sch.trace_until(
        [path for path in family.chain if path] or "",
        concrete_args={"use_cache": False} if cached else {},
    )
    assert isinstance(sch.mod, fx.GraphModule)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("part", ["", ".attn"])
def test_attentions_that_make_tensors_are_traced_without_memory(
    tracer: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of GPT-Neo, whose buffers have values while its parameters have none.

    That proxies do not survive them is said.
    """
    family = FAMILIES["gpt_neo"]
    whole = family.build()
    with slapo.init_empty_weights():
        model = family.build()
    sch = slapo.create_schedule(model)
    assert sch[f"transformer.h.0{part}"].trace(tracer=tracer, flatten=True)
    assert isinstance(sch[f"transformer.h.0{part}"].mod, fx.GraphModule)
    said = [r.levelname for r in caplog.records if "was traced as by" in r.getMessage()]
    assert said == (["INFO"] if tracer == "pytorch" else [])
    built, _ = slapo.build(sch)
    built.load_state_dict(whole.state_dict())
    inputs = family.inputs(3, 11, False)
    torch.testing.assert_close(
        built(**inputs, use_cache=False).logits, whole(**inputs, use_cache=False).logits
    )


def test_a_traced_root_is_saved_as_a_model(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"].build()
    sch = slapo.create_schedule(model)
    assert sch.trace_until("", concrete_args={"use_cache": False})
    sch.mod.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()
    again = type(model).from_pretrained(tmp_path)
    assert_close(dict(again.state_dict()), dict(model.state_dict()))
