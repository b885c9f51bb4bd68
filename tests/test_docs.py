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
    first = {"wrn": "dense", "louizos-wrn-0.001": "λ=0.001", "shrink-wrn-35": "35 %", "shrink-wrn-20": "20 %"}
    for data in ("cifar10", "cifar100"):
        for name in (*first, "dropped-wrn-20"):
            file = ROOT / "results" / f"wrn-{data}" / f"{name}-{data}.json"
            whole = json.loads((file.parent / f"wrn-{data}.json").read_text())["seeds"][0]
            if file.exists():
                seed = json.loads(file.read_text())["seeds"][0]
                ratio = seed["seconds_of_stack"] / whole["seconds_of_stack"]
                shown = "1" if ratio == 1 else f"{ratio:.3f}"
                rows = [line for line in text.splitlines() if line.startswith(f"| {first.get(name, '20 %, not')}")]
                assert any(f"| {seed['error_last']:.2f} % | {shown} |" in row for row in rows), (name, data)
                macs = 100 * (seed["costs"]["macs"]["kept"] if "costs" in seed else 1.0)
                assert any(f"| {macs:.1f} % |" in row for row in rows), (name, data)


def test_the_readme_has_the_stored_errors_of_ones_own_loop() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = {
        "budget": "| `Budget` |",
        "continued": "| dense for half of the epochs",
        "magnitude": "| dense for half, Torch",
    }
    rows |= {"narrow": "| uniformly narrower", "dense": "| dense |"}
    errors: dict[tuple[str, int, float], list[float]] = {}
    for run in json.loads((ROOT / "results" / "own-loop" / "cifar10.json").read_text())["runs"]:
        for row in run["rows"]:
            errors.setdefault((row["method"], run["options"]["epochs"], row["at_most"]), []).append(row["error"])
    for method, start in rows.items():
        (line,) = [line for line in lines if line.startswith(start) and line.count("|") == 5]
        shown = [float(cell.split()[0]) for cell in line.split("|")[2:5]]
        for value, (epochs, at_most) in zip(shown, [(8, 0.3), (8, 0.15), (40, 0.3)], strict=True):
            seeds = errors[method, epochs, 1.0 if method == "dense" else at_most]
            assert len(seeds) == 3
            assert value == round(sum(seeds) / 3, 2), (method, epochs, at_most)
