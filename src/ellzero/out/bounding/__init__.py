"""What `finalize` and a budget are made of. See `out/finalization.py` and `out/budget.py`."""
