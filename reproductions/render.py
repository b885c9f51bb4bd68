"""The tables and figures of docs/reproduction.md, made from the stored results: `python reproductions/render.py`.

A table, of a study or of step times from results/benchmarks/, stands between `<!-- NAME -->` and
`<!-- end of NAME -->`, a figure between `<!-- figure NAME -->` and `<!-- end of figure NAME -->`; NAME is known here.
What is not stored yet is said to be so.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ellzero.experiments.campaign import Record, lengths
from ellzero.experiments.store.statistics import with_interval
from ellzero.experiments.study import find, stored, studies
from ellzero.out.tables import markdown, new_table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reproduction.md"

# Folder of results/: the study that it is of.
TABLES = {
    "louizos2018-table1": "louizos2018-table1",
    "louizos2018-rivals": "louizos2018-rivals",
    "gallego2021-table1": "gallego2021-table1",
    "gallego2021-init": "gallego2021-init",
    "gallego2021-extragradient": "gallego2021-extragradient",
    "gallego2021-figure2": "gallego2021-figure2",
    "control-40": "control",
    "control-200": "control",
    "wrn-cifar10": "wrn-cifar10",
    "wrn-cifar100": "wrn-cifar100",
    "arena": "arena",
    "arena-split": "arena-split",
    "arena-split-8": "arena-split",
    "frontier": "frontier",
    "frontier-split": "frontier-split",
    "gpt-shakespeare": "gpt-shakespeare",
    "vit-cifar10": "vit-cifar10",
    "vit-split": "vit-split",
}
# Runs of results/benchmarks/budget_ablation_lenet300.json that are shown: name there, and what it is.
ABLATION = {
    "base": "starts at 0.5",
    "learning-20": "starts at 0.5, learns for 0.2",
    "keep-90": "starts at 0.9, learns for 0.2",
    "inputs-20": "starts at 0.5, learns for 0.2, pixels gated",
    "inputs-20-keep-90": "starts at 0.9, learns for 0.2, pixels gated",
    "shape-of-base": "the first one's shape, new weights",
    "shape-of-inputs-20": "the fourth one's shape, new weights",
    "cut-norm": "trained for 0.2, then cut by norm",
    "narrow": "narrower",
    "dense": "dense",
}
# Files of results/benchmarks/ with the times of steps.
STEPS = ("training_speed", "wrn_speed")
# Figure in the page: where in results/ it lies, without its ending.
FIGURES = {
    "louizos2018-figure1": "louizos2018-figure1/figures/louizos2018-figure1",
    "louizos2018-figure2": "louizos2018-figure2/figures/louizos2018-figure2",
    "louizos2018-figure3": "louizos2018-table1/figures/louizos2018-figure3",  # drawn from the results of Table 1
    "gallego2021-figure1": "gallego2021-figure1/figures/gallego2021-figure1",
    "gallego2021-figure2": "gallego2021-figure2/figures/gallego2021-figure2",
    "control-40": "control-40/figures/control",
    "control-200": "control-200/figures/control",
    "wrn-cifar10": "wrn-cifar10/figures/wrn-cifar10",
    "wrn-cifar100": "wrn-cifar100/figures/wrn-cifar100",
    "arena": "arena/figures/arena",
    "gpt-shakespeare": "gpt-shakespeare/figures/gpt-shakespeare",
    "vit-cifar10": "vit-cifar10/figures/vit-cifar10",
}


def table(name: str, root: Path = ROOT) -> str:
    """One table, and where its numbers come from."""
    folder = root / "results" / name
    if not folder.is_dir():
        return "No results are stored yet."
    study = find(TABLES[name], studies())
    records, missing = stored(study, folder)
    assert study.table is not None
    lines = [markdown(study.table(records, "")), "", source(records)]
    if missing:
        some = len(missing) <= 4
        lines[-1] += f" Not stored: {', '.join(missing) if some else f'{len(missing)} of {len(study.names)} rows'}."
    return "\n".join(lines)


def steps(name: str, root: Path = ROOT) -> str:
    """Step times and their ratios to the dense network's, as they are and compiled, and where they are from."""
    file = root / "results" / "benchmarks" / f"{name}.json"
    if not file.is_file():
        return "No results are stored yet."
    record = json.loads(file.read_text(encoding="utf-8"))
    found = record.get("steps_of_networks") or {
        record["options"]["network"]: {
            f"{kind}, {way}": numbers for way, kinds in record["steps"].items() for kind, numbers in kinds.items()
        }
    }
    ways = list(dict.fromkeys(label.rpartition(", ")[2] for kinds in found.values() for label in kinds))
    right = [column for way in ways for column in (f"ms, {way}", "× dense", "range")]
    out = new_table("", ("network", ""), right)
    for network, kinds in found.items():
        for kind in dict.fromkeys(label.rpartition(", ")[0] for label in kinds):
            cells = []
            for n in (kinds[f"{kind}, {way}"] for way in ways):
                dense = kind == "dense"  # to itself
                cells += [f"{n['milliseconds']:.3f}", f"{n['ratio']:.3f}"]
                cells.append("–" if dense else f"{n['ratio_low']:.3f}–{n['ratio_high']:.3f}")
            out.add_row(network, kind, *cells)
    rounds, many = record["options"]["rounds"], record["options"]["steps"]
    about = f"Medians and ranges over {rounds} rounds of {many} steps; {record['device']}, torch {record['torch']}"
    return f"{markdown(out)}\n\n{about}, commit `{record['commit'][:12]}`: `python benchmarks/{record['command']}`."


def families(root: Path = ROOT) -> str:
    """The step of each gate family compared with the dense network's."""
    file = root / "results" / "benchmarks" / "step_families.json"
    if not file.is_file():
        return "No results are stored yet."
    record = json.loads(file.read_text(encoding="utf-8"))
    out = new_table("", ("network", "family"), ("dense, ms", "× dense", "quartiles"))
    for row in record["families"]:
        low, high = row["quartiles"]
        out.add_row(
            row["network"], row["family"], f"{row['dense_ms']:.2f}", f"{row['ratio']:.2f}", f"{low:.2f}–{high:.2f}"
        )
    about = f"CPU time of one thread; {record['device']}, torch {record['torch']}, commit `{record['commit'][:12]}`"
    return f"{markdown(out)}\n\n{about}: `python benchmarks/{record['command']}`."


def ablation(root: Path = ROOT) -> str:
    """Mean error of the variants in `ABLATION` with its 95 % interval, by share of the MACs."""
    file = root / "results" / "benchmarks" / "budget_ablation_lenet300.json"
    if not file.is_file():
        return "No results are stored yet."
    record = json.loads(file.read_text(encoding="utf-8"))
    found = {v["name"]: {c["at_most"]: c["errors"] for c in v["cells"]} for v in record["variants"]}
    shares = list(dict.fromkeys(share for cells in found.values() for share in cells))
    out = new_table("", ("gates",), [f"{100 * share:.0f} %" for share in shares])
    for name, words in ABLATION.items():
        out.add_row(words, *(with_interval(found[name][share]) for share in shares))
    counts = sorted({len(found[name][share]) for name in ABLATION for share in shares})
    about = f"Seeds: {' or '.join(map(str, counts))}; {record['epochs']} epochs, {record['device']}"
    origin = f"torch {record['torch']}, commit `{record['commit'][:12]}`: `python benchmarks/{record['command']}`"
    return f"{markdown(out)}\n\n{about}, {origin}."


def source(records: list[Record]) -> str:
    """Seeds, epochs, device, version and commit, each as often as it differs."""

    def all_of(value: Callable[[Record], object]) -> str:
        return " or ".join(dict.fromkeys(str(value(r)) for r in records))

    commits = ", ".join(dict.fromkeys(f"`{str(r['commit'])[:12]}`" for r in records))
    return (
        f"Seeds: {all_of(lambda r: len(r['seeds']))}; {lengths(r['recipe'] for r in records)}, "
        f"{all_of(lambda r: r['device'])}, torch {all_of(lambda r: r['torch'])}, commit {commits}."
    )


def figure(name: str, root: Path = ROOT) -> str:
    """One figure with its caption."""
    caption = root / "results" / f"{FIGURES[name]}.txt"
    if not caption.is_file():
        return "No figure is stored yet."
    text = caption.read_text(encoding="utf-8").strip()
    return f"![{name}](figures/{name}.svg)\n\n*{text.replace('*', '')}*"


def page(text: str, root: Path = ROOT) -> str:
    """The page with everything between its markers replaced.

    Raises:
        ValueError: a marker is missing, or is there twice.
    """
    blocks = {name: table(name, root) for name in TABLES}
    blocks |= {name: steps(name, root) for name in STEPS} | {"step_families": families(root)}
    blocks["budget_ablation"] = ablation(root)
    blocks |= {f"figure {name}": figure(name, root) for name in FIGURES}
    for name, block in blocks.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"the page must have the markers of `{name}` once")
        inside = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        text = inside.sub(lambda _, new=f"{start}{block}\n{end}": new, text)
    return text


def copies(root: Path = ROOT) -> dict[Path, Path]:
    """The files that docs/figures/ must hold: each, and what it is a copy of."""
    out = {}
    for name, place in FIGURES.items():
        for ending in ("png", "svg"):
            original = root / "results" / f"{place}.{ending}"
            if original.is_file():
                out[root / "docs" / "figures" / f"{name}.{ending}"] = original
    return out


if __name__ == "__main__":
    for copy, original in copies().items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
