"""Imports go down only: the modules of the library stand in one order, and each may import only those before it."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from support import ROOT

HOUSE = ROOT / "src" / "ellzero"
FLOORS = [
    "distributions gates",  # 1: one random multiplier
    "axes labels layers trace removal trial",  # 2: what shrinks together
    "placements liveness census gated",  # 3: attachment
    "costs objectives",  # 4: what it costs
    "compact saving report",  # 5: the way out
    # 6: experiments
    "zoo data recipes checkpoint folders watch parallel runs lagrangian shrinking",
    "building capturing supply trainer training",
    "figures reproduce sweep page cli __main__",
    "__init__",
]
ORDER = " ".join(FLOORS).split()


def imported(path: Path, house: Path) -> Iterator[str]:
    """Names in `ORDER` of what a file imports, anywhere in it; the package itself, `import ellzero`, is `__init__`."""
    package = ".".join((house.name, *path.parent.relative_to(house).parts))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{name}" for name in names]
        for name in names:
            top, *rest = name.split(".")
            if top == house.name:
                yield rest[0] if rest and rest[0] in ORDER else "__init__"


def violations(house: Path) -> Iterator[str]:
    for path in sorted(house.rglob("*.py")):
        module = path.relative_to(house).with_suffix("").parts[0]
        if module not in ORDER:
            yield f"`{path.name}` has no floor: give `{module}` its place in FLOORS"
            continue
        for name in imported(path, house):
            if name != module and ORDER.index(name) >= ORDER.index(module):
                yield f"`{path.relative_to(house)}` imports `{name}`, which stands above it"


def test_imports_go_down_only() -> None:
    assert any(HOUSE.glob("*.py"))
    assert list(violations(HOUSE)) == []


def test_every_way_to_import_upwards_is_seen(tmp_path: Path) -> None:
    house = tmp_path / "ellzero"
    (house / "data").mkdir(parents=True)
    upwards = [
        "from .costs import macs",
        "from . import costs",
        "import ellzero.objectives.costs",
        "from ellzero import costs",
    ]
    upwards += ["def f():\n    from ellzero.costs import macs", "import ellzero as l0", "from ellzero import attach"]
    for line in upwards:
        (house / "gated.py").write_text(line)
        assert len(list(violations(house))) == 1, line
    (house / "gated.py").write_text("import torch\nfrom .axes import Axis\nfrom . import gates\nimport ellzero.trace")
    (house / "data" / "mnist.py").write_text("from ..gated import Gated\nfrom . import idx\nfrom .idx import read")
    assert list(violations(house)) == []
    (house / "data" / "mnist.py").write_text("from ..cli import main")
    (house / "extra.py").touch()
    assert list(violations(house)) == [
        "`data/mnist.py` imports `cli`, which stands above it",
        "`extra.py` has no floor: give `extra` its place in FLOORS",
    ]
