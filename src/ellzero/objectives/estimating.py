"""The backward for gates that learn from the value of the loss: score function, AR and ARM.

Gates that are drawn as 0 or 1 have no path for a gradient. Their estimator makes one of the loss, of one draw or of
two. This file runs the forwards and hands the losses over; the formulas are in `gates/estimators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ellzero.gated.module import Gated
from ellzero.gates.families.bernoulli import AbstractBernoulliGate


def estimated_backward(gated: Gated, loss: Callable[[Tensor], Tensor], noise: Tensor | None = None) -> Tensor:
    """The backward of a task's loss, for all parameters: in place of `loss.backward()`.

    Weights, and gates that have a path, get their gradient by the backward of one forward. Gates whose estimator needs
    the loss get theirs added: by ARM from a second forward with mirrored noise, without gradients, in which batch-norm
    statistics do not move. The penalty's or constraint's term has a path: call `backward()` on it as well.

    Args:
        gated: the network, in training.
        loss: the task's loss for given noise of the gates, such as `lambda u: f(gated(x, gate_noise=u), y)`. It is
            called once, or twice for `ARM()`, with the same batch.
        noise: uniform noise, flat, one entry per gate; drawn if `None`.

    Returns:
        The loss of the draw, detached.

    Raises:
        RuntimeError: gates are not drawn (`eval()`, `fix()`), or there are several processes, each of which would
            learn from a loss of its own.

    Example:
        >>> import ellzero as l0
        >>> from functools import partial
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, gate = torch.randn(3, 4), partial(l0.gates.BernoulliGate, estimator=l0.gates.ARM())
        >>> gated = l0.attach(net, (x,), gate=gate)
        >>> optimizer, penalty = torch.optim.Adam(gated.param_groups(lr=1e-3)), l0.Penalty(l0.l0_norm, weight=1e-3)
        >>> value = estimated_backward(gated, lambda u: gated(x, gate_noise=u).square().mean())
        >>> penalty(gated).backward()
        >>> optimizer.step()
    """
    if not gated.training or gated.fixed:
        raise RuntimeError("`gated` must draw its gates: call `train()`, and not `fix()`, before `estimated_backward`")
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    if here and torch.distributed.get_world_size() > 1:
        raise RuntimeError("estimators that need the loss work in one process: each would learn from its own loss")
    gated.estimated = gated.noisy = True
    noise = gated.gate_noise() if noise is None else noise
    value = loss(noise)
    value.backward()
    learning = {
        name: gate
        for name, gate in gated.named_gates()
        if isinstance(gate, AbstractBernoulliGate) and gate.needs_loss and gate.log_odds.requires_grad
    }
    parts, mirrored = gated.by_placement(noise), None
    if any(gate.estimator.antithetic for gate in learning.values()):
        turned = {
            name: 1 - u if name in learning and learning[name].estimator.antithetic else u for name, u in parts.items()
        }
        with torch.no_grad(), still_statistics(gated.model):
            mirrored = loss(torch.cat([u.reshape(-1) for u in turned.values()])).detach()
    for name, gate in learning.items():
        gate.learn_(parts[name], value.detach(), mirrored)
    return value.detach()


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Lets batch norm use the batch's statistics, and remember nothing of them."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
