"""Gallego-Posada, Ramirez, Erraqabi (2021), Table 1, with the weights' initialisation of Louizos et al. (2018).

    ellzero reproduce gallego2021-init --seeds 3 --device cuda

The authors' later code draws the weights of a fully connected layer with the variance 2/out, not 2/in, and divides them
by 1 − p: the first loss of LeNet-5 is about 100 then, and about 2.3 with the usual 2/in. Here nothing but that differs
from Table 1, to see what of its errors is due to it.
"""

from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study

PUBLISHED = {
    "gallego-mlp": ("MLP, ε=33 %", "198-233-100", "1.4 | 1.69±0.11"),
    "gallego-mlp-layers": ("MLP, ε=30 % ×3", "243-89-29", "1.63 | 2.18±0.10"),
    "gallego-lenet5": ("LeNet-5, ε=10 %", "20-21-34-407", "0.53 | 1.04±0.09"),
    "gallego-lenet5-layers": ("LeNet-5, ε=[50,30,70,10] %", "10-14-224-29", "0.7 | 0.97±0.06"),
}
STUDY = Study(
    name="gallego2021-init",
    title="Gallego-Posada et al. (2021), Table 1, weights drawn as in 2018",
    rows=tuple(
        Row(label, get(name).override(name=f"{name}-init-2018", init="2018"), architecture, errors)
        for name, (label, architecture, errors) in PUBLISHED.items()
    ),
)
