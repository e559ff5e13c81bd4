"""Every model family, traced as schedules do it: outputs and gradients equal to eager.

At sizes other than those of the trace, in eval and in train mode (dropout is 0 in the zoo). Both
sides run the same float32 kernels on the same numbers; gradients that several paths add up may be
summed in another order, which costs a few units in the last place.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slapo.graph.trace.trees import tensors
from torch import Tensor, fx, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import slapo
from slapo.graph.trace.module import TracedModule
from tests.graph.zoo import FAMILIES, Family, each_layer, transformers

SIZES = ((2, 21), (5, 7), (1, 9))

#: With padding in each batch: models make no masks for their layers where there is none.
PADDED_SIZES = ((2, 21), (5, 7), (4, 4))

#: Families whose layers are those of another one.
HEADS = ("bert_classifier", "gpt2_classifier")

HOW: dict[str, dict[str, Any]] = {
    "flat": {"flatten": True},
    "leaves": {"recursive": False},
    "recursive": {},
}


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """All output tensors, and the gradients of the loss or of the mean square of the logits."""
    model.zero_grad()
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    output = model(**inputs, **({"use_cache": False} if has_cache else {}))
    loss = output.loss if "labels" in inputs else output.logits.pow(2).mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach() for t in tensors(output)], grads


def cases(
    labels: bool, family: Family, sizes: tuple[tuple[int, int], ...]
) -> Iterator[tuple[bool, dict[str, Tensor]]]:
    for training in (False, True):
        for batch, length in sizes:
            inputs = family.inputs(batch, length, labels)
            if not (training and batch == 1 and "pixel_values" in inputs):  # nothing to normalise
                yield training, inputs


def assert_like_eager(
    model: nn.Module,
    eager: nn.Module,
    family: Family,
    labels: bool = False,
    sizes: tuple[tuple[int, int], ...] = SIZES,
) -> None:
    torch.manual_seed(1)
    for training, inputs in cases(labels, family, sizes):
        (got, got_grads), (expected, grads) = (
            run(m.train(training), inputs) for m in (model, eager)
        )
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        scale = max(1.0, *(float(grad.abs().max()) for grad in grads.values()))
        torch.testing.assert_close(got_grads, grads, rtol=1e-5, atol=1e-6 * scale)
    assert list(model.state_dict()) == list(eager.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("labels", [False, True], ids=["plain", "labels"])
@pytest.mark.parametrize("name", FAMILIES)
def test_containers_equal_eager(name: str, labels: bool) -> None:
    family = FAMILIES[name]
    model = family.build()
    eager = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    torch.manual_seed(0)
    assert sch.trace_until(
        family.chain, tracer="huggingface", example_inputs=family.inputs(3, 13, labels)
    )
    for path in ("", *family.chain):
        assert isinstance(sch[path].mod, TracedModule), path
        assert sch[path].mod.contract.training is None
    others = [p for p, _ in sch.named_schedules() if p not in ("", *family.chain)]
    assert not any(isinstance(sch[path].mod, fx.GraphModule) for path in others)
    called = {
        f"{path}.{node.target}".lstrip(".")
        for path in ("", *family.chain)
        for node in sch[path].mod.graph.find_nodes(op="call_module")
    }
    assert {path for path, _ in each_layer(model, family)} <= called
    assert_like_eager(sch.mod, eager, family, labels)
    layer = next(path for path, _ in each_layer(eager, family))
    assert sch[layer].cut_pipeline_stage()


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HEADS])
def test_layers_equal_eager(name: str, how: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    eager = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    path = [path for path, _ in each_layer(model, family)][-1]
    leaves = ["MixtralExperts"] if name == "mixtral" else []
    assert sch[path].trace(tracer="huggingface", leaf_modules=leaves, **HOW[how])
    traced = sch[path].mod
    assert isinstance(traced, TracedModule)
    below = [m for m in traced.modules() if isinstance(m, TracedModule) and m is not traced]
    assert how == "recursive" or not below
    assert_like_eager(sch.mod, eager, family, sizes=PADDED_SIZES)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"attention_mask": None}, "'attention_mask' is None"),
        ("llama", {"output_attentions": True}, "'kwargs' is"),
        ("t5", {"labels": torch.ones(2, 9, dtype=torch.long)}, "'labels' is a tensor"),
        ("bert", {"attention_mask": torch.ones(2, 8)}, r"attention_mask.size\(1\) == input_ids"),
        ("opt", {"attention_mask": torch.ones(3, 9)}, r"input_ids.size\(0\) == attention_mask"),
        ("qwen3", {"input_ids": torch.ones(9, dtype=torch.long)}, "tensor of 2 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_outside_the_guards_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    family = FAMILIES[name]
    sch = slapo.create_schedule(family.build())
    assert sch.trace_until(family.chain, tracer="huggingface")
    inputs = family.inputs(2, 9, False)
    sch.mod(**inputs)
    with pytest.raises(slapo.SlapoError, match=message):
        sch.mod(**{**inputs, **change})


def test_too_long_a_sequence_is_refused() -> None:
    family = FAMILIES["bert"]
    sch = slapo.create_schedule(family.build().bert)
    assert sch.trace(tracer="huggingface", flatten=True)
    assert sch.mod(**family.inputs(2, 64, False)).last_hidden_state.shape[:2] == (2, 64)
    with pytest.raises(slapo.SlapoError, match=r"input_ids.size\(1\) <= 64"):
        sch.mod(**family.inputs(2, 65, False))


@pytest.mark.filterwarnings("ignore:.*could not be traced")
@pytest.mark.parametrize("flatten", [True, False])
def test_a_trace_leaves_the_hooks_of_transformers_as_they_were(flatten: bool) -> None:
    """Those that collect hidden states are installed when first asked for, once."""
    family = FAMILIES["llama"]
    model = family.build()
    modules = list(model.modules())
    sch = slapo.create_schedule(model)
    examples = {**family.inputs(3, 13, False), "output_hidden_states": True}
    if flatten:
        sch.trace(tracer="huggingface", flatten=True, example_inputs=examples)
    else:
        sch.trace_until(family.chain, tracer="huggingface", example_inputs=examples)
    assert not any(module._forward_hooks for module in modules)
    output = model(**family.inputs(2, 9, False), output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == 3


def test_asking_a_graph_for_a_cache_is_refused() -> None:
    family = FAMILIES["llama"]
    sch = slapo.create_schedule(family.build())
    assert sch.trace_until(family.chain, tracer="huggingface")
    inputs = family.inputs(2, 9, False)
    sch.mod(**inputs)
    with pytest.raises(slapo.SlapoError, match="use_cache=False"):
        sch.mod(**inputs, use_cache=True)


def test_results_that_transformers_keeps_are_not_those_of_a_trace() -> None:
    """BEiT keeps a table of positions, for all models of the process."""
    settings = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_attention_heads": 4}
    config = transformers.BeitConfig(
        **settings, num_hidden_layers=2, intermediate_size=64, use_relative_position_bias=True
    )
    model = transformers.BeitForImageClassification(config).eval()
    inputs = {"pixel_values": torch.rand(2, 3, 32, 32)}
    expected = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    assert sch["beit.layers.0"].trace(flatten=True, tracer="huggingface")
    assert torch.equal(sch.mod(**inputs).logits, expected(**inputs).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_layer_serves_positions_of_each_sample_and_generation(name: str) -> None:
    """As with padding on the left, where positions are not the same for all samples."""
    family = FAMILIES[name]
    model: Any = family.build()
    expected: Any = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    path, _ = next(each_layer(model, family))
    assert sch[path].trace(flatten=True, tracer="huggingface")
    ids = family.inputs(3, 9, False)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for given in ({"position_ids": positions}, {"position_ids": positions, "attention_mask": mask}):
        here, there = ({**given, "input_ids": ids, "use_cache": False} for _ in range(2))
        assert torch.equal(sch.mod(**here).logits, expected(**there).logits)
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    drawn = [m.generate(ids, attention_mask=mask, **options) for m in (model, expected)]
    assert torch.equal(*drawn)


def test_a_layer_serves_flags_that_nothing_in_it_reads() -> None:
    """Models hand their flags on to all layers; hidden states are collected by hooks on these."""
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    esm = transformers.EsmConfig(
        **settings, vocab_size=99, intermediate_size=48, pad_token_id=1, mask_token_id=4
    )
    esm.position_embedding_type = "rotary"
    bert = transformers.BertConfig(**settings, vocab_size=99, intermediate_size=48)
    ids = torch.randint(5, 99, (2, 9))
    for model, flags in (
        (transformers.EsmModel(esm, add_pooling_layer=False), {}),  # asks for a cache by default
        (transformers.BertModel(bert), {"output_hidden_states": True}),
    ):
        expected = model.eval()(ids, **flags)
        sch = slapo.create_schedule(model)
        assert sch["encoder.layer.0"].trace(flatten=True, tracer="huggingface")
        got = model(ids, **flags)
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state)
        torch.testing.assert_close(got.hidden_states, expected.hidden_states)
    # Attentions are collected from a module whose operations are part of the graph now.
    with pytest.raises(slapo.SlapoError, match="'output_attentions': True"):
        model(ids, output_attentions=True)


@pytest.fixture
def process_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("flatten", [False, True])
def test_a_traced_layer_is_sharded_by_fsdp(flatten: bool, process_group: None) -> None:
    """It makes a class of the layer's, and Transformers wraps the forward of each class it sees."""
    family = FAMILIES["bert"]
    model = family.build()
    expected = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    path, _ = next(each_layer(model, family))
    assert sch[path].trace(flatten=flatten, tracer="huggingface")
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(sch[path].mod, mesh=mesh)
    for _, inputs in cases(False, family, ((2, 7),)):
        (got, sharded), (wanted, grads) = run(model, inputs), run(expected, inputs)
        torch.testing.assert_close(got, wanted)
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in sharded.items()}
        torch.testing.assert_close(whole, grads)
