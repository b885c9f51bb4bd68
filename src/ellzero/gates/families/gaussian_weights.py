"""Gaussian noise on weights under a standard normal prior: the part of Bayesian compression that is not on units."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import Phi
from ellzero.gates.formulas import promote
from ellzero.gates.gaussian import AbstractWeightNoiseGate
from ellzero.gates.hard_concrete import INIT_STD


@final
class GaussianWeightGate(AbstractWeightNoiseGate):
    """w ~ N(θ, σ²) under p(w) = N(0, 1), one gate per weight, all of them open (Louizos, Ullrich & Welling, 2017).

    KL = ½(σ² + θ² − 1 − log σ²), summed by `l0.complexity`; at test time θ. It closes nothing itself: units go by a
    `GNJGate` on the same weights, whose z multiplies mean and noise. This KL, not that of the units, dominates the loss
    (4 nats per weight at the start), and without a bound on σ it drowns the first layer: 0.2 in the MLP of the paper,
    0.5 in LeNet-5, put in force after each step (`l0.objectives.follow`). One draw is shared by the batch.

    Args:
        shape: the weight's, with `where=l0.weights("*.weight")`, or several placements together.
        most: σ at most, positive; no bound if `None`.

    Raises:
        ValueError: if `most` is not positive; when attached, if it is not on single weights.
    """

    def __init__(self, shape: int | Sequence[int], *, most: float | None = None) -> None:
        super().__init__(shape, bar=0.0)
        if most is not None and not 0 < most < math.inf:
            raise ValueError(f"`most` must be a standard deviation, positive and finite, got {most}")
        self.most, self.acts_after_steps = most, most is not None
        self.log_var = nn.Parameter(torch.empty(self.shape).normal_(-9.0, INIT_STD))

    def own_constants(self) -> tuple[Hashable, ...]:
        return ()

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        return self.mean_from(own)

    def signal_from(self, own: Phi) -> Tensor:
        return self.mean_from(own)

    def charge_from(self, own: Phi) -> Tensor:
        log_var = promote(own[0])
        return (log_var.exp() + own[1].to(log_var.dtype) - 1 - log_var) / 2

    @torch.no_grad()
    def after_step(self, step: float | Tensor | None) -> None:
        """Keeps σ within its bound."""
        if self.most is not None:
            self.log_var.clamp_(max=2 * math.log(self.most))

    def reset_(self, where: Tensor, value: float) -> None:
        """Nothing: an open gate is 1."""

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, most={self.most}"
