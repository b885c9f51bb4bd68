"""The command line: what it prints about networks whose axes are known, and one line for everything that goes wrong."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ellzero.cli import main
from ellzero.cli.campaigns import _trained
from ellzero.cli.console import CommandError
from ellzero.cli.inspecting import DTYPES, example, load_model
from ellzero.experiments.train.loop import Stopped
from ellzero.experiments.train.trainer import DivergedError
from support import processes

NETS = '''
"""Networks whose axes can be told by looking at them."""
import torch
from torch import nn

class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2).flatten(1)
        return self.fc2(self.fc1(x).relu())

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Linear(6, 2)
        self.a, self.b = nn.Conv2d(6, 5, 1), nn.Conv2d(5, 6, 1)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = x + self.b(self.a(x).relu())
        return self.head(x.mean((2, 3)))

class Literal(LeNet):
    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2).view(-1, 800)
        return self.fc2(self.fc1(x).relu())

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(9, 4), nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, ids, mask, weight):
        assert ids.dtype == torch.int64 and mask.dtype == torch.bool and weight.dtype == torch.float32
        x = self.down(self.up(self.embed(ids)).relu()) * mask.unsqueeze(-1)
        return x.sum(1) * weight

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_first_projection, self.encoder_second_projection = nn.Linear(4, 6), nn.Linear(6, 6)
        self.encoder_normalisation, self.encoder_output = nn.GroupNorm(1, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.encoder_second_projection(self.encoder_first_projection(x))
        return self.encoder_output(self.encoder_normalisation(x))

class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x

class NeedsArguments(nn.Module):
    def __init__(self, width):
        super().__init__()

class Family:
    @staticmethod
    def small():
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

def make():
    return Family.small()

def deep():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(13)))

def number():
    return 3

def wordy():
    raise ValueError("one line\\n  and another")

def quits():
    raise SystemExit(5)

ready, seven = make(), 7
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with modules, which are forgotten afterwards."""
    files = {"nets": NETS, "broken": "1 / 0", "leaves": "raise SystemExit(3)", "needy": "import not_installed_anywhere"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in files:
        sys.modules.pop(name, None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        try:
            code = main(args)
        except SystemExit as left:  # how the parser leaves
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def rows(text: str) -> list[list[str]]:
    """The cells of every line, split where at least two blanks are."""
    return [[cell for cell in line.strip().split("  ") if cell.strip()] for line in text.splitlines()]


@pytest.mark.slow
def test_inspect_prints_the_axes_of_lenet(run: Run) -> None:
    code, out, err = run("inspect", "nets:LeNet", "--input", "1,1,28,28")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "nets:LeNet: LeNet, 431,086 parameters"
    table = [[cell.strip() for cell in row] for row in rows(out)]
    assert ["conv1", "20", "conv1", "conv2", "can shrink"] in table
    assert ["conv2", "50", "conv2", "fc1 ×16", "can shrink"] in table
    assert ["fc1", "500", "fc1", "fc2", "can shrink"] in table
    assert ["conv1.input", "1", "conv1", "frozen: it reads the model's input `x`"] in table
    assert ["fc2", "10", "fc2", "frozen: it is the model's output"] in table
    assert "3 of 5 axes can shrink, 570 units in all." in out
    assert "does not reach spare.weight, spare.bias" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
def test_inspect_tells_repeated_layers_on_one_line_unless_it_is_asked_for_all(run: Run) -> None:
    _, out, _ = run("inspect", "nets:deep", "--input", "1,4")
    table = [[cell.strip() for cell in row] for row in rows(out)]
    assert ["0–11", "12 × 4", "0–11", "1–12", "can shrink"] in table
    assert "12 of 14 axes can shrink, 48 units in all." in out
    _, out, _ = run("inspect", "nets:deep", "--input", "1,4", "--full")
    table = [[cell.strip() for cell in row] for row in rows(out)]
    assert all([f"{k}", "4", f"{k}", f"{k + 1}", "can shrink"] in table for k in range(12))


def test_inspect_tells_which_layers_have_gates_on_their_inputs(run: Run) -> None:
    _, out, _ = run("inspect", "nets:make", "--input", "1,4")
    assert "Gates on what layers read of the model's input: 0 (4)." in out
    _, out, _ = run("inspect", "nets:make", "--input", "1,4", "--json")
    assert json.loads(out)["inputs"] == {"0": 4}  # four inputs, three outputs
    _, out, _ = run("inspect", "nets:deep", "--input", "1,4")
    assert "Gates on what" not in out  # as many outputs as inputs


@pytest.mark.slow
def test_inspect_leaves_no_reason_out(run: Run) -> None:
    _, out, _ = run("inspect", "nets:Normed", "--input", "1,4", "--json")
    (why,) = [axis["why"] for axis in json.loads(out)["axes"] if axis["name"] == "encoder_second_projection"]
    assert len(why) > 50
    _, out, _ = run("inspect", "nets:Normed", "--input", "1,4")
    assert "".join(why.split()) in "".join("".join(row[-1] for row in rows(out) if row).split())


def test_inspect_json_has_every_tensor(run: Run) -> None:
    code, out, _ = run("inspect", "nets:LeNet", "--input", "1,1,28,28", "--json")
    assert code == 0
    content = json.loads(out)
    assert list(content) == ["model", "axes", "inputs", "unreached"]
    assert content["inputs"] == {}  # a convolution reads them
    assert content["unreached"] == ["spare.weight", "spare.bias"]
    conv2 = next(a for a in content["axes"] if a["name"] == "conv2")
    assert conv2 == {
        "name": "conv2",
        "units": 50,
        "state": "can shrink",
        "why": None,
        "stream": False,
        "can_vanish": False,
        "writes": [{"tensor": "conv2.weight", "dims": [0], "entries": 1}],
        "rides": [{"tensor": "conv2.bias", "dims": [0], "entries": 1}],
        "reads": [{"tensor": "fc1.weight", "dims": [1], "entries": 16}],
    }


@pytest.mark.slow
def test_streams_shrink_when_asked(run: Run) -> None:
    def states(*flags: str) -> dict[str, str]:
        _, out, _ = run("inspect", "nets:Residual", "--input", "2,3,4,4", "--json", *flags)
        return {a["name"]: a["state"] for a in json.loads(out)["axes"]}

    assert states() == {"stem": "residual stream", "stem.input": "frozen", "a": "can shrink", "head": "frozen"}
    assert states("--streams") == states() | {"stem": "can shrink"}
    _, out, _ = run("inspect", "nets:Residual", "--input", "2,3,4,4")
    table = [[cell.strip() for cell in row] for row in rows(out)]
    assert ["stem", "6", "stem", "norm", "head", "residual stream: needs `streams=True`"] in table
    assert ["b", "a"] in table  # the second writer and the second reader


@pytest.mark.slow
def test_what_breaks_only_when_a_unit_is_removed_is_frozen_too(run: Run) -> None:
    _, out, _ = run("inspect", "nets:Literal", "--input", "2,1,28,28", "--json")
    conv2 = next(a for a in json.loads(out)["axes"] if a["name"] == "conv2")
    assert conv2["state"] == "frozen"
    assert "removed" in conv2["why"]


def test_several_inputs_each_with_its_dtype(run: Run) -> None:
    inputs = [part for text in ("int:2,5", "bool:2,5", "1") for part in ("--input", text)]
    code, out, err = run("inspect", "nets:Tokens", *inputs, "--json")
    assert (code, err) == (0, "")
    assert [a["units"] for a in json.loads(out)["axes"] if a["state"] == "can shrink"] == [4, 7]


@pytest.mark.parametrize("target", ["nets:make", "nets:ready", "nets:Family.small"])
def test_a_model_may_be_a_function_a_method_or_an_instance(target: str, run: Run) -> None:
    code, out, _ = run("inspect", target, "--input", "1,4")
    assert code == 0
    assert f"{target}: Sequential, 23 parameters" in out
    assert "1 of 3 axes can shrink, 3 units in all." in out


ERRORS = {
    "there is no module `nowhere` here": ("nowhere:Net", "--input", "1"),
    "there is no module `nets.inner`|`nets` is not a package": ("nets.inner:Net", "--input", "1"),
    "importing `needy` failed: ModuleNotFoundError: No module named 'not_installed": ("needy:Net", "--input", "1"),
    "importing `broken` failed: ZeroDivisionError": ("broken:Net", "--input", "1"),
    "importing `leaves` failed: SystemExit: 3": ("leaves:Net", "--input", "1"),
    "module `nets` has no `Nothing`; it has LeNet, Residual, Literal, Tokens": ("nets:Nothing", "--input", "1"),
    "`nets:seven` must be a model or something that gives one, got int": ("nets:seven", "--input", "1"),
    "`nets:number` must give an nn.Module, got int": ("nets:number", "--input", "1"),
    "calling `nets:wordy` without arguments failed: ValueError: one line and another": ("nets:wordy", "--input", "1"),
    "calling `nets:quits` without arguments failed: SystemExit: 5": ("nets:quits", "--input", "1"),
    "calling `nets:NeedsArguments` without arguments failed: TypeError": ("nets:NeedsArguments", "--input", "1"),
    "`MODULE:CALLABLE` must name a module and what is in it, .* got 'nets'": ("nets", "--input", "1"),
    "`MODULE:CALLABLE` must name .* got ':LeNet'": (":LeNet", "--input", "1"),
    "`MODULE` must be written as in an import statement, .* got 'nets.py'": ("nets.py:LeNet", "--input", "1"),
    "`--input` must be given once for each argument of the model": ("nets:LeNet",),
    "`--input` must be sizes of at least 1 .* got '1,x'": ("nets:LeNet", "--input", "1,x"),
    "`--input` must be sizes of at least 1 .* got '1,0'": ("nets:LeNet", "--input", "1,0"),
    "`--input` must be sizes of at least 1 .* got 'int:'": ("nets:LeNet", "--input", "int:"),
    "`--input` must have one of the dtypes float, .* got 'complex' in": ("nets:LeNet", "--input", "complex:2"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_usage_is_one_line_and_code_2(message: str, run: Run) -> None:
    code, out, err = run("inspect", *ERRORS[message])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert re.match(f"ellzero: error: .*({message})", err), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nets:LeNet", "--input", "2,3"), "the model rejects `--input`: RuntimeError: "),
        (("nets:LeNet", "--input", "int:1,1,28,28"), "the model rejects `--input`: RuntimeError: "),
        (("nets:Tokens", "--input", "int:1,2"), "the model rejects `--input`: TypeError: "),
        (("nets:Forks", "--input", "2,4"), "the model cannot be traced with `--input`: "),
    ],
)
def test_a_model_that_cannot_be_traced_is_one_line_and_code_1(args: tuple[str, ...], message: str, run: Run) -> None:
    code, out, err = run("inspect", *args)
    assert (code, out) == (1, "")
    assert err.startswith(f"ellzero: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("args", [("frobnicate",), ("inspect",), ("inspect", "nets:LeNet", "--bogus")])
def test_what_cannot_be_parsed_is_code_2(args: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Stopped("stopped after epoch 2, step 3"), 130, "stopped after epoch 2, step 3: saved; resume with: go on"),
        (KeyboardInterrupt(), 130, "interrupted; what was saved goes on with: go on"),
        (torch.OutOfMemoryError("no room"), 1, "no room; take fewer"),
        (DivergedError("the loss is nan"), 1, "the loss is nan"),
    ],
)
def test_a_training_of_many_runs_that_ends_early_is_one_line(error: BaseException, code: int, message: str) -> None:
    def work() -> None:
        raise error

    with pytest.raises(CommandError) as said:
        _trained(work, "go on", "take fewer", quiet=True)
    assert (said.value.code, str(said.value)) == (code, message)


def test_help_and_version(run: Run) -> None:
    for args in ((), ("--help",)):
        code, out, _ = run(*args)
        assert code == 0
        assert "inspect" in out
    code, out, _ = run("inspect", "--help")
    assert code == 0
    for word in ("MODULE:CALLABLE", "--input [DTYPE:]SIZES", "1,1,28,28", "int:2,128", "--streams", "--json"):
        assert word in out
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("ellzero ")


@pytest.mark.slow
def test_as_a_program(server: processes.Server, tmp_path: Path) -> None:
    """`python -m ellzero` finds modules of the working directory, and prints nothing but the answer.

    A fork of a process that has imported torch runs it three times; `recipes | head` starts it anew.
    """
    calls = [["inspect", target, "--input", "1,4"] for target in ("nets:make", "nets:Forks", "nets:number")]
    *answer, first, untraceable, second, wrong, third = server.run(
        "program", calls=calls, where=str(tmp_path)
    ).said.splitlines()
    assert (first, second, third) == ("code 0", "code 1", "code 2")
    assert answer[0] == "nets:make: Sequential, 23 parameters"
    assert answer[-2] == "1 of 3 axes can shrink, 3 units in all."
    # Torch says much more of it, on its own.
    assert untraceable.startswith("ellzero: error: the model cannot be traced with `--input`: ")
    assert wrong == "ellzero: error: `nets:number` must give an nn.Module, got int"


@pytest.mark.parametrize(("kind", "dtype"), DTYPES.items())
def test_an_example_is_what_was_asked_for(kind: str, dtype: torch.dtype) -> None:
    x = example(f"{kind}:3, 40")
    assert (tuple(x.shape), x.dtype) == ((3, 40), dtype)
    assert torch.equal(x, example(f"{kind}:3,40"))  # the same each time
    if dtype.is_floating_point:
        assert abs(x.float().mean().item()) < 0.3
        assert abs(x.float().std().item() - 1) < 0.3
    else:
        assert sorted(set(x.int().flatten().tolist())) == [0, 1]


def test_an_instance_is_given_as_it_is() -> None:
    assert load_model("nets:ready") is sys.modules["nets"].ready
