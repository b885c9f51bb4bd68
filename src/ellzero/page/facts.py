"""What a page says of one run, as plain data: its recipe, its history, its results, and what is left of its network.

`gather` reads a folder. A run that was cut off has less to say: what is missing is left out, and `notes` says why. The
network itself is seen by `looking`; how any of it is drawn is the business of `progress`, `network` and `run`.
"""

from __future__ import annotations

import binascii
import statistics
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ellzero.experiments import data
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint, records
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.train.building import targets
from ellzero.experiments.train.loop import restore
from ellzero.gated.module import Gated
from ellzero.graph.plan import ClosedAxisError
from ellzero.graph.tracing import mode
from ellzero.objectives.latency import device_name, interleaved
from ellzero.out.compaction import CompactionError, compact
from ellzero.page.looking import Look, look

LATENCY, FORMAT = "latency.json", "ellzero.latency"
FLOPS_PER_MAC = 2  # one multiplication, one addition
COSTS = {"l0_norm": "density", "params": "parameters", "macs": "MACs"}
_MOST_TIMES, _MOST_GATES = 160, 400  # what a screen can show


@final
@dataclass(frozen=True)
class Strip:
    """P(open) of the gates of a placement over time, in percent.

    Args:
        name: of the placement.
        epochs: of the records.
        percent: (gates, records), by falling P(open) at the end.
        gates: how many there are; where that is more than there are rows, some are left out, evenly.
    """

    name: str
    epochs: list[float]
    percent: npt.NDArray[np.uint8]
    gates: int


@final
@dataclass(frozen=True)
class Event:
    """What shrinking did after an epoch.

    Args:
        epoch: after which.
        settled: whether the gates are fixed since then.
        skipped: whether nothing was taken out: it would not have been worth it.
        widths: units of each placement before and after.
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
        strips: P(open) over time by placement.
        latency: rows that `measure` gave: `batch`, `dense_s`, `compact_s`, `runs`.
        measured_on: where they were measured, in words.
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
    latency: list[dict[str, float]]
    measured_on: str
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

    @cached_property
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

    @property
    def x(self) -> list[float]:
        """The epochs of its records."""
        return [float(record["epoch"]) for record in self.history]

    def seen(self, *keys: str, times: float = 1) -> list[float | None]:
        """A number of every record by its keys, such as "kept", "macs", times a factor; None where it is not there."""
        out: list[float | None] = []
        for record in self.history:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            known = isinstance(value, int | float) and not isinstance(value, bool)
            out.append(times * float(value) if known else None)
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
    history = folder.history()[index :: len(folder.recipes)]
    if any(not isinstance(r.get("epoch"), int | float) for r in history):
        raise FolderError(f"the history in {str(folder.path)!r} is damaged: a record has no epoch")
    results = folder.results()
    result = None if results is None else results[index]
    if result is not None and not isinstance(result, dict):
        raise FolderError(f"{str(folder.path / 'results.json')!r} is damaged: a result must be an object")
    seen, unseen = (seen, None) if seen is not None else look_at(folder, index)
    latency, where, unmeasured = _latency(folder)
    small = folder.path / "compact.safetensors"
    size = small.stat().st_size if small.is_file() and len(folder.recipes) == 1 else None
    notes = [why for why in (unseen, unmeasured) if why is not None]
    own, over_time = folder.recipes[index], strips(history)
    return Run(folder, index, own, history, result, seen, over_time, latency, where, size, notes)


def look_at(folder: Folder, index: int = 0) -> tuple[Look | None, str | None]:
    """What the network of the newest checkpoint looks like, or a sentence that says why it cannot be seen."""
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


# ---------------------------------------------------------------- how fast


def measure(dense: nn.Module, small: nn.Module, example: Tensor, budget: float = 1.5) -> list[dict[str, float]]:
    """Measures how long the dense and the compact network take, in turns, for one image and for 256.

    Args:
        dense: in evaluation mode, on the device to measure on.
        small: likewise.
        example: one image at least, on that device.
        budget: seconds to spend; a batch that would take longer is left out.

    Returns:
        For each batch its size `batch`, and the medians `dense_s` and `compact_s` of `runs` runs each.
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
    """Measures the network of a run on this machine's CPU, and stores that in the folder.

    Nothing happens without gates, or where `compact` refuses.

    Args:
        folder: of the run.
        network: its own, on the CPU.

    Raises:
        FileError: it cannot be stored.
    """
    if not isinstance(network, Gated):
        return
    try:
        small = compact(network, verify=False)
    except (ClosedAxisError, CompactionError):
        return
    image = data.scaled(data.stand_in(folder.recipes[0].data, 1).train_x)
    with mode(network.model, False), mode(small, False):
        rows = measure(network.model, small, image)
    about = {"device": device_name(image.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    records.write(folder.path / LATENCY, {"format": FORMAT, "format_version": 1, **about, "rows": rows}, indent=2)


def _latency(folder: Folder) -> tuple[list[dict[str, float]], str, str | None]:
    """What was measured and where, or why it cannot be shown."""
    file = folder.path / LATENCY
    if not file.exists():
        return [], "", None
    try:
        content = records.read_format(file, FORMAT, 1)
        rows = [{k: float(row[k]) for k in ("batch", "dense_s", "compact_s", "runs")} for row in content["rows"]]
        if any(min(row["dense_s"], row["compact_s"]) <= 0 for row in rows):
            raise ValueError("no time was spent")
        threads = int(content["threads"])
        where = f"{content['device']}, {threads} thread{'s' * (threads != 1)}, torch {content['torch']}"
        return rows, where, None
    except (FolderError, ValueError, KeyError, TypeError):
        return [], "", f"{LATENCY} is damaged, so that no latency is shown: `--speed` measures again."


# ---------------------------------------------------------------- over time


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


def strips(history: Sequence[Mapping[str, Any]]) -> list[Strip]:
    """P(open) over time, from "prob_open" of the records; one whose bytes do not fit the others is passed over."""
    found: dict[str, list[tuple[float, npt.NDArray[np.uint8]]]] = {}
    for record in history:
        packed = record.get("prob_open")
        for name, text in packed.items() if isinstance(packed, Mapping) else ():
            with suppress(binascii.Error, ValueError, TypeError):
                values = np.frombuffer(b64decode(text, validate=True), np.uint8)
                found.setdefault(str(name), []).append((record["epoch"], values))
    out = []
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
        out.append(Strip(name, [same[t][0] for t in times], percent, size))
    return out


def _spaced(count: int, most: int) -> list[int]:
    """At most so many of `range(count)`, evenly, the first and the last among them."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round())]
