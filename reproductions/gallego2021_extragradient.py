"""Gallego-Posada, Ramirez, Erraqabi (2021), section 3.3: extra-gradient against plain descent-ascent.

    ellzero reproduce gallego2021-extragradient --seeds 5 --device cuda

"Our experiments showed no significant difference in performance between GDA and extra-gradient." The paper shows no
numbers. The rows are those of Table 1 with one constraint, each with `extra_gradient` false and true and nothing else
changed; a pair of runs with the same seed starts from the same weights and sees the same batches, so that the
difference is taken seed by seed.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ellzero.experiments.papers import get
from ellzero.experiments.store.statistics import with_interval
from ellzero.experiments.study import Row, Study, took
from ellzero.out.tables import new_table

PAIRS = (("MLP, ε=33 %", get("gallego-mlp")), ("LeNet-5, ε=10 %", get("gallego-lenet5")))
ROWS = tuple(
    row
    for label, recipe in PAIRS
    for row in (
        Row(f"{label}, descent-ascent", recipe),
        Row(f"{label}, extra-gradient", recipe.override(name=f"{recipe.name}-extragradient", extra_gradient=True)),
    )
)


def differences(plain: dict[str, Any], extra: dict[str, Any], key: str) -> list[float]:
    """Extra-gradient less plain, of each seed that both have."""
    before = {s["seed"]: s for s in plain["seeds"]}
    return [s[key] - before[s["seed"]][key] for s in extra["seeds"] if s["seed"] in before]


def table(records: Sequence[dict[str, Any]], title: str) -> Table:
    out = new_table(title, ("row",), ("best %", "last %", "density expected", "kept", "seconds"))
    by_name = {record["recipe"]["name"]: record for record in records}
    for label, recipe in PAIRS:
        pair = [by_name.get(recipe.name), by_name.get(f"{recipe.name}-extragradient")]
        for record in pair:
            if record is not None:
                seeds = record["seeds"]
                errors = [with_interval([s[key] for s in seeds]) for key in ("error_best", "error_last")]
                densities = [
                    with_interval([100 * s["costs"]["l0_norm"][k] for s in seeds]) for k in ("expected", "kept")
                ]
                out.add_row(record["row"], *errors, *densities, took(record))
        if pair[0] is not None and pair[1] is not None:
            both = [with_interval(differences(pair[0], pair[1], key)) for key in ("error_best", "error_last")]
            out.add_row(f"{label}, difference", *both, "", "", "")
    return out


STUDY = Study(
    "gallego2021-extragradient", "Gallego-Posada et al. (2021), section 3.3: extra-gradient", ROWS, table=table
)
