"""Tables in the house's style, for a terminal, as plain text, as Markdown. What is in them is the caller's business."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100


def new_table(title: str, left: Sequence[str], right: Sequence[str] = (), *, fold: bool = False) -> Table:
    """An empty table with columns of words, then columns of numbers; with `fold` no cell loses its end."""
    out = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (*left, *right):
        out.add_column(name, overflow="fold" if fold else "ellipsis")
    for column in out.columns[len(left) :]:
        column.justify = "right"
    return out


def markdown(table: Table) -> str:
    """A table as Markdown, without its title.

    Example:
        >>> t = new_table("", ["row"], ["error"])
        >>> t.add_row("MLP", "1.4 | 1.69")
        >>> print(markdown(t))
        | row | error |
        |---|---:|
        | MLP | 1.4 / 1.69 |
    """
    lines = [[str(c.header) for c in table.columns], *zip(*(c.cells for c in table.columns), strict=True)]
    texts = ["| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines]
    rule = "|" + "".join("---:|" if c.justify == "right" else "---|" for c in table.columns)
    return "\n".join([texts[0], rule, *texts[1:]])


def render(content: RenderableType, width: int = WIDTH) -> str:
    """Anything that rich can print, as plain text."""
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
    console.print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
