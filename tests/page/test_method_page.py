"""The page of the method: what it shows first against `distributions`, what it needs, the command that writes it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ellzero.cli import main
from ellzero.gates.distributions import BinaryConcrete, HardConcrete
from ellzero.page import charts, method
from ellzero.page.method import method_page


@pytest.fixture(scope="module")
def html() -> str:
    return method_page()


def chart(html: str, name: str) -> dict[str, Any]:
    found = re.search(rf'<script type="application/json" id="data-{name}">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_penalties_are_powers(html: str) -> None:
    traces = chart(html, "penalties")["data"]
    named = {trace["name"]: trace for trace in traces if trace["mode"] == "lines"}
    assert named.keys() == set(method.POWERS.values())
    for p, name in method.POWERS.items():
        at = dict(zip(named[name]["x"], named[name]["y"], strict=True))
        assert at[0.25] == pytest.approx(0.25**p)
        assert at[2.0] == pytest.approx(2.0**p)
    dots = [(trace["x"], trace["y"], trace["marker"]["symbol"]) for trace in traces if trace["mode"] == "markers"]
    assert dots == [([0.0], [0.0], "circle"), ([0.0], [1.0], "circle-open")]


def test_the_density_and_its_atoms_sum_to_one(html: str) -> None:
    concrete, hard, stems, tips = chart(html, "density")["data"]
    step = hard["x"][1] - hard["x"][0]
    area = sum(hard["y"]) * step + step / 2 * (hard["y"][0] + hard["y"][-1])  # the trapezoids, and the two ends
    assert tips["x"] == [0.0, 1.0]
    assert area + sum(tips["y"]) == pytest.approx(1.0, abs=1e-3)
    assert stems["y"] == [0.0, tips["y"][0], None, 0.0, tips["y"][1]]
    assert tips["y"][0] == pytest.approx(1 / (1 + 11**0.5), abs=1e-9)  # σ(β log(−γ/ζ)) for β = 1/2, −γ/ζ = 1/11
    assert concrete["y"][199] == pytest.approx(0.5)  # β at the middle, where log α = 0
    assert [f"{mass:.3f}" for mass in tips["y"]] == tips["text"]


def test_the_means_are_those_of_the_distributions(html: str) -> None:
    traces = {trace["name"]: trace for trace in chart(html, "means")["data"]}
    x = torch.tensor(traces["P(z ≠ 0)"]["x"], dtype=torch.float64)
    hard = HardConcrete(x, 0.5, -0.1, 1.1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        samples = hard.rsample((20_000,)).mean(0)
    mean = torch.tensor(traces["hard concrete, mean"]["y"], dtype=torch.float64)
    assert (samples - mean).abs().max() < 0.015
    noiseless = traces["hard concrete, without noise ẑ"]["y"]
    assert noiseless == pytest.approx((torch.sigmoid(x) * 1.2 - 0.1).clamp(0, 1).tolist())
    assert traces["binary concrete, mean"]["y"] == pytest.approx(BinaryConcrete(x, 0.5).mean.tolist())


def test_every_slider_has_a_label_and_holds_its_value(html: str) -> None:
    for name, symbol, _, low, high, step, value in method.SLIDERS:
        assert re.search(rf'<label for="{name}"><b>{symbol}</b>', html)
        assert f'<input type="range" id="{name}" min="{low}" max="{high}" step="{step}" value="{value}"' in html
        assert low <= value <= high
        assert (value - low) / step == pytest.approx(round((value - low) / step))  # or the browser would round it


def test_it_asks_for_no_other_file(html: str) -> None:
    own = html.replace(charts._plotly(), "")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", own)
    assert "@import" not in own
    assert "http://" not in own.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in own


# ---------------------------------------------------------------- the command


def test_the_command_writes_the_page(tmp_path: Path, html: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "page.html"
    for _ in range(2):  # its own page may be written anew
        assert main(["method", "--out", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == html
    assert capsys.readouterr().out.splitlines() == [str(file)] * 2


@pytest.mark.parametrize("found", [True, False])
def test_open_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: bool
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or found)
    monkeypatch.chdir(tmp_path)
    assert main(["method", "--open"]) == (0 if found else 1)
    assert shown == [(tmp_path / "method.html").resolve().as_uri()]
    assert ("no browser was found" in capsys.readouterr().err) == (not found)


def test_it_refuses_to_overwrite_what_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<h1>mine</h1>")
    (tmp_path / "folder.html").mkdir()
    for out, words in (
        (mine, "something else"),
        (tmp_path / "folder.html", "something else"),
        (tmp_path / "a", ".html"),
    ):
        assert main(["method", "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert mine.read_text() == "<h1>mine</h1>"
    (tmp_path / "file").touch()
    assert main(["method", "--out", str(tmp_path / "file" / "page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_extra_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts, "_missing", lambda: "plotly")
    assert main(["method", "--out", str(tmp_path / "page.html")]) == 1
    assert "ellzero[page]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
