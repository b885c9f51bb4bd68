"""The large experiment, small: WRN-10-1 on 64 images of noise through the study's command, with units taken out on the
way, an interruption, the page, the table, the figure and the compact network.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import ellzero as l0
from ellzero.cli import main, opening
from ellzero.experiments import figures
from ellzero.experiments import study as making
from ellzero.experiments.data import Dataset
from ellzero.experiments.networks import WideResNet
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.study import Reproduction, Study, reproduce
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.loop import restore
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.gated.module import Gated
from ellzero.page import run_page
from support import into_nothing
from support.campaigns import Watching, known, module
from support.noise import quartered
from support.oracles import assert_same
from support.pages import embedded, lines, text_of

pytestmark = pytest.mark.slow
NAME = module("wrn_cifar10").CONSTRAINED.format(20)
IMAGES, BATCH = 32, 8
STEPS = IMAGES // BATCH
SIZES = {"blocks.0.conv1": 16, "blocks.1.conv1": 32, "blocks.2.conv1": 64}
# About half of the gates are closed from the beginning, and stay so.
SHRINKS = {
    "at_most": dict.fromkeys(SIZES, 0.25), "rule": "noiseless", "drop_rates": {"*": 0.917}, "gate_lr": 1e-6,
    "shrink_at": (1,), "shrink_checks": 1, "shrink_multiple": 4, "shrink_gain": 0.1, "settle_at": 2,
}  # fmt: skip


@cache
def images() -> Dataset:
    return quartered(IMAGES)


def small(recipe: Recipe) -> Recipe:
    own = SHRINKS if recipe.name == NAME else {}
    return recipe.override(network="wrn-10-1", batch=BATCH, milestones=(), precision="float32", **own)


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    """The command sees a small network and noise."""
    whole: Study = known()["wrn-cifar10"]
    chosen = [row for row in whole.rows if row.recipe.name in ("wrn-cifar10", NAME)]
    study = replace(whole, rows=tuple(replace(row, recipe=small(row.recipe)) for row in chosen))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "render", into_nothing)
        patch.setattr(making, "studies", lambda: {study.name: study})

        def load(name: str, *_: object) -> Dataset:
            assert name == "cifar10"
            return images()

        patch.setattr(opening, "load_data", load)
        yield patch


def reproduced(patch: pytest.MonkeyPatch, watcher: AbstractWatcher, *words: str) -> int:
    train = training.train

    def watched(recipes: Any, dataset: Any, folder: Any, **options: Any) -> Trainer:
        return train(recipes, dataset, folder, **options | {"watchers": [watcher]})

    with patch.context() as inner:
        inner.setattr(training, "train", watched)
        return main(["reproduce", "wrn-cifar10", "--seeds", "1", "--device", "cpu", "--quiet", *words])


@dataclass
class Chain:
    out: Path
    words: list[str]
    before: list[int]
    after: list[int]

    @property
    def folder(self) -> Folder:
        (stack,) = (self.out / "stacks").iterdir()
        return Folder.open(stack)

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.out / f"{NAME}.json").read_text())
        return record


@pytest.fixture(scope="module")
def chain(patched: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Stopped in the last epoch, when units have been taken out twice, and taken up again."""
    out = tmp_path_factory.mktemp("wide") / "out"
    words = ["--only", NAME, "--epochs", "3", "--every", "2", "--out", str(out)]
    interrupt = Watching(0, 2 * STEPS + 1, lambda: signal.raise_signal(signal.SIGINT))
    assert reproduced(patched, interrupt, *words) == 130
    before = checkpoint.steps(Chain(out, words, [], []).folder.checkpoints)
    assert not (out / f"{NAME}.json").exists()
    rest = Watching()
    assert reproduced(patched, rest, *words, "--resume") == 0
    return Chain(out, words, before, rest.steps)


def test_the_study_goes_on_after_the_events_that_it_was_stopped_behind(chain: Chain) -> None:
    assert chain.before[-1] == 2 * STEPS + 1
    assert chain.after == list(range(2 * STEPS + 2, 3 * STEPS + 1))
    assert len(checkpoint.steps(chain.folder.checkpoints)) <= 2


def test_the_record_has_events_and_seconds_and_no_weights(chain: Chain) -> None:
    (seed,) = chain.record["seeds"]
    history = seed["history"]
    assert [h["epoch"] for h in history] == [1, 2, 3]  # the event, every second, the last
    first, second = (h["shrunk"] for h in history[:2])
    assert not first["skipped"]
    assert second["settled"]
    before = SIZES
    for event in (first, second):
        assert {name: event["widths"][name] + event["removed"][name] for name in SIZES} == before
        assert all(width % 4 == 0 for width in event["widths"].values())
        before = event["widths"]
    assert second["macs"]["before"] == first["macs"]["after"] < first["macs"]["before"] == 1
    assert second["macs"]["after"] < 0.4
    bought = history[-1]["error_without"]
    assert bought == chain.folder.history()[-1]["error_without"]
    assert bought.keys() == {"averaging", "recalibration"}
    assert [c["at_most"] for c in seed["constraints"].values()] == [0.25] * 3
    assert all(c["kept"] <= 0.25 for c in seed["constraints"].values())
    assert all(h["seconds"] > 0 for h in history)
    assert sum(h["seconds"] for h in history) == pytest.approx(seed["seconds_of_stack"], abs=0.01)
    assert (chain.out / f"{NAME}.json").stat().st_size < 20_000
    assert chain.record["recipe"]["data"] == "cifar10"


def test_the_compact_network_is_kept_and_is_the_gated_one(chain: Chain) -> None:
    (seed,) = chain.record["seeds"]
    file = chain.out / f"{NAME}-seed0.safetensors"
    kept = l0.load(WideResNet(10, 1, 10), file).eval()
    trainer = restore(chain.folder, images())
    gated = cast(Gated, trainer.network(0))
    x = trainer.supply.scaled(images().test_x)
    with torch.no_grad():
        logits = kept(x)
        assert_same(logits, gated(x), 1e-5)
        trainer.runs.eval()
        live = trainer.runs.evaluate(Objective.logits, x, values=trainer.values())[0]
    assert_same(logits, live, 1e-5)
    assert 100 * (logits.argmax(1) != images().test_y).double().mean() == pytest.approx(seed["error_last"])
    parameters = sum(p.numel() for p in kept.parameters())
    assert parameters == pytest.approx(seed["costs"]["params"]["kept"] * seed["costs"]["params"]["dense"])
    shapes: dict[str, Any] = {name: kept.get_submodule(name).weight for name in SIZES}
    assert {name: len(weight) for name, weight in shapes.items()} == seed["architecture"]
    for name, width in seed["history"][1]["shrunk"]["widths"].items():
        live_layer: Any = cast(Gated, trainer.runs.template.network).model.get_submodule(name)
        assert len(live_layer.weight) == width < SIZES[name]


def test_a_network_that_was_lost_is_made_again_and_a_fresh_start_removes_it(
    chain: Chain, patched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = chain.out / f"{NAME}-seed0.safetensors"
    before = load_file(file)
    file.unlink()
    nothing = Watching()
    assert reproduced(patched, nothing, *chain.words, "--resume") == 0
    assert nothing.steps == []
    again = load_file(file)
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)
    campaign = Reproduction(making.studies()["wrn-cifar10"], only=NAME).campaign(tmp_path)
    campaign.write({})
    for name in (file.name, "mine.safetensors"):
        (tmp_path / name).touch()
    campaign.clear()
    assert [p.name for p in tmp_path.iterdir()] == ["mine.safetensors"]


def test_the_page_of_the_run_shows_the_events(chain: Chain) -> None:
    (seed,) = chain.record["seeds"]
    first, second = (h["shrunk"] for h in seed["history"][:2])
    page = run_page(chain.folder)
    found = embedded(page)
    assert lines(found["macs"]) == [(1, "shrunk"), (2, "settled")]
    assert found["seconds"]["data"][0]["x"] == [0, 1, 2, 3]
    widths = " ".join(f"{name} {SIZES[name]} → {first['widths'][name]}" for name in SIZES)
    assert f"1 shrunk 100.0 % → {100 * first['macs']['after']:.1f} % {widths}" in text_of(page)
    assert f"2 settled: the gates are fixed {100 * first['macs']['after']:.1f} %" in text_of(page)
    assert f"→ {100 * second['macs']['after']:.1f} %" in text_of(page)


@pytest.mark.filterwarnings("ignore:every gate is open")  # two epochs close nothing in some rows
@pytest.mark.usefixtures("drawn_once")
def test_every_row_of_the_study_trains_in_small(tmp_path: Path) -> None:
    """With its own objective, schedule and average: two epochs, those that settle do so after the first."""
    whole: Study = known()["wrn-cifar10"]

    def tiny(recipe: Recipe) -> Recipe:
        changes: dict[str, Any] = {"network": "wrn-10-1", "batch": BATCH, "epochs": 2, "precision": "float32"}
        if isinstance(recipe.at_most, dict):
            target = recipe.at_most["blocks.0.conv1"]
            changes |= {"at_most": dict.fromkeys(SIZES, target), "settle_at": 1}
        return recipe.override(**changes)

    study = replace(whole, rows=tuple(replace(row, recipe=tiny(row.recipe)) for row in whole.rows))
    few = quartered(2 * BATCH)
    records = reproduce(Reproduction(study, seeds=1, every=2), lambda _: few, tmp_path / "out")
    assert [r["row"] for r in records] == [row.label for row in whole.rows]
    kept: dict[str, Any] = {}
    for record in records:
        (seed,) = record["seeds"]
        assert seed["history"][-1]["epoch"] == 2
        assert ("error_without" in seed["history"][-1]) == (record["recipe"]["ema"] is not None)
        if record["row"].startswith("ε"):
            target = record["recipe"]["at_most"]["blocks.0.conv1"]
            sizes = {name: int(target * size + 1e-9) for name, size in SIZES.items()}
            assert seed["architecture"] == sizes  # the whole budget, on a CPU to the unit
            (event,) = (h["shrunk"] for h in seed["history"] if "shrunk" in h)
            assert event["widths"] == sizes
            kept[record["row"]] = seed["costs"]["macs"]["kept"]
            network = l0.load(WideResNet(10, 1), tmp_path / "out" / f"{record['recipe']['name']}-seed0.safetensors")
            assert {n: network.get_submodule(n).out_channels for n in SIZES} == sizes
    assert kept["ε=80 %"] > kept["ε=50 %"] > kept["ε=35 %"] > kept["ε=20 %"] == kept["ε=20 %, dropped"]
    assert study.table is not None
    assert study.table(records, "").row_count == len(whole.rows)
    assert study.draw is not None
    assert all(file.stat().st_size for file in study.draw(records, tmp_path))


def test_rows_of_different_folders_make_one_table_and_one_figure(
    chain: Chain, patched: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "wrn-cifar10", "--epochs", "1", "--out", str(tmp_path / "dense")]
    assert reproduced(patched, Watching(), *words) == 0
    assert not list((tmp_path / "dense").glob("*.safetensors"))  # there is no compact one
    together = tmp_path / "together"
    together.mkdir()
    for folder, name in ((chain.out, NAME), (tmp_path / "dense", "wrn-cifar10")):
        (together / f"{name}.json").write_text((folder / f"{name}.json").read_text())
    capsys.readouterr()
    assert main(["reproduce", "wrn-cifar10", "--draw-only", "--out", str(together)]) == 0
    printed = capsys.readouterr().out
    dense, ours = (cells for line in printed.splitlines() if (cells := line.split()) and cells[0] in ("dense", "ε=20"))
    assert "1.000" in dense
    assert ours[-3] == "–"  # three epochs are not compared with one
    assert (together / "figures" / "wrn-cifar10.svg").stat().st_size > 0
