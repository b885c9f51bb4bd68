"""Pages: what a run, several runs and the method look like, each as one HTML file that needs nothing else.

`charts` has the look that they share; `facts` gathers what is known of a run and `run` makes its page; `runs` makes
that of several, `method` that of the hard concrete; `serve` shows the page of a run while it trains. Nothing here
trains, and nothing here knows the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ellzero.experiments import figures
from ellzero.experiments.store.folder import Folder
from ellzero.out.files import write_text, writing
from ellzero.page.charts import PageMissingError, can_make
from ellzero.page.facts import Look, look, measure_run
from ellzero.page.method import method_page
from ellzero.page.run import run_figures, run_page
from ellzero.page.runs import COSTS, collect, kinds, runs_page
from ellzero.page.serve import Server


def page_file(folder: Folder, index: int = 0) -> Path:
    """Where the page of a run is: page.html in its folder, with the number of the run in a stack.

    Args:
        folder: of the run.
        index: which run of a stack, from 0.
    """
    return folder.path / ("page.html" if len(folder.recipes) == 1 else f"page-{index}.html")


def write(text: str, path: Path) -> Path:
    """Writes a page, all of it or nothing.

    Args:
        text: HTML.
        path: of the file; folders above it are made.

    Returns:
        The file.

    Raises:
        FileError: it cannot be written.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def runs_figures(paths: Iterable[str | os.PathLike[str]], directory: Path) -> list[Path]:
    """Draws error against kept cost with matplotlib: for each network and data set, and each cost, one figure.

    Args:
        paths: as `collect` takes them.
        directory: where the files go; it is made.

    Returns:
        The files.

    Raises:
        PlotsMissingError: matplotlib is not installed.
    """
    files: list[Path] = []
    for kind in kinds(collect(paths)[0]):
        for cost in COSTS:
            runs = [(group.label, run) for group in kind.groups for run in group.runs if not run.emptied]
            points = [figures.Point(run.kept[cost], run.errors["error_last"], label) for label, run in runs]
            points = [point for point in points if 0 < point.cost <= 1]
            if points:
                name = f"pareto-{kind.network}-{kind.data}-{cost}"
                theirs = figures.published(kind.network, cost) if kind.data == "mnist" else []
                files += figures.pareto(points, directory / name, cost=cost, title=kind.title, published=theirs)
    return files


__all__ = [
    "Look",
    "PageMissingError",
    "Server",
    "can_make",
    "collect",
    "look",
    "measure_run",
    "method_page",
    "page_file",
    "run_figures",
    "run_page",
    "runs_figures",
    "runs_page",
    "write",
]
