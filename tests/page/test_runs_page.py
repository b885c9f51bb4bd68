"""The page of several runs: what is found in folders of every kind, means against sums by hand, and what it escapes."""

import json
import math
import os
import re
import shutil
import statistics
import sys
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ellzero.cli import main
from ellzero.experiments.figures import published
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.page import charts, page_file
from ellzero.page.collecting import COSTS, Note, collect
from ellzero.page.runs import groups, kinds, runs_page
from support import ROOT

MLP = get("gallego-mlp")
DENSE = {"l0_norm": 266_200.0, "params": 266_610.0, "macs": 266_200.0}


def result(recipe: Recipe, error: float = 1.5, kept: float = 0.25, **changes: Any) -> dict[str, Any]:
    """An entry of results.json, as `training` writes it."""
    costs = {c: {"dense": dense, "expected": min(kept + 0.01, 1.0), "kept": kept} for c, dense in DENSE.items()}
    out = {"recipe": recipe.name, "seed": recipe.seed, "error_best": error - 0.1, "error_last": error, "seconds": 1.0}
    if recipe.placement is not None:
        out |= {"gates": "raw", "architecture": {"fc1": 200, "fc2": 90, "fc3": 30}, "costs": costs}
    return out | changes


def finished(path: Path, *recipes: Recipe, page: bool = False, **changes: Any) -> Folder:
    folder = Folder.create(path, recipes)
    folder.finish([result(recipe, **changes) for recipe in recipes])
    if page:
        (path / "page.html").write_text("<title>its page</title>")
    return folder


def why(notes: list[Note]) -> dict[str, str]:
    return {note.where.name: note.why for note in notes}


# ---------------------------------------------------------------- what is found


def test_a_run_a_stack_and_a_folder_above_them(tmp_path: Path) -> None:
    finished(tmp_path / "all" / "one", MLP, page=True, error=2.0, kept=0.5)
    finished(tmp_path / "all" / "deep" / "stack", *(MLP.override(seed=s) for s in (1, 2)))
    runs, notes = collect([tmp_path / "all"])
    assert notes == []
    assert [(r.where.name, r.recipe.seed) for r in runs] == [("stack", 1), ("stack", 2), ("one", 0)]
    one = runs[2]
    assert one.errors == {"error_last": 2.0, "error_best": 1.9}
    assert one.kept == dict.fromkeys(DENSE, 0.5)
    assert one.expected["params"] == 0.51
    assert one.page == tmp_path / "all" / "one" / "page.html"
    assert runs[0].page is None


def test_pages_are_where_the_pages_of_runs_are_written(tmp_path: Path) -> None:
    stack = finished(tmp_path / "stack", *(MLP.override(seed=s) for s in (1, 2)))
    one = finished(tmp_path / "one", MLP)
    for folder, index in ((stack, 1), (one, 0)):
        page_file(folder, index).touch()
    runs, _ = collect([tmp_path])
    assert [run.page for run in runs] == [page_file(one), None, page_file(stack, 1)]


def test_what_is_given_twice_counts_once(tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "one", MLP)
    runs, notes = collect([tmp_path / "runs" / "one", tmp_path / "runs", tmp_path / "runs" / ".." / "runs" / "one"])
    assert (len(runs), notes) == (1, [])


def test_everything_that_is_no_finished_run_is_noted(tmp_path: Path) -> None:
    Folder.create(tmp_path / "new", [MLP])
    Folder.create(tmp_path / "cut", [MLP]).log([{"epoch": 3, "run": MLP.name, "seed": 0}])
    with (tmp_path / "cut" / "history.jsonl").open("a") as file:
        file.write('{"epoch": 4, "er')  # killed while it wrote
    Folder.create(tmp_path / "torn", [MLP]).log([{"epoch": 1}])
    (tmp_path / "torn" / "history.jsonl").write_text('not\n{"epoch": 2}\n')
    finished(tmp_path / "damaged", MLP)
    (tmp_path / "damaged" / "results.json").write_text("[{]")
    finished(tmp_path / "half", MLP)
    (tmp_path / "half" / "results.json").write_text('[{"error_best": 1.0, "error_last": null}]')
    finished(tmp_path / "no-costs", MLP)
    (tmp_path / "no-costs" / "results.json").write_text('[{"error_best": 1.0, "error_last": 1.0}]')
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.json").write_text("[1]")
    (tmp_path / "other" / "run.json").write_text("{}")
    (tmp_path / "text.txt").write_text("hello")
    finished(tmp_path / "good", MLP)
    names = ["new", "cut", "torn", "damaged", "half", "no-costs", "empty", "other", "text.txt", "nothing", "good"]
    runs, notes = collect(tmp_path / name for name in names)
    assert [run.where.name for run in runs] == ["good"]
    assert why(notes).keys() == set(names) - {"good"}
    assert len(notes) == len(names) - 1
    for name, words in (
        ("new", "no epoch has been evaluated"),
        ("cut", "epoch 3 of 200"),
        ("torn", "history is damaged"),
        ("damaged", "is damaged"),
        ("half", "`error_last` must be a number from 0 to 100, got None"),
        ("no-costs", "there is no 'costs'"),
        ("empty", "holds no run"),
        ("other", "format"),
        ("text.txt", "no record"),
        ("nothing", "nothing of this name"),
    ):
        assert words in why(notes)[name], name
    html = runs_page([tmp_path / name for name in names], tmp_path)
    assert html.count('<td class="where">') == 2 * len(notes) + 1


def test_a_page_without_a_finished_run_says_so(tmp_path: Path) -> None:
    assert "There is no finished run" in runs_page([tmp_path])
    with pytest.raises(ValueError, match="`paths` must be at least one"):
        runs_page([])


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    runs, notes = collect([tmp_path / "a", tmp_path / "self"])
    assert runs == []
    assert [note.where.name for note in notes] == ["self"] or len(notes) == 2


# ---------------------------------------------------------------- sweeps and reproductions


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep by the command line: two points, two seeds."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    small = ["--network", "lenet300", "--cost", "params", "--batch", "500", "--epochs", "1", "--finetune-epochs", "0"]
    words = ["sweep", "demo", "--at-most", "0.3,0.6", "--seeds", "2", "--out", str(out), "--quiet", *small]
    assert main([*words, "--device", "cpu"]) == 0
    return out


@pytest.mark.slow
def test_a_sweep_gives_the_numbers_of_its_own_json(swept: Path) -> None:
    record = json.loads((swept / "sweep.json").read_text())
    runs, notes = collect([swept])
    assert notes == []
    found = {group.label: group for group in groups(runs)}
    assert found.keys() == {"demo, at_most=0.3", "demo, at_most=0.6"}
    for point in record["points"]:
        group = found[f"demo, {point['label']}"]
        for name in ("error_best", "error_last"):
            mean, half = group.error(name)
            assert mean == pytest.approx(point["mean"][name])
            assert half == pytest.approx(point["mean"][f"{name}_interval"])
        for cost in COSTS:
            assert group.kept(cost)[0] == pytest.approx(point["mean"]["kept"][cost])
            assert group.expected(cost) == pytest.approx(point["mean"]["expected"][cost])
    (kind,) = kinds(runs)
    front = [f"demo, {record['points'][k]['label']}" for k in record["front"]]
    assert [group.label for group in kind.front(record["cost"], "error_last")] == front


def test_a_sweep_in_the_middle_says_what_is_missing(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(swept, out)
    stacks = sorted((out / "stacks").iterdir())
    (stacks[0] / "results.json").unlink()
    runs, notes = collect([out])
    assert "is not finished: epoch 1 of 1" in notes[0].why
    shutil.rmtree(stacks[0])
    fewer, notes = collect([out])
    assert len(fewer) == len(runs)
    assert len(notes) == 1
    assert re.search(rf"{4 - len(runs)} of 4 runs were not begun", notes[0].why)
    (out / "sweep.json").write_text("{")
    still, notes = collect([out])
    assert len(still) == len(runs)  # the stacks speak for themselves
    assert "damaged" in notes[0].why


def test_a_diverged_run_of_a_sweep_is_noted_in_its_words(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "stacks" / "a", [MLP])
    (folder.path / "diverged.json").write_text('"the loss is not a number"')
    (tmp_path / "sweep.json").write_text("{}")
    _, notes = collect([tmp_path])
    assert f"{MLP.name}: the loss is not a number" in [note.why for note in notes]


def record(path: Path, recipe: Recipe, errors: dict[int, float]) -> None:
    seeds = [{**result(recipe.override(seed=s), error=e), "history": []} for s, e in errors.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"row": "a row", "published": {}, "recipe": recipe.to_dict(), "seeds": seeds}))


def test_records_of_a_reproduction_count_where_there_is_no_stack(tmp_path: Path) -> None:
    record(tmp_path / "gallego-mlp.json", MLP, {0: 2.0, 1: 3.0, 2: 4.0})
    finished(tmp_path / "stacks" / "s", MLP, MLP.override(seed=1), page=True, error=7.0)
    settings = {"seeds": 4, "every": 1, "at_once": 64, "recipes": [MLP.to_dict()]}
    head = {"format": "ellzero.reproduction", "format_version": 1, "study": "x", "settings": settings}
    (tmp_path / "study.json").write_text(json.dumps(head))
    runs, notes = collect([tmp_path])
    assert [(r.recipe.seed, r.errors["error_last"]) for r in runs] == [(0, 7.0), (1, 7.0), (2, 4.0)]
    assert [note.why for note in notes] == [f"1 of 4 runs were not begun, or their folder is damaged: {MLP.name}"]


@pytest.mark.slow
def test_the_records_in_this_repository_are_found() -> None:
    stored = ROOT / "results"
    runs, notes = collect([stored])
    assert notes == []
    for file in [*stored.glob("louizos2018-table1/*.json"), *stored.glob("gallego2021-table1/*.json")]:
        own = json.loads(file.read_text())
        mine = [run for run in runs if run.where == file]
        assert [run.errors["error_last"] for run in mine] == [seed["error_last"] for seed in own["seeds"]]
    kind = next(kind for kind in kinds(runs) if kind.network == "lenet300")
    assert {group.label for group in kind.groups} >= {"gallego-mlp", "louizos-mlp"}


def test_a_study_that_trains_nothing_is_noted(tmp_path: Path) -> None:
    settings = {"seeds": 5, "every": 1, "at_once": 64, "recipes": []}
    (tmp_path / "study.json").write_text(json.dumps({"study": "louizos2018-figure1", "settings": settings}))
    assert [note.why for note in collect([tmp_path])[1]] == ["it is a study that trains nothing"]


# ---------------------------------------------------------------- over seeds


def test_means_and_intervals_are_those_of_the_textbook(tmp_path: Path) -> None:
    errors = [1.2, 1.5, 1.4, 1.9, 1.3]
    for seed, error in enumerate(errors):
        finished(tmp_path / str(seed), MLP.override(seed=seed), error=error, kept=0.2 + 0.01 * seed)
    (group,) = groups(collect([tmp_path])[0])
    mean, half = group.error("error_last")
    spread = math.sqrt(sum((e - sum(errors) / 5) ** 2 for e in errors) / 4)
    assert mean == pytest.approx(sum(errors) / 5)
    assert half == pytest.approx(2.7764451 * spread / math.sqrt(5), rel=1e-3)
    assert group.kept("params")[0] == pytest.approx(0.22)
    html = unescape(runs_page([tmp_path], tmp_path))
    assert f"{mean:.2f} ± {half:.2f} %" in html
    assert f"{0.22 * DENSE['params']:,.0f}" in html


def test_the_same_seed_twice_is_not_two_samples(tmp_path: Path) -> None:
    finished(tmp_path / "a", MLP, error=1.0)
    finished(tmp_path / "b", MLP.override(name="again"), error=3.0)
    finished(tmp_path / "c", MLP.override(seed=1), error=2.0)
    (group,) = groups(collect([tmp_path])[0])
    assert [run.where.name for run in group.runs] == ["a", "c"]
    assert [run.where.name for run in group.again] == ["b"]
    assert group.error("error_last")[0] == 1.5
    assert "is there twice: it is not counted again" in runs_page([tmp_path], tmp_path)


def test_recipes_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"lr": 1e-3}, {"lr": 1e-3, "at_most": {"fc1": 0.3, "*": 0.5}})):
        finished(tmp_path / str(number), MLP.override(**changes))
    assert [group.label for group in groups(collect([tmp_path])[0])] == [
        "gallego-mlp, at_most=0.33, lr=0.0007",
        "gallego-mlp, at_most=0.33, lr=0.001",
        "gallego-mlp, at_most={fc1: 0.3, *: 0.5}, lr=0.001",
    ]


def test_a_sweep_and_single_runs_of_its_recipe_are_told_apart(swept: Path, tmp_path: Path) -> None:
    """Another learning rate at a point of the sweep, and the default one at a target that the sweep has not."""
    point = next(run.recipe for run in collect([swept])[0] if run.recipe.at_most == 0.3).override(name="demo", seed=0)
    finished(tmp_path / "faster", point.override(lr=2e-3))
    finished(tmp_path / "smaller", point.override(at_most=0.2))
    finished(tmp_path / "other", MLP.override(data="mnist5k"))
    found = groups(collect([swept, tmp_path])[0])
    assert {group.label: len(group.runs) for group in found} == {
        "demo, at_most=0.3, lr=0.001": 2,
        "demo, at_most=0.6, lr=0.001": 2,
        "demo, at_most=0.3, lr=0.002": 1,
        "demo, at_most=0.2, lr=0.001": 1,
        "gallego-mlp": 1,
    }


def test_a_sweep_says_what_varied_in_it_also_where_one_point_is_left(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept, tmp_path / "copy")
    for stack in (tmp_path / "copy" / "stacks").iterdir():
        folder = Folder.open(stack)
        assert [run.at_most for run in folder.recipes] == [0.3, 0.3, 0.6, 0.6]
        results = json.loads((stack / "results.json").read_text())
        results[2]["error_last"] = results[3]["error_last"] = "damaged"
        (stack / "results.json").write_text(json.dumps(results))
    runs, notes = collect([tmp_path / "copy"])
    assert [group.label for group in groups(runs)] == ["demo, at_most=0.3"]
    assert [note.why.partition(",")[0] for note in notes] == ["the results of demo"] * 2
    assert all("the results of demo, at_most=0.6, seed" in note.why for note in notes)


def test_the_front_against_enumeration(tmp_path: Path) -> None:
    spots = [(0.1, 2.0), (0.2, 1.5), (0.3, 1.6), (0.4, 1.2), (0.15, 2.5), (0.4, 1.3)]
    for number, (kept, error) in enumerate(spots):
        recipe = MLP.override(name=f"r{number}", at_most=(number + 1) / 10)
        finished(tmp_path / recipe.name, recipe, kept=kept, error=error)
    empty = MLP.override(name="empty", at_most=0.9)
    finished(tmp_path / "empty", empty, kept=0.01, error=0.5, architecture={"fc1": 200, "fc2": 0, "fc3": 30})
    (kind,) = kinds(collect([tmp_path])[0])
    best = [
        f"r{k}" for k, (a, b) in enumerate(spots) if not any((c <= a and d <= b) and (c, d) != (a, b) for c, d in spots)
    ]
    assert sorted(group.label for group in kind.front("params", "error_last")) == sorted(best) == ["r0", "r1", "r3"]
    html = runs_page([tmp_path], tmp_path)
    assert "a layer is empty" in html


def test_networks_and_data_are_not_mixed(tmp_path: Path) -> None:
    finished(tmp_path / "a", MLP)
    finished(tmp_path / "b", MLP.override(data="mnist5k"))
    finished(tmp_path / "c", get("gallego-mlp").override(name="dense", placement=None, at_most=None))
    found = kinds(collect([tmp_path])[0])
    assert [(kind.network, kind.data, len(kind.groups)) for kind in found] == [
        ("lenet300", "mnist", 2),
        ("lenet300", "mnist5k", 1),
    ]
    dense = next(group for group in found[0].groups if group.label == "dense")
    assert dense.kept("macs")[0] == 1.0


# ---------------------------------------------------------------- the page


def variants(html: str) -> list[dict[str, Any]]:
    texts = re.findall(r'<script type="application/json" data-variants="[^"]*">(.*?)</script>', html, re.DOTALL)
    return [json.loads(text) for text in texts]


def test_the_chart_has_every_run_and_the_published_networks(tmp_path: Path) -> None:
    for seed in range(3):
        finished(tmp_path / str(seed), MLP.override(seed=seed), error=1.0 + seed, kept=0.1 + 0.1 * seed)
    (shown,) = variants(runs_page([tmp_path], tmp_path))
    assert len(shown) == 6
    for key, chart in shown.items():
        cost, error = key.split()
        theirs, ours, means, front = chart["data"]
        known = published("lenet300", cost, error.removeprefix("error_"))  # type: ignore[arg-type]
        assert theirs["x"] == pytest.approx([100 * p.cost for p in known])
        assert theirs["y"] == [p.error for p in known]
        assert ours["x"] == pytest.approx([10, 20, 30])
        off = 0.1 if error == "error_best" else 0.0
        assert ours["y"] == pytest.approx([1 - off, 2 - off, 3 - off])
        assert means["y"] == pytest.approx([2 - off])
        assert means["error_y"]["array"] == pytest.approx([4.302653 / math.sqrt(3)])
        assert (front["x"], front["y"]) == (pytest.approx([20]), pytest.approx([2 - off]))
    (shown,) = variants(runs_page([finished(tmp_path / "5k", MLP.override(data="mnist5k")).path]))
    assert [trace["name"] for trace in shown["params error_last"]["data"]] == ["runs", "front"]


def test_links_are_relative_to_where_the_page_is(tmp_path: Path) -> None:
    odd = tmp_path / "runs" / "a #1 ?x=<b>&%41"
    finished(odd, MLP, page=True)
    for home in (tmp_path, tmp_path / "runs", tmp_path / "elsewhere"):
        html = runs_page([odd], home)
        (shown,) = variants(html)
        (link,) = shown["params error_last"]["data"][1]["customdata"]
        assert (home.resolve() / unquote(link)).resolve() == (odd / "page.html").resolve()
        assert not set(link) & set(" #?<>&:")
        assert f'<a href="{link}">' in html


def test_what_comes_from_the_disk_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)<!--&quot;'\"\u2028"
    for name in (evil, f"not a run {evil}"):
        (tmp_path / name).mkdir()
    finished(tmp_path / evil / "</td><img src=x onerror=alert(1)>", MLP, page=True)
    at_most = {"</script><script>alert(2)</script>": 0.3, "*": 0.4}
    finished(tmp_path / "two", MLP.override(at_most=at_most))
    html = runs_page([tmp_path / evil, tmp_path / "two", tmp_path / f"not a run {evil}"], tmp_path)
    for bad in ("<script>alert", "<img", "<!--"):
        assert bad not in html.replace(_plotly(), "")
    # The page's own: its style has none, Plotly's script, themes, drawing, two for the chart, the choice.
    assert html.replace(_plotly(), "").count("</script>") == 6
    hover = variants(html)[0]["params error_last"]["data"][2]["hovertext"][0]
    assert "&lt;/script&gt;" in hover
    assert "<script" not in hover


def _plotly() -> str:
    return charts._plotly()


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no UTF-8 are not possible everywhere")
def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    bad = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        os.mkdir(bad)
    except OSError:
        pytest.skip("this file system takes no such name")
    finished(Path(os.fsdecode(bad)), MLP, page=True)
    html = runs_page([os.fsdecode(bad)], tmp_path)
    assert "caf�" in html.encode().decode()
    assert 'href="caf%E9/page.html"' in html


@pytest.mark.slow
def test_two_hundred_runs_at_once(tmp_path: Path) -> None:
    for number in range(200):
        recipe = MLP.override(name=f"r{number}", at_most=(number + 1) / 201)
        finished(tmp_path / recipe.name, recipe, page=True, kept=(number + 1) / 201, error=1 + 1 / (number + 1))
    html = runs_page([tmp_path], tmp_path)
    assert len(html) - len(_plotly()) < 1_200_000
    (shown,) = variants(html)
    ours = shown["macs error_best"]["data"][1]
    assert len(ours["x"]) == len(set(ours["customdata"])) == 200
    assert html.count('<th class="label"') == 200
    assert statistics.fmean(ours["x"]) == pytest.approx(50)
