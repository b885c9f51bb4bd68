"""What a data set is to those who train with it: tensors in memory, or samples that the user's code makes one by one.

`Tensors` and `Samples` give batches as they are; `scaled` makes of them what a network takes. Nothing here knows where
data come from.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ellzero.experiments.data.epochs import scaled
from ellzero.experiments.data.importing import OwnError, seeded, told

Batch = tuple[Tensor, Tensor]  # inputs, and what is to be answered
# Nobody else holds on to these, so that workers of an epoch that is not at its end end with the process, in good order:
# before `multiprocessing`, which was imported sooner, ends those that are left by a signal, and torch cries out.
_RUNNING: dict[object, Iterator[Any]] = {}
atexit.register(_RUNNING.clear)


class Dataset(ABC):
    """A whole data set, which gives its batches on one device."""

    name: str  # as `load` knows it
    classes: tuple[str, ...]  # none where only the labels tell
    mean: tuple[float, ...]  # per channel, of the training pixels in [0, 1], as the papers' code has it
    std: tuple[float, ...]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its batches are."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """How many there are to train on, and how many to test on."""

    @abstractmethod
    def first(self, count: int) -> Batch:
        """The first ones to train on, on the CPU."""

    @abstractmethod
    def tests(self, chunk: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """What there is to test on, in chunks; of several processes, the share of one."""

    @abstractmethod
    def checksum(self) -> int:
        """Of its contents, all or a few of them."""

    @abstractmethod
    def refuse_labels(self, outputs: int) -> None:
        """Refuses labels that are none of so many classes: now, or when they come."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input; of an image channels, height and width."""
        return tuple(self.first(1)[0].shape[1:])

    def example(self, count: int = 2) -> Tensor:
        """Inputs to trace a network with, on the CPU."""
        return self.scaled(self.first(count)[0], "unit")

    def scaled(self, x: Tensor, scaling: str) -> Tensor:
        """As a network takes them, by the word of a recipe: bytes as numbers in [0, 1], those of images with "signed"
        in [−1, 1], with "standard" of mean 0 and deviation 1; everything else as it is.
        """
        if x.dtype is not torch.uint8:
            return x
        if x.ndim != 4:
            return x.to(torch.float32).div_(255)
        return scaled(x, *self.shift_and_scale(scaling))

    def shift_and_scale(self, scaling: str) -> tuple[Sequence[float], ...]:
        """What `scaled` is given for images: mean and deviation of each channel; nothing for "unit"."""
        return {"unit": (), "signed": ((0.5,), (0.5,)), "standard": (self.mean, self.std)}[scaling]

    def record(self) -> dict[str, Any]:
        """What a run stores, to know the data again, and to do without them."""
        x, _ = self.first(1)
        sizes = dict(zip(("train", "test"), self.sizes, strict=True))
        kind = {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")}
        scale = {"classes": list(self.classes), "mean": list(self.mean), "std": list(self.std)}
        return {**sizes, **kind, **scale, "crc32": f"{self.checksum():08x}"}


@final
@dataclass(frozen=True, eq=False)
class Tensors(Dataset):
    """A data set in memory, on its device."""

    name: str
    train_x: Tensor  # (N, …), bytes (N, C, H, W) of images
    train_y: Tensor  # classes, (N,) of int64, or what a loss of the user's own takes
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_noise: bool = False  # stands in for data that are not at hand
    epoch: int | None = None  # how many an epoch takes of those to train on, where these overlap; else all of them

    @property
    def device(self) -> torch.device:
        return self.train_x.device

    @property
    def sizes(self) -> tuple[int, int]:
        return self.epoch or len(self.train_x), len(self.test_x)

    def first(self, count: int) -> Batch:
        return self.train_x[:count].cpu(), self.train_y[:count].cpu()

    def tests(self, chunk: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        yield from list(zip(self.test_x.split(chunk), self.test_y.split(chunk), strict=True))[rank::ranks]

    def checksum(self) -> int:
        return _crc(self.train_x, self.train_y, self.test_x, self.test_y)

    def refuse_labels(self, outputs: int) -> None:
        for y in (self.train_y, self.test_y):
            _refuse_labels(self.name, y, outputs)


@final
class Samples(Dataset):
    """Two data sets of the user's, which make a sample when it is asked for.

    What a batch draws is a function of (seed, epoch, step), by whichever process it is made: so a run can be taken up
    at any step, with any number of `workers`.
    """

    mean, std = (0.0,), (1.0,)

    def __init__(self, name: str, train: Any, test: Any, device: torch.device | str, workers: int) -> None:
        self.name, self.train, self.test, self.workers = name, train, test, workers
        self.classes: tuple[str, ...] = ()
        self._device, self._outputs = torch.device(device), 0

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.train), len(self.test)

    def first(self, count: int) -> Batch:
        made = _Jobs(self.name, self.train, [((0,), list(range(min(count, len(self.train)))))], self._outputs)[0]
        return _made(made)

    def tests(self, chunk: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        chunks = torch.arange(len(self.test)).split(chunk)
        return self._loaded(self.test, [((1, k), c.tolist()) for k, c in enumerate(chunks)][rank::ranks])

    def batches(self, order: Tensor, key: Sequence[int], begin: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from one of them on; `order` has the samples of each, `key` says what is random."""
        return self._loaded(self.train, [((2, *key, k), row.tolist()) for k, row in enumerate(order)][begin:])

    def _loaded(self, samples: Any, jobs: list[Any]) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            _Jobs(self.name, samples, jobs, self._outputs),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=min(self.workers, len(jobs)),
            generator=torch.Generator(),  # of its own: what dropout draws from stays as it is
            worker_init_fn=_begin_worker,
            pin_memory=self._device.type == "cuda",
        )
        key = object()
        _RUNNING[key] = iter(loader)
        try:
            for _ in jobs:
                x, y = _made(next(_RUNNING[key]))
                yield x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
        finally:
            _RUNNING.pop(key, None)

    def checksum(self) -> int:
        ends = [_Jobs(self.name, s, [((0,), [0, len(s) - 1])], 0)[0] for s in (self.train, self.test)]
        return _crc(*(t for made in ends for t in _made(made)))

    def refuse_labels(self, outputs: int) -> None:
        self._outputs = outputs
        self.first(2)


@final
class _Jobs:
    """Batches to be made, each from the samples that it names. Torch would tell of an error in many lines, and so it is
    handed over as text.
    """

    def __init__(self, name: str, samples: Any, jobs: list[Any], outputs: int) -> None:
        self.name, self.samples, self.jobs, self.outputs = name, samples, jobs, outputs

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int) -> Batch | str:
        key, index = self.jobs[number]
        try:
            with seeded(*key), told(f"making samples {index[0]} to {index[-1]} of `{self.name}`"):
                found = default_collate([self.samples[i] for i in index])
            if not isinstance(found, list | tuple) or len(found) != 2 or not all(isinstance(t, Tensor) for t in found):
                raise OwnError(
                    f"a sample of `{self.name}` must be a pair of a tensor and its label, got {_kind(found)}"
                )
            x, y = as_known(found[0]), as_known(found[1], keep_bytes=False)
            if self.outputs:
                _refuse_labels(self.name, y, self.outputs)
            return x, y
        except OwnError as error:
            return str(error)


def _begin_worker(_: int) -> None:
    """Ctrl-C is the trainer's to hear, and a worker goes when the trainer is gone: it holds the lock of the run too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _made(found: Any) -> Batch:
    if isinstance(found, str):
        raise OwnError(found)
    return found[0], found[1]


def as_known(t: Tensor, *, keep_bytes: bool = True) -> Tensor:
    """Numbers in the types that networks and losses take: float32 and int64, and bytes as they are."""
    if t.dtype is torch.uint8 and keep_bytes:
        return t
    return t.to(torch.float32 if t.is_floating_point() else torch.int64)


def _refuse_labels(name: str, y: Tensor, outputs: int) -> None:
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= outputs:
        raise OwnError(
            f"the labels of `{name}` must be from 0 to {outputs - 1}, for the {outputs} outputs of the network, "
            f"got {low if low < 0 else high}"
        )


def _kind(found: Any) -> str:
    if isinstance(found, list | tuple):
        return f"{len(found)} things ({', '.join(type(t).__name__ for t in found)})"
    return type(found).__name__


def _crc(*tensors: Tensor) -> int:
    out = 0
    for t in tensors:
        out = zlib.crc32(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, out)
    return out
