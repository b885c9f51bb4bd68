"""How long `attach` and `compact` take on a WRN-28-10 (36.5 M parameters): once each, in seconds.

python benchmarks/attach_compact.py [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from provenance import write

import ellzero as l0
from ellzero.experiments.networks import WideResNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = WideResNet(28, 10)
    start = time.perf_counter()
    gated = l0.attach(model, (torch.randn(1, 3, 32, 32),))
    attached = time.perf_counter() - start
    l0.finalize(gated, 0.3, cost=l0.macs)
    start = time.perf_counter()
    small = l0.compact(gated)
    compacted = time.perf_counter() - start
    left = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in model.parameters())
    times = f"attach {attached:.1f} s (goal 30), compact {compacted:.1f} s (goal 10)"
    print(f"WRN-28-10: {times}, {100 * left:.1f} % of the parameters left")
    if options.json:
        write(options.json, "attach_compact", {"attach_s": attached, "compact_s": compacted}, vars(options))


if __name__ == "__main__":
    main()
