"""Layers that schedules pack: query, key and value, and the two halves of a gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.weights.provenance import Source


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[0], x.shape[1]
        heads = [p(x).view(batch, length, -1, 4) for p in (self.query, self.key, self.value)]
        q, k, v = (h.transpose(1, 2) for h in heads)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(16, 48, bias=False)

    def weight_sources(self) -> dict[str, Source]:
        return {"both.weight": Source(("0.weight", "1.weight"))}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.both(x).chunk(2, dim=-1)


def heads_of(x: Tensor) -> Tensor:
    projected = slapo.call_module("query|key|value", x).view(x.shape[0], x.shape[1], -1, 4)
    return projected.transpose(1, 2)
