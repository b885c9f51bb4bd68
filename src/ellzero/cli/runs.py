"""The commands on a run: `evaluate` tests its network, `compact` writes it to files, `report` shows what is left of it.

The run may still be going on: its newest checkpoint counts. Nothing of it changes but compact.safetensors, its page and
latency.json, where `report` measures. What is on a page is in `page`; here are the words around it.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from tyro.conf import Positional, arg

from ellzero import page
from ellzero.cli import opening
from ellzero.cli.console import FAILED, CommandError, drawn, quiet, refuse, say, show, show_json, tell, warn
from ellzero.cli.opening import DataDir, Device, Index, RunPath, Workers, option
from ellzero.experiments.data import Dataset
from ellzero.experiments.figures import PlotsMissingError, can_draw
from ellzero.experiments.store.folder import COMPACT, Folder
from ellzero.experiments.train import building, evaluation
from ellzero.experiments.train.loop import noise_like
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.out.files import replacing
from ellzero.out.reporting import report as make_report
from ellzero.out.saving import load, save
from ellzero.out.tables import new_table

Check = Callable[[Tensor], Tensor]  # what a file computes


def evaluate(
    run: RunPath, data_dir: DataDir = None, device: Device = "auto", workers: Workers = None, json: bool = False
) -> None:
    """Test the network of a run, with its gates and made compact, and say what it costs.

    For example: ellzero evaluate runs/demo-seed0

    Args:
        run: folder of a run, finished or not.
        data_dir: folder of the data's files, if it is not the one that the run was begun with.
        device: where to test; auto is a GPU if there is one.
        workers: processes that make the samples of a data set of your own.
        json: print JSON.
    """
    folder = opening.open_run(run)
    where = opening.find_device(device)
    directory = folder.about.get("data_dir") if data_dir is None else data_dir
    with opening.begun_in(folder):
        dataset = opening.load_data(folder.recipes[0].data, directory, where, workers)
    trainer = opening.restored(folder, dataset)
    if not trainer.done:  # at its end that is done for good
        evaluation.recalibrate(trainer)
    found = [_evaluated(trainer, number, dataset) for number in range(len(folder.recipes))]
    finished = folder.results() is not None
    if json:
        show_json({"run": run, "finished": finished, "networks": found})
        return
    name = folder.recipes[0].error
    table = new_table("", ["recipe"], ["seed", name, "compact", "density", "parameters", "MACs"])
    for f in found:
        kept = [f"{100 * f['kept'][name]:.2f} %" for name in building.COSTS] if "kept" in f else ["dense"] * 3
        errors = (folder.recipes[0].told(f[key]) for key in ("error", "error_compact"))
        table.add_row(f["recipe"], str(f["seed"]), *errors, *kept)
    show(table)
    state = "finished" if finished else "not finished"
    say(f"After {trainer.epoch} epochs ({state}), on {dataset.sizes[1]:,} test examples of {dataset.name}.")
    say(f"{name}: with the test-time gates; compact: of the compact network, and what it has kept of the dense one.")


@torch.no_grad()
def _evaluated(trainer: Trainer, number: int, dataset: Dataset) -> dict[str, Any]:
    network, recipe = trainer.network(number), trainer.recipes[number]
    out: dict[str, Any] = {"recipe": recipe.name, "seed": recipe.seed, "epoch": trainer.epoch}
    out["error"] = opening.error_of(network, recipe, dataset)
    small = opening.small_network(network)
    out["error_compact"] = opening.error_of(small, recipe, dataset)
    out["parameters"] = opening.size(small)
    if isinstance(network, Gated):
        shares = {name: evaluation.fractions(cost, network) for name, cost in building.COSTS.items()}
        out |= {kind: {name: share[kind] for name, share in shares.items()} for kind in ("expected", "kept")}
    return out


def compact(
    run: RunPath,
    to: Annotated[tuple[str, ...] | None, option("FILE [FILE ...]", "compact.safetensors in RUN")] = None,
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
    refuse(to == (), "`--to` must be followed by at least one file, such as `--to small.onnx`, got none")
    folder = opening.open_run(run)
    number = opening.choose(folder, index)
    recipe = folder.recipes[number]
    files = [folder.path / COMPACT] if to is None else [Path(file) for file in to]
    for file in files:
        known = ".safetensors", ".pt2", ".onnx"
        refuse(file.suffix not in known, f"`--to` must be a file that ends in {', '.join(known)}, got {str(file)!r}")
        refuse(not file.parent.is_dir(), f"`--to` must lie in a folder that exists, got {str(file)!r}")
        refuse(file.is_dir(), f"`--to` must be a file, got the folder {str(file)!r}")
    trainer = opening.restored(folder)
    small = opening.small_network(trainer.network(number))
    if recipe.recalibrate and not trainer.done and recipe.facts.has_batch_norm:
        warn("the run is not finished: batch-norm statistics are those of training, and gathered anew at its end alone")
    noise = noise_like(folder, 3)
    example = noise.example(3)

    def fresh() -> nn.Module:
        return building.as_gated(recipe, recipe.facts.make(len(noise.classes), recipe.dropout), example)

    parameters, before = opening.size(small), opening.size(fresh())
    say(f"{recipe.name}, seed {recipe.seed}: {parameters:,} of {before:,} parameters ({parameters / before:.2%}).")
    for file in files:
        with replacing(file) as unfinished:
            reader, how = _write(small, unfinished, example, fresh)
            if reader is not None:
                _compare(small, reader, example, file)
        say(f"{file} ({file.stat().st_size / 1e6:.2f} MB; {how})")
        if file.suffix == ".safetensors":
            say(*(f"    {line}" for line in opening.loading(recipe, file, noise)))


def _write(network: nn.Module, path: Path, x: Tensor, fresh: Callable[[], nn.Module]) -> tuple[Check | None, str]:
    """Writes a network that takes batches of any size in the format of the ending; what reads it back, and how."""
    if path.suffix == ".safetensors":
        save(network, path)
        return load(fresh(), path).eval(), "loaded into a fresh network, same outputs"
    if path.suffix == ".onnx":
        return _write_onnx(network, path, x)
    with quiet():
        program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        return torch.export.load(path).module(), "loaded by torch.export, same outputs"


def _write_onnx(network: nn.Module, path: Path, x: Tensor) -> tuple[Check | None, str]:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    why = f"writing ONNX needs packages that are not installed ({', '.join(missing)})"
    refuse(missing, f"{why}: pip install 'ellzero[onnx]'", FAILED)
    with quiet():
        program: Any = torch.onnx.export(
            network, (x,), dynamo=True, verbose=False, input_names=["input"], output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
        program.save(str(path), external_data=False)
    if find_spec("onnxruntime") is None:
        return None, "not checked: onnxruntime is not installed"
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), "run by onnxruntime, same outputs"


def _compare(network: nn.Module, reader: Check, example: Tensor, path: Path) -> None:
    for count in dict.fromkeys((1, 2, len(example))):
        with torch.no_grad():
            ours, theirs = network(example[:count]), reader(example[:count])
        scale, worst = float(ours.abs().max()), float((ours - theirs).abs().max())
        differ = f"with a batch of {count} its outputs differ from the network's by {worst:.3g}"
        same = ours.shape == theirs.shape and worst <= 1e-4 * max(scale, 1.0)
        refuse(not same, f"{path.name} was not written: {differ}, where the largest is {scale:.3g}", FAILED)


def report(
    runs: Annotated[tuple[str, ...], Positional, option("[RUN ...]")] = (),
    open: bool = False,
    serve: bool = False,
    json: bool = False,
    markdown: bool = False,
    figures: Annotated[str | None, option("FOLDER")] = None,
    out: Annotated[str | None, option("FILE")] = None,
    speed: bool = False,
    full: bool = False,
    index: Index = None,
    port: Annotated[int, arg(metavar="N")] = 0,
) -> None:
    """Print what is left of the network of a run, and make its HTML page; or a page that compares several runs.

    For example:

    $ ellzero report runs/demo-seed0 --open
    $ ellzero report runs/demo-seed0 --markdown
    $ ellzero report runs/* --out report.html --figures figures
    $ ellzero report --serve runs/demo-seed0

    The page is one file that opens offline: page.html in the run's folder. It takes the extra `page`, figures the
    extra `plots`. The run need not be finished, and its data are not needed.

    Args:
        runs: folder of a run, finished or not; of a sweep or a reproduction; or several of them.
        open: open the page in the browser.
        serve: serve the page of a run on this machine alone, and keep it up to date while the run goes on.
        json: print JSON, and make no page unless `--out` or `--open` is given.
        markdown: print markdown, likewise.
        figures: draw every figure as PNG and SVG into this folder.
        out: file of the page, in place of page.html in RUN, or of report.html for several runs.
        speed: also measure how long the dense and the compact network take, for about two seconds.
        full: print every axis; without it, those of repeated layers share a line where there are more than twelve.
        index: which run of a stack, from 0.
        port: of `--serve`; 0 is any that is free.
    """
    refuse(json and markdown, "`--json` and `--markdown` exclude each other")
    refuse(not 0 <= port <= 65535, f"`--port` must be from 0 to 65535, got {port}")
    if figures is not None and not can_draw():
        raise PlotsMissingError
    refuse(not runs, "`RUN` must be given, such as `ellzero report runs/demo-seed0`")
    words = "json" if json else "markdown" if markdown else None
    if serve:
        alone = len(runs) == 1 and words is None and out is None and figures is None
        refuse(not alone, "`--serve` takes one run, and goes with `--index`, `--port` and `--open` alone")
        _serve(runs[0], index, port, open)
    elif len(runs) > 1 or _holds_runs(runs[0]):
        for_one = words is not None or speed or full or index is not None
        refuse(for_one, "`--json`, `--markdown`, `--speed`, `--full` and `--index` are for one run")
        _several(runs, out, figures, open)
    else:
        _one(runs[0], index, words, (speed, full), figures, out, open)


def _one(
    run: str,
    index: int | None,
    words: str | None,
    asked: tuple[bool, bool],
    figures: str | None,
    out: str | None,
    open: bool,
) -> None:
    """Prints the report, as a table where `words` is none of the formats, and makes the page if need be."""
    folder = opening.open_run(run)
    number = opening.choose(folder, index)
    _print(folder, number, words, *asked)
    aside = say if words is None else tell  # standard output is for a script then
    if figures is not None:
        aside(*drawn(page.run_figures(folder, Path(figures), number)))
    if out is not None or open or (words is None and page.can_make()):
        _need_pages()
        target = page.page_file(folder, number) if out is None else Path(out)
        _make(page.run_page(folder, number), target, open, aside)
    elif words is None:
        say(f"No page: {page.PageMissingError()}")


def _print(folder: Folder, number: int, words: str | None, speed: bool, full: bool) -> None:
    try:
        network = opening.restored(folder).network(number).cpu()
    except CommandError as error:
        if not folder.history():
            raise
        tell(f"ellzero: {error}; the page shows the history alone")
        if words is not None:
            raise
        return
    if isinstance(network, Gated):
        made = make_report(network, speed=speed, full=full)
        show(made) if words is None else say(made.json() if words == "json" else made.markdown().rstrip())
        if speed:
            page.measure_run(folder, network)
        return
    what = "trained the dense network, without gates"
    refuse(words is not None, f"{str(folder.path)!r} {what}: there is nothing to report on")
    say(f"{folder.recipes[number].name} {what}.")


def _holds_runs(path: str) -> bool:
    """Whether a folder is no run itself, but one above runs: a sweep, a reproduction."""
    home = Path(path)
    return home.is_dir() and not (home / "run.json").exists() and bool(page.collect([path])[0])


def _serve(run: str, index: int | None, port: int, open: bool) -> None:
    _need_pages()
    folder = opening.open_run(run)
    number = opening.choose(folder, index)
    folder.history()  # a damaged one is told now, not in the browser
    with page.Server(folder, number, port) as server:
        server.page()  # the first one takes seconds, and many may ask for it at once
        say(f"{server.address} shows {run} and follows it. Ctrl-C ends this.")
        sys.stdout.flush()
        if open:
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("")


def _several(runs: tuple[str, ...], out: str | None, figures: str | None, open: bool) -> None:
    found, notes = page.collect(runs)
    if not found:
        rest = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        why = f"{str(notes[0].where)!r}: {notes[0].why}" if notes else ", ".join(runs)
        raise CommandError(f"none of these is a finished run: {why}{rest}")
    tell(*(f"ellzero: {str(note.where)!r} is left out: {note.why}" for note in notes))
    if figures is not None:
        say(*drawn(page.runs_figures(runs, Path(figures))))
    _need_pages()
    target = Path(out or "report.html")
    say(f"{len(found)} run{'s' * (len(found) != 1)}.")
    _make(page.runs_page(runs, target.parent), target, open, say)


def _need_pages() -> None:
    if not page.can_make():
        raise page.PageMissingError


def _make(text: str, file: Path, open: bool, aside: Callable[[str], None]) -> None:
    aside(f"Page: {page.write(text, file)}")
    if open and not webbrowser.open(file.resolve().as_uri()):
        tell("ellzero: there is no browser to open it with")
