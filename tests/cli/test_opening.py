"""What commands say about networks and recipes, run as it is printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ellzero as l0
from ellzero.cli.opening import loading, tell_of_tuning
from ellzero.experiments import data, networks
from ellzero.experiments.papers import get
from support import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "network"), [("louizos-mlp", "lenet300"), ("demo", "lenet5"), ("wrn-dropout-cifar100", "wrn-10-1")]
)
def test_the_printed_python_loads_the_compact_network(name: str, network: str, tmp_path: Path) -> None:
    recipe = get(name).override(network=network)
    dataset = data.stand_in(recipe.data, images=4)
    scale = () if recipe.scaling == "unit" else (dataset.mean, dataset.std)
    x = data.scaled(dataset.test_x, *scale)
    gated = l0.attach(networks.find(network).make(len(dataset.classes), recipe.dropout), (x,))
    gate = next(gate for _, gate in gated.named_gates())
    with torch.no_grad():
        gate.log_alpha[1:4] = -9.0
    small = l0.compact(gated).eval()
    l0.save(small, tmp_path / "small.safetensors")
    known = {"images": dataset.test_x}
    exec("\n".join(loading(recipe, tmp_path / "small.safetensors", dataset)), known)
    torch.testing.assert_close(known["logits"], small(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("budget-mlp", {"epochs": [1, 3]}, "10 epochs (`--finetune-epochs`)\n"),
        ("budget-mlp", {"at_most": [0.2]}, ""),
        ("budget-mlp", {"epochs": "3", "finetune_epochs": "1"}, ""),
        ("gallego-mlp", {"epochs": "3"}, ""),
    ],
)
def test_who_changes_the_epochs_hears_of_those_that_follow(
    name: str, given: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_of_tuning(get(name), given)
    err = capsys.readouterr().err
    assert err.endswith(told)
    assert bool(err) == bool(told)


def test_the_page_says_what_is_printed() -> None:
    shown = re.search(r"`(ellzero\.load\(.*?\))`", (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[1] in "\n".join(loading(get("demo"), Path("small.safetensors"), data.stand_in("mnist5k")))
