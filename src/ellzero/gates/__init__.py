"""One random multiplier: its distribution, the gate that learns it, and how many gates are evaluated at once."""

from ellzero.gates import distributions
from ellzero.gates.abstract import AbstractGate, NoExpectation, Phi, draw, flat, noise, values
from ellzero.gates.hard_concrete import AbstractRule, HardConcreteGate, Median, Noiseless
from ellzero.gates.rectified import RectifiedGate

__all__ = [
    "AbstractGate",
    "AbstractRule",
    "HardConcreteGate",
    "Median",
    "NoExpectation",
    "Noiseless",
    "Phi",
    "RectifiedGate",
    "distributions",
    "draw",
    "flat",
    "noise",
    "values",
]
