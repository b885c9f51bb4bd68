"""Where a result comes from, told without the paths of the machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from ellzero.experiments.store import provenance as module
from ellzero.experiments.store.provenance import provenance


def test_provenance_names_what_ran() -> None:
    about = provenance(torch.device("cpu"))
    assert list(about) == ["commit", "ellzero", "torch", "python", "device", "date", "command"]
    assert about["torch"] == torch.__version__
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    json.dumps(about)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/home/me/.venv/bin/ellzero", "train", "demo"], "ellzero train demo"),
        (["/home/me/src/ellzero/__main__.py", "train", "a b"], "python -m ellzero train 'a b'"),
        (["reproductions/table1.py", "--seeds", "5"], "table1.py --seeds 5"),
        ([""], "python"),
    ],
)
def test_the_command_is_without_the_path_of_the_program(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance("cpu")["command"] == command


def test_the_commit_is_that_of_the_tree_which_tracks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repository of its own: before it is tracked, after, and with a change; then without git."""
    home = tmp_path / "ellzero"
    home.mkdir()
    file = home / "provenance.py"
    file.touch()
    monkeypatch.setattr(module, "__file__", str(file))
    monkeypatch.setenv("COMMIT", "told")

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def told() -> str | None:
        """What a process that starts now says."""
        module._commit.cache_clear()
        return cast("str | None", provenance("cpu")["commit"])

    try:
        git("init", "-q")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git does not work here: {error}")
    git("commit", "-q", "--allow-empty", "-m", "someone else's")
    assert told() == "told"  # the file lies in the repository and is not of it
    git("add", ".")
    git("commit", "-q", "-m", "ours")
    assert told() == git("rev-parse", "HEAD")
    file.write_text("changed")
    assert provenance("cpu")["commit"] == git("rev-parse", "HEAD")  # of the code that runs, not of what came later
    assert told() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert told() == "told"
    monkeypatch.delenv("COMMIT")
    assert told() is None
    module._commit.cache_clear()
