"""Gate a small network, train it on scikit-learn's digits at 20 % of its MACs, compact it, print the report. Under a
minute on two CPU cores.

python examples/quickstart.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ellzero as l0


def network() -> nn.Module:
    """A small convolutional network for 8×8 digits, with no gate in sight."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8×8 pixels: the first 1,400 to train on, the others to test on."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    return x[:1400], y[:1400], x[1400:], y[1400:]


def error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of wrong answers, in percent, in evaluation: with the test-time gates."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) != y).float().mean().item()


def main(epochs: int = 60) -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()

    gated = l0.attach(network(), (x[:2],))
    budget = l0.Budget(gated, macs=0.2, steps=epochs * len(x) // 100)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-3))
    budget.drive(optimizer)

    for epoch in range(epochs):
        gated.train()
        for batch in torch.randperm(len(x)).split(100):
            loss = F.cross_entropy(gated(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:3}: {budget}")

    small = budget.finish()
    print(l0.report(gated))
    with torch.no_grad():
        difference = (gated(x_test) - small(x_test)).abs().max().item()
    print(f"compact network: test error {error(small, x_test, y_test):.2f} %, as the gated one to {difference:.1e}")

    path = Path(tempfile.gettempdir()) / "ellzero-quickstart.safetensors"
    l0.save(small, path)
    again = l0.load(network(), path).eval()
    with torch.no_grad():
        assert torch.equal(again(x_test), small(x_test))
    print(f"saved to {path}; load it with: l0.load(network(), {str(path)!r})")


if __name__ == "__main__":
    main()
