"""Epochs of batches, made where the images are: shuffled, cropped, flipped, scaled.

All that is random in an epoch is drawn at its beginning from one generator, a function of (seed, epoch); so an epoch
can be taken up again at any batch. The draws are made on the CPU, so that the order is the same on every device; the
pixels are moved in a few large operations, each over as many whole batches as a bound on memory allows. Nothing here
knows which data set it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_AT_ONCE = 1 << 28  # bytes of finished batches that are held at a time; the work on them takes about as much again


def epoch_generator(seed: int, epoch: int) -> Generator:
    """The generator of all that is random in an epoch's data. Nothing need be saved to have it again.

    Args:
        seed: of the run, not negative.
        epoch: its number, not negative.

    Example:
        >>> a, b = epoch_generator(0, 7), epoch_generator(0, 7)
        >>> bool((torch.randperm(100, generator=a) == torch.randperm(100, generator=b)).all())
        True
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}")
    # Hashed, because seed + epoch would give run 1 the epochs of run 0, one later.
    return Generator().manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))


def batch_count(images: int, size: int, *, drop_last: bool = False, ranks: int = 1) -> int:
    """How many batches an epoch has, on each of the ranks.

    Example:
        >>> batch_count(60_000, 128), batch_count(60_000, 128, drop_last=True)
        (469, 468)
    """
    share = images // ranks
    return share // size if drop_last else -(-share // size)


def scaled(
    images: Tensor, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Bytes to numbers: (x / 255 − mean) / std for each channel, which is x / 255 in [0, 1] by default.

    Args:
        images: of bytes, (N, C, H, W).
        mean: per channel, of x / 255.
        std: per channel, of x / 255.
        dtype: of the result. The arithmetic is in float32.

    Example:
        >>> scaled(torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)).flatten()
        tensor([0.0000, 0.2000, 1.0000])
    """
    if images.dtype is not torch.uint8:
        raise TypeError(f"`images` must be of bytes (torch.uint8), got {images.dtype}")
    if any(s <= 0 for s in std):
        raise ValueError(f"`std` must be positive, got {tuple(std)}")
    shift, scale = (_by_channel(tuple(v), images.device) for v in (mean, std))
    return images.to(torch.float32).div_(255).sub_(shift).div_(scale).to(dtype)


@cache  # a step that is captured can take nothing from the host, so it must find them there
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Cuts from each image, with `pad` black pixels around it, a window of its own size, and mirrors some of them.

    Args:
        images: (N, C, H, W).
        top: first row of each window, 0 to 2·pad, (N,).
        left: first column, likewise.
        flip: whether it is mirrored left to right, (N,) of bool.
        pad: black pixels on each side.

    Returns:
        Images of the same shape.

    Example:
        >>> x = torch.tensor([[1, 2], [3, 4]]).view(1, 1, 2, 2)
        >>> crop_and_flip(x, torch.tensor([2]), torch.tensor([1]), torch.tensor([True]), pad=1).view(2, 2)
        tensor([[4, 3],
                [0, 0]])
    """
    if pad:
        height, width = images.shape[2:]
        # A view of all (2 pad + 1)² windows of every image; the indexing copies one of each.
        windows = F.pad(images, (pad,) * 4).unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
        images = windows[torch.arange(len(images), device=images.device), top, left]
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


def batches(
    images: Tensor,
    labels: Tensor,
    size: int,
    *,
    generator: Generator | None = None,
    start: int = 0,
    drop_last: bool = False,
    pad: int = 0,
    flip: bool = False,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    ranks: int = 1,
    at_once: int = _AT_ONCE,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: every image once, in batches on the device that the images are on.

    The generator is used here and now, not later by the iterator, and as much for every `start`: `start=k` with a
    generator in the same state goes on exactly where an epoch was left after k batches.

    Args:
        images: of bytes, (N, C, H, W).
        labels: (N,).
        size: images in a batch.
        generator: a CPU generator that shuffles, crops and flips, e.g. `epoch_generator(seed, epoch)`; if absent, the
            images come in their order, as they are.
        start: number of the first batch.
        drop_last: whether a last batch of fewer images is left out.
        pad: black pixels around an image, from which a window of its size is cut at random; 0 for none.
        flip: whether half of the images are mirrored.
        mean: per channel, subtracted from x / 255.
        std: per channel, by which it is divided then.
        dtype: of the batches.
        rank: which of the `ranks` shares of the epoch this is: every `ranks`-th image of the shuffled ones.
        ranks: number of shares. All have as many images; up to ranks − 1 images of an epoch are left out for it.
        at_once: bytes of finished batches to hold at a time. Not less than one batch is made.

    Returns:
        Iterator over (x, y): images of `dtype` and their labels.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> x, y = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1), torch.arange(5)
        >>> [b.tolist() for _, b in batches(x, y, 2)]
        [[0, 1], [2, 3], [4]]
        >>> whole = [b.tolist() for _, b in batches(x, y, 2, generator=epoch_generator(0, 0))]
        >>> rest = [b.tolist() for _, b in batches(x, y, 2, generator=epoch_generator(0, 0), start=1)]
        >>> rest == whole[1:], sorted(sum(whole, []))
        (True, [0, 1, 2, 3, 4])
    """
    n = len(images)
    if len(labels) != n:
        raise ValueError(f"`labels` must be as many as `images`, got {len(labels)} and {n}")
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    if not 0 <= rank < ranks <= n:
        raise ValueError(f"`rank` must be in [0, ranks) and `ranks` at most the {n} images, got {rank} of {ranks}")
    count = batch_count(n, size, drop_last=drop_last, ranks=ranks)
    if not 0 <= start <= count:
        raise ValueError(f"`start` must be in [0, {count}], the number of batches, got {start}")
    if pad < 0:
        raise ValueError(f"`pad` must not be negative, got {pad}")
    if generator is None and (pad or flip):
        raise ValueError("`generator` must be given where `pad` or `flip` is: they are random")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"`generator` must be on the CPU, where it draws the same for every device, got {generator}")

    # One share of all draws; the draws do not depend on the number of shares.
    share = slice(rank, n // ranks * ranks, ranks)
    order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    top, left = torch.randint(2 * pad + 1, (2, n), generator=generator) if pad else torch.zeros(2, n, dtype=torch.long)
    mirrored = torch.randint(2, (n,), generator=generator).bool() if flip else torch.zeros(n, dtype=torch.bool)
    order, top, left, mirrored = (draw[share].to(images.device) for draw in (order, top, left, mirrored))

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        bytes_of_batch = size * images[0].numel() * dtype.itemsize
        stride = max(1, at_once // bytes_of_batch)
        last = min(count * size, len(order))
        for first in range(start, count, stride):
            part = slice(first * size, min((first + stride) * size, last))
            chosen = order[part]
            x, y = images[chosen], labels[chosen]
            if pad or flip:
                x = crop_and_flip(x, top[part], left[part], mirrored[part], pad)
            yield from zip(scaled(x, mean, std, dtype).split(size), y.split(size), strict=True)

    return epoch()
