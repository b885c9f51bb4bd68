"""What an epoch is made of, made where the images are: their order, crops, flips and bends, and pixels as numbers.

All that is random is drawn at its beginning from one generator, a function of (seed, epoch); so an epoch can be taken
up again at any batch. Nothing here knows which data set it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_AT_ONCE = 10_000  # images that are changed together: a few large operations, and not all images twice in memory
_KNOTS = 4  # rows and columns of points that a distortion moves


def epoch_generator(seed: int, epoch: int) -> Generator:
    """The generator of all that is random in an epoch's data. Nothing need be saved to have it again."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}")
    # Hashed, because seed + epoch would give run 1 the epochs of run 0, one later.
    return Generator().manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))


def shuffled(images: int, size: int, generator: Generator) -> Tensor:
    """The order of an epoch: which images are in each batch, (batches, size), on the generator's device.

    Every image comes at most once; what does not fill a batch is left out.
    """
    count = images // size
    return torch.randperm(images, generator=generator, device=generator.device)[: count * size].view(count, size)


def scaled(images: Tensor, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Tensor:
    """Bytes (N, C, H, W) to numbers: (x / 255 − mean) / std for each channel."""
    if images.dtype is not torch.uint8:
        raise TypeError(f"`images` must be of bytes (torch.uint8), got {images.dtype}")
    if any(s <= 0 for s in std):
        raise ValueError(f"`std` must be positive, got {tuple(std)}")
    shift, scale = (_by_channel(tuple(v), images.device) for v in (mean, std))
    return images.to(torch.float32).div_(255).sub_(shift).div_(scale)


@cache  # a step that is captured can take nothing from the host, so it must find them there
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Cuts from each image, with `pad` black pixels around it, a window of its own size, and mirrors those of `flip`.

    The windows begin at the rows `top` and the columns `left`, 0 to 2·pad.
    """
    height, width = images.shape[2:]
    # A view of all (2 pad + 1)² windows of every image; the indexing copies one of each.
    windows = F.pad(images, (pad,) * 4).unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    images = windows[torch.arange(len(images), device=images.device), top, left]
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


def augment(images: Tensor, generator: Generator, out: Tensor, pad: int = 4) -> None:
    """Crops and flips every image at random into `out`, as the papers on CIFAR do. In place, because a captured step
    reads them there; the generator is on the CPU, so that it draws the same for every device.
    """
    n = len(images)
    top, left = torch.randint(2 * pad + 1, (2, n), generator=generator)
    flip = torch.randint(2, (n,), generator=generator).bool()
    top, left, flip = (draw.to(images.device) for draw in (top, left, flip))
    for part in torch.arange(n, device=images.device).split(_AT_ONCE):
        out[part] = crop_and_flip(images[part], top[part], left[part], flip[part], pad)


def displaced(images: Tensor, knots: Tensor) -> Tensor:
    """Takes every pixel of each image from another place of it, by a smooth field of displacements.

    The field is given at `knots`, (N, rows, columns, 2) with right and down in pixels, which lie evenly from corner to
    corner; it is cubic between them. Pixels are linear between each other, and black outside. Bytes stay bytes.
    """
    height, width = images.shape[2:]
    rows, columns = (_cubic(*sizes, images.device) for sizes in ((knots.shape[1], height), (knots.shape[2], width)))
    moved = torch.einsum("nijc,ih,jw->nhwc", knots, rows, columns)
    down, right = ((torch.arange(n, device=images.device) + 0.5) * 2 / n - 1 for n in (height, width))
    places = torch.stack(torch.meshgrid(right, down, indexing="xy"), -1)  # as `grid_sample` counts: −1 to 1
    places = places + moved * 2 / torch.tensor([width, height], device=images.device)
    return F.grid_sample(images.to(torch.float32), places, align_corners=False).round_().to(images.dtype)


@cache
def _cubic(knots: int, size: int, device: torch.device) -> Tensor:
    """How much of each knot is at each of so many pixels, (knots, size): by cubic convolution."""
    line = torch.eye(knots).view(knots, 1, knots, 1)
    return F.interpolate(line, (size, 1), mode="bicubic", align_corners=True)[:, 0, :, 0].to(device)


def distort(images: Tensor, generator: Generator, out: Tensor, by: float) -> None:
    """Bends every image at random into `out`: 4 × 4 points of it are moved by N(0, by²) pixels each way, and what is
    between them goes along. So images are shifted, turned, stretched and bent at once (Simard et al., 2003). In place,
    as `augment`; the generator on the CPU gives a seed to one where the images are, which draws faster.
    """
    own = Generator(images.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
    for part in torch.arange(len(images), device=images.device).split(_AT_ONCE):
        knots = by * torch.randn(len(part), _KNOTS, _KNOTS, 2, generator=own, device=images.device)
        out[part] = displaced(images[part], knots)
