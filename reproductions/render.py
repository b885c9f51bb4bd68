"""The tables of docs/reproduction.md, made from the stored results: `python reproductions/render.py`."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from ellzero.reproduce import interval

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reproduction.md"
TABLES = {
    "louizos2018-table1": ["louizos-mlp", "louizos-mlp-sep", "louizos-lenet5", "louizos-lenet5-sep"],
    "gallego2021-table1": ["gallego-mlp", "gallego-mlp-layers", "gallego-lenet5", "gallego-lenet5-layers"],
}


def markdown(name: str) -> str:
    """One table: a row per recipe, ours beside the paper's."""
    head = [
        "row",
        "paper",
        "ours, median seed",
        "paper, error %",
        "best %",
        "last %",
        "density expected",
        "kept",
        "weights kept",
        "MACs kept",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for recipe in TABLES[name]:
        record = json.loads((ROOT / "results" / name / f"{recipe}.json").read_text(encoding="utf-8"))
        seeds = record["seeds"]
        last, half = interval([s["error_last"] for s in seeds])
        best, spread = interval([s["error_best"] for s in seeds])
        middle = sorted(seeds, key=lambda s: s["costs"]["params"]["kept"])[len(seeds) // 2]
        shares = [
            f"{100 * statistics.fmean(s['costs'][c][k] for s in seeds):.1f} %"
            for c, k in (("l0_norm", "expected"), ("l0_norm", "kept"), ("params", "kept"), ("macs", "kept"))
        ]
        cells = [
            record["row"],
            record["published"]["architecture"],
            "-".join(str(n) for n in middle["architecture"].values()),
            record["published"]["error"].replace("|", "/"),
            f"{best:.2f}" + ("" if math.isnan(spread) else f" ± {spread:.2f}"),
            f"{last:.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}"),
            *shares,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    count, epochs = len(seeds), record["recipe"]["epochs"]
    lines.append(
        f"\n{count} seeds, {epochs} epochs, {record['device']}, torch {record['torch']}, "
        f"commit `{record['commit'][:12]}`."
    )
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with every table between its markers replaced."""
    for name in TABLES:
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n{markdown(name)}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
