"""Forty families of Transformers that no test of the graphs names, tiny and from configs alone.

`tests/graph/zoo.py` has the families that the tests know. These were chosen for their variety, and
nothing in `slapo` was written with them in view: what works here was not fitted to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 128
WIDTH = 32
MAX_LENGTH = 64
LAYERS = 2
PAD = 1

#: What users pass for a mask; pictures and spectra know the first only.
MASKS = ("no mask", "ones", "padded")

Inputs = Callable[[int, int, str], dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """How to build one model, where its parts are, and how it is called.

    Attributes
    ----------
    kind
        Decoder, encoder, and so on.
    cls, config
        Names of the model class and the config class in ``transformers``.
    settings
        Arguments of the config.
    containers
        Paths of the modules from the root, left out, down to the one that calls the layers.
    layers
        Path of the list of layers.
    inputs
        ``inputs(batch, length, mask)`` -> keyword arguments of forward; `mask` is one of `masks`.
    masks
        The kinds of calls that the model knows.
    """

    kind: str
    cls: str
    config: str
    settings: dict[str, Any]
    containers: tuple[str, ...]
    layers: str
    inputs: Inputs
    masks: tuple[str, ...] = MASKS

    def build(self, seed: int = 0) -> nn.Module:
        """The model, in eval mode; no parameter has a value that hides what is done with it.

        As created, biases are 0, weights of norms 1 and some scales 1e-6.
        """
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**copy.deepcopy(self.settings))
        model: nn.Module = getattr(transformers, self.cls)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model


# --- inputs --------------------------------------------------------------------------------------
def _masked(ids: Tensor, mask: str, prefix: str = "") -> dict[str, Tensor]:
    """With padding, the last row is shorter, whatever the batch."""
    names = ("input_ids" if not prefix else f"{prefix}input_ids", f"{prefix}attention_mask")
    ones = torch.ones_like(ids)
    if mask == "padded":
        ones[-1, -(ids.shape[1] // 3) :] = 0
        ids = ids.masked_fill(ones == 0, PAD)
    return {names[0]: ids} if mask == "no mask" else {names[0]: ids, names[1]: ones}


def text(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Tokens."""
    return _masked(torch.randint(3, VOCAB, (batch, length)), mask)


def text_to_text(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Tokens for encoder and decoder, of different lengths."""
    ids = torch.randint(3, VOCAB, (batch, length + 2))
    return {**text(batch, length, mask), **_masked(ids, mask, "decoder_")}


def pictures(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Pictures of the one size that a model takes."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def pictures_of_any_size(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Pictures of 32 to 64 pixels, in steps of the patches."""
    size = 32 + 8 * (length % 5)
    return {"pixel_values": torch.randn(batch, 3, size, size + 8)}


def waves(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Samples of sound, about 8 for each frame."""
    samples = 8 * length + 20
    values = torch.randn(batch, samples)
    if mask == "no mask":
        return {"input_values": values}
    ones = torch.ones(batch, samples, dtype=torch.long)
    if mask == "padded":
        ones[-1, -(samples // 3) :] = 0
    return {"input_values": values * ones, "attention_mask": ones}


def spectra(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Spectra of the one length that a model takes."""
    return {"input_values": torch.randn(batch, 40, 16)}


def speech_to_text(batch: int, length: int, mask: str) -> dict[str, Tensor]:
    """Spectra of the one length that the encoder takes, tokens for the decoder."""
    ids = torch.randint(3, VOCAB, (batch, length))
    return {"input_features": torch.randn(batch, 16, 40), **_masked(ids, mask, "decoder_")}


# --- settings that several share -----------------------------------------------------------------
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
_LLAMA = {
    **_TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
}
_MOE = {**_LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_BERT = {
    **_TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    **_TOKENS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": MAX_LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_BART = {
    **_TOKENS,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": MAX_LENGTH,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}


def _decoder(name: str, settings: dict[str, Any], base: str = "model", layers: str = "") -> Family:
    return Family(
        "decoder",
        f"{name}ForCausalLM",
        f"{name}Config",
        settings,
        (base,),
        layers or f"{base}.layers",
        text,
    )


def _experts(name: str, **settings: Any) -> Family:
    return Family(
        "mixture of experts",
        f"{name}ForCausalLM",
        f"{name}Config",
        {**_MOE, **settings},
        ("model",),
        "model.layers",
        text,
    )


def _encoder(
    name: str, base: str, settings: dict[str, Any], inner: str = "encoder", layer: str = "layer"
) -> Family:
    inside = f"{base}.{inner}"
    return Family(
        "encoder",
        f"{name}ForMaskedLM",
        f"{name}Config",
        settings,
        (base, inside),
        f"{inside}.{layer}",
        text,
    )


def _encoder_decoder(name: str, **settings: Any) -> Family:
    return Family(
        "encoder-decoder",
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {**_BART, **settings},
        ("model", "model.encoder", "model.decoder"),
        "model.decoder.layers",
        text_to_text,
    )


def _vision(
    name: str,
    settings: dict[str, Any],
    containers: tuple[str, ...],
    layers: str,
    inputs: Inputs = pictures,
) -> Family:
    return Family(
        "vision",
        f"{name}ForImageClassification",
        f"{name}Config",
        settings,
        containers,
        layers,
        inputs,
        MASKS[:1],
    )


def _state_space(
    name: str, config: str, settings: dict[str, Any], base: str, layers: str
) -> Family:
    return Family(
        "state space",
        name,
        config,
        {**_TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, **settings},
        (base,),
        layers,
        text,
    )


FAMILIES: dict[str, Family] = {
    # --- decoders
    "falcon": _decoder("Falcon", _LLAMA, "transformer", "transformer.h"),
    "gpt_neox": _decoder("GPTNeoX", _LLAMA, "gpt_neox"),
    "gptj": _decoder("GPTJ", {**_GPT2, "rotary_dim": 4}, "transformer", "transformer.h"),
    "bloom": _decoder(
        "Bloom",
        {**_TOKENS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4},
        "transformer",
        "transformer.h",
    ),
    "mpt": _decoder(
        "Mpt",
        {**_TOKENS, "d_model": WIDTH, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": MAX_LENGTH},
        "transformer",
        "transformer.blocks",
    ),
    "stablelm": _decoder("StableLm", {**_LLAMA, "qk_layernorm": True}),
    "phi3": _decoder("Phi3", {**_LLAMA, "original_max_position_embeddings": MAX_LENGTH}),
    "gemma2": _decoder("Gemma2", {**_LLAMA, "head_dim": 8, "sliding_window": 8}),
    "cohere": _decoder("Cohere", {**_LLAMA, "use_qk_norm": True}),
    "olmo2": _decoder("Olmo2", _LLAMA),
    "starcoder2": _decoder("Starcoder2", {**_LLAMA, "sliding_window": 8}),
    "biogpt": _decoder("BioGpt", {**_BERT, "layerdrop": 0.0}, "biogpt"),
    "gpt_bigcode": _decoder("GPTBigCode", _GPT2, "transformer", "transformer.h"),
    "xglm": _decoder(
        "XGLM",
        {
            **_TOKENS,
            "d_model": WIDTH,
            "ffn_dim": 2 * WIDTH,
            "num_layers": LAYERS,
            "attention_heads": 4,
            "max_position_embeddings": MAX_LENGTH,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    # --- encoders
    "electra": _encoder("Electra", "electra", {**_BERT, "embedding_size": 16}),
    "deberta_v2": _encoder(
        "DebertaV2",
        "deberta",
        {
            **_BERT,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "distilbert": _encoder(
        "DistilBert",
        "distilbert",
        {
            **_TOKENS,
            "dim": WIDTH,
            "hidden_dim": 2 * WIDTH,
            "n_layers": LAYERS,
            "n_heads": 4,
            "max_position_embeddings": MAX_LENGTH,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        inner="transformer",
    ),
    "mpnet": _encoder("MPNet", "mpnet", _BERT),
    "modernbert": Family(
        "encoder",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **_BERT,
            "cls_token_id": 0,
            "sep_token_id": 2,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
        },
        ("model",),
        "model.layers",
        text,
    ),
    "convbert": _encoder("ConvBert", "convbert", {**_BERT, "embedding_size": 16}),
    # --- encoder-decoders
    "bart": _encoder_decoder("Bart"),
    "pegasus": _encoder_decoder("Pegasus"),
    "m2m_100": _encoder_decoder("M2M100"),
    "blenderbot_small": _encoder_decoder("BlenderbotSmall"),
    "umt5": Family(
        "encoder-decoder",
        "UMT5ForConditionalGeneration",
        "UMT5Config",
        {
            **_TOKENS,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 2 * WIDTH,
            "num_layers": LAYERS,
            "num_decoder_layers": LAYERS,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
        ("encoder", "decoder"),
        "decoder.block",
        text_to_text,
    ),
    # --- vision
    "deit": _vision("DeiT", _VIT, ("deit",), "deit.layers"),
    "beit": _vision("Beit", {**_VIT, "use_relative_position_bias": True}, ("beit",), "beit.layers"),
    "dinov2": _vision(
        "Dinov2",
        _VIT,
        ("dinov2", "dinov2.encoder"),
        "dinov2.encoder.layer",
        pictures_of_any_size,
    ),
    "swin": _vision(
        "Swin",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        ("swin", "swin.encoder", "swin.encoder.layers.0"),
        "swin.encoder.layers.0.blocks",
        pictures_of_any_size,
    ),
    "convnext": _vision(
        "ConvNext",
        {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2},
        ("convnext", "convnext.encoder"),
        "convnext.encoder.stages",
        pictures_of_any_size,
    ),
    # --- audio
    "wav2vec2": Family(
        "audio",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **_TOKENS,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "intermediate_size": 2 * WIDTH,
            "conv_dim": [16, 16],
            "conv_stride": [4, 2],
            "conv_kernel": [8, 3],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "hidden_dropout": 0.0,
            "activation_dropout": 0.0,
            "attention_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
        },
        ("wav2vec2", "wav2vec2.encoder"),
        "wav2vec2.encoder.layers",
        waves,
    ),
    "ast": Family(
        "audio",
        "ASTForAudioClassification",
        "ASTConfig",
        {
            **{k: v for k, v in _VIT.items() if k not in ("image_size", "drop_path_rate")},
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 40,
            "num_mel_bins": 16,
        },
        ("audio_spectrogram_transformer",),
        "audio_spectrogram_transformer.layers",
        spectra,
        MASKS[:1],
    ),
    "whisper": Family(
        "audio",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": MAX_LENGTH,
            "decoder_start_token_id": 0,
            "begin_suppress_tokens": None,
        },
        ("model", "model.encoder", "model.decoder"),
        "model.decoder.layers",
        speech_to_text,
    ),
    # --- state space and recurrent
    "mamba": _state_space(
        "MambaForCausalLM",
        "MambaConfig",
        {"state_size": 8, "time_step_rank": 4},
        "backbone",
        "backbone.layers",
    ),
    "mamba2": _state_space(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        "backbone",
        "backbone.layers",
    ),
    "rwkv": _state_space(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"attention_hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "context_length": 64},
        "rwkv",
        "rwkv.blocks",
    ),
    # --- mixture of experts
    "qwen2_moe": _experts("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=WIDTH),
    "olmoe": _experts("Olmoe", num_experts=4),
    "gpt_oss": _experts(
        "GptOss",
        num_local_experts=4,
        head_dim=8,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek_v3": _experts(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
