"""The networks that both papers print, as points of error against cost. Nothing here is ours."""

from __future__ import annotations

from ellzero.experiments.figures import Cost, Point

# Method, pruned architecture, and the error in percent: best during training, and at the end, as far as printed.
# Louizos et al. (2018), Table 1, says "after 200 epochs"; Gallego-Posada et al. (2021), Table 1, gives both for theirs.
PRINTED: dict[str, list[tuple[str, tuple[int, ...], float | None, float | None]]] = {
    "lenet300": [
        ("Sparse VD", (512, 114, 72), None, 1.8),
        ("BC-GNJ", (278, 98, 13), None, 1.8),
        ("BC-GHS", (311, 86, 14), None, 1.8),
        ("L0 λ=0.1/N", (219, 214, 100), None, 1.4),
        ("L0 λ sep.", (266, 88, 33), None, 1.8),
        ("constr. 33 %", (198, 233, 100), 1.4, 1.69),
        ("constr. 30 % ×3", (243, 89, 29), 1.63, 2.18),
    ],
    "lenet5": [
        ("Sparse VD", (14, 19, 242, 131), None, 1.0),
        ("GL", (3, 12, 192, 500), None, 1.0),
        ("GD", (7, 13, 208, 16), None, 1.1),
        ("SBP", (3, 18, 284, 283), None, 0.9),
        ("BC-GNJ", (8, 13, 88, 13), None, 1.0),
        ("BC-GHS", (5, 10, 76, 16), None, 1.0),
        ("L0 λ=0.1/N", (20, 25, 45, 462), None, 0.9),
        ("L0 λ sep.", (9, 18, 65, 25), None, 1.0),
        ("constr. 10 %", (20, 21, 34, 407), 0.53, 1.04),
        ("constr. by layer", (10, 14, 224, 29), 0.7, 0.97),
    ],
}


def published(network: str, cost: Cost, which: str = "last") -> list[Point]:
    """The networks in both papers' Tables 1, their cost computed from the pruned architecture as printed.

    "params" counts weights and biases, "l0_norm" the weights whose own gate is open. The error is that at the "last" or
    "best" epoch; where a paper gives one of them only, that.

    Example:
        >>> published("lenet300", "params")[3]
        Point(cost=0.2610..., error=1.4, label='L0 λ=0.1/N')
    """
    if which not in ("best", "last"):
        raise ValueError(f'`which` must be "best" or "last", got {which!r}')
    out = []
    for method, architecture, best, last in PRINTED.get(network, ()):
        printed = [e for e in ((best, last) if which == "best" else (last, best)) if e is not None]
        out.append(Point(_count(network, cost, architecture) / _count(network, cost, None), printed[0], method))
    return out


def _count(network: str, cost: str, architecture: tuple[int, ...] | None) -> int:
    """What a network costs whose layers have so many units left, of those that gates can close."""
    if network == "lenet300":
        a, b, c = dense = (784, 300, 100)
        if architecture is not None:
            a, b, c = architecture
        if cost == "l0_norm":
            return a * dense[1] + b * dense[2] + c * 10
        return a * b + b * c + c * 10 + (b + c + 10 if cost == "params" else 0)
    a, b, c, d = architecture or (20, 50, 800, 500)
    if cost == "l0_norm":  # a map of a convolution counts its bias too
        return a * (25 + 1) + b * (20 * 25 + 1) + c * 500 + d * 10
    if cost == "params":
        return a * 25 + a + a * b * 25 + b + c * d + d + d * 10 + 10
    return a * 25 * 24**2 + a * b * 25 * 8**2 + c * d + d * 10
