"""In bfloat16 a scheduled model is as close to its float32 self as the model that it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule
from tests.model_schedule.equality import result
from tests.model_schedule.models import MODELS, shallow

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
