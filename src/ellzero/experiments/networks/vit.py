"""ViT-Lite, for CIFAR; a plain `nn.Module` that knows nothing of gates, data or training."""

from __future__ import annotations

import re
from typing import final

import torch
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register
from ellzero.experiments.networks.transformer import Block, Branch

_SIDE, _HEADS = 32, 4


@final
class ViTLite(nn.Module):
    """ViT-Lite-layers/patch (Hassani et al., 2021): four heads, width 256, 512 hidden units, a token for the class.

    ViT-Lite-7/4 has 3,716,874 parameters and 254.5 M MACs; 239 M without those between queries, keys and values, as
    its authors count. Their code puts the stream itself through each block's second norm; here that norm is on the
    branch, as in ViT. Dropout is on the attention's weights, and leaves out branches, the more the later, as theirs.
    """

    def __init__(
        self, layers: int = 7, patch: int = 4, width: int = 256, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if _SIDE % patch:
            raise ValueError(f"`patch` must divide the {_SIDE} rows of an image, got {patch}")
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (_SIDE // patch) ** 2 + 1, width))
        rates = (dropout * layer / max(1, layers - 1) for layer in range(layers))
        self.blocks = nn.Sequential(*(Block(width, _HEADS, 2 * width, Branch(rate), dropout) for rate in rates))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        nn.init.kaiming_normal_(self.patches.weight)
        nn.init.trunc_normal_(self.places, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 3, 32, 32)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        logits: Tensor = self.fc(self.norm(self.blocks(h))[:, 0])
        return logits


def _network(typed: re.Match[str]) -> Network | None:
    layers, patch, width = int(typed[1]), int(typed[2]), int(typed[3] or 256)
    if _SIDE % patch or width % _HEADS:
        return None
    return Network(
        name=typed[0],
        title=f"ViT-Lite-{layers}/{patch}" + (f", width {width}" if typed[3] else ""),
        make=lambda classes, dropout=0.0: ViTLite(layers, patch, width, classes, dropout),
        images=(3, _SIDE, _SIDE),
        has_dropout=True,
        centres=True,
        residual=True,
    )


_TYPED = '"vit-lite-LAYERS-PATCH" or "vit-lite-LAYERS-PATCH-WIDTH" with a width that 4 heads share evenly'
register(r"vit-lite-([1-9]\d*)-([1-9]\d*)(?:-([1-9]\d*))?", _network, typed=_TYPED)
