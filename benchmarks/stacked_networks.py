"""The MLP and LeNet-5 for stacks of runs (`budget_ablation.py`): forward passes of many runs at once, gates and masks
as factors of what is read, and MACs by how many units are open. What gates are is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Net:
    """A network as a stack: its weights, what its gates multiply, and its MACs by how many are open."""

    sizes: tuple[int, ...]  # of the placements: inputs first

    def macs(self, n: Sequence[Any]) -> Any:
        raise NotImplementedError

    def forward(self, w: Sequence[Tensor], x: Tensor, z: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError


class MLP(Net):
    """784-300-100-10; the pixels are a placement too."""

    name, data, sizes, maps = "lenet300", "mnist", (784, 300, 100), 0
    widths = (300, 100)

    def macs(self, n: Sequence[Any]) -> Any:
        return n[0] * n[1] + n[1] * n[2] + 10 * n[2]

    def tally(self, own: Sequence[Tensor]) -> list[Tensor]:
        return [o.sum(-1) for o in own]

    def idle(self, opens: Any) -> Any:
        """Gates that change nothing, because another one is closed."""
        return np.zeros(len(opens), dtype=bool)

    def forward(self, w: Sequence[Tensor], x: Tensor, z: Sequence[Tensor]) -> Tensor:
        h = x if z[0] is None else x * z[0]
        h = F.relu(torch.baddbmm(w[1].unsqueeze(1), h, w[0].mT)) * z[1]
        h = F.relu(torch.baddbmm(w[3].unsqueeze(1), h, w[2].mT)) * z[2]
        return torch.baddbmm(w[5].unsqueeze(1), h, w[4].mT)

    def incoming(self, w: Sequence[Tensor], k: int) -> Tensor | None:
        return None if k == 0 else w[2 * k - 2]

    def outgoing(self, w: Sequence[Tensor], k: int) -> Tensor:
        return w[2 * k].transpose(1, 2)

    def multiply(self, w: Sequence[Tensor], k: int, z: Tensor) -> None:
        w[2 * k].mul_(z.unsqueeze(1))

    def fans(self, n: Sequence[int]) -> list[float]:
        """How much wider new weights of a layer are where so many of its inputs are left."""
        return [math.sqrt(784 / n[0]), math.sqrt(300 / n[1]), math.sqrt(100 / n[2])]


class LeNet(Net):
    """20 and 50 maps and 500 units; the 800 entries that the first linear layer reads, 16 of each map, are the first
    placement.
    """

    name, data, sizes, maps = "lenet5", "mnist", (800, 20, 50, 500), 3
    widths = (20, 50, 500)

    def macs(self, n: Sequence[Any]) -> Any:
        return n[1] * 25 * 576 + n[2] * n[1] * 1600 + n[0] * n[3] + 10 * n[3]

    def tally(self, own: Sequence[Tensor]) -> list[Tensor]:
        entries = own[0].unflatten(-1, (50, 16)) * own[2].unsqueeze(-1)
        return [entries.flatten(-2).sum(-1), *(o.sum(-1) for o in own[1:])]

    def idle(self, opens: Any) -> Any:
        out = np.zeros(len(opens), dtype=bool)
        out[:800] = ~np.repeat(opens[820:870], 16)
        return out

    def forward(self, w: Sequence[Tensor], x: Tensor, z: Sequence[Tensor]) -> Tensor:
        runs, size = x.shape[:2]
        image = x.reshape(runs * size, 1, 28, 28)
        h = torch.bmm(w[0].flatten(2), _patches(image, runs, size)).view(runs, 20, size, 24, 24)
        h = _pooled(F.relu(h + w[1].view(runs, 20, 1, 1, 1)))
        h = h * z[1].transpose(1, 2)[..., None, None]
        h = torch.bmm(w[2].flatten(2), _patches(h, runs, size)).view(runs, 50, size, 8, 8)
        h = _pooled(F.relu(h + w[3].view(runs, 50, 1, 1, 1)))
        h = h * z[2].transpose(1, 2)[..., None, None]
        h = h.transpose(1, 2).reshape(runs, size, 800) * z[0]
        h = F.relu(torch.baddbmm(w[5].unsqueeze(1), h, w[4].mT)) * z[3]
        return torch.baddbmm(w[7].unsqueeze(1), h, w[6].mT)

    def incoming(self, w: Sequence[Tensor], k: int) -> Tensor | None:
        return None if k == 0 else w[2 * k - 2].flatten(2)

    def outgoing(self, w: Sequence[Tensor], k: int) -> Tensor:
        if k == 0:
            return w[4].transpose(1, 2)
        if k == 2:
            return w[4].view(-1, 500, 50, 16).permute(0, 2, 1, 3).flatten(2)
        return w[2 * k].transpose(1, 2).flatten(2)

    def multiply(self, w: Sequence[Tensor], k: int, z: Tensor) -> None:
        if k == 1:
            w[2].mul_(z[:, None, :, None, None])
        elif k == 2:
            w[4].mul_(z.repeat_interleave(16, 1).unsqueeze(1))
        else:
            w[6 if k == 3 else 4].mul_(z.unsqueeze(1))

    def fans(self, n: Sequence[int]) -> list[float]:
        return [1.0, math.sqrt(20 / n[1]), math.sqrt(800 / n[0]), math.sqrt(500 / n[3])]


def _patches(h: Tensor, runs: int, size: int) -> Tensor:
    """All 5 × 5 patches, (runs, inputs of a kernel, positions of the batch)."""
    if h.ndim == 4:  # (runs · size, 1, 28, 28)
        p = h.view(runs, size, 28, 28).unfold(2, 5, 1).unfold(3, 5, 1)  # runs, size, 24, 24, 5, 5
        return p.permute(0, 4, 5, 1, 2, 3).reshape(runs, 25, -1)
    p = h.unfold(3, 5, 1).unfold(4, 5, 1)  # runs, maps, size, 8, 8, 5, 5
    return p.permute(0, 1, 5, 6, 2, 3, 4).reshape(runs, h.shape[1] * 25, -1)


def _pooled(h: Tensor) -> Tensor:
    """Max-pooling by two over the last two dimensions."""
    n = h.shape
    return F.max_pool2d(h.flatten(0, 1), 2).view(*n[:3], n[3] // 2, n[4] // 2)


NETS = {net.name: net for net in (MLP(), LeNet())}
