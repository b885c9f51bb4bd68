"""The page of a run: what it says against the run's files and the library called by hand, and runs that are cut off."""

import json
import math
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ellzero
from ellzero.cli import main
from ellzero.experiments import networks as zoo
from ellzero.experiments.figures import PlotsMissingError
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.gated.module import Gated
from ellzero.gates.distributions import HardConcrete
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.out.files import FileError
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.meter import interleaved
from ellzero.out.latency.table import FORMAT
from ellzero.page import charts, drawing, facts, page_file, run_figures, run_page, write
from ellzero.page import run as making
from support import into_nothing
from support.finished import copied
from support.finished import finished as trained
from support.pages import embedded, small, small_run, text_of, trace
from support.runs import without_checksum

EVIL = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> \u2028 %{x}"
IMAGE = torch.zeros(2, 1, 28, 28)


@pytest.fixture(scope="module")
def finished() -> Path:
    """A finished run of LeNet-300-100 with input gates, on noise; nobody writes to it."""
    return small_run()


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return copied(finished, tmp_path / "copy")


# ---------------------------------------------------------------- charts


def test_json_in_a_script_comes_back_and_ends_nothing() -> None:
    content = {"a": [EVIL, None, 1.5, True], EVIL: {"b": -3}}
    text = charts.script_json(content)
    assert json.loads(text) == content
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert charts.script_json("</script><!--") == '"\\u003c/script\\u003e\\u003c!--"'
    assert json.loads(charts.script_json([math.inf, 0.5, (0, 1, 2), math.nan])) == [None, 0.5, [0, 1, 2], None]


def test_text_for_plotly_has_no_tags_and_templates() -> None:
    assert charts.escaped("<b>%{x} & y") == "&lt;b&gt;% {x} &amp; y"


def test_a_charts_json_is_its_traces_and_layout() -> None:
    curve = {"x": [1, 2], "y": [0.3, math.nan]}
    chart = charts.Chart("loss", "Loss", "Loss over epochs, in nats.", "Falls.", [curve], height=9, hovermode="closest")
    assert chart.json() == '{"data": [{"x": [1, 2], "y": [0.3, null]}], "layout": {"hovermode": "closest"}}'


def test_packed_bytes_come_back() -> None:
    values = np.random.default_rng(0).integers(0, 256, (7, 5), dtype=np.uint8)
    out = charts.packed(values.T)  # not contiguous
    back = np.frombuffer(b64decode(out["bdata"]), np.uint8).reshape([int(n) for n in out["shape"].split(",")])
    assert out["dtype"] == "u1"
    assert np.array_equal(back, values.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "A b"}, "`name` must be lower-case letters"),
        ({"caption": " "}, "`caption` of the chart 'a' must say something"),
        ({"alternative": ""}, "`alternative` of the chart 'a' must say something"),
    ],
)
def test_a_chart_without_a_name_or_words_is_refused(change: dict[str, str], message: str) -> None:
    words = {"name": "a", "title": "t", "caption": "c", "alternative": "x"} | change
    with pytest.raises(ValueError, match=message):
        charts.Chart(**words, traces=[])


def luminance(colour: str) -> float:
    """WCAG 2.1, of "#rrggbb"."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [charts.LIGHT, charts.DARK], ids=["light", "dark"])
def test_colours_can_be_seen_and_told_apart(theme: dict[str, Any]) -> None:
    """Text 4.5 : 1, lines 3 : 1 (WCAG 2.1). Blue and vermilion stay far apart for those without red or green cones."""
    assert charts.LIGHT.keys() == charts.DARK.keys()
    for name in ("ink", "muted"):
        assert contrast(theme[name], theme["paper"]) >= 4.5, name
    for name in ("blue", "vermilion", "green", "purple"):
        assert contrast(theme[name], theme["paper"]) >= 3, name
    blind = {  # Machado et al. (2009), severity 1
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    }
    for kind, matrix in blind.items():
        seen = {}
        for name in ("blue", "vermilion"):
            colour = np.array([int(theme[name][k : k + 2], 16) / 255 for k in (1, 3, 5)])
            seen[name] = np.clip(np.array(matrix) @ colour, 0, 1)
        assert np.linalg.norm(seen["blue"] - seen["vermilion"]) > 0.5, kind


@pytest.mark.slow
def test_every_chart_is_one_that_plotly_knows(finished: Path) -> None:
    """Its own validator refuses unknown attributes; names of colours are put in as the page's script does."""
    graph_objects = pytest.importorskip("plotly.graph_objects")

    def coloured(value: Any, theme: dict[str, Any]) -> Any:
        if isinstance(value, str):
            assert not value.startswith("@") or value[1:] in theme, value
            return theme[value[1:]] if value.startswith("@") else value
        if isinstance(value, list):
            return [coloured(v, theme) for v in value]
        return {k: coloured(v, theme) for k, v in value.items()} if isinstance(value, dict) else value

    found = embedded(run_page(Folder.open(finished)))
    assert len(found) == 16
    for chart in found.values():
        for theme in (charts.LIGHT, charts.DARK):
            graph_objects.Figure(coloured(chart["data"], theme), coloured(chart["layout"], theme))


def test_a_page_is_whole(finished: Path) -> None:
    page = run_page(Folder.open(finished))
    outside = re.sub(
        r"<script>.*?</script>", "", page, flags=re.DOTALL
    )  # Plotly's script names addresses it never asks
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!data:)[^"'\s>]""", outside)
    assert "default-src 'none'" in page
    assert "connect-src" not in page
    assert page.count("plotly.js v") == 1
    names = re.findall(r'data-chart="([^"]+)"', page)
    assert len(names) == len(set(names)) == page.count("<figcaption>") == page.count('role="img"')


@pytest.mark.slow
def test_missing_packages_are_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(charts, "_missing", lambda: "plotly")
    with pytest.raises(charts.PageMissingError, match=r"`plotly` must be installed .* pip install 'ellzero\[page\]'"):
        run_page(Folder.open(finished))
    assert main(["report", str(finished)]) == 0
    assert "No page: `plotly` must be installed" in capsys.readouterr().out
    assert not page_file(Folder.open(finished)).exists()
    for words in (["--out", str(tmp_path / "a.html")], ["--serve"]):
        assert main(["report", str(finished), *words]) == 1
        assert "ellzero[page]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_words() -> None:
    assert [charts.number(None), charts.number(math.nan), charts.number(12.3456, 2)] == ["–", "–", "12.35"]
    assert [charts.number(266610), charts.number(1234.56, 1)] == ["266,610", "1,234.6"]
    assert [charts.percent(0.0999), charts.percent(None)] == ["9.99 %", "–"]
    assert [charts.share(1, 8), charts.share(None, 8), charts.share(0, 0)] == ["12.50 %", "–", "–"]
    assert [charts.plus_minus((0.5, 0.125), 100), charts.plus_minus((2.0, math.nan))] == ["50.00 ± 12.50 %", "2.00 %"]
    assert [charts.seconds(v) for v in (2e-5, 0.25, 59.94, 3599)] == ["20 µs", "250 ms", "59.9 s", "59 min 59 s"]
    assert [charts.seconds(v) for v in (0.00123, 3.2, 754, 4000, None)] == [
        "1.23 ms", "3.2 s", "12 min 34 s", "1 h 06 min", "–",
    ]  # fmt: skip
    assert [charts.size(v) for v in (999, 1000, 999_949, 1_000_000)] == ["999 B", "1.0 kB", "999.9 kB", "1.00 MB"]
    assert [charts.size(v) for v in (900, 113516, 1247280, None)] == ["900 B", "113.5 kB", "1.25 MB", "–"]


# ---------------------------------------------------------------- the network


def test_tiles_lie_beside_each_other_with_gaps() -> None:
    tiles = np.arange(1.0, 13).reshape(3, 2, 2)
    picture, corners = drawing._montage(tiles, 2)
    assert corners == [(0, 0), (0, 3), (3, 0)]
    gap = np.full((2, 1), np.nan)
    above, below = np.hstack([tiles[0], gap, tiles[1]]), np.hstack([tiles[2], np.full((2, 3), np.nan)])
    assert np.array_equal(picture, np.vstack([above, np.full((1, 5), np.nan), below]), equal_nan=True)


def lenet(kind: type[nn.Module], **closed: list[int]) -> Gated:
    """With gates as the papers have them, all open but these."""
    gated = ellzero.attach(kind(), (IMAGE,), where=ellzero.per_layer)
    for name, gate in gated.named_gates():
        where = torch.zeros(gate.shape, dtype=torch.bool)
        where[closed.get(name, [])] = True
        gate.close_(where)
    return gated


@pytest.mark.slow
def test_columns_go_through_the_network_and_are_those_of_the_compact_one() -> None:
    gated = lenet(zoo.LeNet5, conv1=[0, 3], conv2=list(range(30)), fc1=[799], fc2=[0, 1, 2])
    seen = facts.look(gated)
    assert [c.name for c in seen.columns] == ["conv1.input", "conv1", "conv2", "fc1 inputs", "fc1", "fc2"]
    net: Any = ellzero.compact(gated)
    reads = net.fc1.weight.shape[1]
    kept = [1, net.conv1.out_channels, net.conv2.out_channels, reads, net.fc1.out_features, 10]
    assert [c.kept for c in seen.columns] == kept == [1, 18, 20, 20 * 16 - 1, 497, 10]
    assert [c.dense for c in seen.columns] == [1, 20, 50, 800, 500, 10]
    assert seen.report is not None
    assert (seen.parameters, seen.report.params.kept) == (431_080, sum(p.numel() for p in net.parameters()))
    pixels = lenet(zoo.LeNet300, fc1=list(range(100)), fc2=[5])
    columns = [(c.name, c.dense, c.kept) for c in facts.look(pixels).columns]
    assert columns == [("fc1.input", 784, 684), ("fc1", 300, 299), ("fc2", 100, 100), ("fc3", 10, 10)]


@pytest.mark.slow
def test_input_gates_are_drawn_where_their_pixels_are() -> None:
    closed = [28 * row + column for row in range(4) for column in range(10, 20)]
    gated = lenet(zoo.LeNet300, fc1=closed)
    seen = facts.look(gated, shape=(1, 28, 28))
    assert seen.gate_map is not None
    expected = np.ones((28, 28), bool)
    expected[:4, 10:20] = False
    assert np.array_equal(seen.gate_map.tiles[0] > 0.5, expected)
    assert (seen.gate_map.kept, seen.gate_map.dense) == (784 - 40, 784)
    gate = dict(gated.named_gates())["fc1"]
    assert np.allclose(seen.gate_map.tiles.ravel(), gate.prob_open().detach().numpy())
    # Not where the gates are those of something else.
    assert facts.look(lenet(zoo.LeNet5), shape=(1, 28, 28)).gate_map is None


@pytest.mark.slow
def test_filters_are_those_that_are_left_the_largest_first() -> None:
    gated = lenet(zoo.LeNet5, conv1=[n for n in range(20) if n not in (2, 7, 11)])
    weight = gated.model.get_parameter("conv1.weight")
    with torch.no_grad():
        for n, factor in ((2, 1.0), (7, 9.0), (11, 3.0)):
            weight[n] = factor * torch.linspace(-1, 1, 25).reshape(1, 5, 5)
    seen = facts.look(gated, shape=(1, 28, 28))
    assert seen.filters is not None
    assert seen.filters.names == ["7", "11", "2"]
    assert np.allclose(seen.filters.tiles, weight[[7, 11, 2], 0].detach().numpy())
    assert (seen.filters.kept, seen.filters.dense) == (3, 20)


def test_filters_of_a_perceptron_have_the_inputs_gates_in_them() -> None:
    gated = lenet(zoo.LeNet300, fc1=list(range(392)), fc2=list(range(290)))
    value = dict(gated.named_gates())["fc1"].value().detach()
    weight = gated.model.get_parameter("fc1.weight").detach() * value
    seen = facts.look(gated, shape=(1, 28, 28)).filters
    assert seen is not None
    order = sorted(range(290, 300), key=lambda n: -float(weight[n].norm()))
    assert seen.names == [str(n) for n in order]
    assert np.allclose(seen.tiles, weight[order].reshape(-1, 28, 28).numpy(), atol=1e-7)
    assert not seen.tiles[:, :14].any()


def test_a_network_without_images_has_no_pictures() -> None:
    net = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    gated = ellzero.attach(net, (torch.zeros(2, 12),))
    for shape in (None, (1, 28, 28), (12,)):
        seen = facts.look(gated, shape=shape)
        assert (seen.gate_map, seen.filters) == (None, None)
        assert [c.name for c in seen.columns] == ["0.input", "0", "2"]
    assert facts.look(nn.Sequential(nn.ReLU()), shape=(1, 28, 28)).filters is None


def test_a_layer_with_nothing_left_is_told() -> None:
    seen = facts.look(lenet(zoo.LeNet300, fc2=list(range(300))), shape=(1, 28, 28))
    assert seen.report is not None
    assert seen.report.refusal is not None


def test_the_spread_of_gates_is_that_of_samples() -> None:
    gate = HardConcreteGate(4)
    with torch.no_grad():
        gate.log_alpha.copy_(torch.tensor([-4.0, -1.0, 0.5, 6.0]))
    seen = facts.spread("a", gate)
    values = gate.value().tolist()
    assert seen.kept[0] == sum(v == 0 for v in values) / 4
    assert seen.kept[-1] == sum(v == 1 for v in values) / 4
    assert seen.kept[1 + int(20 * values[2])] == 0.25
    z = HardConcrete(gate.log_alpha.detach(), 2 / 3).sample((200_000,)).flatten()
    assert seen.expected is not None
    counts = [(z == 0).sum(), *torch.histogram(z[(z > 0) & (z < 1)], 20, range=(0.0, 1.0)).hist, (z == 1).sum()]
    assert sum(seen.kept) == pytest.approx(1)
    assert sum(seen.expected) == pytest.approx(1)
    assert seen.expected == pytest.approx([float(c) / z.numel() for c in counts], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rates", "share"),
    [
        # keep 0.8, 0.5, 0.5: (784·0.8)(300·0.5) + (300·0.5)(100·0.5) + (100·0.5)·10 of 266,200
        (zoo.LeNet300, {"fc1": 0.2, "*": 0.5}, (94_080 + 7_500 + 500) / 266_200),
        (zoo.LeNet300, {"*": 0.999999}, 0.0),
    ],
)
def test_the_dropout_line(kind: type[nn.Module], rates: dict[str, float], share: float) -> None:
    recipe = small(drop_rates=rates)
    assert facts.look(lenet(kind), recipe).dropout == pytest.approx(share, rel=1e-5, abs=2e-6)  # sums in float32


# ---------------------------------------------------------------- over time


def packed(*values: int) -> str:
    return b64encode(bytes(values)).decode()


def test_strips_are_the_histories_bytes_in_percent() -> None:
    history = [
        {"epoch": 1, "prob_open": {"a": packed(255, 128, 255), "b": packed(9)}},
        {"epoch": 2, "prob_open": {"a": packed(0, 1, 2)}},
        {"epoch": 2, "prob_open": {"a": packed(51, 102, 255), "b": "no base64", "c": 3}},  # after units were closed
        {"epoch": 3, "prob_open": "damaged"},
        {"epoch": 4},
    ]
    strips = {s.name: s for s in facts.strips(history)}
    assert strips.keys() == {"a", "b"}
    assert strips["a"].epochs == [1, 2]
    assert strips["a"].percent.tolist() == [[100, 100], [50, 40], [100, 20]]  # by falling P(open) at the end
    assert (strips["b"].epochs, strips["b"].percent.tolist()) == ([1], [[4]])


def test_long_histories_of_many_gates_are_thinned_evenly() -> None:
    size = 1000
    ramp = [k * 255 // (size - 1) for k in range(size)]
    history = [{"epoch": e, "prob_open": {"a": packed(*ramp)}} for e in range(1, 1001)]
    (strip,) = facts.strips(history)
    assert strip.percent.shape == (400, 160)
    assert (strip.epochs[0], strip.epochs[-1], strip.gates) == (1, 1000, size)
    assert (strip.percent[0, 0], strip.percent[-1, 0]) == (100, 0)
    assert (np.diff(strip.percent[:, 0].astype(int)) <= 0).all()


def test_what_the_charts_show_is_the_history(finished: Path) -> None:
    folder = Folder.open(finished)
    found, history = embedded(run_page(folder)), folder.history()
    assert found["error"]["data"][0]["x"] == [h["epoch"] for h in history]
    assert found["error"]["data"][0]["y"] == [h["error"] for h in history]
    assert found["loss"]["data"][0]["y"] == [h["loss"] for h in history]
    for chart, cost in (("l0-norm", "l0_norm"), ("params", "params"), ("macs", "macs")):
        for kind in ("kept", "expected"):
            assert trace(found[chart], kind)["y"] == pytest.approx([100 * h[kind][cost] for h in history])
            assert trace(found[chart], kind)["line"]["dash"] == {"kept": "solid", "expected": "dash"}[kind]
    assert trace(found["params"], "target")["y"] == pytest.approx([30, 30])
    assert found["multipliers"]["data"][0]["y"] == [h["multiplier"][0] for h in history]
    flops = found["flops"]
    assert trace(flops, "expected")["x"] == [4 * h["epoch"] for h in history]  # 200 images in batches of 50
    assert trace(flops, "kept")["y"] == pytest.approx([2 * 266_200 * h["kept"]["macs"] for h in history])
    assert trace(flops, "dense")["y"] == [2 * 266_200] * 2
    keep = 0.8  # the recipe's drop rate is 0.2 everywhere
    macs = 784 * 300 * keep**2 + 300 * 100 * keep**2 + 100 * 10 * keep
    assert trace(flops, "dropout (expected)")["y"] == pytest.approx([2 * macs] * 2, rel=1e-5)
    last = b64decode(history[-1]["prob_open"]["fc2"])
    strip = np.frombuffer(b64decode(found["strip-1"]["data"][0]["z"]["bdata"]), np.uint8).reshape(300, -1)
    assert sorted(strip[:, -1].tolist()) == sorted(round(100 * b / 255) for b in last)


def test_what_the_tables_say_is_the_result(finished: Path) -> None:
    folder = Folder.open(finished)
    (result,) = folder.results() or [{}]
    page = run_page(folder)
    words = text_of(page)
    kept = round(result["costs"]["params"]["kept"] * 266_610)
    lowest = min(record["error"] for record in folder.history())
    assert f"Parameters kept {100 * kept / 266_610:.2f} % {kept:,} of 266,610" in words
    assert f"Test error {result['error_last']:.2f} % lowest in training, at any size: {lowest:.2f} %" in words
    assert "Finished: 4 epochs." in words
    assert "frozen: it reads the model&#39;s input" in page
    assert "ellzero train small.toml" in words
    units = embedded(page)["network"]["data"][2]["customdata"]
    assert [row[3] for row in units] == [result["architecture"][g] for g in ("fc1", "fc2", "fc3")] + [10]
    toml = re.search(r"<pre>(name = .*?)</pre>", page, re.DOTALL)
    assert toml is not None
    assert toml[1].replace("&#34;", '"') == small().to_toml().rstrip()


def test_every_layer_may_have_its_own_target(copy: Path) -> None:
    content = json.loads((copy / "run.json").read_text())
    content["recipes"][0] |= {"cost": "l0_norm", "at_most": {"fc1": 0.2, "fc[23]": 0.4}}
    (copy / "run.json").write_text(json.dumps(content))
    history = [
        without_checksum(line) | {"multiplier": [1.0, 2.0]}
        for line in (copy / "history.jsonl").read_text().splitlines()
    ]
    (copy / "history.jsonl").write_text("".join(json.dumps(h) + "\n" for h in history))
    page = run_page(Folder.open(copy))  # the checkpoint is of another recipe now
    assert [t["name"] for t in embedded(page)["multipliers"]["data"]] == ["fc1", "fc[23]"]
    assert "must be at most fc1 20 %, fc[23] 40 % of the dense" in text_of(page)
    assert "The network itself cannot be shown" in page


# ---------------------------------------------------------------- runs that are cut off


def test_a_run_without_results_and_checkpoint_shows_its_history(copy: Path, capsys: Any) -> None:
    (copy / "results.json").unlink()
    shutil.rmtree(copy / "checkpoints")
    assert main(["report", str(copy)]) == 0
    out, err = capsys.readouterr()
    assert out == f"Page: {copy / 'page.html'}\n"
    assert "has no checkpoint yet" in err
    page = (copy / "page.html").read_text()
    found = embedded(page)
    assert {"error", "loss", "params", "macs", "strip-0"} <= found.keys()
    assert not {"network", "filters", "flops", "histogram-0"} & found.keys()
    assert "Not finished: 4 of 4 epochs so far" in text_of(page)
    assert "There is no checkpoint yet" in page


def test_a_torn_last_line_is_left_out_and_damage_before_it_is_an_error(copy: Path, capsys: Any) -> None:
    file = copy / "history.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"epoch": 9, "err')
    assert len(embedded(run_page(Folder.open(copy)))["error"]["data"][0]["x"]) == len(whole.splitlines())
    file.write_text("{\n" + whole)
    assert main(["report", str(copy)]) == 1
    assert "is damaged: line 1" in capsys.readouterr().err
    file.write_text('{"error": 3}\n')
    with pytest.raises(FolderError, match="a record has no epoch"):
        run_page(Folder.open(copy))


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    page = run_page(Folder.create(tmp_path / "new", [small()], {}))
    assert embedded(page) == {}
    assert "No epoch has been evaluated yet" in page


def test_one_epoch_is_enough(copy: Path) -> None:
    file = copy / "history.jsonl"
    file.write_text(file.read_text().splitlines(True)[0])
    found = embedded(run_page(Folder.open(copy)))
    assert found["error"]["data"][0]["mode"] == "lines+markers"  # a line of one point cannot be seen
    assert found["strip-0"]["data"][0]["x"] == [1]


def test_null_and_nonsense_in_records_are_gaps(copy: Path) -> None:
    file = copy / "history.jsonl"
    history = [without_checksum(line) for line in file.read_text().splitlines()]
    history[0] |= {"loss": None, "error": "x", "kept": 3, "multiplier": None, "prob_open": {"fc1": "?"}}
    file.write_text("".join(json.dumps(h) + "\n" for h in history))
    found = embedded(run_page(Folder.open(copy)))
    assert found["error"]["data"][0]["y"][0] is None
    assert trace(found["macs"], "kept")["y"][0] is None
    assert "multipliers" not in found


def test_a_dense_run_has_a_page_and_no_gates(tmp_path: Path, capsys: Any) -> None:
    recipe = get("wrn-cifar10").override(
        name="dense", network="lenet300", data="mnist5k", epochs=1, batch=50, augment=False, milestones=(),
        precision="float32", channels_last=False,
    )  # fmt: skip
    folder = Folder.open(copied(trained(recipe, images=100), tmp_path / "dense"))
    assert main(["report", str(folder.path)]) == 0
    assert "trained the dense network, without gates" in capsys.readouterr().out
    page = (folder.path / "page.html").read_text()
    assert set(embedded(page)) == {"error", "loss", "filters"}
    assert "266,610" in text_of(page)
    assert main(["report", str(folder.path), "--json"]) == 2
    assert "nothing to report on" in capsys.readouterr().err


def test_what_comes_from_files_is_escaped(copy: Path) -> None:
    content = json.loads((copy / "run.json").read_text())
    content["about"] |= {"command": EVIL, "device": EVIL, "commit": EVIL}
    (copy / "run.json").write_text(json.dumps(content))
    file = copy / "history.jsonl"
    history = [without_checksum(line) for line in file.read_text().splitlines()]
    for record in history:
        record["prob_open"] = {EVIL: record["prob_open"]["fc3"]}
    file.write_text("".join(json.dumps(h) + "\n" for h in history))
    (copy / "latency.json").write_text(json.dumps(LATENCY | {"device": EVIL}))
    odd = copy.rename(copy.with_name("<img src=x onerror=alert(3)>"))
    page = run_page(Folder.open(odd))
    assert not re.search(r"<script>\s*alert|<img|<!--(?! )", re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    assert page.count("<script>alert(1)") == 0
    assert "&lt;img src=x onerror=alert(3)&gt;" in page
    assert embedded(page).keys() >= {"error", "strip-3"}


# ---------------------------------------------------------------- stacks


@pytest.mark.slow
def test_a_stack_has_a_page_for_each_run(tmp_path: Path) -> None:
    recipes = [small(epochs=1, finetune_epochs=0, name=n, seed=k) for k, n in enumerate(("first", "second"))]
    folder = Folder.open(copied(trained(*recipes, images=100), tmp_path / "stack"))
    history = folder.history()
    for k, name in enumerate(("first", "second")):
        assert main(["report", str(folder.path), "--index", str(k)]) == 0
        page = (folder.path / f"page-{k}.html").read_text()
        assert f"{name}, seed {k}" in page
        assert embedded(page)["error"]["data"][0]["y"] == [h["error"] for h in history[k::2]]
        assert not any(n.startswith("strip") for n in embedded(page))  # a stack does not store it
    with pytest.raises(IndexError, match="`index` must be from 0 to 1, got 2"):
        run_page(folder, 2)


# ---------------------------------------------------------------- how fast

LATENCY = {
    "format": "ellzero.run.latency",
    "format_version": 1,
    "device": "CPU",
    "threads": 2,
    "torch": "2.11",
    "rows": [
        {"batch": 1, "dense_s": 0.003, "compact_s": 0.001, "runs": 9},
        {"batch": 256, "dense_s": 0.5, "compact_s": 0.1, "runs": 7},
    ],
}


class Clock:
    """A clock that moves when a network runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock, each: float) -> None:
        super().__init__()
        self.clock, self.each = clock, each
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        self.clock.now += self.each * len(x)
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(facts, "interleaved", partial(interleaved, clock=made))
    return made


def test_latency_is_a_median_of_turns_within_the_budget(clock: Clock) -> None:
    dense, compact = Slow(clock, 2.0**-12), Slow(clock, 2.0**-14)
    found = facts.measure(dense, compact, IMAGE, budget=1.5)
    assert [row["batch"] for row in found] == [1, 256]
    for row in found:
        assert (row["dense_s"], row["compact_s"]) == pytest.approx((row["batch"] / 4096, row["batch"] / 16384))
    assert found[0]["runs"] == 40
    assert dense.batches == compact.batches
    assert clock.now < 3
    # A batch that would take longer than the budget is not tried.
    slow = facts.measure(Slow(clock, 0.1), Slow(clock, 0.1), IMAGE, budget=1.5)
    assert [row["batch"] for row in slow] == [1]


@pytest.mark.slow
def test_latency_is_stored_and_shown_again(copy: Path, capsys: Any) -> None:
    assert main(["report", str(copy), "--speed"]) == 0
    assert "Measured speed" in capsys.readouterr().out
    stored = json.loads((copy / "latency.json").read_text())
    assert [row["batch"] for row in stored["rows"]] == [1, 256]
    with pytest.raises(ValueError, match=r"must be what `Latency.save` wrote, .* format is 'ellzero.run.latency'"):
        Latency.load(copy / "latency.json")
    (copy / "latency.json").write_text(json.dumps(LATENCY))
    words = text_of(run_page(Folder.open(copy)))
    assert "Latency, batch 1 3 ms 1 ms 3.00 ×" in words
    assert "Latency, batch 256 500 ms 100 ms 5.00 ×" in words
    assert "measured on CPU, 2 threads, torch 2.11" in words
    for damaged in (
        "{",
        "[]",
        '{"format": "ellzero.run.latency", "format_version": 1, "rows": [{}]}',
        json.dumps(LATENCY).replace("0.001", "0"),
        json.dumps(LATENCY | FORMAT),  # as `Latency.save` writes
    ):
        (copy / "latency.json").write_text(damaged)
        assert "latency.json is damaged or something else" in run_page(Folder.open(copy)), damaged


# ---------------------------------------------------------------- files and the command line


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("old", tmp_path / "deep" / "page.html")

    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write("new", file)
    assert [(p.name, p.read_text()) for p in file.parent.iterdir()] == [("page.html", "old")]
    monkeypatch.undo()
    with pytest.raises(FileError, match="cannot be written"):
        write("new", file / "below.html")


@pytest.mark.slow
def test_the_command_writes_the_page_and_names_it(copy: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(copy)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"Page: {copy / 'page.html'}\n")
    assert (copy / "page.html").read_text() == run_page(Folder.open(copy))
    other = tmp_path / "other.html"
    for option in ("--json", "--markdown"):
        (copy / "page.html").unlink(missing_ok=True)
        assert main(["report", str(copy), option]) == 0
        alone = capsys.readouterr()
        assert not (copy / "page.html").exists()
        assert main(["report", str(copy), option, "--out", str(other)]) == 0
        both = capsys.readouterr()
        assert (both.out, alone.err, both.err) == (alone.out, "", f"Page: {other}\n")
        other.unlink()


def test_the_page_is_opened_when_asked(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert main(["report", str(copy), "--open"]) == 0
    assert opened == [(copy / "page.html").resolve().as_uri()]


@pytest.mark.slow
def test_train_ends_with_the_page(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "small.toml").write_text(small(batch=500, epochs=1).to_toml())
    assert main(["train", str(tmp_path / "small.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert f"Page: {tmp_path / 'run' / 'page.html'}\n" in capsys.readouterr().out
    folder = Folder.open(tmp_path / "run")
    made = (folder.path / "page.html").read_text()
    assert made == run_page(folder)  # the same as from the checkpoint
    assert trace(embedded(made)["flops"], "kept")["x"][0] == 8  # 4,000 images in batches of 500


def test_several_runs_are_compared(finished: Path, copy: Path, tmp_path: Path, capsys: Any) -> None:
    (copy / "results.json").unlink()
    target = tmp_path / "all.html"
    assert main(["report", str(finished), str(copy), str(tmp_path / "no"), "--out", str(target)]) == 0
    out, err = capsys.readouterr()
    assert out == f"1 run.\nPage: {target}\n"
    assert len(err.splitlines()) == 2
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(finished.parent), "--out", str(target)]) == 0  # a folder above runs
    assert main(["report", str(tmp_path / "no"), str(tmp_path / "neither")]) == 2
    assert "none of these is a finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "`RUN` must be given"),
        (("nowhere",), "'nowhere' is no folder"),
        (("RUN", "--port", "70000"), "`--port` must be from 0 to 65535, got 70000"),
        (("RUN", "RUN", "--json"), "are for one run"),
        (("RUN", "RUN", "--serve"), "`--serve` takes one run"),
        (("RUN", "--serve", "--json"), "`--serve` takes one run"),
    ],
)
def test_mistakes_are_one_line(finished: Path, words: tuple[str, ...], message: str, capsys: Any) -> None:
    assert main(["report", *(str(finished) if w == "RUN" else w for w in words)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.slow
def test_figures_are_drawn_with_their_captions(
    copy: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(copy), "--figures", str(tmp_path / "figures")]) == 0
    names = ["filters", "flops", "gates-at-the-end", "gates-over-time", "input-gates", "network", "training"]
    there = sorted(p.name for p in (tmp_path / "figures").iterdir())
    assert there == sorted(f"{n}.{ending}" for n in names for ending in ("png", "svg", "txt"))
    assert capsys.readouterr().out.count("figure: ") == 2 * len(names)
    for file in (tmp_path / "figures").glob("*.txt"):
        assert re.search(r"percent|FLOPs|units", file.read_text()), file
    shutil.rmtree(copy / "checkpoints")
    monkeypatch.setattr("ellzero.experiments.figures.render", into_nothing)  # into files they are drawn above
    assert main(["report", str(copy), "--figures", str(tmp_path / "less")]) == 0
    assert sorted({p.stem for p in (tmp_path / "less").iterdir()}) == ["flops", "gates-over-time", "training"]


def test_figures_need_matplotlib(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("ellzero.experiments.figures.can_draw", lambda: False)
    monkeypatch.setattr("ellzero.cli.runs.can_draw", lambda: False)
    assert main(["report", str(finished), "--figures", str(tmp_path)]) == 1
    assert "ellzero[plots]" in capsys.readouterr().err
    with pytest.raises(PlotsMissingError):
        run_figures(Folder.open(finished), tmp_path)


def test_a_network_without_images_has_a_page(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    seen = facts.look(ellzero.attach(net, (torch.zeros(2, 12),)))
    found = embedded(run_page(Folder.open(finished), seen=seen))
    assert "network" in found
    assert not {"input-gates", "filters"} & found.keys()


def test_many_placements_are_folded_away(finished: Path) -> None:
    run = facts.gather(Folder.open(finished))
    spread = run.look.spreads[0]
    spreads = [spread._replace(name=f"layer {k}") for k in range(9)]
    many = run._replace(look=run.look._replace(spreads=spreads), strips=[])
    page = charts.render("run.html.j2", **making._values(many), live=False)
    assert "3 more placements" in page
    assert len([n for n in embedded(page) if n.startswith("histogram")]) == 9
