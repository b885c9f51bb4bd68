"""For the days of the move: `recipe` and `papers` under their old name."""

from ellzero.experiments.papers import RECIPES, get, load_toml
from ellzero.experiments.recipe import Recipe, from_strings, refuse_idle

__all__ = ["RECIPES", "Recipe", "from_strings", "get", "load_toml", "refuse_idle"]
