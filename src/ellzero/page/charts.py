"""The look of every page: charts with captions, colours for light and dark, and one file with all that it needs.

`render` fills a template of `templates/`; its HTML asks the network for nothing, and escapes what comes from files.
Plotly and jinja2 (`ellzero[page]`) are imported when a page is made. What the charts show is not known here.
"""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from ellzero.experiments.store import records
from ellzero.out.files import write_text, writing
from ellzero.out.saving import installed_version

# Names that may stand for a colour in traces and layouts: "@blue". Okabe & Ito's, told apart by colour-blind readers
# too; in the dark the same hues, lighter.
LIGHT: dict[str, Any] = {
    "paper": "#ffffff", "ink": "#1b1f24", "muted": "#5b6570", "grid": "#e4e7eb", "grey": "#8c8c8c", "soft": "#d5dae0",
    "blue": "#0072b2", "vermilion": "#d55e00", "green": "#009e73", "orange": "#c98500", "purple": "#b6588b",
    "sky": "#56b4e9", "faint": "rgba(0,114,178,0.16)",
    "heat": [[0, "#f1f3f5"], [0.3, "#a9cfe6"], [0.7, "#2a8cc4"], [1, "#00426b"]],
    "diverging": [[0, "#b34700"], [0.25, "#eba77a"], [0.5, "#f7f7f7"], [0.75, "#79b5d8"], [1, "#005b8f"]],
}  # fmt: skip
DARK: dict[str, Any] = {
    "paper": "#15191f", "ink": "#e6e9ed", "muted": "#9ba5b0", "grid": "#2b323b", "grey": "#8b949e", "soft": "#3b444f",
    "blue": "#56b4e9", "vermilion": "#f58a4b", "green": "#2fc79d", "orange": "#f0b93a", "purple": "#e29bc1",
    "sky": "#a6d8f5", "faint": "rgba(86,180,233,0.2)",
    "heat": [[0, "#20262e"], [0.3, "#1f5578"], [0.7, "#4aa6dc"], [1, "#d7effc"]],
    "diverging": [[0, "#ffa974"], [0.25, "#a35a2c"], [0.5, "#20262e"], [0.75, "#2f77a4"], [1, "#8fd0f7"]],
}  # fmt: skip
SERIES = ("@blue", "@vermilion", "@green", "@orange", "@purple", "@sky")  # one after the other, in this order
EXPECTED, KEPT = "dash", "solid"  # the line of an expected and of a kept number, on every page


@final
class PageMissingError(ImportError):
    """Plotly or jinja2 is not installed; the message says how to get them."""

    def __init__(self, missing: str = "plotly") -> None:
        super().__init__(f"`{missing}` must be installed to make pages: pip install 'ellzero[page]'")


def _missing() -> str | None:
    return next((name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None), None)


def can_make() -> bool:
    """Whether Plotly and jinja2 are installed."""
    return _missing() is None


@final
class Chart:
    """A chart with its words. Traces and layout are plain data, as Plotly has them.

    A colour may be "@blue" and so on, a colour scale "@heat" or "@diverging": they depend on the theme. What the layout
    does not say comes from there too.
    """

    def __init__(
        self,
        name: str,  # in the page, and only once: lower-case letters, digits and "-"
        title: str,
        caption: str,  # what one sees, in which unit, and whether numbers are expected or kept
        alternative: str,  # the same with the numbers that matter, for those who do not see it
        traces: Sequence[Mapping[str, Any]],
        *,
        height: int = 320,  # in pixels
        wide: bool = False,  # takes the whole width of a wide window
        **layout: Any,
    ) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"`name` must be lower-case letters, digits and '-', got {name!r}")
        for what, words in (("title", title), ("caption", caption), ("alternative", alternative)):
            if not words.strip():
                raise ValueError(f"`{what}` of the chart {name!r} must say something, got nothing")
        self.name, self.title, self.caption, self.alternative = name, title, caption, alternative
        self.traces, self.layout, self.height, self.wide = list(traces), layout, height, wide

    def json(self) -> str:
        """Traces and layout for the page's script, safe inside of `<script>`."""
        return script_json({"data": self.traces, "layout": self.layout})


def script_json(content: Any) -> str:
    """Plain data as JSON that can stand inside of `<script>`: nothing in it ends the element or begins a comment."""
    text = json.dumps(records.plain(content), allow_nan=False)  # ASCII, so U+2028 and its like are escaped too
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def packed(values: npt.NDArray[np.uint8]) -> dict[str, str]:
    """Bytes for a trace, as Plotly's script reads them: a tenth of the length of a list of numbers."""
    shape = ", ".join(map(str, values.shape))
    return {"dtype": "u1", "bdata": b64encode(np.ascontiguousarray(values).tobytes()).decode(), "shape": shape}


def escaped(text: str) -> str:
    """Text for a trace or a label, to be read as it is: Plotly knows some tags and templates."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title, as Plotly has it."""
    return {"title": {"text": title}, **more}


def curve(x: Iterable[Any], y: Iterable[Any], name: str, colour: str, hover: str, **more: Any) -> dict[str, Any]:
    """A line through points, as Plotly has it; `dash` and `width` are the line's, without a hover it stays silent."""
    line = {"color": colour, "dash": more.pop("dash", KEPT), "width": more.pop("width", 2)}
    told = hover if not hover or "<extra>" in hover else f"{hover}<extra></extra>"
    words = {"hovertemplate": told} if told else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": name, "line": line} | words | more


def dots(x: Iterable[Any], y: Iterable[Any], name: str, marker: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Points without a line, as Plotly has them."""
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "name": name, "marker": marker} | more


def heat(z: Any, hover: str, low: float = 0, high: float = 100, **more: Any) -> dict[str, Any]:
    """Numbers as colours, as Plotly has them."""
    look = {"type": "heatmap", "z": z, "zmin": low, "zmax": high, "colorscale": "@heat"}
    return {**look, "hovertemplate": f"{hover}<extra></extra>", **more}


def render(template: str, *, part: bool = False, **values: Any) -> str:
    """A page, complete in itself, from a template that extends `base.html.j2`; or its block `content` alone.

    A template shows a chart by `{{ figure(chart) }}`. A PageMissingError says that Plotly or jinja2 is not installed.
    """
    if (missing := _missing()) is not None:
        raise PageMissingError(missing)
    found = _environment().get_template(template)
    if part:
        return "".join(found.blocks["content"](found.new_context(values)))
    themes = script_json({"light": LIGHT, "dark": DARK})
    versions = {"ellzero": installed_version(), "torch": torch.__version__, "Python": platform.python_version()}
    return str(found.render(values, themes=themes, versions=versions, plotly=_plotly()))


def write(text: str, path: Path) -> Path:
    """Writes a page, all of it or nothing (FileError), into a folder that is made if need be; gives the file back."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]

    script = str(get_plotlyjs())
    if "</script" in script.lower():  # it would end where it is put
        raise RuntimeError("Plotly's script has `</script` in it and cannot be put into a page: use another version")
    return script


@cache
def _environment() -> Any:
    import jinja2

    loader, undefined = jinja2.PackageLoader("ellzero.page"), jinja2.StrictUndefined
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    macros: Any = made.get_template("figure.html.j2").module
    made.globals["figure"] = macros.figure
    made.filters |= {f.__name__: f for f in (number, percent, plus_minus, seconds, share, size)}
    return made


def number(value: float | None, digits: int = 0) -> str:
    """A number with commas, or a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in percent, or a dash."""
    return "–" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.{digits}f} %"


def share(part: float | None, whole: float) -> str:
    """A part of a whole in percent, or a dash."""
    return percent(None if part is None or not whole else part / whole)


def seconds(value: float | None) -> str:
    """A time with its unit, or a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int | None) -> str:
    """Bytes with a unit, or a dash."""
    if count is None:
        return "–"
    return f"{count} B" if count < 1000 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


def plus_minus(interval: tuple[float, float], times: float = 1, in_percent: bool = True) -> str:
    """A mean, in percent mostly, with half its interval, where there is one."""
    mean, half = (f"{times * value:{'.2f' if in_percent else '.4g'}}" for value in interval)
    return mean + f" ± {half}" * (not math.isnan(interval[1])) + " %" * in_percent
