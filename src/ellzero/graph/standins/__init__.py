"""What stands in for a part of a network that was taken out: layers, attention, norms."""

from ellzero.graph.standins.heads import SHORTCUTS, FewerHeads, Padded, pad
from ellzero.graph.standins.layers import (
    CONTRACTING,
    Closed,
    Nothing,
    Scatter,
    Select,
    first_tensor,
    following,
    put_closed,
    put_nothing,
    put_scatter,
    put_select,
)
from ellzero.graph.standins.norms import ResponseNorm, RootMeanSquare
from ellzero.graph.standins.slim import WHOLE, WIDTH, Slim, put_slim

__all__ = [
    "CONTRACTING",
    "SHORTCUTS",
    "WHOLE",
    "WIDTH",
    "Closed",
    "FewerHeads",
    "Nothing",
    "Padded",
    "ResponseNorm",
    "RootMeanSquare",
    "Scatter",
    "Select",
    "Slim",
    "first_tensor",
    "following",
    "pad",
    "put_closed",
    "put_nothing",
    "put_scatter",
    "put_select",
    "put_slim",
]
