"""Training on a GPU: the step is captured, or compiled and captured, and made anew where the network shrinks.

The oracle is the same run on the CPU, where nothing is captured, in float64; both are given the same order of images
and the same noise, whose logarithms are float32: there the two differ in the last bit. Batches are small, so that every
network that a run has is captured and replayed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ellzero.experiments.data import Dataset, stand_in
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import events, saver
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from support.runs import RUNS, SETTLING, close, gated_of, in_float64, leaves, losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BATCH, STEPS = 4, 8
CASES: dict[str, tuple[Recipe, dict[str, list[int]]]] = {
    **{case: (r.override(batch=BATCH), closed) for case, (r, closed, _) in RUNS.items()},
    "wide, channels last": (
        RUNS["wide, nesterov, eq. 17, average"][0].override(batch=BATCH, channels_last=True),
        RUNS["wide, nesterov, eq. 17, average"][1],
    ),
    "settling": (SETTLING.override(batch=BATCH, channels_last=True), {}),
    "compiled": (SETTLING.override(batch=BATCH, channels_last=True, compile=True, milestones=(3,), epochs=4), {}),
}


def images(name: str, device: str = "cpu") -> Dataset:
    return stand_in(name, images=BATCH * STEPS, device=device)


def exact(r: Recipe) -> Recipe:
    """With learning rates that float32 has: on a GPU they are tensors."""
    rates = {"lr": 2.0 ** round(math.log2(r.lr))}
    rates |= {} if r.gate_lr is None else {"gate_lr": 2.0 ** round(math.log2(r.gate_lr))}
    return r.override(**rates, **({"decay": 0.125} if r.milestones else {}))


def pair(recipes: list[Recipe], closed: dict[str, list[int]]) -> tuple[Trainer, Trainer]:
    """Trainers of the same runs, on the GPU and on the CPU."""
    recipes = [exact(r) for r in recipes]
    plain, data = [r.override(compile=False) for r in recipes], recipes[0].data
    there = in_float64(Trainer(recipes, images(data, "cuda")))
    here = in_float64(Trainer(plain, images(data)))
    for trainer in (there, here):
        if closed:
            close(gated_of(trainer), closed)
    with torch.no_grad():
        for name, value in there.runs.values().items():
            value.copy_(here.runs.values()[name])
    given_the_same(there)
    return there, here


def given_the_same(trainer: Trainer) -> None:
    """Lets a GPU's trainer have order and noise as they are drawn on the CPU."""
    recipes = trainer.recipes
    twin, own = Trainer(recipes, images(recipes[0].data)).supply, trainer.supply.epoch

    def epoch(number: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        own(number, begin)  # crops and flips its own images, as the seed says
        order, noise = twin.epoch(number, begin)
        return order.cuda(), noise.cuda()

    trainer.supply.epoch = epoch  # type: ignore[method-assign]


def same(there: Trainer, here: Trainer, tolerance: float = 1e-4) -> None:
    """All that the rest of a run depends on."""
    free = (".random.", ".own", ".seconds")
    ours, theirs = (
        {k: v for k, v in leaves(saver.state(t)) if not any(word in k for word in free)} for t in (there, here)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            a, b = value.cpu().double(), theirs[name].cpu().double()
            scale = max([1e-6, *b.abs().flatten().tolist()])
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale, msg=lambda words, n=name: f"{n}: {words}")
        elif isinstance(value, Tensor):
            assert torch.equal(value.cpu(), theirs[name].cpu()), name
        else:
            assert value == theirs[name], name


def replays(trainer: Trainer) -> bool:
    step: Any = trainer.take
    return step.captured is not None


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(case: str) -> None:
    r, closed = exact(CASES[case][0]), CASES[case][1]
    there, here = pair([r], closed)
    for epoch in range(r.epochs):
        ours, theirs = losses(there, 1), losses(here, 1)
        assert len(ours) == STEPS
        assert ours == pytest.approx(theirs, rel=1e-5), f"epoch {epoch}"
        changed = epoch + 1 in (*r.shrink_at, r.settle_at)
        assert replays(there) is not changed  # made anew by the event
        if changed:
            assert there.event is not None
            assert here.event is not None
            assert there.event["widths"] == here.event["widths"]
            assert sum(there.event["removed"].values()) > 0
    same(there, here)
    for method in (Objective.watched, Objective.counts):
        ours, theirs = (t.runs.evaluate(method, values=t.values()).flatten().tolist() for t in (there, here))
        assert ours == pytest.approx(theirs, rel=1e-4), method.__name__


def test_a_stack_on_a_gpu_is_the_stack_on_the_cpu() -> None:
    r, _ = CASES["shrinkable, sgd, params"]
    # Slowly: where a loss explodes, so does the difference of one rounding.
    r = r.override(shrink_at=(), finalize=True, finetune_epochs=2, lr=2.0**-8, gate_lr=2.0**-3)
    there, here = pair([r.override(seed=s, at_most=at_most) for s, at_most in enumerate((0.3, 0.5, 0.7))], {})
    for _ in range(r.epochs):
        for ours, theirs in zip(train_epoch(there), train_epoch(here), strict=True):
            assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
    assert replays(there)
    for trainer in (there, here):
        events.turn(trainer)
    assert not replays(there)
    for _ in range(r.finetune_epochs):
        for ours, theirs in zip(train_epoch(there), train_epoch(here), strict=True):
            assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
    assert replays(there)
    same(there, here)


@pytest.mark.parametrize("case", ["settling", "wide, adam, constraints"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_on_a_gpu_goes_on_from_a_checkpoint(case: str, epochs: int, tmp_path: Path) -> None:
    """Before the event and after it, in the middle of an epoch; the oracle goes on without."""
    r, closed = exact(CASES[case][0]), CASES[case][1]
    whole, _ = pair([r], closed)
    losses(whole, epochs)
    half = train_epoch(whole)
    for _ in range(STEPS // 2 + 1):
        next(half)
    folder = Folder.create(tmp_path / "run", [r])
    saver.save(whole, folder)
    again = in_float64(Trainer([r], images(r.data, "cuda")))
    given_the_same(again)
    assert saver.resume(again, folder)
    assert again.steps_done == epochs * STEPS + STEPS // 2 + 1
    rest = [float(loss) for loss in half]
    assert losses(again, 1) == pytest.approx(rest, rel=1e-9)
    same(again, whole, 1e-8)
    left = r.epochs - again.epoch
    assert losses(again, left) == pytest.approx(losses(whole, left), rel=1e-8)
    same(again, whole, 1e-7)
