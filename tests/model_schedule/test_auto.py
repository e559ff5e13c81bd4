"""``auto``: any model, and the proof of what is not the recipe of its family."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule
from slapo.verify.placement.offline import fake_world
from tests.model_schedule.draft_models import STRANGERS
from tests.model_schedule.models import MODELS, tokens, transformers
from tests.runtimes.ranks import error_of, on_ranks

TOLERANCE = 5e-6
SMALL: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize("name", ["electra", "bloom", "falcon", "mamba2", "bart"])
def test_a_family_that_nothing_is_known_of(name: str) -> None:
    """One process: kernels, checkpoints, loss and stages need to know the layers alone."""
    build, changes = STRANGERS[name].build, name == "bart"
    model, other = build(), build()
    inputs = {key: value for key, value in tokens(3, 9).items() if key != "attention_mask"}
    if changes:
        with pytest.raises(ValueError, match="changes its logits after the head"):
            apply_schedule(other, "auto", fused_loss=True)
    sch = apply_schedule(other, "auto", fused_loss=not changes, ckpt_ratio=0.5)
    assert sum(record.primitive == "checkpoint" for record in sch.history) == 2
    assert not any(record.primitive == "shard" for record in sch.history)
    built, _ = slapo.build(sch)
    loss, new = model(**inputs).loss, built(**inputs).loss
    loss.backward()
    new.backward()
    assert float(new.detach()) == pytest.approx(float(loss.detach()), abs=TOLERANCE)
    gradients = {key: p.grad for key, p in built.named_parameters()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, atol=TOLERANCE, rtol=1e-4)
    assert "cut_pipeline_stage" in str(apply_schedule(build(), "auto", pipeline_cuts=2))


def test_what_auto_is() -> None:
    """The recipe of the family; without that a draft, or the layers alone in one process."""
    by_key, by_auto = (apply_schedule(MODELS["gpt2"].build(), key) for key in ("gpt2", "auto"))
    assert str(by_auto) == str(by_key)
    with fake_world(2):
        drafted = apply_schedule(STRANGERS["falcon"].build(), "auto", kernels=False)
    assert drafted["transformer.h.1.mlp.dense_4h_to_h"].mod.weight.shape == (32, 64)


def test_a_proof_with_tokens_sharded_over_four() -> None:
    with fake_world(4, 1):
        model = MODELS["mistral"].build(num_key_value_heads=4)
        apply_schedule(model, "gemma", sequence_parallel=True)


def test_a_proof_keeps_no_cache() -> None:
    """A checkpointed layer would warn of one, though the user's own calls have none."""
    model = STRANGERS["falcon"].build()
    model.config.use_cache = True
    with fake_world(2):
        assert "CheckPointWrapper" in str(apply_schedule(model, "auto", ckpt_ratio=1.0).mod)


# --- where the check has no rule -----------------------------------------------------------------
@torch.library.custom_op("slapo_tests::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    """An operation that nothing is known of."""
    return x.tanh()


squash.register_fake(torch.empty_like)
squash.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].tanh() ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return squash(x)


class Centered(nn.Module):
    """Of slices it would take the mean of each."""

    def forward(self, x: Tensor) -> Tensor:
        return squash(x) - x.mean(-1, keepdim=True)


class Squashed(transformers.OlmoForCausalLM):  # type: ignore[misc]
    act = Squash

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = self.act()


class Mixed(Squashed):
    act = Centered


def squashed(kind: Any) -> Any:
    sizes = {**SMALL, "intermediate_size": 64, "num_hidden_layers": 3}
    torch.manual_seed(0)
    return kind(transformers.OlmoConfig(**sizes, use_cache=False, pad_token_id=0))


@on_ranks(2, timeout=120)
def test_numbers_where_the_check_has_no_rule() -> None:
    sch = apply_schedule(squashed(Squashed), "llama", group=dist.group.WORLD, fused_loss=True)
    assert [record.primitive for record in sch.history].count("shard") > 3 * 5
    mixed = squashed(Mixed)
    said = error_of(lambda: apply_schedule(mixed, "llama", group=dist.group.WORLD))
    assert said.startswith("PlacementError: ")
    assert "fails the check on 2 ranks: Verify: " in said
    assert "mlp" in said
    assert "The check alone was inconclusive" in said
    assert "squash" in said


def test_no_numbers_without_ranks() -> None:
    with fake_world(2, 1), pytest.raises(slapo.PlacementError, match="squash"):
        apply_schedule(squashed(Squashed), "llama")


def test_the_proof_may_be_left_out() -> None:
    with fake_world(2, 1):
        sch = apply_schedule(squashed(Squashed), "llama", check=False)
        with pytest.raises(slapo.PlacementError, match="squash"):
            slapo.check(sch, tokens(2, 6))
