"""What the steps of an epoch are given: images, labels and the gates' noise, made where the data set is.

All of it is a function of (seed, epoch), run by run. Of several processes, each has its share of every batch, and noise
of its own. This file knows recipes and data; it does not know networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from ellzero.experiments.data import Dataset, augment, epoch_generator, scaled, shuffled
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import processes as parallel


@final
class Supply:
    """Batches and noise of a stack of runs, which agree in all but seed and objective."""

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset, gates: int) -> None:
        self.recipes, self.data, self.gates = recipes, dataset, gates  # gates of one run
        self.recipe = recipes[0]
        # Scaled once and for all, or bytes that every epoch crops and flips anew.
        self._images = dataset.train_x.clone() if self.recipe.augment else self._scaled(dataset.train_x)

    def epoch(self, number: int) -> tuple[Tensor, Tensor]:
        """The order of the images, (steps, runs, batch), and the gates' noise, (steps, runs, draws, gates)."""
        images, order, noise = self.data.train_x, [], []
        for recipe in self.recipes:
            drawn = epoch_generator(recipe.seed, number)
            generator = torch.Generator(images.device).manual_seed(int(torch.randint(2**62, (), generator=drawn)))
            if recipe.augment:
                augment(images, drawn, out=self._images)
            batches = shuffled(len(images), recipe.batch, generator)
            order.append(batches.chunk(parallel.ranks(), 1)[parallel.rank()])
            if parallel.rank():
                own = np.random.SeedSequence([recipe.seed, number, parallel.rank()]).generate_state(1, np.uint64)[0]
                generator.manual_seed(int(own) >> 1)
            shape = (len(batches), recipe.samples * (2 if recipe.extra_gradient else 1), self.gates)
            noise.append(torch.rand(shape, generator=generator, device=images.device))
        return torch.stack(order, 1), torch.stack(noise, 1)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of one step, (runs, batch, …), in the epoch that was drawn last."""
        x = self._images[index]
        if self.recipe.augment:
            x = self._scaled(x.flatten(0, 1)).view(x.shape)
        if self.recipe.channels_last:  # there is one run, so the leading dimension is in nobody's way
            x = x[0].contiguous(memory_format=torch.channels_last)[None]
        return x, self.data.train_y[index]

    def scaled(self, images: Tensor) -> Tensor:
        """Bytes as the network takes them: scaled and laid out as the recipe says."""
        x = self._scaled(images)
        return x.contiguous(memory_format=torch.channels_last) if self.recipe.channels_last else x

    def _scaled(self, images: Tensor) -> Tensor:
        standard = () if self.recipe.scaling == "unit" else (self.data.mean, self.data.std)
        return scaled(images, *standard)
