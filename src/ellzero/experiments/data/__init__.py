"""Data: `load` gives a whole data set as tensors on a device, `batches` an epoch of it."""

from ellzero.experiments.data.downloads import DataError
from ellzero.experiments.data.epochs import batch_count, batches, crop_and_flip, epoch_generator, scaled
from ellzero.experiments.data.loading import KNOWN, Dataset, load, stand_in

__all__ = [
    "KNOWN",
    "DataError",
    "Dataset",
    "batch_count",
    "batches",
    "crop_and_flip",
    "epoch_generator",
    "load",
    "scaled",
    "stand_in",
]
