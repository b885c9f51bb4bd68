"""Data: `load` gives a data set on a device; `shuffled`, `augment`, `distort` and `scaled` make epochs in memory."""

from ellzero.experiments.data.augmenting import autoaugment
from ellzero.experiments.data.datasets import Dataset, Samples, Tensors
from ellzero.experiments.data.downloads import DataError
from ellzero.experiments.data.epochs import augment, crop_and_flip, distort, epoch_generator, scaled, shuffled
from ellzero.experiments.data.importing import OwnError
from ellzero.experiments.data.loading import KNOWN, load, stand_in
from ellzero.experiments.data.own import is_own

__all__ = [
    "KNOWN", "DataError", "Dataset", "OwnError", "Samples", "Tensors", "augment", "autoaugment", "crop_and_flip",
    "distort", "epoch_generator", "is_own", "load", "scaled", "shuffled", "stand_in",
]  # fmt: skip
