"""Wide residual networks, for CIFAR; plain `nn.Module`s that know nothing of gates, data or training."""

from __future__ import annotations

import re
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register


@final
class PreActivationBlock(nn.Module):
    """Two 3×3 convolutions, each after batch norm and ReLU, and a path around them (He et al., 2016).

    The first has the stride, and dropout comes before the second. Where the shape changes, the way around is a 1×1
    convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        active = F.relu(self.bn1(x))
        hidden = F.relu(self.bn2(self.conv1(active)))
        around = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = around + self.conv2(self.dropout(hidden))
        return out


@final
class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko & Komodakis, 2016): pre-activation blocks with 16, 32 and 64 times `width` channels.

    The hidden layer of each block is where the first paper has its gates, and where dropout goes otherwise: WRN-28-10
    has 12 of them with 4,480 units. As in the paper of these networks, the first convolution of a block has the stride;
    the public code of both L0 papers strides the second one, with as many parameters and 13 % more MACs in WRN-28-10.
    """

    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"`depth` must be 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
        if width < 1:
            raise ValueError(f"`width` must be at least 1, got {width}")
        blocks, channels = [], 16
        for group, outputs in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                blocks.append(PreActivationBlock(channels, outputs, stride, dropout))
                channels = outputs
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 3, H, W)."""
        h = F.relu(self.bn(self.blocks(self.conv(x))))
        logits: Tensor = self.fc(h.mean((2, 3)))
        return logits


def _wide(typed: re.Match[str]) -> Network | None:
    return _network(typed[0], typed[0].upper(), int(typed[1]), int(typed[2]))


def _thin(typed: re.Match[str]) -> Network | None:
    """Pre-activation ResNets are called by one depth for all: that of a WRN counts two layers more, the ways around."""
    return _network(typed[0], f"pre-activation ResNet-{typed[1]}", int(typed[1]) + 2, 1)


def _network(name: str, title: str, depth: int, width: int) -> Network | None:
    if depth < 10 or depth % 6 != 4:
        return None
    return Network(
        name=name,
        title=title,
        make=lambda classes, dropout=0.0: WideResNet(depth, width, classes, dropout),
        images=(3, 32, 32),
        has_batch_norm=True,
        has_dropout=True,
        blocks="blocks.*.conv1",
        residual=True,
    )


register(r"wrn-([1-9]\d*)-([1-9]\d*)", _wide, typed='"wrn-DEPTH-WIDTH" with depth 10, 16, 22, 28, ...')
register(r"preresnet-([1-9]\d*)", _thin, typed='"preresnet-DEPTH" with depth 8, 14, 20, ..., 110, ...')
