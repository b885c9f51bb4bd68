"""Shared runs: trained once, the same for who asks first and who asks second."""

import ast
import re
from pathlib import Path

import pytest
import torch

from ellzero.experiments.store.folder import Folder
from support import ROOT, finished
from support.finished import begun, copied, once

SHORT = {
    "network": "lenet300",
    "placement": "shrinkable",
    "cost": "params",
    "batch": 50,
    "epochs": 1,
    "finetune_epochs": 0,
}


def test_a_run_is_trained_once_and_leaves_no_trace_in_the_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        home = finished.finished("demo", images=100, **SHORT)
        drawn.append(torch.rand(()))
        monkeypatch.setattr(finished, "train", None)  # the second time nobody may ask for it
    assert drawn[0] == drawn[1]
    folder = Folder.open(copied(home, tmp_path / "copy"))
    assert next(r["epoch"] for r in folder.history()) == 1
    assert folder.results() is not None


def test_a_run_that_was_begun_has_closed_gates_and_no_history() -> None:
    folder = Folder.open(begun("demo", images=100, closed={"fc1": 5}, **SHORT))
    assert folder.history() == []
    assert folder.results() is None
    assert list(folder.checkpoints.iterdir())


def test_a_folder_that_failed_is_made_again() -> None:
    def fail(home: Path) -> None:
        home.mkdir()
        raise KeyError

    with pytest.raises(KeyError):
        once("failing", fail)
    assert once("failing", Path.mkdir).is_dir()


def test_no_test_module_imports_another() -> None:
    """What tests share is in `support`: then each file can be moved, and run alone."""
    found = {
        f"{path.name} imports {name}"
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import)\s.*test_", text := path.read_text(encoding="utf-8"), re.MULTILINE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name.split(".")[0].startswith("test_")
    }
    assert not found


def test_no_two_test_modules_have_the_same_name() -> None:
    """They are imported by it: of two, the second is not collected, and no test runs."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("plugin", ["logging", "anyio", "typeguard", "benchmark"])
def test_plugins_that_slow_or_stop_the_tests_stay_out(plugin: str, pytestconfig: pytest.Config) -> None:
    """Who has pytest-benchmark would see no test under xdist: it warns of that when it starts."""
    assert pytestconfig.pluginmanager.is_blocked(plugin)
