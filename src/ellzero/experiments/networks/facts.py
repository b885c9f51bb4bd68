"""What others ask about a network, and the register in which each network writes it down.

A network registers itself in its own file, under the words that name it in a recipe. This file knows no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from torch import nn


class Maker(Protocol):
    """Makes a network with so many outputs, and with dropout at this rate where it has any."""

    def __call__(self, classes: int, dropout: float = 0.0) -> nn.Module: ...


@final
@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, and all that depends on which one it is.

    Args:
        name: as typed, e.g. "wrn-28-10".
        title: what it is called in a heading.
        make: makes it, with the weights that torch gives it.
        images: shape of one image that it takes, (C, H, W); data sets of other images do not fit.
        has_batch_norm: whether it has statistics to gather; runs of such a network cannot be stacked.
        has_dropout: whether `make` heeds its `dropout`.
        blocks: pattern of the layers that the placement "blocks" gates; None if it has no blocks.
        residual: whether a path leads around a layer that is closed as a whole.
        compiling: what compiling its step takes, in steps, and the share of a step that it saves.
        test_batch: how many test images it takes at once on a GPU.
    """

    name: str
    title: str
    make: Maker
    images: tuple[int, int, int]
    has_batch_norm: bool = False
    has_dropout: bool = False
    blocks: str | None = None
    residual: bool = False
    compiling: tuple[int, float]
    test_batch: int


_KNOWN: list[tuple[str, str, Callable[[re.Match[str]], Network | None]]] = []


def register(pattern: str, describe: Callable[[re.Match[str]], Network | None], typed: str | None = None) -> None:
    """Makes the networks whose names match a pattern known to `find`; `typed` says in words what to type for one.

    `describe` gives the network of a match, or None if there is none of that name after all.
    """
    _KNOWN.append((pattern, typed or f'"{pattern}"', describe))


def names() -> str:
    """What there is, in words: the end of "a network must be …"."""
    *others, last = sorted(typed for _, typed, _ in _KNOWN)
    return f"{', '.join(others)} or {last}"


def lookup(name: str) -> Network | None:
    """The network of this name, if there is one."""
    for pattern, _, describe in _KNOWN:
        match = re.fullmatch(pattern, name)
        if match and (network := describe(match)) is not None:
            return network
    return None


def find(name: str) -> Network:
    """The network of this name.

    Raises:
        ValueError: there is none.

    Example:
        >>> find("wrn-16-4").images
        (3, 32, 32)
    """
    network = lookup(name)
    if network is None:
        raise ValueError(f"`network` must be {names()}, got {name!r}")
    return network
