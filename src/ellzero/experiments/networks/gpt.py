"""A small GPT over characters; a plain `nn.Module` that knows nothing of gates, data or training."""

from __future__ import annotations

import re
from typing import final

import torch
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register
from ellzero.experiments.networks.transformer import Block

BLOCK = 256  # characters at most


@final
class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019) as nanoGPT has it for characters: no bias anywhere, and the last layer shares its
    weight with the embedding. Six layers and heads of width 384 have 10,745,088 parameters for 65 characters.

    Dropout is on the embedding, on the attention's weights and on what a branch adds.
    """

    def __init__(
        self, layers: int = 6, heads: int = 6, width: int = 384, characters: int = 65, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(characters, width), nn.Embedding(BLOCK, width)
        self.drop = nn.Dropout(dropout)
        blocks = (
            Block(width, heads, 4 * width, nn.Dropout(dropout), dropout, bias=False, causal=True) for _ in range(layers)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # what writes the stream adds up over the layers
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / (2 * layers) ** 0.5 if last else 0.02)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, length, characters) of the next character after each of x (N, length)."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.drop(self.embed(x) + places))))
        return logits


def _network(typed: re.Match[str]) -> Network | None:
    layers, heads, width = map(int, typed.groups())
    if width % heads:
        return None
    return Network(
        name=typed[0],
        title=f"GPT, {layers} layers, {heads} heads, width {width}",
        make=lambda classes, dropout=0.0: GPT(layers, heads, width, classes, dropout),
        images=(BLOCK,),
        has_dropout=True,
        centres=True,
        residual=True,
        test_batch=64,
    )


_TYPED = '"gpt-LAYERS-HEADS-WIDTH" with a width that the heads share evenly'
register(r"gpt-([1-9]\d*)-([1-9]\d*)-([1-9]\d*)", _network, typed=_TYPED)
