"""A split or fused loss is the one that the model would have computed, or it is refused."""

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.model_schedule import apply_schedule, losses
from slapo.model_schedule.losses import OwnLoss, own_loss
from tests.model_schedule.draft_models import STRANGERS, TWO_STACKS, named
from tests.model_schedule.models import DECODER, MODELS, VOCABULARY, transformers
from tests.runtimes.ranks import on_ranks

IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_GEMMA3 = {"text_config": DECODER, "vision_config": IMAGES, "mm_tokens_per_image": 4}
_XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
PLAIN, MOVED = OwnLoss(False, False), OwnLoss(True, True)
#: A model and its loss: the name of its class says neither.
CASES: dict[str, tuple[Callable[[], Any], OwnLoss]] = {
    **{
        name: (named(f"{name}ForCausalLM", f"{name}Config", TWO_STACKS), PLAIN)
        for name in ("Bart", "Pegasus", "TrOCR")
    },
    "XLNet": (named("XLNetLMHeadModel", "XLNetConfig", _XLNET), PLAIN),
    "Llava": (STRANGERS["llava"].build, MOVED),
    "Gemma3": (named("Gemma3ForConditionalGeneration", "Gemma3Config", _GEMMA3), MOVED),
}
#: Class of Transformers, and why no loss stands for its own.
REFUSED = {
    "SwitchTransformersForConditionalGeneration": "computes its loss in an unknown way",
    "BambaForCausalLM": "shifts labels itself or adds",
    "ProphetNetForConditionalGeneration": "computes its loss in an unknown way",
    "GraniteSpeechForConditionalGeneration": "computes its loss in an unknown way",
    "CsmForConditionalGeneration": "shifts labels itself or adds",
    "LlamaForSequenceClassification": "takes no token labels",
}


def bare(cls: Any, loss_type: str = "ForCausalLM") -> Any:
    """A module of a class, which is all that is asked for."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.loss_type = loss_type
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_not_that_of_others(name: str) -> None:
    found = own_loss(bare(getattr(transformers, name)))
    assert isinstance(found, str)
    assert found.startswith(REFUSED[name])


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_computes(name: str) -> None:
    make, expected = CASES[name]
    model = make().eval()
    assert own_loss(model) == expected
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (2, 8), generator=generator)
    built, _ = slapo.build(apply_schedule(copy.deepcopy(model), "auto", fused_loss=True))
    assert built(input_ids=ids, labels=ids).loss.item() == pytest.approx(
        model(input_ids=ids, labels=ids).loss.item(), abs=1e-5
    )


#: As classes of Transformers write them.
STOCK = re.compile(r"\bCrossEntropyLoss\((ignore_index=-100)?\)")
ANY = re.compile(r"\bCrossEntropyLoss\(|\bcross_entropy\(")
SHIFTED = re.compile(r"shift_(labels|logits)|\[[^\]\n]*,[^\]\n]*(\b1:|:-1\b)[^\]\n]*\]")
ADDED = re.compile(r"\bloss\s*(?:\+=|=\s*loss\s*\+)\s*(?!.*aux_loss)|z_loss")


@pytest.mark.slow
def test_the_tables_name_all_exceptions() -> None:
    """No class of the installed Transformers that the tables let pass moves labels or adds."""
    for name in dir(transformers):
        cls = getattr(transformers, name, None)
        if not name.endswith(losses._TOKENS) or not issubclass(cls, nn.Module):
            continue
        kind = "ForMaskedLM" if name.endswith("ForMaskedLM") else "ForCausalLM"
        found = own_loss(bare(cls, kind))
        if isinstance(found, str):
            continue
        source = inspect.getsource(inspect.unwrap(cls.forward))
        source = re.sub(r'"""(?:.|\n)*?"""', "", source)
        assert not SHIFTED.search(source), name
        assert not ADDED.search(source), name
        calls = len(ANY.findall(source))
        if found.counted:
            assert not calls, name
        elif name != "DistilBertForMaskedLM":  # which has it as a child
            assert calls == len(STOCK.findall(source)) == 1, name


@pytest.mark.parametrize("key", ["bert", "t5", "llama", "gpt2"])
def test_a_count_of_tokens_counts_where_the_model_takes_it(key: str) -> None:
    model, inputs = MODELS[key].build().eval(), MODELS[key].inputs(2, 9)
    built: Any = slapo.build(apply_schedule(copy.deepcopy(model), key, fused_loss=True))[0]
    own = model(**inputs, num_items_in_batch=torch.tensor(40)).loss
    assert built(**inputs, num_items_in_batch=torch.tensor(40)).loss.item() == pytest.approx(
        own.item(), abs=1e-5
    )
    if key == "llama":
        inputs["labels"] = inputs["input_ids"]
        own = model(**inputs, ignore_index=7).loss
        assert built(**inputs, ignore_index=7).loss.item() == pytest.approx(own.item(), abs=1e-5)


@pytest.mark.parametrize("key", ["bert", "t5", "llama"])
def test_labels_of_which_none_counts(key: str) -> None:
    """As in torch: the loss is nan, and its gradient zero."""
    model, inputs = MODELS[key].build(), MODELS[key].inputs(2, 9)
    built: Any = slapo.build(apply_schedule(copy.deepcopy(model), key, fused_loss=True))[0]
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    if key == "t5":
        decoder = {"decoder_input_ids": inputs["labels"].clamp(min=1)}
        inputs.update(decoder)
    for each in (model, built):
        loss = each(**inputs).loss
        loss.backward()
        assert loss.isnan()
        assert all(not p.grad.any() for p in each.parameters() if p.grad is not None)


@pytest.mark.parametrize("key", ["bert", "t5", "llama"])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_logits_where_there_are_no_gradients(key: str, as_tuple: bool) -> None:
    """An evaluation asks for both; where nothing else would stand in their place, too."""
    model, inputs = MODELS[key].build(), MODELS[key].inputs(2, 9)
    built: Any = slapo.build(apply_schedule(copy.deepcopy(model), key, fused_loss=True))[0]
    inputs["return_dict"] = not as_tuple
    with torch.no_grad():
        wanted, found = model(**inputs), built(**inputs)
    assert len(found) == len(wanted)
    for name in range(2) if as_tuple else ("loss", "logits"):
        torch.testing.assert_close(found[name], wanted[name], atol=2e-6, rtol=1e-5)
    training = built(**inputs)
    assert len(training) == len(wanted) - 1


# --- over ranks ----------------------------------------------------------------------------------
@on_ranks(2)
def test_over_ranks() -> None:
    group = torch.distributed.group.WORLD
    found: dict[str, float] = {}
    for key in ("llama", "gpt2"):
        model: Any = MODELS[key].build(use_cache=True).eval()
        inputs = MODELS[key].inputs(2, 5)
        ids = inputs["input_ids"]
        logits, text = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
        masked = model(**inputs).logits.detach()
        sch = apply_schedule(model, key, group=group, fused_loss=True)
        built: Any = slapo.build(sch)[0]
        assert built(**inputs).logits is None
        with torch.no_grad():
            found[f"{key} evaluation"] = float((built(**inputs).logits - masked).abs().max())
        found[f"{key} logits"] = float((built(ids).logits - logits).abs().max().detach())
        again = built.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(again, text), key

    model, ids = MODELS["llama"].build(), MODELS["llama"].inputs(2, 9)["input_ids"]
    call = {"input_ids": ids, "labels": ids, "ignore_index": int(ids[0, 3])}
    loss = model(**call).loss
    built = slapo.build(apply_schedule(model, "llama", group=group, gather_logits=False))[0]
    found["ignored"] = float((built(**call).loss - loss).detach())
    with pytest.raises(slapo.SlapoError, match="with gather_logits=True"):
        built.generate(ids, max_new_tokens=4)
    call = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    built(**call).loss.backward()
    found["none counts"] = max(float(p.grad.abs().max()) for p in built.parameters())

    dropping = MODELS["bert"].build(attention_probs_dropout_prob=0.5)
    built = slapo.build(apply_schedule(dropping, "bert", group=group))[0]
    with pytest.raises(slapo.SlapoError, match="set_random_seed"):
        built(**MODELS["bert"].inputs(2, 5))
    built.eval()(**MODELS["bert"].inputs(2, 5))
    assert all(value < 2e-6 for value in found.values()), found
