"""Run folders: what was written comes back, and what a crash, a full disk or a stranger left is told apart."""

import errno
import json
import math
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest

from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.out.files import FileError

DEMO = get("demo")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.create(tmp_path / "run", [DEMO], {"torch": "2"})


def record(epoch: int, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "error": 100 / epoch, **more}


# ---- run.json


def test_a_run_is_what_the_documentation_says_it_is(tmp_path: Path) -> None:
    """Readable without ellzero: the file, key by key."""
    recipes = [DEMO, DEMO.override(seed=1, at_most={"*": 0.5})]
    made = Folder.create(tmp_path / "a" / "b", recipes, {"commit": None, "loss": math.nan})
    assert json.loads((tmp_path / "a" / "b" / "run.json").read_text()) == {
        "format": "ellzero.run",
        "format_version": 1,
        "recipes": [r.to_dict() for r in recipes],
        "about": {"commit": None, "loss": None},
    }
    assert [p.name for p in made.path.iterdir()] == ["run.json"]
    opened = Folder.open(made.path)
    assert opened.path == made.path
    assert opened.recipes == made.recipes == recipes
    assert opened.about == made.about == {"commit": None, "loss": None}
    assert opened.checkpoints == made.path / "checkpoints"
    assert (opened.history(), opened.results()) == ([], None)


@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "checkpoints", "results.json"])
def test_a_folder_that_holds_a_run_is_refused_and_untouched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("something")
    with pytest.raises(FolderError, match=f"holds a run already: `{name}` is there"):
        Folder.create(tmp_path, [DEMO])
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "something"


def test_what_else_lies_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    Folder.create(tmp_path, [DEMO])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FolderError, match="`path` must be a folder, got the file"):
        Folder.create(file, [DEMO])
    with pytest.raises(FileError, match="cannot be written: Not a directory"):
        Folder.create(file / "below", [DEMO])
    with pytest.raises(ValueError, match="`recipes` must be at least one"):
        Folder.create(tmp_path / "none", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        for path in (tmp_path, tmp_path / "new"):
            with pytest.raises(FileError, match="cannot be written: Permission denied"):
                Folder.create(path, [DEMO])
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_what_is_no_run_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"must be the folder of a run, and there is none at '.*nowhere'"):
        Folder.open(tmp_path / "nowhere")
    with pytest.raises(FolderError, match=r"there is no `run.json` in"):
        Folder.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="must be the folder of a run, got the file"):
        Folder.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "run.json' is damaged: "),
        (lambda text: "[]", "does not say format 'ellzero.run'"),
        (lambda text: text.replace('"ellzero.run"', '"other"'), "does not say format 'ellzero.run'"),
        (lambda text: text.replace('_version": 1', '_version": 2'), "has version 2 of the format, and this ellzero"),
        (lambda text: text.replace('"epochs"', '"epoch"'), "is damaged: `epoch` is not a field of a recipe"),
        (lambda text: text.replace('"seed": 0', '"seed": -1'), "is damaged: `seed` must be an integer"),
        (lambda text: text.replace('"recipes"', '"recipe"'), "is damaged: 'recipes'"),
        (lambda text: text.replace('"about"', '"abouts"'), "is damaged: 'about'"),
        (lambda text: '{"format": "ellzero.run", "format_version": 1, "recipes": [3], "about": {}}', "is damaged"),
        (lambda text: '{"format": "ellzero.run", "format_version": 1, "recipes": [], "about": {}}', "has no recipe"),
    ],
)
def test_a_damaged_run_is_refused(change: Any, message: str, folder: Folder) -> None:
    file = folder.path / "run.json"
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))
    with pytest.raises(FolderError, match=message):
        Folder.open(folder.path)


# ---- history.jsonl


def test_records_are_appended_as_lines_of_json(folder: Folder) -> None:
    folder.log([record(1, loss=math.nan, kept={"macs": math.inf}), record(2, tuning=True)])
    folder.log([record(3, multiplier=(0.5, -math.inf))])
    folder.log([])
    text = [
        '{"epoch": 1, "error": 100.0, "loss": null, "kept": {"macs": null}}',
        '{"epoch": 2, "error": 50.0, "tuning": true}',
        '{"epoch": 3, "error": 33.333333333333336, "multiplier": [0.5, null]}',
    ]
    sums = [f', "crc32": "{zlib.crc32(line.encode()):08x}"}}\n' for line in text]
    written = "".join(line[:-1] + end for line, end in zip(text, sums, strict=True))
    assert (folder.path / "history.jsonl").read_text() == written
    assert Folder.open(folder.path).history() == [json.loads(line) for line in text]


@pytest.mark.slow
def test_no_flipped_bit_of_a_history_goes_unseen(folder: Folder) -> None:
    file, records = folder.path / "history.jsonl", [record(e, loss=0.1 * e) for e in range(1, 5)]
    folder.log(records)
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            seen = [{k: v for k, v in r.items() if k in records[0]} for r in Folder.open(folder.path).history()]
        except FolderError:
            continue
        assert seen in (records, records[:-1]), place  # the last one may be missing: it looks cut off


def test_lines_of_before_have_no_checksum(folder: Folder) -> None:
    (folder.path / "history.jsonl").write_text('{"epoch": 1, "error": 100.0}\n')
    folder.log([record(2)])
    assert Folder.open(folder.path).history() == [record(1), record(2)]


@pytest.mark.slow
def test_at_whatever_byte_a_write_was_cut_off_the_whole_lines_are_there_and_the_next_go_on(folder: Folder) -> None:
    """Every length of the file: the records are those whose line break is still there, and a new one comes after."""
    file = folder.path / "history.jsonl"
    folder.log([record(1, name="ä"), record(2)])
    whole = file.read_bytes()
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        left = [record(1, name="ä"), record(2)][: whole[:size].count(b"\n")]
        again = Folder.open(folder.path)
        assert again.history() == left
        again.log([record(3)])
        again.log([record(4)])
        assert Folder.open(folder.path).history() == [*left, record(3), record(4)]


def test_a_last_line_that_is_no_json_is_left_out_and_replaced(folder: Folder) -> None:
    file = folder.path / "history.jsonl"
    for last in (b"\0\0\0\n", b"\xff\n", b"[1]\n", b"\n"):
        file.write_bytes(b'{"epoch": 1}\n' + last)
        again = Folder.open(folder.path)
        assert again.history() == [{"epoch": 1}]
        again.log([{"epoch": 2}])
        assert file.read_bytes().startswith(b'{"epoch": 1}\n{"epoch": 2, "crc32": ')
        assert Folder.open(folder.path).history() == [{"epoch": 1}, {"epoch": 2}]


def test_damage_before_the_last_line_is_an_error(folder: Folder) -> None:
    (folder.path / "history.jsonl").write_text('{"epoch": 1}\n{"epo\n{"epoch": 3}\n')
    for call in (folder.history, lambda: folder.log([record(4)])):
        with pytest.raises(FolderError, match=r"history.jsonl' is damaged: line 2 of 3 is no record"):
            call()
    assert (folder.path / "history.jsonl").read_text() == '{"epoch": 1}\n{"epo\n{"epoch": 3}\n'
    assert folder.history(damaged=True) == [{"epoch": 1}]
    folder.cut(3)
    assert Folder.open(folder.path).history() == [{"epoch": 1}]
    assert (folder.path / "history.jsonl.damaged").read_text() == '{"epoch": 1}\n{"epo\n{"epoch": 3}\n'


def test_cut_keeps_the_first_records_and_not_a_byte_more(folder: Folder) -> None:
    file = folder.path / "history.jsonl"
    folder.cut(0)  # of a run that noted nothing
    assert not file.exists()
    folder.log([record(e) for e in range(1, 6)])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines) + b'{"to')
    again = Folder.open(folder.path)
    again.cut(5)
    assert file.read_bytes() == b"".join(lines)
    again.cut(3)
    again.log([record(9)])
    assert Folder.open(folder.path).history() == [record(1), record(2), record(3), record(9)]
    again.cut(5)
    assert len(again.history()) == 4
    with pytest.raises(ValueError, match="`count` must not be negative"):
        again.cut(-1)
    again.cut(0)
    assert file.read_bytes() == b""


# ---- results.json


def test_results_say_that_a_run_is_finished(folder: Folder) -> None:
    for wrong in ([], [{}, {}]):
        with pytest.raises(ValueError, match="`results` must be one for each of 1 recipes"):
            folder.finish(wrong)
    assert folder.results() is None
    folder.finish([{"error_best": math.nan, "costs": {"macs": {"kept": 0.25}}}])
    expected = [{"error_best": None, "costs": {"macs": {"kept": 0.25}}}]
    assert json.loads((folder.path / "results.json").read_text()) == expected
    assert Folder.open(folder.path).results() == expected
    assert sorted(p.name for p in folder.path.iterdir()) == ["results.json", "run.json"]


@pytest.mark.parametrize("text", ["[{", "{}", "[]", "[{}, {}]"])
def test_damaged_results_are_refused(text: str, folder: Folder) -> None:
    (folder.path / "results.json").write_text(text)
    with pytest.raises(FolderError, match=r"results.json' is damaged"):
        folder.results()


# ---- when the disk says no


def test_a_full_disk_leaves_what_was_there(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.log([record(1), record(2)])
    folder.finish([{"error": 1}])
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for call in (lambda: folder.finish([{"error": 2}]), lambda: folder.cut(1)):
        with pytest.raises(FileError, match="cannot be written: the disk is full"):
            call()
    assert {p.name: p.read_bytes() for p in folder.path.iterdir()} == before
    with pytest.raises(FileError, match="the disk is full"):
        folder.log([record(3)])
    with pytest.raises(FileError, match="the disk is full"):
        Folder.create(folder.path.parent / "other", [DEMO])
    assert list((folder.path.parent / "other").iterdir()) == []


def test_a_history_that_was_torn_by_a_full_disk_goes_on(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same object: half a line reached the disk, then there is room again."""
    folder.log([record(1)])
    file = folder.path / "history.jsonl"

    def full(handle: int) -> None:
        file.write_bytes(file.read_bytes()[:-9])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError):
            folder.log([record(2)])
    folder.log([record(3)])
    assert folder.history() == [record(1), record(3)]


def test_an_interrupt_in_a_write_leaves_no_temporary_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(a: Any, b: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.finish([{}])
    assert [p.name for p in folder.path.iterdir()] == ["run.json"]


# ---- one process at a time


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    """The lock is one of the process: a second opening of the same folder stands for another one."""
    folder = Folder.create(tmp_path / "run", [get("demo")])
    before = sorted(path.name for path in folder.path.iterdir())
    with folder.locked():
        with pytest.raises(FolderError, match="is being trained by another process"), Folder.open(folder.path).locked():
            pass
        assert sorted(path.name for path in folder.path.iterdir()) == before
    with Folder.open(folder.path).locked():
        pass


def test_what_a_killed_save_left_goes_when_the_folder_is_trained_in_again_and_not_before(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between writing and renaming. Who only looks, or finds the folder in use, removes nothing."""

    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, folder.locked():
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", killed)  # the dead clear nothing away
        with pytest.raises(SystemExit):
            folder.finish([{}])
    (left,) = (p for p in folder.path.iterdir() if p.name.startswith("."))
    assert json.loads(left.read_text()) == [{}]
    checkpoints = [folder.checkpoints / f".step-000000001.safetensors.{'a' * 32}.tmp.safetensors"]
    folder.checkpoints.mkdir()
    for file in checkpoints:
        file.touch()
    others = [folder.path / f".page.html.{'b' * 32}.tmp.html", folder.path / ".run.json.mine.tmp"]
    for file in others:  # a page may be written while a run trains
        file.touch()
    again = Folder.open(folder.path)
    assert (again.history(), again.results()) == ([], None)
    assert left.exists()
    with again.locked():
        assert not left.exists()
        assert not any(file.exists() for file in checkpoints)
        left.touch()  # as if it were writing
        with pytest.raises(FolderError), Folder.open(folder.path).locked():
            pass
        assert left.exists()
    assert all(file.exists() for file in others)


def test_of_two_who_make_one_folder_at_once_one_does_and_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks while nothing is there, and is slow: it makes its `run.json` when the first has its own."""
    path = tmp_path / "run"
    own = os.open
    first: list[Folder] = []

    def slow(file: Any, *args: Any, **rest: Any) -> int:
        if not first:
            monkeypatch.setattr(os, "open", own)
            first.append(Folder.create(path, [get("demo")], lock=True))
        return own(file, *args, **rest)

    monkeypatch.setattr(os, "open", slow)
    with pytest.raises(FolderError, match=r"holds a run already: `run\.json` is there"):
        Folder.create(path, [get("demo").override(seed=7)], lock=True)
    assert [recipe.seed for recipe in Folder.open(path).recipes] == [0]
    assert [file.name for file in path.iterdir()] == ["run.json"]
    with pytest.raises(FolderError, match="being trained by another"), Folder.open(path).locked():
        pass
    with first[0].locked(), first[0].locked():
        pass
    with Folder.open(path).locked():
        pass


def test_a_file_system_without_links_makes_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    Folder.create(tmp_path / "run", [get("demo")])
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]
    assert Folder.open(tmp_path / "run").recipes == [get("demo")]


def test_who_waits_for_a_folder_that_is_removed_gets_none(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    own = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *args: ((folder.path / "run.json").unlink(), own(*args)))
    with pytest.raises(FolderError, match=r"is gone: another process has removed its `run.json`"), folder.locked():
        pass


def test_deep_nesting_is_damage(folder: Folder) -> None:
    (folder.path / "run.json").write_text("[" * 100_000)
    with pytest.raises(FolderError, match="is damaged"):
        Folder.open(folder.path)
