"""The house stands: packages import downward only, files inside a package too, and none grows out of sight.

There is no list of files to keep: the order of packages is one tuple, and inside a package imports must have no cycle.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from support import ROOT

HOUSE = ROOT / "src" / "ellzero"
FLOORS = ("gates", "graph", "gated", "objectives", "out", "integrations", "experiments", "page", "cli")
ROOF = ("__init__", "__main__")  # beside the packages: may import any of them, and no package imports these
ENTRIES, LINES, CLASS, FUNCTION = 12, 450, 250, 60
# Lines of all rooms. Raised for what is new alone: who raises it says what for, and how many, in the commit's message.
IN_ALL = 33_093
LONG = {  # why it is longer than a function or class may be
    "objectives/constraint.py: Constraint": "a fifth is its docstring, a third what a complete and checked state takes",
    "experiments/recipe/fields.py: Fields": "a table: each field once, with all that is known of it",
    "experiments/train/loop.py: train": "half is its docstring; the loop is read as one piece",
}


@cache
def nodes(path: Path, text: str) -> list[ast.AST]:
    """All of a file, read by each check and taken apart once."""
    return list(ast.walk(ast.parse(text, str(path))))


def modules(house: Path) -> dict[str, Path]:
    """Every module by its name inside the house: `graph.rules.call`; a package's `__init__` is the package."""
    found = {}
    for path in sorted(house.rglob("*.py")):
        parts = path.relative_to(house).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported(name: str, house: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the house that a module imports, anywhere in it. `import ellzero` is `__init__`."""
    path = known[name]
    package = ".".join((house.name, *path.parent.relative_to(house).parts))
    for node in nodes(path, path.read_text(encoding="utf-8")):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{name}" for name in names]
        for dotted in names:
            top, *rest = dotted.split(".")
            while rest and ".".join(rest) not in known:  # a name in a module, or in a package's `__init__`
                rest.pop()
            if top == house.name:
                yield ".".join(rest) or "__init__"


def floor(name: str) -> int:
    first = name.partition(".")[0]
    return len(FLOORS) if first in ROOF else FLOORS.index(first)


def upward(house: Path) -> Iterator[str]:
    """What breaks the order of packages, or imports the `__init__` of a package that it lies in."""
    known = modules(house)
    for name in known:
        if name.partition(".")[0] not in (*FLOORS, *ROOF):
            yield f"`{name}` is on no floor: give it its place in FLOORS"
            continue
        for other in imported(name, house, known):
            if other.partition(".")[0] not in (*FLOORS, *ROOF):
                continue  # said where it lies
            if floor(other) > floor(name) or (other in ROOF and name not in ROOF):
                yield f"`{name}` imports `{other}`, which stands above it"
            elif name.startswith(f"{other}."):
                yield f"`{name}` imports `{other}`, the package that it lies in"


def cycle(house: Path) -> list[str]:
    """Modules that import each other in a ring, or none. An `__init__` imports its files: they cannot import it."""
    known = modules(house)
    sorter = TopologicalSorter({name: set(imported(name, house, known)) - {name} for name in known})
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def hidden(house: Path) -> Iterator[str]:
    """Modules that a package's `__init__` replaces by something else of the same name."""
    known = modules(house)
    for name, path in known.items():
        if path.name != "__init__.py":
            continue
        package = "" if name == "__init__" else f"{name}."
        for node in nodes(path, path.read_text(encoding="utf-8")):
            bound = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = f"{node.module or ''}.{alias.name}".removeprefix(f"{house.name}.")
                    if module != f"{package}{alias.asname or alias.name}":
                        bound.append(alias.asname or alias.name)
            yield from (f"{package}{here}" for here in bound if f"{package}{here}" in known)


def large(house: Path) -> Iterator[str]:
    """What has grown beyond what a reader takes in at a glance."""
    for folder in (house, *(p for p in house.rglob("*") if p.is_dir() and p.name != "__pycache__")):
        entries = [p for p in folder.iterdir() if p.name != "__pycache__"]
        if len(entries) > ENTRIES:
            yield f"`{folder.relative_to(house)}` has {len(entries)} entries, more than {ENTRIES}"
    total = 0
    for path in sorted(house.rglob("*.py")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(house).as_posix()
        lines = len(text.splitlines())
        total += lines
        if lines > LINES:
            yield f"`{where}` has {lines} lines, more than {LINES}"
        for node in nodes(path, text):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                length, most = node.end_lineno - node.lineno + 1, CLASS if isinstance(node, ast.ClassDef) else FUNCTION  # type: ignore[operator]
                if length > most and f"{where}: {node.name}" not in LONG:
                    yield f"`{where}: {node.name}` has {length} lines, more than {most}"
    if total > IN_ALL:
        yield f"the house has {total} lines, more than {IN_ALL}"


@pytest.mark.slow
def test_imports_go_down_only() -> None:
    assert set(FLOORS) - {"integrations"} <= set(modules(HOUSE))
    assert list(upward(HOUSE)) == []


def test_no_modules_import_each_other_in_a_ring() -> None:
    assert cycle(HOUSE) == []


def test_no_module_is_hidden_by_a_function_of_its_name() -> None:
    assert list(hidden(HOUSE)) == []


def test_nothing_is_too_large() -> None:
    assert list(large(HOUSE)) == []


# ---- that the checks see what they should ---------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """An empty house with a few files."""
    root = tmp_path / "ellzero"
    files = "gates/abstract gates/families graph/axes graph/rules/call gated/module objectives/costs"
    for file in (*files.split(), "experiments/data/mnist"):
        for folder in Path(file).parents:
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / "__init__.py").touch()
        (root / f"{file}.py").touch()
    return root


UPWARDS = [
    "from ..objectives.costs import macs",
    "from ..objectives import costs",
    "from .. import objectives",
    "import ellzero.objectives.costs",
    "from ellzero.objectives import costs as c",
    "def f():\n    from ellzero.objectives.costs import macs",
    "if TYPE_CHECKING:\n    import ellzero.objectives.costs as c",
    "import ellzero as l0",
    "from ellzero import attach",
    "from ellzero.gated import attach",  # its own package's `__init__`
    "from . import attach",
]


@pytest.mark.parametrize("line", UPWARDS)
def test_every_way_to_import_upwards_is_seen(line: str, house: Path) -> None:
    (house / "gated" / "module.py").write_text(line)
    assert len(list(upward(house))) == 1


def test_what_lies_below_may_be_imported_in_every_way(house: Path) -> None:
    (house / "gated" / "module.py").write_text(
        "import torch\nfrom ..graph.axes import Axis\nfrom .. import gates\n"
        "import ellzero.graph\nfrom ellzero import gates"
    )
    (house / "gated" / "__init__.py").write_text("from ellzero.gated.module import Gated")
    (house / "graph" / "tracing.py").write_text("from ellzero.graph.rules import RULES\nfrom ellzero.graph import axes")
    (house / "experiments" / "data" / "mnist.py").write_text("from ...gated import Gated\nfrom . import idx")
    (house / "experiments" / "data" / "idx.py").touch()
    (house / "__init__.py").write_text("from ellzero.gated.module import Gated")
    assert list(upward(house)) == []
    assert cycle(house) == []


def test_a_package_without_a_floor_is_seen(house: Path) -> None:
    (house / "extra.py").touch()
    assert list(upward(house)) == ["`extra` is on no floor: give it its place in FLOORS"]


def test_a_ring_inside_a_package_is_seen(house: Path) -> None:
    (house / "gates" / "abstract.py").write_text("def f():\n    from ellzero.gates import families")
    (house / "gates" / "families.py").write_text("from .abstract import AbstractGate")
    assert set(cycle(house)) == {"gates.abstract", "gates.families"}


@pytest.mark.parametrize(
    "line", ["from ellzero.gates.families import draw as abstract", "def abstract(): ...", "class abstract: ..."]
)
def test_a_hidden_module_is_seen(line: str, house: Path) -> None:
    (house / "gates" / "__init__.py").write_text(f"from ellzero.gates import families\n{line}")
    assert list(hidden(house)) == ["gates.abstract"]


def test_what_is_too_large_is_seen(house: Path) -> None:
    body = "    x = 1\n"
    (house / "gates" / "abstract.py").write_text("def f():\n" + FUNCTION * body)
    (house / "gates" / "families.py").write_text("class A:\n" + CLASS * body + "y = 1\n" * (LINES - CLASS))
    for k in range(ENTRIES):
        (house / "graph" / f"extra{k}.py").touch()
    assert list(large(house)) == [
        f"`graph` has {ENTRIES + 3} entries, more than {ENTRIES}",
        f"`gates/abstract.py: f` has {FUNCTION + 1} lines, more than {FUNCTION}",
        f"`gates/families.py` has {LINES + 1} lines, more than {LINES}",
        f"`gates/families.py: A` has {CLASS + 1} lines, more than {CLASS}",
    ]
