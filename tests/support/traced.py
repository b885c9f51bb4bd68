"""Gates on networks of which many tests make one each: such a kind of network is traced once in a process.

What is traced depends on no number in these networks. A test about tracing calls `attach` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ellzero as l0

_GRAPHS: dict[tuple[type, str, torch.Size, torch.dtype], l0.graph.Graph] = {}


def attached(model: nn.Module, x: Tensor, **options: Any) -> l0.Gated:
    """`l0.attach(model, x, **options)` for a network whose class and layers tell all about it."""
    alike = type(model), str(model), x.shape, x.dtype
    gated = l0.attach(model, x, graph=_GRAPHS.get(alike), **options)
    _GRAPHS[alike] = gated.graph
    return gated
