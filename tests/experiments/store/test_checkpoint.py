"""Checkpoints: what comes back is what was saved, to the bit, whatever dies, breaks or fills up on the way.

The oracle for a crash is enumeration: a process is killed at every single call that changes the disk, and at random
moments; what it leaves must be the newest complete checkpoint, of which every number is known.
"""

import errno
import json
import os
import random
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.papers import get
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.checkpoint import (
    CheckpointError,
    load,
    random_state,
    save,
    set_random_state,
    steps,
)
from support.processes import Server


def state(step: int, size: int = 100) -> dict[str, Any]:
    """A state that is a function of the step alone."""
    return {"step": step, "w": torch.arange(size, dtype=torch.float32) + step, "note": f"after {step}"}


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in types, shapes, dtypes and bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


# ---------------------------------------------------------------- what goes in comes out


def test_plain_data_and_tensors_of_every_kind_come_back_to_the_bit(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    numbers = torch.randn(3, 4)
    mixed: dict[str, Any] = {
        "dtypes": [numbers.to(dtype) for dtype in dtypes],
        "shapes": (torch.tensor(3.0), torch.zeros(0), torch.zeros(2, 0, 3), numbers.t(), numbers[:, ::2]),
        "bits": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "keys": {
            0: "int",
            "0": "str",
            None: "none",
            "a.b": 1,
            "a": {"b": 2},
            "": 3,
            "tensor": 4,
            "dict": [],
            "tuple": (),
        },
        "floats": [0.1, 1e-320, float("inf"), float("nan"), -0.0, 1 / 3],
        "plain": [None, True, False, 2**70, -1, 'quote " and ü\n', [], {}, ((1, (2.0,)), [3])],
    }
    expected = {**mixed, "shapes": tuple(t.contiguous() for t in mixed["shapes"])}
    found = load(save(tmp_path, mixed, step=7))
    assert same(found.state, expected)
    assert (found.step, found.messages) == (7, ())


@pytest.mark.slow
def test_network_gates_multipliers_and_optimizer_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def parts() -> tuple[l0.Gated, l0.Constraint, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        gated = l0.attach(net, (torch.randn(2, 4),))
        return (
            gated,
            l0.Constraint(l0.params, at_most=0.5, dual=l0.duals.NuPI(kp=1.0)),
            torch.optim.Adam(gated.parameters()),
        )

    def run(folder: Path | None) -> list[Any]:
        torch.manual_seed(3)
        gated, budget, adam = parts()
        for step in range(6):
            if step == 3 and folder is not None:
                everything = {"gated": gated.state_dict(), "budget": budget.state_dict(), "adam": adam.state_dict()}
                save(folder, everything | {"random": random_state()}, step=step)
                torch.manual_seed(99)
                gated, budget, adam = parts()
                found = load(folder).state
                for part, name in ((gated, "gated"), (budget, "budget"), (adam, "adam")):
                    part.load_state_dict(found[name])
                set_random_state(found["random"])
            adam.zero_grad()
            (gated(torch.randn(8, 4)).square().mean() + budget(gated)).backward()
            adam.step()
            budget.ascend()
        return [list(gated.state_dict().values()), budget.multiplier, budget.violation]

    whole = run(None)
    assert float(whole[1]) > 0
    assert same(run(tmp_path), whole)


def test_a_checkpoint_does_not_follow_the_live_tensors_or_the_file(tmp_path: Path) -> None:
    w = nn.Parameter(torch.ones(3))
    path = save(tmp_path, {"w": w, "again": w}, step=1)
    with torch.no_grad():
        w.zero_()
    found = load(tmp_path).state
    path.write_bytes(bytes(path.stat().st_size))
    assert found["w"].tolist() == found["again"].tolist() == [1, 1, 1]
    assert not found["w"].requires_grad


def test_any_tool_can_open_it_and_there_is_no_pickle_in_it(tmp_path: Path) -> None:
    path = save(tmp_path, {"net": OrderedDict(w=torch.ones(2)), "lr": 0.1}, step=1)
    assert same(load_file(path), {"0:net.w": torch.ones(2)})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"`state.a.b.1` must be a tensor or plain data, got object"),
        ({"a": np.ones(2)}, r"`state.a` must be a tensor or plain data, got ndarray"),
        ({"a": b"bytes"}, r"`state.a` must be a tensor or plain data, got bytes"),
        ({"a": {1.5: 0}}, r"`state.a` must have keys of str, int or None, got 1.5"),
        ({"a": torch.eye(2).to_sparse()}, r"`state.a` must be a plain dense tensor, got one that is torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, r"`state.a` must be a plain dense tensor, got .* on meta"),
        ([1], r"`state` must be a dictionary, got list"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_place(bad: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        save(tmp_path, bad, step=1)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for arguments in ({"step": -1}, {"step": 1.0}, {"step": True}, {"step": 1, "keep": 0}):
        with pytest.raises(ValueError, match=r"^`(step|keep)` must be an integer of at least [01], got"):
            save(tmp_path, {}, **arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the last k


def test_the_last_k_are_kept_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (1, 5, 9, 10, 10, 2_000_000_000):
        save(tmp_path / "b", state(step), step=step, keep=3)
    assert steps(tmp_path / "b") == [9, 10, 2_000_000_000]
    assert load(tmp_path / "b").step == 2_000_000_000
    assert steps(tmp_path / "nowhere") == []


def test_what_is_just_written_is_never_removed_and_nothing_foreign_is(tmp_path: Path) -> None:
    for step in (1, 2, 9):
        save(tmp_path, state(step), step=step)
    (tmp_path / "step-1.safetensors").touch()
    (tmp_path / "history.jsonl").touch()
    save(tmp_path, state(3), step=3, keep=1)  # behind 9, as after a resume from 2
    assert steps(tmp_path) == [3, 9]
    assert (tmp_path / "step-1.safetensors").exists()
    assert (tmp_path / "history.jsonl").exists()


def test_temporary_files_of_killed_writes_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".step-000000001.safetensors.{'0' * 32}.tmp").write_bytes(b"half")  # by an earlier version
    (tmp_path / f".step-000000001.safetensors.{'0' * 32}.tmp.safetensors").write_bytes(b"half")
    (tmp_path / ".hidden").touch()
    save(tmp_path, state(2), step=2)
    assert temporary(tmp_path) == [tmp_path / ".hidden"]


# ---------------------------------------------------------------- damage


def two(folder: Path) -> tuple[Path, Path]:
    return save(folder, state(1), step=1), save(folder, state(2), step=2)


@pytest.mark.parametrize("left", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_newest_gives_way_to_the_one_before_and_says_so(left: float, tmp_path: Path) -> None:
    older, newest = two(tmp_path)
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(left * len(whole))])
    found = load(tmp_path)
    assert same(found.state, state(1))
    assert found.path == older
    (message,) = found.messages
    assert message.startswith(f"{newest.name} is damaged (")
    assert message.endswith(f"and is passed over for {older.name}")


@pytest.mark.slow
def test_no_changed_byte_ever_gives_another_state(tmp_path: Path) -> None:
    """Every byte of the header and of the tensors, one at a time."""
    recipe = [{"lr": 0.1}]
    save(tmp_path, {"w": torch.tensor([1.0, 2.0]), "n": 1}, step=1, recipe_digest="d", recipes=recipe)
    newest = save(tmp_path, {"w": torch.tensor([3.0, 4.0]), "n": 2}, step=2, recipe_digest="d", recipes=recipe)
    before, whole = load(tmp_path / "step-000000001.safetensors", "d").state, newest.read_bytes()
    after, outcomes = load(tmp_path, "d").state, {"older": 0, "the same": 0, "refused": 0}
    for i in range(len(whole)):
        for flip in (0x01, 0x80):
            newest.write_bytes(whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :])
            try:
                found = load(tmp_path, "d")
            except CheckpointError:
                outcomes["refused"] += 1  # the version of the format
                continue
            assert same(found.state, before if found.messages else after), i
            outcomes["older" if found.messages else "the same"] += 1
    # The versions of ellzero and torch are notes: they may change. All else is caught.
    notes = len("0.1.0") + len(torch.__version__) + len('"ellzero":"","torch":""')
    assert outcomes["refused"] <= 2
    assert outcomes["the same"] <= 2 * notes
    assert outcomes["older"] > 500


def test_where_none_can_be_read_each_is_named(tmp_path: Path) -> None:
    for path in two(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"can be read: step-000000002.* is damaged .*; step-000000001.* is damaged"
    ):
        load(tmp_path)


def test_where_there_is_none_or_a_foreign_file_it_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.safetensors"):
        with pytest.raises(
            CheckpointError, match=r"^`path` must be a checkpoint or a folder with one, and there is none"
        ):
            load(path)
    save_file({"w": torch.ones(1)}, tmp_path / "step-000000001.safetensors")
    with pytest.raises(CheckpointError, match=r"its header says format None, not 'ellzero.checkpoint'"):
        load(tmp_path)


def test_a_later_format_is_refused_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 2)
        save(tmp_path, state(2), step=2)
    with pytest.raises(CheckpointError, match=r"has version 2 of the format, .* and this one reads version 1"):
        load(tmp_path)


# ---------------------------------------------------------------- another recipe


def test_a_checkpoint_of_another_recipe_is_refused_with_what_differs(tmp_path: Path) -> None:
    ours = get("gallego-mlp-layers")
    theirs = ours.override(name="other", lr=1e-3, at_most={"fc1": 0.3, "fc2": 0.5}, shrink_at=(3,))
    path = save(tmp_path, state(1), step=1, recipe_digest=theirs.digest(), recipes=[theirs.to_dict()])
    assert load(tmp_path, theirs.override(name="renamed").digest()).step == 1
    assert load(tmp_path).step == 1
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, ours.digest(), [ours.to_dict()])
    assert str(caught.value) == (
        f"{str(path)!r} is a checkpoint of another recipe: `at_most` is {{fc1: 0.3, fc2: 0.5}} there and "
        "{fc1: 0.3, fc2: 0.3, fc3: 0.3} here; `lr` is 0.001 there and 0.0007 here; `shrink_at` is [3] there "
        "and [] here. Resume with its own recipe, or train in another folder"
    )
    with pytest.raises(CheckpointError, match=r"another recipe: it does not say in what it differs\."):
        load(tmp_path, ours.digest())


def test_several_recipes_in_one_stack_are_told_apart_too(tmp_path: Path) -> None:
    stack = [get("gallego-mlp").override(seed=seed).to_dict() for seed in (0, 1)]
    save(tmp_path, state(1), step=1, recipe_digest="both", recipes=stack)
    with pytest.raises(CheckpointError, match=r"another recipe: `1.seed` is 1 there and 5 here\."):
        load(tmp_path, "other", [stack[0], {**stack[1], "seed": 5}])


def test_a_foreign_newest_is_not_passed_over_for_an_older_one_of_ours(tmp_path: Path) -> None:
    save(tmp_path, state(1), step=1, recipe_digest="ours")
    save(tmp_path, state(2), step=2, recipe_digest="theirs")
    with pytest.raises(CheckpointError, match=r"step-000000002.* is a checkpoint of another recipe"):
        load(tmp_path, "ours")


# ---------------------------------------------------------------- disks


def failing(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "cannot be written: the disk is full; a checkpoint needs 0.0 MB; the checkpoint of step 1 is"),
        (errno.EDQUOT, "cannot be written: the disk is full; "),
        (errno.EROFS, "cannot be written: Read-only file system; .*; the checkpoint of step 1 is still there$"),
        (errno.EIO, "cannot be written: Input/output error; "),
    ],
)
def test_a_disk_that_fails_leaves_the_checkpoint_before(
    call: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state(1), step=1, keep=1)
    with monkeypatch.context() as patch:
        failing(patch, call, code)
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path, state(2), step=2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.safetensors"]
    assert same(load(tmp_path).state, state(1))
    save(tmp_path, state(2), step=2, keep=1)  # and when there is room again, it goes on
    assert same(load(tmp_path).state, state(2))


def test_a_disk_that_fills_up_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """Truly: the system cuts the write off at 64 KiB, as a full disk does."""
    save(tmp_path, state(1), step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large; .*; the checkpoint of step 1 is still there"):
            save(tmp_path, state(2, size=100_000), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.safetensors"]
    assert same(load(tmp_path).state, state(1))


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[:777]))
        save(tmp_path, state(1, size=5000), step=1)
    assert same(load(tmp_path).state, state(1, size=5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    save(tmp_path, state(1), step=1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: Permission denied; .* step 1"):
            save(tmp_path, state(2), step=2)
        assert same(load(tmp_path).state, state(1))
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(CheckpointError, match=r"cannot be written: .*; there is no older one"):
            save(folder, state(1), step=1)


def test_ctrl_c_in_the_middle_of_a_write_leaves_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    save(tmp_path, state(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state(2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.safetensors"]


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut needs, and no killed process can show."""
    save(tmp_path, state(1), step=1)
    calls: list[str] = []

    def watched(name: str, describe: Callable[..., str]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {describe(*args)}")
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def kind(handle: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"

    watched("write", lambda handle, _: kind(handle))
    watched("fsync", kind)
    watched("replace", lambda _, target: Path(target).name)
    watched("unlink", lambda path: Path(path).name)
    save(tmp_path, state(2), step=2, keep=1)
    one, other = "step-000000001.safetensors", "step-000000002.safetensors"
    assert calls == ["write file", "fsync file", f"replace {other}", "fsync folder", f"unlink {one}"]


# ---------------------------------------------------------------- SIGKILL

# Forks children that write checkpoints and die: at the n-th call that changes the disk, or when the parent pulls the
# trigger. Children are forked, not started, because importing torch takes seconds. After each death the folder is read.
CRASHES = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from ellzero.experiments.store import checkpoint
from ellzero.out import files

def state(step, size):
    return {"step": step, "w": torch.arange(size, dtype=torch.float32) + step}

def child(folder, first, size, fatal, after):
    countdown = [fatal]
    def deadly(name):
        original = getattr(os, name)
        def call(*args, **kwargs):
            countdown[0] -= 1
            if countdown[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return original(*args, **kwargs)
            finally:
                if countdown[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        setattr(os, name, call)
    for name in ("open", "write", "fsync", "replace", "unlink"):
        deadly(name)
    try:
        for step in range(first, first + 1000):  # an end, should the parent be gone
            checkpoint.save(folder, state(step, size), step=step, keep=2)
    finally:
        os._exit(1)

def examine(folder, size):
    names = sorted(os.listdir(folder))
    found = checkpoint.load(folder)
    good = torch.equal(found.state["w"], state(found.step, size)["w"]) and found.state["step"] == found.step
    return {"step": found.step, "good": good, "messages": found.messages, "names": names}

def crash(folder, size, fatal=0, after=False, delay=None):
    first = (checkpoint.steps(folder) or [-1])[-1] + 1
    pid = os.fork()
    if pid == 0:
        child(folder, first, size, fatal, after)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return {"signal": os.WTERMSIG(status), "first": first, **examine(folder, size)}

files._CHUNK = 1 << 12
root, size = Path(sys.argv[1]), 3000
points = []
for fatal in range(1, 33):
    for after in (False, True):
        folder = root / f"point-{fatal}-{after}"
        checkpoint.save(folder, state(0, size), step=0, keep=2)
        points.append({"fatal": fatal, "after": after, **crash(folder, size, fatal, after)})
random.seed(int(sys.argv[2]))
moments, folder, size = [], root / "moments", 2_000_000
checkpoint.save(folder, state(0, size), step=0, keep=2)
for _ in range(10):
    moments.append(crash(folder, size, delay=random.uniform(0, 0.15)))
print(json.dumps({"points": points, "moments": moments}))
"""


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory, server: Server) -> dict[str, list[dict[str, Any]]]:
    script = tmp_path_factory.mktemp("script") / "crashes.py"
    script.write_text(CRASHES)
    arguments = [str(tmp_path_factory.mktemp("crashes")), str(random.randrange(10**6))]
    done = server.run("script", file=str(script), arguments=arguments)
    result: dict[str, list[dict[str, Any]]] = json.loads(done.said.splitlines()[-1])
    return result


@pytest.mark.slow
def test_killed_at_any_call_the_newest_name_is_a_complete_checkpoint(
    crashes: dict[str, list[dict[str, Any]]],
) -> None:
    """32 calls are more than three saves; a save of 12 kB has 4 writes here, so 9 calls or, with one to remove, 10."""
    for crash in crashes["points"]:
        assert (crash["signal"], crash["good"], crash["messages"]) == (9, True, []), crash
        named = [name for name in crash["names"] if not name.startswith(".")]
        assert 1 <= len(named) <= 3, crash  # two, and a third before the oldest is removed
        assert named[-1] == f"step-{crash['step']:09d}.safetensors"
        assert len(crash["names"]) - len(named) <= 1  # one unfinished file at most
    reached = [crash["step"] for crash in crashes["points"]]
    assert reached == sorted(reached)  # a later death never leaves less
    assert reached[0] == 0
    assert reached[-1] >= 3
    unfinished = [crash for crash in crashes["points"] if any(name.startswith(".") for name in crash["names"])]
    assert len(unfinished) > 20  # many of them died inside the write


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_from_the_last_complete_one(
    crashes: dict[str, list[dict[str, Any]]],
) -> None:
    before = 0
    for crash in crashes["moments"]:
        assert (crash["signal"], crash["good"], crash["messages"]) == (9, True, []), crash
        assert crash["first"] == before + 1
        assert crash["step"] >= before
        before = crash["step"]


# ---------------------------------------------------------------- random generators


def draws() -> list[Any]:
    numbers = np.random.normal(size=3).tolist(), np.random.randint(10**9, size=3).tolist()  # noqa: NPY002
    return [random.random(), random.gauss(0, 1), *numbers, torch.rand(3), torch.randn(5)]


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    draws()  # an odd number of normal draws: half of a pair is in the state
    save(tmp_path, {"random": random_state()}, step=1)
    expected = draws()
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert not same(draws(), expected)
    set_random_state(load(tmp_path).state["random"])
    assert same(draws(), expected)


def test_the_state_of_the_other_kind_of_device_is_refused() -> None:
    here = random_state("cpu")
    with pytest.raises(ValueError, match=r"^`state` must be of the kind of device .* got one of the CPU for a GPU$"):
        set_random_state(here, "cuda")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"got one of a GPU for the CPU$"):
        set_random_state({**here, "cuda": here["torch"]}, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_generator_of_a_gpu_goes_on_where_it_was(tmp_path: Path) -> None:
    save(tmp_path, {"random": random_state("cuda")}, step=1)
    expected = torch.rand(3, device="cuda")
    torch.rand(7, device="cuda")
    set_random_state(load(tmp_path).state["random"], "cuda")
    assert torch.equal(torch.rand(3, device="cuda"), expected)
