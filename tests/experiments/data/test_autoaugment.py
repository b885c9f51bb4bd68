"""AutoAugment's operations against PIL's, image by image, and how often each acts."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ellzero.experiments.data import augment, augmenting, autoaugment, epoch_generator, stand_in
from ellzero.experiments.data.augmenting import _PAIRS, changed
from ellzero.experiments.papers import get
from ellzero.experiments.train.stepping.batches import Supply

Image = pytest.importorskip("PIL.Image")
ImageEnhance, ImageOps = pytest.importorskip("PIL.ImageEnhance"), pytest.importorskip("PIL.ImageOps")
ENHANCERS = {"brightness": "Brightness", "color": "Color", "contrast": "Contrast", "sharpness": "Sharpness"}


def pictures(count: int = 6) -> Tensor:
    """Smooth ones with noise: flat ones too, which have nothing to stretch."""
    draw = torch.Generator().manual_seed(0)
    small = torch.rand(count, 3, 5, 5, generator=draw) * 200
    x = torch.nn.functional.interpolate(small, (32, 32), mode="bilinear") + 20 * torch.rand(
        count, 3, 32, 32, generator=draw
    )
    x[-1], x[-2, 0] = 77, 9
    return x.clamp(0, 255).to(torch.uint8)


def by_pil(x: Tensor, name: str, level: int, sign: int) -> Tensor:
    picture = Image.fromarray(x.permute(1, 2, 0).numpy())
    if name in ENHANCERS:
        picture = getattr(ImageEnhance, ENHANCERS[name])(picture).enhance(1 + np.linspace(0, 0.9, 10)[level] * sign)
    elif name == "solarize":
        picture = ImageOps.solarize(picture, np.linspace(256, 0, 10)[level])
    elif name == "posterize":
        picture = ImageOps.posterize(picture, int(np.round(np.linspace(8, 4, 10))[level]))
    else:
        picture = getattr(ImageOps, name)(picture)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


COLOURS = sorted({(name, level) for pair in _PAIRS for name, _, level in pair if "_" not in name and name != "rotate"})


@pytest.mark.parametrize(("name", "level"), COLOURS)
def test_colours_are_those_of_pil(name: str, level: int) -> None:
    x, sign = pictures(), torch.tensor([1, -1, 1, -1, 1, -1])
    found = changed(x, name, level, sign.float())
    for k in range(len(x)):
        expected = by_pil(x[k], name, level, int(sign[k]))
        off = (found[k].int() - expected.int()).abs()
        assert off.max() <= 1, (name, k)
        if name in ENHANCERS:
            assert not off[~rounding_matters(x[k], name, 1 + 0.9 * level / 9 * int(sign[k]))].any(), (name, k)
        else:
            assert (off > 0).float().mean() < 0.01, (name, k)  # where floating point rounds the other way


def rounding_matters(x: Tensor, name: str, factor: float) -> Tensor:
    """Where base + factor · (x − base) is another byte if it is rounded once than if its product is rounded too.

    PIL's compiler makes one instruction of the two on ARM, which rounds once, and keeps them apart on x86. Ours are two
    on every CPU.
    """
    picture = Image.fromarray(x.permute(1, 2, 0).numpy())
    base = np.array(getattr(ImageEnhance, ENHANCERS[name])(picture).degenerate, np.float32)
    more, factor32 = np.array(picture, np.float32) - base, np.float32(factor)
    twice = base + factor32 * more
    once = (base + np.float64(factor32) * more).astype(np.float32)
    return torch.from_numpy(np.clip(once, 0, 255) // 1 != np.clip(twice, 0, 255) // 1).permute(2, 0, 1)


def test_shifts_move_whole_pixels_and_leave_grey() -> None:
    x = pictures(2)
    moved = changed(x, "shift_y", 9, torch.tensor([1.0, -1.0])).float()
    by = 150 / 331 * 32
    for sign, before, after in zip((1, -1), x.float(), moved, strict=True):
        for row in range(32):  # linear between two rows, grey outside
            at = row + sign * by
            below, share = math.floor(at), at - math.floor(at)
            grey = torch.full((3, 32), 128.0)
            a, b = (before[:, r] if 0 <= r < 32 else grey for r in (below, below + 1))
            torch.testing.assert_close(after[:, row], (1 - share) * a + share * b, atol=0.51, rtol=0)


def test_turns_and_shears_by_a_point() -> None:
    x = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    x[:, :, 16:18, 28:30] = 255  # right of the middle
    sheared = changed(x, "shear_y", 9, torch.tensor([1.0]))[0, 0].float() - 128
    turned = changed(x, "rotate", 9, torch.tensor([1.0]))[0, 0].float() - 128
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    centre = [(float((m * rows).sum() / m.sum()), float((m * columns).sum() / m.sum())) for m in (sheared, turned)]
    assert centre[0] == (pytest.approx(16.5 - 0.3 * 29, abs=0.3), pytest.approx(28.5, abs=0.3))
    angle = math.radians(30)
    middle = (15.5 + 13 * -math.sin(angle) + math.cos(angle), 15.5 + 13 * math.cos(angle) + math.sin(angle))
    assert centre[1] == (pytest.approx(middle[0], abs=0.3), pytest.approx(middle[1], abs=0.3))


def test_each_pair_comes_as_often_and_each_operation_by_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    n, calls = 50_000, []

    def noted(x: Tensor, name: str, level: int, sign: Tensor) -> Tensor:
        calls.append((name, level, len(x), float(sign.mean())))
        return x

    monkeypatch.setattr(augmenting, "changed", noted)
    x = torch.zeros(n, 3, 1, 1, dtype=torch.uint8)
    autoaugment(x, torch.Generator().manual_seed(0), torch.empty_like(x))
    expected = [pair[turn] for turn in range(2) for pair in _PAIRS if pair[turn][1]]
    assert [call[:2] for call in calls] == [(name, level) for name, _, level in expected]
    for (*_, count, sign), (_, p, _) in zip(calls, expected, strict=True):
        assert count == pytest.approx(n * p / 25, abs=4.5 * math.sqrt(n * p / 25))
        assert abs(sign) < 4.5 / math.sqrt(count)


def test_an_epoch_is_changed_before_it_is_cropped() -> None:
    data = stand_in("cifar10", 8)
    recipe = get("vit-cifar10").override(batch=4)
    supply = Supply([recipe], data, 1)
    supply.epoch(3)
    drawn = epoch_generator(recipe.seed, 3)
    torch.randint(2**62, (), generator=drawn)
    expected, out = torch.empty_like(data.train_x), torch.empty_like(data.train_x)
    autoaugment(data.train_x, drawn, expected)
    augment(expected, drawn, out)
    assert torch.equal(supply._images[0], out)
    with pytest.raises(
        ValueError, match=r'`augment` must be true or false for \'mnist\', which has no colours, got "auto"'
    ):
        Supply([get("budget-lenet5").override(augment="auto")], stand_in("mnist", 8), 1)
