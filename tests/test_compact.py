"""Each case that a removal tool can get wrong is exact here, or refused with a reason; and `finalize`, `fold`, and the proof in `compact`.

The oracle is a copy with activations masked by hand (`networks.masked_by_hand`); parameters are counted by `numel`, MACs by torch's counter.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from networks import (
    MLP,
    FeedForward,
    LeNet,
    Readers,
    ResNet,
    SqueezeExcite,
    assert_same,
    between,
    counted_macs,
    each,
    masked_by_hand,
    numel,
    same,
    set_gates,
    settled,
    tiled,
)


def images(n: int, channels: int, *size: int, seed: int = 1) -> Tensor:
    return torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(
    model: nn.Module,
    x: Tensor | Sequence[Any],
    readers: Readers,
    closed: Mapping[str, Sequence[int]],
    *,
    other: Tensor | Sequence[Any] | None = None,
    by_hand: Callable[[nn.Module, dict[str, Tensor]], nn.Module] | None = None,
    **attach: Any,
) -> tuple[l0.Gated, nn.Module]:
    """Attaches, closes, compacts, and compares with what the test says: all gates there are, who reads them, what is left.

    Args:
        model: the network.
        x: example input.
        readers: *all* sets of gates that there must be, and who reads each.
        closed: what to close.
        other: another input, of another batch size; random if `None`.
        by_hand: the masked copy, where a hook on the layers of `readers` cannot make it.
        **attach: for `l0.attach`.
    """
    settled(model)
    args = (x,) if isinstance(x, Tensor) else tuple(x)
    if other is None:
        other = tuple(torch.randn(5, *t.shape[1:], dtype=torch.float64) if t.is_floating_point() else t.repeat(2, 1) for t in args)
    others = (other,) if isinstance(other, Tensor) else tuple(other)
    before = copy.deepcopy(model.state_dict())
    gated = l0.attach(model, args, **attach).eval()
    assert [name for name, _ in gated.named_gates()] == list(readers)
    z = set_gates(gated, closed)
    hand = by_hand(copy.deepcopy(model), z) if by_hand else masked_by_hand(model, z, readers)
    small = l0.compact(gated)
    assert type(small) is type(model)
    with torch.no_grad():
        for inputs in (args, others):
            expected = hand(*inputs)
            assert_same(expected, gated(*inputs))
            assert_same(expected, small(*inputs))
        if any(closed.values()):
            assert not torch.allclose(expected, model(*others), atol=1e-6), "closing changed nothing: the test shows nothing"
            assert numel(small) < numel(model)
    assert_counted(gated, small, args)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    return gated, small


def assert_counted(gated: l0.Gated, small: nn.Module, args: Sequence[Any]) -> None:
    """Kept cost is that of the network that came out, to the unit."""
    assert float(l0.params(gated, kept=True)) == numel(small)
    if gated.graph.products is not None:
        assert float(l0.macs(gated, kept=True)) * args[0].shape[0] == pytest.approx(counted_macs(small, args), rel=1e-12)


def frozen(model: nn.Module, x: Any, name: str) -> str:
    """Why an axis is frozen."""
    args = x if isinstance(x, tuple) else (x,)
    try:
        axes = l0.attach(settled(model), args, streams=True).axes
    except ValueError as error:
        return str(error)
    found = {a.name: a.frozen for a in axes}
    assert found[name] is not None, f"{name} is not frozen"
    return found[name]


def net(forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> nn.Module:
    """A module with these layers and this forward."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, layer in layers.items():
        made.add_module(name, layer)
    return made


# ---------------------------------------------------------------- plain stacks


def test_channel_closed_before_batch_norm_with_shift() -> None:
    model = net(
        lambda m, x: m.conv2(F.relu(m.norm(m.conv1(x)))),
        conv1=nn.Conv2d(2, 6, 3), norm=nn.BatchNorm2d(6), conv2=nn.Conv2d(6, 3, 3),
    )
    _, small = exact(model, images(2, 2, 7, 7), {"conv1": {"conv2": same}}, {"conv1": [1, 4]})
    assert small.norm.num_features == 4
    assert small.norm.running_mean.shape == (4,)


def test_mlp() -> None:
    readers = {"layers.0": {"layers.1": same}, "layers.1": {"layers.2": same}}
    _, small = exact(MLP(4, 6, 5, 3, activation=nn.Sigmoid), images(2, 4), readers, {"layers.0": [0, 5], "layers.1": [2]})
    assert [(f.in_features, f.out_features) for f in small.layers] == [(4, 4), (4, 4), (4, 3)]


def test_lenet() -> None:
    readers = {"conv1": {"conv2": same}, "conv2": {"fc1": each(4)}, "fc1": {"fc2": same}}
    exact(LeNet(), images(2, 1, 14, 14), readers, {"conv1": [3], "conv2": [0, 2], "fc1": [1]})


@pytest.mark.parametrize(("dims", "conv", "norm"), [(1, nn.Conv1d, nn.BatchNorm1d), (3, nn.Conv3d, nn.BatchNorm3d)])
def test_convolutions_of_one_and_three_dimensions(dims: int, conv: Any, norm: Any) -> None:
    model = net(
        lambda m, x: m.fc(torch.tanh(m.norm(m.conv(x))).flatten(1)), conv=conv(2, 5, 3, stride=2), norm=norm(5), fc=nn.Linear(5 * 2**dims, 3)
    )
    exact(model, images(2, 2, *[5] * dims), {"conv": {"fc": each(2**dims)}}, {"conv": [0, 3]})


POOLS = {
    "adaptive average": nn.AdaptiveAvgPool2d(2),
    "adaptive maximum": nn.AdaptiveMaxPool2d(2),
    "average": nn.AvgPool2d(3, 3),
    "maximum": nn.MaxPool2d(3, 3),
    "nearest": nn.Sequential(nn.AvgPool2d(6), nn.Upsample(scale_factor=2)),
    "bilinear": nn.Sequential(nn.AvgPool2d(6), nn.Upsample(size=(2, 2), mode="bilinear")),
    "bicubic": nn.Sequential(nn.AvgPool2d(6), nn.Upsample(scale_factor=2, mode="bicubic")),
    "zero padding": nn.Sequential(nn.AvgPool2d(6), nn.ZeroPad2d((1, 0, 0, 1))),
    "constant padding": nn.Sequential(nn.AvgPool2d(6), nn.ConstantPad2d((1, 0, 0, 1), 0.7)),
    "replication padding": nn.Sequential(nn.AvgPool2d(6), nn.ReplicationPad2d((1, 0, 0, 1))),
    "reflection padding": nn.Sequential(nn.AvgPool2d(3), nn.ReflectionPad2d(1), nn.AvgPool2d(2)),
    "circular padding": nn.Sequential(nn.AvgPool2d(3), nn.CircularPad2d(1), nn.AvgPool2d(2)),
    "power average": nn.Sequential(nn.ReLU(), nn.LPPool2d(2, 3, 3)),
    "instance norm": nn.Sequential(nn.InstanceNorm2d(5, affine=True), nn.AvgPool2d(3)),
    "channelwise group norm": nn.Sequential(nn.GroupNorm(5, 5), nn.AvgPool2d(3)),
}


@pytest.mark.parametrize("kind", POOLS)
def test_channel_by_channel_layers(kind: str) -> None:
    """Pooling, resampling, padding and norms of one channel each, before a flatten."""
    model = net(
        lambda m, x: m.fc(m.pool(m.conv(x)).flatten(1)), conv=nn.Conv2d(2, 5, 3), pool=copy.deepcopy(POOLS[kind]), fc=nn.Linear(20, 3)
    )
    exact(model, images(2, 2, 8, 8), {"conv": {"fc": each(4)}}, {"conv": [0, 3]})


def test_global_pooling_by_mean_and_by_maximum() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        return m.fc(torch.cat([x.mean(dim=(-2, -1)), x.amax((2, 3)), x.flatten(2).max(2).values, x.flatten(2).std(-1)], 1))

    model = net(forward, conv=nn.Conv2d(2, 5, 3), fc=nn.Linear(20, 3))
    exact(model, images(2, 2, 6, 6), {"conv": {"fc": tiled(4)}}, {"conv": [1, 2]})


@pytest.mark.parametrize("slopes", [1, 5])
def test_prelu(slopes: int) -> None:
    model = net(lambda m, x: m.conv2(m.act(m.conv(x))), conv=nn.Conv2d(2, 5, 3), act=nn.PReLU(slopes), conv2=nn.Conv2d(5, 3, 1))
    _, small = exact(model, images(2, 2, 6, 6), {"conv": {"conv2": same}}, {"conv": [0, 4]})
    assert small.act.num_parameters == (3 if slopes == 5 else 1)


def test_flatten_after_permute_to_channels_last() -> None:
    model = net(
        lambda m, x: m.fc(F.relu(m.conv(x)).permute(0, 2, 3, 1).reshape(len(x), -1)), conv=nn.Conv2d(2, 5, 3), fc=nn.Linear(45, 3)
    )
    exact(model, images(2, 2, 5, 5), {"conv": {"fc": tiled(9)}}, {"conv": [2, 3]})


# ---------------------------------------------------------------- groups, shuffles, transposed convolutions


@pytest.mark.parametrize("closed", [[0, 2, 4, 6], [0], [0, 1, 2], [6, 7, 4]], ids=str)
def test_grouped_convolution(closed: list[int]) -> None:
    """Groups of unequal size are filled up with closed channels, whose weights are zero."""
    model = net(
        lambda m, x: m.conv3(torch.sigmoid(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 8, 3), conv2=nn.Conv2d(8, 12, 3, groups=4), conv3=nn.Conv2d(12, 3, 1),
    )  # fmt: skip
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}}
    gated, small = exact(model, images(2, 2, 7, 7), readers, {"conv1": closed, "conv2": [0, 3, 6, 9, 10]})
    kept = [2 - sum(c // 2 == group for c in closed) for group in range(4)]
    assert small.conv1.out_channels == small.conv2.in_channels == 4 * max(kept)
    assert small.conv2.out_channels == 8  # the fullest group has two left
    assert small.conv2.groups == 4


@pytest.mark.parametrize(("closed", "left"), [([0, 1, 4, 6, 8, 9], 6), ([0, 1, 2, 3, 4, 6], 12)], ids=str)
def test_chain_of_grouped_convolutions_with_other_groups(closed: list[int], left: int) -> None:
    """Filling up one convolution's groups must not leave another one's unequal."""
    model = net(
        lambda m, x: m.conv4(m.conv3(m.conv2(m.conv1(x)))),
        conv1=nn.Conv1d(2, 12, 1), conv2=nn.Conv1d(12, 12, 1, groups=2), conv3=nn.Conv1d(12, 12, 1, groups=3), conv4=nn.Conv1d(12, 3, 1),
    )  # fmt: skip
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}, "conv3": {"conv4": same}}
    _, small = exact(model, images(2, 2, 4), readers, {"conv1": [0, 1, 2, 6], "conv2": closed, "conv3": [0, 4, 8]})
    assert small.conv2.out_channels == left


def test_groups_that_let_no_part_go() -> None:
    """Four groups of three and three groups of four on the same channels: as many in each can only be all."""
    model = net(
        lambda m, x: m.conv3(m.conv2(m.conv1(x))),
        conv1=nn.Conv1d(4, 12, 1, groups=4), conv2=nn.Conv1d(12, 9, 1, groups=3), conv3=nn.Conv1d(9, 2, 1),
    )  # fmt: skip
    gated, _ = exact(model, images(2, 4, 4), {"conv2": {"conv3": same}}, {"conv2": [0, 3, 6]})
    assert "let no part of its units go" in str({a.name: a.frozen for a in gated.axes}["conv1"])


def test_grouped_convolution_behind_a_concatenation() -> None:
    """Its first group reads all of `a` and some of `b`: what is closed in one of them alone comes back."""
    model = net(
        lambda m, x: m.out(m.mix(torch.cat([m.a(x), m.b(x)], 1))),
        a=nn.Conv1d(2, 3, 1), b=nn.Conv1d(2, 5, 1), mix=nn.Conv1d(8, 4, 1, groups=2), out=nn.Conv1d(4, 2, 1),
    )  # fmt: skip
    gated, _ = exact(model, images(2, 2, 4), {"mix": {"out": same}}, {"mix": [0, 3]})
    assert "let no part of its units go" in str({a.name: a.frozen for a in gated.axes}["a"])


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_convolution(multiplier: int) -> None:
    model = net(
        lambda m, x: m.point(F.silu(m.norm(m.depth(F.relu(m.conv(x)))))),
        conv=nn.Conv2d(2, 6, 3), depth=nn.Conv2d(6, 6 * multiplier, 3, groups=6), norm=nn.BatchNorm2d(6 * multiplier),
        point=nn.Conv2d(6 * multiplier, 3, 1),
    )  # fmt: skip
    gated, small = exact(model, images(2, 2, 7, 7), {"conv": {"point": each(multiplier)}}, {"conv": [0, 2, 5]})
    assert (small.depth.groups, small.depth.in_channels, small.depth.out_channels) == (3, 3, 3 * multiplier)
    assert "depth.weight" not in {s.tensor for p in gated.placements for s in p.multiplies}, "z² otherwise"


def test_depthwise_convolution_down_to_one_channel() -> None:
    model = net(
        lambda m, x: m.point(m.depth(m.conv(x))), conv=nn.Conv2d(2, 4, 3), depth=nn.Conv2d(4, 4, 3, groups=4), point=nn.Conv2d(4, 3, 1)
    )
    _, small = exact(model, images(2, 2, 7, 7), {"conv": {"point": same}}, {"conv": [0, 1, 3]})
    assert small.depth.groups == 1


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_convolution(groups: int) -> None:
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 8, 3), conv2=nn.ConvTranspose2d(8, 12, 2, stride=2, groups=groups), conv3=nn.Conv2d(12, 3, 1),
    )  # fmt: skip
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}}
    exact(model, images(2, 2, 5, 5), readers, {"conv1": [0, 1, 2, 5, 6], "conv2": [0, 3, 5, 8, 9, 10]})


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_transposed_convolution(multiplier: int) -> None:
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 6, 3), conv2=nn.ConvTranspose2d(6, 6 * multiplier, 2, stride=2, groups=6), conv3=nn.Conv2d(6 * multiplier, 3, 1),
    )  # fmt: skip
    exact(model, images(2, 2, 5, 5), {"conv1": {"conv3": each(multiplier)}}, {"conv1": [0, 4]})


def test_transposed_convolutions_of_one_and_three_dimensions() -> None:
    for dims, conv, up in ((1, nn.Conv1d, nn.ConvTranspose1d), (3, nn.Conv3d, nn.ConvTranspose3d)):
        model = net(lambda m, x: m.up(F.relu(m.conv(x))), conv=conv(2, 5, 2), up=up(5, 3, 2))
        exact(model, images(2, 2, *[3] * dims), {"conv": {"up": same}}, {"conv": [0, 4]})


def _shuffled_by_view(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def test_channel_shuffle() -> None:
    """The same place in each group is one unit: a shuffle deals out what is left from the beginning of each group."""
    model = net(
        lambda m, x: m.conv2(m.shuffle(torch.sigmoid(m.conv1(x)))),
        conv1=nn.Conv2d(2, 12, 3), shuffle=nn.ChannelShuffle(3), conv2=nn.Conv2d(12, 3, 3),
    )  # fmt: skip
    _, small = exact(model, images(2, 2, 7, 7), {"conv1": {"conv2": each(3)}}, {"conv1": [0, 2]})
    assert small.conv1.out_channels == 6


def test_channel_shuffle_written_as_views_is_frozen() -> None:
    """No trace can tell that the user's forward takes the number of groups as given and the channels in each as they come."""
    model = net(lambda m, x: m.conv2(_shuffled_by_view(m.conv1(x), 2)), conv1=nn.Conv2d(2, 8, 3), conv2=nn.Conv2d(8, 3, 3))
    assert "with a unit of it removed" in frozen(model, images(2, 2, 7, 7), "conv1")


def test_channel_shuffle_between_grouped_convolutions() -> None:
    """ShuffleNet's unit."""
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(m.shuffle(F.relu(m.conv1(x)))))),
        conv1=nn.Conv2d(4, 8, 1, groups=2), shuffle=nn.ChannelShuffle(2), conv2=nn.Conv2d(8, 8, 1, groups=2), conv3=nn.Conv2d(8, 3, 1),
    )  # fmt: skip
    readers = {"conv1": {"conv2": each(2)}, "conv2": {"conv3": same}}
    exact(model, images(2, 4, 3, 3), readers, {"conv1": [0, 2], "conv2": [1, 2, 7]})


@pytest.mark.parametrize("written", ["layer", "views"])
def test_pixel_shuffle(written: str) -> None:
    def shuffle(x: Tensor) -> Tensor:
        if written == "layer":
            return F.pixel_shuffle(x, 2)
        n, c, h, w = x.shape
        return x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)

    model = net(lambda m, x: m.conv2(shuffle(torch.sigmoid(m.conv1(x)))), conv1=nn.Conv2d(2, 12, 3), conv2=nn.Conv2d(3, 2, 3))
    _, small = exact(model, images(2, 2, 6, 6), {"conv1": {"conv2": same}}, {"conv1": [1]})
    assert small.conv1.out_channels == 8


def test_pixel_unshuffle() -> None:
    model = net(lambda m, x: m.conv2(F.pixel_unshuffle(m.conv1(x), 2)), conv1=nn.Conv2d(2, 3, 3), conv2=nn.Conv2d(12, 2, 3))
    exact(model, images(2, 2, 10, 10), {"conv1": {"conv2": each(4)}}, {"conv1": [1]})


# ---------------------------------------------------------------- sums, concatenations, splits


def test_both_writers_of_a_sum() -> None:
    model = net(
        lambda m, x: m.conv(F.relu(m.a(x) + m.norm(m.b(x)))),
        a=nn.Conv2d(2, 6, 3), b=nn.Conv2d(2, 6, 3), norm=nn.BatchNorm2d(6), conv=nn.Conv2d(6, 3, 3),
    )  # fmt: skip
    _, small = exact(model, images(2, 2, 7, 7), {"a": {"conv": same}}, {"a": [0, 3]})
    assert small.a.out_channels == small.b.out_channels == small.norm.num_features == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_residual_stream(in_place: bool) -> None:
    readers = {"stem": {"conv1": same, "head": same}, "conv1": {"conv2": same}}
    closed = {"stem": [1, 4], "conv1": [0, 2]}
    gated, small = exact(ResNet(in_place=in_place), images(2, 2, 6, 6), readers, closed, streams=True)
    assert [a.name for a in gated.axes if a.stream] == ["stem"]
    assert small.stem.out_channels == small.conv2.out_channels == 4


def test_residual_streams_are_left_alone_unless_asked_for() -> None:
    exact(ResNet(), images(2, 2, 6, 6), {"conv1": {"conv2": same}}, {"conv1": [0, 2]})


def test_embedding_and_residual_stream() -> None:
    model = net(
        lambda m, i: (lambda x: m.head(x + m.down(F.gelu(m.up(x)))))(m.embed(i)),
        embed=nn.Embedding(9, 6), up=nn.Linear(6, 5), down=nn.Linear(5, 6), head=nn.Linear(6, 4),
    )  # fmt: skip
    tokens = torch.randint(0, 9, (2, 7))
    _, small = exact(model, tokens, {"embed#2": {"up": same, "head": same}, "up": {"down": same}}, {"embed#2": [0, 2], "up": [4]}, streams=True)
    assert small.embed.embedding_dim == 4


def test_concatenation_and_split_into_uneven_parts() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(torch.cat([m.a(x), x, m.b(x)], 1))
        left, right = m.mix(x).split([3, 5], 1)
        return m.left(torch.tanh(left)) + m.right(torch.sigmoid(right))

    model = net(
        forward, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(2, 4, 1), mix=nn.Conv2d(9, 8, 1), left=nn.Conv2d(3, 2, 1), right=nn.Conv2d(5, 2, 1)
    )
    args = images(2, 2, 4, 4)
    readers = {"a": {"mix": between(0, 6)}, "b": {"mix": between(5, 0)}}
    gated, _ = exact(model, args, readers, {"a": [1], "b": [0, 2]})
    reasons = {a.name: a.frozen for a in gated.axes}
    # `split([3, 5])` is a literal of the user's forward: it asks for eight channels whatever is left.
    assert "does not run with a unit of it removed" in str(reasons["mix"])


def test_even_split_that_follows_what_is_left() -> None:
    model = net(
        lambda m, x: (lambda p: m.out(torch.tanh(p[0]) * torch.sigmoid(p[1])))(m.both(x).chunk(2, 1)),
        both=nn.Conv2d(2, 10, 1), out=nn.Conv2d(5, 3, 1),
    )  # fmt: skip
    _, small = exact(model, images(2, 2, 4, 4), {"both": {"out": same}}, {"both": [0, 3]})
    assert small.both.out_channels == 6


def test_concatenation_of_a_map_with_itself() -> None:
    model = net(
        lambda m, x: (lambda y: m.out(torch.cat([y, y.tanh(), y.roll(1, 2)], 1)))(m.conv(x)), conv=nn.Conv2d(2, 4, 1), out=nn.Conv2d(12, 3, 1)
    )
    exact(model, images(2, 2, 4, 4), {"conv": {"out": tiled(3)}}, {"conv": [0, 3]})


def test_dense_block() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        b = m.b(F.relu(m.norm(a)))
        c = m.c(F.relu(torch.cat([a, b], 1)))
        return m.out(torch.cat([a, b, c], 1))

    model = net(
        forward, a=nn.Conv2d(2, 4, 1), norm=nn.BatchNorm2d(4), b=nn.Conv2d(4, 3, 1), c=nn.Conv2d(7, 5, 1), out=nn.Conv2d(12, 3, 1)
    )
    readers = {
        "a": {"b": same, "c": between(0, 3), "out": between(0, 8)},
        "b": {"c": between(4, 0), "out": between(4, 5)},
        "c": {"out": between(7, 0)},
    }
    exact(model, images(2, 2, 4, 4), readers, {"a": [1], "b": [0, 2], "c": [4]})


def test_squeeze_and_excitation() -> None:
    readers = {"conv1": {"squeeze": same, "conv2": same}, "squeeze": {"excite": same}}
    _, small = exact(SqueezeExcite(), images(2, 2, 7, 7), readers, {"conv1": [0, 3], "squeeze": [1]})
    assert small.excite.out_channels == 4


@pytest.mark.parametrize("kind", ["glu", "swiglu"])
def test_gated_linear_units(kind: str) -> None:
    if kind == "glu":
        model = net(lambda m, x: m.down(F.glu(m.up(x), -1)), up=nn.Linear(3, 12), down=nn.Linear(6, 2))
    else:
        model = net(
            lambda m, x: m.down(F.silu(m.up(x)) * m.value(x)), up=nn.Linear(3, 6), value=nn.Linear(3, 6, bias=False), down=nn.Linear(6, 2)
        )
    exact(model, images(2, 4, 3), {"up": {"down": same}}, {"up": [0, 4]})


def test_layer_scale() -> None:
    class Scaled(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(x + self.scale * self.down(torch.sigmoid(self.up(x))))

    readers = {"embed": {"up": same, "head": same}, "up": {"down": same}}
    gated, small = exact(Scaled(), images(2, 3), readers, {"embed": [1, 3], "up": [0]}, streams=True)
    assert small.scale.shape == (3,)
    assert "scale" not in gated._targets


# ---------------------------------------------------------------- attention and windows


class Block(nn.Module):
    """Attention with fewer heads for keys and values than for queries, and a feed-forward part, on a normed stream."""

    def __init__(self, heads: int = 4, key_heads: int = 2, width: int = 8):
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, key_heads * self.size), nn.Linear(width, key_heads * self.size)
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        y = self.norm1(x)
        q = self.q(y).view(n, t, self.heads, self.size).transpose(1, 2)
        k, v = (f(y).view(n, t, self.key_heads, self.size).transpose(1, 2) for f in (self.k, self.v))
        k, v = (a.repeat_interleave(self.heads // self.key_heads, 1) for a in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_grouped_query_attention_is_frozen_and_its_feed_forward_exact() -> None:
    gated, _ = exact(Block(), images(2, 5, 8), {"up": {"down": same}}, {"up": [0, 3, 6]})
    reasons = {a.name: a.frozen for a in gated.axes}
    for name in ("q", "k", "v"):
        assert "attention heads" in str(reasons[name])


@pytest.mark.parametrize("trainable", [True, False])
def test_transformer_encoder_layer(trainable: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 7, batch_first=True).requires_grad_(trainable)
    gated, small = exact(layer, images(2, 5, 8), {"linear1": {"linear2": same}}, {"linear1": [0, 3, 6]})
    assert small.linear1.out_features == 4
    assert any("attention" in str(a.frozen) or "reads" in str(a.frozen) for a in gated.axes if "self_attn" in a.name)


def test_multihead_attention_is_frozen_and_its_output_exact() -> None:
    model = net(
        lambda m, x: (lambda e: m.out(m.attention(e, e, e, need_weights=False)[0]))(m.embed(x)),
        embed=nn.Linear(3, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True), out=nn.Linear(8, 2),
    )  # fmt: skip
    gated, _ = exact(model, images(2, 5, 3), {"attention.out_proj": {"out": same}}, {"attention.out_proj": [0, 3]})
    reasons = {a.name: a.frozen for a in gated.axes}
    assert "does not run with a unit of it removed" in str(reasons["embed"])  # it stores its width


def test_attention_written_out_is_frozen() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out((q @ k.transpose(-2, -1)).softmax(-1) @ v)

    model = net(forward, qkv=nn.Linear(4, 9), out=nn.Linear(3, 2))
    assert "matmul" in frozen(model, images(2, 5, 4), "qkv")


@pytest.mark.parametrize("shift", [0, 1])
def test_windows_and_roll(shift: int) -> None:
    """Swin's reshapes: channels last, cyclic shift, partition into windows, a layer inside each window, and back."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.patch(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        x = torch.roll(x, (-shift, -shift), (1, 2))
        x = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        x = m.down(F.gelu(m.up(x - x.mean(1, keepdim=True))))
        x = x.view(n, h // 2, w // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, -1)
        return m.head(torch.roll(x, (shift, shift), (1, 2)).permute(0, 3, 1, 2))

    model = net(forward, patch=nn.Conv2d(2, 6, 2, 2), up=nn.Linear(6, 5), down=nn.Linear(5, 4), head=nn.Conv2d(4, 3, 1))
    readers = {"patch": {"up": same}, "up": {"down": same}, "down": {"head": same}}
    exact(model, images(2, 2, 8, 8), readers, {"patch": [0, 3], "up": [1], "down": [2]}, streams=True)
