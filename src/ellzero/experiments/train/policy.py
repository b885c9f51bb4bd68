"""What is decided about a stack of runs: pure functions of recipe, epoch, sizes and kind of device.

Nothing here looks at a network, a tensor or a file. So a run that was stopped and taken up again decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ellzero.experiments.recipe import Recipe

STACKABLE = {"name", "init", "penalty", "cost", "at_most", "seed"}  # what runs of one stack may differ in
ALONE = ("shrink_at", "settle_at", "channels_last")  # what runs of a stack cannot have
_FAST_WIDTHS = 32  # of which a GPU likes multiples
_TEST_BATCH = 1000  # images at once, on a CPU


def refuse(recipes: Sequence[Recipe], images: int, ranks: int) -> None:
    """Refuses recipes that cannot be trained together, on so many images, by so many processes; says why."""
    r = recipes[0]
    plain = r.to_dict()
    for other in recipes[1:]:
        differ = [k for k, v in other.to_dict().items() if v != plain[k] and k not in STACKABLE]
        if differ:
            raise ValueError(f"`recipes` of one stack must agree in {', '.join(differ)}")
    for name in ALONE:
        if plain[name] and len(recipes) > 1:
            raise ValueError(f"`{name}` cannot be in a stack: train its seeds one after the other")
    if r.is_own and len(recipes) > 1:
        raise ValueError("code of your own cannot be in a stack: train its seeds one after the other")
    if images < r.batch:
        raise ValueError(f"`batch` must be at most the {images} training images, got {r.batch}")
    if ranks > 1 and len(recipes) > 1:
        raise ValueError(f"`recipes` must be one for {ranks} processes, got {len(recipes)}")
    if ranks > 1 and r.estimator != "straight_through":
        raise ValueError(f'`estimator` must be "straight_through" for {ranks} processes, got {r.estimator!r}')
    if ranks > 1 and r.compile:
        raise ValueError(f"`compile` must be absent or false for {ranks} processes, got true")
    if ranks > 1 and r.teacher is not None:
        raise ValueError(f"`teacher` must be absent for {ranks} processes, got {r.teacher!r}")
    if r.batch % ranks:
        raise ValueError(f"`batch` must be a multiple of the {ranks} processes, got {r.batch}")


@final
@dataclass(frozen=True)
class Policy:
    """The decisions about one stack."""

    recipe: Recipe  # what its runs have in common
    images: int  # to train on
    runs: int = 1
    ranks: int = 1  # processes that train it
    on_gpu: bool = False
    plain: bool = False  # whether every step is taken as it is

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.recipe.batch

    @property
    def steps_in_all(self) -> int:
        return (self.recipe.epochs + self.recipe.finetune_epochs) * self.steps_per_epoch

    @property
    def average_begins(self) -> int:
        """The step at which an average of the parameters begins: at once, or where the gates settle."""
        return (self.recipe.settle_at or 0) * self.steps_per_epoch if self.recipe.settles else 0

    @property
    def multiple(self) -> int:
        """Of which widths are multiples after an event."""
        return self.recipe.shrink_multiple or (_FAST_WIDTHS if self.on_gpu else 1)

    @property
    def test_batch(self) -> int:
        """How many test images are looked at together."""
        return test_batch(self.recipe, self.on_gpu)

    def turns(self, epoch: int, fixed: bool) -> bool:
        """Whether the epochs with gates that learn are over, and something comes after them that has not begun."""
        r = self.recipe
        return epoch >= r.epochs and not fixed and (r.finalize or r.finetune_epochs > 0)

    def done(self, epoch: int, fixed: bool) -> bool:
        """Whether the runs are at their end."""
        return epoch >= self.recipe.epochs + self.recipe.finetune_epochs and not self.turns(epoch, fixed)

    def rates(self, epoch: int) -> tuple[float, float]:
        """By what learning rates are multiplied: where milestones count, and everywhere (tuning lets them fall)."""
        r = self.recipe
        left = 1 - (epoch - r.epochs) / r.finetune_epochs if epoch > r.epochs else 1.0
        falling = (1 + math.cos(math.pi * epoch / r.epochs)) / 2 if r.cosine else 1.0
        if r.linear_after is not None:
            falling = min(1.0, (1 - epoch / r.epochs) / (1 - r.linear_after))
        rising = min(1.0, (epoch + 1) / max(1, r.lr_warmup))
        return rising * falling * r.decay ** sum(m <= epoch for m in r.milestones), left

    @property
    def captures(self) -> bool:
        """Whether a step is captured, and replayed from then on."""
        return self.on_gpu and self.ranks == 1 and not self.plain

    def compiles(self, epoch: int) -> bool:
        """Whether a step that is made then is compiled: as the recipe says, or if that pays until it is made anew."""
        r = self.recipe
        if r.compile is not None:
            return r.compile
        if r.per_example:  # no compiler follows weights that stand in for themselves
            return False
        changes = [e for e in (*r.shrink_at, r.dense_epochs, r.settle_at or 0, r.epochs) if e > epoch]
        steps = (min(changes, default=r.epochs + r.finetune_epochs) - epoch) * self.steps_per_epoch
        takes, saves = r.facts.compiling
        return self.on_gpu and self.ranks == 1 and saves * steps * math.sqrt(self.runs) >= takes

    def worth_it(self, gain: float, epoch: int) -> bool:
        """Whether steps that are shorter by this share, at best, save more than making the step anew costs."""
        takes, saves = self.recipe.facts.compiling
        left = self.steps_in_all - epoch * self.steps_per_epoch
        before = max((e for e in self.recipe.shrink_at if e < epoch), default=0)
        compiles = self.compiles(epoch)
        lost = saves * left if self.compiles(before) and not compiles else 0.0  # too few are left to compile it again
        return gain * left > lost + (takes if compiles else 0)


def test_batch(recipe: Recipe, on_gpu: bool) -> int:
    """How many test images a network is given at once."""
    most = recipe.facts.test_batch
    return recipe.batch if most == 0 else most if on_gpu else min(most, _TEST_BATCH)
