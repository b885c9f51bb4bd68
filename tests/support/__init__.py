"""What tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = "ELLZERO_TESTS_FINISHED"  # the environment variable with the folder of finished runs; processes inherit it
