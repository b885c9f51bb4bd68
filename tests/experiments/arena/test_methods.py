"""Every method of the arena, on small networks: the MACs that torch counts, equal steps, the batches, new weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.arena import counting, ours, rivals, scratch
from ellzero.experiments.arena import loop as arena_loop
from ellzero.experiments.arena.bout import Bout
from ellzero.experiments.arena.contest import METHODS, Contest
from ellzero.experiments.arena.loop import BATCH, DECAY, RATE, Loop
from ellzero.experiments.data import Tensors, epoch_generator, load, scaled, shuffled, stand_in
from ellzero.experiments.networks import Network, find
from ellzero.graph.standins.layers import Closed
from support.noise import quartered
from support.oracles import counted_macs, numel

# Six steps leave statistics that the noise of gates is in; what is told of that is told elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:batch-norm statistics were gathered:UserWarning")


@cache
def digits(count: int = 2 * BATCH) -> Tensors:
    whole = load("mnist5k")
    assert isinstance(whole, Tensors)
    few = {name: getattr(whole, name)[:count] for name in ("train_x", "train_y")}
    return replace(whole, **few, test_x=whole.test_x[:100], test_y=whole.test_y[:100])


class Small(nn.Module):
    """Seconds are for large ones."""

    def __init__(self, classes: int = 10, share: float = 1.0) -> None:
        super().__init__()
        width = max(1, round(24 * share))
        self.conv, self.norm = nn.Conv2d(1, width, 3, 4), nn.BatchNorm2d(width)
        self.fc1, self.fc2 = nn.Linear(width * 49, 2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(F.relu(self.norm(self.conv(x))).flatten(1)))
        return self.fc2(hidden)  # type: ignore[no-any-return]


SMALL = Network(
    name="small", title="small", make=lambda classes, dropout=0.0: Small(classes), narrower=Small, images=(1, 28, 28),
    has_batch_norm=True, compiling=(1, 0.0), test_batch=100,
)  # fmt: skip


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch-Pruning takes milliseconds for a step, and the nearest MACs are not needed."""
    monkeypatch.setattr(rivals, "STEPS", 200)


def bout(at_most: float, found: Path | None = None, network: Network = SMALL, data: Tensors | None = None) -> Bout:
    torch.manual_seed(0)
    return Bout(network, at_most, Loop(data or digits(), 3), found)


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    "method", [m for m in METHODS if m not in ("dense", *scratch.SHAPES) and not re.search("-keep|-l", m)]
)
def test_a_method_keeps_within_the_macs_and_takes_all_steps(method: str) -> None:
    at_most = bout(0.3)
    network = METHODS[method](at_most)
    whole = counted_macs(Small(), [at_most.example])
    kept = counted_macs(network.eval(), [at_most.example])
    assert kept <= 0.3 * whole
    unit = 9 * 49 + 49 * 48  # MACs of a map of the first layer, the dearest unit
    assert kept > 0.3 * whole - (2 * unit if method in ("magnitude", "norm", "taylor") else 1.5 * unit)
    assert at_most.loop.taken == 3 * 2
    assert at_most.loop.seconds > 0


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("method", ["budget", "magnitude"])
def test_a_padded_residual_network_shrinks_by_either(method: str) -> None:
    noise = quartered(BATCH)
    given = bout(0.4, network=find("resnet-8"), data=noise)
    kept = counted_macs(METHODS[method](given).eval(), [given.example])
    assert kept <= 0.4 * counted_macs(given.dense(), [given.example])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("method", ["budget", "magnitude", "norm", "taylor", "narrow", "shape"])
def test_a_method_on_a_gpu_keeps_within_the_macs_and_takes_all_steps(method: str, tmp_path: Path) -> None:
    data = digits()
    there = replace(data, **{name: getattr(data, name).cuda() for name in ("train_x", "train_y", "test_x", "test_y")})
    l0.save(Small(10, 0.5), tmp_path / "found.safetensors")
    given = bout(0.3, tmp_path / "found.safetensors", data=there)
    network = METHODS[method](given)
    assert {p.device.type for p in network.parameters()} == {"cuda"}
    assert counted_macs(network.cpu().eval(), [given.example.cpu()]) <= 0.3 * counted_macs(
        Small(), [torch.zeros(1, 1, 28, 28)]
    )
    assert given.loop.taken == 3 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "keep", "learning", "inputs", "rate"),
    [
        ("budget", 0.95, 0.4, True, None),
        ("budget-hidden", 0.95, 0.4, False, None),
        ("budget-keep-50", 0.5, 0.4, True, None),
        ("budget-keep-90-learning-20", 0.9, 0.2, True, None),
        ("budget-inputs-learning-20", 0.95, 0.2, True, None),
        ("budget-fast", 0.95, 0.4, True, 1.5 / math.sqrt(2.4)),
    ],
)
def test_a_changed_budget_is_what_its_name_says(
    method: str, keep: float, learning: float, inputs: bool, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def told(gated: l0.Gated, **options: Any) -> None:
        raise Seen(gated, options)

    monkeypatch.setattr(ours, "Budget", told)
    with pytest.raises(Seen) as seen:
        METHODS[method](bout(0.3, network=find("lenet300")))
    gated, options = seen.value.args
    assert options == {"macs": 0.3, "steps": 6, "learning": learning, "gate_lr": rate and pytest.approx(rate)}
    assert sorted(p.shape for p in gated.placements) == [(100,), (300,)] + [(784,)] * inputs
    for _, gate in gated.named_gates():  # log α starts at the logit of the keep rate, with a deviation of 0.01
        assert float(gate.log_alpha.detach().mean()) == pytest.approx(math.log(keep / (1 - keep)), abs=0.005)


def test_macs_are_counted_without_a_forward_pass_while_layers_shrink() -> None:
    net, x = Small(), torch.zeros(1, 1, 28, 28)
    count = counting.counter(net, x)
    assert count() == counting.macs(net, x) == counted_macs(net.eval(), [x]) == 24 * 9 * 49 + 24 * 49 * 48 + 480
    net.fc1.weight, net.fc1.bias = nn.Parameter(net.fc1.weight[:5]), nn.Parameter(net.fc1.bias[:5])
    net.fc2.weight = nn.Parameter(net.fc2.weight[:, :5])
    assert count() == counted_macs(net, [x]) == 24 * 9 * 49 + 24 * 49 * 5 + 50


# ---------------------------------------------------------------- the loop


def by_hand(net: nn.Module, data: Tensors, seed: int, epochs: range, base: float, decay: float) -> None:
    """SGD with Nesterov's momentum written out, a tenth of warm-up and a cosine over these epochs."""
    total, k = len(epochs) * (len(data.train_x) // BATCH), 0
    velocity = [torch.zeros_like(p) for p in net.parameters()]
    for epoch in epochs:
        for rows in shuffled(len(data.train_x), BATCH, epoch_generator(seed, epoch)):
            x = scaled(data.train_x[rows], data.mean, data.std)
            grads = torch.autograd.grad(F.cross_entropy(net(x), data.train_y[rows]), list(net.parameters()))
            rate = base * min(1, (k + 1) / max(1, total // 10)) * (1 + math.cos(math.pi * k / total)) / 2
            with torch.no_grad():
                for p, g, v in zip(net.parameters(), grads, velocity, strict=True):
                    g = g + decay * p
                    v.mul_(0.9).add_(g)
                    p -= rate * (g + 0.9 * v)
            k += 1


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A loop that takes this machine for a GPU; the numbers of steps that were replayed."""
    replayed: list[int] = []

    def captured(step: Any) -> Any:
        replayed.append(0)

        def replay(*batch: Tensor) -> Tensor:
            replayed[-1] += 1
            return step(*batch)

        return replay

    monkeypatch.setattr(Loop, "_on_gpu", True)
    monkeypatch.setattr(Loop, "_wait", lambda _: None)
    monkeypatch.setattr(arena_loop, "Captured", captured)
    return replayed


@pytest.mark.parametrize("gpu", [False, True])
def test_the_loop_is_sgd_by_hand_and_a_second_phase_goes_on_with_the_next_epoch(
    gpu: bool, request: pytest.FixtureRequest
) -> None:
    replayed = request.getfixturevalue("replaying") if gpu else [30, 2]
    torch.manual_seed(3)
    ours, theirs = (nn.Sequential(nn.Flatten(), nn.Linear(784, 10)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    loop = Loop(digits(), 16, seed=5)
    loop.train(ours, 15)  # three steps of warm-up
    loop.train(ours, 1, decay=0.0)
    by_hand(theirs, digits(), 5, range(15), RATE, DECAY)
    by_hand(theirs, digits(), 5, range(15, 16), RATE, 0.0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert loop.taken == 32
    assert replayed == [30, 2]
    with pytest.raises(ValueError, match="at most the 0 that are left, got 1"):
        loop.train(ours, 1)
    with torch.no_grad():
        wrong = sum(int(ours(scaled(x[None], digits().mean, digits().std)).argmax() != y)
                    for x, y in zip(digits().test_x, digits().test_y, strict=True))  # fmt: skip
    assert loop.error(ours) == wrong


def test_all_see_the_same_batches_of_a_seed_and_colour_images_are_cropped() -> None:
    noise = stand_in("cifar10", 2 * BATCH)

    def seen(seed: int, *phases: int) -> list[Tensor]:
        batches: list[Tensor] = []

        class Watching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(10))

            def forward(self, x: Tensor) -> Tensor:
                batches.append(x)
                return self.scale.expand(len(x), 10)

        loop = Loop(noise, sum(phases), seed)
        for epochs in phases:
            loop.train(Watching(), epochs)
        return batches

    once, twice, other = seen(0, 2), seen(0, 1, 1), seen(1, 2)
    assert len(once) == 4
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert not torch.equal(once[0], other[0])
    assert not torch.equal(once[0], once[2])
    black = scaled(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), noise.mean, noise.std)
    corners = torch.cat(once)[:, :, 0, 0] == black[:, :, 0, 0]
    assert 0.3 < corners.all(1).double().mean() < 0.9  # 1 − (5/9)² = 69 % have a border in this corner


def test_what_is_called_before_a_step_may_change_the_gradient() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    before = [p.clone() for p in net.parameters()]
    Loop(digits(), 2).train(net, 1, decay=0.0, before_step=lambda: [p.grad.zero_() for p in net.parameters()])  # type: ignore
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_gpu_replays_steps_when_gates_have_settled_and_never_those_with_something_before_them(
    replaying: list[int],
) -> None:
    given = bout(0.3)
    METHODS["budget"](given)
    assert given.loop.taken == 6
    assert replaying == [6 - 2]  # two fifths of six steps
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    Loop(digits(), 2).train(net, 1, before_step=lambda: None)
    assert replaying == [4]


@pytest.mark.parametrize("colour", [True, False])
def test_a_gpu_takes_colour_images_in_bfloat16_channels_last_and_digits_as_they_are(
    colour: bool, replaying: list[int]
) -> None:
    data = stand_in("cifar10", BATCH) if colour else digits()
    seen: list[tuple[bool, bool, torch.dtype]] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3 if colour else 1, 10, 28 + 4 * colour)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x)
            last = {"memory_format": torch.channels_last}
            seen.append((x.is_contiguous(**last), self.conv.weight.is_contiguous(**last), out.dtype))
            return out.flatten(1)

    net = Watching()
    loop = Loop(data, 1)
    loop.train(net, 1)
    assert loop.half is colour
    assert set(seen) == {(True, True, torch.bfloat16) if colour else (True, True, torch.float32)}
    assert net.conv.weight.dtype is torch.float32
    loop.error(net)
    assert seen[-1][2] is torch.float32


def test_group_norms_are_regularised_by_the_package_in_place_of_weight_decay(
    monkeypatch: pytest.MonkeyPatch, coarse: None
) -> None:
    import torch_pruning as tp

    calls: list[tuple[float, int, bool]] = []
    given = bout(0.5)
    real, train = tp.pruner.GroupNormPruner.regularize, Loop.train
    monkeypatch.setattr(
        tp.pruner.GroupNormPruner, "regularize",
        lambda self, model: (calls.append((self.reg, given.loop.taken, model.training)), real(self, model)),
    )  # fmt: skip
    decays: list[float] = []
    monkeypatch.setattr(
        Loop, "train", lambda self, *a, decay=DECAY, **k: (decays.append(decay), train(self, *a, decay=decay, **k))[1]
    )
    rivals.norm(given)
    assert calls == [(5e-4, step, True) for step in range(2)]  # one of three epochs
    assert decays == [0.0, DECAY]


def test_a_target_that_pruning_cannot_reach_is_refused(coarse: None) -> None:
    given = bout(0.0001)
    with pytest.raises(ValueError, match="must be within what Torch-Pruning reaches"):
        rivals.magnitude(given)
    with pytest.raises(ValueError, match="must be within what a narrower `small` reaches"):
        scratch.narrow(bout(0.0001))


# ---------------------------------------------------------------- from scratch


def shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in net.named_parameters()}


def test_the_narrower_network_is_the_widest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "train", lambda self, network, epochs: network)
    given = bout(0.3)
    narrow = scratch.narrow(given)
    fitting = [n for n in range(1, 25) if counted_macs(Small(10, n / 24), [given.example]) <= given.most]
    assert shapes(narrow) == shapes(Small(10, max(fitting) / 24))


def test_the_shape_comes_from_the_file_and_the_weights_from_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Small()
    gated = l0.attach(net, torch.zeros(1, 1, 28, 28))
    for name, gate in gated.named_gates():
        gate.close_(torch.arange(gate.shape[0]) % (3 if name == "conv" else 4) > 0)
    small = l0.compact(gated)
    assert [small.conv.out_channels, small.fc1.out_features] == [8, 12]
    l0.save(small, tmp_path / "found.safetensors")
    monkeypatch.setattr(Loop, "train", lambda self, network, epochs: network)
    given = bout(0.3, tmp_path / "found.safetensors")
    torch.manual_seed(7)
    new = scratch.shape(given)
    assert shapes(new) == shapes(small)
    # The weights that torch draws for such layers, in this order, after those of the dense network.
    torch.manual_seed(7)
    Small()
    assert torch.equal(new.conv.weight, nn.Conv2d(1, 8, 3, 4).weight)  # type: ignore[union-attr]
    assert torch.equal(new.fc1.weight, nn.Linear(8 * 49, 12).weight)  # type: ignore[union-attr]
    assert torch.equal(new.norm.running_var, torch.ones(8))  # type: ignore[union-attr]
    for name, value in new.named_parameters():
        if value.ndim > 1:
            assert not torch.equal(value, small.get_parameter(name)), name
    with pytest.raises(ValueError, match="`shape` must come after `budget`"):
        scratch.shape(bout(0.3))


def test_a_layer_of_which_nothing_is_left_gives_nothing_with_new_weights() -> None:
    closed = Closed(nn.Linear(3, 2), 2)
    scratch.renew(nn.Sequential(closed))
    assert closed(torch.ones(1, 3)).tolist() == [[0.0, 0.0]]


# ---------------------------------------------------------------- contests


def test_a_seed_of_a_contest_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Contest("lenet300", "narrow", 0.1, "mnist5k", 2)
    got = row.fought(4, digits(), tmp_path / "none")
    first, second = got["shapes"]["fc1.weight"][0], got["shapes"]["fc2.weight"][0]
    macs = 784 * first + first * second + second * 10
    assert got["macs"] == {"dense": 266_200, "kept": macs / 266_200}
    assert got["params"] == macs + first + second + 10
    assert (got["seed"], got["steps"]) == (4, 4)
    assert 0 < got["seconds"] <= got["seconds_in_all"]
    assert {"commit", "torch", "device"} < got["about"].keys()
    torch.manual_seed(4)
    given = Bout(find("lenet300"), 0.1, Loop(digits(), 2, 4))
    assert given.loop.error(scratch.narrow(given)) == got["error_last"]
    assert row.name == "lenet300-10-narrow"
    assert row.settings()["epochs"] == 2
    for again in ("shape", "shape-counted"):
        assert replace(row, method=again).needs == "lenet300-10-budget"


@pytest.mark.slow
def test_the_shape_is_trained_from_what_budget_left(tmp_path: Path) -> None:
    found = tmp_path / "folder" / "found.safetensors"
    row = Contest("lenet300", "budget", 0.2, "mnist5k", 5)
    ours = row.fought(0, digits(), found)
    for method, epochs in (("shape", 5), ("shape-counted", 3)):  # the gates chose for two of them
        again = replace(row, method=method).fought(0, digits(), found)
        assert numel(l0.load(find("lenet300").make(10), found)) == ours["params"] == again["params"]
        assert again["shapes"] == ours["shapes"]
        assert again["macs"] == ours["macs"]
        assert again["steps"] == ours["steps"] * epochs / 5
    assert ours["macs"]["kept"] <= 0.2


def wrong() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"method": "lottery"}, "`method` must be one of budget, stg, .* got 'lottery'"
    yield {"at_most": 1.0}, r"`at_most` must be in \(0, 1\), and 1 of the dense network alone, got 1.0"
    yield {"method": "dense"}, "`at_most` must be .* got 0.1"
    yield {"epochs": 1}, "`epochs` must be at least 2"
    yield {"network": "lenet"}, "`network` must be"
    yield {"data": "cifar10"}, r"`data` must have images of \(1, 28, 28\) for `lenet300`, got 'cifar10'"


@pytest.mark.parametrize(("change", "message"), list(wrong()))
def test_a_contest_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contest(**{"network": "lenet300", "method": "narrow", "at_most": 0.1, "data": "mnist", "epochs": 2} | change)
