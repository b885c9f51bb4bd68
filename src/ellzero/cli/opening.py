"""From words to runs: recipes, devices, data, folders and the networks in them, each with an error of one line.

What the commands about runs share. No command is here. Every function here raises `CommandError` for what it cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, final

import torch
from torch import Tensor, nn
from tyro.conf import OmitArgPrefixes, Positional, arg

from ellzero.cli.console import FAILED, CommandError, foreseen, refuse, tell
from ellzero.experiments import data, papers
from ellzero.experiments.campaign import counted
from ellzero.experiments.data import Dataset, OwnError, Tensors
from ellzero.experiments.recipe import FIELDS, Recipe, from_strings, refuse_idle
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import policy, processes, saver
from ellzero.experiments.train.fitting import measured
from ellzero.experiments.train.loop import restore
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.out.compaction import compact


def option(metavar: str, default: str = "", **more: Any) -> Any:
    """How the help writes an option that may be absent, and what it is then."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "", **more)


Device = Literal["auto", "cpu", "cuda"]
DataDir = Annotated[str | None, option("FOLDER")]
RunPath = Annotated[str, Positional, arg(metavar="RUN")]
Index = Annotated[int | None, option("N")]
RecipeName = Annotated[str | None, Positional, option("[RECIPE]")]
Every = Annotated[int | None, option("N", "1")]
Workers = Annotated[int | None, option("N", "0")]

# One option for each field of a recipe, as text: tyro makes them from this class, sooner than from `str | None`.
_ABSENT = "\0"  # which no argument of a process has
Fields: Any = make_dataclass(
    "Fields",
    [(name, Annotated[str, option("VALUE", help=known.sentence)], _ABSENT) for name, known in FIELDS.items()],
)
Fields.__doc__ = (
    "Fields of the recipe, in place of its own values. Values are written as in TOML: --at-most 0.2, "
    "--at-most '{\"fc1\" = 0.2}', --milestones '[60, 120]', --gate-lr none."
)
ChosenFields = Annotated[Any, OmitArgPrefixes, arg(constructor=Fields)]


def typed(fields: Any) -> dict[str, str]:
    """What was typed, by field."""
    return {name: text for name, text in vars(fields).items() if text != _ABSENT}


def find_recipe(text: str) -> Recipe:
    """The recipe of this name, or in this TOML file."""
    with foreseen(ValueError):
        if text not in papers.RECIPES and (text.endswith(".toml") or Path(text).is_file()):
            if not Path(text).is_file():
                raise CommandError(f"there is no recipe {text!r}: no such file")
            return papers.load_toml(text)
        return papers.get(text)


def unnamed_recipe(fields: Any, load: Callable[[str], Dataset] | None = None) -> Recipe | None:
    """The recipe of nothing but fields, if they say network and data; how long its gates learn, the data may say."""
    values = from_strings(typed(fields))
    if "network" not in values and "data" not in values:
        return None
    for name in ("network", "data"):
        refuse(name not in values, f"`--{name}` must be given too, where there is no recipe that says it")
    with foreseen(ValueError):
        recipe = papers.unnamed(values)
        recipe = recipe if load is None else papers.unnamed(values, load(recipe.data).sizes[0])
        refuse_idle(recipe, values)
        return recipe


def override(recipe: Recipe, fields: Any) -> Recipe:
    """The recipe with the `Fields` that were given, each of which must change something."""
    values = from_strings(typed(fields))
    with foreseen(ValueError):
        changed = recipe.override(**values)
        refuse_idle(changed, values)
        return changed


def tell_of_tuning(recipe: Recipe, given: Collection[str]) -> None:
    """Says what comes after the epochs that were asked for, where nobody has said how long that takes."""
    if "epochs" in given and "finetune_epochs" not in given and recipe.finetune_epochs:
        told = counted(recipe.finetune_epochs, "epoch")
        tell(f"ellzero: after `--epochs`, with gates that learn, comes fine-tuning, {told} (`--finetune-epochs`)")


def find_device(word: Device, begun_on: str | None = None) -> torch.device:
    """The device of this name; `auto` is the kind that the run was begun on, for a new one a GPU where there is one."""
    there = torch.cuda.is_available()
    none = "`--device cuda` needs a GPU and a torch that can use it, and there is none here"
    refuse(word == "cuda" and not there, none, FAILED)
    if word == "auto" and begun_on is not None:
        word = "cpu" if begun_on.startswith("CPU") else "cuda"
        other = f"the run was begun on {begun_on}, and there is no GPU here; `--device cpu` uses the CPU"
        refuse(word == "cuda" and not there, other, FAILED)
    elif word == "auto":
        word = "cuda" if there else "cpu"
    return torch.device(word)


def refuse_several(command: str) -> None:
    """Says no to `torchrun`, whose processes would all do the same work in the same folder."""
    why = "trains in one process, which trains many runs together"
    refuse(processes.launched(), f"`{command}` {why}: start it without torchrun")


def refuse_below_one(**numbers: int | None) -> None:
    """Says no to options that are counts, and less than one."""
    for name, number in numbers.items():
        option = name.replace("_", "-")
        refuse(number is not None and number < 1, f"`--{option}` must be at least 1, got {number}")


def load_data(name: str, data_dir: str | None, device: torch.device, workers: int | None = None) -> Dataset:
    """A data set; `workers` processes make its samples, where it is the user's."""
    refuse((workers or 0) < 0, f"`--workers` must be at least 0, got {workers}")
    there = data_dir is None or Path(data_dir).expanduser().is_dir()
    refuse(not there, f"`--data-dir` must be a folder that exists, got {data_dir!r}")
    return data.load(name, data_dir, device, workers or 0)


@final
@dataclass(frozen=True)
class Loader:
    """What loads data sets by their names, each once, onto the device, which is looked for when one is needed. Other
    processes get it as it is.
    """

    data_dir: str | None
    device: Device
    begun_on: str | None = None
    workers: int | None = None
    loaded: dict[str, Dataset] = field(default_factory=dict)

    def __call__(self, name: str) -> Dataset:
        if name not in self.loaded:
            device = find_device(self.device, self.begun_on)
            self.loaded[name] = load_data(name, self.data_dir, device, self.workers)
        return self.loaded[name]


@contextmanager
def begun_in(folder: Folder) -> Iterator[None]:
    """Says where a run was begun, if code or data of the user's that it needs are not found from here."""
    try:
        yield
    except OwnError as error:
        where = folder.about.get("own", {}).get("folder")
        if not error.missing or where is None:
            raise
        needs = f"the run in {str(folder.path)!r} was begun in {where!r} and needs it"
        raise CommandError(
            f"{error}: {needs}; go on from there, or put the folder of the module on PYTHONPATH"
        ) from error


def open_run(path: str) -> Folder:
    """The run in a folder."""
    if not Path(path, "run.json").exists():
        there = "is no folder of a run: there is no `run.json` in it" if Path(path).is_dir() else "is no folder"
        raise CommandError(f"{path!r} {there}; `ellzero train` makes one")
    return Folder.open(path)


def choose(folder: Folder, index: int | None) -> int:
    """Which run of a stack is meant."""
    count = len(folder.recipes)
    if index is None and count > 1:
        names = "; ".join(f"{number}: {r.name}, seed {r.seed}" for number, r in enumerate(folder.recipes))
        raise CommandError(f"{str(folder.path)!r} holds {count} runs, choose one by `--index`: {names}")
    refuse(not 0 <= (index or 0) < count, f"`--index` must be from 0 to {count - 1}, got {index}")
    return index or 0


def restored(folder: Folder, dataset: Dataset | None = None) -> Trainer:
    """A run as its newest checkpoint has it; without its data it can be looked at, but not tested."""
    home = folder.path
    none = f"{str(home)!r} has no checkpoint yet; `ellzero train --resume {home}` goes on"
    if folder.results() is not None:
        none = f"the run in {str(home)!r} has ended, and its checkpoints are gone: train it again"
    refuse(not checkpoint.steps(folder.checkpoints), none, FAILED)
    with foreseen(ValueError), begun_in(folder):
        trainer = restore(folder, dataset)
        saver.refuse_diverged(trainer)  # as checkpoints of before may hold it
        return trainer


def small_network(network: nn.Module) -> nn.Module:
    """The compact network; a dense one as it is."""
    network = network.cpu().eval()
    return compact(network).eval() if isinstance(network, Gated) else network


def size(network: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(p.numel() for p in network.parameters())


def error_of(network: nn.Module, recipe: Recipe, dataset: Dataset) -> float:
    """What the recipe notes as the error: in percent of the test images, unless a loss or metric is the user's own."""
    network = network.to(dataset.device).eval()
    chunk = policy.test_batch(recipe, dataset.device.type == "cuda")

    def answer(x: Tensor) -> Tensor:
        return cast(Tensor, network(dataset.scaled(x, recipe.scaling)))[None]

    return float(measured(recipe, dataset, answer, chunk))


def loading(recipe: Recipe, file: Path, images: Tensors) -> list[str]:
    """Python that loads the compact network, and how it wants its inputs: as these `images`, which may be noise."""
    dropout = f", dropout={recipe.dropout}" if recipe.dropout else ""
    made = f"networks.find({json.dumps(recipe.network)}).make({len(images.classes)}{dropout})"
    rooms, call, imports = ["networks"], "logits = net(x)", ["import ellzero"]
    if recipe.facts.own:
        module = recipe.network.partition(":")[0]
        made, rooms, imports = f"{recipe.network.replace(':', '.')}()", [], ["import ellzero", f"import {module}"]
    if recipe.centres:
        kind = ", dtype=torch.int64" * (images.train_x.dtype is torch.int64)
        made = f"ellzero.centred({made}, torch.zeros({(1, *images.shape)}{kind}))"
        imports = [*imports, "import torch"]
    if images.train_x.dtype is torch.uint8 and images.train_x.ndim == 4:
        scale = "".join(f", {numbers}" for numbers in images.shift_and_scale(recipe.scaling))
        rooms, call = ["data", *rooms], f"logits = net(data.scaled(images{scale}))  # of bytes, (N, C, H, W)"
    imports += [f"from ellzero.experiments import {', '.join(rooms)}"] if rooms else []
    return [*imports, f"net = ellzero.load({made}, {json.dumps(file.as_posix())}).eval()", call]
