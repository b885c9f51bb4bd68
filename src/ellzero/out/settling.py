"""The end of the gates' learning: what is kept is decided and folded into the weights, and the rest trains on plain.

`settle` decides; `recalibrate` gathers batch-norm statistics that belong to the network as it is. This file does not
know when gates settle, nor optimizers and loops.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ellzero import gates
from ellzero.gated.module import Gated
from ellzero.gates.warning import warn
from ellzero.graph.tracing import first_line
from ellzero.objectives.checking import Bounds
from ellzero.out.bounding.targets import shares
from ellzero.out.finalization import MUCH, Uniform, bring_within, revive
from ellzero.out.latency.correcting import chosen_by_the_clock

CHOICE = 8.0  # how far log α must be able to go: 4 from nearly open to closed, and as far while multipliers grow
SCANT = 0.5  # the share of a bound under which gates have closed far too much


def warn_of_haste(gated: Gated, bounds: Bounds, travelled: float, when: str, why: str) -> None:
    """Warns, before gates settle, of what would nearly be left to chance.

    Of a cost that is far above its bound, if log α could not go as far as a choice takes: gates that had the time have
    learned what to close, open or not. And where all are far below their bounds: what settling opens has not learned.
    """
    found = [part for cost, bound in bounds.items() for part in shares(gated, cost, bound)]
    told = [f"{100 * share:.3g} % of `{name}` kept, of {100 * most:.4g} % that may be" for name, share, most in found]
    for what, (_, share, most) in zip(told, found, strict=True):
        if travelled < CHOICE and share > most + MUCH:
            warn(f"gates settle after {when} with {what}: {why}")
    if all(share < SCANT * most for _, share, most in found):
        for what in told:
            warn(
                f"gates settle after {when} with {what}: multipliers press too hard, as they do on a loss far "
                "below 1, or clipped; give it in units of its first values, and clip the gradients of "
                "`gated.model.parameters()` alone"
            )


@torch.no_grad()
def settle(gated: Gated, bounds: Bounds, *, uniform: Uniform = None) -> None:
    """Ends the gates' learning: the kept cost is just within every bound, and there is no noise from here on.

    Units are closed, or opened, until what is kept is within the bounds and fills them; at least one of each placement
    is open. Gates that are open are folded into the weights. The rest of a budget would be error for nothing, and so
    would noise in a network that is small already.

    Args:
        gated: the network; it computes nearly what it did, and is fixed (`Gated.fix`).
        bounds: the fraction, or fractions by pattern, of each cost; without any only what is closed as a whole opens.
        uniform: as in `finalize`.
    """
    if bounds:
        chosen_by_the_clock(gated, bounds, partial(bring_within, gated, bounds, fill=True, uniform=uniform))
    else:
        revive(gated)
    fold_in(gated)
    for _, gate in gated.named_gates():
        gate.close_(~gate.open())  # for good: what is expected is then what is kept
        gate.open_(gate.open(), wide=True)


@torch.no_grad()
def fold_in(gated: Gated) -> None:
    """Multiplies the gates' test-time values into the model's weights, in place."""
    gated.multiply_into(gated.model, gates.values([gate for _, gate in gated.named_gates()]))


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[Any]) -> None:
    """Gathers batch-norm statistics anew, as plain means over `batches`, without noise in the gates.

    Running statistics follow the network that trained. They are wrong for another one: for a gated network in
    evaluation while its gates still are noisy in training, and for an average of parameters.

    Args:
        network: any module, a `Gated` too. Its mode stays.
        batches: what the network is called with: a tensor, a tuple or list whose first entry is one, as a data loader
            gives, or a dict of keyword arguments. Where the forward needs several inputs, as many entries; or a tuple
            of them as the first.

    Raises:
        ValueError: `batches` is empty, and there are statistics to gather, or the network does not take one of them. As
            with any other error, nothing is changed.
    """
    norms = norms_of(network)
    if not norms:
        return
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"`batches` must be batches one after the other, as a data loader or `[x]`, got {_word(batches)}"
        )
    calls = iter(batches)
    first = next(calls, None)
    if first is None:
        raise ValueError("`batches` must have a batch at least, got none")
    modes = [(module, module.training) for module in network.modules()]
    for module in network.modules():
        module.training = False
    try:
        with gathering(norms):
            for batch in chain([first], calls):  # one at a time: they may be more than memory holds
                _call(network, batch)
    finally:
        for module, mode in modes:
            module.training = mode
    for module in (m for m in network.modules() if isinstance(m, Gated)):
        module.noisy = False


def norms_of(network: nn.Module) -> list[_BatchNorm]:
    """The batch norms that have statistics to gather."""
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextmanager
def gathering(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Gathers their statistics anew, as plain means over the batches that run meanwhile; leaves them in evaluation. An
    error gives them back.
    """
    momenta = [norm.momentum for norm in norms]
    before = [[b.clone() for b in norm.buffers()] for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
        norm.train()
    try:
        yield
    except BaseException:
        for norm, was in zip(norms, before, strict=True):
            for buffer, numbers in zip(norm.buffers(), was, strict=True):
                buffer.copy_(numbers)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


def _call(network: nn.Module, batch: Any) -> None:
    device = next(network.parameters()).device
    args, kwargs = [], {}
    if isinstance(batch, Mapping):
        kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    else:
        entries = batch if isinstance(batch, tuple | list) else [batch]
        given = entries[0] if entries and isinstance(entries[0], tuple | list) else entries[: _needed(network)]
        args = [x.to(device) if isinstance(x, Tensor) else x for x in given]
    try:
        network(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        usual = f", which was attached with {_look(*network.example_inputs)}" if isinstance(network, Gated) else ""
        what = f"a batch of `batches` must be what the network is called with{usual}, got {_look(args, kwargs)}"
        raise ValueError(f"{what} ({first_line(error)})") from error


def _look(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What a network is called with, in words."""
    shown = [f"{k}=" * isinstance(k, str) + _word(v) for k, v in (*enumerate(args), *kwargs.items())]
    return f"({', '.join(shown)})"


def _word(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _needed(network: nn.Module) -> int:
    """How many inputs a network cannot do without: what comes behind them in a batch are labels."""
    forward = (network.model if isinstance(network, Gated) else network).forward
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(forward).parameters.values()
    return max(1, sum(p.kind in kinds and p.default is p.empty for p in known))
