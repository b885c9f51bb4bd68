"""The one writer: all of a file or nothing, whatever fails on the way."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from ellzero.out import files
from ellzero.out.files import FileError, remove_leftovers, replacing, write_bytes, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_utf_8_with_its_own_line_ends_and_everybody_may_read_it(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "ü\n\r\n")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xbc\n\r\n"
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_the_temporary_file_has_the_ending_of_the_file(tmp_path: Path) -> None:
    """Exporters choose a format by it."""
    with replacing(tmp_path / "a.onnx") as unfinished:
        assert unfinished.suffix == ".onnx"
        unfinished.touch()
        assert not (tmp_path / "a.onnx").exists()
    assert names(tmp_path) == ["a.onnx"]


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_whatever_is_raised_inside_the_old_file_stays_and_no_other(failure: BaseException, tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")

    def write() -> None:
        with replacing(tmp_path / "a") as unfinished:
            unfinished.write_bytes(b"new")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("code", "why"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "Input/out")]
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_what_the_disk_says_is_told_with_the_name_of_the_file(
    call: str, code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(FileError, match=rf"^'.*a\.txt' cannot be written: {why}"):
            write_text(tmp_path / "a.txt", "text")
    assert names(tmp_path) == []
    with pytest.raises(FileError, match=r"^'.*a' cannot be written: No such file or directory$"):
        write_text(tmp_path / "absent" / "a", "text")


def test_leftovers_of_the_same_file_go_when_nobody_can_be_writing_them_any_more(tmp_path: Path) -> None:
    old, new, other = (f".a.txt.{c * 32}.tmp.txt" for c in "abc")
    foreign = f".b.txt.{'d' * 32}.tmp.txt"
    for name in (old, new, foreign):
        (tmp_path / name).touch()
    long_ago = time.time() - 2 * files._ABANDONED
    for name in (old, foreign):
        os.utime(tmp_path / name, (long_ago, long_ago))
    write_text(tmp_path / "a.txt", "text")
    assert names(tmp_path) == sorted([new, foreign, "a.txt"])
    (tmp_path / other).touch()
    remove_leftovers(tmp_path, "a.*")
    assert names(tmp_path) == sorted([foreign, "a.txt"])
    remove_leftovers(tmp_path / "absent", "*")
