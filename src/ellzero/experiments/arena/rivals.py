"""Torch-Pruning, the package itself: dense for half of the epochs, pruned, and fine-tuned for the other half.

As its own scripts do it: ranked over all layers, in steps of 1/400 until the MACs fit, the classifier's outputs left
alone. The last steps are a tenth as large, and end in their midst where that is enough: so few MACs are given away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch.nn.functional as F
from torch import nn

from ellzero.experiments.arena import counting
from ellzero.experiments.arena.bout import Bout, Method

STEPS, STRIDE = 4000, 10  # of pruning, to nothing; so many at once until the end is near
REG = 5e-4  # its scripts' strength of the group norm, in place of weight decay
LOOK, BATCHES = 400, 10  # Taylor: the gradient is taken anew after so many steps, over so many batches


@final
class RivalMissingError(ImportError):
    """Torch-Pruning is not installed; the message says how to get it."""


def magnitude(bout: Bout) -> nn.Module:
    """Group magnitude: the L2 norm of all that a unit has, over the mean of its group."""
    tp, network = package(), bout.dense()
    bout.loop.train(network, _first(bout))
    pruner = _pruner(bout, network, tp.pruner.BasePruner, tp.importance.GroupMagnitudeImportance(p=2))
    return _finished(bout, network, pruner)


def norm(bout: Bout) -> nn.Module:
    """Group norms regularised while the dense network trains (DepGraph's sparse learning), then pruned by them."""
    tp, network = package(), bout.dense()
    importance = tp.importance.GroupMagnitudeImportance(p=2, normalizer="max")
    pruner = _pruner(bout, network, tp.pruner.GroupNormPruner, importance, reg=REG)
    bout.loop.train(network, _first(bout), decay=0.0, before_step=lambda: pruner.regularize(network))
    return _finished(bout, network, pruner)


def taylor(bout: Bout) -> nn.Module:
    """First-order Taylor expansion: the change of the loss, by its gradient, if a unit were zero."""
    tp, network = package(), bout.dense()
    bout.loop.train(network, _first(bout))
    pruner = _pruner(bout, network, tp.pruner.BasePruner, tp.importance.GroupTaylorImportance())

    looked = -LOOK

    def look() -> None:
        nonlocal looked
        if pruner.current_step >= looked + LOOK:
            looked = pruner.current_step
            network.to(bout.example.device).zero_grad()
            for x, y in bout.loop.sample(BATCHES):
                (F.cross_entropy(network(x), y) / BATCHES).backward()
            network.cpu()

    return _finished(bout, network, pruner, look)


def _first(bout: Bout) -> int:
    return bout.loop.epochs // 2


def package() -> Any:
    """Torch-Pruning; a RivalMissingError says that it is not installed."""
    try:
        import torch_pruning  # type: ignore[import-untyped]
    except ImportError:
        how = "`torch_pruning` must be installed to compare with it: pip install 'ellzero[arena]'"
        raise RivalMissingError(how) from None
    return torch_pruning


def _pruner(bout: Bout, network: nn.Module, kind: Any, importance: Any, **options: Any) -> Any:
    last = [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    return kind(
        network, bout.example, importance=importance, global_pruning=True, pruning_ratio=1.0, iterative_steps=STEPS,
        ignored_layers=[last], **options,
    )  # fmt: skip


def _finished(bout: Bout, network: nn.Module, pruner: Any, look: Callable[[], None] = lambda: None) -> nn.Module:
    """The network pruned, and trained for the rest of the epochs."""
    network.eval()  # statistics stay while it is looked at
    count = counting.counter(network, bout.example)
    network.cpu()  # where many small operations are faster
    _prune(pruner, count, bout.most, look)
    network.to(bout.example.device).zero_grad()
    return bout.loop.train(network, bout.loop.epochs - _first(bout))


def _prune(pruner: Any, count: Callable[[], int], most: int, look: Callable[[], None]) -> None:
    cost, largest = count(), 0  # of all strides so far
    while cost > most:
        stride = STRIDE if cost - most > largest else 1
        if pruner.current_step + stride > STEPS:
            raise ValueError(f"`at_most` must be within what Torch-Pruning reaches: {cost} MACs, got {most}")
        look()
        pruner.current_step += stride - 1
        before = cost
        for group in pruner.step(interactive=True):
            group.prune()
            cost = count()
            if cost <= most:
                return
        largest = max(largest, before - cost)


RIVALS: dict[str, Method] = {"magnitude": magnitude, "norm": norm, "taylor": taylor}
