"""What the pages say is what was measured."""

import json
from types import ModuleType

from support import ROOT
from support.scripts import loaded


def renderer() -> ModuleType:
    return loaded(ROOT / "reproductions" / "render.py")


def test_the_tables_are_those_of_the_stored_results() -> None:
    render = renderer()
    written = render.PAGE.read_text(encoding="utf-8")
    assert render.page(written) == written


def test_the_figures_are_those_of_the_stored_results() -> None:
    copies = renderer().copies()
    for copy, original in copies.items():
        assert copy.read_bytes() == original.read_bytes(), f"{copy.name}: run reproductions/render.py"
    there = set((ROOT / "docs" / "figures").glob("*")) if (ROOT / "docs" / "figures").is_dir() else set()
    assert there == set(copies)


def test_the_readme_has_the_stored_numbers_of_training_that_gets_faster() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = ("wrn-cifar10", "shrink-wrn-35-cifar10", "shrink-wrn-20-cifar10", "dropped-wrn-20-cifar10")
    seeds = [json.loads((ROOT / "results/wrn-cifar10" / f"{n}.json").read_text())["seeds"][0] for n in names]
    for seed in seeds:
        macs = seed["costs"]["macs"]["kept"] if "costs" in seed else 1.0
        ratio = seed["seconds_of_stack"] / seeds[0]["seconds_of_stack"]
        shown = "1" if ratio == 1 else f"{ratio:.3f}"
        assert f"| {100 * macs:.1f} % | {seed['seconds_of_stack']:.0f} | {shown} | {seed['error_last']:.2f} % |" in text
