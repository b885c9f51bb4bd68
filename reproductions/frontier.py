"""The frontier on MNIST: how low an error the papers' networks have when next to nothing of them is left.

    ellzero reproduce frontier --device cuda
    ellzero reproduce frontier-split --device cuda      # settings are chosen by this one

Three goals: the MLP at 3.63 % of its parameters with 1.6 % error (VIBNet, Dai et al., 2018, prints 97-71-33), LeNet-5
at 0.5 % of its parameters with 1.0 % (L0-ARM, Li & Ji, 2019, prints 6-10-39-11), and at 4.8 % of its MACs with 1.0 %.
Every seed keeps within its budget. The error is that of the last epoch.

What is left is small, and three things limit it: its shape, what it is shown, and how long it trains. So each layer has
a target of its own, the images are bent anew in each epoch, a dense LeNet-5 that was trained on them is the teacher,
and two thirds of the epochs or more are left to the weights alone. Neither paper bends images or has a teacher.

`frontier-split` trains on the first 50,000 training images, for fewer epochs, and tests on the other 10,000: shapes
within the same budget ("free" has one target for the whole network), and variants that differ in one thing each. No
setting is chosen by a test image.
"""

from collections.abc import Iterator
from itertools import product

from ellzero.experiments.papers import get, shaped
from ellzero.experiments.study import Row, Study

ROWS = (
    Row("MLP, 3.63 % of the parameters", get("frontier-mlp"), "97-71-33", "1.6"),
    Row("LeNet-5, 0.5 % of the parameters", get("frontier-lenet5-params"), "6-10-39-11", "1.0"),
    Row("LeNet-5, 4.8 % of the MACs", get("frontier-lenet5-macs")),
)
SHAPES = {
    "frontier-mlp": ((97, 71, 33), (130, 57, 30), (170, 46, 28), (230, 35, 28)),
    "frontier-lenet5-params": ((6, 9, 45, 11), (5, 10, 50, 12), (4, 10, 65, 13), (4, 12, 68, 10)),
    "frontier-lenet5-macs": ((2, 22, 290, 36), (2, 24, 100, 40), (3, 12, 190, 46), (4, 7, 100, 60)),
}
FREE = {
    "frontier-mlp": {"cost": "params", "at_most": 0.0363},
    "frontier-lenet5-params": {"cost": "params", "at_most": 0.005},
    "frontier-lenet5-macs": {"cost": "macs", "at_most": 0.048},
}
CHANGES = {
    "bent-less": {"distort": 0.7},
    "bent-more": {"distort": 1.5},
    "hot": {"temperature": 4.0},
    "later": {"target_warmup": 0.9},
    "untaught": {"teacher": None, "temperature": 1.0},
}
# A second round, with what the first one found: later targets and wider inputs for the MLP, less bent images and fewer
# filters for LeNet-5's parameters, and whether more epochs for the weights alone still help.
SECOND = {
    "frontier-mlp": (
        ((170, 46, 28), (230, 35, 28), (280, 29, 29), None),
        {
            "later": {"target_warmup": 0.9},
            "later-bent-less": {"target_warmup": 0.9, "distort": 0.7},
            "later-longer": {"target_warmup": 0.9, "finetune_epochs": 250},
        },
    ),
    "frontier-lenet5-params": (
        ((5, 10, 50, 12), (4, 10, 68, 13), (3, 10, 89, 13)),
        {
            "bent-less": {"distort": 0.7},
            "bent-little": {"distort": 0.4},
            "bent-less-later": {"distort": 0.7, "target_warmup": 0.9},
            "bent-less-longer": {"distort": 0.7, "finetune_epochs": 150},
        },
    ),
}
# A third one, with three seeds (`--seeds 3`), for LeNet-5's parameters: more epochs still, and targets that count each
# layer's parameters, because some of the units that a layer keeps read nothing and are no parameters.
THIRD = ((5, 10, 50, 12), (4, 10, 68, 13), (3, 10, 89, 13))
LONGEST = {"distort": 0.7, "finetune_epochs": 250}
# What the first round began with: what it found is in the recipes themselves.
BEGUN = {"cost": "l0_norm", "distort": 1.0, "temperature": 2.0, "target_warmup": 0.5}
FIRST = {
    "frontier-mlp": (97, 71, 33),
    "frontier-lenet5-params": (5, 10, 50, 12),
    "frontier-lenet5-macs": (3, 12, 190, 46),
}
EPOCHS = {"lenet300": {"epochs": 40, "finetune_epochs": 100}, "lenet5": {"epochs": 25, "finetune_epochs": 50}}


def variants() -> Iterator[Row]:
    """The recipes on the split: all shapes, which make one stack for each network, then what is changed in one, then
    all pairs of the second round and the shapes of the third.
    """
    for row in ROWS:
        recipe = row.recipe.override(data="mnist-split", **BEGUN, **EPOCHS[row.recipe.network])
        recipe = recipe.override(at_most=shaped(recipe.network, *FIRST[recipe.name]))
        targets = {s: {"at_most": shaped(recipe.network, *s)} for s in SHAPES[recipe.name]} | {None: FREE[recipe.name]}
        changed = (
            {_word(s): target for s, target in targets.items()} | CHANGES | {"slower": {"epochs": 2 * recipe.epochs}}
        )
        shapes, changes = SECOND.get(recipe.name, ((), {}))
        for shape, (word, change) in product(shapes, changes.items()):
            target = FREE[recipe.name] if shape is None else {"at_most": shaped(recipe.network, *shape)}
            changed[f"{_word(shape)}-{word}"] = target | change
        for shape in THIRD if recipe.name == "frontier-lenet5-params" else ():
            changed[f"{_word(shape)}-longest"] = {"at_most": shaped(recipe.network, *shape)} | LONGEST
            changed[f"{_word(shape)}-counted"] = {"cost": "params", "at_most": counted(*shape)} | LONGEST
        for word, change in changed.items():
            label = word.replace("bent-", "bent ")
            yield Row(f"{row.label}: {label}", recipe.override(name=f"{recipe.name}-{word}", **change))


def counted(conv1: int, conv2: int, inputs: int, hidden: int) -> dict[str, float]:
    """`at_most` of the parameters of each layer of LeNet-5: those of a network with so many units."""
    own = {"conv1": 26 * conv1, "conv2": (25 * conv1 + 1) * conv2}
    own |= {"fc1": (inputs + 1) * hidden, "fc2": 10 * hidden + 10}
    dense = {"conv1": 520, "conv2": 25_050, "fc1": 400_500, "fc2": 5_010}
    return {name: own[name] / whole + 1e-6 for name, whole in dense.items()}


def _word(shape: tuple[int, ...] | None) -> str:
    return "free" if shape is None else "-".join(map(str, shape))


STUDY = Study("frontier", "The frontier on MNIST", ROWS)
SPLIT = Study(
    "frontier-split", "The frontier, tested on images held out of the training set", tuple(variants()), seeds=1
)

if __name__ == "__main__":
    import sys

    from ellzero.cli import main

    sys.exit(main(["reproduce", STUDY.name, *sys.argv[1:]]))
