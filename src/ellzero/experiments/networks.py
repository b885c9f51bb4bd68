"""The networks of the two papers, as plain `nn.Module`s, and how their weights are initialised.

LeNet-300-100 and LeNet-5-Caffe for MNIST, wide residual networks for CIFAR. There is no gate in sight: gates come from
outside, by `attach`. This file knows nothing of data or of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


@final
class LeNet300(nn.Module):
    """LeNet-300-100 (LeCun et al., 1998): a perceptron with 300 and 100 hidden units, 266,610 parameters.

    Args:
        classes: number of outputs.

    Example:
        >>> net = LeNet300()
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28), or of their pixels (N, 784)."""
        h = F.relu(self.fc1(x.flatten(1)))
        h = F.relu(self.fc2(h))
        logits: Tensor = self.fc3(h)
        return logits


@final
class LeNet5(nn.Module):
    """LeNet-5 as Caffe has it: 20 and 50 maps, each pooled, then 500 units; 431,080 parameters, 2.293 M MACs.

    Args:
        classes: number of outputs.

    Example:
        >>> net = LeNet5()
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28)."""
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = F.max_pool2d(F.relu(self.conv2(h)), 2)
        h = F.relu(self.fc1(h.flatten(1)))
        logits: Tensor = self.fc2(h)
        return logits


@final
class PreActivationBlock(nn.Module):
    """Two 3×3 convolutions, each after batch norm and ReLU, and a path around them (He et al., 2016).

    Args:
        inputs: channels in.
        outputs: channels out, and of the hidden layer.
        stride: of the first convolution. Where the shape changes, the way around is a 1×1 convolution of the activated
            input.
        dropout: rate on the hidden layer, between its ReLU and the second convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        active = F.relu(self.bn1(x))
        hidden = F.relu(self.bn2(self.conv1(active)))
        around = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = around + self.conv2(self.dropout(hidden))
        return out


@final
class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko & Komodakis, 2016): pre-activation blocks with 16, 32 and 64 times `width` channels.

    The hidden layer of each block is where the first paper has its gates, and where dropout goes otherwise: WRN-28-10
    has 12 of them with 4,480 units. As in the paper of these networks, the first convolution of a block has the stride;
    the public code of both L0 papers strides the second one, with as many parameters and 13 % more MACs in WRN-28-10.

    Args:
        depth: number of layers, 6 n + 4 for n blocks in each group.
        width: k, the factor on the number of channels.
        classes: number of outputs.
        dropout: rate on the hidden layer of every block.

    Raises:
        ValueError: there is no such network.

    Example:
        >>> net = WideResNet(depth=10, width=1)
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"`depth` must be 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
        if width < 1:
            raise ValueError(f"`width` must be at least 1, got {width}")
        blocks, channels = [], 16
        for group, outputs in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                blocks.append(PreActivationBlock(channels, outputs, stride, dropout))
                channels = outputs
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 3, H, W)."""
        h = F.relu(self.bn(self.blocks(self.conv(x))))
        logits: Tensor = self.fc(h.mean((2, 3)))
        return logits


def initialize_2018(model: nn.Module, generator: Generator | None = None) -> None:
    """Draws the weights anew as Louizos et al. (2018) do in their code.

    Weights are N(0, 2 / in) in a fully connected layer and N(0, 2 / (C_in·k·k)) in a convolution; every bias is 0.
    Batch norms begin as the identity.

    Args:
        model: whose `nn.Linear`, `nn.Conv2d` and `nn.BatchNorm2d` layers are initialised, in place.
        generator: source of randomness; torch's default one if absent.

    Example:
        >>> net = LeNet300()
        >>> initialize_2018(net, torch.Generator().manual_seed(0))
        >>> round(float(net.fc1.weight.detach().var()) * 784, 1), int(net.fc1.bias.count_nonzero())
        (2.0, 0)
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            _as_identity(module)


@torch.no_grad()
def initialize_2021(
    model: nn.Module, drop_rates: Mapping[str, float] | None = None, generator: Generator | None = None
) -> None:
    """Draws the weights anew as Gallego-Posada et al. (2021) do in their code.

    Gates begin at about 1 − p, and the weights under them make up for it. Every bias is N(0, 0.01²); batch norms begin
    as the identity.

    ==================  ==============================================  =====================
    layer               gated                                           not gated
    ==================  ==============================================  =====================
    fully connected     N(0, 2 / out) ÷ (1 − p)                         N(0, 2 / in)
    convolution         N(0, 2 / (C_in·k·k)) ÷ (1 − p), bias ÷ (1 − p)  N(0, 2 / (C_out·k·k))
    ==================  ==============================================  =====================

    Args:
        model: whose `nn.Linear`, `nn.Conv2d` and `nn.BatchNorm2d` layers are initialised, in place.
        drop_rates: p of the gated layers by the pattern (as in `fnmatch`) of their names, the first match counting.
        generator: source of randomness; torch's default one if absent.

    Raises:
        ValueError: a rate is not in [0, 1), or a pattern matches no layer; the model is untouched.

    Example:
        >>> net = LeNet300()
        >>> initialize_2021(net, {"fc1": 0.2, "fc?": 0.5}, torch.Generator().manual_seed(0))
        >>> round(float(net.fc1.weight.detach().var()) * 0.8**2 * 300, 1)
        2.0
    """
    drop_rates = drop_rates or {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    for pattern, p in drop_rates.items():
        if not 0 <= p < 1:
            raise ValueError(f"`drop_rates` must be in [0, 1), got {p} for {pattern!r}")
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"`drop_rates` must name layers of the model ({', '.join(layers)}), got {pattern!r}")

    for name, layer in layers.items():
        rate = next((p for pattern, p in drop_rates.items() if fnmatchcase(name, pattern)), None)
        gated, convolution = rate is not None, isinstance(layer, nn.Conv2d)
        mode: Literal["fan_in", "fan_out"] = "fan_in" if gated == convolution else "fan_out"
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu", generator=generator)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, 0.0, 0.01, generator=generator)
        if rate is not None:
            layer.weight.div_(1 - rate)
            if convolution and layer.bias is not None:
                layer.bias.div_(1 - rate)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            _as_identity(module)


def _as_identity(norm: nn.BatchNorm2d) -> None:
    norm.reset_running_stats()
    if norm.affine:
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
