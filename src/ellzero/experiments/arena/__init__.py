"""The arena: one plain loop for all, equal epochs and batches, and what each method makes of a network in it."""
