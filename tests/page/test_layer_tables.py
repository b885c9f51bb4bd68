"""Repeated layers on a page: every square and every bar against the gates themselves."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ellzero as l0
from ellzero.experiments import figures
from ellzero.experiments.networks.gpt import GPT
from ellzero.experiments.papers import get
from ellzero.out.reporting import AxisRow
from ellzero.page import facts, layers, run
from ellzero.page.charts import Chart
from ellzero.page.collecting import Finished
from support import traced

KEPT = {"qkv": [[0, 2], [3], [0, 1, 2, 3]], "up": [list(range(5)), [], list(range(2, 32))]}  # by layer


@pytest.fixture(scope="module")
def gated() -> l0.Gated:
    """A GPT of three layers with four heads; all that is not in KEPT is closed, in layer 1 the whole feed-forward."""
    torch.manual_seed(0)
    made = l0.attach(GPT(3, 4, 8, 7), torch.zeros(1, 3, dtype=torch.long))
    for name, gate in made.named_gates():
        _, layer, part = name.split(".")
        gone = torch.ones(gate.shape, dtype=torch.bool)
        gone[KEPT[part][int(layer)]] = False
        gate.close_(gone)
    return made


@pytest.fixture(scope="module")
def seen(gated: l0.Gated) -> facts.Look:
    return facts.look(gated)


def traces(chart: Chart, kind: str) -> list[dict[str, Any]]:
    return [dict(trace) for trace in chart.traces if trace["type"] == kind]


@pytest.mark.slow
def test_an_axis_knows_whether_it_is_heads_a_stream_or_units(gated: l0.Gated) -> None:
    kinds = {axis.name: axis.kind for axis in gated.axes}
    assert {name for name, kind in kinds.items() if kind == "heads"} == {f"blocks.{k}.qkv" for k in range(3)}
    assert {name for name, kind in kinds.items() if kind == "stream"} == {"embed#2"}
    assert {a.name: a.kind for a in l0.report(gated).axes} == kinds
    # Matrices of their own make no heads where they are weights, as those of experts.
    experts = l0.graph.trace(Experts(), torch.zeros(2, 3, 4))
    assert {axis.kind for axis in experts.axes} == {"units"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(3, 4, 5)), nn.Linear(15, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1).flatten(1))


@pytest.mark.slow
def test_the_grid_has_a_square_for_each_head_and_says_which_stay(gated: l0.Gated, seen: facts.Look) -> None:
    (stack,) = seen.layers.stacks
    assert (stack.name, stack.layers) == ("blocks", ["0", "1", "2"])
    assert [(part.name, part.kind, part.dense) for part in stack.parts] == [("qkv", "heads", 4), ("up", "units", 32)]
    gates, heads = dict(gated.named_gates()), stack.parts[0]
    for layer, kept in enumerate(KEPT["qkv"]):
        cells = heads.cells[str(layer)]
        assert np.flatnonzero(cells.stays).tolist() == kept
        assert cells.prob_open == pytest.approx(gates[f"blocks.{layer}.qkv"].prob_open().detach().numpy())
    chart = layers.charts(seen.layers, 3)[0]
    (grid,) = traces(chart, "heatmap")
    for layer, row in enumerate(grid["z"]):
        expected = 100 * gates[f"blocks.{layer}.qkv"].prob_open().detach().numpy()
        assert row == [round(float(p)) for p in expected]
    crosses, of_heads, _ = traces(chart, "scatter")
    gone = {(head, layer) for layer, kept in enumerate(KEPT["qkv"]) for head in range(4) if head not in kept}
    assert set(zip(crosses["x"], crosses["y"], strict=True)) == gone
    assert of_heads["text"] == ["2", "1", "4"]
    assert grid["customdata"][1][3].startswith("layer 1, head 3: kept<br>P(open) = ")
    assert grid["customdata"][1][0].startswith("layer 1, head 0: gone<br>P(open) = 0 %")


@pytest.mark.slow
def test_bars_are_the_widths_of_the_compact_network(gated: l0.Gated, seen: facts.Look) -> None:
    small: Any = l0.compact(gated)
    left = [getattr(block.up, "out_features", 0) for block in small.blocks]
    chart = layers.charts(seen.layers, 3)[0]
    dense, kept = traces(chart, "bar")
    assert (dense["x"], kept["x"]) == ([32, 32, 32], left) == ([32, 32, 32], [5, 0, 30])
    assert traces(chart, "scatter")[-1]["text"] == ["5", "gone", "30"]
    assert "units of up, layer 0: 5 of 32, layer 1: 0 of 32, layer 2: 30 of 32" in chart.alternative
    assert seen.layers.outside == []  # the stream is frozen: LayerNorm subtracts a mean


@pytest.mark.slow
def test_blocks_that_went_are_gone_with_their_heads_and_units(gated: l0.Gated) -> None:
    x = torch.zeros(1, 3, dtype=torch.long)
    made = l0.attach(GPT(3, 4, 8, 7), x, graph=gated.graph, where=l0.shrinkable(blocks=True))
    gates = dict(made.named_gates())
    for name in ("blocks.1.out.block", "blocks.2.down.block"):
        gates[name].close_(torch.ones(1, dtype=torch.bool))
    seen = facts.look(made)
    (stack,) = seen.layers.stacks
    blocks, heads, _ = stack.parts
    assert (blocks.kind, blocks.name, blocks.columns) == ("blocks", "out, down", ("out", "down"))
    assert [blocks.cells[k].stays.tolist() for k in "012"] == [[True, True], [False, True], [True, False]]
    prob = {name: gate.prob_open().detach().numpy() for name, gate in gates.items()}
    of_branches = [prob["blocks.0.out.block"].item(), prob["blocks.0.down.block"].item()]
    assert blocks.cells["0"].prob_open == pytest.approx(of_branches)
    assert heads.cells["0"].prob_open == pytest.approx(of_branches[0] * prob["blocks.0.qkv"], rel=1e-5)
    assert [heads.cells[k].stays.sum() for k in "012"] == [4, 0, 4]
    (chart,) = run._network(seen)
    assert [t["text"] for t in traces(chart, "scatter") if t["mode"] == "text"] == [
        ["4", "gone", "4"],
        ["32", "32", "gone"],
    ]
    of_blocks, of_heads = traces(chart, "heatmap")
    assert [row[:2] for row in of_blocks["customdata"]][1][0].startswith("layer 1, out: gone<br>P(open) = 0 %")
    assert len(of_heads["z"][0]) == 4
    domains = [chart.layout[x]["domain"] for x in ("xaxis", "xaxis2", "xaxis3")]
    assert (domains[0][0], domains[2][1]) == pytest.approx((0, 1))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(domains))
    assert "Blocks: branches as a whole, out, down." in chart.caption
    small: Any = l0.compact(made)
    assert sum(p.numel() for p in small.parameters()) == seen.report.params.kept  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_table_has_a_line_for_what_repeats(seen: facts.Look) -> None:
    assert len(seen.table) == 15
    lines = {name: rest for name, *rest in run.axis_lines(seen.table, fold=True)}
    assert lines["blocks.0–2.qkv"][2:] == ["7", "gated heads: 2 1 4 of 4 in each"]
    assert lines["blocks.0–2.up"][2].startswith("35")
    assert "5 0 30 of 32 in each; closed in 1: every unit of it" in lines["blocks.0–2.up"][3]
    assert lines["blocks.0–2.up.input"][3] == "frozen: it reads the output of `layer_norm` in `blocks.*.norm2`"
    assert len(lines) == 7


def test_without_repeated_layers_there_are_columns() -> None:
    mlp = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))
    few = facts.look(traced.attached(mlp, torch.zeros(2, 6)))
    assert few.layers == layers.Layers()
    assert [chart.name for chart in run._network(few)] == ["network"]
    assert run._network(facts.Look()) == []


@pytest.mark.slow
def test_layers_of_other_widths_and_names_of_two_numbers(gated: l0.Gated) -> None:
    rows = [AxisRow(f"stages.{s}.{k}.conv", 8 * s + 8, 4.0, 4, "gated", None) for s in (0, 1) for k in range(6)]
    rows += [AxisRow("stem", 16, 9.0, 9, "gated", None), AxisRow("fc", 10, 10.0, 10, "frozen", "it is the output")]
    rows += [AxisRow("stream", 64, 64.0, 64, "not gated", "a residual stream", "stream")]
    found = layers.repeated(gated, rows)
    (stack,) = found.stacks
    assert stack.layers == [f"{s}.{k}" for s in (0, 1) for k in range(6)]
    (part,) = stack.parts
    assert (part.name, part.dense, part.cells) == ("conv", 16, {})
    assert part.by_layer(["0.0", "1.5", "2.0"]) == ([(8, 4), (16, 4), (0, 0)], [])
    assert [row.name for row in found.outside] == ["stream", "stem"]
    charts = layers.charts(found, 1)
    assert [chart.name for chart in charts] == ["network", "outside"]
    (counts,) = traces(charts[0], "scatter")
    assert (counts["x"], counts["text"]) == ([8] * 6 + [16] * 6, ["4"] * 12)  # each beside its own bar
    assert [a["text"] for a in charts[1].layout["annotations"]] == [
        "stream, stream: <b>64</b> of 64",
        "stem: <b>9</b> of 16",
    ]


@pytest.mark.slow
def test_more_parts_than_go_beside_each_other_get_a_chart_of_their_own(gated: l0.Gated) -> None:
    long = "attention.of.some_kind.input"
    rows = [AxisRow(f"l.{k}.{part}", 4, 2.0, 2, "gated", None) for k in range(5) for part in ("a", "b", long)]
    first, second = layers.charts(layers.repeated(gated, rows), 1)
    assert (first.name, second.name) == ("network", "network-1")
    assert [sum(t["type"] == "bar" for t in chart.traces) for chart in (first, second)] == [4, 2]
    ends = [chart.layout[x]["domain"][1] for chart, x in ((first, "xaxis2"), (second, "xaxis"))]
    assert ends == pytest.approx([1, 1])
    assert second.layout["annotations"][0]["text"] == "<b>units</b><br>attention.of.<br>some_kind.input"


def test_what_was_taken_out_is_told_by_family() -> None:
    widths = {f"blocks.{k}.up": (32, 10 + k) for k in range(12)} | {"embed": (8, 6)}
    event = facts.Event(3.0, "shrunk", False, widths, (1.0, 0.5))
    assert event.told == {"blocks.0–11.up": (384, 186), "embed": (8, 6)}
    few = event._replace(widths={"blocks.0.up": (32, 10), "blocks.1.up": (32, 11)})
    assert few.told == few.widths


@pytest.mark.slow
def test_figures_for_a_paper_have_the_same_squares_and_bars(
    seen: facts.Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn = {}

    def save(figure: Any, path: Path, caption: str) -> list[Path]:
        drawn[path.name] = figure.axes, caption
        return [path]

    monkeypatch.setattr(figures, "save", save)
    assert run._draw_layers(seen, tmp_path) == [tmp_path / "network"]
    (heads, units), caption = drawn["network"]
    full = [(round(p.get_y() + 0.43), round(p.get_x())) for p in heads.patches if p.get_facecolor()[3] == 1]
    assert full == [(layer, head) for layer, kept in enumerate(KEPT["qkv"]) for head in kept]
    assert len(heads.patches) == 12
    assert [p.get_width() for p in units.patches] == [32, 32, 32, 5, 0, 30]
    assert [t.get_text().strip() for t in units.texts] == ["5", "gone", "30"]
    assert re.search("full if kept.*blue kept", caption)


def test_a_table_of_runs_tells_widths_by_family() -> None:
    def run_of(architecture: dict[str, int]) -> Finished:
        return Finished(get("demo"), "demo", Path("x"), {}, {}, {}, {}, architecture)

    many = {f"blocks.{k}.{part}": k + 1 for k in range(7) for part in ("qkv", "up")} | {"embed": 40}
    assert run_of(many).units == "blocks.0–6.qkv 1-2-3-4-5-6-7, blocks.0–6.up 1-2-3-4-5-6-7, embed 40"
    assert run_of({"conv1": 20, "conv2": 25}).units == "20-25"
    assert run_of({}).units == "dense"
