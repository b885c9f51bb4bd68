"""A network and data of one's own on the command line: each command, a killed run, a sweep, and mistakes on purpose."""

import json
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ellzero as l0
from ellzero.cli import main
from ellzero.experiments import networks
from ellzero.experiments.data import OwnError, Samples, datasets, load
from ellzero.experiments.data.importing import find
from ellzero.experiments.papers import unnamed
from ellzero.experiments.store.checkpoint import steps
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train.building import build
from ellzero.experiments.train.loop import restore, train
from support.own import CODE, module
from support.processes import Server, until
from support.runs import assert_same_end

Run = Callable[..., tuple[int, str, str]]
ASKED = ("--cost", "macs", "--at-most", "0.3", "--epochs", "4", "--batch", "20")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the working folder."""
    monkeypatch.chdir(tmp_path)
    with module(tmp_path, "mine") as name:
        yield name


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        try:
            code = main(args)
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def error_of(network: nn.Module, dataset: Samples) -> float:
    """By hand, on the same samples as those that are tested."""
    with torch.no_grad():
        wrong = sum(int((network.eval()(x).argmax(1) != y).sum()) for x, y in dataset.tests(20))
    return 100 * wrong / dataset.sizes[1]


@pytest.mark.slow
def test_killed_resumed_and_handed_over(own: str, tmp_path: Path, run: Run, server: Server) -> None:
    asked = ["train", "--network", f"{own}:make", "--data", f"{own}:load", *ASKED, "--quiet"]
    whole = tmp_path / "whole"
    assert run(*asked, "--json", "--out", str(whole))[0] == 0

    call = [*asked, "--out", "killed", "--save-seconds", "0", "--workers", "1"]
    child = server.start("program", calls=[call], where=str(tmp_path), threads=torch.get_num_threads())
    killed = tmp_path / "killed"
    until(lambda: any(s >= 9 for s in steps(killed / "checkpoints")))  # after they settled
    child.kill()
    assert child.wait() == -signal.SIGKILL, child.said
    assert steps(killed / "checkpoints")[-1] % 6, "in the middle of an epoch"
    until(lambda: run("train", "--resume", str(killed), "--quiet")[0] == 0)  # its worker may hold the lock for a moment
    assert_same_end(Folder.open(killed), Folder.open(whole), unseeded=True)

    (result,) = Folder.open(whole).results() or []
    assert 0.2 < result["costs"]["macs"]["kept"] <= 0.3
    dataset = load(f"{own}:load")
    assert isinstance(dataset, Samples)
    small = l0.load(find(f"{own}:make")(), whole / "compact.safetensors")
    code, out, _ = run("evaluate", str(whole), "--json")
    (told,) = json.loads(out)["networks"]
    assert (code, told["error_compact"]) == (0, pytest.approx(error_of(small, dataset)))
    assert told["error"] == pytest.approx(told["error_compact"], abs=2)
    assert told["kept"]["macs"] == result["costs"]["macs"]["kept"]
    x, trained = dataset.example(4), small.eval()
    assert run("compact", str(whole), "--to", "small.pt2", "small.safetensors")[0] == 0
    again = l0.load(find(f"{own}:make")(), tmp_path / "small.safetensors").eval()
    for other in (torch.export.load("small.pt2").module(), again):
        torch.testing.assert_close(other(x), trained(x))
    code, out, _ = run("report", str(whole), "--json")
    assert (code, json.loads(out)["params"]["kept"]) == (0, sum(p.numel() for p in small.parameters()))
    assert run("report", str(whole))[0] == 0
    assert f"{own}:make" in (whole / "page.html").read_text(encoding="utf-8")


def test_workers_make_the_same_samples(own: str) -> None:
    order = torch.arange(120).view(6, 20)
    alone, helped = (load(f"{own}:load", workers=count) for count in (0, 2))
    assert isinstance(alone, Samples)
    assert isinstance(helped, Samples)
    before = torch.get_rng_state()
    ours, theirs = (list(d.batches(order, (3, 1, 0), begin=2)) for d in (alone, helped))
    assert torch.equal(before, torch.get_rng_state())
    whole = list(alone.batches(order, (3, 1, 0)))[2:]
    for (a, _), (b, _), (c, _) in zip(ours, theirs, whole, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.equal(ours[0][0], next(alone.batches(order, (3, 2, 0), begin=2))[0])  # another epoch
    assert not torch.equal(ours[0][0], dataset_of(own, order[2]))


def test_workers_of_an_epoch_that_is_not_at_its_end_go_with_the_process(own: str) -> None:
    helped = load(f"{own}:load", workers=1)
    assert isinstance(helped, Samples)
    before = set(multiprocessing.active_children())
    stream = helped.batches(torch.arange(120).view(6, 20), (3, 1, 0))
    next(stream)
    workers = set(multiprocessing.active_children()) - before  # those of other tests come to their own end
    assert workers
    datasets._RUNNING.clear()  # as at the exit
    assert not workers & set(multiprocessing.active_children())


def dataset_of(own: str, index: torch.Tensor) -> torch.Tensor:
    """The images before they are moved at random."""
    images: torch.Tensor = find(f"{own}:drawn")(120, 0)[0][index]
    return images


@pytest.mark.slow
def test_gates_of_a_long_run_learn_as_long_as_those_of_a_budget(
    own: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ellzero.out.bounding.pacing.ENOUGH", 6)  # so that 24 steps are a long run: an epoch has six
    asked = ("--network", f"{own}:make", "--data", f"{own}:load", *ASKED, "--quiet")
    assert run("train", *asked, "--out", "long")[0] == 0
    assert [r.settle_at for r in Folder.open("long").recipes] == [1]
    assert l0.Budget(l0.attach(find(f"{own}:make")(), torch.randn(2, 1, 6, 6)), macs=0.3, steps=24).settles == 6
    assert run("train", *asked, "--settle-at", "3", "--out", "later")[0] == 0
    assert [r.settle_at for r in Folder.open("later").recipes] == [3]
    assert run("sweep", *asked, "--seeds", "2", "--out", "swept")[0] == 0
    swept = {r.settle_at for run in Path("swept").rglob("run.json") for r in Folder.open(run.parent).recipes}
    assert swept == {1}
    assert run("sweep", *asked, "--seeds", "2", "--out", "swept", "--resume")[0] == 0  # it is the same sweep


@pytest.mark.slow
def test_a_recipe_of_nothing_else_is_a_budgets(own: str) -> None:
    r = unnamed({"network": f"{own}:make", "data": f"{own}:tensors", "at_most": 0.3, "epochs": 10, "batch": 20})
    assert (r.name, r.init, r.on, r.gate_lr, r.cost) == ("mine-make", "own", "kept", "auto", "macs")
    trainer = train([r], load(r.data))
    rates = {group["rate"] for group in trainer.optimizer.param_groups}
    gated: Any = trainer.network(0)
    budget = l0.Budget(l0.attach(find(f"{own}:make")(), torch.randn(2, 1, 6, 6)), macs=0.3, steps=10 * 6)
    assert rates == {1e-3, budget.gate_lr}
    assert (r.settle_at or 0) * 6 == budget.settles
    assert l0.macs(gated, kept=True) <= 0.3 * l0.dense(l0.macs, gated)
    cosine = [0.5 * (1 + np.cos(np.pi * e / 10)) for e in range(10)]
    assert [trainer.policy.rates(e)[0] for e in range(10)] == pytest.approx(cosine)
    # Its own weights are those that it begins with: nobody draws them anew.
    torch.manual_seed(0)
    fresh = find(f"{own}:make")()
    begun: Any = build(r, load(r.data), torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), begun.model.parameters(), strict=True))


@pytest.mark.slow
def test_what_cannot_be_sliced_alive_is_masked_to_the_end(own: str, tmp_path: Path, run: Run) -> None:
    grouped = CODE.replace("nn.Conv2d(8, 12, 3, padding=1)", "nn.Conv2d(8, 12, 3, padding=1, groups=4)")
    with module(tmp_path, own, grouped):
        code, _, err = run("train", "--network", f"{own}:make", "--data", f"{own}:tensors", *ASKED, "--out", "r")
        assert code == 0, err
        assert "settled and masked, not shrunk" in err
        assert "a grouped convolution" in err
        folder = Folder.open("r")
        (result,) = folder.results() or []
        assert result["costs"]["macs"]["kept"] <= 0.3
        # Nothing was closed after the gates settled: what trained on is what is handed over.
        assert len({json.dumps(h["open"]) for h in folder.history() if h["tuning"]}) == 1
        network: Any = restore(folder).network(0)
        small = l0.load(find(f"{own}:make")(), Path("r/compact.safetensors")).eval()
        x = find(f"{own}:drawn")(9, 5)[0]
        torch.testing.assert_close(small(x), network(x))
        assert sum(p.numel() for p in small.parameters()) == l0.params(network, kept=True)


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_refused_in_a_line(own: str, tmp_path: Path, run: Run) -> None:
    with module(
        tmp_path,
        own,
        CODE.replace("        return self.fc(", "        if h.sum() > 0: h = 2 * h\n        return self.fc("),
    ):
        code, _, err = run("train", "--network", f"{own}:make", "--data", f"{own}:tensors", *ASKED)
    assert (code, err.count("\n")) == (2, 1)
    assert "goes by what the data are" in err


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
def test_a_sweep_over_two_targets_and_a_file(own: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "few.toml").write_text(
        f'network = "{own}:make"\ndata = "{own}:tensors"\nepochs = 2\nbatch = 20\nat_most = 0.5'
    )
    code, out, err = run("sweep", "few.toml", "--at-most", "0.3,0.6", "--out", "many", "--json")
    assert code == 0, err
    assert "code of your own trains one run at a time" in err
    points = json.loads(out)["points"]
    kept = [point["mean"]["kept"]["macs"] for point in points]
    assert kept[0] <= 0.3 < kept[1] <= 0.6
    again = ["sweep", "--network", f"{own}:make", "--data", f"{own}:tensors", "--epochs", "2", "--batch", "20"]
    code, other, err = run(*again, "--name", "few", "--at-most", "0.3,0.6", "--out", "same", "--json", "--quiet")
    assert code == 0, err
    same = json.loads(other)["points"]
    assert [p["mean"] for p in same] == [p["mean"] for p in points]
    assert run("report", "many", "--out", "report.html")[0] == 0
    assert run("sweep", "--resume", "--out", "many", "--quiet")[0] == 0


@pytest.mark.slow
def test_another_loss_and_metric(own: str, run: Run) -> None:
    what = ["--network", f"{own}:make_one", "--data", f"{own}:numbers", "--loss", f"{own}:squared"]
    code, out, err = run("train", *what, "--metric", f"{own}:largest", *ASKED, "--out", "reg")
    assert code == 0, err
    assert "largest 0." in err
    small = l0.load(find(f"{own}:make_one")(), Path("reg/compact.safetensors")).eval()
    _, (x, y) = find(f"{own}:numbers")()
    with torch.no_grad():
        by_hand = find(f"{own}:largest")(small(x), y)
    assert f"Test largest of the compact network: {by_hand:.5g} (" in out
    assert Folder.open("reg").history()[-1]["error"] == pytest.approx(by_hand, rel=1e-4)
    page = Path("reg/page.html").read_text(encoding="utf-8")
    assert "Test largest" in page
    assert "Test error" not in page
    code, out, err = run("train", *what, *ASKED, "--out", "plain", "--json", "--quiet")  # the loss is the metric then
    small = l0.load(find(f"{own}:make_one")(), Path("plain/compact.safetensors")).eval()
    squared = find(f"{own}:squared")(small(x), y).item()
    assert json.loads(out)["compact"]["error"] == pytest.approx(squared, rel=1e-5)


@pytest.mark.slow
def test_files_and_folders(own: str, tmp_path: Path, run: Run) -> None:
    (x, y), (x2, y2) = (find(f"{own}:drawn")(n, s) for n, s in ((60, 0), (30, 1)))
    pixels = [((t.clamp(-3, 5) + 3) * 31).to(torch.uint8) for t in (x, x2)]
    last = [t.permute(0, 2, 3, 1).numpy() for t in pixels]
    np.savez("bars.npz", x_train=last[0], y_train=y[:, None].int(), x_test=last[1], y_test=y2[:, None].int())
    for kind, images, labels in (("train", pixels[0], y), ("val", pixels[1], y2)):
        for k, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = tmp_path / "bars" / kind / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(place / f"{k:03d}.png")
    file, folder = load("bars.npz"), load("./bars")
    assert file.record()["shape"] == folder.record()["shape"] == [1, 6, 6]
    assert (file.sizes, folder.sizes) == ((60, 30), (60, 30))
    assert folder.classes == ("class0", "class1", "class2")
    assert file.mean == pytest.approx([float((pixels[0] / 255).mean())])
    assert file.std == pytest.approx([float((pixels[0].double() / 255).std(correction=0))])
    by_label = [torch.cat([t[labels == k] for k in range(3)]) for t, labels in zip(pixels, (y, y2), strict=True)]
    assert torch.equal(folder.train_x, by_label[0])  # type: ignore[attr-defined]
    assert torch.equal(file.train_x, pixels[0])  # type: ignore[attr-defined]
    for data in ("bars.npz", "bars/"):
        code, out, err = run(
            "train", "--network", f"{own}:make", "--data", data, *ASKED, "--out", "r", "--quiet", "--json"
        )
        assert code == 0, err
        small = l0.load(find(f"{own}:make")(), Path("r/compact.safetensors")).eval()
        wrong = small((pixels[1] / 255 - file.mean[0]) / file.std[0]).argmax(1) != y2
        assert json.loads(out)["compact"]["error"] == pytest.approx(100 * wrong.float().mean().item())
        assert run("compact", "r")[0] == 0
        shutil.rmtree("r")
    shutil.rmtree("bars/val")
    Path("bars/train").rename("all")
    with pytest.warns(UserWarning, match="one of 5 images of each class, 1[0-2] in all, drawn with seed 0"):
        split = load("./all")
    assert sum(split.sizes) == 60
    with pytest.warns(UserWarning, match="seed 0"):
        assert load("./all").checksum() == split.checksum()


def test_a_network_that_is_shared_is_refused(own: str, tmp_path: Path) -> None:
    with module(tmp_path, own, "from torch import nn\nready = nn.Linear(2, 2)\ndef shared(): return ready\n"):
        make = networks.find(f"{own}:shared").make
        assert make(3) is find(f"{own}:ready")
        with pytest.raises(OwnError, match="`mine:shared` must make a new network each time, got the same one again"):
            make(3)
        with pytest.raises(OwnError, match="`mine:ready` must be a function or class that makes a new network each"):
            networks.find(f"{own}:ready").make(3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_what_changes_is_told_or_refused(own: str, tmp_path: Path, run: Run) -> None:
    asked = ("--network", f"{own}:make", "--data", f"{own}:load", *ASKED, "--quiet")
    assert run("train", *asked, "--out", "r")[0] == 0
    with module(tmp_path, own, CODE + "\n# more\n"):
        code, _, err = run("evaluate", "r")
        assert code == 0
        assert f"the file of `{own}:make`" in err
        assert "has changed since the run was begun" in err
    with module(tmp_path, own, CODE.replace("+ 2.0", "+ 1.9").replace("+= 2.0", "+= 1.9")):
        assert "the data `mine:load` have other contents" in run("evaluate", "r")[2]
    with module(tmp_path, own, CODE.replace("Bars(120, 0)", "Bars(100, 0)")):
        code, _, err = run("evaluate", "r")
        assert code == 2
        assert "`mine:load` are not those that the run was begun with: `train` was 120 and is 100\n" in err
    wider = {"Conv2d(1, 8,": "Conv2d(1, 9,", "Norm2d(8)": "Norm2d(9)", "Conv2d(8,": "Conv2d(9,"}
    as_many = {**wider, "12, 3, p": "11, 3, p", "Norm2d(12)": "Norm2d(11)", "Linear(12,": "Linear(11,"}  # units in all
    for changes, why in (
        (wider, "`gates.a.log_alpha` has shape (8,) there, and shape (9,) in the network here"),
        (as_many, "`gates.a.log_alpha` has shape (8,) there, and shape (9,) in the network here"),
        ({"outputs=3": "outputs=4"}, "it is of a network with 24 units in all, and the one here has 25"),
        ({"nn.Dropout(0.1)": "nn.Linear(12, 12)"}, "has no place there, and shape (12,) in the network here"),
    ):
        changed = CODE
        for before, after in changes.items():
            changed = changed.replace(before, after)
        with module(tmp_path, own, changed):
            for command in (("evaluate", "r"), ("train", "--resume", "r")):
                code, _, err = run(*command)
                assert code == 1
                assert "safetensors' cannot be taken up here: " in err
                assert why in err
    (tmp_path / "mine.py").unlink()
    sys.modules.pop("mine", None)
    for command in (("evaluate", "r"), ("compact", "r"), ("train", "--resume", "r")):
        code, _, err = run(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert f"packages: the run in 'r' was begun in {str(tmp_path)!r} and needs it" in err
    code, _, err = run("report", "r")
    assert code == 0
    assert "the page shows the history alone" in err


MORE = """
def seven(): return 7
def fails(): raise KeyError("nothing here")
def three(): return drawn(9, 0), drawn(9, 0), drawn(9, 0)
def empty(): return (torch.zeros(0, 1, 6, 6), torch.zeros(0).long()), drawn(9, 0)
def none(): return [], drawn(60, 1)
def uneven(): return (torch.zeros(9, 1, 6, 6), torch.zeros(8).long()), drawn(9, 0)
def outside(): return (drawn(60, 0)[0], drawn(60, 0)[1] + 1), drawn(60, 1)
def late(): return [(x, 9 if k == 50 else int(y)) for k, (x, y) in enumerate(zip(*drawn(60, 0)))], [*zip(*drawn(60, 1))]
def flat(): return (torch.zeros(60, 5), torch.zeros(60).long()), (torch.zeros(60, 5), torch.zeros(60).long())
def other(): return drawn(60, 0), (torch.zeros(60, 1, 7, 7), torch.zeros(60).long())
def real(): return tuple((x, y.float()) for x, y in tensors())
def stream(): return iter([1]), iter([2])
def alone(): return [x for x, _ in zip(*drawn(60, 0))], [*zip(*drawn(60, 1))]
def broken(): return [(torch.zeros(1, 6, 6), 1)] * 10 + [None] * 50, [*zip(*drawn(60, 1))]
def nan(): return (torch.full((60, 1, 6, 6), float("nan")), drawn(60, 0)[1]), drawn(60, 1)
def row(output, target): return (output - output).sum(1)
def item(output, target): return 1.0
def word(output, target): return "good"
class Two(Net):
    def forward(self, x): return super().forward(x), x
"""
MISTAKES = {
    "there is no module `nope` here": ("nope:make", "mine:load"),
    "no module `mine.py` here or among the installed packages: write `mine:make`": ("mine.py:make", "mine:load"),
    "module `mine` has no `mke`; it has": ("mine:mke", "mine:load"),
    "`mine:seven` must give an nn.Module, got int": ("mine:seven", "mine:load"),
    "calling `mine:fails` without arguments failed: KeyError: 'nothing here' (": ("mine:fails", "mine:load"),
    "`mine:three` must give two data sets, one to train and one to test on, got 3 things": ("mine:make", "mine:three"),
    "`mine:empty` must have a label for each input to train on, got 0 inputs": ("mine:make", "mine:empty"),
    "`mine:none` must give samples to train on, got none": ("mine:make", "mine:none"),
    "`mine:uneven` must have a label for each input to train on, got 9 inputs, 8 labels": ("mine:make", "mine:uneven"),
    "`mine:outside` must be from 0 to 2, for the 3 outputs of the network, got 3": ("mine:make", "mine:outside"),
    "labels of `mine:late` must be from 0 to 2, for the 3 outputs of the network, got 9": ("mine:make", "mine:late"),
    "calling the network `mine:make` with inputs of `mine:flat`, float32 (2, 5), failed: ": ("mine:make", "mine:flat"),
    "inputs of `mine:other` must be alike to train and to test on, got float32 (1, 6, 6)": ("mine:make", "mine:other"),
    "labels that are whole numbers (batch,), got float32 (2, 3) and float32 (2,): `--loss": ("mine:make", "mine:real"),
    "`mine:stream` must give data sets with `__len__` and `__getitem__`": ("mine:make", "mine:stream"),
    "a sample of `mine:alone` must be a pair of a tensor and its label": ("mine:make", "mine:alone"),
    "of `mine:broken` failed: TypeError": ("mine:make", "mine:broken"),
    "x_train of `mine:nan` must be finite numbers": ("mine:make", "mine:nan"),
    "`mine:Two` must give one tensor with a row for each of 2 inputs, got tuple": ("mine:Two", "mine:load"),
    "`mine:row` must give one number as a tensor": ("mine:make", "mine:load", "--loss", "mine:row"),
    "`mine:item` must give one number as a tensor": ("mine:make", "mine:load", "--loss", "mine:item"),
    "taking what `mine:word` gives as a number failed": ("mine:make", "mine:load", "--metric", "mine:word"),
    "only labels tell the classes of `mine:load`: `network` must be of your own": ("lenet5", "mine:load"),
    "`data` must be images of (1, 28, 28) for 'lenet5', got (1, 6, 6)": ("lenet5", "mine:tensors"),
    "there is none at 'no.npz'": ("mine:make", "no.npz"),
    "'bad.npz' must have x_train, y_train, x_test, y_test, and has x": ("mine:make", "bad.npz"),
    "'text.npz' cannot be read": ("mine:make", "text.npz"),
    "has two sizes that may be the channels": ("mine:make", "both.npz"),
    "all images must have one size: ": ("mine:make", "sizes/"),
    "must have a folder of images for each class, and has 0 of them": ("mine:make", "nothing/"),
    '`init` must be "own" for \'mine:make\', whose code draws': ("mine:make", "mine:load", "--init", "2018"),
    "`augment` must be false for 'mine:load'": ("mine:make", "mine:load", "--augment", "true"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("says", MISTAKES)
@pytest.mark.filterwarnings("ignore:.*drawn with seed 0:UserWarning")
def test_mistakes_are_one_line_and_leave_no_folder(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("bad.npz", x=np.zeros(3))
    Path("text.npz").write_text("words")
    one = {"x_train": np.zeros((9, 3, 6, 3)), "y_train": np.zeros(9, int)}
    np.savez("both.npz", **one, x_test=one["x_train"], y_test=one["y_train"])
    Path("nothing").mkdir()
    for k, place in enumerate(("train/a", "train/b", "test/a")):
        Path("sizes", place).mkdir(parents=True)
        Image.new("L", (4 + k, 4)).save(Path("sizes", place, "0.png"))
    network, data, *more = MISTAKES[says]
    with module(tmp_path, "mine", CODE + MORE):
        code, out, err = run("train", "--network", network, "--data", data, *ASKED, *more, "--quiet")
    *warnings, line = err.splitlines()
    assert all(warning.startswith("ellzero: warning: ") for warning in warnings)
    assert (code, out) == (2, ""), err
    assert line.startswith("ellzero: error: ")
    assert says in line
    assert not list(Path().glob("runs/*"))
