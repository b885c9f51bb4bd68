"""Learn sparse neural networks: gates on any `nn.Module`, trained under an L0 penalty or a constraint, and a smaller
plain network out of it.

What most loops need is here. The rest is in its room: `l0.gates`, `l0.graph`, `l0.duals`, `l0.distributions`. Whoever
types a name of version 0.1 that is elsewhere now is told where.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn


def _uncaught(kind: type[BaseException], *rest: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("ellzero: interrupted\n")
        raise SystemExit(130)
    sys.__excepthook__(kind, *rest)


if Path(*sys.argv[:1]).stem == "ellzero" or (sys.argv[:1] == ["-m"] and "ellzero" in sys.orig_argv):
    sys.excepthook = _uncaught  # it is the command, and importing torch takes seconds: `main` cannot catch yet

from ellzero import gates, graph
from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement, per_layer, shrinkable, weights
from ellzero.gates import distributions
from ellzero.gates.abstract import AbstractGate
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.graph.trials.centring import centred
from ellzero.graph.trials.numbering import numbered
from ellzero.graph.trials.routing import routed
from ellzero.objectives import duals
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.costs import Cost, complexity, dense, l0_norm, l2_norm, macs, params, units
from ellzero.objectives.duals import AbstractDual
from ellzero.objectives.penalty import Penalty
from ellzero.out.budget import Budget
from ellzero.out.compaction import compact, fold
from ellzero.out.finalization import finalize
from ellzero.out.latency.cost import Latency
from ellzero.out.reporting import report
from ellzero.out.saving import load, save
from ellzero.out.settling import recalibrate

__version__ = "0.1.0"
__all__ = [
    "AbstractDual",
    "AbstractGate",
    "Budget",
    "Constraint",
    "Cost",
    "Gated",
    "HardConcreteGate",
    "Latency",
    "Penalty",
    "Placement",
    "attach",
    "centred",
    "compact",
    "complexity",
    "dense",
    "distributions",
    "duals",
    "finalize",
    "fold",
    "gates",
    "graph",
    "l0_norm",
    "l2_norm",
    "load",
    "macs",
    "numbered",
    "params",
    "per_layer",
    "recalibrate",
    "report",
    "routed",
    "save",
    "shrinkable",
    "units",
    "weights",
]

_KEPT_THEIR_NAME = {  # by their room
    "experiments": "data figures sweep",
    "experiments.store": "checkpoint",
    "experiments.train": "trainer",
    "gated": "placements",
    "gates": "Median NoExpectation Noiseless RectifiedGate distributions",
    "gates.distributions": "BinaryConcrete HardConcrete Logistic Rectified",
    "graph": "Axis ClosedAxisError Graph Plan Site TraceError axes trace",
    "objectives": "costs extra_gradient_step",
    "objectives.costs": "breakdown floor",
    "objectives.duals": "ExponentiatedAscent ExtrapolationFromPast GradientAscent LinearWarmup NuPI",
    "out": "saving shrinking",
    "out.compaction": "CompactionError",
    "out.reporting": "Report",
}
_RENAMED = {  # modules, by what they are now
    "experiments.networks": "zoo",
    "experiments.recipe": "recipes",
    "experiments.store": "folders",
    "experiments.study": "reproduce",
    "experiments.train": "building capturing lagrangian parallel runs supply watch",
    "experiments.train.loop": "training",
    "gated.alive": "liveness",
    "gated.counting": "census",
    "graph.plan": "removal",
    "graph.trials.rehearsal": "trial",
    "graph.rules": "layers",
    "graph.values": "labels",
    "out.compaction": "compact",
    "out.reporting": "report",
}
_NEW = {old: f"{room}.{old}" for room, names in _KEPT_THEIR_NAME.items() for old in names.split()}
_NEW |= {old: new for new, names in _RENAMED.items() for old in names.split()}


class _Finder(MetaPathFinder):
    """Asked last, when no other finder knows a module: `import ellzero.zoo`, `from ellzero import GradientAscent`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.partition(".")
        if package == __name__ and name in _NEW:
            # Not `ModuleNotFoundError`: `from ellzero import …` would swallow it, and the new name with it.
            raise ImportError(f"`{fullname}` is now `ellzero.{_NEW[name]}`", name=fullname)


sys.meta_path.append(_Finder())
if not TYPE_CHECKING:  # to a type checker `__getattr__` would mean that every name is there

    def __getattr__(name: str) -> NoReturn:
        known = f"`ellzero.{name}` is now `ellzero.{_NEW[name]}`" if name in _NEW else None
        raise AttributeError(known or f"module 'ellzero' has no attribute {name!r}", name=name)
