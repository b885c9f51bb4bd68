"""The command that tests the network of a run: `evaluate`. It changes nothing in the run.

A run may still be going on: what is tested is its newest checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from ellzero.cli import opening
from ellzero.cli.app import app, say, show, show_json
from ellzero.cli.opening import DataDir, Device, RunPath
from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.building import COSTS
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.objectives import costs
from ellzero.out.tables import new_table


@app.command
def evaluate(run: RunPath, data_dir: DataDir = None, device: Device = "auto", json: bool = False) -> None:
    """Test the network of a run, with its gates and made compact, and say what it costs.

    For example: ellzero evaluate runs/demo-seed0

    Args:
        run: folder of a run, finished or not.
        data_dir: folder of the data's files, if it is not the one that the run was begun with.
        device: where to; auto is a GPU if there is one.
        json: print JSON.
    """
    folder = opening.open_run(run)
    where = opening.find_device(device)
    directory = folder.about.get("data_dir") if data_dir is None else data_dir
    dataset = opening.load_data(folder.recipes[0].data, directory, where)
    trainer = opening.restored(folder, dataset)
    if not trainer.done:  # at its end that is done for good
        trainer.recalibrate()
    found = [_evaluated(trainer, number, recipe, dataset) for number, recipe in enumerate(folder.recipes)]
    finished = folder.results() is not None
    if json:
        show_json({"run": run, "finished": finished, "networks": found})
        return
    table = new_table("", ["recipe"], ["seed", "error", "compact", "density", "parameters", "MACs"])
    for f in found:
        kept = [f"{100 * f['kept'][name]:.2f} %" for name in COSTS] if "kept" in f else ["dense"] * 3
        table.add_row(f["recipe"], str(f["seed"]), f"{f['error']:.2f} %", f"{f['error_compact']:.2f} %", *kept)
    show(table)
    state = "finished" if finished else "not finished"
    say(
        f"After {trainer.epoch} epochs ({state}), on {len(dataset.test_y):,} test images of {dataset.name}.",
        "error: with the test-time gates; compact: of the compact network, and what it has kept of the dense one.",
    )


def _evaluated(trainer: Trainer, number: int, recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    network = trainer.network(number)
    out: dict[str, Any] = {"recipe": recipe.name, "seed": recipe.seed, "epoch": trainer.epoch}
    out["error"] = opening.error_of(network, recipe, dataset)
    network = network.cpu()
    small = opening.small_network(network)
    out["error_compact"] = opening.error_of(small, recipe, dataset)
    out["parameters"] = opening.size(small)
    if isinstance(network, Gated):
        with torch.no_grad():
            for kind in ("expected", "kept"):
                out[kind] = {
                    name: float(cost(network, kept=kind == "kept")) / costs.dense(cost, network)
                    for name, cost in COSTS.items()
                }
    return out
