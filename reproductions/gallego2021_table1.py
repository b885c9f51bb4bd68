"""Gallego-Posada, Ramirez, Erraqabi (2021), Table 1: the four constrained rows on MNIST.

    ellzero reproduce gallego2021-table1 --seeds 5 --device cuda

Settings (section 5 and the authors' later code): Adam 7e-4, batch 128, 200 epochs, dual step 1e-4 with restarts, no
averaging, standardised pixels, test-time gates by the median. Published errors: best, and mean ± 95 % interval at 200
epochs over five runs.
"""

from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study

STUDY = Study(
    name="gallego2021-table1",
    title="Gallego-Posada et al. (2021), Table 1",
    rows=(
        Row("MLP, ε=33 %", get("gallego-mlp"), "198-233-100", "1.4 | 1.69±0.11"),
        Row("MLP, ε=30 % ×3", get("gallego-mlp-layers"), "243-89-29", "1.63 | 2.18±0.10"),
        Row("LeNet-5, ε=10 %", get("gallego-lenet5"), "20-21-34-407", "0.53 | 1.04±0.09"),
        Row("LeNet-5, ε=[50,30,70,10] %", get("gallego-lenet5-layers"), "10-14-224-29", "0.7 | 0.97±0.06"),
    ),
)

if __name__ == "__main__":
    import sys

    from ellzero.cli import main

    sys.exit(main(["reproduce", STUDY.name, *sys.argv[1:]]))
