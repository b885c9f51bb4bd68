"""What a page says of one run, as plain data: what its files tell, and what is left of its network.

`gather` reads a folder. Of a run that was cut off it leaves out what is missing, and `notes` says why. `look` sees a
network. How that was trained, and how any of it is drawn, is not known here.
"""

from __future__ import annotations

import math
import statistics
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint, records
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.train.loop import noise_like, restore
from ellzero.gated.module import Gated
from ellzero.gates.abstract import AbstractGate, NoExpectation
from ellzero.gates.distributions import HardConcrete
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.graph.axes import Axis
from ellzero.graph.plan import ClosedAxisError
from ellzero.graph.tracing import mode
from ellzero.objectives import costs
from ellzero.out.compaction import CompactionError, compact
from ellzero.out.latency.meter import device_name, interleaved
from ellzero.out.reporting import MANY, AxisRow, Report, report
from ellzero.out.tables import families, span
from ellzero.page.layers import Layers, repeated

LATENCY, FORMAT = "latency.json", "ellzero.run.latency"
COSTS = {"l0_norm": "density", "params": "parameters", "macs": "MACs"}
BINS = 20  # of a histogram over (0, 1), the two ends apart
_MOST_TIMES, _MOST_GATES, _MOST_TILES = 160, 400, 20  # what a screen can show
Pixels = npt.NDArray[np.float64]


# ---------------------------------------------------------------- its files


class Strip(NamedTuple):
    """P(open) of the gates of a placement over time, in percent."""

    name: str  # of the placement
    epochs: list[float]  # of the records
    percent: npt.NDArray[np.uint8]  # (gates, records), by falling P(open) at the end
    gates: int  # where there are more than rows, some are left out, evenly


class Event(NamedTuple):
    """What shrinking did after an epoch."""

    epoch: float
    word: str  # "settled" where the gates are fixed since then, "skipped" where it was not worth it, else "shrunk"
    skipped: bool  # nothing was taken out
    widths: dict[str, tuple[int, int]]  # units of each placement before and after
    macs: tuple[float, float]  # before and after, of dense; where it was skipped, the second is what was offered

    @property
    def told(self) -> dict[str, tuple[int, int]]:
        """The widths; of many placements, those of repeated layers together."""
        found = families(self.widths, str) if len(self.widths) > MANY else [[name] for name in self.widths]
        sums = ([sum(counts) for counts in zip(*(self.widths[name] for name in some), strict=True)] for some in found)
        return {span(some): (before, after) for some, (before, after) in zip(found, sums, strict=True)}


class Run(NamedTuple):
    """One run as its folder has it."""

    folder: Folder
    recipe: Recipe
    history: list[dict[str, Any]]
    result: dict[str, Any] | None  # None while it is not finished
    look: Look  # an empty one without a checkpoint that can be read
    strips: list[Strip]
    latency: list[dict[str, float]]  # rows of `measure`
    measured_on: str
    bytes_compact: int | None  # of compact.safetensors, if it is there
    notes: list[str]  # what is missing, and why

    @property
    def epochs(self) -> int:
        return self.recipe.epochs + self.recipe.finetune_epochs

    @property
    def gated(self) -> bool:
        return self.recipe.placement is not None

    @property
    def x(self) -> list[float]:
        return [float(record["epoch"]) for record in self.history]

    @property
    def events(self) -> list[Event]:
        """From "shrunk" of the records; one that is damaged is passed over."""
        out = []
        for record in self.history:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found = record["shrunk"]
                skipped, widths = bool(found["skipped"]), {}
                for name, after in found["widths"].items():
                    before = int(after) + int(found["removed"][name])
                    widths[str(name)] = before, before if skipped else int(after)
                macs = float(found["macs"]["before"]), float(found["macs"]["after"])
                word = "settled" if found.get("settled") else "skipped" if skipped else "shrunk"
                out.append(Event(float(record["epoch"]), word, skipped, widths, macs))
        return out

    @property
    def fixed_at(self) -> float | None:
        """The epoch after which the gates were fixed, if there was more training then."""
        if not self.gated or not any(r.get("tuning") for r in self.history):
            return None
        settled = [event.epoch for event in self.events if event.word == "settled"]
        learning = [float(r["epoch"]) for r in self.history if not r.get("tuning")]
        return max(settled or learning, default=0.0)

    @property
    def dense_macs(self) -> float | None:
        """MACs of the dense network for one example, as far as known."""
        if self.look.report is not None and self.look.report.macs is not None:
            return float(self.look.report.macs.dense)
        with suppress(KeyError, TypeError):
            return float((self.result or {})["costs"]["macs"]["dense"])
        return None

    def seen(self, *keys: str, times: float = 1) -> list[float | None]:
        """A number of every record by its keys, such as "kept", "macs", times a factor; None where it is not there."""
        out: list[float | None] = []
        for record in self.history:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            out.append(None if isinstance(value, bool) or not isinstance(value, int | float) else times * float(value))
        return out


def gather(folder: Folder, index: int = 0, seen: Look | None = None) -> Run:
    """Reads a run, or IndexError, or FolderError. Its network is as `seen`, or as in the newest checkpoint."""
    if not 0 <= index < len(folder.recipes):
        raise IndexError(f"`index` must be from 0 to {len(folder.recipes) - 1}, got {index}")
    history = folder.history()[index :: len(folder.recipes)]
    if any(not isinstance(r.get("epoch"), int | float) for r in history):
        raise FolderError(f"the history in {str(folder.path)!r} is damaged: a record has no epoch")
    results = folder.results()
    result = None if results is None else results[index]
    if result is not None and not isinstance(result, dict):
        raise FolderError(f"{str(folder.path / 'results.json')!r} is damaged: a result must be an object")
    seen, unseen = (seen, "") if seen is not None else look_at(folder, index)
    latency, where, unmeasured = _latency(folder)
    small = folder.path / "compact.safetensors"
    size = small.stat().st_size if small.is_file() and len(folder.recipes) == 1 else None
    notes = [why for why in (unseen, unmeasured) if why]
    own, over_time = folder.recipes[index], strips(history)
    return Run(folder, own, history, result, seen or Look(), over_time, latency, where, size, notes)


def look_at(folder: Folder, index: int = 0) -> tuple[Look | None, str]:
    """What the network of the newest checkpoint looks like, or a sentence that says why it cannot be seen."""
    try:
        there = checkpoint.steps(folder.checkpoints)
        if not there:
            return None, "There is no checkpoint yet, so that the network itself cannot be shown."
        trainer = restore(folder)
    except (checkpoint.CheckpointError, ValueError, OSError) as error:
        return None, f"The network itself cannot be shown: {error}."
    done, epoch = there[-1] - trainer.position, trainer.epoch
    steps = done // epoch if epoch and done > 0 and done % epoch == 0 else None
    return look(trainer.network(index).cpu(), folder.recipes[index], trainer.data.shape, epoch, steps), ""


def strips(history: Sequence[Mapping[str, Any]]) -> list[Strip]:
    """P(open) over time, from "prob_open" of the records; one whose bytes do not fit the others is passed over."""
    found: dict[str, list[tuple[float, npt.NDArray[np.uint8]]]] = {}
    for record in history:
        packed = record.get("prob_open")
        for name, text in packed.items() if isinstance(packed, Mapping) else ():
            with suppress(ValueError, TypeError):
                values = np.frombuffer(b64decode(text, validate=True), np.uint8)
                found.setdefault(str(name), []).append((record["epoch"], values))
    out = []
    for name, columns in found.items():
        size = len(columns[-1][1])
        # Where units were closed after an epoch there are two records of it: the second counts.
        same = sorted({epoch: column for epoch, column in columns if len(column) == size > 0}.items())
        if same:
            epochs, shown = zip(*(same[t] for t in _spaced(len(same), _MOST_TIMES)), strict=True)
            values = np.stack(shown, axis=1)
            values = values[np.argsort(-values[:, -1].astype(int), kind="stable")][_spaced(size, _MOST_GATES)]
            percent = np.round(values.astype(np.float64) * (100 / 255)).astype(np.uint8)
            out.append(Strip(name, list(epochs), percent, size))
    return out


def _spaced(count: int, most: int) -> list[int]:
    """At most so many of `range(count)`, evenly, the first and the last among them."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round())]


# ---------------------------------------------------------------- how fast it is


def measure(dense: nn.Module, small: nn.Module, example: Tensor, budget: float = 1.5) -> list[dict[str, float]]:
    """Medians of the seconds that the dense and the compact network take, in turns, for one example and for 256.

    Both are in evaluation mode, on the device of the example. A batch that would take longer than `budget` is left out.
    """
    rows: list[dict[str, float]] = []
    with torch.inference_mode():
        for batch in (1, 256):
            if rows and rows[0]["dense_s"] * batch * 3 > budget:  # as if nothing were gained by the batch
                continue
            x = example[:1].expand(batch, *example.shape[1:]).contiguous()
            turns = [partial(model, x) for model in (dense, small)]
            taken = interleaved(turns, example.device, rounds=40, warm_up=2, budget=budget / 2)
            dense_s, compact_s = map(statistics.median, taken)
            rows.append({"batch": batch, "dense_s": dense_s, "compact_s": compact_s, "runs": len(taken[0])})
    return rows


def measure_run(folder: Folder, network: nn.Module) -> None:
    """Measures a run's network, which is on the CPU, and stores that in the folder, or FileError.

    Nothing happens without gates, or where `compact` refuses.
    """
    if not isinstance(network, Gated):
        return
    with suppress(ClosedAxisError, CompactionError):
        small = compact(network, verify=False)
        image = noise_like(folder, 1).example(1)
        with mode(network.model, False), mode(small, False):
            rows = measure(network.model, small, image)
        about = {"device": device_name(image.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
        records.write(folder.path / LATENCY, {"format": FORMAT, "format_version": 1, **about, "rows": rows}, indent=2)


def _latency(folder: Folder) -> tuple[list[dict[str, float]], str, str]:
    """What was measured and where, or why it cannot be shown."""
    file = folder.path / LATENCY
    if not file.exists():
        return [], "", ""
    try:
        content = records.read_format(file, FORMAT, 1)
        rows = [{k: float(row[k]) for k in ("batch", "dense_s", "compact_s", "runs")} for row in content["rows"]]
        if any(min(row["dense_s"], row["compact_s"]) <= 0 for row in rows):
            raise ValueError("no time was spent")
        threads = int(content["threads"])
        return rows, f"{content['device']}, {threads} thread{'s' * (threads != 1)}, torch {content['torch']}", ""
    except (FolderError, ValueError, KeyError, TypeError):
        return [], "", f"{LATENCY} is damaged or something else, so that no latency is shown: `--speed` measures again."


# ---------------------------------------------------------------- its network


class Spread(NamedTuple):
    """How the gates of a placement are spread over [0, 1]: shares in `BINS` bins between and one for either end."""

    name: str  # of the placement
    gates: int
    kept: list[float]  # by their values at test time
    expected: list[float] | None  # by the hard concrete distribution, the mean over the gates; None for other families


class Picture(NamedTuple):
    """Tiles of equal size: filters, or one map."""

    tiles: Pixels  # (tiles, height, width)
    names: list[str]  # one for each
    what: str  # in words
    kept: int  # filters that are left, or gates open at test time; there may be more than are shown
    dense: int  # of how many


class Look(NamedTuple):
    """What is left of a network, as far as that is known."""

    epoch: int = 0  # epochs that it was trained for
    parameters: int | None = None  # of the dense network
    bytes_dense: int = 0  # weights and buffers of the dense network
    report: Report | None = None  # None without gates
    columns: Sequence[AxisRow] = ()  # axes from input to output, and inputs picked one by one
    table: Sequence[AxisRow] = ()  # the same in the order of the columns, but picked inputs beside their axis
    layers: Layers = Layers()  # those that repeat, if there are such
    spreads: Sequence[Spread] = ()  # of each placement
    gate_map: Picture | None = None  # P(open) of input gates, where these are of an image's pixels
    filters: Picture | None = None  # of the first layer, those that are left
    dropout: float | None = None  # share of the MACs with the keep rates that the gates start from
    steps_per_epoch: int | None = None  # as far as known


@torch.no_grad()
def look(
    network: nn.Module,
    recipe: Recipe | None = None,
    shape: Sequence[int] | None = None,
    epoch: int = 0,  # of training so far
    steps_per_epoch: int | None = None,
) -> Look:
    """Looks at a network, a `Gated` or one without gates.

    The recipe says from which rates its gates started, `shape` which images it reads: channels, height and width.
    """
    gated = network if isinstance(network, Gated) else None
    dense = network if gated is None else gated.model
    size = sum(t.numel() * t.element_size() for t in dense.state_dict().values())
    seen = Look(epoch, sum(p.numel() for p in dense.parameters()), size, steps_per_epoch=steps_per_epoch)
    first = next(((name, m) for name, m in dense.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
    if first is not None and shape is not None and len(shape) == 3:
        weight = f"{first[0]}.weight".lstrip(".")
        on_inputs = [] if gated is None else _on_inputs(gated, weight, first[1].weight.shape[1])
        kept = None if gated is None else gated.plan(refuse=False).rows.get(weight, {}).get(0)
        filters = _filters(*first, shape, on_inputs, kept)
        seen = seen._replace(gate_map=_gate_map(on_inputs, shape), filters=filters)
    if gated is None:
        return seen
    made = report(gated)
    columns, table = _columns(gated, made)
    spreads = [spread(name, gate) for name, gate in gated.named_gates()]
    dropout = None if recipe is None else _with_dropout(gated, recipe)
    seen = seen._replace(report=made, columns=columns, table=table, layers=repeated(gated, columns))
    return seen._replace(spreads=spreads, dropout=dropout)


def _columns(gated: Gated, made: Report) -> tuple[list[AxisRow], list[AxisRow]]:
    """`Look.columns` and `Look.table`: in the order of the parameters, what a layer reads before what it writes."""
    position = {name: number for number, (name, _) in enumerate(gated.model.named_parameters())}
    last = len(position)

    def place(axis: Axis) -> float:
        return min((2 * position.get(s.tensor, last) + (s.role != "reads") for s in axis.sites), default=2 * last)

    places = {axis.name: place(axis) for axis in gated.axes}
    picks = {}
    for row in made.inputs:
        layer, _, outputs = row.name.partition(", ")
        why = f"the layer {'places its outputs' if outputs else 'picks its inputs'} one by one"
        name = f"{layer}: {'outputs written' if outputs else 'inputs read'}"
        picks[row.name] = AxisRow(name, row.dense, row.expected, row.kept, "gated", why)
    found: list[tuple[float, AxisRow, list[AxisRow]]] = []
    for axis in made.axes:
        lines, layer = [axis], axis.name.removesuffix(".input")
        if layer != axis.name and layer in picks:  # the network's input stays as it is, and the layer picks from it
            lines.append(picks.pop(layer))
            axis = replace(axis, expected=lines[1].expected, kept=lines[1].kept, state="gated")
        found.append((places[axis.name], axis, lines))
    for name, pick in picks.items():
        layer, _, outputs = name.partition(", ")
        found.append(
            (places.get(layer, 2.0 * last) - 0.5, replace(pick, name=f"{layer} {outputs or 'inputs'}"), [pick])
        )
    found.sort(key=lambda one: one[0])
    return [column for _, column, _ in found], [line for _, _, lines in found for line in lines]


def spread(name: str, gate: AbstractGate) -> Spread:
    """How the sizes of the gates of a placement are spread over [0, 1]; a Gaussian gate may be negative, or above 1."""
    value, edges = gate.value().double().abs().flatten().cpu(), torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    between = torch.histogram(value[(value > 0) & (value < 1)], edges).hist
    kept = torch.cat([(value <= 0).sum()[None], between, (value >= 1).sum()[None]]) / value.numel()
    expected = None
    if isinstance(gate, HardConcreteGate):
        beta = gate.beta if isinstance(gate.beta, float) else gate.beta.double().expand(gate.shape).flatten()
        q = HardConcrete(gate.log_alpha.double().flatten(), beta, gate.gamma, gate.zeta)
        below = torch.stack([q.cdf(edge).mean() for edge in edges[:-1]])  # P(z ≤ edge), at 0 the atom alone
        one = q.prob_one.mean()
        expected = torch.cat([below[:1], below.diff(), (1 - one - below[-1])[None], one[None]]).cpu().tolist()
    return Spread(name, value.numel(), kept.tolist(), expected)


def _with_dropout(gated: Gated, recipe: Recipe) -> float | None:
    """The share of its MACs that the network needs whose units are there with the rates that its gates start from."""
    if gated.graph.products is None:
        return None
    keep = [torch.full((gate.shape.numel(),), 1 - recipe.drop_rate(name)) for name, gate in gated.named_gates()]
    with gated.assuming(torch.cat(keep).to(next(gated.parameters()).device)):
        return float(costs.macs(gated)) / float(costs.dense(costs.macs, gated))


def _on_inputs(gated: Gated, weight: str, size: int) -> list[AbstractGate]:
    """The gates that multiply the inputs of a layer with this weight one by one."""
    gates, found = dict(gated.named_gates()), [p for p in gated.placements if p.shape == (size,)]
    return [gates[p.name] for p in found if any(s.tensor == weight and s.dims == (1,) for s in p.multiplies)]


def _gate_map(gates: Sequence[AbstractGate], shape: Sequence[int]) -> Picture | None:
    """Gates that act on the first layer's inputs one by one, if these are the pixels of an image."""
    if not gates or gates[0].shape != (math.prod(shape),):
        return None
    try:
        shown, what = gates[0].prob_open(), "P(open)"
    except NoExpectation:
        shown, what = gates[0].value(), "value at test time"
    names = [""] if shape[0] == 1 else [f"channel {c}" for c in range(shape[0])]
    return Picture(shown.double().reshape(*shape).cpu().numpy(), names, what, int(gates[0].open().sum()), shown.numel())


def _filters(
    name: str, layer: nn.Linear | nn.Conv2d, shape: Sequence[int], gates: Sequence[AbstractGate], kept: Any
) -> Picture | None:
    """Weights of the first layer as pictures, those of units that are left, by falling norm."""
    weight = layer.weight.double().clone()
    if isinstance(layer, nn.Linear) and weight.shape[1] != math.prod(shape):
        return None
    for gate in gates:
        weight = weight * gate.value().double().reshape(1, -1, *[1] * (weight.ndim - 2))
    units = np.arange(len(weight)) if kept is None else np.asarray(kept)
    if not len(units):
        return None
    pictures = weight.reshape(-1, *shape) if isinstance(layer, nn.Linear) else weight
    norms = weight.flatten(1).norm(dim=1)[units.tolist()].cpu().numpy()
    chosen = units[np.argsort(-norms, kind="stable")[:_MOST_TILES]]
    tiles = pictures.mean(1)[chosen.tolist()].cpu().numpy()  # over the channels
    return Picture(tiles, [str(u) for u in chosen], name, len(units), len(weight))
