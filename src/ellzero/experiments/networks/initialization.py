"""How the weights of the papers' networks are initialised, by the papers; of any network, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Generator, Tensor, nn


def initialize_2017(model: nn.Module, generator: Generator | None = None) -> None:
    """Draws the weights anew as Molchanov et al. (2017) do in their code: N(0, 0.01²), and every bias is 0."""
    _draw(model, lambda weight: nn.init.normal_(weight, 0.0, 0.01, generator=generator))


def initialize_2018(model: nn.Module, generator: Generator | None = None) -> None:
    """Draws the weights anew as Louizos et al. (2018) do in their code.

    Weights are N(0, 2 / in) in a fully connected layer and N(0, 2 / (C_in·k·k)) in a convolution; every bias is 0.
    Batch norms begin as the identity.
    """
    _draw(model, lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator))


def _draw(model: nn.Module, draw: Callable[[Tensor], object]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()


@torch.no_grad()
def initialize_2021(model: nn.Module, drop_rates: Mapping[str, float], generator: Generator | None = None) -> None:
    """Draws the weights anew as Gallego-Posada et al. (2021) do in their code.

    Gates begin at about 1 − p, and the weights under them make up for it. Every bias is N(0, 0.01²); batch norms begin
    as the identity.

    ==================  ==============================================  =====================
    layer               gated                                           not gated
    ==================  ==============================================  =====================
    fully connected     N(0, 2 / out) ÷ (1 − p)                         N(0, 2 / in)
    convolution         N(0, 2 / (C_in·k·k)) ÷ (1 − p), bias ÷ (1 − p)  N(0, 2 / (C_out·k·k))
    ==================  ==============================================  =====================

    `drop_rates` has p of the gated layers by the pattern of their names, the first match counting.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    for pattern, p in drop_rates.items():
        if not 0 <= p < 1:
            raise ValueError(f"`drop_rates` must be in [0, 1), got {p} for {pattern!r}")
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"`drop_rates` must name layers of the model ({', '.join(layers)}), got {pattern!r}")

    for name, layer in layers.items():
        rate = next((p for pattern, p in drop_rates.items() if fnmatchcase(name, pattern)), None)
        convolution = isinstance(layer, nn.Conv2d)
        mode: Literal["fan_in", "fan_out"] = "fan_in" if (rate is not None) == convolution else "fan_out"
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu", generator=generator)
        layer.weight.div_(1 - (rate or 0))
        if layer.bias is not None:
            nn.init.normal_(layer.bias, 0.0, 0.01, generator=generator)
            if convolution:
                layer.bias.div_(1 - (rate or 0))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
