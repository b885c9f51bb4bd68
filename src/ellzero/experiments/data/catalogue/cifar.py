"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): binary files, by themselves or in their archives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np

from ellzero.experiments.data.downloads import Bytes, DataError, Facts, File, Split

_SHAPE = (3, 32, 32)
Entry = tuple[str, int, str]  # of a file: name, size in bytes, SHA-256
Channels = tuple[float, float, float]  # in bytes, 0 to 255


def read_cifar(data: bytes, name: str, labels: int = 1) -> tuple[Bytes, Bytes]:
    """Images (N, 3, 32, 32) and labels (N, `labels`) of a binary file: records of label bytes, then pixels.

    A record has one label in CIFAR-10, and two in CIFAR-100: coarse and fine.
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


def _facts(
    archive: Entry, folder: str, files: Sequence[Entry], *, labels: int, classes: str, mean: Channels, std: Channels
) -> Facts:
    packed = File(*archive, urls=(f"https://www.cs.toronto.edu/~kriz/{archive[0]}",))
    return Facts(
        _SHAPE,
        tuple(classes.split()),
        mean=tuple(m / 255 for m in mean),
        std=tuple(s / 255 for s in std),
        read=partial(_read, labels=labels),
        files=tuple(File(f"{folder}/{name}", size, sha256, archive=packed) for name, size, sha256 in files),
    )


CIFAR_10 = _facts(
    ("cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    "cifar-10-batches-bin",
    (
        ("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        ("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        ("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        ("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        ("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        ("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    labels=1,
    classes="airplane automobile bird cat deer dog frog horse ship truck",
    mean=(125.3, 123.0, 113.9),
    std=(63.0, 62.1, 66.7),
)
CIFAR_10_SPLIT = CIFAR_10.held_out(5_000)
CIFAR_100 = _facts(
    ("cifar-100-binary.tar.gz", 168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    "cifar-100-binary",
    (
        ("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        ("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    labels=2,
    classes="""
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """,
    mean=(129.3, 124.1, 112.4),
    std=(68.2, 65.4, 70.4),
)
