"""The networks of the two papers and others, how their weights are initialised, and what others may ask about each.

There is no gate in sight: gates come from outside, by `attach`. A new network is a new file here.
"""

import importlib
import pkgutil

from ellzero.experiments.networks.facts import Network, find, lookup, names
from ellzero.experiments.networks.gpt import GPT
from ellzero.experiments.networks.initialization import initialize_2017, initialize_2018, initialize_2021
from ellzero.experiments.networks.lenet import LeNet5, LeNet300
from ellzero.experiments.networks.resnet import ResNet
from ellzero.experiments.networks.vit import ViTLite
from ellzero.experiments.networks.wide_resnet import WideResNet

for _module in pkgutil.iter_modules(__path__):  # so that a file that is not exported above registers itself too
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "GPT", "LeNet5", "LeNet300", "Network", "ResNet", "ViTLite", "WideResNet", "find", "initialize_2017",
    "initialize_2018", "initialize_2021", "lookup", "names",
]  # fmt: skip
