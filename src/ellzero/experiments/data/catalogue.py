"""What is known of the public data sets: their files to the byte, their classes, mean and deviation of their pixels.

Plain data. Sizes and digests are those of the canonical files, and a test compares them with the published MD5 where
the files are at hand.
"""

from __future__ import annotations

from typing import NamedTuple

from ellzero.experiments.data.downloads import File


class Facts(NamedTuple):
    """A data set: its files, those of the test set last; its classes; mean and deviation of its pixels in [0, 1].

    `label_bytes` is the number of labels that an image has in a file of CIFAR's.
    """

    files: tuple[File, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_bytes: int = 1


# ---------------------------------------------------------------- MNIST

_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def _mnist(name: str, size: int, sha256: str) -> File:
    return File(f"mnist/{name}", size, sha256, tuple(mirror + name for mirror in _MNIST_MIRRORS))


MNIST = (
    _mnist("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    _mnist("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    _mnist("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    _mnist("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)

# ---------------------------------------------------------------- CIFAR

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


CIFAR_10 = (
    _cifar_10("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    _cifar_10("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    _cifar_10("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    _cifar_10("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    _cifar_10("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    _cifar_10("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
CIFAR_100 = (
    _cifar_100("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    _cifar_100("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
)
CIFAR_10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_100_CLASSES = tuple(  # a hundred lines otherwise
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

# ---------------------------------------------------------------- all

# Mean and deviation are those in the code of the papers. A part of MNIST is scaled as the whole is, so that a network
# trained on one can be run on the other.
_DIGITS = tuple("0123456789")
KNOWN = {
    "mnist": Facts(MNIST, _DIGITS, mean=(0.1307,), std=(0.3081,)),
    "mnist5k": Facts((), _DIGITS, mean=(0.1307,), std=(0.3081,)),
    "cifar10": Facts(
        CIFAR_10,
        CIFAR_10_CLASSES,
        mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
        std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
    "cifar100": Facts(
        CIFAR_100,
        CIFAR_100_CLASSES,
        mean=(129.3 / 255, 124.1 / 255, 112.4 / 255),
        std=(68.2 / 255, 65.4 / 255, 70.4 / 255),
        label_bytes=2,
    ),
}
