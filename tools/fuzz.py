"""Gates and compacts random networks, and prints how many came out exact, refused at `attach`, wrong, failed after it.

    python tools/fuzz.py --count 500 --seed 0 [--transformers] [--as-large]

The networks and the oracle are in `tests/support/wild.py`, transformers in `tests/support/formers.py`. What was wrong
or failed is printed with its seed.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import torch  # noqa: E402

from ellzero.graph.trials import running  # noqa: E402
from support import formers, wild  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many networks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="say something about every network")
    parser.add_argument("--transformers", action="store_true", help="draw transformers")
    parser.add_argument("--as-large", action="store_true", help="try as little as with a large network")
    args = parser.parse_args()
    if args.as_large:
        running.LARGE = 0
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    start = time.monotonic()
    try:
        for seed in range(args.seed, args.seed + args.count):
            outcome, about = (formers if args.transformers else wild).judged(seed)
            found[outcome] += 1
            if args.show or outcome in ("wrong", "failed"):
                print(f"{outcome}: {about}", flush=True)
    except KeyboardInterrupt:  # what is done counts
        pass
    names = {"exact": "exact", "refused": "refused at attach", "nothing left": "refused as nothing is left"}
    names |= {"wrong": "wrong", "failed": "failed after attach"}
    print(", ".join(f"{found[key]} {name}" for key, name in names.items()), end="; ")
    print(f"{found.total()} networks from seed {args.seed}, {time.monotonic() - start:.0f} s")
    return 1 if found["wrong"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
