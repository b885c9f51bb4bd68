"""The frontier on MNIST: how low an error the papers' networks have when next to nothing of them is left.

    ellzero reproduce frontier --device cuda
    ellzero reproduce frontier-split --device cuda      # settings are chosen by this one

Three goals: the MLP at 3.63 % of its parameters with 1.6 % error (VIBNet, Dai et al., 2018, prints 97-71-33), LeNet-5
at 0.5 % of its parameters with 1.0 % (L0-ARM, Li & Ji, 2019, prints 6-10-39-11), and at 4.8 % of its MACs with 1.0 %.
Every seed keeps within its budget. The error is that of the last epoch.

What is left is small, and two things limit it: what it is shown, and how long it trains. So the gates settle early, the
images are bent anew in each epoch, and a dense LeNet-5 that was trained on them is the teacher. Neither paper does so.
`frontier-split` trains these recipes, and variants that differ in one thing each, on the first 50,000 training images,
and tests on the other 10,000: no setting is chosen by a test image.
"""

from collections.abc import Iterator

from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study

ROWS = (
    Row("MLP, 3.63 % of the parameters", get("frontier-mlp"), "97-71-33", "1.6"),
    Row("LeNet-5, 0.5 % of the parameters", get("frontier-lenet5-params"), "6-10-39-11", "1.0"),
    Row("LeNet-5, 4.8 % of the MACs", get("frontier-lenet5-macs")),
)
# What is changed in each recipe, and what more is in that of the MLP; "" for nothing.
CHANGES = {
    "": {},
    "bent-less": {"distort": 0.7},
    "bent-more": {"distort": 1.5},
    "untaught": {"teacher": None, "temperature": 1.0},
}
MORE = {"unbent": {"distort": 0.0}, "cold": {"temperature": 1.0}}


def variants() -> Iterator[Row]:
    """The recipes on the split, as they are and changed."""
    for row in ROWS:
        for word, changes in (CHANGES | MORE if row is ROWS[0] else CHANGES).items():
            recipe = row.recipe.override(data="mnist-split", **changes)
            named = recipe.override(name=f"{recipe.name}-{word}".strip("-"))
            yield Row(", ".join(filter(None, (row.label, word.replace("-", " ")))), named)


STUDY = Study("frontier", "The frontier on MNIST", ROWS)
SPLIT = Study(
    "frontier-split", "The frontier, tested on images held out of the training set", tuple(variants()), seeds=1
)

if __name__ == "__main__":
    import sys

    from ellzero.cli import main

    sys.exit(main(["reproduce", STUDY.name, *sys.argv[1:]]))
