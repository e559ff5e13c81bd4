"""Real images that need no download: scikit-learn's handwritten digits; and a network for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
CHANNELS = 3
#: Height and width; the originals are 8 x 8.
SIDE = 16


def digits() -> tuple[Tensor, Tensor]:
    """All 1797 digits, enlarged, with a mean of 0 and a deviation of 1.

    Returns
    -------
    Tensor, Tensor
        Images of shape ``(images, channels, height, width)``, and their digits ``(images,)``.
    """
    from sklearn.datasets import load_digits  # of the extra `examples`

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float().unsqueeze(1)
    pixels = F.interpolate((pixels - pixels.mean()) / pixels.std(), size=SIDE)
    return pixels.expand(-1, CHANNELS, -1, -1), torch.from_numpy(bunch.target).long()


class Digits:
    """Random batches of the digits; the same for the same seed.

    Parameters
    ----------
    batch
        Images in each.
    seed
        Of the choice.
    """

    def __init__(self, batch: int, seed: int = 7) -> None:
        self.pixels, self.labels = digits()
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> dict[str, Tensor]:
        """``pixel_values`` of shape ``(batch, channels, height, width)``, and ``labels``."""
        chosen = torch.randint(len(self.labels), (self.batch,), generator=self.generator)
        return {"pixel_values": self.pixels[chosen], "labels": self.labels[chosen]}


class Bottleneck(nn.Module):
    """A block whose inner convolutions are wide; its names are torchvision's."""

    def __init__(self, before: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv1 = nn.Conv2d(before, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.conv3 = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or before != channels:
            self.downsample = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same channels, or of more of them on a coarser grid."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(self.dropout(y)))
        return F.relu(y + self.downsample(x))


class WideResNet(nn.Module):
    """A wide residual network: four groups of blocks, each on half the grid of the one before.

    Parameters
    ----------
    channels
        Of the last group.
    blocks
        In each group.
    dropout
        Within blocks.
    """

    def __init__(self, channels: int, blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        before = channels // 8
        self.conv1 = nn.Conv2d(CHANNELS, before, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(before)
        for number in range(4):
            here = before * 2 if number else before
            strides = [2 if number else 1] + [1] * (blocks - 1)
            group = nn.Sequential()
            for stride in strides:
                group.append(Bottleneck(before, here, stride, dropout))
                before = here
            self.add_module(f"layer{number + 1}", group)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape ``(batch, classes)``."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        return self.fc(y.mean((2, 3)))
