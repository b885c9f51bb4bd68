"""What a step is given instead of the images and labels themselves: bent images, and a teacher's word for labels."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ellzero.experiments.campaign import memory
from ellzero.experiments.data import Tensors, distort, epoch_generator, stand_in
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import loop, policy, saver
from ellzero.experiments.train.loop import Stopped, train, train_epoch
from ellzero.experiments.train.trainer import Trainer
from support.narrow import NARROW
from support.runs import Stop, bits, leaves, without_seconds

BENT = Recipe(
    name="bent", network=NARROW.name, data="mnist5k", placement="per_layer", cost="params", at_most=0.3, on="kept",
    gate_lr=0.03, batch=8, epochs=2, distort=1.5,
)  # fmt: skip
TAUGHT = BENT.override(name="taught", teacher="narrow", teacher_epochs=2, temperature=0.25, lr=0.01)
SETTLING = TAUGHT.override(epochs=3, settle_at=1, ema=0.5, gate_lr=0.5)


def few() -> Tensors:
    return stand_in("mnist5k", images=24)


def bent_by_hand(dataset: Tensors, seed: int, epoch: int) -> Tensor:
    generator, out = epoch_generator(seed, epoch), torch.empty_like(dataset.train_x)
    torch.randint(2**62, (), generator=generator)  # the seed of order and noise comes first
    distort(dataset.train_x, generator, out, 1.5)
    return (out / 255 - dataset.mean[0]) / dataset.std[0]


def given(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Order, images and labels of all steps of an epoch."""
    order = trainer.supply.epoch(trainer.epoch)[0]
    return [(index, *trainer.supply.batch(index)) for index in order]


def test_every_run_of_a_stack_has_images_bent_by_its_own_seed_in_every_epoch() -> None:
    dataset = few()
    trainer = Trainer([BENT, BENT.override(seed=4)], dataset)
    pixels = dataset.train_x.clone()
    for epoch in range(2):
        trainer.epoch = epoch
        expected = [bent_by_hand(dataset, seed, epoch) for seed in (0, 4)]
        assert not torch.equal(*expected)
        for index, x, y in given(trainer):
            for run, images in enumerate(expected):
                torch.testing.assert_close(x[run], images[index[run]], rtol=1e-5, atol=1e-5)
                assert torch.equal(y[run], dataset.train_y[index[run]])
    assert torch.equal(dataset.train_x, pixels)


def test_labels_are_the_probabilities_of_a_teacher_that_was_trained_first() -> None:
    dataset = few()
    taught = train([TAUGHT], dataset)
    own = TAUGHT.taught_by
    assert own is not None
    assert (own.network, own.placement, own.epochs, own.distort, own.cosine) == ("narrow", None, 2, 1.5, True)
    network = train([own], dataset).network(0)
    for _, x, y in given(taught):
        logits = network(x[0]).detach().numpy().astype(np.float64) / 0.25
        p = np.exp(logits - logits.max(1, keepdims=True))
        np.testing.assert_allclose(y[0].numpy(), p / p.sum(1, keepdims=True), rtol=1e-4)
        assert (y - 0.1).abs().max() > 0.02  # it has learned something


def test_the_loss_is_the_cross_entropy_with_these_labels() -> None:
    """Without gates, by hand: a first step, of which the loss is known before it."""
    dataset, r = few(), TAUGHT.override(placement=None, at_most=None, cost="l0_norm", on="expected", gate_lr=None)
    taught = train([r.override(epochs=1)], dataset)
    trainer = Trainer([r], dataset)
    trainer.supply.teacher = taught.supply.teacher
    _, x, y = given(trainer)[0]
    with torch.no_grad():
        expected = -(y[0] * trainer.network(0)(x[0]).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(next(train_epoch(trainer))[0], expected)


@pytest.mark.slow
def test_the_runs_of_a_stack_have_their_own_teachers_and_end_as_those_trained_alone() -> None:
    taught = TAUGHT.override(optimizer="sgd", gate_lr=0.1)  # a step of Adam is as long for a rounding error
    recipes = [taught, taught.override(seed=4, at_most=0.5)]
    stack, alone = train(recipes, few()), [train([r], few()) for r in recipes]
    for name, value in stack.runs.values().items():
        for run, other in enumerate(alone):
            torch.testing.assert_close(value[run], other.runs.values()[name], rtol=1e-3, atol=2e-5)


def states(trainer: Trainer) -> dict[str, Any]:
    return {n: bits(v) for n, v in leaves(saver.state(trainer)) if ".random." not in n and n != ".seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5])
def test_stopped_before_or_after_the_gates_settle_it_goes_on_with_the_same_teacher(tmp_path: Path, steps: int) -> None:
    whole = train([SETTLING], few())
    folder = Folder.create(tmp_path / "run", [SETTLING])
    with pytest.raises(Stopped):
        train([SETTLING], few(), folder, watchers=[Stop(steps)])
    teacher = Folder.open(folder.path / "teacher")
    assert teacher.recipes == [SETTLING.taught_by]
    found = teacher.results()
    again = train([SETTLING], few(), folder)
    assert teacher.results() == found  # with its seconds: it was not trained again
    assert states(again) == states(whole)
    assert without_seconds(again.history) == without_seconds(whole.history)


@pytest.mark.slow
def test_stopped_while_the_teacher_is_trained_it_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train([SETTLING], few())
    folder = Folder.create(tmp_path / "run", [SETTLING])
    steps, own = iter(range(100)), loop.train_epoch

    def interrupting(trainer: Trainer) -> Any:
        for loss in own(trainer):
            if next(steps) == 4:
                signal.raise_signal(signal.SIGINT)
            yield loss

    monkeypatch.setattr(loop, "train_epoch", interrupting)
    with pytest.raises(Stopped, match="epoch 1, step 2"):
        train([SETTLING], few(), folder)
    assert Folder.open(folder.path / "teacher").results() is None
    assert checkpoint.steps(folder.checkpoints) == [0]  # it has begun
    assert states(train([SETTLING], few(), folder)) == states(whole)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"distort": -1.0}, "`distort` must be a number of at least 0, got -1.0"),
        ({"teacher": "lenet7"}, "`teacher` must be .*\"lenet5\".*, got 'lenet7'"),
        ({"teacher": "wrn-10-1"}, "`teacher` must be a network for the images of 'mnist5k', got 'wrn-10-1'"),
        ({"teacher": None}, "`temperature` must be 1.0 without a `teacher`, got 0.25"),
        ({"loss": "torch.nn.functional:mse_loss"}, "`teacher` must be absent with a `loss` of your own"),
    ],
)
def test_refusals(changes: dict[str, Any], why: str) -> None:
    changes = {"teacher_epochs": 10} | changes if "teacher" in changes else changes
    with pytest.raises(ValueError, match=why):
        TAUGHT.override(**changes)


def test_several_processes_have_no_teacher() -> None:
    with pytest.raises(ValueError, match="`teacher` must be absent for 2 processes, got 'narrow'"):
        policy.refuse([TAUGHT], 24, 2)


def test_inputs_that_are_no_images_cannot_be_bent() -> None:
    dataset = few()
    flat = Tensors("flat", dataset.train_x.float(), *(getattr(dataset, n) for n in ("train_y", "test_x", "test_y")),
                   dataset.classes, dataset.mean, dataset.std)  # fmt: skip
    with pytest.raises(ValueError, match="`distort` must be 0 for 'mnist5k', which are no images of bytes in memory"):
        Trainer([BENT], flat)


def test_bent_images_and_teachers_take_memory_of_their_own() -> None:
    plain = BENT.override(distort=0.0)
    each = memory(plain, few())[0]
    assert memory(BENT, few())[0] - each == 24 * 784
    assert math.isclose(memory(TAUGHT, few())[0] - memory(BENT, few())[0], memory(TAUGHT.taught_by, few())[0])  # type: ignore[arg-type]
