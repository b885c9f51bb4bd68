"""AutoAugment's policy for CIFAR-10 (Cubuk et al., 2019), for all images of an epoch at once, where they are.

Of 25 pairs of operations each image gets one, drawn evenly; each operation of it acts with a probability of its own.
What PIL does with one image is done here with many: to the byte, but for what is turned, sheared or shifted, which is
linear between pixels and grey outside.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Act = tuple[str, float, int]  # operation, how probable, how strong: 0 to 9
_GREY = 128
_PAIRS: tuple[tuple[Act, Act], ...] = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("shift_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("shift_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("shift_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("shift_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("shift_y", 0.9, 9), ("shift_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("shift_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)


def autoaugment(images: Tensor, generator: Generator, out: Tensor) -> None:
    """Changes colour images of bytes (N, 3, H, W) at random into `out`: in place, drawn on the CPU, as `augment`."""
    n = len(images)
    pair = torch.randint(len(_PAIRS), (n,), generator=generator)
    acts = torch.rand(2, n, generator=generator)
    signs = torch.randint(2, (2, n), generator=generator) * 2 - 1
    out.copy_(images)
    for turn in range(2):
        for number, both in enumerate(_PAIRS):
            name, p, level = both[turn]
            chosen = ((pair == number) & (acts[turn] < p)).nonzero()[:, 0]
            if len(chosen):
                at, sign = chosen.to(out.device), signs[turn, chosen].to(out.device, torch.float32)
                out[at] = changed(out[at], name, level, sign)


def changed(x: Tensor, name: str, level: int, sign: Tensor) -> Tensor:
    """One operation on images of bytes (N, 3, H, W); `sign`, 1 or −1 for each, says which way it goes."""
    share = level / 9
    match name:
        case "invert":
            return 255 - x
        case "solarize":
            return torch.where(x < 256 * (1 - share), x, 255 - x)
        case "posterize":
            return torch.bitwise_and(x, 256 - 2 ** (8 - round(8 - 4 * share)))
        case "equalize":
            return _equalized(x)
    pixels = x.to(torch.float32)
    if name == "autocontrast":
        low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
        scale = 255 / (high - low).clamp(min=1)
        return torch.where(high > low, pixels * scale - low * scale, pixels).clamp(0, 255).to(torch.uint8)
    if name in ("rotate", "shear_y", "shift_x", "shift_y"):
        return _moved(pixels, name, share, sign)
    factor = (1 + 0.9 * share * sign.double()).float().view(-1, 1, 1, 1)  # rounded once, as PIL does
    base = _base(pixels, name)
    return (base + factor * (pixels - base)).clamp(0, 255).to(torch.uint8)


def _base(x: Tensor, name: str) -> Tensor:
    """What an image has less or more of: black, its shades of grey, their mean, or itself smoothed."""
    if name == "brightness":
        return torch.zeros_like(x)
    if name == "sharpness":
        kernel = torch.ones(3, 1, 3, 3, device=x.device)
        kernel[:, :, 1, 1] = 5
        smooth = x.clone()  # but for the edges
        smooth[:, :, 1:-1, 1:-1] = (F.conv2d(x, kernel, groups=3) / 13 + 0.5).floor()
        return smooth
    weights = torch.tensor([19595, 38470, 7471], device=x.device, dtype=torch.float32).view(3, 1, 1)
    grey = ((x * weights).sum(1, keepdim=True).add(0x8000) / 65536).floor()
    return grey if name == "color" else (grey.mean((1, 2, 3), keepdim=True) + 0.5).floor()


def _moved(x: Tensor, name: str, share: float, sign: Tensor) -> Tensor:
    matrix = torch.zeros(len(x), 2, 3, device=x.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = 1
    if name == "rotate":
        angle = math.radians(30 * share)
        matrix[:, 0, 0] = matrix[:, 1, 1] = math.cos(angle)
        matrix[:, 0, 1], matrix[:, 1, 0] = -math.sin(angle) * sign, math.sin(angle) * sign
    elif name == "shear_y":  # about the first column, as PIL does
        matrix[:, 1, 0] = matrix[:, 1, 2] = 0.3 * share * sign
    else:
        matrix[:, 0 if name == "shift_x" else 1, 2] = 2 * 150 / 331 * share * sign
    places = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x - _GREY, places, align_corners=False).add_(_GREY).round_().to(torch.uint8)


def _equalized(x: Tensor) -> Tensor:
    """Each channel of each image with its shades spread evenly, by whole pixels as PIL counts them."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, spread.gather(2, flat), flat).to(torch.uint8).view(x.shape)
