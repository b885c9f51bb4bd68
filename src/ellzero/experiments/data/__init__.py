"""Data: `load` gives a whole data set as tensors on a device; `shuffled`, `augment` and `scaled` make epochs."""

from ellzero.experiments.data.downloads import DataError
from ellzero.experiments.data.epochs import augment, crop_and_flip, epoch_generator, scaled, shuffled
from ellzero.experiments.data.loading import KNOWN, Dataset, load, stand_in

__all__ = [
    "KNOWN", "DataError", "Dataset", "augment", "crop_and_flip", "epoch_generator", "load", "scaled", "shuffled",
    "stand_in",
]  # fmt: skip
