"""What a reader copies runs: the loop at the top of the README, and the scripts in `examples/`."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import ROOT, processes
from support.scripts import loaded


def test_the_loop_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(20, 8)
    loader = [(x, torch.randint(0, 3, (20,)))] * 3
    dense = sum(p.numel() for p in model.parameters())  # the model itself gets smaller
    known = {"torch": torch, "F": F, "model": model, "x": x, "loader": loader, "epochs": 4}
    exec(code, known)
    small = known["small"]
    assert sum(p.numel() for p in small.parameters()) < dense
    torch.testing.assert_close(small(x), known["gated"](x))
    assert (tmp_path / "small.safetensors").exists()
    assert "Budget(macs at most 30 %: tuning, step 12 of 12, macs kept" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quickstart_ends_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    loaded(ROOT / "examples" / "quickstart.py").main(epochs=6)  # it checks by itself that what it saved comes back
    assert "compact network: test error" in capsys.readouterr().out


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def share(small: nn.Module) -> float:
    """Of the multiplications of the network 20-64-32-2 of the examples."""
    return sum(p.numel() for p in small.parameters() if p.ndim > 1) / (20 * 64 + 64 * 32 + 32 * 2)


@pytest.mark.slow
def test_the_own_loop_stops_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    example = loaded(ROOT / "examples" / "own_loop.py")
    whole = example.main(epochs=4)
    assert example.main(epochs=4, checkpoint=tmp_path / "stopped.pt", until=2) is None
    assert same(example.main(epochs=4, checkpoint=tmp_path / "stopped.pt"), whole)
    assert share(whole) <= 0.3


@pytest.mark.slow
def test_the_custom_cost_is_kept() -> None:
    small = loaded(ROOT / "examples" / "custom_cost.py").main(steps=40)  # it checks the cost by itself
    assert sum(p.numel() for p in small.parameters()) <= 0.4 * (21 * 64 + 65 * 32 + 33 * 2)


@pytest.mark.slow
def test_the_example_of_accelerate_stops_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    example = loaded(ROOT / "examples" / "with_accelerate.py")
    whole = example.main(epochs=4)
    assert example.main(epochs=4, folder=tmp_path, until=2) is None
    assert same(example.main(epochs=4, folder=tmp_path), whole)
    assert share(whole) <= 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_example_of_lightning_ends_within_its_budget() -> None:
    pytest.importorskip("lightning")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    assert share(loaded(ROOT / "examples" / "with_lightning.py").main(epochs=3, accelerator="cpu", **quiet)) <= 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found")
def test_the_example_of_the_trainer_ends_within_its_budget() -> None:
    transformers = pytest.importorskip("transformers")
    small = loaded(ROOT / "examples" / "with_trainer.py").main(epochs=1, use_cpu=True, save_strategy="no")
    assert isinstance(small, transformers.BertForSequenceClassification)
    dense = transformers.BertForSequenceClassification(small.config)
    assert sum(p.numel() for p in small.parameters()) <= 0.7 * sum(p.numel() for p in dense.parameters())


@pytest.mark.slow
def test_the_example_of_several_processes_ends_within_its_budget(server: processes.Server, tmp_path: Path) -> None:
    """It checks by itself that all processes end with the same network."""
    job = server.run("launched", program=str(ROOT / "examples" / "with_ddp.py"), arguments=[], where=str(tmp_path))
    assert "masks until the end: a process group holds on to the parameters" in job.said
    layers = re.findall(r"Linear\(in_features=(\d+), out_features=(\d+)", job.said)  # of the network that one prints
    assert len(layers) == 3
    assert sum(int(n) * int(m) for n, m in layers) <= 0.3 * (20 * 64 + 64 * 32 + 32 * 2)


@pytest.mark.slow
def test_the_example_of_sharded_weights_ends_within_its_budget(server: processes.Server, tmp_path: Path) -> None:
    job = server.run("launched", program=str(ROOT / "examples" / "with_fsdp.py"), arguments=[], where=str(tmp_path))
    layers = re.findall(r"(?:(\d+) x )?Linear\(in_features=(\d+), out_features=(\d+)", job.said)
    assert len(layers) in (4, 6)  # the blocks are printed once where they are alike
    assert sum(int(k or 1) * int(n) * int(m) for k, n, m in layers) <= 0.3 * (20 * 32 + 4 * 32 * 128 + 32 * 2)


def test_every_block_of_the_page_about_loops_is_in_an_example() -> None:
    text = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    examples = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        ways = [textwrap.indent(block, " " * width) for width in (0, 4, 8, 12)]
        assert any(way in example for way in ways for example in examples), block
