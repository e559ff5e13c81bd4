"""Every key in every mode computes what the model does, on one, two and four processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo
from slapo.agreement import gathered
from slapo.model_schedule import apply_schedule, recipe_keys
from tests.distributed import run_distributed
from tests.model_schedule.equality import difference
from tests.model_schedule.models import MODELS, shallow, tokens
from tests.model_schedule.modes import MODES, REFUSED, UNCUT
from tests.runtimes.ranks import on_ranks

#: Relative, in float32: sums are in another order, over other parts.
TOLERANCE = 5e-6


def test_nothing_is_left_out() -> None:
    assert sorted(MODELS) == recipe_keys()
    assert {key for key, _ in REFUSED} <= set(MODELS)
    assert {m for _, m in REFUSED} <= set(MODES)
    assert set(UNCUT) <= set(MODELS)


def differences(key: str, group: Any = None) -> dict[str, float | str]:
    """Mode -> the largest difference, or what it is refused with."""
    found: dict[str, float | str] = {}
    for mode, options in MODES.items():
        try:
            found[mode] = max(difference(key, options, group, **shallow(key)).values())
        except ValueError as error:
            found[mode] = str(error)
    return found


def job(rank: int, world_size: int, keys: list[str]) -> dict[str, dict[str, float | str]]:
    return {key: differences(key, dist.group.WORLD) for key in keys}


def check(key: str, found: dict[str, float | str]) -> None:
    assert found.keys() == MODES.keys()
    for mode, result in found.items():
        said = REFUSED.get((key, mode))
        if said is None:
            assert isinstance(result, float), f"{key} {mode}: {result}"
            assert result < TOLERANCE, f"{key} {mode}: {result}"
        else:
            assert isinstance(result, str), f"{key} {mode}: {result}"
            assert said in result, f"{key} {mode}: {result}"


@pytest.mark.parametrize("key", sorted(MODELS))
def test_one_process(key: str) -> None:
    check(key, differences(key))


#: On four processes, and on two in ``make test``, those are left out whose tables and classes are
#: those of another family.
TWINS = ("roberta", "mistral", "qwen2", "gemma3_text")


FAMILIES = sorted(set(MODELS) - set(TWINS))


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        *((2, FAMILIES[part::3]) for part in range(3)),
        (4, FAMILIES[::6]),
        pytest.param(2, TWINS, marks=pytest.mark.wide),
        *(pytest.param(4, FAMILIES[part::6], marks=pytest.mark.wide) for part in range(1, 6)),
    ],
)
def test_tensor_parallel(world_size: int, keys: Sequence[str]) -> None:
    for found in run_distributed(job, world_size, keys, timeout=400):
        for key in keys:
            check(key, found[key])


@on_ranks(2)
def test_inputs_and_labels_of_the_first_rank() -> None:
    for options in ({}, {"fused_loss": True}, {"gather_logits": False}):
        inputs = [tokens(3, 9, seed=1 + each) for each in range(2)]
        expected = MODELS["llama"].build()(**inputs[0]).loss
        model = MODELS["llama"].build()
        group = dist.group.WORLD
        sch = apply_schedule(model, "llama", group=group, bcast_input=True, **options)
        loss = slapo.build(sch)[0](**inputs[sch.rank]).loss
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@on_ranks(2)
def test_dropout_keeps_the_ranks_together() -> None:
    """Hidden states after each layer are equal on all ranks, in train mode."""
    dropouts = {
        "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
        "gpt_neo": {"resid_dropout": 0.2, "embed_dropout": 0.2, "attention_dropout": 0.2},
        "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
        "opt": {"dropout": 0.2, "attention_dropout": 0.2},
        "t5": {"dropout_rate": 0.2},
        "llama": {"attention_dropout": 0.2},
    }
    for key, dropout in dropouts.items():
        slapo.set_random_seed(3, tp_rank=dist.get_rank())
        model = MODELS[key].build(**shallow(key), **dropout)
        plain = MODELS[key].build(**shallow(key))
        sch = apply_schedule(model, key, group=dist.group.WORLD)
        built, _ = slapo.build(sch)
        inputs = MODELS[key].inputs(3, 9)
        output = built(**inputs, output_hidden_states=True)
        name = "decoder_hidden_states" if key == "t5" else "hidden_states"
        states = [state.detach() for state in (*output[name], output.logits)]
        assert len(states) > 2
        for one, other in zip(*gathered(states, None), strict=True):
            assert torch.equal(one, other), key
        assert not torch.allclose(output.logits, plain(**inputs).logits, atol=1e-4), key
