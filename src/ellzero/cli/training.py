"""The commands that begin: `recipes` lists what can be trained, `train` begins a run or takes one up again.

The loop is in `experiments.train`, and what it leaves on the disk in `experiments.store`; here are the words around it.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from tyro.conf import Positional, arg

from ellzero import page
from ellzero.cli import opening
from ellzero.cli.console import FAILED, INTERRUPTED, CommandError, foreseen, refuse, say, show, show_json, tell, warn
from ellzero.cli.opening import ChosenFields, DataDir, Device, Every, Fields, RecipeName, Workers, option
from ellzero.experiments.data import Dataset, Samples, Tensors
from ellzero.experiments.papers import RECIPES
from ellzero.experiments.recipe import Recipe, differences
from ellzero.experiments.store.checkpoint import steps
from ellzero.experiments.store.folder import COMPACT, Folder, FolderError
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.train import fitting, loop, processes
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher, Bar, TensorBoard
from ellzero.gated.module import Gated
from ellzero.out.files import FileError
from ellzero.out.reporting import report
from ellzero.out.saving import save
from ellzero.out.tables import new_table


def recipes(
    name: Annotated[str | None, Positional, option("[NAME]")] = None, json: bool = False, toml: bool = False
) -> None:
    """List the named recipes, or print one in full.

    For example: ellzero recipes gallego-mlp > mine.toml

    Args:
        name: of a recipe, or a TOML file; all of them if absent.
        json: print JSON, all fields.
        toml: print TOML, all fields, as for one recipe.
    """
    refuse(json and toml, "`--json` and `--toml` exclude each other")
    if name is not None:
        recipe = opening.find_recipe(name)
        show_json(recipe.to_dict()) if json else say(recipe.to_toml().rstrip())
    elif json:
        show_json([recipe.to_dict() for recipe in RECIPES.values()])
    elif toml:
        say("\n".join(f'["{name}"]\n{recipe.to_toml()}' for name, recipe in RECIPES.items()).rstrip())
    else:
        table = new_table("", ["name", "network", "data", "objective"], ["epochs"], fold=True)
        for recipe in RECIPES.values():
            tuned = f" + {recipe.finetune_epochs}" if recipe.finetune_epochs else ""
            table.add_row(recipe.name, recipe.network, recipe.data, _objective(recipe), f"{recipe.epochs}{tuned}")
        show(table)
        say("`ellzero recipes NAME` prints one in full, `ellzero train NAME` trains it.")


def _objective(recipe: Recipe) -> str:
    """In a few words."""
    if recipe.placement is None:
        return "dense" if not recipe.dropout else f"dense, dropout {recipe.dropout}"
    value = recipe.at_most if recipe.penalty is None else recipe.penalty
    words = f"{recipe.on} {recipe.cost} ≤" if recipe.penalty is None else "penalty, c ="
    if not isinstance(value, dict):
        return f"{words} {value:g}"
    if len(value) > 4 and len(set(value.values())) == 1:
        return f"{words} {next(iter(value.values())):g} each"
    return f"{words} {', '.join(f'{name} {number:g}' for name, number in value.items())}"


def train(
    recipe: RecipeName = None,
    out: Annotated[str | None, option("FOLDER", "runs/NAME-seedN")] = None,
    resume: Annotated[str | None, option("FOLDER")] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    every: Every = None,
    workers: Workers = None,
    save_seconds: Annotated[float, arg(metavar="S")] = 60.0,
    tensorboard: bool = False,
    json: bool = False,
    quiet: bool = False,
    fields: ChosenFields = Fields(),  # noqa: B008 (never written to)
) -> None:
    """Train a recipe, and make the compact network of it; or take up a run that was stopped.

    For example:

    $ ellzero train demo
    $ ellzero train gallego-mlp --at-most 0.2 --epochs 100 --seed 3 --out runs/fifth
    $ ellzero train --network my_module:make --data my_module:load --cost macs --at-most 0.3
    $ ellzero train --resume runs/demo-seed0

    Without RECIPE, what is not said is as `ellzero.Budget` has it. Ctrl-C ends it after the step, and saves. The run's
    folder then holds its recipe, history, checkpoints and results, compact.safetensors, the small network, and
    page.html, which shows the run (with the extra `page`).

    Args:
        recipe: name of a recipe (`ellzero recipes` lists them), or a TOML file.
        out: folder of the new run.
        resume: folder of a run to go on with; it needs no recipe beside it.
        data_dir: folder of the data's files; else $ELLZERO_DATA, else the user's cache, to which they are downloaded.
        device: where to train; auto is a GPU if there is one, and for a run that is resumed what it was begun on.
        every: evaluate after every N epochs, and after the last.
        workers: processes that make the samples of a data set of your own; whatever N is, the run is the same.
        save_seconds: seconds between two checkpoints.
        tensorboard: also write event files for TensorBoard, into the run's folder.
        json: print the result as JSON.
        quiet: show no progress.
        fields: of the recipe, in place of its own values, written as in TOML: --at-most 0.2, --gate-lr none,
            --at-most '{"fc1" = 0.2}', --milestones '[60, 120]'.
    """
    opening.refuse_below_one(every=every)
    refuse(not save_seconds >= 0, f"`--save-seconds` must be at least 0, got {save_seconds}")
    run = _new(recipe, out, fields) if resume is None else _old(resume, recipe, out, fields)
    data_dir = run.about.get("data_dir") if data_dir is None else data_dir
    every = every or run.about.get("every") or 1
    watchers = _watchers(quiet, run.path / "tensorboard", tensorboard)
    kind = opening.find_device(device, run.about.get("device"))
    workers = run.about.get("workers") if workers is None else workers
    try:
        with processes.group(kind) as where, foreseen(), opening.begun_in(run):
            dataset = opening.load_data(run.recipes[0].data, data_dir, where, workers)  # before there is a folder
            run = _made(run, recipe, fields, dataset, data_dir, every, workers) if resume is None else run
            trainer = _trained(run, dataset, resume is None, every, watchers, save_seconds)
            if processes.rank() == 0:
                _finish(run, trainer.network(0), dataset, json)
    except processes.ProcessError as error:
        hint = f"; it goes on from its newest checkpoint with: {_again(run.path)}"
        raise CommandError(f"{error}{hint * (run.path / 'run.json').exists()}", FAILED) from error


def _new(recipe: str | None, out: str | None, fields: Any) -> Folder:
    """The run that is asked for; its folder is not there yet."""
    chosen = opening.unnamed_recipe(fields) if recipe is None else opening.override(opening.find_recipe(recipe), fields)
    if chosen is None:
        lists = "(`ellzero recipes` lists them), or `--network` and `--data` of your own"
        raise CommandError(f"`RECIPE` must be given, such as `ellzero train demo` {lists}, or `--resume FOLDER`")
    home = Path("runs", f"{chosen.name}-seed{chosen.seed}") if out is None else Path(out)
    refuse(home.exists() and not home.is_dir(), f"`--out` must be a folder, got the file {str(home)!r}")
    ways = f"{_again(home)} continues it, another `--out` begins a new one"
    refuse((home / "run.json").exists(), f"{str(home)!r} holds a run already: {ways}")
    return Folder(home, [chosen], {})


def _old(path: str, recipe: str | None, out: str | None, fields: Any) -> Folder:
    """The run to go on with, which must be of the recipe that is asked for, if one is."""
    both = "`--out` is for a new run, and `--resume` goes on in the run's own folder: give one of them"
    refuse(out is not None, both)
    folder = opening.open_run(path)
    own, *others = folder.recipes
    begun = folder.about.get("command")
    hint = f"; it goes on with the command that began it: {begun}" if begun else ""
    refuse(others, f"{path!r} holds a stack of {len(folder.recipes)} runs{hint}")
    asked = opening.override(own if recipe is None else opening.find_recipe(recipe), fields)
    differ = differences(own.to_dict(), {**asked.to_dict(), "name": own.name})
    refuse(
        asked.digest() != own.digest(),
        f"{path!r} is a run of another recipe: {'; '.join(differ)}. "
        f"`--resume` alone goes on with its own; a run of another recipe needs a folder of its own (`--out`)",
    )
    return folder


def _watchers(quiet: bool, board: Path, asked: bool) -> list[AbstractWatcher]:
    watchers: list[AbstractWatcher] = [] if quiet else [Bar()]
    if asked or board.is_dir():
        try:
            watchers.append(TensorBoard(board))
        except ImportError as error:
            raise CommandError(str(error), FAILED) from error
    return watchers


def _again(home: Path) -> str:
    """The command that goes on with a run, with as many processes."""
    start = ["ellzero"]
    if processes.launched():
        start = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "ellzero"]
        if (nodes := os.environ.get("GROUP_WORLD_SIZE", "1")) != "1":
            start[1:1] = ["--nnodes", nodes]
    return shlex.join([*start, "train", "--resume", str(home)])


def _made(
    run: Folder, named: str | None, fields: Any, dataset: Dataset, data_dir: str | None, every: int, workers: int | None
) -> Folder:
    """A new run's folder: one process makes it, which has its lock from then on, and all know whether it could. A run
    of no recipe has gates that learn for as long as suits so many images.
    """
    if named is None and (own := opening.unnamed_recipe(fields, lambda _: dataset)):
        run = Folder(run.path, [own], {})
    about = {**provenance(dataset.device), **fitting.sources(run.recipes[0], dataset), "every": every}
    about["data_dir"] = None if data_dir is None else str(Path(data_dir).resolve())
    about |= {} if workers is None else {"workers": workers}
    problem = folder = None
    if processes.rank() == 0:
        opening.tell_of_tuning(run.recipes[0], opening.typed(fields))
        try:
            folder = Folder.create(run.path, run.recipes, about, lock=True)
        except (FileError, FolderError) as error:
            problem = str(error)
    if (problem := processes.gathered(problem)[0]) is not None:
        raise CommandError(problem, FAILED)
    folder = folder or opening.open_run(str(run.path))
    processes.gathered(None)  # all have opened it, before one may find that the run cannot begin
    return folder


def _trained(
    folder: Folder, data: Dataset, new: bool, every: int, watchers: Sequence[AbstractWatcher], save_seconds: float
) -> Trainer:
    if data.device.type == "cuda" and processes.rank() == 0 and fitting.goes_plainly(folder.recipes[0], data):
        hint = "" if isinstance(data, Samples) else "; `--compile true` says that it does not, and is faster"
        tell(f"ellzero: steps are not captured on the GPU, as code of your own may do another thing in each{hint}")
    try:
        with foreseen(ValueError), _own(folder) if new and processes.rank() == 0 else nullcontext():
            return loop.train(folder.recipes, data, folder, every=every, watchers=watchers, save_seconds=save_seconds)
    except loop.Stopped as stopped:
        raise CommandError(f"{stopped}: saved; resume with: {_again(folder.path)}", INTERRUPTED) from stopped
    except KeyboardInterrupt as error:  # the second one, which does not wait for the step
        if not (saved := steps(folder.checkpoints)):
            raise
        message = f"interrupted; the newest checkpoint is of step {saved[-1]}; resume with: {_again(folder.path)}"
        raise CommandError(message, INTERRUPTED) from error


@contextmanager
def _own(folder: Folder) -> Iterator[None]:
    """Removes a new run that has neither trained a step nor noted anything: it would only be in the way of the next
    try. It is locked meanwhile: nobody else's run goes.
    """
    with folder.locked():
        try:
            yield
        finally:
            with suppress(OSError, FolderError):
                if not folder.history() and not steps(folder.checkpoints):
                    with suppress(FileNotFoundError):
                        folder.checkpoints.rmdir()
                    (folder.path / "run.json").unlink()
                    folder.path.rmdir()  # if nothing else is in it


def _finish(folder: Folder, network: nn.Module, dataset: Dataset, json: bool) -> None:
    recipe, file = folder.recipes[0], folder.path / COMPACT
    small = opening.small_network(network)
    save(small, file)
    error, parameters = opening.error_of(small, recipe, dataset), opening.size(small)
    seen = _page(folder, network, dataset)
    worthless = _worthless(folder, error, dataset)
    if worthless is not None:
        warn(worthless)
    if json:
        result = (folder.results() or [{}])[0]
        done = {"file": str(file), "error": error, "parameters": parameters}
        written = str(seen) if isinstance(seen, Path) else None
        about = {"run": str(folder.path), "result": result, "compact": done, "page": written, "warning": worthless}
        show_json(about)
        return
    if isinstance(network, Gated):
        show(report(network))
    kind = "compact" if isinstance(network, Gated) else "dense"
    say(
        "",
        *_cut(folder),
        f"Test {recipe.error} of the {kind} network: {recipe.told(error)} ({parameters:,} parameters).",
        f"The {kind} network: {file} ({file.stat().st_size / 1e6:.2f} MB)",
        f"Recipe, history, checkpoints, results: {folder.path}",
        f"Page: {seen}" if isinstance(seen, Path) else f"No page: {seen}",
        "In Python:",
        *(f"    {line}" for line in opening.loading(recipe, file, loop.noise_like(folder, 1))),
    )


def _worthless(folder: Folder, error: float, dataset: Dataset) -> str | None:
    """Why the network is of no use, if it is not: numbers that stay finite say nothing else of a broken training."""
    if not folder.recipes[0].in_percent or not isinstance(dataset, Tensors):
        return None
    answers = dataset.test_y.flatten()  # of a text, one for each place
    guessing = 100 * (1 - int(answers.bincount().max()) / len(answers))
    losses = [h["loss"] for h in folder.history() if h["loss"] is not None]
    alike = math.log(len(dataset.classes))
    if error >= guessing:
        what = f"the test error, {error:.2f} %, is not below {guessing:.2f} %, that of always answering one class"
    elif losses and losses[-1] > alike:
        what = f"the last training loss, {losses[-1]:.3g}, is above {alike:.3g}, that of answering all classes alike"
    else:
        return None
    return f"the training has not worked: {what}; try a smaller `lr` or `gate_lr`, or more epochs"


def _cut(folder: Folder) -> list[str]:
    """What `finalize` or settling had to do: much of it means that the gates had too little time."""
    recipe, history = folder.recipes[0], folder.history()
    learned = [h for h in history if not h["tuning"]]
    if recipe.settles:  # its own record comes after it
        before = next((h["shrunk"] for h in history if h.get("shrunk", {}).get("settled")), None)
        error, by = "", f"settling after epoch {recipe.settle_at}"
    elif recipe.finalize and learned:
        before = learned[-1]
        error, by = f", with {recipe.told(before['error'])} {recipe.error}", "`finalize`"
    else:
        before = None
    if before is None:
        return []
    cost = recipe.cost if recipe.cost in before["kept"] else "macs"  # a time is not in the history
    kept = [f"{100 * h['kept'][cost]:.1f} %" for h in (before, history[-1])]
    return [f"When the gates had learned, {kept[0]} of {cost} were kept{error}; {by} made it {kept[1]}."]


def _page(folder: Folder, network: nn.Module, dataset: Dataset) -> Path | str:
    """The run's page, or why there is none: the run is finished and safe, whatever comes of it."""
    if not page.can_make():
        return str(page.PageMissingError())
    try:
        network = network.cpu().eval()
        page.measure_run(folder, network)
        recipe = folder.recipes[0]
        epochs, steps = recipe.epochs + recipe.finetune_epochs, dataset.sizes[0] // recipe.batch
        seen = page.look(network, recipe, dataset.shape, epochs, steps)
        return page.write(page.run_page(folder, seen=seen), page.page_file(folder))
    except (FileError, FolderError) as error:
        return str(error)
