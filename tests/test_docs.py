"""What the pages say is what was measured."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_are_those_of_the_stored_results() -> None:
    spec = importlib.util.spec_from_file_location("render", ROOT / "reproductions" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    written = render.PAGE.read_text(encoding="utf-8")
    assert render.page(written) == written
