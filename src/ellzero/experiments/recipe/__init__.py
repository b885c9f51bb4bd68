"""A recipe: everything that decides how a run comes out, as one value; the named ones are in `papers`."""

from ellzero.experiments.recipe.definition import FIELDS, Recipe, differences, from_strings, in_words, refuse_idle

__all__ = ["FIELDS", "Recipe", "differences", "from_strings", "in_words", "refuse_idle"]
