"""Data of the user's own: what a function gives, an `.npz` file, or a folder of images.

Each becomes a `Dataset` like any other, or is refused in one line. Nothing here knows which network reads it.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ellzero.experiments.data import importing
from ellzero.experiments.data.datasets import Dataset, Samples, Tensors, as_known
from ellzero.experiments.data.images import read_folder
from ellzero.experiments.data.importing import OwnError

WORDS = "MODULE:FUNCTION of your own, FILE.npz or a folder of images such as photos/"
_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 100_000  # whole numbers beyond it are no labels
_CHANNELS = (1, 3, 4)


@runtime_checkable
class _Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def is_own(word: str) -> bool:
    """Whether a word names data of the user's own: code, a file or a folder."""
    return importing.is_code(word) or word.endswith(".npz") or "/" in word or os.sep in word


def load_own(name: str, device: torch.device | str | None = "cpu", workers: int = 0) -> Dataset:
    """Data of the user's own, on a device; `workers` processes make samples where these come one by one."""
    where, names = torch.device(device or "cpu"), None
    if importing.is_code(name):
        with importing.seeded(0):
            found = importing.call(name)
        pair = isinstance(found, tuple | list) and len(found) == 2
        if not pair:
            kind = f"{len(found)} things" if isinstance(found, tuple | list) else type(found).__name__
            raise OwnError(f"`{name}` must give two data sets, one to train and one to test on, got {kind}")
        parts = [_tensors(part) for part in found]
        if parts[0] is None or parts[1] is None:
            return _samples(name, found[0], found[1], where, workers)
        arrays = [*parts[0], *parts[1]]
    elif not Path(name).exists():
        raise OwnError(f"`data` must be a file or folder that exists, and there is none at {name!r}", missing=True)
    elif name.endswith(".npz"):
        arrays = _npz(name)
    else:
        *arrays, names = read_folder(Path(name))
    return _in_memory(name, arrays, names, where)


def _tensors(part: Any) -> tuple[Any, Any] | None:
    """Inputs and labels, if a data set is in memory as two tensors or arrays."""
    if isinstance(part, TensorDataset):
        part = part.tensors
    is_pair = isinstance(part, tuple | list) and len(part) == 2
    return (part[0], part[1]) if is_pair and all(isinstance(t, Tensor | np.ndarray) for t in part) else None


def _samples(name: str, train: Any, test: Any, device: torch.device, workers: int) -> Samples:
    for what, part in (("train", train), ("test", test)):
        if not isinstance(part, _Rows):
            needs = "data sets with `__len__` and `__getitem__`, or pairs of tensors"
            raise OwnError(f"`{name}` must give {needs}, got {type(part).__name__} to {what} on")
        with importing.told(f"asking `{name}` how many samples there are to {what} on"):
            empty = len(part) < 1
        if empty:
            raise OwnError(f"`{name}` must give samples to {what} on, got none")
    return Samples(name, train, test, device, workers)


def _npz(name: str) -> list[Any]:
    try:
        with np.load(name, allow_pickle=False) as stored:
            missing = [key for key in _KEYS if key not in stored]
            if missing:
                raise OwnError(f"{name!r} must have {', '.join(_KEYS)}, and has {', '.join(stored) or 'nothing'}")
            arrays = [stored[key] for key in _KEYS]
    except OwnError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise OwnError(f"{name!r} cannot be read: {error}") from error
    x_train, y_train, x_test, y_test = arrays
    flat = [y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iu" else y for y in (y_train, y_test)]
    return [_channels_first(name, x_train), flat[0], _channels_first(name, x_test), flat[1]]


def _channels_first(name: str, x: Any) -> Any:
    """Images as (N, C, H, W): with their channels last, or bytes without any, they are known for it."""
    if x.ndim == 3 and x.dtype == np.uint8:
        return x[:, None]
    if x.ndim != 4 or x.shape[3] not in _CHANNELS:
        return x
    if x.shape[1] in _CHANNELS:
        raise OwnError(f"images of {name!r} must be (N, C, H, W), and {x.shape} has two sizes that may be the channels")
    return x.transpose(0, 3, 1, 2)


def _in_memory(name: str, arrays: list[Any], names: tuple[str, ...] | None, device: torch.device) -> Tensors:
    tensors = [_checked(name, key, array) for key, array in zip(_KEYS, arrays, strict=True)]
    train_x, train_y, test_x, test_y = tensors
    for kind, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y) or not len(x):
            raise OwnError(
                f"`{name}` must have a label for each input to {kind} on, got {len(x)} inputs, {len(y)} labels"
            )
    for what, ours, theirs in (("inputs", train_x, test_x), ("labels", train_y, test_y)):
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
            kinds = " and ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in (ours, theirs))
            raise OwnError(f"{what} of `{name}` must be alike to train and to test on, got {kinds}")
    is_labels = train_y.ndim == 1 and train_y.dtype is torch.int64
    top = max(int(train_y.max()), int(test_y.max())) if is_labels else _MOST_CLASSES
    classes = tuple(map(str, range(top + 1))) if top < _MOST_CLASSES else ()
    mean, std = _channel_statistics(train_x)
    moved = [t.to(device) for t in tensors]
    return Tensors(name, moved[0], moved[1], moved[2], moved[3], names or classes, mean, std)


def _checked(name: str, key: str, array: Any) -> Tensor:
    with importing.told(f"taking {key} of `{name}` as numbers"):
        # Copied: others may write to it, and torch knows no negative strides.
        tensor = array.detach().clone() if isinstance(array, Tensor) else torch.from_numpy(np.array(array, order="C"))
        tensor = as_known(tensor, keep_bytes=key.startswith("x"))
    if tensor.ndim == 0 or (key.startswith("x") and tensor.ndim < 2):
        raise OwnError(f"{key} of `{name}` must be a row of them, (N, …), got {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise OwnError(f"{key} of `{name}` must be finite numbers, got nan or inf")
    return tensor


def _channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels in [0, 1] by channel, of images of bytes; a channel of one shade is kept."""
    if x.dtype is not torch.uint8 or x.ndim != 4:
        return (0.0,), (1.0,)
    shades = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(x.shape[1]):  # by how often each shade comes: exact, and no copy of all as numbers
        share = x[:, channel].flatten().bincount(minlength=256).double() / x[:, channel].numel()
        mean.append(float(share @ shades))
        std.append(float(share @ (shades - mean[-1]).square()) ** 0.5 or 1.0)
    return tuple(mean), tuple(std)
