"""The names of version 0.1 that are elsewhere now, so that whoever types one is told the new one.

This file knows names only, and imports nothing of the library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NoReturn

_ROOMS = {
    "gates": "Median NoExpectation Noiseless RectifiedGate",
    "gates.distributions": "BinaryConcrete HardConcrete Logistic Rectified",
    "graph": "Axis ClosedAxisError Graph Plan Site TraceError trace",
    "objectives": "extra_gradient_step",
    "objectives.costs": "breakdown floor",
    "objectives.duals": "ExponentiatedAscent ExtrapolationFromPast GradientAscent LinearWarmup NuPI",
    "out.compaction": "CompactionError",
    "out.reporting": "Report",
}
MODULES = {
    "axes": "graph.axes",
    "building": "experiments.train",
    "capturing": "experiments.train",
    "census": "gated.counting",
    "checkpoint": "experiments.store.checkpoint",
    "compact": "out.compaction",
    "costs": "objectives.costs",
    "data": "experiments.data",
    "distributions": "gates.distributions",
    "figures": "experiments.figures",
    "folders": "experiments.store",
    "labels": "graph.values",
    "lagrangian": "experiments.train",
    "layers": "graph.rules",
    "liveness": "gated.alive",
    "parallel": "experiments.train",
    "placements": "gated.placements",
    "recipes": "experiments.recipe",
    "removal": "graph.plan",
    "report": "out.reporting",
    "reproduce": "experiments.study",
    "runs": "experiments.train",
    "saving": "out.saving",
    "shrinking": "out.shrinking",
    "supply": "experiments.train",
    "sweep": "experiments.sweep",
    "trainer": "experiments.train.trainer",
    "training": "experiments.train.loop",
    "trial": "graph.rehearsal",
    "watch": "experiments.train",
    "zoo": "experiments.networks",
}
NAMES = {name: f"{room}.{name}" for room, names in _ROOMS.items() for name in names.split()}
NEW = NAMES | MODULES


def attribute(name: str) -> NoReturn:
    """What `ellzero.name` raises where there is no such name any more: `__getattr__` of the package."""
    new = NEW.get(name)
    known = f"`ellzero.{name}` is now `ellzero.{new}`" if new else f"module 'ellzero' has no attribute {name!r}"
    raise AttributeError(known, name=name)


class _Finder(MetaPathFinder):
    """Asked last, when no other finder knows a module: `import ellzero.zoo`, `from ellzero import GradientAscent`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.partition(".")
        new = NEW.get(name) if package == __package__ else None
        if new:
            # Not `ModuleNotFoundError`: `from ellzero import …` would swallow it, and the new name with it.
            raise ImportError(f"`{fullname}` is now `ellzero.{new}`", name=fullname)


def watch_imports() -> None:
    """Lets imports of the old names say the new ones."""
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
