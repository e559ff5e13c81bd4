"""Models that no table is written for: families without a recipe, and own ones."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.served import make
from tests.model_schedule.models import DECODER, VOCABULARY, Model, images, tokens, transformers

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TWO_STACKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_MAMBA = {"n_groups": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "chunk_size": 4}
_HYBRID = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 4}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

_OF_DECODERS = {name: value for name, value in DECODER.items() if name != "head_dim"}

#: Name of a class without what it is for -> its settings beside those of all.
_DECODERS: dict[str, dict[str, Any]] = {
    "StableLm": {},
    "GPTNeoX": {"hidden_dropout": 0.0},
    "Phi3": {},
    "Cohere2": {},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mamba2": _MAMBA,
    "FalconH1": {"mamba_d_ssm": 64, "mamba_d_head": 16, **_HYBRID},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Qwen3Moe": _EXPERTS,
    "Olmoe": _EXPERTS,
    "DeepseekV3": {
        **_LATENT,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def named(name: str, config: str, settings: dict[str, Any]) -> Callable[..., nn.Module]:
    def build(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        made = getattr(transformers, config)(**{**settings, **changes})
        model: nn.Module = getattr(transformers, name)(made).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # no parameter is all zeros or ones: one that is left out must show
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model

    return build


def two_texts(batch: int, length: int) -> dict[str, Tensor]:
    given = tokens(batch, length)
    return {**given, "labels": tokens(batch, length - 2, seed=2)["input_ids"]}


def square_images(batch: int, length: int) -> dict[str, Tensor]:
    given = images(batch, length)
    generator = torch.Generator().manual_seed(1)
    return {**given, "pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}


STRANGERS: dict[str, Model] = {
    name.lower(): Model(
        named(f"{name}ForCausalLM", f"{name}Config", {**_OF_DECODERS, **more}), tokens
    )
    for name, more in _DECODERS.items()
}
STRANGERS |= {
    name.lower(): Model(
        named(f"{name}ForMaskedLM", f"{name}Config", {**DECODER, **_NO_DROPOUT, **more}), tokens
    )
    for name, more in {
        "Electra": {"embedding_size": 16},
        "DebertaV2": {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
        },
        "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1},
    }.items()
}


def sounds(batch: int, length: int) -> dict[str, Tensor]:
    """Of 40 frames, and a text."""
    generator = torch.Generator().manual_seed(1)
    frames = torch.randn(batch, 16, 40, generator=generator)
    return {"input_features": frames, "labels": tokens(batch, length - 2, seed=2)["input_ids"]}


def captioned(batch: int, length: int) -> dict[str, Tensor]:
    """Four tokens of each text are parts of an image."""
    given = tokens(batch, length)
    given["input_ids"][:, 1:5] = 3
    generator = torch.Generator().manual_seed(1)
    return {**given, "pixel_values": torch.randn(batch, 3, 28, 28, generator=generator)}


def _llava(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(
        **sizes, num_hidden_layers=2, image_size=28, patch_size=14
    )
    settings = {
        "vision_config": vision,
        "text_config": transformers.LlamaConfig(**_OF_DECODERS),
        "image_token_index": 3,
        "image_token_id": 3,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 4,
    }
    return named("LlavaForConditionalGeneration", "LlavaConfig", settings)(**changes)


_SOUNDS = {name: value for name, value in TWO_STACKS.items() if name != "max_position_embeddings"}
_SOUNDS |= {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
STRANGERS |= {
    "mbart": Model(named("MBartForConditionalGeneration", "MBartConfig", TWO_STACKS), two_texts),
    "whisper": Model(named("WhisperForConditionalGeneration", "WhisperConfig", _SOUNDS), sounds),
    "llava": Model(_llava, captioned),
    "dinov2": Model(
        named(
            "Dinov2ForImageClassification",
            "Dinov2Config",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
            },
        ),
        square_images,
    ),
    "bart": Model(named("BartForConditionalGeneration", "BartConfig", TWO_STACKS), two_texts),
    "swin": Model(
        named(
            "SwinForImageClassification",
            "SwinConfig",
            {
                "image_size": 32,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 4,
                "drop_path_rate": 0.0,
            },
        ),
        square_images,
    ),
    "convnext": Model(
        named(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32},
        ),
        square_images,
    ),
}


# --- own models ----------------------------------------------------------------------------------
class Packed(nn.Module):
    """Attention over one packed weight; `heads` and `size` are attributes, or literals."""

    def __init__(self, hidden: int, literal: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.literal = 4, hidden // 4, literal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = 4 if self.literal else self.heads
        width = hidden if self.literal else self.heads * self.size
        parts = self.qkv(x).split(width, -1)
        q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Alibi(nn.Module):
    """Slopes are values of the number of a head: heads cannot be sharded."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        at = torch.arange(length)
        slopes = 0.5 ** torch.arange(self.heads)
        scores = q @ k.mT - (at[:, None] - at).abs() * slopes[:, None, None]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class OneKey(nn.Module):
    """One head of keys for all heads of queries, repeated, and batch and heads as one dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads, self.size = 4, hidden // 4
        self.q, self.kv = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * self.size)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        parts = self.kv(x).unsqueeze(1).expand(-1, self.heads, -1, -1).chunk(2, -1)
        q, k, v = (part.reshape(batch * self.heads, length, self.size) for part in (q, *parts))
        y = (torch.bmm(q, k.mT).softmax(-1) @ v).view(batch, self.heads, length, self.size)
        return self.out(y.transpose(1, 2).flatten(2))


def whole_norm(hidden: int) -> nn.Module:
    """A norm over all features of a layer, which is gathered for it."""
    return make(
        lambda self, x: self.down(torch.tanh(self.norm(self.up(x)))),
        up=nn.Linear(hidden, 2 * hidden),
        norm=nn.LayerNorm(2 * hidden),
        down=nn.Linear(2 * hidden, hidden),
    )


def written_norm(hidden: int) -> nn.Module:
    """A norm without a module of its own: nothing can gather for it."""
    layers = {"up": nn.Linear(hidden, 2 * hidden), "down": nn.Linear(2 * hidden, hidden)}
    return make(lambda self, x: self.down(F.normalize(self.up(x), dim=-1)), **layers)


class Squares(torch.autograd.Function):
    """Scaled squares, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.square() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return 2 * x * scale * grad, (x.square() * grad).sum((0, 1))


class Indexed(Packed):
    """One head gates the others: it is read by its number."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, self.size)
        gated = heads.softmax(-1) * heads[:, :, 0].sigmoid().unsqueeze(2)
        return self.out(gated.unflatten(2, (3, self.heads)).sum(2).flatten(2))


class OwnBackward(nn.Module):
    """Operations within a Function: of slices, and of a gate that is whole."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(hidden, 2 * hidden),
            nn.Linear(hidden, 1),
            nn.Linear(2 * hidden, hidden),
        )
        self.scale = nn.Parameter(torch.rand(2 * hidden))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        gate = Squares.apply(self.gate(x), self.one)
        return self.down(Squares.apply(self.up(x), self.scale) * gate)


class FewKeys(nn.Module):
    """Two heads of keys for eight of queries."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = 8, 2, hidden // 8
        self.q, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k, self.v = (nn.Linear(hidden, self.keys * self.size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (
            layer(x).view(batch, length, self.keys, self.size).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Two column layers, of which one is packed, and parameters of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(hidden, 6 * hidden), nn.Linear(3 * hidden, hidden)
        self.scale = nn.Parameter(torch.rand(3 * hidden))

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.down(up * torch.sigmoid(gate) * self.scale)


class Mixture(nn.Module):
    """Experts in a loop, with a router that every rank runs alike."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 48), nn.GELU(), nn.Linear(48, hidden)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


class Recurrent(nn.Module):
    """An LSTM, whose weights go to one kernel, and a convolution for each channel."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.up, self.down = nn.Conv1d(hidden, 64, 1), nn.Conv1d(64, hidden, 1)
        self.middle = nn.Conv1d(64, 64, 3, padding=1, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x)[0].transpose(1, 2)
        return self.down(F.silu(self.middle(self.up(y)))).transpose(1, 2)


def convolved(hidden: int) -> nn.Module:
    """Convolutions over the tokens: of all channels, and of each by itself."""
    return make(
        lambda self, x: self.down(F.silu(self.each(self.up(x.mT)))).mT,
        up=nn.Conv1d(hidden, 2 * hidden, 1),
        each=nn.Conv1d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden),
        down=nn.Conv1d(2 * hidden, hidden, 1),
    )


def literal_halves(hidden: int) -> nn.Module:
    """Two halves of 64 features each, as a number in the code."""

    def forward(self: Any, x: Tensor) -> Any:
        both = self.both(x)
        return self.down(both[..., :64].sigmoid() * both[..., 64:])

    layers = {"both": nn.Linear(hidden, 4 * hidden), "down": nn.Linear(2 * hidden, hidden)}
    return make(forward, **layers)


def literal_view(hidden: int) -> nn.Module:
    """A norm of eight features each, as a number in the code that slices fit as well."""

    def forward(self: Any, x: Tensor) -> Any:
        heads = self.up(x).unflatten(-1, (-1, 8))
        return self.down(F.normalize(heads, dim=-1).flatten(-2))

    layers = {"up": nn.Linear(hidden, 2 * hidden), "down": nn.Linear(2 * hidden, hidden)}
    return make(forward, **layers)


def twice(hidden: int) -> nn.Module:
    """One MLP in two roles: behind a norm, and without."""
    layers = {"norm": nn.LayerNorm(hidden), "mlp": Gated(hidden)}
    return make(lambda self, x: self.mlp(self.norm(x)) + self.mlp(torch.tanh(x)), **layers)


def dropping(hidden: int) -> nn.Module:
    """A dropout of what is sharded."""
    return make(
        lambda self, x: self.down(self.drop(torch.relu(self.up(x)))),
        up=nn.Linear(hidden, 2 * hidden),
        down=nn.Linear(2 * hidden, hidden),
        drop=nn.Dropout(0.5),
    )


class DroppingHeads(Packed):
    """Attention that drops weights, as its kernel does."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).split(self.heads * self.size, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Own(nn.Module):
    """Blocks between a table and a head that is tied to it."""

    def __init__(self, *kinds: type[nn.Module] | Callable[[int], nn.Module], hidden: int = 32):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(kind(hidden) for kind in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in kinds)
        self.final = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return self.head(self.final(x))


def own(*kinds: Any, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Own(*kinds, **sizes).train()


def literal(hidden: int) -> nn.Module:
    return Packed(hidden, literal=True)


def of_torch(hidden: int) -> nn.Module:
    return nn.TransformerEncoderLayer(hidden, 4, 3 * hidden, dropout=0.0, batch_first=True)


#: Blocks, and the smallest share of the bytes that is sharded.
OWN: dict[str, tuple[tuple[Any, ...], float]] = {
    "packed": ((Packed, Gated), 0.95),
    "literal": ((literal, Gated), 0.70),
    "literal halves": ((literal_halves, Gated), 0.45),
    "literal view": ((literal_view, Gated), 0.95),
    "convolved": ((convolved, Gated), 0.95),
    "alibi": ((Alibi, Gated), 0.60),
    "norm over all": ((whole_norm, Gated), 0.95),
    "norm written out": ((written_norm, Gated), 0.60),
    "own backward": ((OwnBackward, Gated), 0.95),
    "experts": ((Packed, Mixture), 0.95),
    "recurrent": ((Recurrent, Packed), 0.55),
    "one key": ((OneKey, Gated), 0.90),
    "twice": ((twice, Packed), 0.95),
    "layer of torch": ((of_torch, Gated), 0.70),
    "hybrid": ((Packed, Recurrent, Mixture, Alibi), 0.60),
}


def ids(batch: int = 3, length: int = 11, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)
