"""Transformers under one budget of MACs over heads, feed-forward layers and the residual stream.

    ellzero reproduce gpt-shakespeare --every 2 --device cuda
    ellzero reproduce vit-cifar10 --every 10 --device cuda

A character GPT (6 layers, 6 heads, width 384) on Shakespeare: nanoGPT gives 1.4697 as its best loss per character on
the last tenth of the text, after 5,000 steps. So best counts here too; it is the loss of all of that tenth, in windows
of 256 characters that do not overlap, where nanoGPT draws 200 batches of windows.

ViT-Lite-7/4 on CIFAR-10: Hassani et al. (2021) give 91.38 % accuracy after 200 epochs, which is an error of 8.62 %, and
90.94 % for ViT-Lite-6/4. They count 239 and 205 M MACs, without the products of queries, keys and values.

In the rows with gates, LayerNorms subtract no mean (`l0.centred`), so that the stream can shrink. The gates choose for
two fifths of the epochs of the GPT and for six of ViT-Lite's (by `vit-split`); then the network shrinks, and trains on
alone. Beside them are narrower networks of about as many MACs, trained from scratch in as many epochs.

"heads" and "feed-forward" are what is left in each layer, of the first seed; "stream" is the width of the stream.
Seconds are those of training: compilation is in them, evaluation is not.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ellzero.experiments.data import stand_in
from ellzero.experiments.figures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    bars,
    grid,
    in_rows,
    legend,
    save,
    squares,
)
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.statistics import with_interval
from ellzero.experiments.study import Row, Study
from ellzero.out.tables import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]


def scratch(dense: str, network: str) -> Recipe:
    """The recipe of the dense network with a smaller one in its place."""
    data = dense.partition("-")[2]
    return get(dense).override(name=f"{network}-{data}", network=network)


ROWS = (
    Row("dense", get("gpt-shakespeare"), error="1.4697"),
    Row("50 % of the MACs", get("gpt-50-shakespeare")),
    Row("width 264 from scratch", scratch("gpt-shakespeare", "gpt-6-6-264")),
)
ROWS_VIT = (
    Row("dense", get("vit-cifar10"), error="8.62"),
    Row("50 % of the MACs", get("vit-50-cifar10")),
    Row("30 % of the MACs", get("vit-30-cifar10")),
    Row("6 layers from scratch", scratch("vit-cifar10", "vit-lite-6-4"), error="9.06"),
    Row("width 176 from scratch", scratch("vit-cifar10", "vit-lite-7-4-176")),
    Row("width 136 from scratch", scratch("vit-cifar10", "vit-lite-7-4-136")),
)


def chosen_by() -> Iterator[Row]:
    """Half and 30 % of the MACs in 60 epochs, tested on images held out of the training set: to choose settings by."""
    early, later = {"settle_at": 6}, {"settle_at": 12}
    after = {"weights_first": 0.1, "settle_at": 12}
    for percent, name, changed in (
        (50, "settled after 2/5", {"settle_at": 24}),
        (50, "settled after 1/10", early),
        (50, "settled after 1/20", {"settle_at": 3}),
        (50, "settled after 1/5, blocks", {**later, "placement": "everything"}),
        (50, "settled after 1/10, blocks", {**early, "placement": "everything"}),
        (50, "settled after 1/10, half the dropout", {**early, "dropout": 0.05}),
        (50, "settled after 1/10, twice the rate", {**early, "lr": 1e-3}),
        (50, "settled after 1/10, half the decay", {**early, "l2": 0.015}),
        (50, "settled after 1/10, averaged", {**early, "ema": 0.999}),
        (50, "settled after 1/5, slowly", {**later, "target_warmup": 0.9}),
        (50, "after 1/10 without gates, settled after 1/5", after),
        (30, "settled after 1/10", early),
        (30, "settled after 1/20", {"settle_at": 3}),
        (30, "after 1/10 without gates, settled after 1/5", after),
        (30, "settled after 1/10, averaged", {**early, "ema": 0.999}),
        (30, "settled after 1/5, slowly", {**later, "target_warmup": 0.9}),
    ):
        short = re.sub("[^0-9a-z]+", "-", name)
        recipe = get(f"vit-{percent}-cifar10").override(data="cifar10-split", epochs=60)
        label = name if percent == 50 else f"{percent} %: {name}"
        yield Row(label, recipe.override(name=f"vit-{percent}-split-{short}", **changed))
    for width in (176, 136):
        narrow = scratch("vit-cifar10", f"vit-lite-7-4-{width}").override(data="cifar10-split", epochs=60)
        yield Row(f"width {width} from scratch", narrow.override(name=f"vit-split-{width}"))


def parts(seed: Record) -> dict[str, list[int]]:
    """What is left of heads and feed-forward layers, layer by layer, and of the stream; nothing where no gates were."""
    found: dict[str, list[int]] = {"heads": [], "feed-forward": [], "stream": []}
    for name, units in seed.get("architecture", {}).items() if "costs" in seed else ():
        kind = {"qkv": "heads", "up": "feed-forward", name: "stream"}.get(name.rpartition(".")[2])
        if kind is not None:
            found[kind].append(units)
    return found


def sizes(record: Record) -> list[str]:
    """MACs of an example and parameters, in millions; of what is left also the share of the dense network's."""
    seeds, recipe = record["seeds"], Recipe.from_dict(record["recipe"])
    if all("costs" in s for s in seeds):
        costs = [(s["costs"]["macs"], s["costs"]["params"]) for s in seeds]
        whole = [cost["dense"] for cost in costs[0]]
        shares = [statistics.fmean(cost["kept"] for cost in column) for column in zip(*costs, strict=True)]
        return [f"{w * s / 1e6:,.2f} ({100 * s:.1f} %)" for w, s in zip(whole, shares, strict=True)]
    noise = stand_in(recipe.data, 1)
    model = recipe.facts.make(len(noise.classes)).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(noise.example(1))
    numbers = counted.get_total_flops() / 2, sum(p.numel() for p in model.parameters())
    return [f"{number / 1e6:,.2f}" for number in numbers]


def table(records: Sequence[Record], title: str) -> Table:
    digits = ".2f" if Recipe.from_dict(records[0]["recipe"]).in_percent else ".4f"
    left = ("row", "heads", "feed-forward", "stream")
    right = ("published", "best", "last", "M MACs", "M parameters", "seconds")
    out = new_table(title, left, right, fold=True)
    for record in records:
        seeds = record["seeds"]
        out.add_row(
            record["row"],
            *("-".join(map(str, units)) or "–" for units in parts(seeds[0]).values()),
            record["published"]["error"] or "–",
            *(with_interval([s[name] for s in seeds], digits) for name in ("error_best", "error_last")),
            *sizes(record),
            f"{statistics.fmean(s['seconds_of_stack'] for s in seeds):.0f}",
        )
    return out


def whole(recipe: Recipe) -> tuple[int, int, int]:
    """Heads and feed-forward units of a layer of the dense network, and the width of its stream."""
    with torch.device("meta"):
        block: Any = recipe.facts.make(10).get_submodule("blocks.0")
    entries = next(vars(m)["entries"] for m in block.modules() if "entries" in vars(m))  # of a head
    return block.out.in_features // entries, block.up.out_features, block.out.out_features


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    recipe = Recipe.from_dict(records[0]["recipe"])
    colours = dict(zip((r["row"] for r in records), (INK, VERMILION, BLUE, ORANGE, GREEN, PURPLE), strict=False))
    with grid(1, 3, size=(10.0, 3.2)) as (figure, (error, heads, widths)):
        for record in records:
            for number, seed in enumerate(record["seeds"]):
                epochs, values = zip(*((h["epoch"], h["error"]) for h in seed["history"]), strict=True)
                label, thin = (record["row"], 1.4) if number == 0 else (None, 0.6)
                error.plot(epochs, values, label=label, linewidth=thin, color=colours[record["row"]])
        what = f"test {recipe.error}{' (%)' * recipe.in_percent}"
        error.set(title="(a) what it gives", xlabel="epoch", ylabel=what, yscale="log")
        error.yaxis.set_major_formatter("{x:g}")
        error.yaxis.set_minor_formatter("{x:g}")
        draw_layers(heads, widths, [(parts(r["seeds"][0]), colours[r["row"]]) for r in records], whole(recipe))
        legend(figure, error)
        caption = f"""{recipe.facts.title} on {recipe.data}, {records[0]["device"]}. (a) The error noted in training,
            over epochs; thin lines are further seeds. (b), (c) What is left in each layer of the networks with gates,
            by colour, of the first seed: as many squares are full as heads are kept; bars are feed-forward units, the
            last one the stream; grey is what the dense network has."""
        return save(figure, folder / f"{recipe.name}", caption)


def draw_layers(
    heads: "Axes", widths: "Axes", left: Sequence[tuple[dict[str, list[int]], str]], dense: tuple[int, int, int]
) -> None:
    """Squares for the heads of each network beside each other, and bars for its widths; which heads is not known."""
    left = [(found, colour) for found, colour in left if any(found.values())]
    layers, streams = (max((len(found[kind]) for found, _ in left), default=0) for kind in ("heads", "stream"))
    of_head, of_layer, of_stream = dense
    for k, (found, colour) in enumerate(left):
        squares(heads, [[1.0] * n + [0.0] * (of_head - n) for n in found["heads"]], colour, k * (of_head + 1))
        rows = [(of_layer, n) for n in found["feed-forward"]] + [(of_stream, n) for n in found["stream"]]
        each = 0.8 / len(left)
        bars(widths, rows, colour, (k + 0.5) * each - 0.4, 0.9 * each)
    numbers = [str(k + 1) for k in range(layers)]
    for panel, title, names in ((heads, "(b) heads", numbers), (widths, "(c) widths", numbers + ["stream"] * streams)):
        panel.set(title=title, ylabel="layer", xticks=[])
        in_rows(panel, names)


TITLE = "A character GPT on Shakespeare: validation loss per character"
TITLE_VIT = "ViT-Lite on CIFAR-10: test error in percent"
STUDY_VIT = Study("vit-cifar10", TITLE_VIT, ROWS_VIT, seeds=1, table=table, draw=draw, keep_networks=True)
TITLE_SPLIT = "ViT-Lite at half of its MACs: error in percent on images held out of the training set"
SPLIT_VIT = Study("vit-split", TITLE_SPLIT, tuple(chosen_by()), seeds=1, table=table)
STUDY = Study("gpt-shakespeare", TITLE, ROWS, seeds=1, table=table, draw=draw, keep_networks=True)
