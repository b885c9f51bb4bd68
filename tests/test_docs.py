"""What the pages say is what was measured."""

from pathlib import Path
from types import ModuleType

from scripts import loaded

ROOT = Path(__file__).parent.parent


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
