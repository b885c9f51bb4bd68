"""The fair fight: a learned budget against the simple things, at equal MACs, equal epochs and equal batches.

    ellzero reproduce arena --device cuda --at-once 14
    ellzero reproduce arena --device cuda --only 'lenet*' --resume
    ellzero reproduce arena-split --device cuda --at-once 14      # settings are chosen by this one
    ellzero reproduce arena-split --device cuda --at-once 14 --only 'lenet*-budget*'      # `Budget`, and changes of it

Three networks at 10, 20, 35 and 50 % of their dense MACs. All methods have one loop (SGD with momentum, cosine
schedule, the same batches in the same order, nothing averaged) and the same epochs; dense training counts. Ours is a
`Budget` with its defaults, which on the MLP has gates on pixels too; `budget-hidden` keeps them all, as the rivals do.
`shape` trains the shape that it found once more, in all epochs again; `shape-counted` in those that its search leaves.
Torch-Pruning (the package itself) prunes after half of the epochs and fine-tunes for the
other half. `arena-split` tests on images that are held out of the training set: no setting is chosen by a test image.
"""

from ellzero.experiments.arena.contest import DENSE, Contest
from ellzero.experiments.arena.ours import CHANGED, FAMILIES, HIDDEN, INPUTS
from ellzero.experiments.arena.scratch import SHAPES
from ellzero.experiments.arena.showing import draw, says, table
from ellzero.experiments.study import Study

TARGETS = (0.1, 0.2, 0.35, 0.5)
FAMILY = "bernoulli"  # the other family of gates, by `arena-split` on the MLP at 10 %: results/arena-split-8/
METHODS = ("budget", FAMILY, "magnitude", "norm", "taylor", "narrow", *SHAPES)
OTHERS = (*(name for name in FAMILIES if name != FAMILY), *CHANGED)  # to choose it and the defaults by
NETWORKS = {"lenet300": "mnist", "lenet5": "mnist", "resnet-56": "cifar10"}
EPOCHS = 20


def contests(split: bool) -> tuple[Contest, ...]:
    """A contest for each network, share of the MACs and method, and the dense networks; the longest first."""
    out = []
    for network, whole in reversed(NETWORKS.items()):
        data = f"{whole}-split" if split else whole
        out.append(Contest(network, DENSE, 1.0, data, EPOCHS))
        for at_most in TARGETS:
            methods = METHODS + tuple(HIDDEN) * (network == "lenet300")  # the one whose inputs have gates by default
            methods += (OTHERS + tuple(INPUTS) * (network != "resnet-56")) * split
            out += [Contest(network, method, at_most, data, EPOCHS) for method in methods]
    return tuple(out)


STUDY = Study(
    "arena", "The arena, test error in percent", contests=contests(False), seeds=3, table=table, says=says, draw=draw
)
SPLIT = Study(
    "arena-split", "The arena, error in percent on images held out of the training set", contests=contests(True),
    seeds=3, table=table, says=says, draw=draw,
)  # fmt: skip
