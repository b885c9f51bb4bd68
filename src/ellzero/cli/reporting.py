"""The command that shows runs: `report`. It prints what is left of a network, and makes the page of one run or several.

What is on a page is in `page`; here are the words around it. Of a run it changes nothing but its page, and
latency.json where it is asked to measure.
"""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

from torch import nn
from tyro.conf import Positional, arg

from ellzero import page
from ellzero.cli.app import FAILED, CommandError, app, foreseen, say, show, tell
from ellzero.cli.opening import Index, choose, open_run, restored
from ellzero.experiments.figures import PlotsMissingError, can_draw
from ellzero.experiments.store.folder import Folder
from ellzero.gated.module import Gated
from ellzero.out.reporting import report as make_report

Words = Literal["json", "markdown"] | None  # how the report is printed; None is a table


@app.command
def report(
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="RUN", help_behavior_hint="")] = (),
    open: bool = False,
    serve: bool = False,
    json: bool = False,
    markdown: bool = False,
    figures: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="")] = None,
    out: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    speed: bool = False,
    index: Index = None,
    port: Annotated[int, arg(metavar="N")] = 0,
) -> None:
    """Print what is left of the network of a run, and make its HTML page; or a page that compares several runs.

    For example:

    $ ellzero report runs/demo-seed0 --open
    $ ellzero report runs/demo-seed0 --markdown
    $ ellzero report runs/* --out report.html --figures figures
    $ ellzero report --serve runs/demo-seed0

    The page is one file that needs no network: page.html in the run's folder. It takes the extra `page`, figures the
    extra `plots`. The run need not be finished, and its data are not needed.

    Args:
        runs: folder of a run, finished or not; of a sweep or a reproduction; or several of them.
        open: open the page in the browser.
        serve: serve the page of a run on this machine alone, and keep it up to date while the run goes on; Ctrl-C ends
            it.
        json: print JSON, and make no page unless `--out` or `--open` is given.
        markdown: print markdown, likewise.
        figures: draw every figure as PNG and SVG into this folder.
        out: file of the page, in place of page.html in RUN, or of report.html for several runs.
        speed: also measure how long the dense and the compact network take, for about two seconds.
        index: which run of a stack, from 0.
        port: of `--serve`; 0 is any that is free.
    """
    if json and markdown:
        raise CommandError("`--json` and `--markdown` exclude each other")
    if not 0 <= port <= 65535:
        raise CommandError(f"`--port` must be from 0 to 65535, got {port}")
    if figures is not None and not can_draw():
        raise CommandError(str(PlotsMissingError()), FAILED)
    if not runs:
        raise CommandError("`RUN` must be given, such as `ellzero report runs/demo-seed0`")
    if serve:
        if len(runs) != 1 or json or markdown or out is not None or figures is not None:
            raise CommandError("`--serve` takes one run, and goes with `--index`, `--port` and `--open` alone")
        _serve(runs[0], index, port, open)
    elif len(runs) > 1 or _holds_runs(runs[0]):
        if json or markdown or speed or index is not None:
            raise CommandError("`--json`, `--markdown`, `--speed` and `--index` are for one run")
        _several(runs, out, figures, open)
    else:
        _one(runs[0], index, "json" if json else "markdown" if markdown else None, speed, figures, out, open)


# ---------------------------------------------------------------- one run


def _one(
    run: str, index: int | None, words: Words, speed: bool, figures: str | None, out: str | None, open: bool
) -> None:
    folder = open_run(run)
    number = choose(folder, index)
    _print(folder, number, words, speed)
    if figures is not None:
        with foreseen():
            _drawn(page.run_figures(folder, Path(figures), number), quiet=words is not None)
    asked = out is not None or open
    if words is not None and not asked:
        return
    if not asked and not page.can_make():
        say(f"No page: {page.PageMissingError()}")
        return
    _need_pages()
    with foreseen():
        target = page.page_file(folder, number) if out is None else Path(out)
        _made(page.write(page.run_page(folder, number), target), open, quiet=words is not None)


def _print(folder: Folder, number: int, words: Words, speed: bool) -> None:
    network = _network(folder, number)
    if isinstance(network, Gated):
        made = make_report(network, speed=speed)
        if words == "json":
            say(made.json())
        elif words == "markdown":
            say(made.markdown().rstrip())
        else:
            show(made)
        if speed:
            with foreseen():
                page.measure_run(folder, network)
    elif network is None:
        if words is not None:
            restored(folder)  # says why there is no network
    elif words is not None:
        where = str(folder.path)
        raise CommandError(f"{where!r} trained the dense network, without gates: there is nothing to report on")
    else:
        say(f"{folder.recipes[number].name} trained the dense network, without gates.")


def _network(folder: Folder, number: int) -> nn.Module | None:
    """The network of a run; None where there is no checkpoint that can be read but a history, which a page can show."""
    try:
        return restored(folder).network(number).cpu()
    except CommandError as error:
        with foreseen():
            if not folder.history():
                raise
        tell(f"ellzero: {error}; the page shows the history alone")
        return None


def _holds_runs(path: str) -> bool:
    """Whether a folder is no run itself, but one above runs: a sweep, a reproduction."""
    home = Path(path)
    return home.is_dir() and not (home / "run.json").exists() and bool(page.collect([path])[0])


def _serve(run: str, index: int | None, port: int, open: bool) -> None:
    _need_pages()
    folder = open_run(run)
    number = choose(folder, index)
    with foreseen():
        folder.history()  # a damaged one is told now, not in the browser
        server = page.Server(folder, number, port)
    with server:
        say(f"{server.address} shows {run} and follows it. Ctrl-C ends this.")
        sys.stdout.flush()
        if open:
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("")


# ---------------------------------------------------------------- several


def _several(runs: tuple[str, ...], out: str | None, figures: str | None, open: bool) -> None:
    found, notes = page.collect(runs)
    if not found:
        rest = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        why = f"{str(notes[0].where)!r}: {notes[0].why}" if notes else ", ".join(runs)
        raise CommandError(f"none of these is a finished run: {why}{rest}")
    for note in notes:
        tell(f"ellzero: {str(note.where)!r} is left out: {note.why}")
    if figures is not None:
        with foreseen():
            _drawn(page.runs_figures(runs, Path(figures)))
    _need_pages()
    target = Path(out or "report.html")
    with foreseen():
        say(f"{len(found)} run{'s' * (len(found) != 1)}.")
        _made(page.write(page.runs_page(runs, target.parent), target), open)


# ---------------------------------------------------------------- what they share


def _need_pages() -> None:
    if not page.can_make():
        raise CommandError(str(page.PageMissingError()), FAILED)


def _made(file: Path, open: bool, quiet: bool = False) -> None:
    (tell if quiet else say)(f"Page: {file}")
    if open and not webbrowser.open(file.resolve().as_uri()):
        tell("ellzero: there is no browser to open it with")


def _drawn(files: list[Path], quiet: bool = False) -> None:
    """Names the pictures; where standard output is for a script, on standard error."""
    for file in files:
        if file.suffix in (".png", ".svg"):
            (tell if quiet else say)(f"figure: {file}")
