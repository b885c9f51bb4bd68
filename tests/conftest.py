"""What all tests share: a fixed seed, torch's global state left as it was, and no verdict that depends on the clock.

Torch is imported where it is used: the process that only hands out tests to others has no need of it.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from support import CACHE, into_nothing, processes

gc.disable()  # until all is imported, of which nothing can be thrown away
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes imports torch for a few small files

# The parent is hypothesis' own choice: random examples at home; the same ones every time where CI is set.
settings.register_profile(
    "ellzero", settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
)
settings.load_profile("ellzero")

# A shell starts what runs in its background with Ctrl-C ignored, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _seeds_of_absent_devices() -> None:
    """Seeds are not kept for a kind of device that is not there: torch keeps the whole stack with each."""
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _same_torch_every_time() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn  # bfloat16 on a CPU that has none switches it off for the whole process
    assert torch.get_default_dtype() is torch.float32, "the test left another default dtype behind"
    assert torch.is_grad_enabled(), "the test left gradients switched off"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    """Forks trainings, which tests can kill; one for all tests of a process, because it has to import torch."""
    with processes.serving(tmp_path_factory.mktemp("jobs")) as running:
        yield running


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are laid out and drawn once, into nothing, and their files hold a word.

    What is in such files is the business of `test_figures.py` and `test_reproduce.py`.
    """
    from ellzero.experiments import figures

    monkeypatch.setattr(figures, "render", into_nothing)


def pytest_configure(config: pytest.Config) -> None:
    """Opens the cache of finished runs, once for all processes of a test session: they inherit the environment."""
    if not hasattr(config, "workerinput"):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="ellzero-finished-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Tests are no documentation: nobody looks for examples in them, object by object."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, then files with slow ones: what is left for two processes in the end is short. Pages whose
    examples run are slow. Files that need the same large libraries follow each other, and so do those that need a
    server or a browser: one process imports or starts them, not each.
    """
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    long = {item for item in items if any(mark.kwargs.get("first") for mark in item.iter_markers("slow"))}
    dear = {path: _dear(path) for path in slow}
    started = {item.path for item in items if {"server", "chromium"} & set(getattr(item, "fixturenames", ()))}
    items.sort(key=lambda i: (i not in long, i.path not in slow, not dear.get(i.path), i.path in started))


def _dear(path: Path) -> bool:
    """Whether a file needs libraries whose import takes seconds."""
    return any(name in path.read_text(encoding="utf-8") for name in ("transformers", "lightning", "onnxruntime"))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.set_threshold(20_000)  # after each 700 objects it would be 1,500 times a minute, for next to nothing
