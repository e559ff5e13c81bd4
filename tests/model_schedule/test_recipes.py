"""Every key in every mode computes what the model does, on one, two and four processes.

In bfloat16 a scheduled model is as close to its float32 self as the model that it was.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.agreement import gathered
from slapo.model_schedule import apply_schedule, recipe_keys
from tests.distributed import run_distributed
from tests.model_schedule.equality import difference, result
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
    for mode, value in found.items():
        said = REFUSED.get((key, mode))
        if said is None:
            assert isinstance(value, float), f"{key} {mode}: {value}"
            assert value < TOLERANCE, f"{key} {mode}: {value}"
        else:
            assert isinstance(value, str), f"{key} {mode}: {value}"
            assert said in value, f"{key} {mode}: {value}"


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


# --- in half precision ---------------------------------------------------------------------------
#: Batches, whose errors are taken together: those of one have luck.
SEEDS = 4
#: Errors of ours to those of the model. Rounded elsewhere they differ by some percent; a sum in
#: the wrong type, or a gradient rounded once more at each step, is far above.
LIMIT = 1.1


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    typed = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    result(model(**typed), inputs)[0].backward()
    found = sorted((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return torch.cat([grad.flatten().double() for _, grad in found])


@pytest.mark.parametrize("gated", [False, True])
def test_t5_with_a_stream_of_float32_among_halves(gated: bool) -> None:
    """Transformers keeps one layer of each block in float32, and its norms cast back."""
    name = "gated-gelu" if gated else "relu"
    model, loaded, ours = (MODELS["t5"].build(feed_forward_proj=name) for _ in range(3))
    built, _ = slapo.build(apply_schedule(ours, "t5", fp16=True))
    kept = {n.split(".")[-2] for n, p in built.named_parameters() if p.dtype == torch.float32}
    assert kept == {"wo"}
    for path, p in loaded.named_parameters():
        p.data = p.data.to(built.get_parameter(path).dtype)
    inputs = MODELS["t5"].inputs(3, 9)
    wanted, found = loaded(**inputs).logits, built(**inputs).logits
    assert found.dtype == wanted.dtype
    exact = model(**inputs).logits
    assert (found - exact).norm() < LIMIT * (wanted - exact).norm() + 1e-3


@pytest.mark.parametrize("options", [{}, {"fused_loss": True, "ckpt_ratio": 0.5}], ids=["", "all"])
@pytest.mark.parametrize("key", sorted(set(MODELS) - {"wideresnet"}))
def test_gradients_in_half_precision(key: str, options: dict[str, Any]) -> None:
    if key == "vit":  # which has no head of a vocabulary
        options = {name: value for name, value in options.items() if name != "fused_loss"}
    model, half, ours = (MODELS[key].build(**shallow(key)) for _ in range(3))
    half = half.to(torch.bfloat16)
    model.load_state_dict(half.state_dict())  # weights that bfloat16 has
    built, _ = slapo.build(apply_schedule(ours, key, bf16=True, **options))
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(SEEDS):
        inputs = MODELS[key].inputs(3 + seed, 9)
        expected = gradients(model, inputs)
        found = [gradients(each, inputs) for each in (half, built)]
        errors += torch.stack([(each - expected).norm() / expected.norm() for each in found])
    its, own = errors.tolist()
    assert its > 0
    assert own < LIMIT * its, f"{own / its:.2f} times the model's"
