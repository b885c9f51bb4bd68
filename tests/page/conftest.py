"""What tests of pages share: one browser for all of them, in each test process."""

import os
from collections.abc import Iterator

import pytest

from support.browser import Browser, BrowserError, find


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no browser is installed (chromium, or another by $ELLZERO_BROWSER)")
    try:
        started = Browser(program)
    except BrowserError as error:
        if "CI" in os.environ:  # which has installed one that must work
            raise
        pytest.skip(f"{program} does not start: {error}")
    yield started
    started.close()
