"""The named recipes, both papers' and our own, and recipes in TOML files, which may begin with a named one. What a
recipe is, and which values it may have, is not known here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ellzero.experiments.data.importing import is_code
from ellzero.experiments.recipe.definition import Recipe, absent, nearest, refuse_unknown
from ellzero.out.bounding.pacing import FALLING, LEARNING, steps_of_learning


def load_toml(path: str | PathLike[str]) -> Recipe:
    """Reads a recipe from a TOML file: a key for each field, and `base = "NAME"` to begin with a named recipe.

    The file's name without the ending is the recipe's, where the file gives none.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"`path` must be a TOML file, and there is none at {str(file)!r}")
    try:
        values = {"name": file.stem, **tomllib.loads(file.read_text(encoding="utf-8"))}
        base = values.pop("base", None)
        refuse_unknown(values, also=("base",))
        values = {name: absent(name, value) for name, value in values.items()}
        if base is not None:
            return get(base).override(**values)
        is_own = isinstance(found := values.get("network"), str) and is_code(found)
        return unnamed(values) if is_own else Recipe.from_dict(values)
    except ValueError as error:  # those of tomllib and of UTF-8 too
        raise ValueError(f"{file.name}: {error}") from error


def get(name: str) -> Recipe:
    """The recipe of this name in `RECIPES`. Where there is none, a ValueError names the nearest."""
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    raise ValueError(f"`{name}` is not the name of a recipe; {nearest(str(name), RECIPES)}")


def unnamed(values: Mapping[str, Any], images: int | None = None) -> Recipe:
    """A recipe of nothing but network, data, cost, target and epochs: the rest as `Budget` has it, so that the network
    is within its budget at the end. Values that are given count; called after its network if it has no name. Where it
    is not known how many images there are, the run is taken for a short one.
    """
    epochs, batch = values.get("epochs", 30), values.get("batch", 128)
    basis: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._]+", "-", str(values.get("network"))).strip("-._")}
    basis |= {"init": "own", "batch": batch, "epochs": epochs, "cosine": not values.get("finetune_epochs")}
    if values.get("placement", "") is not None:
        basis |= {"drop_rates": {"*": 0.05}, "gate_lr": "auto", "decay_gates": False}
        if isinstance(epochs, int) and not values.get("finetune_epochs"):
            steps = epochs * (images // batch) if images else 0
            share = steps_of_learning(steps) / steps if steps else LEARNING
            basis["settle_at"] = max(1, round(share * epochs))
        if values.get("at_most") is not None:
            basis |= {"cost": "macs", "on": "kept", "target_warmup": FALLING, "finalize": True}
    recalibrate = {"recalibrate": Recipe.from_dict({**basis, **values}).facts.has_batch_norm}
    return Recipe.from_dict({**basis, **recalibrate, **values})


def _papers() -> Iterable[Recipe]:
    mlp = {"fc1": 0.2, "fc2": 0.5, "fc3": 0.5}
    # Louizos et al. (2018), section 4.1, and their code
    adam = {"epochs": 200, "lr": 1e-3, "batch": 100, "ema": 0.999, "scaling": "unit"}
    gates = {"placement": "per_layer", "drop_rates": mlp, "rule": "noiseless", "penalty": 0.1}
    louizos = Recipe.from_dict({"name": "louizos-mlp", "network": "lenet300", "data": "mnist", **gates, **adam})
    yield louizos
    # The paper does not give its λs for the MLP, nor does any later one. These are ours, between points of the grid of
    # reproductions/search_mlp_sep.py, picked to come close to the published 266-88-33.
    yield louizos.override(name="louizos-mlp-sep", penalty={"fc1": 0.1, "fc2": 0.5, "fc3": 5.0})
    lenet = louizos.override(name="louizos-lenet5", network="lenet5", drop_rates={"*": 0.5})
    yield lenet
    # As Li & Ji (2019, L0-ARM) give them; the paper itself names 10 and 0.5, for the convolutions.
    yield lenet.override(name="louizos-lenet5-sep", penalty={"conv1": 10, "conv2": 0.5, "fc1": 0.1, "fc2": 10})

    # Gallego-Posada et al. (2021), section 4, and their code
    constraint = {"penalty": None, "at_most": 0.33, "dual": "ascent", "dual_lr": 1e-4, "restarts": True}
    adam = {"epochs": 200, "lr": 7e-4, "batch": 128, "ema": None, "scaling": "standard"}
    gallego = louizos.override(name="gallego-mlp", init="2021", rule="median", **constraint, **adam)
    yield gallego
    yield gallego.override(name="gallego-mlp-layers", at_most={"fc1": 0.3, "fc2": 0.3, "fc3": 0.3})
    lenet = gallego.override(name="gallego-lenet5", network="lenet5", drop_rates={"*": 0.5}, at_most=0.1)
    yield lenet
    layers = {"conv1": 0.5, "conv2": 0.3, "fc1": 0.7, "fc2": 0.1}
    yield lenet.override(name="gallego-lenet5-layers", at_most=layers)


def _rivals() -> Iterable[Recipe]:
    """The other methods of Table 1 of Louizos et al. (2018), each as its own authors train it, as far as that is known:
    see `reproductions/louizos2018_rivals.py` for what is theirs and what is ours.
    """
    what = {"network": "lenet300", "data": "mnist", "placement": "per_layer", "scaling": "unit", "penalty": 1.0}
    basis = Recipe.from_dict({"name": "rival", **what, "epochs": 200, "lr": 1e-3, "batch": 100})
    each = {"gate": "sparse_vd", "per_example": True, "init": "2017", "penalty_after": 0.025, "penalty_warmup": 0.075}
    yield basis.override(name="sparse-vd-mlp", **each, linear_after=0.5)
    yield basis.override(name="sparse-vd-lenet5", network="lenet5", **each, linear_after=0.0)

    bayes = basis.override(gate="bc_gnj", per_example=True, scaling="signed", penalty_warmup=0.5, ema=0.999)
    first, conv = {"fc1.weight": 0.2, "fc1.bias": 0.2}, {"conv1.weight": 0.5, "conv1.bias": 0.5}
    by_eye = {"fc1": -2.8, "fc2": -3.0, "fc3": -5.0}  # of their tutorial, which has no convolutions
    yield bayes.override(name="bc-gnj-mlp", most_noise=first, threshold=by_eye)
    yield bayes.override(name="bc-gnj-lenet5", network="lenet5", most_noise=conv)
    horseshoe = bayes.override(gate="bc_ghs")
    yield horseshoe.override(name="bc-ghs-mlp", most_noise=first)
    yield horseshoe.override(name="bc-ghs-lenet5", network="lenet5", most_noise=conv)

    sgd = {"optimizer": "sgd", "momentum": 0.9, "milestones": (120, 160), "decay": 0.1}
    lasso = basis.override(gate="group_lasso", lr=0.01, compile=False, **sgd)
    yield lasso.override(name="gl-mlp", penalty=3.0)  # λ = 5e-5·√|g|
    # λ = 0.005 for each map, as in the authors' example: c·√|g|/N, |g| = 26 and 501
    yield lasso.override(name="gl-lenet5", network="lenet5", penalty={"conv1": 58.8, "conv2": 13.4})

    sbp = basis.override(gate="sbp", gate_lr=1e-3, batch=128, weights_first=0.1, linear_after=0.5, compile=False)
    yield sbp.override(name="sbp-mlp")
    yield sbp.override(name="sbp-lenet5", network="lenet5")

    rates = {"drop_rates": {"*": 0.368}, "gate_lr": 1e-2, "milestones": (100, 140), "decay": 0.1, "weights_first": 0.1}
    gd = basis.override(gate="generalized_dropout", per_example=True, l2=1e-4, detach_l2=True, **rates)
    yield gd.override(name="gd-mlp")
    yield gd.override(name="gd-lenet5", network="lenet5")

    dropout = basis.override(gate="dropout", per_example=True, penalty=0.0)
    yield dropout.override(name="dropout-mlp", drop_rates={"fc1": 0.2, "*": 0.5})
    yield dropout.override(name="dropout-lenet5", network="lenet5", drop_rates={"conv*": 0.2, "*": 0.5})


def _wide() -> Iterable[Recipe]:
    """WRN-28-10 on CIFAR, gates on the hidden layer of each block.

    `per_layer` cannot tell the writers of a residual stream apart, and `shrinkable` finds one axis more, the maps of
    the first convolution. "blocks" has the papers' gates, and counts for a map the weights that write it, as they do.
    """
    # Zagoruyko & Komodakis (2016)
    sgd = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "l2": 5e-4, "batch": 128, "epochs": 200}
    drops = {"milestones": (60, 120, 160), "decay": 0.2}
    images = {"scaling": "standard", "augment": True, "precision": "bfloat16", "channels_last": True}
    what = {"name": "wrn-cifar10", "network": "wrn-28-10", "data": "cifar10", "placement": None}
    dense = Recipe.from_dict({**what, **sgd, **drops, **images})
    # Louizos et al. (2018), section 4.2: their own L2 on gated weights, ÷ 0.7. Not so the gates' learning rate: at that
    # of the weights, as there, the penalty moves log α by 0.24 in 200 epochs at most, and closing a gate takes 3.25.
    louizos = dense.override(
        placement="blocks", drop_rates={"*": 0.3}, penalty=0.001, gate_lr=6.0, l2_gated_factor=1 / 0.7, ema=0.99
    )
    # The 2022 code of Gallego-Posada et al.: gates by SGD of their own, never decayed.
    gates = {"placement": "blocks", "drop_rates": {"*": 0.3}, "rule": "median", "gate_lr": 6.0, "decay_gates": False}
    constraint = {"at_most": _blocks(0.7), "dual": "ascent", "dual_lr": 7e-4}
    gallego = dense.override(init="2021", detach_l2=True, **gates, **constraint)
    averaged = {"settle_at": 5, "milestones": (60,), "ema": 0.9999, "recalibrate": True}
    for data in ("cifar10", "cifar100"):
        yield dense.override(name=f"wrn-{data}", data=data)
        yield dense.override(name=f"wrn-dropout-{data}", data=data, dropout=0.3)
        for c in (0.001, 0.002):
            penalised = louizos.override(name=f"louizos-wrn-{c}-{data}", data=data, penalty=c)
            yield penalised
            # Gates stay alive to the end, what has been closed for long leaves the network on the way. At this rate the
            # penalty alone moves log α by 4.8, and closes what the loss does not hold; at 6 it closes nearly all.
            live = {"gate_lr": 2.0, "shrink_at": (10, 20, 40, 60, 90, 120)}
            yield penalised.override(name=f"alive-wrn-{c}-{data}", **live)
        for percent in (80, 70, 50, 35, 20):
            paper = gallego.override(name=f"gallego-wrn-{percent}-{data}", data=data, at_most=_blocks(percent / 100))
            yield paper
            # Ours: the gates choose in the first epochs, and the small network trains on alone. In place of the later
            # drops of the learning rate, its parameters are averaged over some 25 epochs (Izmailov et al., 2018).
            yield paper.override(name=f"shrink-wrn-{percent}-{data}", **averaged)
    # Streams have no layer of their own to be bounded: one bound on all MACs, by `Budget`'s controller. It takes time.
    yield _within(dense, 16).override(name="streams-wrn-16-cifar10", **averaged | {"settle_at": 10})
    # He et al. (2016), Identity Mappings; they begin with a rate of 0.01 for 400 steps, and end after 164 epochs.
    deep = {"network": "preresnet-110", "l2": 1e-4, "milestones": (100, 150), "decay": 0.1, "lr_warmup": 2}
    deep_dense = dense.override(name="preresnet-cifar10", **deep)
    yield deep_dense
    yield _within(deep_dense, 50, learning=0.1).override(placement="shrinkable")


def _blocks(at_most: float) -> dict[str, float]:
    return {f"blocks.{block}.conv1": at_most for block in range(12)}


def _budgets() -> Iterable[Recipe]:
    """Our own, nothing to tune: a bound on what is kept, a controller that sets itself, projection and fine-tune."""
    what = {"name": "budget-mlp", "network": "lenet300", "data": "mnist", "placement": "per_layer"}
    target = {"cost": "params", "at_most": 0.1, "on": "kept", "dual": "auto", "target_warmup": 0.5}
    steps = {"drop_rates": {"*": 0.2}, "lr": 1e-3, "gate_lr": 1e-2, "batch": 128, "epochs": 40}
    end = {"finalize": True, "finetune_epochs": 10, "recalibrate": True}
    mlp = Recipe.from_dict({**what, **target, **steps, **end})
    yield mlp
    lenet = mlp.override(name="budget-lenet5", network="lenet5", cost="macs")
    yield lenet
    # A network of a fifth of the MACs, on the images that come with the library, in a minute or two.
    short = {"epochs": 16, "finetune_epochs": 4, "batch": 100, "gate_lr": 3e-2}
    yield lenet.override(name="demo", data="mnist5k", at_most=0.2, **short)


def shaped(network: str, *units: int) -> dict[str, float]:
    """`at_most` that leaves so many units of each layer of "lenet300" or "lenet5", as the papers count them."""
    dense = {
        "lenet300": {"fc1": 784, "fc2": 300, "fc3": 100},
        "lenet5": {"conv1": 20, "conv2": 50, "fc1": 800, "fc2": 500},
    }
    return {name: kept / whole + 1e-6 for (name, whole), kept in zip(dense[network].items(), units, strict=True)}


def _frontier() -> Iterable[Recipe]:
    """How small, at what error, on MNIST: the gates choose units, then what is left trains on far longer.
    Images are bent, a dense LeNet-5 is the teacher. All of that was chosen by `frontier-split`.
    """
    what = {"name": "frontier-mlp", "network": "lenet300", "data": "mnist", "placement": "per_layer"}
    target = {"cost": "params", "at_most": 0.0363, "on": "kept", "target_warmup": 0.9, "finalize": True}
    gates = {"drop_rates": {"*": 0.05}, "gate_lr": "auto"}
    steps = {"lr": 2e-3, "batch": 100, "epochs": 40, "finetune_epochs": 300}
    images = {"distort": 1.0, "teacher": "lenet5", "temperature": 2.0}
    mlp = Recipe.from_dict({**what, **target, **gates, **steps, **images})
    yield mlp
    lenet = mlp.override(
        name="frontier-lenet5-macs", network="lenet5", cost="macs", at_most=0.048, distort=0.7, epochs=25
    )
    # A budget of parameters alone would keep many filters and hardly a unit behind them: each layer has its own.
    few = {"cost": "l0_norm", "at_most": shaped("lenet5", 3, 10, 89, 13)}
    yield lenet.override(name="frontier-lenet5-params", **few, finetune_epochs=250)
    yield lenet.override(finetune_epochs=100)


def _transformers() -> Iterable[Recipe]:
    """Transformers, dense and under one budget of MACs over heads, feed-forward layers and the stream: the rest as
    `Budget` has it.
    """
    # nanoGPT's `train_shakespeare_char.py`, 5,000 steps; its clipped gradients, β₂ = 0.99 and last rate of 1e-4 are not
    # here, nor its estimate of the loss: ours is of the whole rest of the text.
    what = {"name": "gpt-shakespeare", "network": "gpt-6-6-384", "data": "tinyshakespeare", "metric": "loss"}
    steps = {"optimizer": "adamw", "lr": 1e-3, "l2": 0.1, "cosine": True, "lr_warmup": 2, "batch": 64, "epochs": 82}
    gpt = Recipe.from_dict({**what, **steps, "placement": None, "init": "own", "dropout": 0.2, "precision": "bfloat16"})
    yield gpt
    yield _within(gpt, 50)
    # Hassani et al. (2021), the code beside their table for CIFAR
    what = {"name": "vit-cifar10", "network": "vit-lite-7-4", "data": "cifar10"}
    steps = {"optimizer": "adamw", "lr": 5e-4, "l2": 0.03, "cosine": True, "lr_warmup": 5, "batch": 128, "epochs": 200}
    images = {"augment": "auto", "label_smoothing": 0.1, "precision": "bfloat16"}
    vit = Recipe.from_dict({**what, **steps, **images, "placement": None, "init": "own", "dropout": 0.1})
    yield vit
    for percent in (50, 30):
        yield _within(vit, percent, learning=0.03)  # six epochs: by `vit-split`


def _within(dense: Recipe, percent: int, learning: float = LEARNING) -> Recipe:
    """The recipe with so many percent of the MACs; gates learn for a share of the epochs."""
    gates = {"placement": "streams", "drop_rates": {"*": 0.05}, "gate_lr": "auto", "decay_gates": False}
    target = {"cost": "macs", "at_most": percent / 100, "on": "kept", "target_warmup": FALLING, "finalize": True}
    kind, _, rest = dense.name.partition("-")
    settles = {"settle_at": max(1, round(learning * dense.epochs))}
    return dense.override(name=f"{kind}-{percent}-{rest}", **gates, **target, **settles)


_ALL = (*_budgets(), *_papers(), *_rivals(), *_wide(), *_frontier(), *_transformers())
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
