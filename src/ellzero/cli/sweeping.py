"""The command that trains a grid: `sweep`. It ends with a table, a json and a figure of error against cost.

What a sweep is and how it is done is in `sweep`; here are the words around it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from ellzero.cli.app import CommandError, app, foreseen, resumable, say, show, show_json, silent, tell
from ellzero.cli.opening import DataDir, Device, Fields, find_recipe, loader, refuse_below_one, refuse_several
from ellzero.experiments import sweep as sweeping
from ellzero.experiments.campaign import CampaignError, Record
from ellzero.experiments.figures import Cost, PlotsMissingError, can_draw
from ellzero.experiments.sweep import Sweep
from ellzero.experiments.train.watching import Bar

WIDTH = 172  # of a table that goes to a file


@app.command
def sweep(
    recipe: Annotated[str | None, Positional, arg(metavar="RECIPE", help_behavior_hint="")] = None,
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1)")] = None,
    out: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/sweep/RECIPE)")] = None,
    resume: bool = False,
    fresh: bool = False,
    device: Device = "auto",
    data_dir: DataDir = None,
    at_once: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: what the device has room for)")
    ] = None,
    every: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1)")] = None,
    cost_axis: Literal["auto", "params", "macs", "l0_norm"] = "auto",
    json: bool = False,
    quiet: bool = False,
    fields: Annotated[Any, OmitArgPrefixes, arg(constructor=Fields)] = Fields(),  # noqa: B008 (never written to)
) -> None:
    """Train a grid of values × seeds, and show which points no other beats in error and cost.

    For example:

    $ ellzero sweep demo --at-most 0.05,0.1,0.2,0.4 --seeds 3
    $ ellzero sweep louizos-mlp --penalty 0.03,0.1,0.3,1 --epochs 50 --out runs/lambda
    $ ellzero sweep budget-lenet5 --at-most 0.05,0.1 --gate-lr 1e-3,1e-2 --cost-axis params
    $ ellzero sweep --resume --out runs/lambda

    Fields of the recipe take one value or several with commas between; all combinations are trained. Runs that differ
    in objective and seed alone are trained together. Ctrl-C ends it after the step, and saves; what is finished is not
    trained again. The folder then holds sweep.json, the figure (matplotlib must be installed, the extra `plots`), and
    every run with its checkpoint, of which `ellzero compact` makes a small network.

    Args:
        recipe: name of a recipe (`ellzero recipes` lists them), or a TOML file.
        seeds: runs of each point, with the seed of the recipe and those after it.
        out: folder of the sweep.
        resume: go on with the sweep in the folder, or begin it if there is none; without RECIPE the one that is there.
        fresh: remove the sweep in the folder, and begin again.
        device: where to train; auto is a GPU if there is one.
        data_dir: folder of the data's files; else $ELLZERO_DATA, else the user's cache, to which they are downloaded.
        at_once: train no more than N runs together; else on a GPU as many as its memory holds, on a CPU 8.
        every: evaluate after every N epochs, and after the last.
        cost_axis: what the front weighs error against, as it is kept at the end; auto is what at_most bounds, else
            params.
        json: print what is in sweep.json.
        quiet: show no progress.
        fields: of the recipe, one value or several with commas between, each written as in TOML:
            --at-most 0.1,0.2, --gate-lr none,1e-2, --at-most '{"fc1" = 0.2},{"fc1" = 0.4}', --milestones '[60],[80]'.
    """
    refuse_below_one({"seeds": seeds, "every": every, "at-once": at_once})
    if resume and fresh:
        raise CommandError("`--resume` and `--fresh` exclude each other: give one of them")
    refuse_several("sweep")
    chosen, home, before = _chosen(recipe, out, resume, seeds, every, fields)
    directory = before.get("data_dir") if data_dir is None else data_dir
    load = loader(directory, device, before.get("device"))
    about = {"data_dir": None if directory is None else str(Path(directory).resolve())}
    run = partial(sweeping.run, chosen, load, home, resume=resume, fresh=fresh, at_once=at_once, about=about)
    _show(_record(run, home, None if cost_axis == "auto" else cost_axis, quiet), home, json)


def _record(run: Callable[..., Record], home: Path, cost: Cost | None, quiet: bool) -> Record:
    if not can_draw() and not quiet:
        tell(f"no figure will be drawn: {PlotsMissingError()}, and draw it later by `--resume`")
    again = shlex.join(["ellzero", "sweep", "--resume", "--out", str(home)])
    if cost is not None:
        again += f" --cost-axis {cost}"
    fewer = f"fewer runs together need less: {again} --at-once N"
    with resumable(again, fewer), foreseen(bad_usage=(CampaignError, ValueError)):
        watchers, said = ([], silent) if quiet else ([Bar()], tell)
        return run(cost=cost, watchers=watchers, say=said)


def _chosen(
    recipe: str | None, out: str | None, resume: bool, seeds: int | None, every: int | None, fields: Any
) -> tuple[Sweep, Path, Record]:
    """What is to be done and where, and what is known from before of where its results come from."""
    with foreseen(bad_usage=(CampaignError, ValueError)):
        grid = {name: sweeping.values_of(name, text) for name, text in vars(fields).items() if text is not None}
        if recipe is None:
            if not resume or out is None:
                raise CommandError(
                    "`RECIPE` must be given, such as `ellzero sweep demo --at-most 0.1,0.2` (`ellzero recipes` lists "
                    "them), or `--resume --out FOLDER`"
                )
            there, record = sweeping.stored(Path(out))
            asked = Sweep(there.recipe, {**there.grid, **grid}, seeds or there.seeds, every or there.every)
            return asked, Path(out), record["about"]
        found = find_recipe(recipe)
        asked = Sweep(found, grid, seeds or 1, every or 1)
        home = Path("runs", "sweep", found.name) if out is None else Path(out)
        begun = resume and (home / "sweep.json").exists()
        return asked, home, sweeping.stored(home)[1]["about"] if begun else {}


def _show(record: Record, home: Path, json: bool) -> None:
    with foreseen():
        files = sweeping.draw(record, home) if can_draw() else []
    if json:
        show_json(record)
        return
    show(sweeping.table(record), WIDTH)
    seconds = sum(stack["seconds"] for stack in record["stacks"])
    runs = sum(stack["runs"] for stack in record["stacks"])
    devices = ", ".join(dict.fromkeys(str(stack["about"].get("device")) for stack in record["stacks"]))
    words = {"l0_norm": "kept density", "params": "kept parameters", "macs": "kept MACs"}[record["cost"]]
    say(f"*: on the front of last error against {words}, means over seeds; {runs} runs in {seconds:.0f} s on {devices}")
    if any(p["runs"] and p["emptied"] for p in record["points"]):
        say("layer empty: in some run a layer has nothing left, so that there is no network to hand over")
    for point in record["points"]:
        if point["diverged"]:
            say(f"diverged: {point['label']}: {point['diverged'][0]}")
    say(f"results: {home / 'sweep.json'}", *(f"figure: {f}" for f in files if f.suffix in (".png", ".svg")))
    if record["front"]:
        point = record["points"][record["front"][0]]
        run = point["runs"][0]
        command = ["ellzero", "compact", str(home / "stacks" / run["stack"]), "--index", str(run["index"])]
        say(f"a network of the front as a file ({point['label']}, seed {run['seed']}): {shlex.join(command)}")


__all__ = ["sweep"]
