"""Attention by every backend that runs here, against the formula; and in whole models."""

import copy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as flash_utils

from slapo.errors import MissingPackageError
from slapo.op import FlashAttention, attend, interface
from slapo.op.interface import use_attention
from slapo.random import get_rng_tracker, tracker_kept
from tests.model_schedule.models import MODELS
from tests.op.processes import run

#: Largest difference in float32; sums are in another order.
TOLERANCE = 2e-6


def formula(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, added: Tensor, scale: float
) -> Tensor:
    """In float64, with nothing left out."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(groups, 1) for each in (k, v))
    weights = q.double() @ k.transpose(-2, -1) * scale + added.double()
    weights = weights.masked_fill(~allowed, float("-inf")).softmax(-1)
    return weights @ v


def inputs(heads: int, kv_heads: int, rows: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, heads, rows, 8), (3, kv_heads, columns, 8), (3, kv_heads, columns, 8)]
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"mask": "bool"},
    "added mask": {"mask": "float"},
    "mask and causal": {"mask": "bool", "is_causal": True},
    "added mask and causal": {"mask": "float", "is_causal": True},
    "learned bias": {"bias": True},
    "learned bias, mask": {"bias": True, "mask": "bool"},
    "learned bias, added mask, causal": {"bias": True, "mask": "float", "is_causal": True},
    "scaled": {"scale": 1.0},
}


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("sizes", [(4, 4, 7, 7), (4, 2, 7, 7), (6, 1, 5, 11), (2, 2, 1, 9)])
@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(backend: str, sizes: tuple[int, int, int, int], case: str) -> None:
    given = dict(CASES[case])
    q, k, v = inputs(*sizes)
    heads, _, rows, columns = sizes
    allowed = torch.ones(3, 1, rows, columns, dtype=torch.bool)
    added = torch.zeros(1, heads, rows, columns)
    kind, learned = given.pop("mask", None), given.pop("bias", False)
    generator = torch.Generator().manual_seed(2)
    if kind == "bool":
        allowed = torch.rand(3, 1, rows, columns, generator=generator) > 0.3
        allowed[..., 0] = True
        given["mask"] = allowed
    elif kind == "float":
        given["mask"] = torch.randn(3, 1, rows, columns, generator=generator)
        added = added + given["mask"]
    if given.get("is_causal"):
        allowed = allowed & torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    bias = torch.randn(1, heads, rows, columns, generator=generator, requires_grad=True)
    if learned:
        given["bias"], added = bias, added + bias
    expected = formula(q, k, v, allowed, added, given.get("scale") or 8**-0.5)
    if case == "plain":
        double = attend(*(each.detach().double() for each in (q, k, v)), backend=backend)
        assert (double - expected).abs().max() < 1e-14
    found = attend(q, k, v, backend=backend, **given)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < TOLERANCE
    leaves = [q, k, v, *([bias] if learned else [])]
    weights = torch.randn(found.shape, generator=generator)
    got = torch.autograd.grad((found * weights).sum(), leaves)
    want = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() < 10 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_query_that_may_look_nowhere_is_no_nan(backend: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 2, 3, 3)
    allows, hides = (True, False) if dtype == torch.bool else (0.0, float("-inf"))
    mask = torch.full((3, 1, 3, 3), allows, dtype=dtype)
    mask[1, :, 2] = hides
    output = attend(q, k, v, mask=mask, backend=backend)
    output.sum().backward()
    assert output.isfinite().all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout(backend: str) -> None:
    """Its mean is what there is without; and where it is drawn from."""
    q, k, v = (torch.ones(1, 1, 200, 4) for _ in range(3))  # six deviations are allowed
    torch.manual_seed(0)
    mean = attend(q, k, v, dropout=0.3, backend=backend).mean()
    assert abs(float(mean) - 1.0) < 0.02
    with tracker_kept(seed=5):
        before = torch.get_rng_state()
        own = attend(q, k, v, dropout=0.3, backend=backend)
        assert torch.equal(torch.get_rng_state(), before), "the shared state is left alone"
        assert get_rng_tracker().get_states()
        assert not torch.equal(own, attend(q, k, v, dropout=0.3, backend=backend))
    states, before = get_rng_tracker().get_states(), torch.get_rng_state()
    get_rng_tracker().reset()
    attend(q, k, v, dropout=0.3, backend=backend)
    get_rng_tracker().set_states(states)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["flash", "xformers"])
def test_backends_that_do_not_run_here(backend: str) -> None:
    with pytest.raises((MissingPackageError, ValueError), match=backend):
        attend(*inputs(4, 2, 3, 3), backend=backend)


# --- modules -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_module_against_torch(name: str, causal: bool, fused: bool) -> None:
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(16, 4, batch_first=True)
    module = FlashAttention(16, 4, attn_op_name=name, fused_qkv=fused, causal=causal)
    packed, bias = reference.in_proj_weight.detach(), reference.in_proj_bias.detach()
    with torch.no_grad():
        bias.normal_()
        parts = [module.qkv] if fused else [module.query, module.key, module.value]
        for layer, w, b in zip(
            parts, packed.chunk(len(parts)), bias.chunk(len(parts)), strict=True
        ):
            layer.weight.copy_(w)
            layer.bias.copy_(b)
        assert module.out_proj is not None
        module.out_proj.load_state_dict(reference.out_proj.state_dict())
    x = torch.randn(3, 7, 16)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected = reference(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=0)
    assert module.state_dict().keys() == copy.deepcopy(module).state_dict().keys()


# --- in models of Transformers -------------------------------------------------------------------


def test_models_that_compute_by_themselves() -> None:
    """Nothing is changed: neither in such a model nor around it."""
    outer, inner = MODELS["llama"].build(), MODELS["gpt_neo"].build()
    outer.add_module("inner", inner)
    before = outer.config._attn_implementation  # type: ignore[union-attr]
    for model in (inner, outer):
        with pytest.raises(ValueError, match="GPTNeoForCausalLM computes its attention itself"):
            use_attention(model)
    with pytest.raises(ValueError, match="Linear computes its attention itself"):
        use_attention(nn.Linear(2, 2))
    assert outer.config._attn_implementation == before  # type: ignore[union-attr]


def test_a_pickled_model_runs_in_a_fresh_process(tmp_path: Path) -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs(2, 5)
    use_attention(model, "auto")
    torch.save((model, inputs), tmp_path / "model.pt")
    script = """
import sys, torch
model, inputs = torch.load(sys.argv[1], weights_only=False)
print(model(**inputs).loss.item())
"""
    printed = run("-c", script, str(tmp_path / "model.pt"))
    loss: Any = model(**inputs).loss
    assert float(printed.split()[-1]) == pytest.approx(loss.item(), abs=TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
def test_auto_hands_back_weights(padded: bool) -> None:
    """By the model's own function, with the mask in the form that it takes."""
    model, inputs = MODELS["llama"].build().eval(), MODELS["llama"].inputs(2, 5)
    inputs.pop("labels", None)
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**inputs, output_attentions=True)
        use_attention(model, "auto")
        found = model(**inputs, output_attentions=True)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert len(found.attentions) == len(wanted.attentions) > 0
    torch.testing.assert_close(found.attentions, wanted.attentions)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("length", [5, 11])
def test_capped_logits_are_left_to_the_model(length: int, backend: str) -> None:
    """Gemma 2 caps its logits by a tanh, and looks 4 tokens back in each second layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "vocab_size": 31}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = Gemma2Config(**sizes, **heads, sliding_window=4, attn_logit_softcapping=0.5)
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    tokens = torch.randint(3, 31, (2, length))
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    model.set_attn_implementation("eager")
    wanted = model(tokens, attention_mask=mask, use_cache=False).logits
    use_attention(model, backend)
    found = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()])


def test_models_that_prepare_their_attention_by_name() -> None:
    """Sparse attention that masks for ``"eager"`` and ``"sdpa"``, and hands indices to others."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(num_hidden_layers=1))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="by the name of the attention function"):
        use_attention(model)
    assert model.config._attn_implementation == before


# --- what would be wrong in silence --------------------------------------------------------------
def test_a_tracker_without_our_state_is_left_alone() -> None:
    q, k, v = inputs(2, 2, 3, 3)
    tracker = get_rng_tracker()
    states = tracker.get_states()
    tracker.set_states({})
    try:
        tracker.add("of the user", seed=12345)
        assert attend(q, k, v, dropout=0.5).shape == q.shape
    finally:
        tracker.set_states(states)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_a_static_cache_has_room_behind_the_tokens(backend: str) -> None:
    model = MODELS["llama"].build().eval()
    ids = torch.arange(3, 10)[None]
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits  # by its own attention
        use_attention(model, backend)
        found = model(input_ids=ids, use_cache=False).logits  # without a mask
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        # Transformers 5.24 calls it by another name.
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        got = model(input_ids=ids, use_cache=True, **{name: cache}).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def plain_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """As flash-attn's function is called."""
    states = (each.transpose(1, 2) for each in (q, k, v))
    return attend(*states, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def packed_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """The one for rows of several lengths, without padding."""
    rows = zip(*(_rows(*pair) for pair in ((q, cu_seqlens_q), (k, cu_seqlens_k))), strict=True)
    values = _rows(v, cu_seqlens_k)
    done = [
        plain_kernel(a[None], b[None], c[None], 0.0, softmax_scale, causal)[0]
        for (a, b), c in zip(rows, values, strict=True)
    ]
    return torch.cat(done)


def _rows(states: Tensor, ends: Tensor) -> list[Tensor]:
    return list(states.split(ends.diff().tolist()))


@pytest.fixture
def flash_stands_in(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of implementations that Transformers was asked to load."""
    asked: list[str | None] = []

    def load(name: str | None, *_: Any, **__: Any) -> tuple[Any, ...]:
        asked.append(name)
        pads = flash_utils._pad_input, flash_utils._unpad_input
        return plain_kernel, packed_kernel, None, *pads

    monkeypatch.setattr(flash_utils, "_lazy_imports", load)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(interface, "check_available", lambda backend: None)
    return asked


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("key", ["llama", "bert"])
def test_flash_in_models(key: str, padded: bool, flash_stands_in: list[str | None]) -> None:
    """How Transformers' function is called, with kernels that stand in for those of CUDA."""
    inputs = MODELS[key].inputs(3, 9)
    kept = inputs["attention_mask"].bool()
    if not padded:
        kept = torch.ones_like(kept)
        del inputs["attention_mask"]
    model = MODELS[key].build()
    expected = model(**inputs).logits
    use_attention(model, "flash")
    got = model(**inputs).logits
    assert set(flash_stands_in) == {"flash_attention_2"}, "never a name to look up on the hub"
    torch.testing.assert_close(got[kept], expected[kept], atol=1e-5, rtol=0)


def test_flash_refuses_a_learned_bias(flash_stands_in: list[str | None]) -> None:
    model = MODELS["t5"].build()
    with pytest.raises(ValueError, match="_supports_flash_attn=False"):
        use_attention(model, "flash")
    interface.register("flash")
    for part in (model.encoder, model.decoder):  # each has a copy of the config
        part.config._attn_implementation = "slapo_flash"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="position_bias"):
        model(**MODELS["t5"].inputs(2, 5))
