"""A module of a user's, with a small batch-norm network and data made there, written to a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

CODE = '''
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """A batch norm, a branch that is added, and dropout."""

    def __init__(self, outputs=3):
        super().__init__()
        self.a, self.n = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.m = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.drop, self.fc = nn.Dropout(0.1), nn.Linear(12, outputs)

    def forward(self, x):
        h = torch.relu(self.m(self.b(torch.relu(self.n(self.a(x))))))
        return self.fc(self.drop(h.mean((2, 3))))


def make():
    return Net()


def make_one():
    return Net(1)


def drawn(count, seed):
    """Images (N, 1, 6, 6) with a bright bar, whose place is the class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=g)
    x = torch.randn(count, 1, 6, 6, generator=g)
    for k in range(3):
        x[y == k, :, 2 * k : 2 * k + 2] += 2.0
    return x, y


class Bars:
    """Makes its samples when asked, and moves them at random: by each of the three generators."""

    def __init__(self, count, seed):
        self.x, self.y = drawn(count, seed)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if random.random() < 0.5:
            x = x.flip(-1)
        return x + float(np.random.normal(0, 0.1)) + 0.1 * torch.randn(()), int(self.y[index])


def load():
    return Bars(120, 0), Bars(60, 1)


def tensors():
    return drawn(120, 0), drawn(60, 1)


def numbers():
    """A regression: how bright the image is."""
    return tuple((x, x.mean((1, 2, 3))[:, None]) for x, _ in (drawn(120, 0), drawn(60, 1)))


def squared(output, target):
    return (output - target).square().mean()


def largest(output, target):
    return float((output - target).abs().max())  # warns of a gradient
'''


@contextmanager
def module(folder: Path, name: str, code: str = CODE) -> Iterator[str]:
    """The name of such a module, importable from the folder, until the block ends."""
    before = list(sys.path)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    # Bytecode counts as fresh if the file is as long as it was, and of the same second.
    Path(cache_from_source(str(folder / f"{name}.py"))).unlink(missing_ok=True)
    sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    try:
        yield name
    finally:
        sys.path[:] = before
        sys.modules.pop(name, None)
