"""The loop that every method of the arena gets: SGD with momentum, one schedule, the same batches in the same order.

It counts the steps that were taken. A GPU replays them where only weights move, so that small networks fill it, and
takes colour images in bfloat16, channels last: twice as fast. Gates, budgets and pruning are not known here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments import data
from ellzero.experiments.data import Tensors
from ellzero.experiments.train.stepping.faster import Captured

BATCH, RATE, DECAY = 128, 0.1, 5e-4


@final
class Loop:
    """A number of epochs to spend on one run.

    What an epoch has, its order, crops and flips, is a function of the seed and of its number alone: so all methods
    train on the same batches. Colour images are cropped and flipped as the papers on CIFAR do, digits are not.

    Attributes:
        steps: of an epoch.
        half: whether steps are taken in bfloat16; weights, gates and tests are float32 all the same.
        taken: optimizer steps so far.
        seconds: of training so far.
    """

    def __init__(self, dataset: Tensors, epochs: int, seed: int = 0) -> None:
        if len(dataset.train_x) < BATCH:
            raise ValueError(f"the data must have a batch of {BATCH} images at least, got {len(dataset.train_x)}")
        self.dataset, self.epochs, self.seed = dataset, epochs, seed
        self.steps = len(dataset.train_x) // BATCH
        self.taken, self.seconds, self._epoch = 0, 0.0, 0
        colour = dataset.train_x.shape[1] == 3
        self._augmented = torch.empty_like(dataset.train_x) if colour else None
        self.half = colour and self._on_gpu

    @property
    def example(self) -> Tensor:
        """Two images, as a network takes them."""
        return self.dataset.scaled(self.dataset.train_x[:2], "standard")

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        """What every method trains weights with."""
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True, fused=self._on_gpu)
        if self._on_gpu:
            for group in optimizer.param_groups:  # a step that is replayed reads it each time
                group["lr"] = torch.tensor(float(group["lr"]), device=self.dataset.device)
        return optimizer

    def train(
        self,
        network: nn.Module,
        epochs: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        decay: float = DECAY,
        before_step: Callable[[], None] | None = None,
        still: Callable[[], bool] = lambda: True,
    ) -> nn.Module:
        """Trains a network for some of the epochs, with a schedule of their own: a tenth of warm-up, then a cosine.

        Without an optimizer all parameters get the usual one; `before_step` is called between backward and step. A GPU
        replays the step from when `still` says that only weights move; one with something before it is not replayed.
        """
        if self._epoch + epochs > self.epochs:
            raise ValueError(f"`epochs` must be at most the {self.epochs - self._epoch} that are left, got {epochs}")
        optimizer = optimizer or self.optimizer([{"params": list(network.parameters()), "weight_decay": decay}])
        total = epochs * self.steps
        warm = max(1, total // 10)
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min(1, (k + 1) / warm) * (1 + math.cos(math.pi * k / max(1, total))) / 2
        )
        network.train()
        if self.half:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
                output = network(x)
            loss = F.cross_entropy(output.float(), y)
            optimizer.zero_grad()
            loss.backward()
            if before_step is not None:
                before_step()
            optimizer.step()
            return loss.detach()

        replayed: Captured | None = None
        self._wait()
        start = time.perf_counter()
        for _ in range(epochs):
            for x, y in self._batches():
                if replayed is None and self._on_gpu and before_step is None and still():
                    replayed = Captured(step)
                (replayed or step)(x, y)
                rates.step()
                self.taken += 1
        self._wait()
        self.seconds += time.perf_counter() - start
        return network

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the next epoch."""
        generator = data.epoch_generator(self.seed, self._epoch)
        self._epoch += 1
        images, labels = self.dataset.train_x, self.dataset.train_y
        order = data.shuffled(len(images), BATCH, generator).to(images.device)
        if self._augmented is not None:
            data.augment(images, generator, out=self._augmented)
            images = self._augmented
        for batch in order:
            x = self.dataset.scaled(images[batch], "standard")
            yield x.contiguous(memory_format=torch.channels_last) if self.half else x, labels[batch]

    def sample(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first batches of the training images, as they are: to look at a network with, not to train it."""
        images, labels = self.dataset.train_x[: count * BATCH], self.dataset.train_y[: count * BATCH]
        for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            yield self.dataset.scaled(x, "standard"), y

    @property
    def _on_gpu(self) -> bool:
        return self.dataset.device.type == "cuda"

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        """On the test images, in percent."""
        network.eval()
        wrong = torch.zeros((), device=self.dataset.device)
        for x, y in self.dataset.tests(1000):
            wrong += (network(self.dataset.scaled(x, "standard")).argmax(1) != y).sum()
        return 100 * float(wrong) / len(self.dataset.test_y)
