"""Tables in the house's style, for a terminal, as plain text, as Markdown, and one line for what layer after layer has.

What is in them is the caller's business. rich is imported when a table is made: that takes as long as half the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from io import StringIO
from math import prod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
NUMBER = re.compile(r"(?<![^.`])\d+(?![^.`])")  # a whole part of a name, as in "blocks.0.up"
T = TypeVar("T")


def new_table(title: str, left: Sequence[str], right: Sequence[str] = (), *, fold: bool = False) -> Table:
    """An empty table with columns of words, then columns of numbers; with `fold` no cell loses its end."""
    from rich import box
    from rich.table import Table

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
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
    console.print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# ---------------------------------------------------------------- repeated layers


def families(items: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable] = type) -> list[list[T]]:
    """Items that are alike and whose names differ in whole numbers between dots alone: what layer after layer has.

    Example:
        >>> families(["stem", "blocks.0.up", "blocks.1.up"], str)
        [['stem'], ['blocks.0.up', 'blocks.1.up']]
    """
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault((NUMBER.sub("*", name(item)), alike(item)), []).append(item)
    return list(found.values())


def span(names: Sequence[str]) -> str:
    """The names of a family as one.

    Example:
        >>> span(["blocks.0.up", "blocks.1.up", "blocks.2.up"]), span(["a.0.b.1", "a.3.b.1"]), span(["stem"])
        ('blocks.0–2.up', 'a.0,3.b.1', 'stem')
    """
    values = [sorted(set(column), key=len) for column in zip(*(name.split(".") for name in names), strict=True)]
    whole = prod(map(len, values)) == len(names)  # else numbers that no name has would be told too
    return ".".join(v[0] if len(v) == 1 else _range(sorted(map(int, v))) if whole else "*" for v in values)


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == numbers[-1] - numbers[0] + 1 > 2:
        return f"{numbers[0]}–{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 4 else "*"


def layers_of(names: Sequence[str]) -> list[str]:
    """What tells the names of a family apart: the numbers of their layers.

    Example:
        >>> layers_of(["a.0.b.1", "a.3.b.1"])
        ['0', '3']
    """
    parts = [name.split(".") for name in names]
    apart = [k for k, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    return [".".join(part[k] for k in apart) for part in parts]
