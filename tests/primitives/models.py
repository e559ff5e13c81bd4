"""Small models that the tests of primitives schedule."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OneLayer(nn.Module):
    """A layer `fc`; a subclass says what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class TwoLayers(nn.Module):
    """Layers `a` and `b`; a subclass may do something else with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, size: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, 2 * size)
        self.fc2 = nn.Linear(2 * size, size)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(x)))) + x


class Stack(nn.Module):
    """Blocks in a list, and a head."""

    def __init__(self, depth: int = 3, size: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(size, p) for _ in range(depth)])
        self.head = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.q = nn.Linear(size, size)
        self.k = nn.Linear(size, size)
        self.v = nn.Linear(size, size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return self.out(scores @ self.v(x))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, vocab: int = 8, size: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, size)
        self.fc = nn.Linear(size, size)
        self.head = nn.Linear(size, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.emb(tokens))))


class DataDependent(OneLayer):
    """Cannot be traced with proxies."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Computes(nn.Module):
    """Computes a function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Twice(OneLayer):
    """Calls one module at two places."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.fc(torch.cos(self.fc(x))))
