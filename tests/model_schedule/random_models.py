"""Random blocks of transformers, as people write them: for drafts of what no test names."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_schedule.draft_models import Own


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, tokens, features)."""
    length, size = x.shape[-2:]
    angles = torch.arange(length)[:, None] * 0.3 ** torch.arange(size // 2)
    first, second = x.chunk(2, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


class Attention(nn.Module):
    def __init__(self, hidden: int, chance: random.Random) -> None:
        super().__init__()
        self.heads = chance.choice([4, 8])
        self.head_size = hidden // self.heads
        self.packing = chance.choice(["three", "grouped", "one key", "packed", "by head", "joined"])
        self.key_heads = {"grouped": self.heads // 2, "one key": 1}.get(self.packing, self.heads)
        self.norm_of = chance.choice(["", "", "head", "all"])
        self.positions = chance.choice(["", "rotary", "rotary", "table", "slopes", "scale"])
        self.is_fused = chance.random() < 0.5 and self.positions in ("", "rotary")
        self.literal = chance.random() < 0.15 and self.heads == 4
        self.gate = chance.choice(["", "", "features", "heads"])
        bias = chance.random() < 0.5
        keys = self.key_heads * self.head_size
        if self.key_heads < self.heads or self.packing == "three":
            self.query = nn.Linear(hidden, hidden, bias=bias)
            self.key, self.value = (nn.Linear(hidden, keys, bias=bias) for _ in range(2))
        else:
            self.together = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=chance.random() < 0.5)
        if self.norm_of:
            size = self.head_size if self.norm_of == "head" else hidden
            self.norm = chance.choice([nn.LayerNorm, nn.RMSNorm])(size)
        if self.positions == "table":
            self.table = nn.Embedding(15, self.heads)
        if self.positions == "scale":
            self.scale = nn.Parameter(torch.rand(self.heads, 1, 1))
        if self.gate:
            self.gating = nn.Linear(hidden, hidden if self.gate == "features" else self.heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = 4 if self.literal else self.heads
        q, k, v = (part.transpose(1, 2) for part in self.projected(x, heads))
        if self.norm_of == "head":
            q, k = self.norm(q), self.norm(k)
        if self.positions == "rotary":
            q, k = rotated(q), rotated(k)
        if self.packing == "grouped":
            k, v = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (k, v))
        if self.packing == "one key":
            k, v = (part.expand(batch, q.shape[1], length, self.head_size) for part in (k, v))
        if self.is_fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.scores(q @ k.mT / self.head_size**0.5, length).softmax(-1) @ v
        if self.gate == "heads":
            y = y * self.gating(x).sigmoid().transpose(1, 2)[..., None]
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return self.out(y * self.gating(x).sigmoid() if self.gate == "features" else y)

    def projected(self, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        batch, length, _ = x.shape
        if hasattr(self, "query"):
            q, k, v = self.query(x), self.key(x), self.value(x)
            if self.norm_of == "all":
                q = self.norm(q)
            q = q.view(batch, length, heads, -1)
            return q, *(part.view(batch, length, -1, self.head_size) for part in (k, v))
        y = self.together(x)
        if self.packing == "packed":
            return y.view(batch, length, 3, heads, self.head_size).unbind(2)
        if self.packing == "by head":
            return y.view(batch, length, heads, 3 * self.head_size).chunk(3, -1)
        parts = y.split(self.heads * self.head_size, -1)
        return tuple(part.view(batch, length, heads, self.head_size) for part in parts)

    def scores(self, scores: Tensor, length: int) -> Tensor:
        at = torch.arange(length)
        apart = at[:, None] - at
        if self.positions == "table":
            return scores + self.table(apart.clamp(-7, 7) + 7).permute(2, 0, 1)
        if self.positions == "slopes":
            return scores - apart.abs() * (0.5 ** torch.arange(self.heads))[:, None, None]
        return scores * self.scale if self.positions == "scale" else scores


class Mlp(nn.Module):
    def __init__(self, hidden: int, chance: random.Random) -> None:
        super().__init__()
        kinds = ["plain", "gated", "packed", "pairs", "channels", "narrow", "squeezed", "three"]
        self.kind = chance.choice([*kinds, "norm", "experts"])
        self.inner = inner = hidden * chance.choice([2, 3])
        bias = chance.random() < 0.5
        wide = 2 * inner if self.kind in ("packed", "pairs") else inner
        if self.kind == "experts":
            self.router = nn.Linear(hidden, 4)
            self.ups = nn.Parameter(0.1 * torch.randn(4, hidden, inner))
            self.downs = nn.Parameter(0.1 * torch.randn(4, inner, hidden))
            return
        self.up = nn.Linear(hidden, 8 if self.kind == "narrow" else wide, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)
        more: dict[str, dict[str, nn.Module]] = {
            "gated": {"gate": nn.Linear(hidden, inner, bias=bias)},
            "channels": {"mix": nn.Conv1d(inner, inner, 3, padding=1, groups=inner)},
            "narrow": {"middle": nn.Linear(8, inner)},
            "squeezed": {"squeeze": nn.Linear(inner, 8), "widen": nn.Linear(8, inner)},
            "three": {"middle": nn.Linear(inner, inner)},
            "norm": {"norm": nn.LayerNorm(inner)},
        }
        for name, module in more.get(self.kind, {}).items():
            self.add_module(name, module)
        if self.kind == "channels":
            self.beta = nn.Parameter(torch.rand(inner))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "experts":
            weights = self.router(x).softmax(-1)
            y = F.gelu(torch.einsum("bth,ehm->btem", x, self.ups))
            return torch.einsum("btem,emh,bte->bth", y, self.downs, weights)
        y = self.up(x)
        if self.kind == "packed":
            up, gate = y.split(self.inner, -1)
            return self.down(up * gate.sigmoid())
        if self.kind == "pairs":
            y = y.unflatten(-1, (-1, 2))
            return self.down(y[..., 0] * y[..., 1].tanh())
        y = F.gelu(y)
        if self.kind == "gated":
            y = y * self.gate(x)
        elif self.kind == "channels":
            y = self.mix(y.transpose(1, 2)).transpose(1, 2) * self.beta
        elif self.kind in ("narrow", "three"):
            y = F.silu(self.middle(y))
        elif self.kind == "squeezed":
            y = y * self.widen(F.relu(self.squeeze(y.mean(1, keepdim=True)))).sigmoid()
        elif self.kind == "norm":
            y = self.norm(y)
        return self.down(y)


class Block(nn.Module):
    def __init__(self, hidden: int, chance: random.Random) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(hidden, chance), Mlp(hidden, chance)
        self.first, self.second = nn.LayerNorm(hidden), nn.RMSNorm(hidden)
        self.style = chance.choice(["before", "after", "parallel"])
        self.strength = nn.Parameter(torch.rand(hidden)) if chance.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        strength: Any = 1.0 if self.strength is None else self.strength
        if self.style == "parallel":
            y = self.first(x)
            return self.attention(y) + strength * self.mlp(y)
        if self.style == "before":
            x = x + strength * self.attention(self.first(x))
            return self.mlp(self.second(x))
        x = self.first(x + self.attention(x))
        return self.second(strength * self.mlp(x))


def random_model(seed: int) -> nn.Module:
    """Two blocks, alike or not."""
    chance = random.Random(seed)
    hidden, seeds = chance.choice([32, 64]), [chance.getrandbits(30) for _ in range(2)]
    is_alike = chance.random() < 0.5
    torch.manual_seed(seed)
    kinds = [seeds[0], seeds[0 if is_alike else 1]]
    blocks = [lambda size, kind=kind: Block(size, random.Random(kind)) for kind in kinds]
    return Own(*blocks, hidden=hidden).train()
