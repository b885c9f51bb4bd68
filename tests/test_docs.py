"""What the pages say is what was measured, every name and link on them leads somewhere, and the notebook is a page."""

import doctest
import json
import re
import statistics
import tomllib
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pytest

from support import ROOT
from support.scripts import loaded

PAGES = sorted((ROOT / "docs").glob("*.md"))


def renderer() -> ModuleType:
    return loaded(ROOT / "reproductions" / "render.py")


@pytest.mark.slow
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


OWN_LOOP = [(8, 0.5), (8, 0.3), (8, 0.15), (40, 0.5), (40, 0.3), (40, 0.15)]  # epochs, share of the MACs


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
        (line,) = [line for line in lines if line.startswith(start) and line.count("|") == 8]
        shown = [float(cell.split()[0]) for cell in line.split("|")[2:8]]
        for value, (epochs, at_most) in zip(shown, OWN_LOOP, strict=True):
            seeds = errors[method, epochs, 1.0 if method == "dense" else at_most]
            assert len(seeds) == 3
            assert value == round(sum(seeds) / 3, 2), (method, epochs, at_most)


def test_the_page_about_costs_has_the_stored_ratios() -> None:
    text = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    folder = ROOT / "results" / "benchmarks"
    on_arm, on_x86, inference, attaching = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("step_overhead", "step_overhead_x86", "inference", "attach_compact")
    )

    def ratio(row: Any, key: str, quartiles: str = "quartiles") -> str:
        return f"{row[key]:.3f} | {row[quartiles][0]:.3f} – {row[quartiles][1]:.3f} |"

    for row in on_arm["rows"]:
        name = {"MLP": "MLP 784-300-100"}.get(row["network"], row["network"])
        assert f"| {name} | `{row['placement']}` | {row['mode']} | {ratio(row, 'ratio')}" in text
    for row in (row for row in on_x86["rows"] if row["network"] == "MLP"):
        beside = ratio(row, "by_hand", "by_hand_quartiles")
        assert f"| `{row['placement']}` | {row['mode']} | {ratio(row, 'ratio')} {beside}" in text
    for row in inference["rows"]:
        assert f"| {row['batch']} | {ratio(row, 'time_ratio')} {row['macs_ratio']:.3f} |" in text
    for row in attaching["networks"].values():
        once, goals = row["forward_s"], [5 + 8 * row["forward_s"], 2 + 4 * row["forward_s"]]
        cells = [
            f"{once:.3f}",
            f"{row['attach_s']:.1f}",
            f"{goals[0]:.1f}",
            f"{row['compact_s']:.1f}",
            f"{goals[1]:.1f}",
        ]
        shown = f", {row['parameters'] / 1e6:.1f} M | {' | '.join([*cells, format(row['attach_memory'], '.1f')])} |"
        assert shown in text


def test_the_page_about_architectures_has_what_was_found() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "results" / "benchmarks" / "architectures.json").read_text())["architectures"]
    assert {row["outcome"] for row in rows.values()} <= {"exact", "refused"}
    for name, row in rows.items():
        axes = [str(row.get("kinds", {}).get(kind, "–")) for kind in ("heads", "units", "stream")]
        share, tokens = f"{100 * row.get('gated', 0):.0f} %", {True: "the same", None: ""}[row.get("tokens")]
        assert f"| {name} | {' | '.join([share, *axes, row['outcome'], tokens])} |" in page, name


# ---- what was measured in a loop of one's own -----------------------------------------------------------------------

WAS = 0.25  # the default of `learning` at the commit of these runs


def mean_error(method: str, at_most: float, **settings: Any) -> str:
    """Of two seeds with 8 epochs, or of one with 40; all but `settings` as it was by default."""
    chosen = {"epochs": 8, "learning": WAS, "gate_lr": None, "drop": 0.05, "streams": False} | settings
    runs = json.loads((ROOT / "results" / "own-loop" / "choosing-cifar100.json").read_text())["runs"]
    found = {
        row["seed"]: row["error"]
        for run in runs
        for row in run["rows"]
        if (row["method"], row["at_most"]) == (method, at_most)
        and {key: run["options"][key] for key in chosen} | {"learning": run["options"]["learning"] or WAS} == chosen
    }
    return f"{statistics.mean(found[seed] for seed in ((0, 1) if chosen['epochs'] == 8 else (0,))):.2f}"


def test_the_page_about_choosing_has_the_stored_errors() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("| | 8 epochs"))
    assert "\n".join(lines[top : top + 7]) in page  # and those of the README are held against the runs
    for at_most in (0.3, 0.15):
        errors = " | ".join(f"{mean_error('budget', at_most, learning=share)} %" for share in (0.1, 0.25, 0.4))
        assert f"| {100 * at_most:.0f} % | {errors} |" in page, at_most
    said = [
        *({"gate_lr": rate} for rate in (0.03, 0.3)),
        *({"drop": rate} for rate in (0.01, 0.2)),
        {},
        {"streams": True},
    ]
    for settings in said:
        assert " and ".join(mean_error("budget", share, **settings) for share in (0.3, 0.15)) + " %" in page, settings
    for settings in ({"epochs": 40, "streams": True}, {"epochs": 40}):
        for share in (0.3, 0.15):
            assert f"{mean_error('budget', share, **settings)} %" in page, (settings, share)


def test_the_page_about_choosing_has_what_the_pace_of_multipliers_brings() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    lines: dict[tuple[str, int, float], list[str]] = {}
    # By pace: the default, from 0.05, from 0.2, without the bound; slow gates.
    for file in ("pacing", "pacing_lenet5", "pacing_slow"):
        for row in json.loads((ROOT / "results" / "benchmarks" / f"{file}.json").read_text())["rows"]:
            errors, least = row["errors"], row["least_kept"]
            told = f"{fmean(errors):.2f} ± {stdev(errors) / len(errors) ** 0.5:.2f} % ({100 * fmean(least):.0f} %)"
            lines.setdefault((row["network"], row["epochs"], row["at_most"]), []).append(told)
    assert len(lines) == 12
    for (network, epochs, at_most), cells in lines.items():
        name = {"lenet300": "MLP 784-300-100", "lenet5": "LeNet-5"}[network]
        cells += ["–"] * (5 - len(cells))  # where gates are slower anyway
        assert f"| {name} | {epochs} | {100 * at_most:.0f} % | {' | '.join(cells)} |" in page


def test_the_page_about_choosing_has_the_stored_times() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for file, device in (("latency_budget_cuda", "H200"), ("latency_budget_cpu", "CPU")):
        stored = json.loads((ROOT / "results" / "benchmarks" / f"{file}.json").read_text(encoding="utf-8"))
        for row in stored["predict"]:
            errors = " | ".join(f"{100 * row[key]:.1f} %" for key in ("median_error", "worst_error"))
            start = f"| {device}, {row['batch']:,} | {row['networks']} | {row['took_s']:.0f} | {errors}"
            assert f"{start} | {100 * row['median_error_of_macs']:.0f} % |" in page.replace("*", ""), row["network"]
    for row in stored["train"]["rows"]:
        cells = f"| {row['error']:.1f} % | {row['macs']:.3f} | {row['predicted']:.3f} | {row['measured']:.3f} |"
        assert f"| `{row['cost']}={row['at_most']}`, seed {row['seed']} {cells}" in page, row


# ---- names and links ------------------------------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """The rooms of the reference, each with the names that it lists."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|`]+ \(`([\w.]+)`\) \| (.*) \|$", text, re.MULTILINE)
    return {room.replace("l0.", "ellzero."): re.findall(r"`(\w+)`", names) for room, names in rows}


def test_the_reference_has_every_public_name_of_the_rooms_that_are_extended() -> None:
    rooms = documented()
    rooms["ellzero.objectives.duals"] = rooms.pop("ellzero.duals")
    rooms["ellzero.gates.distributions"] = rooms.pop("ellzero.distributions")
    shown = re.findall(r"automodule:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    for room, names in rooms.items():
        module = import_module(room)
        public = vars(module).get("__all__")
        if public is None and room == "ellzero.objectives.duals":
            public = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == room]
        assert public is None or sorted(names) == sorted(public), room
        for name in names:
            value = vars(module)[name]
            if isinstance(value, type) or callable(value):
                home = vars(value).get("__module__", value.__module__)
                written = home in shown or (room in shown and name in (public or ()))
                assert written or name in ("Phi", "Where"), f"`{home}` is not in the reference, and has `{name}`"


def test_the_table_of_where_things_are_is_true() -> None:
    """Every file that a row names is there, and every other name of the row is in one of its files."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("Where is …?")[2].partition("\n\nThe tables")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in table.splitlines() if ".py`" in line]
    assert len(rows) == 7
    for row in rows:
        files = [name for name in row if name.endswith(".py")]
        homes = [ROOT / "src" / "ellzero" / name for name in files if "/" in name]
        homes += [homes[-1].parent / name for name in files if "/" not in name]
        code = "".join(home.read_text(encoding="utf-8") for home in homes)
        for name in set(row).difference(files):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", code), (name, files)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as links have them."""
    text = page.read_text(encoding="utf-8")
    if include := re.search(r"\{include\} (\S+)", text):
        text = (page.parent / include[1]).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = page if not target else page.parent / target
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_order_of_reading_and_pictures_are_small() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [name for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for name in block.split()]
    for page in PAGES:
        assert page.stem == "index" or listed.count(page.stem) == 1, page.stem
    assert all(picture.stat().st_size < 200_000 for picture in (ROOT / "docs" / "pictures").glob("*"))


def test_the_page_about_installing_has_the_extras_and_the_range_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(project["optional-dependencies"])
    (torch_range,) = [line for line in project["dependencies"] if line.startswith("torch>")]
    low, beyond = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch_range).groups()  # type: ignore[union-attr]
    assert f"PyTorch 2.{low} to 2.{int(beyond) - 1}" in page


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_the_notebook_is_the_quickstart() -> None:
    """Its cells hold the examples of the page, each once and in order: those run as doctests, with what they print."""
    tool = loaded(ROOT / "tools" / "make_notebook.py")
    text, page = (path.read_text(encoding="utf-8") for path in (tool.NOTEBOOK, tool.PAGE))
    assert text == tool.notebook(page), "run tools/make_notebook.py"
    code = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    examples = doctest.DocTestParser().get_examples(page)
    assert "\n".join(code) + "\n" == "".join(example.source for example in examples)
    assert sum(bool(example.want) for example in examples) >= 5
