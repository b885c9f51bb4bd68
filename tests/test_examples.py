"""What a reader copies runs: the loop at the top of the README, and the scripts in `examples/`."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import ROOT
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


def test_the_quickstart_ends_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    loaded(ROOT / "examples" / "quickstart.py").main(epochs=2)  # it checks by itself that what it saved comes back
    assert "compact network: test error" in capsys.readouterr().out
