"""Networks of the user's own, named `MODULE:FUNCTION`: made by calling the function or class without arguments.

Nothing is asked of one before it is made. So a run can be looked at where the code is not at hand.
"""

from __future__ import annotations

import re
import weakref

from torch import nn

from ellzero.experiments.data import importing
from ellzero.experiments.data.importing import OwnError
from ellzero.experiments.networks.facts import Network, register

_MADE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _made(name: str) -> nn.Module:
    found = importing.find(name)
    if isinstance(found, nn.Module):
        raise OwnError(f"`{name}` must be a function or class that makes a new network each time, got a network itself")
    model = importing.call(name)
    if not isinstance(model, nn.Module):
        raise OwnError(f"`{name}` must give an nn.Module, got {type(model).__name__}")
    if model in _MADE:  # each run, and each file that is read back, has its own
        raise OwnError(f"`{name}` must make a new network each time, got the same one again")
    _MADE.add(model)
    return model.cpu()


def _network(typed: re.Match[str]) -> Network:
    name = typed[0]
    return Network(
        name=name,
        title=name,
        make=lambda classes=0, dropout=0.0: _made(name),
        images=None,
        has_batch_norm=True,  # for all that is known
        compiling=(1, 0.0),
        test_batch=0,
        own=True,
    )


register(importing.NAME, _network, typed="MODULE:FUNCTION that makes your own")
