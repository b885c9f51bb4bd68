"""Whether network, data, loss and metric fit each other, how well a network does, and where code of the user's is from.

What a recipe names is called here; it does not know how anything is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.data import Dataset, OwnError, Samples, Tensors, is_own
from ellzero.experiments.data.importing import call, checksum, find, is_code, told
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import processes as parallel

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_of(recipe: Recipe) -> Loss:
    """The loss of the task: of outputs and targets, a mean over the batch."""
    return partial(of_classes, smoothing=recipe.label_smoothing) if recipe.loss is None else find(recipe.loss)


def of_classes(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross-entropy of logits (batch, …, classes), one answer for each place."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(0, output.ndim - 2), label_smoothing=smoothing)


@torch.no_grad()
def measured(
    recipe: Recipe, dataset: Dataset, answer: Callable[[Tensor], Tensor], chunk: int, rank: int = 0, ranks: int = 1
) -> Tensor:
    """What a recipe notes as the error, of every run: `answer` gives the outputs (runs, batch, …) of test inputs.

    Wrong classes are counted, in percent; a metric of the user's own sees all outputs and targets at once, on the CPU.
    """
    own = recipe.loss if recipe.metric == "loss" else recipe.metric or recipe.loss
    if own is None:
        count, unit = (_losses, 1) if recipe.metric == "loss" else (_wrong, 100)
        seen = torch.zeros(1, dtype=torch.float64, device=dataset.device)
        for x, y in dataset.tests(chunk, rank, ranks):
            seen = seen + count(answer(x), y)
        return unit * (parallel.total(seen) if ranks > 1 else seen) / dataset.sizes[1]  # one may look alone
    found = [(answer(x).float().cpu(), y.cpu()) for x, y in dataset.tests(chunk)]
    outputs, targets = torch.cat([o for o, _ in found], 1), torch.cat([y for _, y in found])
    return torch.tensor([_number(own, output, targets) for output in outputs], dtype=torch.float64)


def _wrong(outputs: Tensor, y: Tensor) -> Tensor:
    """Of every run, the share of places that are wrong, summed over the examples."""
    return (outputs.argmax(-1) != y).double().reshape(*outputs.shape[:2], -1).mean(2).sum(1)


def _losses(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.stack([of_classes(output.float(), y) for output in outputs]).double() * len(y)


def _number(name: str, output: Tensor, target: Tensor) -> float:
    found = call(name, output, target)
    with told(f"taking what `{name}` gives as a number"):
        number = float(found)
    if not math.isfinite(number):
        raise OwnError(f"`{name}` must give a finite number, got {number}")
    return number


def refuse_unfit(recipe: Recipe, model: nn.Module, dataset: Dataset) -> None:
    """Tries a network of the user's own, or their data, loss and metric, on two inputs, and says what does not fit."""
    metric = None if recipe.metric == "loss" else recipe.metric
    if not (recipe.is_own or metric or is_own(recipe.data)):
        return
    wanted = recipe.facts.images
    if wanted is not None and dataset.shape != wanted:
        raise OwnError(
            f"`data` must be images of {wanted} for {recipe.network!r}, got {dataset.shape} in {recipe.data!r}"
        )
    x, y = dataset.example(2), dataset.first(2)[1]
    training = model.training
    doing = f"calling the network `{recipe.network}` with inputs of `{recipe.data}`, {_kind(x)},"
    with torch.no_grad(), torch.random.fork_rng(devices=[]), told(doing):
        output = model.eval()(x)
    model.train(training)
    if not isinstance(output, Tensor) or output.shape[:1] != x.shape[:1]:
        what = _kind(output) if isinstance(output, Tensor) else type(output).__name__
        raise OwnError(f"`{recipe.network}` must give one tensor with a row for each of {len(x)} inputs, got {what}")
    if isinstance(dataset, Tensors) and dataset.is_noise:
        return
    if recipe.loss is None:
        if output.ndim != 2 or y.ndim != 1 or y.dtype is not torch.int64:
            needs = "classes need outputs (batch, classes) and labels that are whole numbers (batch,)"
            got = f"got {_kind(output)} and {_kind(y)}"
            raise OwnError(f"{needs}, {got}: `--loss MODULE:FUNCTION` takes others")
        dataset.refuse_labels(output.shape[1])
    else:
        _refuse_loss(recipe.loss, output, y)
    if metric is not None:
        _number(metric, output.float(), y)


def _refuse_loss(name: str, output: Tensor, y: Tensor) -> None:
    with torch.enable_grad():
        found = call(name, output.float().clone().requires_grad_(), y)  # a metric gets `output` after this
    if not isinstance(found, Tensor) or found.ndim or not found.requires_grad:
        what = _kind(found) if isinstance(found, Tensor) else type(found).__name__
        grad = ", without a gradient" if isinstance(found, Tensor) and not found.requires_grad else ""
        raise OwnError(f"`{name}` must give one number as a tensor that can be differentiated, got {what}{grad}")


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def sources(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """What a run stores of code and data of the user's: nothing where there are none."""
    named = (recipe.network, recipe.data, recipe.loss, recipe.metric, recipe.teacher)
    names = [name for name in named if name and is_code(name)]
    if not names and not is_own(recipe.data):
        return {}
    record = dataset.record() if is_own(recipe.data) else None
    return {"own": {"folder": str(Path.cwd()), "code": {name: checksum(name) for name in names}, "data": record}}


def changes(about: Mapping[str, Any], recipe: Recipe, dataset: Dataset) -> Iterator[str]:
    """What is other now than when a run was begun, in words; an OwnError where it cannot go on with it."""
    then, now = about.get("own"), sources(recipe, dataset).get("own")
    if then is None or now is None:
        return
    for name, source in now["code"].items():
        if then["code"].get(name, source)["sha256"] != source["sha256"]:
            yield f"the file of `{name}`, {source['file']}, has changed since the run was begun: the new one counts now"
    if now["data"] is None or then["data"] is None or (isinstance(dataset, Tensors) and dataset.is_noise):
        return
    for key in ("train", "test", "shape", "dtype"):
        if (before := then["data"][key]) != now["data"][key]:
            was = f"`{key}` was {before} and is {now['data'][key]}"
            raise OwnError(f"the data `{recipe.data}` are not those that the run was begun with: {was}")
    if then["data"]["crc32"] != now["data"]["crc32"]:
        yield f"the data `{recipe.data}` have other contents than when the run was begun: the new ones count now"


def goes_plainly(recipe: Recipe, dataset: Dataset) -> bool:
    """Whether steps are taken one by one, as they are: code of the user's may do another thing in each, which a replay
    of one step would not. Who sets `compile` says that it does not.
    """
    return isinstance(dataset, Samples) or (recipe.is_own and not recipe.compile)
