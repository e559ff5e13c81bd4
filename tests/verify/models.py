"""Models for what Verify must catch and what it must let pass."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.sharding.families import FAMILIES

BATCH, LENGTH = 3, 8
#: How parameters begin: as the model's author has them, or all of this spread but norms.
INITIALIZATIONS = ("default", "zero", "large")


class Residual(nn.Module):
    """A block of a small convolutional network."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(2 * channels)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return x + self.drop(self.bn2(self.conv2(y)))


class ConvNet(nn.Module):
    """Images (batch, 3, height, width) to logits of ten classes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(Residual(8, dropout) for _ in range(2)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.norm(self.stem(x)))).flatten(1))


def build(family: str, dropout: float = 0.1, seed: int = 0) -> nn.Module:
    """A model of a family, of twelve layers where it is called deep, or the convolutional one."""
    torch.manual_seed(seed)
    if family == "conv":
        return ConvNet(dropout)
    if not family.startswith("deep "):
        return FAMILIES[family].build(dropout)
    model = FAMILIES[family.removeprefix("deep ")].build(dropout)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 12
    return type(model)(config)


def inputs(family: str) -> Any:
    if family == "conv":
        return torch.randn(5, 3, 7, 7, generator=torch.Generator().manual_seed(2))
    return FAMILIES[family.removeprefix("deep ")].inputs(BATCH, LENGTH)


@torch.no_grad()
def initialize(model: nn.Module, how: str) -> None:
    """Give parameters other values: those that hide errors, or those that amplify rounding."""
    for name, parameter in model.named_parameters():
        if how == "large" and parameter.dim() > 1:
            parameter.normal_(0.0, 0.2)
        elif how == "zero" and name.endswith(_LAST):
            parameter.zero_()


#: Projections that residual blocks end with.
_LAST = tuple(
    f"{name}.weight"
    for name in ("c_proj", "o_proj", "down_proj", "output.dense", "wo", "SelfAttention.o", "conv2")
)
