"""A recipe names its gate family: the run is the plain loop, and pages and sweeps take it as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ellzero as l0
from ellzero import gates
from ellzero.experiments.data import scaled
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.sweep import Sweep, run
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.building import build
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.page.run import run_page
from support.finished import finished
from support.narrow import NARROW
from support.trained import CPU, TRAIN, data, recipe, same

KINDS = {
    "hard_concrete": gates.HardConcreteGate,
    "stg": gates.STGGate,
    "bernoulli": gates.BernoulliGate,
    "generalized_dropout": gates.GeneralizedDropoutGate,
    "sbp": gates.SBPGate,
    "vib": gates.VIBGate,
    "gnj": gates.GNJGate,
}


def small(**changes: Any) -> Any:
    return recipe(network=NARROW.name, placement="per_layer", gate_lr=None, penalty=1.0, **changes)


@pytest.mark.parametrize("family", ["sbp", "stg"])
def test_a_run_is_the_plain_loop(family: str) -> None:
    """Of a KL family, CE + c/N·KL, with gates ten times as fast and plain weight decay; else CE + c/N·`l0_norm`."""
    r = small(gate=family, l2=1e-3 if family == "sbp" else 0.0)
    trainer = Trainer([r], data())
    order, noise = trainer.supply.epoch(0)
    gated: Any = build(r, data(), CPU)
    assert {type(gate) for _, gate in gated.named_gates()} == {KINDS[family]}
    optimizer = torch.optim.Adam(gated.param_groups(lr=r.lr, weight_decay=r.l2))
    penalty = l0.Penalty(l0.complexity if family == "sbp" else l0.l0_norm, 1.0 / TRAIN)
    for index, draws in zip(order[:, 0], noise[:, 0], strict=True):
        x = scaled(data().train_x[index], data().mean, data().std)
        optimizer.zero_grad()
        (F.cross_entropy(gated(x, gate_noise=draws[0]), data().train_y[index]) + penalty(gated)).backward()
        optimizer.step()
    list(train_epoch(trainer))
    same(trainer, {name: p.detach() for name, p in gated.named_parameters()})
    (record,) = evaluation.note(trainer)
    assert (record["expected"]["macs"] == 1.0) == (family == "sbp")
    assert ("prob_open" in record) == (family != "sbp")


@pytest.mark.parametrize("family", KINDS)
def test_every_family_trains_in_a_stack(family: str) -> None:
    trainer = Trainer([small(gate=family, seed=seed) for seed in range(2)], data())
    list(train_epoch(trainer))
    evaluation.note(trainer)
    for result in evaluation.results(trainer):
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
    for family in ("sbp", "vib", "gnj"):
        with pytest.raises(ValueError, match=f"`at_most` must be absent with `gate` '{family}', which has no expected"):
            get("gallego-mlp").override(gate=family)
    with pytest.raises(ValueError, match="`rule` must be \"noiseless\" with `gate` 'stg', which has a rule of its own"):
        get("louizos-mlp").override(gate="stg", rule="median")
    with pytest.raises(ValueError, match='`gate` must be "hard_concrete" or "stg" or'):
        get("louizos-mlp").override(gate="lasso")


def test_a_recipe_of_before_has_the_digest_that_it_had() -> None:
    plain = get("louizos-mlp")
    assert plain.digest() != plain.override(gate="stg").digest()
    assert plain.from_dict({k: v for k, v in plain.to_dict().items() if k != "gate"}).digest() == plain.digest()
