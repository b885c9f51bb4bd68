"""What there is to know about a data set. Each data set writes it down in a file of its own; this file knows none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ellzero.experiments.data.downloads import File

Bytes = NDArray[np.uint8]
Split = tuple[Bytes, Bytes, Bytes, Bytes]  # training images (N, C, H, W) and labels (N,), test images and labels


class Facts(NamedTuple):
    """A data set.

    Args:
        shape: of an image: channels, height, width.
        classes: their names.
        mean: per channel, of the training pixels in [0, 1], as the papers' code has it.
        std: per channel, likewise.
        read: makes arrays of the contents of `files`, each given with the name to call it in an error.
        files: its files, to the byte; none if it comes with the library.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[Sequence[tuple[bytes, str]]], Split]
    files: tuple[File, ...] = ()
