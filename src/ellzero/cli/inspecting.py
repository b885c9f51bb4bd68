"""The commands that need no run: `inspect` prints the axes of a user's own model, `method` writes the method's page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn
from tyro.conf import Positional, UseAppendAction, arg

from ellzero import page
from ellzero.cli.console import FAILED, CommandError, few, quiet, refuse, say, show, show_json
from ellzero.experiments.data import importing
from ellzero.gated.placements import shrinkable
from ellzero.graph.axes import Axis, Graph
from ellzero.graph.tracing import TraceError, as_inputs, trace
from ellzero.graph.trials.rehearsal import proven
from ellzero.graph.trials.running import turns
from ellzero.out.reporting import MANY
from ellzero.out.tables import NUMBER, families, new_table, span

DTYPES = {
    "float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "int": torch.int64, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip


def inspect(
    target: Annotated[str, Positional, arg(metavar="MODULE:CALLABLE")],
    input: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="[DTYPE:]SIZES")] = (),
    streams: bool = False,
    full: bool = False,
    json: bool = False,
) -> None:
    """Print the axes of a model: what can shrink, what writes and reads it, and why the rest is frozen; also which
    layers get gates on what they read of its input.

    For example: ellzero inspect my_models:LeNet --input 1,1,28,28

    Args:
        target: the model: a class or function that gives one when it is called without arguments, or a module itself.
            MODULE is written as in an import statement, and is looked for in the working directory too.
        input: sizes of an example input, its batch first; once for each argument of the model. 1,1,28,28 is an image of
            normal numbers, int:2,128 two rows of token numbers (0s and 1s). DTYPE is float, float16, bfloat16,
            float64, int, int32 or bool.
        streams: take residual streams for axes that can shrink, as `l0.shrinkable(streams=True)` does.
        full: list every axis; without it, those of repeated layers share a line where there are more than twelve.
        json: print JSON: axes with all tensors that they lie on, and the layers with gates on their inputs.
    """
    inputs = tuple(example(text) for text in input)
    refuse(not inputs, "`--input` must be given once for each argument of the model, such as --input 1,1,28,28")
    model = load_model(target)
    with quiet():
        try:
            graph = proven(model, trace(model, inputs, watch=turns), as_inputs(inputs))
        except TraceError as error:
            raise CommandError(str(error).replace("`example_inputs`", "`--input`"), FAILED) from error
    views, picked = [_view(axis, streams) for axis in graph.axes], _picked(graph)
    if json:
        show_json({"model": target, "axes": views, "inputs": picked, "unreached": list(graph.unreached)})
    else:
        lines = _table(target, model, graph, views, fold=not full and len(views) > MANY)
        read = few([f"{layer} ({units:,})" for layer, units in picked.items()])
        more = [Text(f"Gates on what layers read of the model's input: {', '.join(read)}.")] if picked else []
        show(Group(lines, *more))


def _picked(graph: Graph) -> dict[str, int]:
    """The layers that pick their inputs with `l0.shrinkable()`, and how many they have."""
    units = {placement.name for placement in shrinkable(inputs=False)(graph)}
    found = [placement for placement in shrinkable()(graph) if placement.name not in units]
    return {placement.name.removesuffix(".inputs"): placement.shape[0] for placement in found}


def _view(axis: Axis, streams: bool) -> dict[str, Any]:
    """An axis as `--json` prints it: for each role the tensors it lies on, and how many of their entries a unit has."""
    state, why = "can shrink", None
    if axis.frozen is not None:
        state, why = "frozen", axis.frozen
    elif axis.stream and not streams:
        state, why = "residual stream", "needs `streams=True`"
    about = {"name": axis.name, "units": axis.size, "state": state, "why": why}
    places: dict[str, list[dict[str, Any]]] = {"writes": [], "rides": [], "reads": []}
    for site in axis.sites:
        entries = int((site.units >= 0).sum()) // axis.size
        places[site.role].append({"tensor": site.tensor, "dims": list(site.dims), "entries": entries})
    return {**about, "stream": axis.stream, "can_vanish": axis.can_vanish, **places}


def _table(target: str, model: nn.Module, graph: Graph, views: Sequence[dict[str, Any]], *, fold: bool) -> Group:
    table = new_table("", ("axis", "units", "written by", "along with", "read by", "state"), fold=True)
    table.columns[1].justify = "right"
    for family in families(views, lambda v: v["name"], _alike) if fold else [[v] for v in views]:
        v, several = family[0], len(family) > 1
        writers, others, readers = ([n for v in family for n in _layers(v[k])] for k in ("writes", "rides", "reads"))
        others = [name for name in others if name not in writers]  # a bias goes without saying
        names = [
            [span(some) for some in families(names, str)] if fold else names for names in (writers, others, readers)
        ]
        units = f"{len(family)} × " * several + f"{v['units']:,}"
        cells = (span([v["name"] for v in family]), units, *("\n".join(few(n)) for n in names))
        state = NUMBER.sub("*", _state(v)) if several else _state(v)
        table.add_row(*map(Text, cells), Text(state, "green" if v["state"] == "can shrink" else ""))
    free = [v["units"] for v in views if v["state"] == "can shrink"]
    lines = [f"{len(free)} of {len(views)} axes can shrink, {sum(free):,} units in all."]
    if graph.unreached:
        lines.append(f"The example input does not reach {', '.join(few(graph.unreached))}; they stay as they are.")
    title = f"{target}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"
    return Group(Text(title, "bold"), table, *map(Text, lines))


def _state(view: dict[str, Any]) -> str:
    return str(view["state"]) if view["why"] is None else f"{view['state']}: {view['why']}"


def _alike(view: dict[str, Any]) -> tuple[int, str]:
    """What axes of repeated layers share: their units, and their state but for the number of the layer."""
    return view["units"], NUMBER.sub("*", _state(view))


def _layers(places: Sequence[dict[str, Any]]) -> list[str]:
    """The layers that own the tensors, `×n` where they see a unit as n entries (a flattened map)."""
    names = []
    for p in places:
        times = f" ×{p['entries']}" if len(p["dims"]) == 1 and p["entries"] > 1 else ""
        names.append((p["tensor"].rpartition(".")[0] or p["tensor"]) + times)
    return list(dict.fromkeys(names))


def load_model(target: str) -> nn.Module:
    """The model that `MODULE:CALLABLE` names."""
    where, _, what = target.partition(":")
    named = f"`MODULE:CALLABLE` must name a module and what is in it, such as my_models:LeNet, got {target!r}"
    refuse(not where or not what, named)
    written = f"`MODULE` must be written as in an import statement, `a.b` and not `a/b.py`, got {where!r}"
    refuse(where.endswith(".py") or "/" in where, written)
    found: Any = importing.find(target)
    if not isinstance(found, nn.Module):
        kind = type(found).__name__
        refuse(not callable(found), f"`{target}` must be a model or something that gives one, got {kind}")
        found = importing.call(target)
    if not isinstance(found, nn.Module):
        raise CommandError(f"`{target}` must give an nn.Module, got {type(found).__name__}")
    return found


def example(text: str) -> Tensor:
    """An example input from its description `[DTYPE:]SIZES`."""
    kind, colon, sizes = text.rpartition(":")
    dtype = DTYPES.get(kind if colon else "float")
    if dtype is None:
        raise CommandError(f"`--input` must have one of the dtypes {', '.join(DTYPES)}, got {kind!r} in {text!r}")
    shape = [int(size) if size.strip().isdecimal() else 0 for size in sizes.split(",")]
    wanted = "sizes of at least 1 with commas between, such as 1,1,28,28"
    refuse(min(shape) < 1, f"`--input` must be {wanted}, got {text!r}")
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)  # any embedding has an entry 0 and 1


def method(out: Annotated[str, arg(metavar="FILE")] = "method.html", open: bool = False) -> None:
    """Write a page about the hard concrete gate, with sliders: Figures 1 and 2 of Louizos et al. (2018).

    For example: ellzero method --open

    The page is one file that opens offline. Plotly and jinja2 must be installed (the extra `page`).

    Args:
        out: the file; one that is there must be such a page, and is written anew.
        open: show it in the browser.
    """
    file = Path(out)
    refuse(file.suffix.lower() not in (".html", ".htm"), f"`--out` must be a file that ends in .html, got {out!r}")
    other = file.exists() and not _is_page(file)
    refuse(other, f"`--out` must be a new file or a page of ellzero's, and {out!r} is something else")
    page.write(page.method_page(), file)
    say(str(file))
    shown = not open or webbrowser.open(file.resolve().as_uri())
    refuse(not shown, f"no browser was found; open {out!r} yourself", FAILED)


def _is_page(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return '<meta name="generator" content="ellzero' in stream.read(2000)
    except OSError:  # a folder, or not ours to read
        return False
