"""The types of the library, by mypy as `make lint` runs it: here, because another core has tests to run meanwhile."""

import subprocess
import sys

import pytest

from support import ROOT


@pytest.mark.slow(first=True)
def test_the_types_fit() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"mypy:\n{done.stdout}{done.stderr}", pytrace=False)
