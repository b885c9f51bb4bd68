"""The command that writes the page of the method: `method`. What is on the page is in `page.method`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from ellzero import page
from ellzero.cli.app import FAILED, CommandError, app, foreseen, say


@app.command
def method(out: Annotated[str, arg(metavar="FILE")] = "method.html", open: bool = False) -> None:
    """Write a page about the hard concrete gate, with sliders: Figures 1 and 2 of Louizos et al. (2018).

    For example: ellzero method --open

    The page is one file that needs no network. Plotly and jinja2 must be installed (the extra `page`).

    Args:
        out: the file; one that is there must be such a page, and is written anew.
        open: show it in the browser.
    """
    file = Path(out)
    if file.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"`--out` must be a file that ends in .html, got {out!r}")
    if file.exists() and not _is_page(file):
        raise CommandError(f"`--out` must be a new file or a page of ellzero's, and {out!r} is something else")
    with foreseen(failed=(page.PageMissingError,)):
        page.write(page.method_page(), file)
    say(str(file))
    if open and not webbrowser.open(file.resolve().as_uri()):
        raise CommandError(f"no browser was found; open {out!r} yourself", FAILED)


def _is_page(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return '<meta name="generator" content="ellzero' in stream.read(2000)
    except OSError:  # a folder, or not ours to read
        return False
