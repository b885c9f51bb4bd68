"""The λs of the first paper's "λ sep." row for the MLP, which are published nowhere: a grid around its 266-88-33.

    python reproductions/search_mlp_sep.py --device cuda

One run for each pair of λs of the second and third layer, λ=0.1/N for the first, all in one stack.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ellzero.experiments.data import load
from ellzero.experiments.papers import get
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.loop import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--first", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--second", type=float, nargs="+", default=[0.3, 0.6, 1.0, 2.0])
    parser.add_argument("--third", type=float, nargs="+", default=[3.0, 10.0, 20.0])
    o = parser.parse_args()
    base = get("louizos-mlp-sep").override(epochs=o.epochs, data=o.data)
    grid = [(a, b, c) for a in o.first for b in o.second for c in o.third]
    recipes = [base.override(name=f"sep-{a}-{b}-{c}", penalty={"fc1": a, "fc2": b, "fc3": c}) for a, b, c in grid]
    trainer = train(recipes, load(o.data, o.data_dir, o.device), every=10)
    for lambdas, result in zip(grid, evaluation.results(trainer), strict=True):
        print(
            lambdas,
            "-".join(map(str, result["architecture"].values())),
            f"{result['error_best']:.2f} {result['error_last']:.2f}",
        )


if __name__ == "__main__":
    main()
