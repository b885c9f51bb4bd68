"""What tests of pages share: the tiny runs that they show, what is embedded in a page, and what its reader sees.

Runs are trained once in a session, by `finished`. How a page is made is not known here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from support.finished import finished

# Gates that hardly move: what is closed in the beginning goes after two epochs, and nothing after three.
SHRINKS = get("budget-lenet5").override(
    name="shrinks", network="lenet300", placement="shrinkable", data="mnist5k", cost="params", at_most=0.4, on="kept",
    batch=50, epochs=4, finetune_epochs=1, gate_lr=1e-6, target_warmup=0.0,
    shrink_at=(2, 3), shrink_checks=2, shrink_multiple=4, shrink_gain=0.01,
)  # fmt: skip


def small(**changes: Any) -> Recipe:
    """LeNet-300-100 with input gates, for three epochs and one of tuning."""
    own = {"data": "mnist5k", "batch": 50, "epochs": 3, "finetune_epochs": 1, "at_most": 0.3}
    return get("budget-mlp").override(**(own | changes))


def small_run() -> Path:
    """The finished run of `small()`; nobody writes to it."""
    return finished(small(), images=200)


def shrunk_run() -> Path:
    """The finished run of `SHRINKS`, of whose units 99 of 300 and 40 of 100 are closed: 201 are left and 204 stay."""
    return finished(SHRINKS, images=100, closed={"fc1": 99, "fc2": 40})


WHOLE = SHRINKS.override(name="whole", placement="per_layer")


def whole_run() -> Path:
    """A finished run whose page has every chart there is: it has input gates, shrinks, skips an event and is tuned."""
    return finished(WHOLE, images=100, closed={"fc2": 99, "fc3": 40})


def embedded(page: str) -> dict[str, dict[str, Any]]:
    """The charts in a page by name, as its script will read them."""
    found = re.findall(r'<script type="application/json" id="data-([a-z0-9-]+)">(.*?)</script>', page, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def trace(chart: dict[str, Any], name: str) -> dict[str, Any]:
    """The trace of this name in a chart."""
    return next(t for t in chart["data"] if t["name"] == name)


def text_of(page: str) -> str:
    """What a reader sees, without scripts and style."""
    page = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def lines(chart: dict[str, Any]) -> list[tuple[float, str]]:
    """Vertical lines of a chart, with their labels."""
    shapes = [s["x0"] for s in chart["layout"].get("shapes", []) if s["x0"] == s["x1"]]
    labels = [(a["x"], a["text"]) for a in chart["layout"].get("annotations", [])]
    assert [x for x, _ in labels] == shapes
    return labels
