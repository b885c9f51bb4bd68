"""The papers' networks against published sizes, closed forms, and a forward pass written out by hand."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.networks import LeNet5, LeNet300, ResNet, WideResNet, find, initialize_2018, initialize_2021
from ellzero.gated.placements import Placement, Where
from ellzero.graph.axes import Graph
from ellzero.graph.tracing import trace
from support.oracles import assert_same, counted_macs, numel, settled

DIGIT, COLOUR = torch.zeros(2, 1, 28, 28), torch.zeros(2, 3, 32, 32)


def gates(gated: l0.Gated) -> dict[str, int]:
    return {name: gate.shape.numel() for name, gate in gated.named_gates()}


# ---------------------------------------------------------------- sizes


def wide_parameters(depth: int, width: int, classes: int) -> int:
    """By arithmetic: a block is two norms, two 3×3 convolutions, and a 1×1 one around where its shape changes."""
    total, inputs = 3 * 16 * 9, 16
    for group, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            total += 2 * inputs + 9 * inputs * outputs + 2 * outputs + 9 * outputs * outputs
            if block == 0 and (group > 0 or inputs != outputs):
                total += inputs * outputs
            inputs = outputs
    return total + 2 * inputs + (inputs + 1) * classes


def test_published_sizes_of_the_small_networks() -> None:
    assert numel(LeNet300()) == 266_610
    assert numel(LeNet5()) == 431_080
    assert counted_macs(LeNet300(), [DIGIT[:1]]) == 266_200
    assert counted_macs(LeNet5(), [DIGIT[:1]]) == 2_293_000


@pytest.mark.parametrize(("depth", "width", "classes"), [(10, 1, 10), (16, 1, 100), (16, 4, 10), (28, 10, 10)])
def test_parameters_of_wide_networks(depth: int, width: int, classes: int) -> None:
    with torch.device("meta"):
        net = WideResNet(depth, width, classes)
    assert numel(net) == wide_parameters(depth, width, classes)
    assert sum(1 for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)) == depth - 3


@pytest.mark.slow
def test_published_sizes_of_wrn_28_10() -> None:
    with torch.device("meta"):
        net, x = WideResNet(28, 10), torch.zeros(1, 3, 32, 32)
    assert numel(net) == 36_479_194  # 36.5 M in Zagoruyko & Komodakis, table 4
    here = counted_macs(net, [x])
    assert here == pytest.approx(5.2e9, rel=0.01)
    for block in net.blocks:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    assert counted_macs(net, [x]) == pytest.approx(1.13 * here, rel=0.01)  # as in the L0 papers' code


@pytest.mark.slow
def test_published_sizes_of_resnet_56() -> None:
    with torch.device("meta"):
        net, x = ResNet(56), torch.zeros(1, 3, 32, 32)
    assert numel(net) == 853_018  # 0.85 M in He et al., table 6
    macs, inputs = 3 * 16 * 9 * 32**2 + 64 * 10, 16
    for width, side in ((16, 32), (32, 16), (64, 8)):
        macs += (inputs * width + 17 * width**2) * 9 * side**2
        inputs = width
    assert counted_macs(net, [x]) == macs == 125_485_696


def test_a_padded_residual_network_by_hand() -> None:
    net, x = settled(ResNet(8)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    state = net.state_dict()

    def normed(h: Tensor, at: str) -> Tensor:
        mean, var, scale, shift = (
            state[f"{at}.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
        )
        return (h - mean) / (var + 1e-5).sqrt() * scale + shift

    h = normed(F.conv2d(x, state["conv.weight"], padding=1), "bn").clamp(min=0)
    for block, (stride, more) in enumerate(((1, 0), (2, 8), (2, 16))):
        at = f"blocks.{block}"
        hidden = normed(F.conv2d(h, state[f"{at}.conv1.weight"], padding=1, stride=stride), f"{at}.bn1").clamp(min=0)
        empty = h.new_zeros(2, more, h.shape[2] // stride, h.shape[3] // stride)
        around = torch.cat([empty, h[:, :, ::stride, ::stride], empty], 1)
        h = (normed(F.conv2d(hidden, state[f"{at}.conv2.weight"], padding=1), f"{at}.bn2") + around).clamp(min=0)
    assert_same(net(x), h.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"])


@pytest.mark.parametrize("name", ["lenet300", "lenet5", "resnet-8"])
def test_a_narrower_network_has_a_share_of_every_width(name: str) -> None:
    facts = find(name)
    assert facts.narrower is not None
    with torch.device("meta"):
        whole, half, least = (facts.narrower(10, share) for share in (1.0, 0.5, 0.001))
    layers = [m for m in whole.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    halves = [m for m in half.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert [m.weight.shape[0] for m in halves] == [*(m.weight.shape[0] // 2 for m in layers[:-1]), 10]
    assert all(m.weight.shape[0] == 1 for m in list(least.modules())[1:2] if isinstance(m, nn.Linear | nn.Conv2d))
    assert [p.shape for p in whole.parameters()] == [p.shape for p in facts.make(10).parameters()]
    with pytest.raises(ValueError, match=r"`share` must be in \(0, 1\], got 0"):
        facts.narrower(10, 0)


def test_a_pre_activation_resnet_has_the_layers_of_its_name_and_two_ways_around() -> None:
    with torch.device("meta"):
        net = find("preresnet-110").make(10)
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len([m for m in layers if m.weight.shape[2:] != (1, 1)]) == 110
    assert [tuple(m.weight.shape[:2]) for m in layers if m.weight.shape[2:] == (1, 1)] == [(32, 16), (64, 32)]
    squares = 36 * 16**2 + (16 * 32 + 35 * 32**2) + (32 * 64 + 35 * 64**2)  # of each stage; two begin with fewer
    norms = 2 * (36 * 16 + (16 + 35 * 32) + (32 + 35 * 64) + 64)
    wanted = 9 * (3 * 16 + squares) + 16 * 32 + 32 * 64 + norms + 64 * 10 + 10
    assert sum(p.numel() for p in net.parameters()) == wanted == 1_730_522


def test_no_such_network() -> None:
    with pytest.raises(ValueError, match=r"`depth` must be 6 n \+ 2 .* got 57"):
        ResNet(57)
    with pytest.raises(ValueError, match=r"`depth` must be 6 n \+ 4 .* got 12"):
        WideResNet(depth=12)
    with pytest.raises(ValueError, match=r"`depth` .* got 4"):
        WideResNet(depth=4)
    with pytest.raises(ValueError, match=r"`width` .* got 0"):
        WideResNet(16, width=0)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("lenet300", DIGIT),
        ("lenet5", DIGIT),
        pytest.param("wrn-10-1", COLOUR, marks=pytest.mark.slow),
        pytest.param("resnet-14", COLOUR, marks=pytest.mark.slow),
    ],
)
def test_facts_are_those_of_the_network(name: str, x: Tensor) -> None:
    facts = find(name)
    net = facts.make(7, dropout=0.5).eval()
    assert facts.name == name
    assert net(x).shape == (2, 7)
    assert x.shape[1:] == facts.images
    assert facts.has_batch_norm == any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert facts.has_dropout == any(isinstance(m, nn.Dropout) and m.p == 0.5 for m in net.modules())
    if facts.blocks is not None:
        assert gates(l0.attach(net, x, where=l0.per_layer(only=facts.blocks)))
    # A layer that gives nothing is no end where a path leads around it.
    hidden = "blocks.1.conv1" if facts.residual else "fc1"
    for value in net.get_submodule(hidden).parameters():
        nn.init.zeros_(value)
    differ = not torch.equal(*net(torch.randn_like(x)).split(1))
    assert differ == facts.residual


@pytest.mark.parametrize(
    "name", ["resnet", "lenet-5", "wrn-27-10", "wrn-4-1", "wrn-28-0", "wrn-28-10-1", "preresnet-111", ""]
)
def test_an_unknown_network_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=r'^`network` must be .*"lenet300", "lenet5",.* "wrn-DEPTH-WIDTH" with .* or MODULE:FUNC.*, got ',
    ):
        find(name)


# ---------------------------------------------------------------- forward passes


def test_pixels_and_images_are_the_same_to_the_perceptron() -> None:
    net, x = LeNet300(), torch.rand(3, 1, 28, 28)
    assert torch.equal(net(x), net(x.view(3, 784)))


def by_hand(state: Mapping[str, Tensor], x: Tensor, strides: list[int]) -> Tensor:
    """A wide residual network in evaluation, from its state dict alone."""

    def norm(h: Tensor, at: str) -> Tensor:
        mean, var, scale, shift = (
            state[f"{at}.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
        )
        return ((h - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)

    h = F.conv2d(x, state["conv.weight"], padding=1)
    for block, stride in enumerate(strides):
        at = f"blocks.{block}"
        active = norm(h, f"{at}.bn1")
        hidden = norm(F.conv2d(active, state[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn2")
        if (around := state.get(f"{at}.shortcut.weight")) is not None:
            h = F.conv2d(active, around, stride=stride)
        h = h + F.conv2d(hidden, state[f"{at}.conv2.weight"], padding=1)
    features = norm(h, "bn").flatten(2).mean(2)
    return features @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize(
    ("depth", "width", "strides"), [(10, 1, [1, 2, 2]), (10, 2, [1, 2, 2]), (16, 1, [1, 1, 2, 1, 2, 1])]
)
def test_wide_network_by_hand(depth: int, width: int, strides: list[int]) -> None:
    net = settled(WideResNet(depth, width, classes=7, dropout=0.5))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert_same(net(x), by_hand(net.state_dict(), x, strides), 1e-10)


def test_dropout_is_on_the_hidden_layer() -> None:
    net = WideResNet(10, 1, dropout=0.25).train()
    seen: dict[str, Tensor] = {}
    net.blocks[1].bn2.register_forward_hook(lambda _m, _args, out: seen.update(normed=out))
    net.blocks[1].conv2.register_forward_pre_hook(lambda _m, args: seen.update(read=args[0]))
    net(torch.randn(8, 3, 32, 32))
    alive = seen["normed"].clamp(min=0)
    dropped = (seen["read"] == 0) & (alive > 0)
    torch.testing.assert_close(seen["read"], torch.where(dropped, 0, alive / 0.75))
    rate, n = float(dropped.sum() / (alive > 0).sum()), int((alive > 0).sum())
    assert abs(rate - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5


# ---------------------------------------------------------------- what the library finds in them


@pytest.mark.slow
def test_gates_of_the_papers() -> None:
    perceptron = l0.attach(LeNet300(), DIGIT, where=l0.per_layer)
    assert gates(perceptron) == {"fc1": 784, "fc2": 300, "fc3": 100}
    lenet = l0.attach(LeNet5(), DIGIT, where=l0.per_layer)
    assert gates(lenet) == {"conv1": 20, "conv2": 50, "fc1": 800, "fc2": 500}
    assert l0.dense(l0.macs, lenet) == 2_293_000


def hidden(graph: Graph) -> list[Placement]:
    """Where the first paper has its gates; the stem, where no stream begins with it, can shrink too."""
    return [placement for placement in l0.shrinkable()(graph) if placement.name.startswith("blocks.")]


def placed(net: nn.Module, where: Where) -> dict[str, int]:
    """Where gates would go, without trying removals, which takes most of the time of `attach`."""
    return {placement.name: placement.shape[0] for placement in where(trace(net, (COLOUR,)))}


@pytest.mark.slow
def test_hidden_layers_of_small_wide_networks() -> None:
    assert placed(WideResNet(10, 1), l0.shrinkable()) == {f"blocks.{b}.conv1": 16 << b for b in range(3)}
    sixteen = {f"blocks.{b}.conv1": 16 << b // 2 for b in range(6)}
    assert placed(WideResNet(16, 1, dropout=0.3), l0.shrinkable()) == sixteen
    wide = l0.attach(WideResNet(10, 2), COLOUR)
    expected = {f"blocks.{b}.conv1": 32 << b for b in range(3)}
    assert gates(wide) == expected | {"conv": 16}
    assert {placement.name: placement.shape[0] for placement in hidden(wide.graph)} == expected


@pytest.mark.slow
def test_hidden_layers_of_wrn_28_10() -> None:
    found = placed(WideResNet(28, 10), hidden)
    assert found == {f"blocks.{b}.conv1": 160 << b // 4 for b in range(12)}
    assert len(found) == 12
    assert sum(found.values()) == 4_480


# ---------------------------------------------------------------- initial weights


def assert_normal(values: Tensor, variance: float) -> None:
    """Mean, variance and kurtosis of a normal distribution, to five standard errors."""
    x, n = values.detach().double().flatten() / variance**0.5, values.numel()
    for power, moment, error in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):  # Var x^k: 1, 2, 96
        assert abs(float((x**power).mean()) - moment) < 5 * (error / n) ** 0.5, f"moment {power}"


def test_initial_weights_of_2018() -> None:
    lenet, wide = LeNet5(), WideResNet(10, 2)
    for net in (lenet, wide):
        initialize_2018(net, torch.Generator().manual_seed(1))
    for layer, inputs in ((lenet.conv1, 25), (lenet.conv2, 500), (lenet.fc1, 800), (lenet.fc2, 500)):
        assert_normal(layer.weight, 2 / inputs)
        assert not layer.bias.count_nonzero()
    assert_normal(wide.conv.weight, 2 / 27)
    assert_normal(wide.blocks[2].conv1.weight, 2 / (64 * 9))
    assert_normal(wide.blocks[2].shortcut.weight, 2 / 64)
    assert_normal(wide.fc.weight, 2 / 128)
    assert not wide.fc.bias.count_nonzero()


def test_initial_weights_of_2021() -> None:
    perceptron, lenet, wide = LeNet300(), LeNet5(), WideResNet(10, 4)
    draw = torch.Generator().manual_seed(2)
    initialize_2021(perceptron, {"fc1": 0.2, "fc*": 0.5}, draw)
    for layer, outputs, p in ((perceptron.fc1, 300, 0.2), (perceptron.fc2, 100, 0.5), (perceptron.fc3, 10, 0.5)):
        assert_normal(layer.weight, 2 / outputs / (1 - p) ** 2)
        assert_normal(layer.bias, 1e-4)
    initialize_2021(lenet, {"*": 0.5}, draw)
    assert_normal(lenet.conv2.weight, 2 / 500 / 0.5**2)
    assert_normal(lenet.conv2.bias, 1e-4 / 0.5**2)
    assert_normal(lenet.fc1.weight, 2 / 500 / 0.5**2)
    assert_normal(lenet.fc1.bias, 1e-4)
    initialize_2021(wide, {"blocks.*.conv1": 0.3}, draw)
    assert_normal(wide.blocks[1].conv1.weight, 2 / (64 * 9) / 0.7**2)
    assert_normal(wide.blocks[1].conv2.weight, 2 / (128 * 9))
    assert_normal(wide.blocks[1].shortcut.weight, 2 / 128)
    assert_normal(wide.fc.weight, 2 / 256)
    assert_normal(wide.fc.bias, 1e-4)


@pytest.mark.parametrize("initialize", [initialize_2018, lambda net, generator: initialize_2021(net, {}, generator)])
def test_initial_weights_come_from_the_generator_and_norms_are_new(initialize) -> None:
    first, second = WideResNet(10, 1), WideResNet(10, 1)
    second(torch.randn(4, 3, 32, 32))  # moves the running statistics
    nn.init.normal_(second.bn.weight)
    for net in (first, second):
        initialize(net, torch.Generator().manual_seed(3))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert torch.equal(second.bn.weight, torch.ones(64))
    initialize(second, torch.Generator().manual_seed(4))
    assert not torch.equal(first.conv.weight, second.conv.weight)


def test_wrong_drop_rates_are_refused() -> None:
    net = LeNet300()
    before = net.fc1.weight.detach().clone()
    with pytest.raises(ValueError, match=r"`drop_rates` must be in \[0, 1\), got 1\.0 for 'fc1'"):
        initialize_2021(net, {"fc1": 1.0})
    with pytest.raises(ValueError, match=r"`drop_rates` must name layers of the model \(fc1, fc2, fc3\), got 'conv1'"):
        initialize_2021(net, {"fc1": 0.5, "conv1": 0.5})
    assert torch.equal(net.fc1.weight, before)
