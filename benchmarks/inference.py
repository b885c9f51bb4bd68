"""What compaction brings at inference: LeNet-5 at the first paper's 9-18-65-25 against the dense network.

    python benchmarks/inference.py [--blocks 60] [--json FILE]

Both networks run in interleaved blocks in one process; the ratio is the median over pairs of neighbouring blocks, by
wall-clock time, beside the ratio of MACs. The gates are set by hand to the architecture of Louizos et al., Table 1
("λ sep."), the weights are random: what is measured is the architecture.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from functools import partial
from pathlib import Path

import torch
from provenance import write
from step_overhead import LeNet5
from torch import nn

import ellzero as l0
from ellzero.out.latency.meter import interleaved

ARCHITECTURE = {"0": 9, "3": 18, "7": 65, "9": 25}  # conv maps 9 and 18, inputs of the two linear layers 65 and 25


def compacted(model: nn.Module) -> tuple[nn.Module, float]:
    """The model at that architecture, and the share of its MACs that is left."""
    gated = l0.attach(model, (torch.zeros(1, 1, 28, 28),), where=l0.per_layer())
    generator = torch.Generator().manual_seed(0)
    maps = torch.randperm(50, generator=generator)[: ARCHITECTURE["3"]]
    for name, gate in gated.named_gates():
        keep = torch.randperm(gate.shape.numel(), generator=generator)
        if name == "3":
            keep = maps
        if name == "7":  # inputs of open maps only: 16 positions of each map
            keep = (maps[:, None] * 16 + torch.arange(16)).flatten()[
                torch.randperm(16 * len(maps), generator=generator)
            ]
            # every open map is read somewhere, as it is in a trained network
            keep = torch.cat([maps * 16, keep[~torch.isin(keep, maps * 16)]])
        closed = torch.ones(gate.shape, dtype=torch.bool)
        closed[keep[: ARCHITECTURE[name]]] = False
        gate.close_(closed)
    left = l0.macs(gated, kept=True).item() / l0.dense(l0.macs, gated)
    return l0.compact(gated).eval(), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60, help="interleaved pairs of blocks")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    dense = LeNet5().eval()
    small, macs = compacted(dense)
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads of {platform.machine()}; LeNet-5 against its 9-18-65-25")
    print(f"{'batch':>5} {'dense ms':>9} {'compact/dense, time':>20} {'quartiles':>15} {'compact/dense, MACs':>20}")
    rows = []
    with torch.inference_mode():
        for batch, runs in ((1, 50), (256, 2)):
            x = torch.randn(batch, 1, 28, 28)
            networks = [partial(model, x) for model in (dense, small)]
            took, took_small = interleaved(networks, x.device, rounds=options.blocks, warm_up=2, calls=runs)
            low, middle, high = statistics.quantiles([s / d for s, d in zip(took_small, took, strict=True)], n=4)
            ms = 1e3 * statistics.median(took)
            print(f"{batch:5} {ms:9.3f} {middle:20.3f} {low:7.3f} – {high:5.3f} {macs:20.3f}", flush=True)
            rows.append(
                {"batch": batch, "dense_ms": ms, "time_ratio": middle, "quartiles": [low, high], "macs_ratio": macs}
            )
    if options.json:
        write(options.json, "inference", {"rows": rows}, vars(options))


if __name__ == "__main__":
    main()
