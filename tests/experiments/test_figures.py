"""Figures: published points against their printed shares, files byte by byte."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from ellzero.experiments.figures import (
    GREY,
    PlotsMissingError,
    Point,
    can_draw,
    curves,
    grid,
    legend,
    pareto,
    published,
    save,
)

# Shares in percent, computed by hand from the architectures in both papers' Tables 1: weights, MACs, density.
MLP = {
    "Sparse VD": (25.3, 62.3),
    "BC-GNJ": (10.8, 35.1),
    "BC-GHS": (10.6, 38.3),
    "L0 λ=0.1/N": (26.0, 33.1),
    "L0 λ sep.": (10.0, 33.4),
    "constr. 33 %": (26.5, 31.4),
    "constr. 30 % ×3": (9.2, 30.8),
}
LENET5 = {
    "Sparse VD": (9.3, 28.8, 30.7),
    "GL": (23.7, 8.8, 24.9),
    "GD": (1.38, 10.9, 25.7),
    "SBP": (19.7, 9.3, 35.7),
    "BC-GNJ": (0.95, 12.3, 11.8),
    "BC-GHS": (0.64, 6.7, 10.1),
    "L0 λ=0.1/N": (8.9, 48.6, 9.3),
    "L0 λ sep.": (1.43, 17.0, 9.8),
    "constr. 10 %": (6.7, 42.6, 7.5),
    "constr. by layer": (2.45, 16.3, 27.8),
}


def test_published_points_have_the_shares_of_their_architectures() -> None:
    for cost, column in (("params", 0), ("macs", 0), ("l0_norm", 1)):  # an MLP's MACs are its weights
        got = {p.label: 100 * p.cost for p in published("lenet300", cost)}  # type: ignore[arg-type]
        assert got == pytest.approx({k: v[column] for k, v in MLP.items()}, abs=0.11)
    for cost, column in (("params", 0), ("macs", 1), ("l0_norm", 2)):  # `params` counts biases too
        got = {p.label: 100 * p.cost for p in published("lenet5", cost)}  # type: ignore[arg-type]
        assert got == pytest.approx({k: v[column] for k, v in LENET5.items()}, abs=0.14)


def test_published_errors_are_best_or_last_as_asked() -> None:
    last = {p.label: p.error for p in published("lenet5", "params")}
    best = {p.label: p.error for p in published("lenet5", "params", "best")}
    assert (last["constr. 10 %"], best["constr. 10 %"]) == (1.04, 0.53)
    assert last["L0 λ=0.1/N"] == best["L0 λ=0.1/N"] == 0.9  # one of them is printed
    assert published("wrn-28-10", "params") == []
    with pytest.raises(ValueError, match="`which` must be"):
        published("lenet5", "params", "first")


# ---- files ----------------------------------------------------------------------------------------------------------


def drawn(path: Path) -> list[Path]:
    with grid(1, 2, size=(4, 2)) as (figure, (left, right)):
        curves(left, [1, 2, 3], [[1, 2, 3], [3, 4, 5]], "ours", "#0072B2")
        right.plot([0, 1], [1, 0], label="λ")
        legend(figure, left)
        return save(figure, path, "What it\n   shows.")


@pytest.mark.slow
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = drawn(tmp_path / "a" / "figure"), drawn(tmp_path / "b" / "figure")
    assert [f.name for f in first] == ["figure.png", "figure.svg", "figure.txt"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[2].read_text() == "What it shows.\n"
    assert b"Software" not in first[0].read_bytes()
    assert "date>" not in first[1].read_text()


@pytest.mark.slow
def test_the_style_ends_with_the_figure(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    drawn(tmp_path / "figure")
    assert dict(mpl.rcParams) == before


def test_a_figure_without_a_caption_is_refused(tmp_path: Path) -> None:
    with grid() as (figure, _), pytest.raises(ValueError, match="`caption` must say"):
        save(figure, tmp_path / "figure", "  ")
    assert list(tmp_path.iterdir()) == []


def test_the_thick_line_is_the_mean() -> None:
    with grid() as (_, (axes,)):
        curves(axes, [1, 2], [[1.0, 2.0], [3.0, 6.0]], "ours", "black")
        lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}  # type: ignore[union-attr]
        assert lines["ours"] == [2.0, 4.0]
        assert len(axes.lines) == 3


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert can_draw()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else find(n, *a))
    assert not can_draw()
    with pytest.raises(PlotsMissingError, match=r"pip install 'ellzero\[plots\]'"):
        pareto([Point(0.1, 1.0)], tmp_path / "p")


# ---- error against cost ---------------------------------------------------------------------------------------------


def test_a_pareto_plot_shows_all_points_and_the_front_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "ellzero.experiments.figures.save", lambda figure, path, caption: seen.append((figure, caption)) or []
    )
    ours = [Point(0.5, 1.0), Point(0.1, 2.0), Point(0.3, 2.5)]
    theirs = [Point(0.05, 0.5, "theirs")]  # beats all of ours, and does not count for our front
    pareto(ours, tmp_path / "p", cost="macs", title="LeNet-5", published=theirs)
    figure, caption = seen[0]
    (axes,) = figure.axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert lines["ours (3)"] == [(50, 1.0), (10, 2.0), (30, 2.5)]
    assert lines["our front"] == [(10, 2.0), (50, 1.0)]
    assert lines["published"] == [(5, 0.5)]
    assert axes.get_xlabel() == "MACs kept (% of dense)"
    assert [t.get_text() for t in axes.texts] == ["theirs"]
    assert "1 published" in caption


@pytest.mark.slow
@pytest.mark.parametrize("network", ["lenet300", "lenet5"])
def test_the_names_of_published_points_do_not_cover_each_other(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.text import Text

    seen: list[Any] = []
    monkeypatch.setattr("ellzero.experiments.figures.save", lambda figure, path, caption: seen.append(figure) or [])
    context = published(network, "params")
    pareto([Point(c, 1 + 0.01 / c) for c in (0.01, 0.1, 0.3)], tmp_path / "p", published=context)
    (axes,) = seen[0].axes
    seen[0].draw_without_rendering()
    boxes = [Text.get_window_extent(t) for t in axes.texts]
    assert {t.get_text() for t in axes.texts} == {p.label for p in context}
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(t.get_color() != GREY for t in axes.texts)  # grey on white is hard to read


@pytest.mark.parametrize(
    "points", [[], [Point(0.0, 1.0)], [Point(20.0, 1.0)], [Point(0.2, 101.0)], [Point(float("nan"), 1.0)]]
)
def test_what_is_no_point_is_refused(points: list[Point], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`points` must"):
        pareto(points, tmp_path / "p")
