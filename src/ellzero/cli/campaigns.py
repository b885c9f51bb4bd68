"""The commands that train many runs: `reproduce` makes published tables and figures again, `sweep` trains a grid.

What they do is in `experiments.study` and `experiments.sweep`, and each study in a file of `reproductions/`; here are
the words around it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from rich.text import Text
from tyro.conf import Positional, arg

from ellzero.cli import opening
from ellzero.cli.console import FAILED, INTERRUPTED, CommandError, drawn, foreseen, refuse, say, show, show_json, tell
from ellzero.cli.opening import ChosenFields, DataDir, Device, Every, Fields, RecipeName, Workers, option
from ellzero.experiments import study as making
from ellzero.experiments import sweep as sweeping
from ellzero.experiments.campaign import AT_ONCE, Record, counted, lengths
from ellzero.experiments.figures import NAMES, PlotsMissingError, can_draw
from ellzero.experiments.study import Reproduction, Study
from ellzero.experiments.sweep import Sweep
from ellzero.experiments.train.loop import Stopped
from ellzero.experiments.train.watching import Bar
from ellzero.out.tables import new_table

T = TypeVar("T")
_Other = Literal["mnist", "mnist5k", "shakespeare", "tinyshakespeare", "sonnets"]


def reproduce(
    name: Annotated[str | None, Positional, option("[STUDY]")] = None,
    seeds: Annotated[int | None, option("N", "the study's, mostly 5")] = None,
    first_seed: Annotated[int, arg(metavar="N")] = 0,
    epochs: Annotated[int | None, option("N", "the paper's")] = None,
    device: Device = "auto",
    data: Annotated[_Other | None, arg(help_behavior_hint="(default: the paper's)")] = None,
    data_dir: DataDir = None,
    only: Annotated[str | None, option("PATTERN")] = None,
    every: Annotated[int, arg(metavar="N")] = 1,
    at_once: Annotated[int | None, option("N", f"{AT_ONCE}, and 1 in the arena")] = None,
    out: Annotated[str | None, option("FOLDER", "runs/reproduce/STUDY")] = None,
    resume: bool = False,
    fresh: bool = False,
    draw_only: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Make a published table or figure again, ours beside the paper's; without STUDY list what there is.

    For example:

    $ ellzero reproduce
    $ ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3
    $ ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3 --resume
    $ ellzero reproduce gallego2021-table1 --only 'gallego-mlp*' --device cuda
    $ ellzero reproduce louizos2018-figure2
    $ ellzero reproduce arena --only 'lenet5-*' --device cuda --at-once 8

    All runs of a row, and rows that differ in their objective alone, train together; networks with batch norm do not.
    Ctrl-C saves, and --resume goes on. The folder then holds a json for each row, and the figures (extra `plots`).

    Args:
        name: name of a study; all are listed if it is absent.
        seeds: runs of each row, with the first seed and those after it.
        first_seed: for further seeds, in another folder: --draw-only joins ROW.seedN.json to the ROW.json beside it.
        epochs: with gates that learn, in place of the recipes' own; fewer shorten the fine-tuning after them alike.
        device: where to train; auto is a GPU if there is one.
        data: in place of the recipes' own; mnist5k, a part of MNIST, and sonnets come with the library.
        data_dir: folder of the data's files; else $ELLZERO_DATA, else the user's cache, to which they are downloaded.
        only: the rows whose recipe's name matches, such as 'louizos-mlp*'; several with commas between them.
        every: evaluate after every N epochs, and after the last.
        at_once: train no more than N runs together; those of the arena in N processes.
        out: folder of the reproduction.
        resume: go on with the reproduction in the folder, or begin one if there is none.
        fresh: remove the reproduction in the folder, and begin again.
        draw_only: train nothing: print the table and draw the figures from what is in the folder.
        json: print the records as JSON.
        quiet: show no progress.
    """
    known = making.studies()
    if name is None:
        _list(known, json)
        return
    study = making.find(name, known)
    given = {"seeds": seeds, "epochs": epochs, "data": data, "data-dir": data_dir, "only": only}
    asked = _asked(study, given, every, at_once, first_seed, resume + fresh + draw_only)
    home = Path("runs", "reproduce", study.name) if out is None else Path(out)
    records = _stored(asked, home) if draw_only else _made(asked, home, data_dir, device, resume, fresh, quiet)
    _show_study(study, records, home, json)


def _list(known: dict[str, Study], json: bool) -> None:
    if json:
        show_json([{"name": s.name, "title": s.title, "rows": len(s.names), "seeds": s.seeds} for s in known.values()])
        return
    table = new_table("", ("study", "what", "runs"), fold=True)
    for study in known.values():
        runs = "none" if study.compute is not None else f"{len(study.names)} rows × {counted(study.seeds, 'seed')}"
        table.add_row(study.name, Text(study.title), runs)
    show(table)
    say("For example: ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3")


def _asked(
    study: Study, given: dict[str, Any], every: int, at_once: int | None, first_seed: int, ways: int
) -> Reproduction:
    opening.refuse_below_one(seeds=given["seeds"], epochs=given["epochs"], every=every, at_once=at_once)
    refuse(ways > 1, "`--resume`, `--fresh` and `--draw-only` exclude each other: give one of them")
    opening.refuse_several("reproduce")
    if study.compute is not None:
        for name, value in given.items():
            refuse(value is not None, f"`--{name}` must be absent: `{study.name}` trains nothing, got {value}")
        if not _drawable(study):
            raise PlotsMissingError
    together = at_once or (1 if study.contests else AT_ONCE)
    refuse(first_seed < 0, f"`--first-seed` must be at least 0, got {first_seed}")
    refuse(not study.rows and first_seed, f"`--first-seed` must be absent: `{study.name}` has no rows of recipes")
    refuse(study.contests and every > 1, "`--every` must be absent: the arena looks at the last epoch alone")
    with foreseen(ValueError):
        return Reproduction(
            study, given["seeds"], given["epochs"], given["data"], given["only"] or "*", every, together,
            first_seed,
        )  # fmt: skip


def _drawable(study: Study) -> bool:
    return study.draw is None or can_draw()


def _stored(asked: Reproduction, home: Path) -> list[Record]:
    if not _drawable(asked.study):
        raise PlotsMissingError
    records, missing = making.stored(asked.study, home, asked.only)
    if missing:
        tell(f"not there yet: {', '.join(missing)}")
    return records


def _made(
    asked: Reproduction, home: Path, data_dir: str | None, device: Device, resume: bool, fresh: bool, quiet: bool
) -> list[Record]:
    if not _drawable(asked.study):
        tell(f"no figures will be drawn: {PlotsMissingError()}, and draw them later by `--draw-only`")
    options: Any = (  # each with what it is where it is not given
        ("seeds", asked.seeds, None), ("epochs", asked.epochs, None), ("data", asked.data, None),
        ("data-dir", data_dir, None), ("only", asked.only, "*"), ("every", asked.every, 1),
        ("at-once", asked.at_once, 1 if asked.study.contests else AT_ONCE), ("device", device, "auto"),
        ("out", home, None), ("first-seed", asked.first_seed, 0),
    )  # fmt: skip
    words = [(f"--{name}", str(value)) for name, value, usual in options if value not in (None, usual)]
    again = shlex.join(["ellzero", "reproduce", asked.study.name, *chain(*words), "--resume"])
    fewer = f"try fewer runs together than {asked.at_once}, by `--at-once` and a new folder"
    work = partial(making.reproduce, asked, opening.Loader(data_dir, device), home, resume=resume, fresh=fresh)
    return _trained(work, again, fewer, quiet)


def _trained(work: Callable[..., T], again: str, fewer: str, quiet: bool) -> T:
    """What the training of many runs gives; where it ends early, `again` goes on, and `fewer` needs less memory."""
    with foreseen(ValueError):
        try:
            return work() if quiet else work(watchers=[Bar()], say=tell)
        except Stopped as stopped:
            raise CommandError(f"{stopped}: saved; resume with: {again}", INTERRUPTED) from stopped
        except KeyboardInterrupt:  # the second one, which does not wait for the step
            raise CommandError(f"interrupted; what was saved goes on with: {again}", INTERRUPTED) from None
        except torch.OutOfMemoryError as error:
            raise CommandError(f"{error}; {fewer}", FAILED) from error


def _show_study(study: Study, records: list[Record], home: Path, json: bool) -> None:
    files = study.draw(records, home / making.FIGURES) if study.draw is not None and can_draw() else []
    if json:
        show_json(records)
        return
    if study.table is not None:
        epochs, runs = lengths(r["recipe"] for r in records), {len(r["seeds"]) for r in records}
        data = " and ".join(dict.fromkeys(r["recipe"]["data"] for r in records))
        devices = ", ".join(dict.fromkeys(str(r["device"]) for r in records))
        seeds = f"{' or '.join(map(str, sorted(runs)))} seed{'s' * (runs != {1})}"
        show(study.table(records, f"{study.title}; {data}, {epochs}, {devices}, {seeds}"), width=190)
    say(*(study.says(records) if study.says is not None else ()))
    say(f"results: {home}", *drawn(files))


def sweep(
    recipe: RecipeName = None,
    seeds: Annotated[int | None, option("N", "1")] = None,
    out: Annotated[str | None, option("FOLDER", "runs/sweep/RECIPE")] = None,
    resume: bool = False,
    fresh: bool = False,
    device: Device = "auto",
    data_dir: DataDir = None,
    at_once: Annotated[int | None, option("N", "what the device has room for")] = None,
    every: Every = None,
    workers: Workers = None,
    cost_axis: Literal["auto", "params", "macs", "l0_norm"] = "auto",
    json: bool = False,
    quiet: bool = False,
    fields: ChosenFields = Fields(),  # noqa: B008 (never written to)
) -> None:
    """Train a grid of values × seeds, and show which points no other beats in error and cost.

    For example:

    $ ellzero sweep demo --at-most 0.05,0.1,0.2,0.4 --seeds 3
    $ ellzero sweep louizos-mlp --penalty 0.03,0.1,0.3,1 --epochs 50 --out runs/lambda
    $ ellzero sweep budget-lenet5 --at-most 0.05,0.1 --gate-lr 1e-3,1e-2 --cost-axis params
    $ ellzero sweep --network my_module:make --data my_module:load --cost macs --at-most 0.1,0.3 --epochs 30
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
        workers: processes that make the samples of a data set of your own.
        cost_axis: what the front weighs error against, as it is kept at the end; auto is what at_most
            bounds, else params.
        json: print what is in sweep.json.
        quiet: show no progress.
        fields: of the recipe, one value or several with commas between, each written as in TOML:
            --at-most 0.1,0.2, --gate-lr none,1e-2, --at-most '{"fc1" = 0.2},{"fc1" = 0.4}', --milestones '[60],[80]'.
    """
    opening.refuse_below_one(seeds=seeds, every=every, at_once=at_once)
    refuse(resume and fresh, "`--resume` and `--fresh` exclude each other: give one of them")
    opening.refuse_several("sweep")
    chosen, home, before = _chosen(recipe, out, resume, seeds, every, fields)
    directory = before.get("data_dir") if data_dir is None else data_dir
    load = opening.Loader(directory, device, before.get("device"), workers)
    if recipe is None and (own := opening.unnamed_recipe(_first(fields), load)):
        chosen = replace(chosen, recipe=own)
    about = {"data_dir": None if directory is None else str(Path(directory).resolve())}
    work = partial(sweeping.run, chosen, load, home, resume=resume, fresh=fresh, at_once=at_once, about=about)
    _show_sweep(_swept(work, home, None if cost_axis == "auto" else cost_axis, quiet), home, json)


def _chosen(
    recipe: str | None, out: str | None, resume: bool, seeds: int | None, every: int | None, fields: Any
) -> tuple[Sweep, Path, Record]:
    """What is to be done and where, and what is known from before of where its results come from."""
    with foreseen(ValueError):
        grid = {name: sweeping.values_of(name, text) for name, text in opening.typed(fields).items()}
        found = opening.unnamed_recipe(_first(fields)) if recipe is None else opening.find_recipe(recipe)
        if found is not None:
            opening.tell_of_tuning(found, grid)
            home = Path("runs", "sweep", found.name) if out is None else Path(out)
            begun = resume and (home / "sweep.json").exists()
            asked = Sweep(found, grid, seeds or 1, every or 1)
            return asked, home, sweeping.stored(home)[1]["about"] if begun else {}
        if out is None or not resume:
            such = "such as `ellzero sweep demo --at-most 0.1,0.2` (`ellzero recipes` lists them)"
            raise CommandError(
                f"`RECIPE` must be given, {such}, or `--network` and `--data`, or `--resume --out FOLDER`"
            )
        there, record = sweeping.stored(Path(out))
        asked = Sweep(there.recipe, {**there.grid, **grid}, seeds or there.seeds, every or there.every)
        return asked, Path(out), record["about"]


def _first(fields: Any) -> Fields:
    """Of several values of a field the first."""
    return Fields(**{name: sweeping.parts_of(name, text)[0] for name, text in opening.typed(fields).items()})


def _swept(work: Callable[..., Record], home: Path, cost: str | None, quiet: bool) -> Record:
    if not can_draw() and not quiet:
        tell(f"no figure will be drawn: {PlotsMissingError()}, and draw it later by `--resume`")
    axis = [] if cost is None else ["--cost-axis", cost]
    again = shlex.join(["ellzero", "sweep", "--resume", "--out", str(home), *axis])
    return _trained(partial(work, cost=cost), again, f"fewer runs together need less: {again} --at-once N", quiet)


def _show_sweep(record: Record, home: Path, json: bool) -> None:
    files = sweeping.draw(record, home) if can_draw() else []
    if json:
        show_json(record)
        return
    show(sweeping.table(record), width=172)
    stacks, points = record["stacks"], record["points"]
    seconds, runs = (sum(stack[what] for stack in stacks) for what in ("seconds", "runs"))
    devices = ", ".join(dict.fromkeys(str(stack["about"].get("device")) for stack in stacks))
    front = f"last error against kept {NAMES[record['cost']]}, means over seeds"
    say(f"*: on the front of {front}; {runs} runs in {seconds:.0f} s on {devices}")
    if any(p["runs"] and p["emptied"] for p in points):
        say("layer empty: in some run a layer has nothing left, so that there is no network to hand over")
    say(*(f"diverged: {p['label']}: {p['diverged'][0]}" for p in points if p["diverged"]))
    say(f"results: {home / 'sweep.json'}", *drawn(files))
    if record["front"]:
        point = points[record["front"][0]]
        run = point["runs"][0]
        command = ["ellzero", "compact", str(home / "stacks" / run["stack"]), "--index", str(run["index"])]
        say(f"a network of the front as a file ({point['label']}, seed {run['seed']}): {shlex.join(command)}")
