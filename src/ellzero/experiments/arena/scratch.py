"""What needs no pruning: the dense network, a uniformly narrower one, and the shape that `budget` found, each trained
from new weights.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch
from torch import nn

from ellzero.experiments.arena import counting
from ellzero.experiments.arena.bout import Bout, Method
from ellzero.graph.standins.layers import Closed
from ellzero.out import saving
from ellzero.out.bounding.pacing import LEARNING

FINENESS = 1024  # shares of the widths that are tried


def dense(bout: Bout) -> nn.Module:
    """The network as it is."""
    return bout.loop.train(bout.dense(), bout.loop.epochs)


def narrow(bout: Bout) -> nn.Module:
    """The widest of the uniformly narrower networks that fits."""
    make = bout.network.narrower
    if make is None:
        raise ValueError(f"`{bout.network.name}` must say what narrower networks of its kind are")
    shares = [k / FINENESS for k in range(1, FINENESS + 1)]

    def cost(share: float) -> int:
        with torch.random.fork_rng(devices=[]):  # weights that nobody uses
            return counting.macs(make(bout.classes, share), bout.example.cpu())

    fitting = bisect.bisect_right(shares, bout.most, key=cost)
    if not fitting:
        raise ValueError(f"`at_most` must be within what a narrower `{bout.network.name}` reaches, got {bout.at_most}")
    network = make(bout.classes, shares[fitting - 1]).to(bout.example.device)
    return bout.loop.train(network, bout.loop.epochs)


def shape(bout: Bout, *, searched: float = 0.0) -> nn.Module:
    """The shape that `budget` found with the same seed, with new weights; it reads the same inputs.

    The share `searched` of the epochs is what it took to find the shape: the rest are left to train it.
    """
    if bout.found is None:
        raise ValueError("`shape` must come after `budget` of the same network, MACs and seed, and needs its file")
    network = saving.load(bout.network.make(bout.classes), bout.found)
    renew(network)
    return bout.loop.train(network.to(bout.example.device), bout.loop.epochs - round(searched * bout.loop.epochs))


SHAPES: dict[str, Method] = {"shape": shape, "shape-counted": partial(shape, searched=LEARNING)}


@torch.no_grad()
def renew(network: nn.Module) -> None:
    """Draws all weights anew, as torch does for layers of these sizes."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, Closed) and module.bias is not None:
            module.bias.zero_()
