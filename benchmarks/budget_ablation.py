"""What costs `Budget` its error in the arena: variants of it, many runs in one stack of tensors, on held-out images.

    python benchmarks/budget_ablation.py lenet300 --data FOLDER --device cuda --seeds 5 --out results/budget-ablation

A run is one variant at one share of the MACs with one seed, in the arena's loop: its batches, schedule, optimizer and
epochs, its images held out of the training set. Runs of a network share every operation: small networks do not fill a
GPU, and differences of 0.05 points take many seeds. So gates, multipliers and settling are written here once more,
for stacks; closed units stay as masks, which train as the small network does. `base` has the defaults of `Budget` and
`attach`. The stored runs, `results/benchmarks/budget_ablation_*.json`, are of the commit that they name, where `base`
started gates at a keep rate of 0.5 in place of 0.95: `half` here.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from stacked_networks import NETS
from torch import Tensor

from ellzero.experiments import data, networks
from ellzero.experiments.arena.loop import BATCH, DECAY, RATE
from ellzero.experiments.data import load
from ellzero.experiments.networks.facts import scaled_widths
from ellzero.experiments.store.provenance import provenance

CELLS = (0.1, 0.2, 0.35, 0.5)
HELD_OUT, EPS, MOMENTUM = 10_000, 1e-6, 0.9
GAMMA, ZETA, BETA, SHARPNESS = -0.1, 1.1, 2 / 3, 7.0
FALLING, TRAVEL, FASTEST = 0.5, 25.0, 0.3  # of `Budget`


@final
@dataclass(frozen=True)
class Variant:
    """What is changed. Shares are of the steps; the defaults are those of `Budget` and `attach`."""

    name: str
    kind: str = "budget"  # or "narrow", "dense", and "shape": the masks that `of` found, with new weights
    of: str = "base"
    learning: float = 0.4  # share of the steps at which gates settle
    delay: float = 0.0  # share of the steps without gates before
    drop: float = 0.05  # of the gates at the start
    family: str = "hard"  # or "bernoulli"
    inputs: bool = False  # whether pixels, or the entries of the first linear layer, are gated too
    press: bool = True  # whether multipliers press; else settling alone closes
    rank: str = "p"  # at settling: "p", "norm" or "taylor"
    noise: float = 0.0  # drop rate of kept hidden units after settling, for each example
    noise_inputs: float = 0.0


@final
@dataclass(frozen=True)
class Run:
    """One variant, one share, one seed."""

    variant: Variant
    at_most: float
    seed: int


@final
class Stack:
    """Runs of one network, trained side by side."""

    def __init__(self, net: Any, runs: Sequence[Run], steps: int, device: str, found: dict[Any, Any]) -> None:
        self.net, self.runs, self.steps, self.device, self.found = net, runs, steps, device, found
        self.slices = [slice(s - n, s) for n, s in zip(net.sizes, np.cumsum(net.sizes), strict=True)]
        made = {}
        for seed in sorted({run.seed for run in runs}):
            torch.manual_seed(seed)
            made[seed] = [p.detach() for p in networks.find(net.name).make(10).parameters()]
        self.w = [torch.stack([made[r.seed][k] for r in runs]).to(device) for k in range(len(made[runs[0].seed]))]
        of = [r.variant for r in runs]
        self.dense = float(net.macs(net.sizes))
        self.at = self._each([r.at_most for r in runs])
        self.settles = self._each([max(1, round((v.delay + v.learning) * steps)) for v in of])
        self.begins = self._each([round(v.delay * steps) for v in of])
        learns = self.settles - self.begins
        self.gate_lr = (TRAVEL / learns).clamp(max=FASTEST)
        self.falls = (FALLING * learns).clamp(min=1)
        self.speed = torch.minimum(100 / learns, 0.5 * self.gate_lr)
        self.bern = torch.tensor([v.family == "bernoulli" for v in of], device=device)[:, None]
        self.presses = self._each([float(v.press) for v in of])
        mean = self._each([math.log((1 - v.drop) / v.drop) for v in of])[:, None]
        torch.manual_seed(1)
        start = mean + 0.01 * torch.randn(len(runs), sum(net.sizes), device=device)
        self.phi = torch.where(self.bern, start / SHARPNESS, start)
        self.gated = torch.ones_like(self.phi, dtype=torch.bool)
        for k, v in enumerate(of):
            self.gated[k, self.slices[0]] = v.inputs
        self.moments = [torch.zeros_like(self.phi) for _ in range(2)]
        self.buffers = [torch.zeros_like(p) for p in self.w]
        self.level, self.multiplier = torch.zeros_like(self.at), torch.zeros_like(self.at)
        self.mask = torch.ones_like(self.phi)
        self.settled = torch.zeros(len(runs), dtype=torch.bool, device=device)
        self.seen = torch.zeros_like(self.phi)  # |gate × its slope|, averaged
        for k, v in enumerate(of):
            if v.kind != "budget":
                self._shape(k, v)
        drops = [(v.noise_inputs, v.noise) for v in of]
        self.drops = self._each(drops)
        self.noisy = [bool(any(d[k] for d in drops)) for k in range(2)]
        self.last = int(max([s for s, v in zip(self.settles.tolist(), of, strict=True) if v.kind == "budget"] + [0]))

    def _each(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self.device)

    # ---- gates -------------------------------------------------------------------------------------------------------

    def prob(self, phi: Tensor) -> Tensor:
        hard = torch.sigmoid(phi - BETA * math.log(-GAMMA / ZETA))
        p = torch.where(self.bern, torch.sigmoid(SHARPNESS * phi), hard)
        return torch.where(self.gated, p, 1.0)

    def value(self) -> Tensor:
        pi = torch.sigmoid(SHARPNESS * self.phi)
        hard = (torch.sigmoid(self.phi) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
        return torch.where(self.gated, torch.where(self.bern, pi * (pi >= 0.5), hard), 1.0)

    def draw(self, phi: Tensor) -> Tensor:
        u = torch.rand_like(phi).clamp(EPS, 1 - EPS)
        hard = torch.sigmoid((torch.logit(u) + phi) / BETA)
        hard = (hard * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
        pi = torch.sigmoid(SHARPNESS * phi)
        bern = (u < pi).to(pi.dtype) + (pi - pi.detach())
        return torch.where(self.gated, torch.where(self.bern, bern, hard), 1.0)

    def counts(self, opens: Tensor) -> list[Tensor]:
        return self.net.tally([opens[..., s] for s in self.slices])

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, t: int, x: Tensor, y: Tensor, lr: float) -> None:
        learning = (~self.settled) & (t >= self.begins) if t < self.last else None
        some = learning is not None
        w = [p.requires_grad_(True) for p in self.w]
        z = self.mask
        if some:
            phi = self.phi.detach().requires_grad_(True)
            z = torch.where(learning[:, None], self.draw(phi), self.mask)
            if not z.requires_grad:
                z = z.requires_grad_(True)
        logits = self.net.forward(w, x, self._spread(z, len(x[0])))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1).sum()
        if some:
            expected = self.net.macs(self.counts(self.prob(phi))) / self.dense
            total = loss + (self.multiplier * self.presses * expected * learning).sum()
            grads = torch.autograd.grad(total, [*w, phi, z], allow_unused=True)
            slope, seen = grads[-2], grads[-1]
        else:
            grads = torch.autograd.grad(loss, w)
        with torch.no_grad():
            for p, g, b in zip(self.w, grads, self.buffers, strict=False):
                p.requires_grad_(False)
                g = g.add(p, alpha=DECAY)
                b.mul_(MOMENTUM).add_(g)
                p.sub_(g.add_(b, alpha=MOMENTUM), alpha=lr)
            if some:
                self._move(t, learning, slope, seen, z)

    def _spread(self, z: Tensor, size: int) -> list[Tensor]:
        """The gates of each placement, (runs, 1 or examples, units), with the noise that stays after settling."""
        out: list[Tensor] = []
        for k, mine in enumerate(self.slices):
            own, which = z[:, mine].unsqueeze(1), min(k, 1)
            if self.noisy[which] and not 0 < k < self.net.maps:
                p = (self.drops[:, which] * self.settled)[:, None, None]
                u = torch.rand(len(self.runs), size, own.shape[2], device=self.device)
                own = own * (u >= p) / (1 - p)
            out.append(own)
        return out

    def _move(self, t: int, learning: Tensor, slope: Tensor, seen: Tensor, z: Tensor) -> None:
        opened = self.value() > 0
        kept = self.net.macs(self.counts(opened.float())) / self.dense
        clock = (t - self.begins).clamp(min=0)
        first, second = self.moments
        count = (clock + 1)[:, None]
        new1, new2 = first * 0.9 + 0.1 * slope, second * 0.999 + 0.001 * slope.square()
        move = new1 / (1 - 0.9**count) / ((new2 / (1 - 0.999**count)).sqrt() + 1e-8)
        on = learning[:, None] & self.gated
        self.moments = [torch.where(on, a, b) for a, b in ((new1, first), (new2, second))]
        self.phi = torch.where(on, self.phi - self.gate_lr[:, None] * move, self.phi)
        if seen is not None:
            self.seen.mul_(0.99).add_((seen * z).abs(), alpha=0.01)
        target = self.at ** (clock / self.falls).clamp(max=1)
        log = (kept / target).log()
        level = torch.where(clock == 0, 0.5, self.level)
        level = (level * (self.speed * log).exp()).clamp(0.5, 1e3)
        self.level = torch.where(learning, level, self.level)
        self.multiplier = torch.where(learning & (log > 0), self.level, 0.0)
        due = (~self.settled) & (self.settles <= t + 1)
        for k in due.nonzero().flatten().tolist():
            self.settle(k)

    # ---- settling ----------------------------------------------------------------------------------------------------

    def settle(self, k: int) -> None:
        """Closes and opens units of one run until its MACs are just within the share; what is open is folded in."""
        run = self.runs[k]
        value = self.value()[k]
        evidence = self._evidence(k).double().cpu().numpy()
        opens = self._within(evidence, (value > 0).cpu().numpy(), self.gated[k].cpu().numpy(), run.at_most)
        mask = torch.as_tensor(opens, device=self.device, dtype=torch.float32)
        fresh = torch.where(value > 0, value, 0.1)
        for p, mine in enumerate(self.slices):
            if bool(self.gated[k, mine].any()):
                self.net.multiply([w[k : k + 1] for w in self.w], p, torch.where(mask[mine] > 0, fresh[mine], 0)[None])
        self.mask[k], self.settled[k] = mask, True

    def _evidence(self, k: int) -> Tensor:
        rank, p = self.runs[k].variant.rank, self.prob(self.phi)[k]
        if rank == "p":
            return p
        if rank == "norm":
            out = torch.ones_like(p)
            for n, mine in enumerate(self.slices):
                own = [w[k : k + 1] for w in self.w]
                sides = [s for s in (self.net.incoming(own, n), self.net.outgoing(own, n)) if s is not None]
                norm = sum(s[0].square().sum(1) for s in sides)
                out[mine] = norm / norm.mean()
            return out
        return self.seen[k].clamp(min=1e-20)

    def _within(self, evidence: Any, opens: Any, gated: Any, share: float) -> Any:
        most, opens = share * self.dense, opens.copy()
        for s in self.slices:
            if not opens[s].any():
                opens[s.start + int(evidence[s].argmax())] = True
        order = [s.start + np.argsort(evidence[s], kind="stable") for s in self.slices]

        def cost() -> float:
            return float(self.net.macs(self.counts(torch.from_numpy(opens).float())))

        def price(g: int) -> float:
            now = cost()
            opens[g] = not opens[g]
            changed = abs(cost() - now)
            opens[g] = not opens[g]
            return changed

        while cost() > most:
            score, may = {}, opens & gated & ~self.net.idle(opens)
            for s, o in zip(self.slices, order, strict=True):
                left = opens[s].sum()
                for g in o[may[o]][:5]:  # the first that saves anything
                    if left > 1 and (saves := price(g)) > 0:
                        score[g] = evidence[g] / saves * len(o) / left
                        break
            opens[min(score, key=score.__getitem__)] = False
        while True:
            score, may = {}, ~opens & gated & ~self.net.idle(opens)
            for o in order:
                for g in o[may[o]][::-1][:5]:
                    if (needs := price(g)) > 0:
                        if cost() + needs <= most:
                            score[g] = evidence[g] / needs
                        break
            if not score:
                return opens
            opens[max(score, key=score.__getitem__)] = True

    def _shape(self, k: int, v: Variant) -> None:
        run = self.runs[k]
        if v.kind == "narrow":
            for share in range(1024, 0, -1):
                widths = scaled_widths(self.net.widths, share / 1024)
                self.mask[k] = 1
                for n, mine in zip(widths, self.slices[1:], strict=True):
                    self.mask[k, mine.start + n : mine.stop] = 0
                if self.net.macs(self.counts(self.mask[k])) <= run.at_most * self.dense:
                    break
        elif v.kind == "shape":
            self.mask[k] = torch.as_tensor(self.found[v.of, run.at_most, run.seed], device=self.device)[
                : self.mask.shape[1]
            ]
        self.settled[k] = True
        fans = self.net.fans([int(n[k]) for n in self.counts(self.mask)])
        for j, w in enumerate(self.w):
            w[k] *= fans[j // 2]

    # ---- the end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def errors(self, x: Tensor, y: Tensor) -> list[float]:
        wrong = torch.zeros(len(self.runs), device=self.device)
        z = [self.mask[:, s].unsqueeze(1) for s in self.slices]
        for a, b in zip(x.split(250), y.split(250), strict=True):
            logits = self.net.forward(self.w, a.expand(len(self.runs), *a.shape), z)
            wrong += (logits.argmax(2) != b).sum(1)
        return (100 * wrong / len(y)).tolist()


def _unpacked(mask: str) -> Any:
    return np.unpackbits(np.frombuffer(bytes.fromhex(mask), dtype=np.uint8)).astype(np.float32)


def trained(net: Any, runs: Sequence[Run], pixels: Sequence[Tensor], epochs: int, found: dict[Any, Any]) -> list[Any]:
    """Trains runs in one stack, and gives a record of each."""
    x, y, held_x, held_y = pixels
    per, device = len(x) // BATCH, str(x.device)
    total = epochs * per
    warm = max(1, total // 10)
    stack = Stack(net, runs, total, device, found)
    seeds = sorted({run.seed for run in runs})
    which = torch.tensor([seeds.index(run.seed) for run in runs], device=device)
    t, start = 0, time.perf_counter()
    for epoch in range(epochs):
        made = (data.shuffled(len(x), BATCH, data.epoch_generator(seed, epoch)) for seed in seeds)
        order = torch.stack(list(made)).to(device)
        for k in range(per):
            lr = RATE * min(1, (t + 1) / warm) * (1 + math.cos(math.pi * t / total)) / 2
            index = order[:, k]
            stack.step(t, x[index][which], y[index][which], lr)
            t += 1
            if t == 300:
                print(f"{len(runs)} runs: about {(time.perf_counter() - start) / 300 * total:.0f} s", flush=True)
    errors, seconds = stack.errors(held_x, held_y), time.perf_counter() - start
    out = []
    for k, run in enumerate(runs):
        counts = [int(n[k]) for n in stack.counts(stack.mask)]
        found[run.variant.name, run.at_most, run.seed] = stack.mask[k].cpu().numpy()
        kept = stack.net.macs(counts) / stack.dense
        mask = np.packbits(found[run.variant.name, run.at_most, run.seed] > 0).tobytes().hex()
        told = {"error": errors[k], "kept": kept, "widths": counts, "mask": mask, "seconds": seconds / len(runs)}
        out.append({**asdict(run), **told})
    return out


def _variants() -> tuple[list[Variant], list[Variant]]:
    """What is trained, and what is trained afterwards, with shapes that the first found. The telling ones first."""

    def early(name: str, learning: float = 0.2, **changes: Any) -> Variant:
        return Variant(name, learning=learning, **changes)

    first = [
        Variant("base"), Variant("half", drop=0.5), Variant("keep-90", drop=0.1), Variant("keep-99", drop=0.01),
        Variant("inputs", inputs=True), early("learning-20"), early("learning-5", 0.05), early("half-20", drop=0.5),
        early("keep-90-20", drop=0.1), early("inputs-20", inputs=True), early("inputs-half-20", inputs=True, drop=0.5),
        early("inputs-keep-90-20", inputs=True, drop=0.1), early("delay-10-10", 0.1, delay=0.1),
        early("inputs-noise-10-10-20", inputs=True, noise=0.1, noise_inputs=0.1), early("noise-10-20", noise=0.1),
        early("bernoulli-20", family="bernoulli", drop=0.5), Variant("narrow", kind="narrow"),
        early("cut-taylor", press=False, drop=0.02, rank="taylor"),
        early("cut-norm", press=False, drop=0.02, rank="norm"),
    ]  # fmt: skip
    shapes = [Variant(f"shape-of-{of}", kind="shape", of=of) for of in ("base", "inputs-20")]
    return first, [*shapes, Variant("dense", kind="dense")]


def summary(records: Sequence[Any]) -> str:
    """Mean error and its standard error, a line for each variant and a column for each share."""
    names, cells = dict.fromkeys(r["variant"]["name"] for r in records), dict.fromkeys(r["at_most"] for r in records)
    lines = [f"{'':24}" + "".join(f"{100 * c:14.0f} %" for c in cells)]
    for name in names:
        line = f"{name:24}"
        for cell in cells:
            e = [r["error"] for r in records if r["variant"]["name"] == name and r["at_most"] == cell]
            line += f"{np.mean(e):9.3f} ±{np.std(e) / math.sqrt(max(1, len(e) - 1)):.3f}" if e else " " * 16
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Trains what is asked for, seed by seed, and stores it; what is stored already is not trained again."""
    p = argparse.ArgumentParser()
    p.add_argument("net", choices=NETS)
    p.add_argument("--data", required=True)
    p.add_argument("--device", default="cpu")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--cells", default=",".join(map(str, CELLS)))
    p.add_argument("--only", default="", help="variants, with commas between")
    p.add_argument("--at-once", type=int, default=600, help="runs in a stack, at most")
    p.add_argument("--limit", type=float, default=math.inf, help="seconds in which the last stack must end")
    p.add_argument("--out", type=Path, required=True)
    o = p.parse_args()
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = True
    dataset = load("mnist-split", o.data, o.device)
    images = (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y)
    pixels = [dataset.scaled(t, "standard").flatten(1) if t.ndim > 1 else t for t in images]
    o.out.mkdir(parents=True, exist_ok=True)
    file, found, records, longest = o.out / f"{o.net}.json", {}, [], 0.0
    if file.exists():
        records = json.loads(file.read_text())["runs"]
        found = {(r["variant"]["name"], r["at_most"], r["seed"]): _unpacked(r["mask"]) for r in records}
    wanted, cells = set(o.only.split(",")) - {""}, [float(c) for c in o.cells.split(",")]
    for number, variants in enumerate(_variants()):
        chosen = [v for v in variants if not wanted or v.name in wanted]
        runs = [Run(v, c, s) for s in range(o.seeds) for v in chosen for c in cells]
        left = [r for r in runs if (r.variant.name, r.at_most, r.seed) not in found]
        if number:  # shapes, of runs that are there
            left = [r for r in left if r.variant.kind != "shape" or (r.variant.of, r.at_most, r.seed) in found]
        whole = max(1, len(chosen) * len(cells))  # a seed
        size = min(o.at_once, max(1, o.at_once // whole) * whole)
        for k in range(0, len(left), size):
            begun = time.perf_counter()
            if begun - start + longest * max(0.35, len(left[k : k + size]) / size) > o.limit:
                print("no time is left", flush=True)
                break
            records += trained(NETS[o.net], left[k : k + size], pixels, o.epochs, found)
            longest = max(longest, time.perf_counter() - begun)
            about = provenance(torch.device(o.device))
            told = {"network": o.net, "epochs": o.epochs, "held_out": HELD_OUT, "about": about, "runs": records}
            file.with_suffix(".new").write_text(json.dumps(told))
            file.with_suffix(".new").replace(file)
            print(f"{time.perf_counter() - start:.0f} s: {len(records)} runs, {records[-1]['seconds']:.2f} s each")
            print(summary(records), flush=True)


if __name__ == "__main__":
    main()
