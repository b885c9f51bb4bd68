"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): binary files, by themselves or in their archives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np

from ellzero.experiments.data.downloads import DataError, File
from ellzero.experiments.data.facts import Bytes, Facts, Split

_SHAPE = (3, 32, 32)
_CIFAR_10_ARCHIVE = File(
    "cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
_CIFAR_100_ARCHIVE = File(
    "cifar-100-binary.tar.gz",
    168_513_733,
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
)


def _cifar_10(name: str, sha256: str) -> File:
    return File(f"cifar-10-batches-bin/{name}", 30_730_000, sha256, archive=_CIFAR_10_ARCHIVE)


def _cifar_100(name: str, size: int, sha256: str) -> File:
    return File(f"cifar-100-binary/{name}", size, sha256, archive=_CIFAR_100_ARCHIVE)


_CIFAR_10_FILES = (
    _cifar_10("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    _cifar_10("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    _cifar_10("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    _cifar_10("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    _cifar_10("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    _cifar_10("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
_CIFAR_100_FILES = (
    _cifar_100("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    _cifar_100("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
)
_CIFAR_10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR_100_CLASSES = tuple(  # a hundred lines otherwise
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)


def read_cifar(data: bytes, name: str, labels: int = 1) -> tuple[Bytes, Bytes]:
    """Reads a file of CIFAR's binary version: records of label bytes and 3 × 32 × 32 pixels.

    Args:
        data: the file's contents.
        name: what to call it in an error.
        labels: label bytes of a record: 1 in CIFAR-10; 2 in CIFAR-100, coarse and fine.

    Returns:
        Images (N, 3, 32, 32) and labels (N, `labels`).

    Raises:
        DataError: it is no whole number of records.

    Example:
        >>> x, y = read_cifar(bytes([7]) + bytes(3072), "one.bin")
        >>> x.shape, y.tolist()
        ((1, 3, 32, 32), [[7]])
    """
    record = labels + prod(_SHAPE)
    if not data or len(data) % record:
        raise DataError(f"{name} is cut off or corrupted: {len(data):,} bytes are not whole records of {record:,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, *_SHAPE), records[:, :labels]


def _read(found: Sequence[tuple[bytes, str]], labels: int) -> Split:
    """The last file is the test set; the last label is the finest."""
    parts = [read_cifar(data, name, labels) for data, name in found]
    train_x, train_y = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    test_x, test_y = parts[-1]
    return train_x, train_y[:, -1], test_x, test_y[:, -1]


CIFAR_10 = Facts(
    _SHAPE,
    _CIFAR_10_CLASSES,
    mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
    std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
    read=partial(_read, labels=1),
    files=_CIFAR_10_FILES,
)
CIFAR_100 = Facts(
    _SHAPE,
    _CIFAR_100_CLASSES,
    mean=(129.3 / 255, 124.1 / 255, 112.4 / 255),
    std=(68.2 / 255, 65.4 / 255, 70.4 / 255),
    read=partial(_read, labels=2),
    files=_CIFAR_100_FILES,
)
