"""The pages in a real browser: no error, no request, nothing too wide; sliders, tooltips and links; the numbers of the
run's json and of `distributions`. Skipped where no browser is installed.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch

from ellzero.experiments.store.folder import Folder
from ellzero.gates.distributions import BinaryConcrete, HardConcrete
from ellzero.page import method_page, run_page, runs_page
from support.browser import Browser, BrowserError, Tab, find
from support.finished import copied
from support.pages import WHOLE, whole_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no browser is installed (chromium, or another by $ELLZERO_BROWSER)"),
    pytest.mark.timeout(600),
]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>".replace("/", "∕")  # a name cannot have a slash
Open = Callable[..., Tab]


@contextmanager
def opening(chromium: Browser) -> Iterator[Open]:
    """What opens a file in a tab, and waits until its charts are drawn; the tabs are closed in the end."""
    tabs: list[Tab] = []

    def open_(file: Path, width: int = 1280, **window: Any) -> Tab:
        tab = chromium.open(file.as_uri(), width, **window)
        tabs.append(tab)
        tab.ready()
        return tab

    yield open_
    for tab in tabs:
        tab.close()


@pytest.fixture
def show(chromium: Browser) -> Iterator[Open]:
    with opening(chromium) as open_:
        yield open_


# ---------------------------------------------------------------- the pages


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained, its page, the pages of several runs and of the method.

    Where the page of several runs leads to, there is one that loads at once: who clicks asks where, and not what.
    """
    home = tmp_path_factory.mktemp("pages")
    trained = copied(whole_run(), home / "runs" / "trained")
    (home / "run.html").write_text(run_page(Folder.open(trained)), encoding="utf-8")
    (trained / "page.html").write_text("<!doctype html><title>The page of a run</title>", encoding="utf-8")
    result = json.loads((trained / "results.json").read_text())[0]
    for number in range(1, 4):  # more of the kind, with numbers of their own
        recipe = WHOLE.override(seed=number)
        folder = Folder.create(home / "runs" / f"made-{number}", [recipe])
        costs = {c: {**v, "kept": v["kept"] * (1 - number / 10)} for c, v in result["costs"].items()}
        errors = {"error_last": 10.0 + number, "error_best": 9.0 + number}
        folder.finish([{**result, **errors, "costs": costs, "seed": number}])
    (home / "runs" / "nothing").mkdir()
    everything = sorted((home / "runs").iterdir())
    (home / "runs.html").write_text(runs_page(everything, home), encoding="utf-8")
    (home / "method.html").write_text(method_page(), encoding="utf-8")
    return home


PAGES = ("run.html", "runs.html", "method.html")
Opened = Callable[..., Tab]


@pytest.fixture(scope="module")
def opened(home: Path, chromium: Browser) -> Iterator[Opened]:
    """Gives a page of `home` by its name: opened once, in a small dark window, for all tests that do not leave it."""
    with opening(chromium) as show:
        first = cache(lambda name: show(home / name, 390, dark=True))

        def again(name: str, width: int = 1280, *, dark: bool = False) -> Tab:
            """As it was in the beginning, but for the window."""
            tab = first(name)
            tab.front()
            tab.resize(width, dark=dark)
            tab.evaluate("""(() => { const form = document.getElementById('choice'); if (form) {
                form.reset(); form.dispatchEvent(new Event('change', {bubbles: true})); }
                for (const e of document.querySelectorAll('[data-chosen]')) delete e.dataset.chosen; })()""")
            tab.ready()
            tab.hover(5, 5)
            return tab

        yield again


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_fits_every_window(name: str, home: Path, opened: Opened) -> None:
    tab = opened(name, 390, dark=True)
    drawn = "Array.from(document.querySelectorAll('[data-chart]')).map(e => e.querySelectorAll('.main-svg').length > 0)"
    assert all(tab.evaluate(drawn))
    assert tab.evaluate("document.querySelectorAll('[data-chart]').length") > 0
    colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    for width, dark in ((390, True), (390, False), (1280, False)):
        tab.resize(width, dark=dark)
        tab.wait(f"Math.max(...{BOXES}.map(b => b.right)) <= {width}")
        assert tab.overflow() <= 0, (width, dark)
        assert (sum(tab.evaluate(colour)) < 3 * 60) == dark
        assert (sum(tab.evaluate(INK)) > 3 * 150) == dark
    assert tab.problems == []
    assert tab.requests == [(home / name).as_uri()]
    assert tab.dialogs == []
    labels = tab.evaluate("""Array.from(document.querySelectorAll('[data-chart]')).map(e => [e.getAttribute('role'),
        e.getAttribute('aria-label'), e.closest('figure').querySelector('figcaption').innerText])""")
    for role, label, caption in labels:
        assert role == "img"
        assert len(label) > 30
        assert len(caption) > 30
    assert tab.evaluate("document.documentElement.lang") == "en"
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1


BOXES = "Array.from(document.querySelectorAll('.main-svg')).map(e => e.getBoundingClientRect())"
# The colour of the letters at a chart's axis: charts follow the theme too.
INK = "getComputedStyle(document.querySelector('.xtick text, .legendtext')).fill.match(/\\d+/g).slice(0, 3).map(Number)"


@pytest.fixture
def method(opened: Opened) -> Tab:
    return opened("method.html")


def test_the_switch_goes_through_the_colours(method: Tab) -> None:
    found = []
    for _ in range(3):
        method.evaluate("document.getElementById('theme').click()")
        method.ready()
        name = method.evaluate("document.getElementById('theme').innerText")
        found.append((name, sum(method.evaluate(INK)) > 3 * 150))
    assert found == [("Light", False), ("Dark", True), ("Auto", False)]
    assert method.problems == []


def test_what_is_folded_away_is_drawn_when_it_is_opened(method: Tab) -> None:
    figure = """<details id="folded"><summary>more</summary><div id="late" data-chart="late" style="height:200px"></div>
    <script type="application/json" id="data-late">{"data": [{"y": [1, 2]}], "layout": {}}</script></details>"""
    method.evaluate(f"document.body.insertAdjacentHTML('beforeend', `{figure}`)")
    drawn = "document.querySelectorAll('#late .main-svg').length"
    method.evaluate("ellzero.draw(document.getElementById('folded').parentNode).then(() => null)")
    assert method.evaluate(drawn) == 0
    method.evaluate("document.getElementById('folded').open = true")
    assert method.wait(drawn) > 0
    method.evaluate("delete ellzero.charts.late; document.getElementById('folded').remove()")
    assert method.problems == []


# ---------------------------------------------------------------- one run


def test_the_page_of_a_run_shows_its_json(home: Path, opened: Opened) -> None:
    folder = Folder.open(home / "runs" / "trained")
    (result,) = folder.results() or []
    tab = opened("run.html")
    text = tab.evaluate("document.body.innerText")
    assert f"{result['error_last']:.2f} %" in text
    assert f"{100 * result['costs']['params']['kept']:.2f} %" in text
    assert f"{100 * result['costs']['macs']['kept']:.2f} %" in text
    rows = tab.evaluate(
        "Array.from(document.querySelector('table').tBodies[0].rows).map(r => r.innerText.split('\\t'))"
    )
    kept = [int(row[3]) for row in rows]  # axis, dense, expected, kept, state
    assert set(result["architecture"].values()) <= set(kept)
    curves = tab.evaluate("""Array.from(document.querySelectorAll('[data-chart]')).flatMap(e =>
        e.data.filter(t => t.y && t.y.length).map(t => Array.from(t.y)))""")
    history = folder.history()
    for wanted in (
        [record["error"] for record in history],
        [100 * record["kept"]["params"] for record in history],
        [100 * record["expected"]["params"] for record in history],
    ):
        assert any(curve == pytest.approx(wanted) for curve in curves if len(curve) == len(wanted)), wanted


# ---------------------------------------------------------------- several runs


def points(tab: Tab, trace: int) -> list[tuple[float, float]]:
    """Where the points of a trace are in the window."""
    return [
        (x, y)
        for x, y in tab.evaluate(f"""(() => {{
            const e = document.querySelector('[data-chart]'), t = e.data[{trace}], l = e._fullLayout;
            e.scrollIntoView({{block: 'center'}});
            const box = e.getBoundingClientRect();
            return Array.from(t.x).map((x, k) => [box.left + l.xaxis._offset + l.xaxis.d2p(x),
                                                  box.top + l.yaxis._offset + l.yaxis.d2p(t.y[k])]);
        }})()""")
    ]


def traces(tab: Tab) -> list[dict[str, Any]]:
    return list(
        tab.evaluate("""document.querySelector('[data-chart]').data.map(t =>
            ({name: t.name, x: Array.from(t.x), y: Array.from(t.y), customdata: t.customdata}))""")
    )


def stay(tab: Tab) -> None:
    """Notes where the page is left for, and stays: what is left is loaded again, which takes longer than all else."""
    tab.evaluate("""(() => { window.left = null; if (!window.stays) navigation.addEventListener('navigate', event => {
        window.left = event.destination.url; event.preventDefault(); }); window.stays = true; })()""")


def press(tab: Tab, trace: int, point: int) -> None:
    """Moves the mouse to a point that has a page, and presses once when the chart says that it has seen it there."""
    x, y = points(tab, trace)[point]
    tab.hover(x, y)
    tab.wait("document.querySelector('[data-chart].linked') !== null")
    tab.press_here(x, y)


def test_runs_hover_and_click(home: Path, opened: Opened) -> None:
    folder = Folder.open(home / "runs" / "trained")
    (result,) = folder.results() or []
    tab = opened("runs.html")
    shown = [trace["name"] for trace in traces(tab)]
    own = shown.index("runs")
    at = traces(tab)[own]["x"].index(pytest.approx(100 * result["costs"]["params"]["kept"]))
    tab.hover(5, 5)
    tab.hover(*points(tab, own)[at])
    tip = tab.wait("document.querySelector('.hoverlayer .hovertext')?.textContent")
    assert f"{WHOLE.name}, seed 0" in tip
    assert f"error {result['error_last']:.2f} %, best {result['error_best']:.2f} %" in tip
    for cost, name in (("params", "parameters"), ("macs", "MACs"), ("l0_norm", "density")):
        assert f"{name} kept {100 * result['costs'][cost]['kept']:.2f} %" in tip
    assert "click: its page" in tip
    stay(tab)
    press(tab, own, at)
    assert tab.wait("window.left") == (folder.path / "page.html").as_uri()
    assert tab.problems == []


def test_a_press_right_after_a_movement_opens_too(opened: Opened) -> None:
    """Plotly looks at the second movement only after the button is down: it forgets the point then, and the click."""
    tab = opened("runs.html")
    own = [trace["name"] for trace in traces(tab)].index("runs")
    linked = next(k for k, link in enumerate(traces(tab)[own]["customdata"]) if link)
    x, y = points(tab, own)[linked]
    stay(tab)
    tab.evaluate(f"""(() => {{
        const plot = document.querySelector('[data-chart]'), drag = plot.querySelector('.nsewdrag');
        const now = Date.now(), at = (x) => ({{clientX: x, clientY: {y}, bubbles: true}});
        window.clock = Date.now;
        Date.now = () => now;  // by which Plotly finds that it has looked just before, however busy the machine is
        const send = (to, kind, x) => to.dispatchEvent(new PointerEvent(kind, at(x)));
        plot.on('plotly_unhover', () => setTimeout(() => {{ send(document, 'mouseup', {x}); }}));
        send(drag, 'mousemove', {x} - 2);
        send(drag, 'mousemove', {x});
        send(drag, 'pointerdown', {x});
        send(drag, 'mousedown', {x});
    }})()""")
    assert tab.wait("window.left").endswith("/page.html")
    tab.evaluate("Date.now = window.clock")


def test_runs_switch_what_is_compared(home: Path, opened: Opened) -> None:
    results = {}
    for path in sorted((home / "runs").iterdir()):
        if (path / "results.json").exists():
            (results[path.name],) = Folder.open(path).results() or []
    tab = opened("runs.html")
    # By the keyboard, as without a mouse: the arrows go through the choices of a group.
    tab.evaluate("document.querySelector('input[name=cost]').focus()")
    for cost, words in (("params", "parameters"), ("macs", "MACs"), ("l0_norm", "density")):
        for error in ("error_last", "error_best"):
            tab.evaluate(f"document.querySelector('input[value={error}]').click()")
            tab.ready()
            own = next(trace for trace in traces(tab) if trace["name"] == "runs")
            expected = [(100 * r["costs"][cost]["kept"], r[error]) for r in results.values()]
            found = list(zip(own["x"], own["y"], strict=True))
            assert sorted(found) == [pytest.approx(pair) for pair in sorted(expected)]
            assert f"{words} kept" in tab.evaluate("document.querySelector('.xtitle').textContent")
            assert f"{words} kept" in tab.evaluate("document.querySelector('[data-chart]').getAttribute('aria-label')")
        tab.evaluate("document.querySelector('input[name=cost]:checked').focus()")
        tab.press("ArrowDown")
    rows = tab.evaluate("Array.from(document.querySelector('tbody').rows).map(r => r.innerText)")
    errors = [r["error_last"] for r in results.values()]
    assert len(rows) == 1
    assert f"{sum(errors) / len(errors):.2f} ± " in rows[0]
    text = tab.evaluate("document.body.innerText")
    for result in results.values():
        assert f"{result['error_last']:.2f} %" in text
    assert "holds no run" in text
    assert tab.problems == []


ERRORS = {f"r{number}": 20 + 37 * number % 200 / 10 for number in range(200)}
ERRORS |= {"r10": 9.5, "r9": 10.25, "r2": 100.0, "r1": 2.0}


@pytest.fixture(scope="module")
def many(home: Path, chromium: Browser) -> Iterator[Tab]:
    """The page of two hundred runs, in a small window."""
    source = json.loads((home / "runs" / "trained" / "results.json").read_text())[0]
    for number in range(200):
        name, kept = f"r{number}", (number + 1) / 201
        costs = {c: {**v, "kept": kept} for c, v in source["costs"].items()}
        own = {**source, "costs": costs, "error_last": ERRORS[name], "error_best": ERRORS[name]}
        Folder.create(home / "many" / name, [WHOLE.override(name=name, at_most=kept)]).finish([own])
    (home / "many.html").write_text(runs_page([home / "many"], home), encoding="utf-8")
    with opening(chromium) as show:
        yield show(home / "many.html", 390)


def test_headings_sort_their_tables_by_mouse_and_keyboard(many: Tab) -> None:
    """Numbers as numbers, 9.5 below 10.25, and names by the numbers in them; the other table stays as it is."""
    tab = many
    tab.front()
    tab.resize(1280)
    tab.ready()

    def shown(table: int) -> list[str]:
        rows = f"Array.from(document.querySelectorAll('table[data-sortable]')[{table}].tBodies[0].rows)"
        names: list[str] = tab.evaluate(f"{rows}.map(r => r.cells[0].innerText)")
        return [name.partition(",")[0] for name in names]

    def heading(text: str) -> str:
        return f"Array.from(document.querySelectorAll('thead th')).find(e => e.innerText.startsWith('{text}'))"

    rising, before = sorted(ERRORS, key=lambda name: ERRORS[name]), shown(1)
    tab.evaluate(f"{heading('Error, last')}.scrollIntoView({{block: 'center'}})")
    box = tab.evaluate(f"JSON.parse(JSON.stringify({heading('Error, last')}.firstChild.getBoundingClientRect()))")
    tab.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert shown(0) == rising == ["r1", "r10", "r9", *rising[3:-1], "r2"]
    assert tab.evaluate(f"{heading('Error, last')}.getAttribute('aria-sort')") == "ascending"
    tab.press("Enter")  # the heading that was clicked has the focus
    assert shown(0) == rising[::-1]
    assert tab.evaluate(f"{heading('Error, last')}.getAttribute('aria-sort')") == "descending"
    tab.evaluate(f"{heading('Recipe')}.querySelector('button').focus()")
    tab.press("Enter")
    assert shown(0) == [f"r{number}" for number in range(200)]
    marked = "Array.from(document.querySelectorAll('th[aria-sort]')).map(e => e.innerText)"
    assert len(tab.evaluate(marked)) == 1
    assert shown(1) == before
    assert tab.problems == []


def test_two_hundred_runs_open(many: Tab) -> None:
    many.front()
    many.resize(390)
    many.ready()
    assert many.evaluate("document.querySelectorAll('.scatterlayer .trace.scatter path.point').length") >= 200
    assert many.overflow() <= 0
    assert many.problems == []


def test_a_finger_looks_first_and_opens_when_it_touches_again_and_names_that_are_html_do_nothing(
    tmp_path: Path, home: Path, show: Open
) -> None:
    """It leaves the page indeed, for one that has such names too."""
    evil = tmp_path / EVIL
    shutil.copytree(
        home / "runs" / "trained", evil, ignore=shutil.ignore_patterns("checkpoints")
    )  # whose charts take long
    about = json.loads((evil / "run.json").read_text())
    about["about"]["command"] = f"ellzero train '</script>{EVIL}'"
    (evil / "run.json").write_text(json.dumps(about))
    (evil / "page.html").write_text(run_page(Folder.open(evil)), encoding="utf-8")
    (tmp_path / f"not a run {EVIL}").mkdir()
    (tmp_path / "runs.html").write_text(runs_page(sorted(tmp_path.iterdir()), tmp_path), encoding="utf-8")
    tab = show(tmp_path / "runs.html", 390, touch=True)
    own = [trace["name"] for trace in traces(tab)].index("runs")
    linked = next(k for k, link in enumerate(traces(tab)[own]["customdata"]) if link)
    loads = tab._loads
    press(tab, own, linked)
    tab.wait(f"document.querySelector('[data-chart]').dataset.chosen === '{own} {linked}'")
    tip = tab.wait("document.querySelector('.hoverlayer .hovertext')?.textContent")
    assert "seed" in tip
    assert tab.evaluate("location.href") == (tmp_path / "runs.html").as_uri()
    assert EVIL in tab.evaluate("document.body.innerText")
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert unquote(urlsplit(tab.evaluate("document.querySelector('td.label a').href")).path) == str(evil / "page.html")
    press(tab, own, linked)
    tab.loaded(loads)
    assert Path(unquote(urlsplit(tab.evaluate("location.href")).path)) == evil / "page.html"
    tab.ready()
    assert tab.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    assert tab.dialogs == []
    assert tab.problems == []


# ---------------------------------------------------------------- the method


def method_values(tab: Tab) -> dict[str, Any]:
    """What the charts and the texts of the page show."""
    return dict(
        tab.evaluate("""({
            density: document.getElementById('density').data.map(t => [Array.from(t.x), Array.from(t.y)]),
            means: document.getElementById('means').data.map(t => [Array.from(t.x), Array.from(t.y)]),
            facts: Object.fromEntries(
                Array.from(document.querySelectorAll('[id^=fact-]')).map(e => [e.id, e.innerText])),
            values: ['log-alpha', 'beta', 'gamma', 'zeta'].map(n => document.getElementById(n + '-value').innerText)
        })""")
    )


def check_method(shown: dict[str, Any], log_alpha: float, beta: float, gamma: float, zeta: float) -> None:
    a = torch.tensor(log_alpha, dtype=torch.float64)
    hard = HardConcrete(a, beta, gamma, zeta)
    (x, concrete), (_, density), stems, tips = shown["density"]
    at = torch.tensor(x, dtype=torch.float64)
    assert concrete == pytest.approx(BinaryConcrete(a, beta).log_prob(at).exp().tolist(), rel=1e-6, abs=1e-12)
    assert density == pytest.approx(hard.log_prob(at).exp().tolist(), rel=1e-6, abs=1e-12)
    zero, one = (1 - hard.prob_nonzero).item(), hard.prob_one.item()
    assert tips == [[0, 1], pytest.approx([zero, one], abs=1e-9)]
    assert stems[1] == [0, pytest.approx(zero, abs=1e-9), None, 0, pytest.approx(one, abs=1e-9)]
    along = torch.tensor(shown["means"][0][0], dtype=torch.float64)
    soft, gates = BinaryConcrete(along, beta), HardConcrete(along, beta, gamma, zeta)
    curves = [soft.mean, torch.sigmoid(along), gates.prob_nonzero, gates.mean, gates.noiseless]
    for (_, y), expected in zip(shown["means"], curves, strict=False):
        assert y == pytest.approx(expected.tolist(), abs=1e-4)
    assert shown["means"][5] == [
        pytest.approx([log_alpha] * 2, abs=1e-9),
        pytest.approx([hard.mean.item(), hard.noiseless.item()], abs=1e-4),
    ]
    facts = {name.removeprefix("fact-"): float(text) for name, text in shown["facts"].items()}
    numbers = {"at-0": zero, "at-1": one, "between": 1 - zero - one, "open": 1 - zero}
    numbers |= {"mean": hard.mean.item(), "noiseless": hard.noiseless.item()}
    assert facts == {name: pytest.approx(value, abs=1.5e-4) for name, value in numbers.items()}
    values = [float(text.replace("−", "-")) for text in shown["values"]]
    assert values == pytest.approx([log_alpha, beta, gamma, zeta], abs=6e-4)


def test_the_method_begins_with_figure_2_and_follows_its_sliders(method: Tab) -> None:
    tab = method
    check_method(method_values(tab), 0.0, 0.5, -0.1, 1.1)
    assert "closed for log α ≤ −2.40" in tab.evaluate("document.getElementById('threshold').innerText")
    # By the keyboard.
    tab.evaluate("document.getElementById('log-alpha').focus()")
    tab.press("ArrowRight", 13)
    tab.ready()
    check_method(method_values(tab), 1.3, 0.5, -0.1, 1.1)
    for key in ("Tab", "ArrowLeft"):  # to the next slider, and down by one
        tab.press(key)
    tab.press("Tab")
    tab.press("ArrowLeft", 10)
    tab.press("Tab")
    tab.press("ArrowUp", 5)
    tab.ready()
    check_method(method_values(tab), 1.3, 0.49, -0.2, 1.15)
    # What is drawn, not only what the chart was told: the tip of the right atom lies higher than that of the left one.
    tips = tab.evaluate("""Array.from(document.querySelectorAll('#density .scatterlayer .trace.scatter path.point'))
        .map(e => e.getBoundingClientRect().y)""")
    assert len(tips) == 2
    assert tips[1] < tips[0]
    # To their corners.
    for values in (
        (-8.0, 0.05, -0.01, 1.01),
        (8.0, 2.0, -1.0, 2.0),
        (-3.0, 2.0, -0.01, 2.0),
        (0.5, 0.05, -1.0, 1.01),
    ):
        for name, value in zip(("log-alpha", "beta", "gamma", "zeta"), values, strict=True):
            tab.evaluate(f"""(() => {{ const e = document.getElementById('{name}'); e.value = {value};
                e.dispatchEvent(new Event('input', {{bubbles: true}})); }})()""")
        tab.ready()
        check_method(method_values(tab), *values)
    tab.evaluate("document.querySelectorAll('[data-set]')[1].click()")
    tab.ready()
    check_method(method_values(tab), 0.0, 2 / 3, -0.1, 1.1)
    assert tab.problems == []


# ---------------------------------------------------------------- the harness itself


def test_the_browser_sees_what_a_page_must_not_do(tmp_path: Path, chromium: Browser) -> None:
    file = tmp_path / "bad.html"
    file.write_text("""<div style="width:2000px">wide</div><script>
        console.error("seen"); alert("hello"); fetch("https://example.com/x").catch(() => 0);
        setTimeout(() => { throw Error("thrown"); }, 0);</script>""")
    tab = chromium.open(file.as_uri(), 390)
    tab.evaluate("new Promise(done => setTimeout(() => done(null), 50))")
    assert tab.dialogs == ["hello"]
    assert tab.requests == [file.as_uri(), "https://example.com/x"]
    assert any("seen" in problem for problem in tab.problems)
    assert any("thrown" in problem for problem in tab.problems)
    assert tab.overflow() > 1000
    with pytest.raises(BrowserError, match="no such thing"):
        tab.evaluate("(() => { throw Error('no such thing'); })()")
    tab.close()
