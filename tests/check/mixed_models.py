"""The models that mixed schedules are made for, and how they train."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharding.families import FAMILIES, HEADS, HIDDEN, VOCABULARY, Family, Region, Stack
from tests.sharding.families import tokens as tokens_of

CLASSES = 10

#: Inputs of a model by name, and targets.
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """A model, and what a mixed schedule has to know of it."""

    #: how it is split
    family: Family
    #: ``batch(samples, length, seed)``
    batch: Callable[[int, int, int], Batch]
    #: paths down to which it is traced for cuts
    containers: tuple[str, ...]
    #: where a stage may end then
    ends: tuple[str, ...]
    #: arguments of its forward that a trace takes for constants
    constants: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """No value that hides a mistake: no zeros, no ones."""
        torch.manual_seed(0)
        model = self.family.build(0.0).train()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn_like(param))
        return model


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits, which models of Transformers return within an object."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# --- a transformer -------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp, self.drop = Attention(), Mlp(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.attn(self.ln_1(x))) + x
        return self.drop(self.mlp(self.ln_2(x))) + x


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(32, HIDDEN)
        self.h = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.head(self.norm(x))


_TRANSFORMER = Family(
    lambda dropout, extra: Transformer(),
    (
        Stack(
            "h.*",
            (
                Region(
                    "attn",
                    tuple((f"attn.{name}", 0, 1) for name in "qkv"),
                    (("attn.out", 1),),
                    counts=(("attn", "heads"),),
                ),
                Region("mlp", (("mlp.fc1", 0, 1),), (("mlp.fc2", 1),)),
            ),
            ("ln_1", "ln_2"),
            "norm",
        ),
    ),
    ("emb",),
    "head",
    lambda batch, length: {},
)


# --- a convolutional net ---------------------------------------------------------------------
class Block(nn.Module):
    """Grouped or not, between a norm over the batch or over groups of channels."""

    def __init__(self, norm: nn.Module, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(8, 16, 3, padding=1), norm
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=groups)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.act(self.grouped(self.act(self.norm(self.conv1(x)))))) + x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            [Block(nn.BatchNorm2d(16), 4), Block(nn.GroupNorm(4, 16), 16)],
        )
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(self.norm(x)).mean((2, 3)))


_CONVNET = Family(
    lambda dropout, extra: ConvNet(),
    (
        Stack(
            "blocks.*",
            (
                Region(
                    "conv1",
                    (("conv1", 0, 1), ("norm", 0, 1), ("grouped", 0, 1)),
                    (("conv2", 1),),
                ),
            ),
            (),
            "norm",
        ),
    ),
    (),
    "head",
    lambda batch, length: {},
)


# --- batches -------------------------------------------------------------------------------------
def _ids(samples: int, length: int, seed: int) -> Batch:
    ids = tokens_of(samples, length, seed)
    return {"ids": ids}, ids.roll(-1, 1)


def _text(samples: int, length: int, seed: int) -> Batch:
    ids = tokens_of(samples, length, seed)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids.roll(-1, 1)


def _two_texts(samples: int, length: int, seed: int) -> Batch:
    ids, other = tokens_of(samples, length, seed), tokens_of(samples, length, seed + 50)
    return {"input_ids": ids, "decoder_input_ids": other}, other.roll(-1, 1)


def _images(samples: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, length, length + 2, generator=generator)
    return {"images": images}, torch.randint(0, CLASSES, (samples,), generator=generator)


_NO_CACHE = (("use_cache", False),)
MODELS = {
    "transformer": Model(_TRANSFORMER, _ids, ("",), ("h.0",)),
    "convnet": Model(_CONVNET, _images, ("",), ("blocks.0",)),
    "gpt2": Model(FAMILIES["gpt2"], _text, ("transformer",), ("transformer.h.0",), _NO_CACHE),
    "llama": Model(FAMILIES["llama"], _text, ("model",), ("model.layers.0",), _NO_CACHE),
    "qwen3": Model(FAMILIES["qwen3"], _text, ("model",), ("model.layers.0",), _NO_CACHE),
    "bert": Model(FAMILIES["bert"], _text, ("bert.encoder",), ("bert.encoder.layer.0",)),
    "t5": Model(
        FAMILIES["t5"],
        _two_texts,
        ("encoder", "decoder"),
        ("encoder", "encoder.block.0", "decoder.block.0"),
        _NO_CACHE,
    ),
}
