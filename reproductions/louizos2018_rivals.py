"""Louizos, Welling, Kingma (2018), Table 1: the rows that are not L0, each by its own method.

    ellzero reproduce louizos2018-rivals --device cuda
    ellzero reproduce louizos2018-rivals --draw-only --out results/louizos2018-rivals

The paper copies these rows from other papers. What is known of how they were made, and what is ours:

Sparse VD (Molchanov et al., 2017): the authors' script. From scratch, θ ~ N(0, 0.01²), log σ² = −10; Adam 1e-3,
constant to epoch 100 and then on a line to zero at 200 (LeNet-5: on a line from the first epoch); KL/N, zero to epoch 5
and whole from 20; noise by local reparametrisation; log α < 3. Both printed rows are a re-run of Louizos et al. (2017).

BC-GNJ and BC-GHS (Louizos, Ullrich & Welling, 2017): as the paper has it, Adam 1e-3, 200 epochs, KL/N that rises over
the first 100, means as He, σ of the first layer at most 0.2 (MLP) or 0.5 (LeNet-5), averaged parameters; pixels in [−1,
1] as in the authors' tutorial. They set thresholds by eye for each layer: the MLP's are those of the tutorial, GNJ's on
LeNet-5 is log α < 0. Of GHS no code is public: its thresholds are ours.

GL (Wen et al., 2016): their example, SGD 0.01 with momentum 0.9, ×0.1 at 60 % and 80 %, λ = 0.005 on the maps of both
convolutions and on nothing else; by proximal steps in place of their threshold at 1e-4; from scratch, batches of 100.
The printed 192 is 12 maps × 16, as here. There is no row for this MLP, and its λ is ours.

SBP (Neklyudov et al., 2017): the authors' optimizer, 1e-3 for weights and gates, constant to epoch 100 and then on a
line to zero, batches of 128, KL/N, SNR > 1; Adam's β₁ is 0.9, not 0.95. They begin with a trained network: here the
first 20 epochs train the weights alone. Their public script is of another network than the printed row.

GD (Srinivas & Babu, 2016, in the table of the second paper): no code is known. Adam 1e-3, gates 1e-2, ×0.1 at 50 % and
70 %, L2 1e-4, Beta(1e-4, 0.5), a start at θ = 0.63 after 20 epochs without noise, as the one public re-run has it, but
by straight-through and with 1[θ ≥ ½] at test time. The printed 208 is 13 maps × 16.

Dropout is in the paper's figure 3 only: 0.2 on the inputs of the MLP and on maps, 0.5 elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.table import Table

from ellzero.experiments.campaign import Record
from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study, cells, took
from ellzero.out.tables import new_table

ROWS = (
    Row("MLP, Sparse VD", get("sparse-vd-mlp"), "512-114-72", "1.8"),
    Row("MLP, BC-GNJ", get("bc-gnj-mlp"), "278-98-13", "1.8"),
    Row("MLP, BC-GHS", get("bc-ghs-mlp"), "311-86-14", "1.8"),
    Row("MLP, GL", get("gl-mlp")),
    Row("MLP, SBP", get("sbp-mlp")),
    Row("MLP, GD", get("gd-mlp")),
    Row("MLP, dropout", get("dropout-mlp")),
    Row("LeNet-5, Sparse VD", get("sparse-vd-lenet5"), "14-19-242-131", "1.0"),
    Row("LeNet-5, GL", get("gl-lenet5"), "3-12-192-500", "1.0"),
    Row("LeNet-5, GD", get("gd-lenet5"), "7-13-208-16", "1.1"),
    Row("LeNet-5, SBP", get("sbp-lenet5"), "3-18-284-283", "0.9"),
    Row("LeNet-5, BC-GNJ", get("bc-gnj-lenet5"), "8-13-88-13", "1.0"),
    Row("LeNet-5, BC-GHS", get("bc-ghs-lenet5"), "5-10-76-16", "1.0"),
    Row("LeNet-5, dropout", get("dropout-lenet5")),
)
L0 = Path(__file__).parent.parent / "results" / "louizos2018-table1"
FACTOR, POINTS = 1.5, 0.2  # a row reproduces if its weights are within this factor, and an error within these points


def weights(architecture: Sequence[int]) -> int:
    """How many weights a pruned MLP (784-300-100) or LeNet-5 (20-50-800-500) has, by what is left in each place."""
    if len(architecture) == 3:
        pixels, first, second = architecture
        return pixels * first + first * second + second * 10
    maps, others, inputs, hidden = architecture
    return 25 * maps + 25 * maps * others + inputs * hidden + hidden * 10


def middle(record: Record) -> list[int]:
    """The architecture of the seed with the median number of parameters."""
    seeds = sorted(record["seeds"], key=lambda s: s["costs"]["params"]["kept"])
    return list(seeds[len(seeds) // 2]["architecture"].values())


def verdict(record: Record) -> str:
    """Whether a row reproduces: "yes", or "no" and what is off."""
    published, recipe = record["published"], record["recipe"]
    if recipe["epochs"] < 200:
        return f"a rehearsal of {recipe['epochs']} epochs"
    if not published["architecture"]:
        return "nothing is published"
    ratio = weights(middle(record)) / weights([int(n) for n in published["architecture"].split("-")])
    errors = [fmean(s[name] for s in record["seeds"]) for name in ("error_best", "error_last")]
    off = min((e - float(published["error"]) for e in errors), key=abs)
    why = []
    if not 1 / FACTOR <= ratio <= FACTOR:
        why.append(f"{ratio:.2g} × the weights")
    if off > POINTS or off < -POINTS:
        why.append(f"{abs(off):.1f} points {'more' if off > 0 else 'less'} error")
    return f"no: {', '.join(why)}" if why else "yes"


def table(records: Sequence[Record], title: str) -> Table:
    """All rows, those that have not been run too, and the rows of L0 that are stored."""
    found = {record["recipe"]["name"]: record for record in records}
    right = ("paper, error %", "best %", "last %", "parameters", "MACs", "seconds")
    out = new_table(title, ("row", "paper", "ours", "reproduces"), right)
    for row in ROWS:
        record, paper = found.get(row.recipe.name), row.architecture or "–"
        if record is None:
            out.add_row(row.label, paper, "not run yet", "", row.error or "–", *[""] * 5)
        else:
            _add(out, record, verdict(record))
    for file in sorted(L0.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        record["row"] = record["row"].replace(", ", ", L0 ")
        _add(out, record, verdict(record))
    return out


def _add(out: Table, record: Record, said: str) -> None:
    published = record["published"]
    best, last, _, _, params, macs = cells(record["seeds"])
    architecture = "-".join(map(str, middle(record)))
    error = published["error"] or "–"
    paper = published["architecture"] or "–"
    out.add_row(record["row"], paper, architecture, said, error, best, last, params, macs, took(record))


STUDY = Study(
    name="louizos2018-rivals", title="Louizos et al. (2018), Table 1: the other methods", rows=ROWS, table=table
)

if __name__ == "__main__":
    import sys

    from ellzero.cli import main

    sys.exit(main(["reproduce", STUDY.name, *sys.argv[1:]]))
