"""The command that lists recipes: `recipes`. What a recipe is and which have names is not decided here."""

from __future__ import annotations

from typing import Annotated

from rich import box
from rich.table import Table
from tyro.conf import Positional, arg

from ellzero.cli.app import CommandError, app, say, show, show_json
from ellzero.cli.opening import find_recipe
from ellzero.experiments.papers import RECIPES
from ellzero.experiments.recipe import Recipe


@app.command
def recipes(
    name: Annotated[str | None, Positional, arg(metavar="NAME", help_behavior_hint="")] = None,
    json: bool = False,
    toml: bool = False,
) -> None:
    """List the named recipes, or print one in full.

    For example: ellzero recipes gallego-mlp > mine.toml

    Args:
        name: of a recipe, or a TOML file; all of them if absent.
        json: print JSON, all fields.
        toml: print TOML, all fields, as for one recipe.
    """
    if json and toml:
        raise CommandError("`--json` and `--toml` exclude each other")
    if name is not None:
        recipe = find_recipe(name)
        show_json(recipe.to_dict()) if json else say(recipe.to_toml().rstrip())
    elif json:
        show_json([recipe.to_dict() for recipe in RECIPES.values()])
    elif toml:
        say("\n".join(f'["{name}"]\n{recipe.to_toml()}' for name, recipe in RECIPES.items()).rstrip())
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("name", "network", "data", "objective", "epochs"):
            table.add_column(title, justify="right" if title == "epochs" else "left", overflow="fold")
        for recipe in RECIPES.values():
            tuned = f" + {recipe.finetune_epochs}" if recipe.finetune_epochs else ""
            table.add_row(recipe.name, recipe.network, recipe.data, _objective(recipe), f"{recipe.epochs}{tuned}")
        show(table)
        say("`ellzero recipes NAME` prints one in full, `ellzero train NAME` trains it.")


def _objective(recipe: Recipe) -> str:
    """In a few words."""
    if recipe.placement is None:
        return "dense" if not recipe.dropout else f"dense, dropout {recipe.dropout}"
    if recipe.penalty is not None:
        return f"penalty, c = {_values(recipe.penalty)}"
    assert recipe.at_most is not None
    return f"{recipe.on} {recipe.cost} ≤ {_values(recipe.at_most)}"


def _values(value: float | dict[str, float]) -> str:
    if not isinstance(value, dict):
        return f"{value:g}"
    if len(value) > 4 and len(set(value.values())) == 1:
        return f"{next(iter(value.values())):g} each"
    return ", ".join(f"{name} {number:g}" for name, number in value.items())
