"""Layers of every model family, traced flat and rewritten: outputs and gradients as before.

Both sides run the same float32 kernels on the same numbers; gradients that several paths add up may
be summed in another order, which costs a few units in the last place.
"""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import slapo
from benchmark.more_families import FAMILIES as MORE
from slapo.graph.trace.module import rewrite, trace_of
from slapo.graph.trace.nests import tensors
from tests.graph.served import Nothing, number_of_captures, scheduled
from tests.graph.zoo import FAMILIES, checkpoint_layers, each_layer, transformers

#: Families whose layers are those of another one.
HEADS = ("bert_classifier", "gpt2_classifier")
#: Run in each test run.
QUICK = ("bert", "llama", "t5")
#: Those of the others that differ most from these and from each other run in the whole suite.
DISTINCT = ("gpt2", "mixtral", "mamba", "swin", "beit")
SLOW, WIDE = pytest.mark.slow, pytest.mark.wide
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [SLOW if name in DISTINCT else WIDE])
    for name in (*FAMILIES, *MORE)
    if name not in HEADS
]

#: What a graph cannot hold, and what the refusal says.
REFUSED = {"mamba": "uses torch.func"}

#: Mode, batch, length and mask of calls.
CALLS = (
    (True, 2, 21, "padded"),
    (True, 5, 7, "no mask"),
    (True, 1, 9, "padded"),
    (False, 2, 21, "padded"),
    (False, 3, 6, "ones"),
    (False, 1, 9, "no mask"),
    (True, 4, 4, "padded"),
)


def inputs_of(name: str, batch: int, length: int, mask: str) -> dict[str, Any]:
    if name in MORE:
        family = MORE[name]
        return family.inputs(batch, length, mask if mask in family.masks else family.masks[-1])
    found = FAMILIES[name].inputs(batch, length, False)
    if mask == "no mask":
        found.pop("attention_mask", None)
    elif mask == "ones" and "attention_mask" in found:
        found["attention_mask"] = torch.ones_like(found["attention_mask"])
    return found


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """All output tensors, and the gradients of the mean square of the logits."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**inputs, **_without_cache(model))
    if torch.is_grad_enabled():
        (output.loss if "labels" in inputs else output.logits.pow(2).mean()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach() for t in tensors(output)], grads


def _without_cache(model: nn.Module) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in names else {}


def assert_like_plain(model: nn.Module, plain: nn.Module, inputs: dict[str, Any]) -> None:
    (got, got_grads), (expected, grads) = run(model, inputs), run(plain, inputs)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    scale = max([1.0, *(float(grad.abs().max()) for grad in grads.values())])
    torch.testing.assert_close(got_grads, grads, rtol=1e-5, atol=2e-6 * scale)


def last_layer(model: nn.Module, name: str) -> str:
    path = (MORE if name in MORE else FAMILIES)[name].layers
    return [f"{path}.{child}" for child, _ in model.get_submodule(path).named_children()][-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_rewritten_flat_layer_equals_the_plain_one(name: str) -> None:
    model: Any = (MORE if name in MORE else FAMILIES)[name].build()
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    path = last_layer(model, name)
    if name in REFUSED:
        with pytest.warns(UserWarning, match=REFUSED[name]):
            assert not sch[path].trace(flatten=True, tracer="huggingface")
        return
    assert sch[path].trace(flatten=True, tracer="huggingface")
    rewrite(sch[path].mod, Nothing())
    for training, batch, length, mask in CALLS:
        given = inputs_of(name, batch, length, mask)
        if training and batch == 1 and name == "resnet":
            continue  # nothing to normalize
        model.train(training), plain.train(training)
        # A trace leaves nothing in the tables that Transformers keeps for all models of a process.
        assert_like_plain(model, plain, given)
    assert number_of_captures(sch[path].mod) > 0
    given = inputs_of(name, 2, 9, "padded")
    model.eval(), plain.eval()
    with torch.no_grad():
        assert_like_plain(model, plain, given)
    assert list(model.state_dict()) == list(plain.state_dict())
    copies = [copy.deepcopy(model)]
    if name != "wav2vec2":  # its parametrized weights cannot be pickled
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        assert_like_plain(other, plain, given)
        assert number_of_captures(other.get_submodule(path)) > 0


# --- dropout, dtypes, labels ---------------------------------------------------------------------
def rewritten_root(name: str, flatten: bool = True, **changes: Any) -> tuple[Any, Any]:
    """A whole model, traced and rewritten, and a copy of the original."""
    how = {"flatten": True} if flatten else {"recursive": False}
    sch, plain = scheduled(FAMILIES[name].build(**changes), **how)
    return sch.mod, plain


@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "leaves"])
@pytest.mark.parametrize(
    "name", ["bert", pytest.param("llama", marks=SLOW), pytest.param("gpt2", marks=WIDE)]
)
def test_a_rewritten_root_equals_the_plain_model(name: str, flatten: bool) -> None:
    """In low precision, under autocast, with dropout, and with labels, which no trace was given."""
    drops = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    model, plain = rewritten_root(name, flatten, **(drops if name == "bert" else {}))
    assert_like_plain(model.train(), plain.train(), FAMILIES[name].inputs(2, 7, True))
    assert_like_plain(model.eval(), plain.eval(), FAMILIES[name].inputs(1, 7, True))
    given = inputs_of(name, 2, 9, "padded")
    with torch.autocast("cpu", torch.bfloat16):
        assert_like_plain(model, plain, given)
    assert_like_plain(model.bfloat16(), plain.bfloat16(), given)
    assert_like_plain(model.double(), plain.double(), given)


# --- what Transformers collects, and caches ------------------------------------------------------
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


MARKS = {"t5": [SLOW], "bert": [WIDE], "gpt2": [WIDE]}
COLLECTING = [
    pytest.param(name, flag, how, marks=MARKS.get(name, []))
    for name in ("llama", "bert", "gpt2", "t5", "mixtral")
    for flag in (COLLECTED[2:] if name == "mixtral" else COLLECTED[:2])
    for how in ("flat", "leaves", "layer")
    if name != "t5" or how == "leaves" or flag == COLLECTED[0]
]


@pytest.mark.parametrize(("name", "flag", "how"), COLLECTING)
def test_what_transformers_collects_is_as_in_the_plain_model_or_refused(
    name: str, flag: str, how: str
) -> None:
    model: Any = FAMILIES[name].build(attn_implementation="eager")
    options: Any = {"recursive": False} if how == "leaves" else {"flatten": True}
    _, plain = scheduled(model, last_layer(model, name) if how == "layer" else "", **options)
    given = {**inputs_of(name, 2, 9, "padded"), **_without_cache(plain)}
    model(**given)
    expected = plain(**given, **{flag: True})
    try:
        got = model(**given, **{flag: True})
    except slapo.SlapoError as error:
        assert "flatten=True" in str(error) or "leaf" in str(error)  # noqa: PT017
    else:
        assert got.keys() == expected.keys()
        torch.testing.assert_close(tensors(got), tensors(expected), rtol=1e-5, atol=1e-6)
    assert model(**given).keys() == plain(**given).keys()


@pytest.mark.parametrize("flatten", [True, False])
def test_a_trace_leaves_the_hooks_of_transformers_as_they_were(flatten: bool) -> None:
    model: Any = FAMILIES["llama"].build()
    modules = list(model.modules())
    examples = {**FAMILIES["llama"].inputs(3, 13, False), "output_hidden_states": True}
    sch = slapo.create_schedule(model)
    assert sch.trace(tracer="huggingface", flatten=flatten, example_inputs=examples)
    assert not any(module._forward_hooks for module in modules)
    given = inputs_of("llama", 2, 9, "padded")
    assert len(model(**given, output_hidden_states=True, use_cache=False).hidden_states) == 3


def test_a_cache_is_never_made_and_refused_where_it_is_asked_for() -> None:
    model, plain = rewritten_root("llama", flatten=False)
    given = inputs_of("llama", 2, 9, "padded")
    assert model.config.use_cache
    for flags in ({"use_cache": False}, {}, {"use_cache": None}):
        assert model(**given, **flags).past_key_values is None
    with pytest.raises(slapo.SlapoError, match="use_cache=False"):
        model(**given, use_cache=True)
    assert_like_plain(model, plain, given)
    layer, _ = scheduled(copy.deepcopy(plain), "model.layers.0", flatten=True)
    with pytest.raises(slapo.SlapoError, match="use_cache=False"):
        layer.mod(**given, use_cache=True)
    assert_like_plain(layer.mod, plain, given)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rewritten_layers_serve_positions_of_each_sample_and_generation(name: str) -> None:
    """As with padding on the left, where positions are not the same for all samples."""
    model: Any = FAMILIES[name].build()
    _, plain = scheduled(model, f"{FAMILIES[name].layers}.0", flatten=True)
    ids = FAMILIES[name].inputs(3, 9, False)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for given in ({"position_ids": positions}, {"position_ids": positions, "attention_mask": mask}):
        assert_like_plain(model, plain, {**given, "input_ids": ids})
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    drawn = [m.generate(ids, attention_mask=mask, **options) for m in (model, plain)]
    assert torch.equal(*drawn)


def test_a_rewritten_root_generates_with_its_own_forward() -> None:
    model, plain = rewritten_root("llama")
    ids = torch.randint(3, 99, (2, 5))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    assert torch.equal(*(m.generate(ids, attention_mask=mask, **options) for m in (model, plain)))


def test_checkpointed_layers_of_transformers_are_leaves_or_refused() -> None:
    family = FAMILIES["llama"]
    model: Any = family.build().train()
    plain = copy.deepcopy(model)
    checkpoint_layers(model)
    sch = slapo.create_schedule(model)
    with pytest.warns(UserWarning, match="turn it off in the model"):
        assert not sch.trace(tracer="huggingface", flatten=True)
    assert sch.trace(tracer="huggingface", recursive=False)
    rewrite(model, Nothing())
    assert_like_plain(model, plain, family.inputs(2, 7, True))


def test_checkpointing_that_is_switched_on_after_the_trace() -> None:
    model, plain = rewritten_root("llama", flatten=False)
    checkpoint_layers(model)
    assert_like_plain(model.train(), plain.train(), FAMILIES["llama"].inputs(2, 7, True))


def test_a_leaf_called_before_an_entered_model_collects_its_outputs() -> None:
    """Both name the collector of Transformers, which is put back."""
    family = FAMILIES["t5"]
    options: Any = {"leaf_modules": ["encoder"], "concrete_args": {"use_cache": False}}
    given = family.inputs(3, 13, False)
    sch, plain = scheduled(family.build(), flatten=True, example_inputs=given, **options)
    assert_like_plain(sch.mod, plain, family.inputs(2, 7, False))


def test_flags_that_a_layer_does_not_read_are_handed_on() -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.EsmConfig(
        **settings, vocab_size=99, intermediate_size=48, pad_token_id=1, mask_token_id=4
    )
    config.position_embedding_type = "rotary"
    model = transformers.EsmModel(config, add_pooling_layer=False).eval()
    ids = torch.randint(5, 99, (2, 9))
    _, plain = scheduled(model, "encoder.layer.0", flatten=True)
    outputs = [each(ids).last_hidden_state for each in (model, plain)]  # a cache by default
    torch.testing.assert_close(*outputs)


# --- wrappers ------------------------------------------------------------------------------------
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp before the first call"])
def test_a_rewritten_layer_in_a_wrapper_of_torch(wrapper: str) -> None:
    family = FAMILIES["bert"]
    model: Any = family.build()
    _, plain = scheduled(model, *(path for path, _ in each_layer(model, family)), flatten=True)
    if wrapper == "fsdp":
        assert_like_plain(model, plain, inputs_of("bert", 2, 7, "padded"))
    if wrapper == "ddp":
        run_model: Any = DistributedDataParallel(model, find_unused_parameters=True)
        run_model.forward.__func__.__signature__ = inspect.signature(plain.forward)
    else:
        mesh = dist.init_device_mesh("cpu", (1,))
        for _, layer in each_layer(model, family):
            fully_shard(layer, mesh=mesh)
        run_model = model
    for batch in (2, 1):
        inputs = inputs_of("bert", batch, 7, "padded")
        (got, found), (wanted, grads) = run(run_model, inputs), run(plain, inputs)
        torch.testing.assert_close(got, wanted)
        whole = {
            n.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g
            for n, g in found.items()
        }
        torch.testing.assert_close(whole, grads)
    assert all(trace_of(layer).known for _, layer in each_layer(model, family))
