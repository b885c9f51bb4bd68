"""One stack of runs under training."""
