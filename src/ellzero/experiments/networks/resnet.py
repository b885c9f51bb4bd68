"""Residual networks for CIFAR as He et al. first had them; plain `nn.Module`s that know no gates."""

from __future__ import annotations

import re
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register, scaled_widths


@final
class PaddedBlock(nn.Module):
    """Two 3×3 convolutions with batch norm, added to the stream before the last ReLU.

    Where the shape changes, the stream is strided and padded with empty channels: option A of the paper, which has no
    parameters.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        hidden = F.relu(self.bn1(self.conv1(x)))
        if self.stride != 1 or self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(self.bn2(self.conv2(hidden)) + x)


@final
class ResNet(nn.Module):
    """ResNet-depth for CIFAR (He et al., 2016): three stages with 16, 32 and 64 channels, (depth − 2) / 6 blocks each.

    ResNet-56 has 853,018 parameters and 125.5 M MACs. Its streams cannot shrink, because they are padded; the hidden
    layer of every block can. `share` is of the channels, streams too: the same network, uniformly narrower.
    """

    def __init__(self, depth: int = 56, classes: int = 10, share: float = 1.0) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"`depth` must be 6 n + 2 with n >= 1 (8, 14, 20, ..., 56), got {depth}")
        first, *_ = widths = scaled_widths((16, 32, 64), share)
        self.conv, self.bn = nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)
        blocks, channels = [], first
        for stage, outputs in enumerate(widths):
            for block in range((depth - 2) // 6):
                blocks.append(PaddedBlock(channels, outputs, 2 if stage and not block else 1))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 3, H, W)."""
        h = self.blocks(F.relu(self.bn(self.conv(x))))
        logits: Tensor = self.fc(h.mean((2, 3)))
        return logits


def _network(typed: re.Match[str]) -> Network | None:
    depth = int(typed[1])
    if depth < 8 or depth % 6 != 2:
        return None
    return Network(
        name=typed[0],
        title=f"ResNet-{depth}",
        make=lambda classes, dropout=0.0: ResNet(depth, classes),
        narrower=lambda classes, share: ResNet(depth, classes, share),
        images=(3, 32, 32),
        has_batch_norm=True,
        blocks="blocks.*.conv1",
        residual=True,
    )


register(r"resnet-([1-9]\d*)", _network, typed='"resnet-DEPTH" with depth 8, 14, 20, ..., 56, ...')
