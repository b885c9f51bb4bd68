"""MACs of plain networks of linear layers and convolutions, for one image. It knows no gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ellzero.graph.tracing import mode


@torch.no_grad()
def macs(network: nn.Module, x: Tensor) -> int:
    """As torch counts them, in evaluation; the network's mode stays."""
    with mode(network, training=False), FlopCounterMode(display=False) as counter:
        network(x[:1])
    return int(counter.get_total_flops()) // 2


@torch.no_grad()
def counter(network: nn.Module, x: Tensor) -> Callable[[], int]:
    """What counts them at any later time without a forward pass, while layers shrink in place: the size of a layer's
    weight times the positions that it acts on.
    """
    positions: dict[Any, int] = {}

    def see(layer: nn.Module, _: Any, out: Tensor) -> None:
        positions[layer] = positions.get(layer, 0) + (out[0, 0].numel() if out.ndim == 4 else 1)

    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(see) for layer in layers]
    try:
        macs(network, x)
    finally:
        for hook in hooks:
            hook.remove()
    return lambda: sum(int(layer.weight.numel()) * often for layer, often in positions.items())
