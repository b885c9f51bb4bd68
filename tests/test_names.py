"""The public names, and what whoever types a name of version 0.1 is told."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ellzero as l0
from support import ROOT

OLD = """AbstractGate Axis BinaryConcrete ClosedAxisError CompactionError Constraint ExponentiatedAscent
ExtrapolationFromPast Gated GradientAscent Graph HardConcrete HardConcreteGate LinearWarmup Logistic Median
NoExpectation Noiseless NuPI Penalty Placement Plan Rectified RectifiedGate Report Site TraceError attach breakdown
compact dense extra_gradient_step finalize floor fold l0_norm l2_norm load macs params per_layer report save shrinkable
trace units weights"""  # `__all__` of version 0.1


def found(path: str) -> Any:
    """What `ellzero.<path>` is, a module or an object in one."""
    module, _, name = f"ellzero.{path}".rpartition(".")
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def test_every_public_name_is_there_and_is_explained() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in l0.__all__:
        assert getattr(l0, name).__doc__, name
        assert f"| `l0.{name}` |" in page, f"`docs/api.md` has no line for `{name}`"
    assert page.count("| `l0.") == len(l0.__all__)


@pytest.mark.parametrize("room", [l0.gates, l0.graph, l0.gated, l0.duals, l0.distributions], ids=lambda m: m.__name__)
def test_no_name_of_a_room_hides_a_module(room: ModuleType) -> None:
    for name in getattr(room, "__all__", ()):
        value = getattr(room, name)
        try:
            assert importlib.import_module(f"{room.__name__}.{name}") is value
        except ModuleNotFoundError:
            assert not isinstance(value, ModuleType)


def test_no_old_name_is_forgotten() -> None:
    assert {n for n in OLD.split() if n not in l0.__all__} <= set(l0._NEW)


@pytest.mark.parametrize(("old", "new"), l0._NEW.items())
def test_an_old_name_says_the_new_one(old: str, new: str) -> None:
    told = f"`ellzero.{old}` is now `ellzero.{new}`"
    assert found(new) is not None
    if old not in l0.__all__:
        with pytest.raises(AttributeError) as refused:
            getattr(l0, old)
        assert str(refused.value) == told
        with pytest.raises(ImportError) as refused_from:
            exec(f"from ellzero import {old}")
        assert str(refused_from.value) == told
    for line in (f"import ellzero.{old}", f"from ellzero.{old} import anything", f"import ellzero.{old}.inside"):
        with pytest.raises(ImportError) as refused_import:
            exec(line)
        assert str(refused_import.value) == told


def test_a_name_that_never_was_fails_as_it_does_everywhere() -> None:
    assert not hasattr(l0, "nothing")
    for line in ("import ellzero.nothing", "import nothing_at_all", "from ellzero import nothing"):
        with pytest.raises(ImportError, match="nothing") as refused:
            exec(line)
        assert "is now" not in str(refused.value)


@pytest.mark.slow
def test_importing_takes_no_plots_and_no_pages_and_drawing_takes_no_pyplot(tmp_path: Path) -> None:
    heavy = {"matplotlib", "plotly", "scipy", "rich.console", "ellzero.experiments", "ellzero.page", "ellzero.cli"}
    code = f"""
import sys, torch
before = set(sys.modules)
import ellzero
print(*sorted(set(sys.modules) - before))
import ellzero.experiments.figures as figures
print("matplotlib" in sys.modules)
figures.pareto([figures.Point(0.1, 1.0)], figures.Path({str(tmp_path / "p")!r}))
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported, before, after = ran.stdout.splitlines()
    assert not heavy.intersection(imported.split())
    assert (before, after) == ("False", "True False")
