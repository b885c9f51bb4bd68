"""What a page says of one run, as plain data: its history, and what is left of its network.

`gather` reads a folder, `look` a network, `measure` a clock. A run that was cut off has less to say: what is missing is
left out, and `notes` says why. How any of it is drawn is the business of `run`.
"""

from __future__ import annotations

import binascii
import json
import statistics
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ellzero.experiments import data
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint, records
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.train.lagrangian import targets
from ellzero.experiments.train.loop import restore
from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.gates.distributions import HardConcrete
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.graph.plan import ClosedAxisError
from ellzero.objectives import costs
from ellzero.objectives.latency import device_name, interleaved
from ellzero.out.compaction import CompactionError, compact
from ellzero.out.reporting import Report, report

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

BINS = 20  # of a histogram over (0, 1), the two ends apart
FLOPS_PER_MAC = 2  # one multiplication, one addition
LATENCY = "latency.json"
_MOST_TIMES, _MOST_GATES, _MOST_TILES = 160, 400, 20  # what a screen can show


# ---------------------------------------------------------------- the network


@final
@dataclass(frozen=True)
class Column:
    """An axis in the picture of a network, or inputs that a layer picks one by one.

    Args:
        name: of the axis, or of the layer.
        dense: units in the dense network.
        expected: units in expectation over the gates, if they have one.
        kept: units of the compact network.
        state: "gated" and so on, as in a `Report`.
    """

    name: str
    dense: int
    expected: float | None
    kept: int
    state: str


@final
@dataclass(frozen=True)
class Spread:
    """How the gates of one set are spread over [0, 1]: shares of the set, `BINS` bins between and one for either end.

    Args:
        name: of the set.
        gates: how many there are.
        kept: shares by their values at test time.
        expected: shares by the hard concrete distribution, the mean over the gates; None for other families.
    """

    name: str
    gates: int
    kept: list[float]
    expected: list[float] | None


@final
@dataclass(frozen=True)
class Picture:
    """Tiles of equal size: filters, or one map.

    Args:
        tiles: (tiles, height, width).
        labels: one for each.
        what: in words.
    """

    tiles: Array
    labels: list[str]
    what: str


@final
@dataclass(frozen=True)
class Look:
    """What is left of a network.

    Args:
        epoch: epochs that it was trained for.
        parameters: of the dense and of the compact network; the second is None where `compact` refuses.
        bytes_dense: weights and buffers of the dense network.
        report: dense, expected and kept by axis; None without gates.
        columns: axes in the order of the network.
        spreads: of each set of gates.
        gate_map: P(open) of input gates as a picture, where the gates are those of an image's pixels.
        pixels_open: how many of them are open at test time.
        filters: of the first layer, those that are left.
        filters_left: how many are left, and of how many.
        dropout: share of the MACs with the keep rates that the gates start from.
        steps_per_epoch: as far as known.
    """

    epoch: int
    parameters: tuple[int, int | None]
    bytes_dense: int
    report: Report | None = None
    columns: list[Column] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    gate_map: Picture | None = None
    pixels_open: int = 0
    filters: Picture | None = None
    filters_left: tuple[int, int] = (0, 0)
    dropout: float | None = None
    steps_per_epoch: int | None = None


@torch.no_grad()
def look(
    network: nn.Module,
    recipe: Recipe | None = None,
    shape: Sequence[int] | None = None,
    epoch: int = 0,
    steps_per_epoch: int | None = None,
) -> Look:
    """Looks at a network.

    Args:
        network: a `Gated`, or a network without gates.
        recipe: with which it was trained, for the rates that its gates started from.
        shape: channels, height and width of the images that it is fed with; None where it is not fed with images.
        epoch: epochs that it was trained for.
        steps_per_epoch: of this training, if known.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> [(c.name, c.dense, c.kept) for c in look(attach(net, torch.zeros(1, 4))).columns]
        [('0.input', 4, 4), ('0', 3, 3), ('2', 2, 2)]
    """
    dense = network.model if isinstance(network, Gated) else network
    size = sum(t.numel() * t.element_size() for t in dense.state_dict().values())
    whole = sum(p.numel() for p in dense.parameters())
    if not isinstance(network, Gated):
        filters, left = _filters(dense, None, shape)
        return Look(epoch, (whole, whole), size, filters=filters, filters_left=left, steps_per_epoch=steps_per_epoch)
    made = report(network)
    try:
        small: int | None = sum(p.numel() for p in compact(network, verify=False).parameters())
    except (ClosedAxisError, CompactionError):
        small = None
    filters, left = _filters(dense, network, shape)
    gate_map, pixels = _gate_map(network, shape)
    return Look(
        epoch,
        (whole, small),
        size,
        report=made,
        columns=_columns(network, made),
        spreads=[_spread(name, gate) for name, gate in network.named_gates()],
        gate_map=gate_map,
        pixels_open=pixels,
        filters=filters,
        filters_left=left,
        dropout=None if recipe is None else _with_dropout(network, recipe),
        steps_per_epoch=steps_per_epoch,
    )


def _columns(gated: Gated, made: Report) -> list[Column]:
    """In the order of the parameters; what a layer reads comes before what it writes."""
    position = {name: number for number, (name, _) in enumerate(gated.model.named_parameters())}
    last = len(position)

    def place(axis: Any) -> float:
        return min((2 * position.get(s.tensor, last) + (s.role != "reads") for s in axis.sites), default=2 * last)

    places = {axis.name: place(axis) for axis in gated.axes}
    picked = {row.name: row for row in made.inputs}
    found: list[tuple[float, Column]] = []
    for row in made.axes:
        single = picked.pop(row.name.removesuffix(".input"), None) if row.name.endswith(".input") else None
        counted = row if single is None else single  # the network's input stays as it is, and the layer picks from it
        state = row.state if single is None else "gated"
        found.append((places[row.name], Column(row.name, row.dense, counted.expected, counted.kept, state)))
    for name, single in picked.items():
        here = places.get(name, 2.0 * last) - 0.5
        found.append((here, Column(f"{name} inputs", single.dense, single.expected, single.kept, "gated")))
    return [column for _, column in sorted(found, key=lambda pair: pair[0])]


def _spread(name: str, gate: Any) -> Spread:
    value = gate.value().double().flatten()
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    inside = value[(value > 0) & (value < 1)]
    between = torch.histogram(inside.cpu(), edges).hist
    kept = torch.cat([(value <= 0).sum()[None].cpu(), between, (value >= 1).sum()[None].cpu()]) / value.numel()
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


def _gate_map(gated: Gated, shape: Sequence[int] | None) -> tuple[Picture | None, int]:
    """Gates that act on the first layer's inputs one by one, if these are the pixels of an image."""
    first = _first_layer(gated.model)
    if shape is None or len(shape) != 3 or first is None:
        return None, 0
    gates = dict(gated.named_gates())
    for placement in gated.placements:
        sites = [s for s in placement.multiplies if s.tensor == f"{first[0]}.weight".lstrip(".") and s.dims == (1,)]
        if sites and placement.shape == (int(np.prod(shape)),):
            gate = gates[placement.name]
            try:
                shown, what = gate.prob_open(), "P(open)"
            except NoExpectation:
                shown, what = gate.value(), "value at test time"
            tiles = shown.double().cpu().numpy().reshape(tuple(shape))
            labels = [""] if shape[0] == 1 else [f"channel {c}" for c in range(shape[0])]
            return Picture(tiles, labels, what), int(gate.open().sum())
    return None, 0


def _first_layer(model: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d] | None:
    return next(((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)


def _filters(
    model: nn.Module, gated: Gated | None, shape: Sequence[int] | None
) -> tuple[Picture | None, tuple[int, int]]:
    """Weights of the first layer as pictures, those of units that are left, by falling norm."""
    first = _first_layer(model)
    if shape is None or len(shape) != 3 or first is None:
        return None, (0, 0)
    name, layer = first
    key = f"{name}.weight".lstrip(".")
    weight = layer.weight.double().clone()
    if isinstance(layer, nn.Linear) and weight.shape[1] != int(np.prod(shape)):
        return None, (0, 0)
    units = np.arange(weight.shape[0])
    if gated is not None:
        gates = dict(gated.named_gates())
        for placement in gated.placements:
            for site in placement.multiplies:
                if site.tensor == key and site.dims == (1,) and placement.shape == weight.shape[1:2]:
                    value = gates[placement.name].value().double()
                    weight = weight * value.reshape(1, -1, *[1] * (weight.ndim - 2))
        kept = gated.plan(refuse=False).rows.get(key, {}).get(0)
        units = units if kept is None else np.asarray(kept)
    left = (len(units), weight.shape[0])
    if not len(units):
        return None, left
    pictures = weight.reshape(-1, *shape) if isinstance(layer, nn.Linear) else weight
    tiles: Tensor = pictures.mean(1)  # over the channels
    norms = weight.flatten(1).norm(dim=1)[units.tolist()].cpu().numpy()
    chosen = units[np.argsort(-norms, kind="stable")[:_MOST_TILES]]
    return Picture(tiles[chosen.tolist()].cpu().numpy(), [str(u) for u in chosen], name), left


# ---------------------------------------------------------------- how fast


def measure(dense: nn.Module, small: nn.Module, example: Tensor, budget: float = 1.5) -> dict[str, Any]:
    """Measures how long the dense and the compact network take, in turns, for one image and for 256.

    Args:
        dense: in evaluation mode, on the device to measure on.
        small: likewise.
        example: one image at least, on that device.
        budget: seconds to spend; a batch that would take longer is left out.

    Returns:
        Plain data: `rows` with `batch`, and medians `dense_s` and `compact_s` of `runs` runs each; where it was.
    """
    device = example.device
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for batch in (1, 256):
            if rows and rows[0]["dense_s"] * batch * 3 > budget:  # as if nothing were gained by the batch
                continue
            x = example[:1].expand(batch, *example.shape[1:]).contiguous()
            turns = [partial(model, x) for model in (dense, small)]
            taken = interleaved(turns, device, rounds=40, warm_up=2, budget=budget / 2)
            dense_s, compact_s = map(statistics.median, taken)
            rows.append({"batch": batch, "dense_s": dense_s, "compact_s": compact_s, "runs": len(taken[0])})
    return {
        "format": "ellzero.latency",
        "format_version": 1,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": rows,
    }


def measure_run(folder: Folder, network: nn.Module) -> dict[str, Any] | None:
    """Measures the network of a run on this machine's CPU, and stores that in the folder.

    Args:
        folder: of the run.
        network: its own, on the CPU.

    Returns:
        What `measure` gives; None without gates, or where `compact` refuses.

    Raises:
        FileError: it cannot be stored.
    """
    if not isinstance(network, Gated):
        return None
    try:
        small = compact(network, verify=False).eval()
    except (ClosedAxisError, CompactionError):
        return None
    image = data.scaled(data.stand_in(folder.recipes[0].data, 1).train_x)
    dense = network.model
    was = dense.training
    try:
        measured = measure(dense.eval(), small, image)
    finally:
        dense.train(was)
    records.write(folder.path / LATENCY, measured, indent=2)
    return measured


def _latency(folder: Folder) -> tuple[dict[str, Any] | None, str | None]:
    """What was measured, or why it cannot be shown."""
    file = folder.path / LATENCY
    if not file.exists():
        return None, None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = [{k: float(row[k]) for k in ("batch", "dense_s", "compact_s", "runs")} for row in content["rows"]]
        if content["format"] != "ellzero.latency" or any(r["compact_s"] <= 0 or r["dense_s"] <= 0 for r in rows):
            raise ValueError(content["format"])
        about = {"device": str(content["device"]), "threads": int(content["threads"]), "torch": str(content["torch"])}
        return {**about, "rows": rows}, None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, f"{LATENCY} is damaged, so that no latency is shown: `--speed` measures again."


# ---------------------------------------------------------------- a run


@final
@dataclass(frozen=True)
class Strip:
    """P(open) of the gates of one set over time, in percent.

    Args:
        name: of the set.
        epochs: of the records.
        percent: (gates, records), by falling P(open) at the end.
        gates: how many there are; where that is more than there are rows, some are left out, evenly.
    """

    name: str
    epochs: list[float]
    percent: Bytes
    gates: int


@final
@dataclass(frozen=True)
class Event:
    """What shrinking did after an epoch.

    Args:
        epoch: after which.
        settled: whether the gates are fixed since then.
        skipped: whether nothing was taken out: it would not have been worth it.
        widths: units of each set before and after.
        macs: before and after, of the network that is trained, as fractions of the dense one; where it was skipped, the
            second is what was offered.
    """

    epoch: float
    settled: bool
    skipped: bool
    widths: dict[str, tuple[int, int]]
    macs: tuple[float, float]

    @property
    def word(self) -> str:
        """What happened."""
        return "settled" if self.settled else "skipped" if self.skipped else "shrunk"


def _events(history: Sequence[Mapping[str, Any]]) -> list[Event]:
    """From "shrunk" of the records; one that is damaged is passed over."""
    out = []
    for record in history:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            found = record["shrunk"]
            skipped = bool(found["skipped"])
            widths = {}
            for name, after in found["widths"].items():
                before = int(after) + int(found["removed"][name])
                widths[str(name)] = before, before if skipped else int(after)
            macs = float(found["macs"]["before"]), float(found["macs"]["after"])
            out.append(Event(float(record["epoch"]), bool(found.get("settled")), skipped, widths, macs))
    return out


@final
@dataclass(frozen=True)
class Run:
    """One run as its folder has it.

    Args:
        folder: of the run.
        index: which run of a stack.
        recipe: its recipe.
        history: its records.
        result: its entry in results.json; None while it is not finished.
        look: what is left of the network; None without a checkpoint that can be read.
        strips: P(open) over time by set of gates.
        latency: what `measure` gave.
        bytes_compact: of compact.safetensors, if it is there.
        notes: what is missing, and why.
    """

    folder: Folder
    index: int
    recipe: Recipe
    history: list[dict[str, Any]]
    result: dict[str, Any] | None
    look: Look | None
    strips: list[Strip]
    latency: dict[str, Any] | None
    bytes_compact: int | None
    notes: list[str]

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self.recipe.epochs + self.recipe.finetune_epochs

    @property
    def gated(self) -> bool:
        """Whether it has gates."""
        return self.recipe.placement is not None

    @property
    def targets(self) -> dict[str, float]:
        """Targets of its constraints by pattern."""
        return targets(self.recipe)

    @property
    def events(self) -> list[Event]:
        """What shrinking did, and when."""
        return _events(self.history)

    @property
    def fixed_at(self) -> float | None:
        """The epoch after which the gates were fixed, if there was more training then."""
        if not self.gated or not any(r.get("tuning") for r in self.history):
            return None
        settled = [event.epoch for event in self.events if event.settled]
        learning = [float(r["epoch"]) for r in self.history if not r.get("tuning")]
        return max(settled or learning, default=0.0)

    @property
    def dense_macs(self) -> float | None:
        """MACs of the dense network for one image, as far as known."""
        if self.look is not None and self.look.report is not None and self.look.report.macs is not None:
            return float(self.look.report.macs.dense)
        with suppress(KeyError, TypeError):
            return float((self.result or {})["costs"]["macs"]["dense"])
        return None

    def seen(self, *keys: str) -> list[float | None]:
        """A number of every record by its keys; None where it is not there.

        Args:
            keys: such as "kept", "macs".
        """
        out: list[float | None] = []
        for record in self.history:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            out.append(float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None)
        return out


def gather(folder: Folder, index: int = 0, seen: Look | None = None) -> Run:
    """Reads a run.

    Args:
        folder: of the run, finished or not.
        index: which run of a stack, from 0.
        seen: what its network looks like, if that is known already; else it is taken from the newest checkpoint.

    Raises:
        IndexError: there is no such run.
        FolderError: the history or the results are damaged.
    """
    if not 0 <= index < len(folder.recipes):
        raise IndexError(f"`index` must be from 0 to {len(folder.recipes) - 1}, got {index}")
    recipe, notes = folder.recipes[index], []
    history = folder.history()[index :: len(folder.recipes)]
    if any(not isinstance(r.get("epoch"), int | float) for r in history):
        raise FolderError(f"the history in {str(folder.path)!r} is damaged: a record has no epoch")
    results = folder.results()
    result = None if results is None else results[index]
    if result is not None and not isinstance(result, dict):
        raise FolderError(f"{str(folder.path / 'results.json')!r} is damaged: a result must be an object")
    if seen is None:
        seen, why = look_at(folder, index)
        if why is not None:
            notes.append(why)
    latency, why = _latency(folder)
    if why is not None:
        notes.append(why)
    small = folder.path / "compact.safetensors"
    size = small.stat().st_size if small.is_file() and len(folder.recipes) == 1 else None
    return Run(folder, index, recipe, history, result, seen, _strips(history), latency, size, notes)


def look_at(folder: Folder, index: int = 0) -> tuple[Look | None, str | None]:
    """What the network of the newest checkpoint looks like, or a sentence that says why it cannot be seen.

    Args:
        folder: of the run.
        index: which run of a stack.
    """
    try:
        there = checkpoint.steps(folder.checkpoints)
        if not there:
            return None, "There is no checkpoint yet, so that the network itself cannot be shown."
        trainer = restore(folder, data.stand_in(folder.recipes[0].data, folder.recipes[0].batch))
    except (checkpoint.CheckpointError, ValueError, OSError) as error:
        return None, f"The network itself cannot be shown: {error}."
    done, epoch = there[-1] - trainer.position, trainer.epoch
    steps = done // epoch if epoch and done > 0 and done % epoch == 0 else None
    shape = trainer.data.shape
    return look(trainer.network(index).cpu(), folder.recipes[index], shape, epoch, steps), None


def _strips(history: Sequence[Mapping[str, Any]]) -> list[Strip]:
    """From "prob_open" of the records; one whose bytes do not fit the others is passed over."""
    found: dict[str, list[tuple[float, Bytes]]] = {}
    for record in history:
        packed = record.get("prob_open")
        for name, text in packed.items() if isinstance(packed, Mapping) else ():
            with suppress(binascii.Error, ValueError, TypeError):
                values = np.frombuffer(b64decode(text, validate=True), np.uint8)
                found.setdefault(str(name), []).append((record["epoch"], values))
    strips = []
    for name, columns in found.items():
        size = len(columns[-1][1])
        # Where units were closed after an epoch there are two records of it: the second counts.
        last = {epoch: column for epoch, column in columns if len(column) == size and size}
        same = sorted(last.items())
        if not same:
            continue
        times = _spaced(len(same), _MOST_TIMES)
        values = np.stack([same[t][1] for t in times], axis=1)
        values = values[np.argsort(-values[:, -1].astype(int), kind="stable")][_spaced(size, _MOST_GATES)]
        percent = np.round(values.astype(np.float64) * (100 / 255)).astype(np.uint8)
        strips.append(Strip(name, [same[t][0] for t in times], percent, size))
    return strips


def _spaced(count: int, most: int) -> list[int]:
    """At most so many of `range(count)`, evenly, the first and the last among them."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round())]


__all__ = [
    "BINS",
    "FLOPS_PER_MAC",
    "LATENCY",
    "Column",
    "Event",
    "Look",
    "Picture",
    "Run",
    "Spread",
    "Strip",
    "gather",
    "look",
    "look_at",
    "measure",
    "measure_run",
]
