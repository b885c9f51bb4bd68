"""Norms that can lose units: `RootMeanSquare` is an `nn.LayerNorm` that subtracts no mean, `ResponseNorm` a response
norm that keeps its eps.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class RootMeanSquare(nn.LayerNorm):
    """An `nn.LayerNorm` of what has mean zero, so that it subtracts none: an RMSNorm with the same keys, bias too."""

    def forward(self, input: Tensor) -> Tensor:
        out = F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return out if self.bias is None else out + self.bias


_LIBRARY = torch.library.Library("ellzero", "FRAGMENT")
_LIBRARY.define("response_norm(Tensor x, Tensor weight, Tensor bias, float eps, int dim) -> Tensor")


@torch.library.impl(_LIBRARY, "response_norm", "CompositeImplicitAutograd")
def _response_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dim: int) -> Tensor:
    space = [d for d in range(1, x.ndim) if d != dim % x.ndim]
    size = torch.linalg.vector_norm(x, 2, space, keepdim=True)
    out: Tensor = weight * (x * (size / (size.mean(dim, keepdim=True) + eps))) + bias + x
    return out


@final
class ResponseNorm(nn.Module):
    """The global response norm of ConvNeXt V2, under the keys of the module that it stands for.

    Args:
        members: its parameters by name.
        weight: the name of the one that it multiplies by.
        bias: that of the one that it adds.
        eps: what it adds to the mean.
        dim: where its channels lie, -1 or 1.
    """

    def __init__(self, members: dict[str, nn.Parameter], weight: str, bias: str, eps: float, dim: int) -> None:
        super().__init__()
        for name, parameter in members.items():
            self.register_parameter(name, parameter)
        self.weighs, self.adds, self.eps, self.dim = weight, bias, eps, dim

    def forward(self, x: Tensor) -> Tensor:
        shape = [-1 if d == self.dim % x.ndim else 1 for d in range(x.ndim)]
        weight, bias = (getattr(self, name).reshape(shape) for name in (self.weighs, self.adds))
        out: Tensor = torch.ops.ellzero.response_norm(x, weight, bias, self.eps, self.dim)
        return out
