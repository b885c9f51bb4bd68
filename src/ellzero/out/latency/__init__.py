"""The time that a network takes, measured over its widths: `cost.py` has `Latency`, the rest is what it is made of."""
