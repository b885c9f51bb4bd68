"""What others ask about a network, and the register in which each network writes it down.

A network registers itself in its own file, under the words that name it in a recipe. This file knows no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, and all that depends on which one it is."""

    name: str  # as typed, e.g. "wrn-28-10"
    title: str  # in a heading
    make: Callable[..., nn.Module]  # (classes: int, dropout: float = 0.0), with the weights that torch gives it
    narrower: Callable[[int, float], nn.Module] | None = None  # (classes, share of every width), where there is such
    images: tuple[int, ...] | None  # (C, H, W) of one, (L,) of text; other data sets do not fit. None for any
    has_batch_norm: bool = False  # runs of such a network cannot be stacked
    has_dropout: bool = False  # whether `make` heeds its `dropout`
    centres: bool = False  # whether `centred` lets its LayerNorms do without a mean, so that streams can shrink
    blocks: str | None = None  # pattern of the layers that the placement "blocks" gates
    residual: bool = False  # whether a path leads around a layer that is closed as a whole
    # What compiling its step takes, in steps, and the share of a step that it saves: seen on an H200 with WRN-28-10.
    compiling: tuple[int, float] = 2_500, 0.13
    test_batch: int = 1000  # how many test images it takes at once on a GPU; 0 for as many as in training
    own: bool = False  # whether it is the user's: its code may do anything


def scaled_widths(widths: Sequence[int], share: float) -> list[int]:
    """Widths times a share, in whole units, one at least."""
    if not 0 < share <= 1:
        raise ValueError(f"`share` must be in (0, 1], got {share}")
    return [max(1, round(width * share)) for width in widths]


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
    """The network of this name; a ValueError says that there is none."""
    network = lookup(name)
    if network is None:
        raise ValueError(f"`network` must be {names()}, got {name!r}")
    return network
