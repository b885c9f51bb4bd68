"""Louizos, Welling, Kingma (2018), Table 1: the four rows of L0 with hard concrete gates on MNIST.

    ellzero reproduce louizos2018-table1 --seeds 5 --device cuda

Settings (section 4 and the authors' code): Adam 1e-3, batch 100, 200 epochs, EMA 0.999 for evaluation, pixels in [0,
1], test-time gates by eq. 13. The paper's caption says "error after 200 epochs"; the second paper says that earlier
work reported the best during training: both are printed. The λs of "λ sep." are those that a later paper gives for
LeNet-5 ([10, 0.5, 0.1, 10]/N); the MLP's are published nowhere and are ours.
"""

from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study

STUDY = Study(
    name="louizos2018-table1",
    title="Louizos et al. (2018), Table 1",
    rows=(
        Row("MLP, λ=0.1/N", get("louizos-mlp"), "219-214-100", "1.4"),
        Row("MLP, λ sep.", get("louizos-mlp-sep"), "266-88-33", "1.8"),
        Row("LeNet-5, λ=0.1/N", get("louizos-lenet5"), "20-25-45-462", "0.9"),
        Row("LeNet-5, λ sep.", get("louizos-lenet5-sep"), "9-18-65-25", "1.0"),
    ),
)

if __name__ == "__main__":
    import sys

    from ellzero.cli import main

    sys.exit(main(["reproduce", STUDY.name, *sys.argv[1:]]))
