"""One step of a stack of runs, and what it is made of."""
