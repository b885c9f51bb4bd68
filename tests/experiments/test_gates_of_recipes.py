"""A recipe names its gate family: the run is the plain loop, and pages and sweeps take it as any other."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ellzero as l0
from ellzero import gates
from ellzero.experiments.data import scaled
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.sweep import Sweep, run
from ellzero.experiments.train import building, evaluation, saver
from ellzero.experiments.train.building import architecture, build
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.policy import Policy
from ellzero.experiments.train.trainer import Trainer
from ellzero.page.run import run_page
from support.finished import finished
from support.narrow import NARROW
from support.trained import CPU, TRAIN, by_name, data, recipe, same

BAYES: dict[str, Any] = {"per_example": True, "most_noise": {"fc1.weight": 0.2}}
MORE: dict[str, dict[str, Any]] = {  # what a family asks for
    "sparse_vd": {"per_example": True, "start": -8.0},
    "bc_gnj": {**BAYES, "threshold": {"fc1": -2.8, "fc2": -3.0}},
    "bc_ghs": BAYES,
    "group_lasso": {"optimizer": "sgd", "lr": 0.05},
    "dropout": {"per_example": True},
}
KINDS = {
    "hard_concrete": gates.HardConcreteGate,
    "stg": gates.STGGate,
    "bernoulli": gates.BernoulliGate,
    "generalized_dropout": gates.GeneralizedDropoutGate,
    "sbp": gates.SBPGate,
    "vib": gates.VIBGate,
    "gnj": gates.GNJGate,
    "sparse_vd": gates.SparseVDGate,
    "bc_gnj": gates.GNJGate,
    "bc_ghs": gates.HalfCauchyGate,
    "group_lasso": gates.GroupLassoGate,
    "dropout": gates.DropoutGate,
}


def small(**changes: Any) -> Any:
    return recipe(**{"network": NARROW.name, "placement": "per_layer", "gate_lr": None, "penalty": 1.0, **changes})


def plain(
    r: Any, step: Callable[[Any, Any, Tensor, Tensor, Tensor, int], None], trainer: Trainer, state: Tensor | None = None
) -> dict[str, Tensor]:
    """The parameters after an epoch of the README's loop, with the trainer's batches and noise: `step` does the
    backward, of network, penalty without its weight, images, labels, noise and the number of the step.
    """
    order, noise = trainer.supply.epoch(0)
    gated: Any = build(r, data(), CPU)
    groups = gated.param_groups(lr=r.lr, weight_decay=r.l2)
    optimizer: Any = torch.optim.SGD(groups, momentum=r.momentum) if r.optimizer == "sgd" else torch.optim.Adam(groups)
    l0.objectives.follow(gated, optimizer)
    penalty = l0.Penalty(l0.complexity if r.charges else l0.l0_norm, r.penalty / TRAIN)
    if state is not None:
        torch.set_rng_state(state)
    for k, (index, draws) in enumerate(zip(order[:, 0], noise[:, 0], strict=True)):
        optimizer.zero_grad()
        x = scaled(data().train_x[index], data().mean, data().std)
        step(gated, penalty, x, data().train_y[index], draws[0], k)
        optimizer.step()
    return {name: p.detach() for name, p in gated.named_parameters()}


@pytest.mark.parametrize("family", ["sbp", "stg"])
def test_a_run_is_the_plain_loop(family: str) -> None:
    """Of a KL family, CE + c/N·KL, with gates ten times as fast and plain weight decay; else CE + c/N·`l0_norm`."""
    r = small(gate=family, l2=1e-3 if family == "sbp" else 0.0)
    trainer = Trainer([r], data())

    def step(gated: Any, penalty: Any, x: Tensor, y: Tensor, u: Tensor, _: int) -> None:
        (F.cross_entropy(gated(x, gate_noise=u), y) + penalty(gated)).backward()

    expected = plain(r, step, trainer)
    list(train_epoch(trainer))
    same(trainer, expected)
    assert {type(gate) for _, gate in trainer.gated.named_gates()} == {KINDS[family]}
    (record,) = evaluation.note(trainer)
    assert (record["expected"]["macs"] == 1.0) == (family == "sbp")
    assert ("prob_open" in record) == (family != "sbp")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sparse_vd", "bc_gnj", "bc_ghs"])
def test_noise_on_weights_is_drawn_for_each_example_and_the_penalty_rises(family: str) -> None:
    """c/N·min(1, k/3)·KL in step k of five: a warm-up of 0.6 of the epoch. σ of the first layer stays in its bound."""
    r = small(gate=family, penalty_warmup=0.6, **MORE[family])
    trainer = Trainer([r], data())
    state = torch.get_rng_state()
    list(train_epoch(trainer))

    def step(gated: Any, penalty: Any, x: Tensor, y: Tensor, _: Tensor, k: int) -> None:
        (F.cross_entropy(gated(x), y) + min(1, k / 3) * penalty(gated)).backward()

    same(trainer, plain(r, step, Trainer([r], data()), state))
    if family != "sparse_vd":
        tight = r.override(most_noise={"fc1.weight": 1e-3})
        bounded: Any = Trainer([tight], data())
        list(train_epoch(bounded))
        found = {
            name: gate.log_var.max() for name, gate in bounded.gated.named_gates() if "." in name and name[-1] == "t"
        }
        assert found["fc1.weight"] <= 2 * math.log(1e-3) < found["fc2.weight"]


def test_group_lasso_takes_its_step_in_a_stack_too() -> None:
    """Each run of a stack is the plain loop that is followed; groups become zero, and no noise is drawn."""
    runs = [
        small(gate="group_lasso", optimizer="sgd", lr=0.05, penalty=c, seed=seed) for seed, c in ((0, 9.0), (1, 0.5))
    ]
    stack = Trainer(runs, data())
    list(train_epoch(stack))

    def step(gated: Any, penalty: Any, x: Tensor, y: Tensor, _: Tensor, __: int) -> None:
        (F.cross_entropy(gated(x), y) + penalty(gated)).backward()

    for k, r in enumerate(runs):
        same(stack, plain(r, step, Trainer([r], data())), run=k)
    evaluation.note(stack)
    first, second = (result["architecture"]["fc1"] for result in evaluation.results(stack))
    assert 0 < first < second <= 784


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["score", "ar", "arm"])
def test_gates_that_learn_from_the_loss_do_so_in_a_stack_too(estimator: str) -> None:
    runs = [small(gate="bernoulli", estimator=estimator, penalty=0.01, seed=seed) for seed in range(2)]
    stack = Trainer(runs, data())
    list(train_epoch(stack))

    def step(gated: Any, penalty: Any, x: Tensor, y: Tensor, u: Tensor, _: int) -> None:
        l0.objectives.estimated_backward(gated, lambda noise: F.cross_entropy(gated(x, gate_noise=noise), y), u)
        penalty(gated).backward()

    for k, r in enumerate(runs):
        same(stack, plain(r, step, Trainer([r], data())), run=k)


@pytest.mark.slow
def test_weights_train_alone_at_first() -> None:
    """With gates as they begin, at their test-time values; then both do. What was best before gates learn is not best
    of the network that is handed over. A run that is taken up on either side goes on as the other.
    """
    r = small(gate="sbp", epochs=4, weights_first=0.5, penalty_warmup=0.25)
    trainer = Trainer([r], data())
    begun = {name: value.clone() for name, value in trainer.runs.values().items() if ".gates." in name}

    def step(gated: Any, _: Any, x: Tensor, y: Tensor, __: Tensor, ___: int) -> None:
        gated.gates.requires_grad_(False)
        F.cross_entropy(gated.fix()(x), y).backward()

    fixed = plain(r, step, trainer)
    list(train_epoch(trainer))
    same(trainer, fixed)
    states = [copy.deepcopy(saver.state(trainer))]
    for epoch in (1, 2):
        assert all(torch.equal(trainer.runs.values()[name], value) for name, value in begun.items())
        evaluation.note(trainer)
        list(train_epoch(trainer))
        states.append(copy.deepcopy(saver.state(trainer)))
        assert trainer.step.fixed == (epoch < 1)
    assert not torch.equal(trainer.runs.values()["network.gates.fc1.mu"], begun["network.gates.fc1.mu"])
    prices = trainer.lagrangian.prices
    assert [trainer.lagrangian.prices_at(torch.tensor(5.0 * k)).sum() / prices.sum() for k in (2, 2.5, 3, 4)] == [
        0, 0.5, 1, 1
    ]  # fmt: skip
    for state in states[:2]:
        other = Trainer([r], data())
        saver.load(other, state)
        while other.epoch < trainer.epoch:
            list(train_epoch(other))
        same(other, by_name(trainer), atol=0)
    trainer.history += [
        {**trainer.history[-1], "error": 50.0, "epoch": 3},
        {**trainer.history[-1], "error": 60.0, "epoch": 4},
    ]
    (result,) = evaluation.results(trainer)
    assert result["error_best"] == 50.0 > min(h["error"] for h in trainer.history)


def test_the_architecture_of_single_weights_has_the_units_that_are_left() -> None:
    gated: Any = build(small(gate="sparse_vd", per_example=True), data(), CPU)
    for _, gate in gated.named_gates():
        gate.close_(torch.rand(gate.shape) < 0.98)
    read = {name.removesuffix(".weight"): int(gate.open().any(0).sum()) for name, gate in gated.named_gates()}
    assert architecture(gated) == read
    assert 0 < read["fc1"] < 784


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_every_family_trains_in_a_stack(family: str) -> None:
    trainer = Trainer([small(gate=family, seed=seed, **MORE.get(family, {})) for seed in range(2)], data())
    list(train_epoch(trainer))
    evaluation.note(trainer)
    for k, result in enumerate(evaluation.results(trainer)):
        units = dict(trainer.network(k).named_gates()) if "evidence" in result else {}  # type: ignore[operator]
        for name, numbers in result.get("evidence", {}).items():
            assert numbers == sorted(numbers, reverse=True)
            assert sum(e > units[name].bar for e in numbers) == int(units[name].open().sum())
        assert bool(result.get("evidence")) == (family in ("sbp", "vib", "gnj", "bc_gnj", "bc_ghs"))
        assert 0 < result["costs"]["macs"]["kept"] <= 1
        assert 0 < result["costs"]["macs"]["expected"] <= 1


@pytest.mark.slow
def test_pages_and_sweeps_take_another_family(tmp_path: Path) -> None:
    home = finished(small(gate="sbp", data="mnist5k"), images=100)
    assert "sbp" in run_page(Folder.open(home))
    grid = Sweep(small(gate="vib"), {"gate": ["sbp", "vib"]}, seeds=1)
    made = run(grid, lambda _: data(), tmp_path / "sweep")
    assert [point["runs"][0]["costs"]["macs"]["expected"] for point in made["points"]] == [1.0, 1.0]


def test_what_a_family_does_not_have_is_refused() -> None:
    for family in ("sbp", "vib", "gnj", "sparse_vd", "bc_gnj", "bc_ghs"):
        with pytest.raises(ValueError, match=f"`at_most` must be absent with `gate` '{family}', which has no expected"):
            get("gallego-mlp").override(gate=family, per_example=True)
    with pytest.raises(ValueError, match="`rule` must be \"noiseless\" with `gate` 'stg', which has a rule of its own"):
        get("louizos-mlp").override(gate="stg", rule="median")
    with pytest.raises(ValueError, match='`gate` must be "hard_concrete" or "stg" or'):
        get("louizos-mlp").override(gate="lasso")
    with pytest.raises(ValueError, match="'sparse_vd' must have `per_example` true"):
        get("sparse-vd-mlp").override(per_example=False)
    with pytest.raises(ValueError, match="'group_lasso' must have `optimizer` 'sgd', whose steps have one length"):
        get("louizos-mlp").override(gate="group_lasso")
    with pytest.raises(ValueError, match="`threshold` must be absent with `gate` 'stg', which has none"):
        get("louizos-mlp").override(gate="stg", threshold=0.5)
    with pytest.raises(ValueError, match="`threshold` must be one number with `gate` 'bernoulli'"):
        get("louizos-mlp").override(gate="bernoulli", threshold={"fc1": 0.5})
    with pytest.raises(ValueError, match="`estimator` must be \"straight_through\" with `gate` 'stg'"):
        get("louizos-mlp").override(gate="stg", estimator="arm")
    with pytest.raises(ValueError, match="`weights_first` must leave epochs for the gates"):
        get("sbp-mlp").override(epochs=3, weights_first=0.9)
    with pytest.raises(ValueError, match="`linear_after` must be absent with `cosine`"):
        get("sbp-mlp").override(cosine=True)


def test_rates_fall_on_a_line_to_zero() -> None:
    r = get("sparse-vd-mlp").override(epochs=8)
    assert [Policy(r, 100).rates(epoch)[0] for epoch in range(8)] == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_signed_pixels_lie_between_minus_one_and_one() -> None:
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert data().scaled(black_and_white, "signed").flatten().tolist() == [-1.0, 1.0]


def test_a_recipe_of_before_has_the_digest_that_it_had() -> None:
    plain = get("louizos-mlp")
    assert plain.digest() != plain.override(gate="stg").digest()
    assert plain.from_dict({k: v for k, v in plain.to_dict().items() if k != "gate"}).digest() == plain.digest()


class Prenorm(torch.nn.Module):
    """A residual stream whose norm subtracts its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6)
        self.up, self.down, self.head = torch.nn.Linear(6, 5), torch.nn.Linear(5, 6), torch.nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out: Tensor = self.head(self.norm(h + self.down(self.up(self.norm(h)).relu())))
        return out


def test_streams_that_were_asked_for_and_cannot_shrink_are_told() -> None:
    x, streams = torch.zeros(2, 4), get("demo").override(placement="streams")
    gated = l0.attach(Prenorm(), x, where=l0.shrinkable(streams=True))
    with pytest.warns(UserWarning, match="no residual stream that can shrink: `layer_norm` .*`l0.centred`"):
        building._warn_of_streams(streams, gated)
    with warnings.catch_warnings(action="error"):
        building._warn_of_streams(streams.override(placement="shrinkable"), gated)
        centred = l0.attach(l0.centred(Prenorm(), (x,)), x, where=l0.shrinkable(streams=True))
        building._warn_of_streams(streams, centred)


def test_pixels_have_gates_where_the_library_has_them_by_default() -> None:
    for placement in ("shrinkable", "streams", "inputs", "everything"):
        gated: Any = build(recipe(network="lenet300", placement=placement), data(), CPU)
        assert {name for name, _ in gated.named_gates()} == {"fc1", "fc2", "fc1.inputs"}
    for outputs, placement, given in ((2, "shrinkable", True), (4, "shrinkable", False), (4, "inputs", True)):
        model = torch.nn.Sequential(torch.nn.Linear(3, outputs), torch.nn.ReLU(), torch.nn.Linear(outputs, 2))
        where = building.where(get("demo").override(placement=placement))
        names = [p.name for p in l0.attach(model, torch.zeros(2, 3), where=where).placements]
        assert names == ["0", *["0.inputs"] * given]
