"""A recipe: everything that decides how a run comes out, as one value; the named ones are in `papers`."""

from ellzero.experiments.recipe.definition import (
    FIELDS,
    Recipe,
    absent,
    from_strings,
    nearest,
    refuse_idle,
    refuse_unknown,
)

__all__ = ["FIELDS", "Recipe", "absent", "from_strings", "nearest", "refuse_idle", "refuse_unknown"]
