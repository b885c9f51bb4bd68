"""Gates on a model: where they go, what is alive behind them, what it counts, and the module that runs with them."""
