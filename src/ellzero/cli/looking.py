"""Commands that look at runs and recipes, and hand networks over: `evaluate`, `compact`, `recipes`.

They change nothing in a run but its compact.safetensors, and work on runs that are still going on: what they see is
the newest checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from rich import box
from rich.table import Table
from torch import nn
from tyro.conf import Positional, arg

from ellzero.cli.app import CommandError, app, say, show, show_json, warn
from ellzero.cli.exporting import export, refuse
from ellzero.cli.opening import (
    Device,
    choose,
    error_of,
    find_device,
    find_recipe,
    load_data,
    loading,
    open_run,
    restored,
    small_network,
)
from ellzero.cli.running import COMPACT
from ellzero.experiments import data
from ellzero.experiments.papers import RECIPES
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.building import network as dense_network
from ellzero.experiments.train.lagrangian import COSTS
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.objectives import costs

Run = Annotated[str, Positional, arg(metavar="RUN")]
Index = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]


# ---------------------------------------------------------------- evaluate


@app.command
def evaluate(
    run: Run,
    data_dir: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="")] = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Test the network of a run, with its gates and made compact, and say what it costs.

    For example: ellzero evaluate runs/demo-seed0

    Args:
        run: folder of a run, finished or not.
        data_dir: folder of the data's files, if it is not the one that the run was begun with.
        device: where to; auto is a GPU if there is one.
        json: print JSON.
    """
    folder = open_run(run)
    where = find_device(device)
    directory = folder.about.get("data_dir") if data_dir is None else data_dir
    dataset = load_data(folder.recipes[0].data, directory, where)
    trainer = restored(folder, dataset)
    if not trainer.done:  # at its end that is done for good
        trainer.recalibrate()
    found = [_evaluated(trainer, number, recipe, dataset) for number, recipe in enumerate(folder.recipes)]
    if json:
        show_json({"run": run, "finished": folder.results() is not None, "networks": found})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("recipe", "seed", "error", "compact", "density", "parameters", "MACs"):
        table.add_column(title, justify="left" if title == "recipe" else "right")
    for f in found:
        kept = [f"{100 * f['kept'][name]:.2f} %" for name in COSTS] if "kept" in f else ["dense"] * 3
        table.add_row(f["recipe"], str(f["seed"]), f"{f['error']:.2f} %", f"{f['error_compact']:.2f} %", *kept)
    show(table)
    state = "finished" if folder.results() is not None else "not finished"
    say(
        f"After {trainer.epoch} epochs ({state}), on {len(dataset.test_y):,} test images of {dataset.name}.",
        "error: with the test-time gates; compact: of the compact network, and what it has kept of the dense one.",
    )


def _evaluated(trainer: Trainer, number: int, recipe: Recipe, dataset: data.Dataset) -> dict[str, Any]:
    network = trainer.network(number)
    out: dict[str, Any] = {"recipe": recipe.name, "seed": recipe.seed, "epoch": trainer.epoch}
    out["error"] = error_of(network, recipe, dataset)
    network = network.cpu()
    small = small_network(network)
    out["error_compact"] = error_of(small, recipe, dataset)
    out["parameters"] = sum(p.numel() for p in small.parameters())
    if isinstance(network, Gated):
        with torch.no_grad():
            for kind in ("expected", "kept"):
                out[kind] = {
                    name: float(cost(network, kept=kind == "kept")) / costs.dense(cost, network)
                    for name, cost in COSTS.items()
                }
    return out


# ---------------------------------------------------------------- compact


@app.command
def compact(
    run: Run,
    to: Annotated[
        tuple[str, ...] | None,
        arg(metavar="FILE [FILE ...]", help_behavior_hint="(default: compact.safetensors in RUN)"),
    ] = None,
    index: Index = None,
) -> None:
    """Write the compact network of a run to files. The run's data are not needed.

    For example: ellzero compact runs/demo-seed0 --to small.pt2 small.onnx

    Args:
        run: folder of a run, finished or not.
        to: files; the ending says the format: .safetensors (for `ellzero.load`), .pt2 (torch.export) or .onnx. Each is
            read back and compared with the network before it gets its name.
        index: which run of a stack, from 0.
    """
    if to == ():
        raise CommandError("`--to` must be followed by at least one file, such as `--to small.onnx`, got none")
    folder = open_run(run)
    number = choose(folder, index)
    recipe = folder.recipes[number]
    files = [folder.path / COMPACT] if to is None else [Path(file) for file in to]
    for file in files:
        refuse(file)
    trainer = restored(folder)
    small = small_network(trainer.network(number))
    if recipe.recalibrate and not trainer.done and any(isinstance(m, nn.BatchNorm2d) for m in small.modules()):
        warn("the run is not finished: batch-norm statistics are those of training, and gathered anew at its end alone")
    fresh = partial(dense_network, recipe, len(data.KNOWN[recipe.data].classes))
    example = data.scaled(data.stand_in(recipe.data, 3).train_x)
    parameters, before = (sum(p.numel() for p in network.parameters()) for network in (small, fresh()))
    say(f"{recipe.name}, seed {recipe.seed}: {parameters:,} of {before:,} parameters ({parameters / before:.2%}).")
    for file in files:
        how = export(small, file, example, fresh)
        say(f"{file} ({file.stat().st_size / 1e6:.2f} MB; {how})")
        if file.suffix == ".safetensors":
            say(*(f"    {line}" for line in loading(recipe, file)))


# ---------------------------------------------------------------- recipes


@app.command
def recipes(
    name: Annotated[str | None, Positional, arg(metavar="NAME", help_behavior_hint="")] = None,
    json: bool = False,
    toml: bool = False,
) -> None:
    """List the named recipes, or print one in full.

    For example: ellzero recipes gallego-mlp > mine.toml

    Args:
        name: of a recipe, or a TOML file; all of them if absent.
        json: print JSON, all fields.
        toml: print TOML, all fields, as for one recipe.
    """
    if json and toml:
        raise CommandError("`--json` and `--toml` exclude each other")
    if name is not None:
        recipe = find_recipe(name)
        show_json(recipe.to_dict()) if json else say(recipe.to_toml().rstrip())
    elif json:
        show_json([recipe.to_dict() for recipe in RECIPES.values()])
    elif toml:
        say("\n".join(f'["{name}"]\n{recipe.to_toml()}' for name, recipe in RECIPES.items()).rstrip())
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("name", "network", "data", "objective", "epochs"):
            table.add_column(title, justify="right" if title == "epochs" else "left", overflow="fold")
        for recipe in RECIPES.values():
            tuned = f" + {recipe.finetune_epochs}" if recipe.finetune_epochs else ""
            cells = (recipe.name, recipe.network, recipe.data, _objective(recipe), f"{recipe.epochs}{tuned}")
            table.add_row(*cells)
        show(table)
        say("`ellzero recipes NAME` prints one in full, `ellzero train NAME` trains it.")


def _objective(recipe: Recipe) -> str:
    """In a few words."""
    if recipe.placement is None:
        return "dense" if not recipe.dropout else f"dense, dropout {recipe.dropout}"
    if recipe.penalty is not None:
        return f"penalty, c = {_values(recipe.penalty)}"
    assert recipe.at_most is not None
    return f"{recipe.on} {recipe.cost} ≤ {_values(recipe.at_most)}"


def _values(value: float | dict[str, float]) -> str:
    if not isinstance(value, dict):
        return f"{value:g}"
    if len(value) > 4 and len(set(value.values())) == 1:
        return f"{next(iter(value.values())):g} each"
    return ", ".join(f"{name} {number:g}" for name, number in value.items())
