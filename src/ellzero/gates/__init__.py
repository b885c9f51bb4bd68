"""One random multiplier: its distribution, the gate that learns it, and how many gates are evaluated at once."""

from ellzero.gates import distributions
from ellzero.gates.abstract import AbstractGate, Members, NoExpectation, Phi, draw, flat, noise, values
from ellzero.gates.estimators import AR, ARM, AbstractEstimator, ScoreFunction, StraightThrough
from ellzero.gates.families.bernoulli import AbstractBernoulliGate, BernoulliGate
from ellzero.gates.families.dropout import DropoutGate
from ellzero.gates.families.gaussian_weights import GaussianWeightGate
from ellzero.gates.families.generalized_dropout import GeneralizedDropoutGate
from ellzero.gates.families.gnj import GNJGate
from ellzero.gates.families.group_lasso import GroupLassoGate
from ellzero.gates.families.half_cauchy import HalfCauchyGate
from ellzero.gates.families.sbp import SBPGate
from ellzero.gates.families.sparse_vd import SparseVDGate
from ellzero.gates.families.stg import STGGate
from ellzero.gates.families.vib import VIBGate
from ellzero.gates.hard_concrete import AbstractRule, HardConcreteGate, Median, Noiseless
from ellzero.gates.rectified import RectifiedGate
from ellzero.gates.thresholded import AbstractThresholdedGate

__all__ = [
    "AR",
    "ARM",
    "AbstractBernoulliGate",
    "AbstractEstimator",
    "AbstractGate",
    "AbstractRule",
    "AbstractThresholdedGate",
    "BernoulliGate",
    "DropoutGate",
    "GNJGate",
    "GaussianWeightGate",
    "GeneralizedDropoutGate",
    "GroupLassoGate",
    "HalfCauchyGate",
    "HardConcreteGate",
    "Median",
    "Members",
    "NoExpectation",
    "Noiseless",
    "Phi",
    "RectifiedGate",
    "SBPGate",
    "STGGate",
    "ScoreFunction",
    "SparseVDGate",
    "StraightThrough",
    "VIBGate",
    "distributions",
    "draw",
    "flat",
    "noise",
    "values",
]
