"""What the steps of an epoch are given: images, labels and the gates' noise, made where the data set is.

All of it is a function of (seed, epoch), run by run. Of several processes, each has its share of every batch, and noise
of its own. This file knows recipes and data; it does not know networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from ellzero.experiments.data import Dataset, Samples, Tensors, augment, autoaugment, distort, epoch_generator, shuffled
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import processes as parallel


@final
class Supply:
    """Batches and noise of a stack of runs, which agree in all but seed and objective."""

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset, gates: int) -> None:
        self.recipes, self.data, self.gates = recipes, dataset, gates  # gates of one run
        self.recipe = recipes[0]
        self._stream: Iterator[tuple[Tensor, Tensor]] = iter(())  # of samples that are made one by one
        self._images = torch.zeros(0)
        self._changes = self.recipe.augment or self.recipe.distort > 0
        self._choices = len(dataset.train_x) if isinstance(dataset, Tensors) else dataset.sizes[0]
        self._run = torch.arange(len(recipes), device=dataset.device)[:, None]
        self.teacher: Callable[[Tensor], Tensor] | None = None  # the probabilities of classes that count as labels
        if isinstance(dataset, Tensors):
            # Scaled once and for all runs, or bytes of each run that every epoch changes anew.
            x = dataset.train_x
            self._images = torch.stack([x] * len(recipes)) if self._changes else self._scaled(x)
        for name, off in (("augment", "false"), ("distort", "0")):
            no_images = self._images.dtype is not torch.uint8 or self._images.ndim != 5
            if getattr(self.recipe, name) and no_images:
                raise ValueError(
                    f"`{name}` must be {off} for {self.recipe.data!r}, which are no images of bytes in memory"
                )

        if self.recipe.augment == "auto" and self._images.shape[2] != 3:
            raise ValueError(
                f'`augment` must be true or false for {self.recipe.data!r}, which has no colours, got "auto"'
            )

    def epoch(self, number: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """The order of the images, (steps, runs, batch), and the gates' noise, (steps, runs, draws, gates); who takes
        up an epoch says at which step it begins.
        """
        device, order, noise = self.data.device, [], []
        for run, recipe in enumerate(self.recipes):
            drawn = epoch_generator(recipe.seed, number)
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=drawn)))
            if self._changes and isinstance(self.data, Tensors):
                self._change(self.data.train_x, drawn, self._images[run])
            batches = shuffled(self._choices, recipe.batch, generator)[: self.data.sizes[0] // recipe.batch]
            order.append(batches.chunk(parallel.ranks(), 1)[parallel.rank()])
            if parallel.rank():
                own = np.random.SeedSequence([recipe.seed, number, parallel.rank()]).generate_state(1, np.uint64)[0]
                generator.manual_seed(int(own) >> 1)
            shape = (len(batches), recipe.samples * (2 if recipe.extra_gradient else 1), self.gates)
            noise.append(torch.rand(shape, generator=generator, device=device))
        if isinstance(self.data, Samples):
            self._stream = self.data.batches(order[0], (self.recipe.seed, number, parallel.rank()), begin)
        return torch.stack(order, 1), torch.stack(noise, 1)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of one step, (runs, batch, …), in the epoch that was drawn last."""
        if isinstance(self.data, Tensors):
            x = self._images[self._run, index] if self._changes else self._images[index]
            y = self.data.train_y[index]
        else:  # they come in that order
            x, y = next(self._stream)
            x, y = self._scaled(x)[None], y[None]
        if self._changes:
            x = self._scaled(x.flatten(0, 1)).view(x.shape)
        if self.recipe.channels_last:  # there is one run, so the leading dimension is in nobody's way
            x = x[0].contiguous(memory_format=torch.channels_last)[None]
        return x, y if self.teacher is None else self.teacher(x)

    def _change(self, images: Tensor, drawn: torch.Generator, out: Tensor) -> None:
        """Makes the images of an epoch, as the recipe says: by AutoAugment, cropped and mirrored, then bent."""
        if self.recipe.augment == "auto":
            autoaugment(images, drawn, out=out)
            images = out
        if self.recipe.augment:
            augment(images, drawn, out=out)
            images = out
        if self.recipe.distort:
            distort(images, drawn, out=out, by=self.recipe.distort)

    def scaled(self, images: Tensor) -> Tensor:
        """Bytes as the network takes them: scaled and laid out as the recipe says."""
        x = self._scaled(images)
        return x.contiguous(memory_format=torch.channels_last) if self.recipe.channels_last else x

    def _scaled(self, images: Tensor) -> Tensor:
        return self.data.scaled(images, self.recipe.scaling)
