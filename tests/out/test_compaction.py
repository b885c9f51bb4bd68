"""Each case that a removal tool can get wrong is exact here, or refused with a reason; `finalize`, `fold`, the proof.

The oracle is a copy with activations masked by hand (`networks.masked_by_hand`); parameters are counted by `numel`,
MACs by torch's counter.
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
from ellzero.objectives import costs
from ellzero.out import finalization
from ellzero.out.bounding import targets as bounding
from ellzero.out.finalization import refuse_unreachable
from support.oracles import (
    Readers,
    assert_counted,
    assert_same,
    between,
    each,
    masked_by_hand,
    numel,
    same,
    set_gates,
    settled,
    tiled,
)
from support.zoo import MLP, FeedForward, LeNet, ResNet, SqueezeExcite


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
    """Attaches, closes, compacts, and compares with what the test says: all gates, who reads them, what is left.

    Args:
        model: the network.
        x: example input.
        readers: *all* placements that there must be, and who reads each.
        closed: what to close.
        other: another input, of another batch size; random if `None`.
        by_hand: the masked copy, where a hook on the layers of `readers` cannot make it.
        **attach: for `l0.attach`.
    """
    settled(model)
    args = (x,) if isinstance(x, Tensor) else tuple(x)
    if other is None:
        other = tuple(
            torch.randn(5, *t.shape[1:], dtype=torch.float64) if t.is_floating_point() else t.repeat(2, 1) for t in args
        )
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
            assert not torch.allclose(expected, model(*others), atol=1e-6), (
                "closing changed nothing: the test shows nothing"
            )
            assert numel(small) < numel(model)
    assert_counted(gated, small, args)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    return gated, small


def frozen(model: nn.Module, x: Any, name: str) -> str:
    """Why an axis is frozen."""
    args = x if isinstance(x, tuple) else (x,)
    try:
        axes = l0.attach(settled(model), args, where=l0.shrinkable(streams=True)).axes
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
        conv1=nn.Conv2d(2, 6, 3),
        norm=nn.BatchNorm2d(6),
        conv2=nn.Conv2d(6, 3, 3),
    )
    _, small = exact(model, images(2, 2, 7, 7), {"conv1": {"conv2": same}}, {"conv1": [1, 4]})
    assert small.norm.num_features == 4
    assert small.norm.running_mean.shape == (4,)


def test_mlp() -> None:
    readers = {"layers.0": {"layers.1": same}, "layers.1": {"layers.2": same}}
    _, small = exact(
        MLP(4, 6, 5, 3, activation=nn.Sigmoid), images(2, 4), readers, {"layers.0": [0, 5], "layers.1": [2]}
    )
    assert [(f.in_features, f.out_features) for f in small.layers] == [(4, 4), (4, 4), (4, 3)]


def test_lenet() -> None:
    readers = {"conv1": {"conv2": same}, "conv2": {"fc1": each(4)}, "fc1": {"fc2": same}}
    exact(LeNet(), images(2, 1, 14, 14), readers, {"conv1": [3], "conv2": [0, 2], "fc1": [1]})


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "conv", "norm"), [(1, nn.Conv1d, nn.BatchNorm1d), (3, nn.Conv3d, nn.BatchNorm3d)])
def test_convolutions_of_one_and_three_dimensions(dims: int, conv: Any, norm: Any) -> None:
    model = net(
        lambda m, x: m.fc(torch.tanh(m.norm(m.conv(x))).flatten(1)),
        conv=conv(2, 5, 3, stride=2),
        norm=norm(5),
        fc=nn.Linear(5 * 2**dims, 3),
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", POOLS)
def test_channel_by_channel_layers(kind: str) -> None:
    """Pooling, resampling, padding and norms of one channel each, before a flatten."""
    model = net(
        lambda m, x: m.fc(m.pool(m.conv(x)).flatten(1)),
        conv=nn.Conv2d(2, 5, 3),
        pool=copy.deepcopy(POOLS[kind]),
        fc=nn.Linear(20, 3),
    )
    exact(model, images(2, 2, 8, 8), {"conv": {"fc": each(4)}}, {"conv": [0, 3]})


def test_global_pooling_by_mean_and_by_maximum() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        return m.fc(
            torch.cat([x.mean(dim=(-2, -1)), x.amax((2, 3)), x.flatten(2).max(2).values, x.flatten(2).std(-1)], 1)
        )

    model = net(forward, conv=nn.Conv2d(2, 5, 3), fc=nn.Linear(20, 3))
    exact(model, images(2, 2, 6, 6), {"conv": {"fc": tiled(4)}}, {"conv": [1, 2]})


@pytest.mark.parametrize("slopes", [1, 5])
def test_prelu(slopes: int) -> None:
    model = net(
        lambda m, x: m.conv2(m.act(m.conv(x))), conv=nn.Conv2d(2, 5, 3), act=nn.PReLU(slopes), conv2=nn.Conv2d(5, 3, 1)
    )
    _, small = exact(model, images(2, 2, 6, 6), {"conv": {"conv2": same}}, {"conv": [0, 4]})
    assert small.act.num_parameters == (3 if slopes == 5 else 1)


def test_flatten_after_permute_to_channels_last() -> None:
    model = net(
        lambda m, x: m.fc(F.relu(m.conv(x)).permute(0, 2, 3, 1).reshape(len(x), -1)),
        conv=nn.Conv2d(2, 5, 3),
        fc=nn.Linear(45, 3),
    )
    exact(model, images(2, 2, 5, 5), {"conv": {"fc": tiled(9)}}, {"conv": [2, 3]})


# ---------------------------------------------------------------- groups, shuffles, transposed convolutions


@pytest.mark.slow
@pytest.mark.parametrize("closed", [[0, 2, 4, 6], [0], [0, 1, 2], [6, 7, 4]], ids=str)
def test_grouped_convolution(closed: list[int]) -> None:
    """Groups of unequal size are filled up with closed channels, whose weights are zero."""
    model = net(
        lambda m, x: m.conv3(torch.sigmoid(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 8, 3),
        conv2=nn.Conv2d(8, 12, 3, groups=4),
        conv3=nn.Conv2d(12, 3, 1),
    )
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}}
    _gated, small = exact(model, images(2, 2, 7, 7), readers, {"conv1": closed, "conv2": [0, 3, 6, 9, 10]})
    kept = [2 - sum(c // 2 == group for c in closed) for group in range(4)]
    assert small.conv1.out_channels == small.conv2.in_channels == 4 * max(kept)
    assert small.conv2.out_channels == 8  # the fullest group has two left
    assert small.conv2.groups == 4


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "left"), [([0, 1, 4, 6, 8, 9], 6), ([0, 1, 2, 3, 4, 6], 12)], ids=str)
def test_chain_of_grouped_convolutions_with_other_groups(closed: list[int], left: int) -> None:
    """Filling up one convolution's groups must not leave another one's unequal."""
    model = net(
        lambda m, x: m.conv4(m.conv3(m.conv2(m.conv1(x)))),
        conv1=nn.Conv1d(2, 12, 1),
        conv2=nn.Conv1d(12, 12, 1, groups=2),
        conv3=nn.Conv1d(12, 12, 1, groups=3),
        conv4=nn.Conv1d(12, 3, 1),
    )
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}, "conv3": {"conv4": same}}
    _, small = exact(model, images(2, 2, 4), readers, {"conv1": [0, 1, 2, 6], "conv2": closed, "conv3": [0, 4, 8]})
    assert small.conv2.out_channels == left


def test_groups_that_let_no_part_go() -> None:
    """Four groups of three and three groups of four on the same channels: as many in each can only be all."""
    model = net(
        lambda m, x: m.conv3(m.conv2(m.conv1(x))),
        conv1=nn.Conv1d(8, 12, 1, groups=4),
        conv2=nn.Conv1d(12, 9, 1, groups=3),
        conv3=nn.Conv1d(9, 2, 1),
    )
    gated, _ = exact(model, images(2, 8, 4), {"conv2": {"conv3": same}}, {"conv2": [0, 3, 6]})
    assert "let no part of its units go" in str({a.name: a.frozen for a in gated.axes}["conv1"])


def test_grouped_convolution_behind_a_concatenation() -> None:
    """Its first group reads all of `a` and some of `b`: what is closed in one of them alone comes back."""
    model = net(
        lambda m, x: m.out(m.mix(torch.cat([m.a(x), m.b(x)], 1))),
        a=nn.Conv1d(2, 3, 1),
        b=nn.Conv1d(2, 5, 1),
        mix=nn.Conv1d(8, 4, 1, groups=2),
        out=nn.Conv1d(4, 2, 1),
    )
    gated, _ = exact(model, images(2, 2, 4), {"mix": {"out": same}}, {"mix": [0, 3]})
    assert "let no part of its units go" in str({a.name: a.frozen for a in gated.axes}["a"])


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_convolution(multiplier: int) -> None:
    model = net(
        lambda m, x: m.point(F.silu(m.norm(m.depth(F.relu(m.conv(x)))))),
        conv=nn.Conv2d(2, 6, 3),
        depth=nn.Conv2d(6, 6 * multiplier, 3, groups=6),
        norm=nn.BatchNorm2d(6 * multiplier),
        point=nn.Conv2d(6 * multiplier, 3, 1),
    )
    gated, small = exact(model, images(2, 2, 7, 7), {"conv": {"point": each(multiplier)}}, {"conv": [0, 2, 5]})
    assert (small.depth.groups, small.depth.in_channels, small.depth.out_channels) == (3, 3, 3 * multiplier)
    assert "depth.weight" not in {s.tensor for p in gated.placements for s in p.multiplies}, "z² otherwise"


def test_depthwise_convolution_down_to_one_channel() -> None:
    model = net(
        lambda m, x: m.point(m.depth(m.conv(x))),
        conv=nn.Conv2d(2, 4, 3),
        depth=nn.Conv2d(4, 4, 3, groups=4),
        point=nn.Conv2d(4, 3, 1),
    )
    _, small = exact(model, images(2, 2, 7, 7), {"conv": {"point": same}}, {"conv": [0, 1, 3]})
    assert small.depth.groups == 1


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_convolution(groups: int) -> None:
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 8, 3),
        conv2=nn.ConvTranspose2d(8, 12, 2, stride=2, groups=groups),
        conv3=nn.Conv2d(12, 3, 1),
    )
    readers = {"conv1": {"conv2": same}, "conv2": {"conv3": same}}
    exact(model, images(2, 2, 5, 5), readers, {"conv1": [0, 1, 2, 5, 6], "conv2": [0, 3, 5, 8, 9, 10]})


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_transposed_convolution(multiplier: int) -> None:
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(torch.sigmoid(m.conv1(x))))),
        conv1=nn.Conv2d(2, 6, 3),
        conv2=nn.ConvTranspose2d(6, 6 * multiplier, 2, stride=2, groups=6),
        conv3=nn.Conv2d(6 * multiplier, 3, 1),
    )
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
        conv1=nn.Conv2d(2, 12, 3),
        shuffle=nn.ChannelShuffle(3),
        conv2=nn.Conv2d(12, 3, 3),
    )
    _, small = exact(model, images(2, 2, 7, 7), {"conv1": {"conv2": each(3)}}, {"conv1": [0, 2]})
    assert small.conv1.out_channels == 6


def test_channel_shuffle_written_as_views_is_frozen() -> None:
    """No trace can tell that the user's forward takes the number of groups as given and the channels in each as they
    come.
    """
    model = net(
        lambda m, x: m.conv2(_shuffled_by_view(m.conv1(x), 2)), conv1=nn.Conv2d(2, 8, 3), conv2=nn.Conv2d(8, 3, 3)
    )
    assert "with a unit of it removed" in frozen(model, images(2, 2, 7, 7), "conv1")


def test_channel_shuffle_between_grouped_convolutions() -> None:
    """ShuffleNet's unit."""
    model = net(
        lambda m, x: m.conv3(F.relu(m.conv2(m.shuffle(F.relu(m.conv1(x)))))),
        conv1=nn.Conv2d(4, 8, 1, groups=2),
        shuffle=nn.ChannelShuffle(2),
        conv2=nn.Conv2d(8, 8, 1, groups=2),
        conv3=nn.Conv2d(8, 3, 1),
    )
    readers = {"conv1": {"conv2": each(2)}, "conv2": {"conv3": same}}
    exact(model, images(2, 4, 3, 3), readers, {"conv1": [0, 2], "conv2": [1, 2, 7]})


@pytest.mark.slow
@pytest.mark.parametrize("written", ["layer", "views"])
def test_pixel_shuffle(written: str) -> None:
    def shuffle(x: Tensor) -> Tensor:
        if written == "layer":
            return F.pixel_shuffle(x, 2)
        n, c, h, w = x.shape
        return x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)

    model = net(
        lambda m, x: m.conv2(shuffle(torch.sigmoid(m.conv1(x)))), conv1=nn.Conv2d(2, 12, 3), conv2=nn.Conv2d(3, 2, 3)
    )
    _, small = exact(model, images(2, 2, 6, 6), {"conv1": {"conv2": same}}, {"conv1": [1]})
    assert small.conv1.out_channels == 8


def test_pixel_unshuffle() -> None:
    model = net(
        lambda m, x: m.conv2(F.pixel_unshuffle(m.conv1(x), 2)), conv1=nn.Conv2d(2, 3, 3), conv2=nn.Conv2d(12, 2, 3)
    )
    exact(model, images(2, 2, 10, 10), {"conv1": {"conv2": each(4)}}, {"conv1": [1]})


# ---------------------------------------------------------------- sums, concatenations, splits


def test_both_writers_of_a_sum() -> None:
    model = net(
        lambda m, x: m.conv(F.relu(m.a(x) + m.norm(m.b(x)))),
        a=nn.Conv2d(2, 6, 3),
        b=nn.Conv2d(2, 6, 3),
        norm=nn.BatchNorm2d(6),
        conv=nn.Conv2d(6, 3, 3),
    )
    _, small = exact(model, images(2, 2, 7, 7), {"a": {"conv": same}}, {"a": [0, 3]})
    assert small.a.out_channels == small.b.out_channels == small.norm.num_features == 4


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_residual_stream(in_place: bool) -> None:
    readers = {"stem": {"conv1": same, "head": same}, "conv1": {"conv2": same}}
    closed = {"stem": [1, 4], "conv1": [0, 2]}
    gated, small = exact(
        ResNet(in_place=in_place), images(2, 2, 6, 6), readers, closed, where=l0.shrinkable(streams=True)
    )
    assert [a.name for a in gated.axes if a.stream] == ["stem"]
    assert small.stem.out_channels == small.conv2.out_channels == 4


@pytest.mark.slow
def test_residual_streams_are_left_alone_unless_asked_for() -> None:
    exact(ResNet(), images(2, 2, 6, 6), {"conv1": {"conv2": same}}, {"conv1": [0, 2]})


def test_embedding_and_residual_stream() -> None:
    model = net(
        lambda m, i: (lambda x: m.head(x + m.down(F.gelu(m.up(x)))))(m.embed(i)),
        embed=nn.Embedding(9, 6),
        up=nn.Linear(6, 5),
        down=nn.Linear(5, 6),
        head=nn.Linear(6, 4),
    )
    tokens = torch.randint(0, 9, (2, 7))
    _, small = exact(
        model,
        tokens,
        {"embed": {"up": same, "head": same}, "up": {"down": same}},
        {"embed": [0, 2], "up": [4]},
        where=l0.shrinkable(streams=True),
    )
    assert small.embed.embedding_dim == 4


@pytest.mark.slow
def test_concatenation_and_split_into_uneven_parts() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(torch.cat([m.a(x), x, m.b(x)], 1))
        left, right = m.mix(x).split([3, 5], 1)
        return m.left(torch.tanh(left)) + m.right(torch.sigmoid(right))

    model = net(
        forward,
        a=nn.Conv2d(2, 3, 1),
        b=nn.Conv2d(2, 4, 1),
        mix=nn.Conv2d(9, 8, 1),
        left=nn.Conv2d(3, 2, 1),
        right=nn.Conv2d(5, 2, 1),
    )
    args = images(2, 2, 4, 4)
    readers = {"a": {"mix": between(0, 6)}, "b": {"mix": between(5, 0)}}
    gated, _ = exact(model, args, readers, {"a": [1], "b": [0, 2]})
    reasons = {a.name: a.frozen for a in gated.axes}
    # `split([3, 5])` is a literal of the user's forward: it asks for eight channels whatever is left.
    assert "cuts along it let no part of its units go" in str(reasons["mix"])


def test_even_split_that_follows_what_is_left() -> None:
    model = net(
        lambda m, x: (lambda p: m.out(torch.tanh(p[0]) * torch.sigmoid(p[1])))(m.both(x).chunk(2, 1)),
        both=nn.Conv2d(2, 10, 1),
        out=nn.Conv2d(5, 3, 1),
    )
    _, small = exact(model, images(2, 2, 4, 4), {"both": {"out": same}}, {"both": [0, 3]})
    assert small.both.out_channels == 6


def test_concatenation_of_a_map_with_itself() -> None:
    model = net(
        lambda m, x: (lambda y: m.out(torch.cat([y, y.tanh(), y.roll(1, 2)], 1)))(m.conv(x)),
        conv=nn.Conv2d(2, 4, 1),
        out=nn.Conv2d(12, 3, 1),
    )
    exact(model, images(2, 2, 4, 4), {"conv": {"out": tiled(3)}}, {"conv": [0, 3]})


def test_dense_block() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        b = m.b(F.relu(m.norm(a)))
        c = m.c(F.relu(torch.cat([a, b], 1)))
        return m.out(torch.cat([a, b, c], 1))

    model = net(
        forward,
        a=nn.Conv2d(2, 4, 1),
        norm=nn.BatchNorm2d(4),
        b=nn.Conv2d(4, 3, 1),
        c=nn.Conv2d(7, 5, 1),
        out=nn.Conv2d(12, 3, 1),
    )
    readers = {
        "a": {"b": same, "c": between(0, 3), "out": between(0, 8)},
        "b": {"c": between(4, 0), "out": between(4, 5)},
        "c": {"out": between(7, 0)},
    }
    exact(model, images(2, 2, 4, 4), readers, {"a": [1], "b": [0, 2], "c": [4]})


@pytest.mark.slow
def test_squeeze_and_excitation() -> None:
    readers = {"conv1": {"squeeze": same, "conv2": same}, "squeeze": {"excite": same}}
    _, small = exact(SqueezeExcite(), images(2, 2, 7, 7), readers, {"conv1": [0, 3], "squeeze": [1]})
    assert small.excite.out_channels == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glu", "swiglu"])
def test_gated_linear_units(kind: str) -> None:
    if kind == "glu":
        model = net(lambda m, x: m.down(F.glu(m.up(x), -1)), up=nn.Linear(3, 12), down=nn.Linear(6, 2))
    else:
        model = net(
            lambda m, x: m.down(F.silu(m.up(x)) * m.value(x)),
            up=nn.Linear(3, 6),
            value=nn.Linear(3, 6, bias=False),
            down=nn.Linear(6, 2),
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
    gated, small = exact(
        Scaled(), images(2, 3), readers, {"embed": [1, 3], "up": [0]}, where=l0.shrinkable(streams=True)
    )
    assert small.scale.shape == (3,)
    assert "scale" not in gated._targets


# ---------------------------------------------------------------- attention and windows


class Block(nn.Module):
    """Attention with fewer heads for keys and values than for queries, and a feed-forward part, on a normed stream."""

    def __init__(self, heads: int = 4, key_heads: int = 2, width: int = 8):
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.q, self.k, self.v = (
            nn.Linear(width, width),
            nn.Linear(width, key_heads * self.size),
            nn.Linear(width, key_heads * self.size),
        )
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


@pytest.mark.slow
def test_attention_that_counts_on_its_width_is_frozen_and_its_feed_forward_exact() -> None:
    gated, _ = exact(Block(), images(2, 5, 8), {"up": {"down": same}}, {"up": [0, 3, 6]})
    reasons = {a.name: a.frozen for a in gated.axes}
    assert "shape '[2, 5, 8]' is invalid" in str(reasons["q"])


def with_heads(attention: str, size: int, readers: Readers) -> Callable[[nn.Module, dict[str, Tensor]], nn.Module]:
    """A copy masked by hand: `nn.MultiheadAttention` reads its projection's weight without calling that layer."""

    def by_hand(model: nn.Module, z: dict[str, Tensor]) -> nn.Module:
        copied = masked_by_hand(model, z, {name: layers for name, layers in readers.items() if name != attention})
        projection: Any = copied.get_submodule(attention).out_proj
        with torch.no_grad():
            projection.weight.mul_(z[attention].repeat_interleave(size))
        return copied

    return by_hand


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [True, False])
def test_transformer_encoder_layer(trainable: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 7, batch_first=True).requires_grad_(trainable)
    readers: Readers = {"self_attn": {}, "linear1": {"linear2": same}}
    closed = {"linear1": [0, 3, 6], "self_attn": [1]}
    _, small = exact(layer, images(2, 5, 8), readers, closed, by_hand=with_heads("self_attn", 4, readers))
    assert (small.linear1.out_features, small.self_attn.num_heads) == (4, 1)


@pytest.mark.slow
def test_multihead_attention_reads_and_writes_what_is_left() -> None:
    model = net(
        lambda m, x: (lambda e: m.out(m.attention(e, e, e, need_weights=False)[0]))(m.embed(x)),
        embed=nn.Linear(3, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        out=nn.Linear(8, 2),
    )
    readers: Readers = {"embed": {}, "attention": {}, "attention.out_proj": {"out": same}}
    closed = {"embed": [2, 5, 6], "attention": [0], "attention.out_proj": [0, 3]}

    def by_hand(model: nn.Module, z: dict[str, Tensor]) -> nn.Module:
        copied = with_heads("attention", 4, {"attention.out_proj": {"out": same}})(model, z)
        copied.get_submodule("embed").register_forward_hook(lambda _, args, made: made * z["embed"])
        return copied

    _, small = exact(model, images(2, 5, 3), readers, closed, by_hand=by_hand)
    assert small.attention.in_proj_weight.shape == (3 * 4, 5)


def test_queries_and_keys_written_out_are_frozen() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out((q @ k.transpose(-2, -1)).softmax(-1) @ v)

    model = net(forward, qkv=nn.Linear(4, 9), out=nn.Linear(3, 2))
    assert "matmul" in frozen(model, images(2, 5, 4), "qkv#2")


def test_what_survives_the_loss_of_two_units_and_not_of_three_is_frozen() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out((q @ k.transpose(-2, -1)).softmax(-1) @ v)

    model = net(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2)).double()
    found = {a.name: a.frozen for a in l0.graph.trace(model, images(2, 5, 4)).axes}
    assert found["qkv"] is None  # the values, by the trace alone
    with pytest.raises(ValueError, match="let no part of its units go"):  # queries and keys cannot, so values neither
        l0.attach(model, images(2, 5, 4))


@pytest.mark.slow
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
    exact(
        model, images(2, 2, 8, 8), readers, {"patch": [0, 3], "up": [1], "down": [2]}, where=l0.shrinkable(streams=True)
    )


# ---------------------------------------------------------------- frozen, with the reason


def test_norms_across_the_axis() -> None:
    """Their statistics are over all units: taking one out would change the others."""
    across = {
        "layer_norm": net(lambda m, x: m.b(m.norm(m.a(x))), a=nn.Linear(4, 6), norm=nn.LayerNorm(6), b=nn.Linear(6, 3)),
        "group_norm": net(
            lambda m, x: m.b(m.norm(m.a(x))), a=nn.Linear(4, 6), norm=nn.GroupNorm(1, 6), b=nn.Linear(6, 3)
        ),
    }
    for op, model in across.items():
        assert f"`{op}` in `norm` mixes its units" in frozen(model, images(2, 4), "a")


MIXERS = {
    "softmax": lambda y: y.softmax(1),
    "log_softmax": lambda y: y.log_softmax(-1),
    "mean": lambda y: y - y.mean(1, keepdim=True),
    "sum": lambda y: y / y.sum(1, keepdim=True),
    "var": lambda y: y * y.var(1, keepdim=True),
    "cumsum": lambda y: y.cumsum(1),
    "sort": lambda y: y.sort(1).values,
    "topk": lambda y: y.topk(6, 1).values,
    "argmax": lambda y: y * y.argmax(1, keepdim=True),
    "roll": lambda y: y.roll(1, 1),
    "flip": lambda y: y.flip(1),
    "pad": lambda y: F.pad(y, (1, -1)),
    "index": lambda y: y[:, torch.tensor([5, 4, 3, 2, 1, 0])],
    "select": lambda y: y * y[:, :1] + y[:, 0, None],
    "local response norm": lambda y: F.local_response_norm(y[:, :, None], 2)[:, :, 0],
    "fft": lambda y: torch.fft.fft(y).real,
    "outer product": lambda y: (y[:, :, None] * y[:, None, :]).sum(1),
    "product with itself": lambda y: (y @ y.T).softmax(-1) @ y,
    "size of the axis": lambda y: y * y.shape[1] ** -0.5,
    "shape literal": lambda y: y.view(-1, 6),
    "slice literal": lambda y: torch.cat([y[:, :4].tanh(), y[:, 4:]], 1),
    "unbind": lambda y: torch.stack(y.unbind(1)[::-1], 1),
    "scatter": lambda y: torch.zeros_like(y).scatter(1, torch.arange(5, -1, -1).expand(len(y), 6), y),
    "gather": lambda y: y.gather(1, torch.arange(5, -1, -1).expand(len(y), 6)),
    "einsum": lambda y: torch.einsum("ni,nj->ni", y, y),
    "constant": lambda y: y * torch.arange(6.0, dtype=torch.float64),
    "distance": lambda y: y * torch.cdist(y, y).sum(1, keepdim=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_whatever_mixes_units_freezes_the_axis(kind: str) -> None:
    model = net(lambda m, x: m.b(MIXERS[kind](m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3))
    assert frozen(model, images(2, 4), "a")


@pytest.mark.slow
def test_literal_view_of_the_dense_width() -> None:
    reason = frozen(_Literal(), images(2, 1, 14, 14), "conv2")
    assert "does not run with a unit of it removed" in reason
    assert "[-1, 20]" in reason
    exact(
        _Literal(),
        images(2, 1, 14, 14),
        {"conv1": {"conv2": same}, "fc1": {"fc2": same}},
        {"conv1": [0], "fc1": [1, 2]},
    )


class _Literal(LeNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(F.max_pool2d(self.conv1(x), 2)), 2)
        return self.fc2(F.relu(self.fc1(x.view(-1, 20))))


def test_literal_slice() -> None:
    cut = net(lambda m, x: m.b(m.a(x)[:, :4]), a=nn.Linear(4, 6), b=nn.Linear(4, 3))
    assert "let no part of its units go" in frozen(cut, images(2, 4), "a")  # the last two are not read
    whole = net(lambda m, x: m.b(m.a(x)[:, :6]), a=nn.Linear(4, 6), b=nn.Linear(6, 3))  # asks for no more than there is
    exact(whole, images(2, 4), {"a": {"b": same}}, {"a": [0, 3]})


def test_tied_embedding_and_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: Tensor) -> Tensor:
            x = self.embed(i)
            return self.head(x + self.down(F.gelu(self.up(x))))

    gated, small = exact(
        Tied(), torch.randint(0, 9, (2, 7)), {"up": {"down": same}}, {"up": [0, 4]}, where=l0.shrinkable(streams=True)
    )
    assert small.head.weight is small.embed.weight
    assert any("`embed.weight` both reads and writes it" in str(a.frozen) for a in gated.axes)


def test_parameter_that_reads_and_writes() -> None:
    """An autoencoder with tied weights: what is closed in the reader would be closed in the writer too."""
    model = net(lambda m, x: F.linear(torch.sigmoid(m.a(x)), m.a.weight.T), a=nn.Linear(4, 6))
    assert "reads it" in frozen(model, images(2, 4), "a") or "both reads and writes" in frozen(model, images(2, 4), "a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_frozen(kind: Any) -> None:
    model = net(
        lambda m, x: m.out(F.relu(m.mid(m.cell(m.embed(x))[0]))),
        embed=nn.Linear(3, 5),
        cell=kind(5, 4, batch_first=True),
        mid=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
    )
    gated, _ = exact(model, images(2, 4, 3), {"mid": {"out": same}}, {"mid": [0, 2]})
    assert "from step to step" in str({a.name: a.frozen for a in gated.axes}["embed"])
    assert all(a is b for a, b in zip(model.cell._flat_weights, model.cell.parameters(), strict=True))


def test_data_dependent_control_flow_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(F.relu(m.a(x))) if x.sum() > 0 else m.b(m.a(x))

    model = net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))
    with pytest.raises(l0.graph.TraceError, match=r"return m.b.* goes by what the data are, .* pass axes by hand"):
        l0.attach(model, torch.ones(2, 4))


def test_axes_by_hand_for_what_cannot_be_traced() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(F.relu(m.norm(m.a(x)))) if x.sum() > 0 else m.b(m.norm(m.a(x)))

    model = net(forward, a=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), b=nn.Linear(6, 3))
    on = np.arange(6)
    sites = [l0.graph.Site("a.weight", (0,), on, "writes"), l0.graph.Site("b.weight", (1,), on, "reads")]
    rides = ("a.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    axis = l0.graph.Axis("hidden", 6, (*sites, *(l0.graph.Site(t, (0,), on, "rides") for t in rides)))
    exact(model, images(2, 4), {"hidden": {"b": same}}, {"hidden": [0, 3]}, axes=[axis])
    with pytest.raises(ValueError, match="`macs` needs a traced forward"):
        l0.macs(l0.attach(model, images(2, 4), axes=[axis]))
    with pytest.raises(ValueError, match=r"`axes` names `c\.weight`"):
        l0.attach(
            model, images(2, 4), axes=[l0.graph.Axis("hidden", 6, (l0.graph.Site("c.weight", (0,), on, "reads"),))]
        )


def test_tracing_limit_names_the_operation() -> None:
    with pytest.raises(l0.graph.TraceError, match=r"`limit` at operation \d+ of \d+, `.+`"):
        l0.attach(MLP(4, 5, 3), torch.zeros(1, 4), limit=0)


# ---------------------------------------------------------------- odd models


@pytest.mark.slow
def test_module_used_twice() -> None:
    model = net(
        lambda m, x: m.out(torch.sigmoid(m.both(torch.sigmoid(m.both(m.stem(x)))))),
        stem=nn.Linear(3, 6),
        both=nn.Linear(6, 6),
        out=nn.Linear(6, 2),
    )
    settled(model)
    reasons = {a.name: a.frozen for a in l0.graph.trace(model, images(2, 3)).axes}
    # `both` reads what it writes: one axis, whose gate lies on its inputs alone.
    assert reasons["stem"] is None
    _gated, small = exact(
        model, images(2, 3), {"stem": {"both": same, "out": same}}, {"stem": [0, 3]}, where=l0.shrinkable(streams=True)
    )
    assert tuple(small.both.weight.shape) == (4, 4)


def test_module_used_twice_on_two_inputs() -> None:
    model = net(
        lambda m, x: m.out(torch.relu(m.both(m.a(x))) * m.both(m.b(x))),
        a=nn.Linear(3, 5),
        b=nn.Linear(3, 5),
        both=nn.Linear(5, 4),
        out=nn.Linear(4, 2),
    )
    exact(model, images(2, 3), {"a": {"both": same}, "both": {"out": same}}, {"a": [0, 3], "both": [1]})


def test_branch_that_the_example_does_not_reach() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            x = m.far(x)
        return m.b(F.relu(m.a(x)))

    model = net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), far=nn.Linear(200, 4))
    gated, small = exact(model, images(2, 4), {"a": {"b": same}}, {"a": [0, 3]})
    assert set(gated.graph.unreached) == {"far.weight", "far.bias"}
    assert torch.equal(small.far.weight, model.far.weight)
    wide = images(3, 200)
    assert_same(gated(wide), small(wide))


def test_branch_that_only_training_reaches() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = F.relu(m.a(x))
        return (m.b(y), m.helper(y)) if m.training else m.b(y)

    model = net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), helper=nn.Linear(6, 2))
    gated, small = exact(model, images(2, 4), {"a": {"b": same, "helper": same}}, {"a": [0, 3]})
    x = images(3, 4)
    masked = masked_by_hand(model, set_gates(gated, {"a": [0, 3]}), {"a": {"b": same, "helper": same}}).train()
    for ours, hand in zip(small.train()(x), masked(x), strict=True):
        assert_same(hand, ours)


def test_frozen_parameters() -> None:
    """A parameter without a gradient is cut like any other, and stays without one."""
    model = LeNet()
    model.conv1.requires_grad_(False)
    readers = {"conv1": {"conv2": same}, "conv2": {"fc1": each(4)}, "fc1": {"fc2": same}}
    _, small = exact(model, images(2, 1, 14, 14), readers, {"conv1": [3], "conv2": [0, 2], "fc1": [1]})
    assert [n for n, p in small.named_parameters() if not p.requires_grad] == ["conv1.weight", "conv1.bias"]


class Loose(nn.Module):
    """Parameters and buffers outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6, 3))
        self.b1 = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        x = torch.sigmoid(x @ self.w1 + self.b1) - self.shift
        return (x if z is None else x * z) @ self.w2


def test_parameters_outside_of_layers() -> None:
    def by_hand(model: nn.Module, z: dict[str, Tensor]) -> nn.Module:
        return net(lambda m, x: m.inner(x, z["w1"]), inner=model)

    _, small = exact(Loose(), images(2, 4), {"w1": {}}, {"w1": [0, 3]}, by_hand=by_hand)
    assert {n: tuple(t.shape) for n, t in small.state_dict().items()} == {
        "w1": (4, 4),
        "w2": (4, 3),
        "b1": (4,),
        "shift": (4,),
    }


def test_weight_that_is_transposed_before_it_multiplies() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 6), nn.Parameter(torch.ones(3, 6))

        def forward(self, x: Tensor, z: Tensor | float = 1.0) -> Tensor:
            return (F.relu(self.a(x)) * z) @ self.w.T

    exact(
        Turned(),
        images(2, 4),
        {"a": {}},
        {"a": [0, 3]},
        by_hand=lambda m, z: net(lambda s, x: s.inner(x, z["a"]), inner=m),
    )


# ---------------------------------------------------------------- everything closed


def test_closed_axis_without_residual_path_is_refused() -> None:
    gated = l0.attach(settled(LeNet()), images(2, 1, 14, 14))
    set_gates(gated, {"conv2": range(5)})
    before = copy.deepcopy(gated.state_dict())
    with pytest.raises(l0.graph.ClosedAxisError, match="every unit of axis `conv2` is closed"):
        l0.compact(gated)
    assert all(torch.equal(before[k], t) for k, t in gated.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_closed_residual_branch_of_convolutions_is_taken_out(in_place: bool) -> None:
    _, small = exact(ResNet(in_place=in_place), images(2, 2, 6, 6), {"conv1": {"conv2": same}}, {"conv1": range(5)})
    kept = {n.split(".")[0] for n, _ in small.named_parameters()}
    assert kept == {"stem", "norm1", "conv2", "norm", "head"}  # of conv2 the bias, of norm1 what nobody reads any more
    assert [n for n, _ in small.conv2.named_parameters()] == ["bias"]


@pytest.mark.slow
def test_closed_residual_branch_with_a_part_of_the_stream() -> None:
    readers = {"stem": {"conv1": same, "head": same}, "conv1": {"conv2": same}}
    _, small = exact(
        ResNet(), images(2, 2, 6, 6), readers, {"stem": [0, 3], "conv1": range(5)}, where=l0.shrinkable(streams=True)
    )
    assert small.stem.out_channels == 4


def test_closed_residual_branch_of_linear_layers_is_taken_out() -> None:
    _, small = exact(FeedForward(), images(2, 3), {"up": {"down": same}}, {"up": range(7)})
    assert numel(small) == 3 * 5 + 5 + 5 + 5 * 2 + 2  # embed, the bias of down, head


@pytest.mark.slow
def test_closed_branch_of_squeeze_and_excitation() -> None:
    """With its middle closed the scale is a constant, sigmoid(bias): the maps go on."""
    readers = {"conv1": {"squeeze": same, "conv2": same}, "squeeze": {"excite": same}}
    _, small = exact(SqueezeExcite(), images(2, 2, 7, 7), readers, {"conv1": [0, 3], "squeeze": range(4)})
    assert sum(p.numel() for n, p in small.named_parameters() if "squeeze" in n) == 0


def test_closed_branch_with_stride_dilation_and_padding() -> None:
    """What takes its place must give an output of the right size."""
    model = net(
        lambda m, x: (lambda s: m.head(m.short(s) + m.b(F.relu(m.a(s)))))(m.stem(x)),
        stem=nn.Conv2d(2, 4, 1),
        short=nn.Conv2d(4, 6, 1, stride=2),
        a=nn.Conv2d(4, 5, 3, padding="same", dilation=2),
        b=nn.Conv2d(5, 6, 3, stride=2, padding=2, dilation=2),
        head=nn.Conv2d(6, 2, 1),
    )
    readers = {"stem": {"short": same, "a": same}, "short": {"head": same}, "a": {"b": same}}
    _, small = exact(
        model, images(2, 2, 9, 9), readers, {"stem": [0], "a": range(5)}, where=l0.shrinkable(streams=True)
    )
    assert sum(p.numel() for n, p in small.named_parameters() if n.startswith(("a.", "b."))) == 6


def test_closed_branch_through_a_transposed_convolution() -> None:
    model = net(
        lambda m, x: (lambda s: m.head(s + m.up(F.relu(m.down(s)))))(m.stem(x)),
        stem=nn.Conv2d(2, 4, 1),
        down=nn.Conv2d(4, 5, 2, stride=2),
        up=nn.ConvTranspose2d(5, 4, 2, stride=2),
        head=nn.Conv2d(4, 2, 1),
    )
    exact(model, images(2, 2, 6, 6), {"down": {"up": same}}, {"down": range(5)})


@pytest.mark.slow
def test_closed_branch_through_a_depthwise_convolution() -> None:
    """MobileNet's inverted residual."""
    model = net(
        lambda m, x: (lambda s: m.head(s + m.n3(m.down(F.relu6(m.n2(m.depth(F.relu6(m.n1(m.up(s))))))))))(m.stem(x)),
        stem=nn.Conv2d(2, 4, 1),
        up=nn.Conv2d(4, 6, 1, bias=False),
        n1=nn.BatchNorm2d(6),
        depth=nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        n2=nn.BatchNorm2d(6),
        down=nn.Conv2d(6, 4, 1, bias=False),
        n3=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )
    _, small = exact(model, images(2, 2, 6, 6), {"up": {"down": same}}, {"up": range(6)})
    assert (
        sum(p.numel() for n, p in small.named_parameters() if n.split(".")[0] in ("up", "n1", "depth", "n2", "down"))
        == 0
    )


def test_closed_branch_of_a_concatenation() -> None:
    model = net(
        lambda m, x: m.out(torch.cat([m.a(x), m.b(x)], 1)),
        a=nn.Conv2d(2, 3, 1),
        b=nn.Conv2d(2, 4, 1),
        out=nn.Conv2d(7, 3, 1),
    )
    readers = {"a": {"out": between(0, 4)}, "b": {"out": between(3, 0)}}
    _, small = exact(model, images(2, 2, 4, 4), readers, {"a": range(3), "b": [0]})
    assert small.out.in_channels == 3


@pytest.mark.slow
def test_closed_branch_in_a_transformer_layer() -> None:
    _, small = exact(Block(), images(2, 5, 8), {"up": {"down": same}}, {"up": range(7)})
    assert sum(p.numel() for n, p in small.named_parameters() if n.startswith("up")) == 0


@pytest.mark.slow
def test_closed_single_unit() -> None:
    model = net(
        lambda m, x: (lambda s: m.head(s + m.b(F.relu(m.a(s)))))(m.stem(x)),
        stem=nn.Linear(2, 4),
        a=nn.Linear(4, 1),
        b=nn.Linear(1, 4),
        head=nn.Linear(4, 2),
    )
    exact(model, images(2, 2), {"a": {"b": same}}, {"a": [0]})


# ---------------------------------------------------------------- other placements


@pytest.mark.slow
def test_two_levels_of_gates() -> None:
    """The papers' placement: maps of conv2, and single entries of them as inputs of fc1, which a `Select` picks."""
    readers = {"conv1": {"conv2": same}, "conv2": {"fc1": each(4)}, "fc1": {"fc1": same}, "fc2": {"fc2": same}}
    # Map 0 is closed by its own gate, map 1 by the gates of all its entries, of map 2 single entries.
    closed = {"conv1": [3], "conv2": [0], "fc1": [1, 4, 5, 6, 7, 8, 10], "fc2": [2]}
    _, small = exact(LeNet(), images(2, 1, 14, 14), readers, closed, where=l0.per_layer)
    assert small.conv2.out_channels == 3
    assert small.fc1.in_features == 10
    assert small.fc1.select.index.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_gates_on_the_input_of_the_network() -> None:
    readers = {f"layers.{k}": {f"layers.{k}": same} for k in range(3)}
    closed = {"layers.0": [0, 3], "layers.1": [5], "layers.2": [1, 2]}
    _, small = exact(MLP(5, 6, 4, 3), images(2, 5), readers, closed, where=l0.per_layer)
    assert small.layers[0].select.index.tolist() == [1, 2, 4]
    assert numel(small) == 3 * 5 + 5 + 5 * 2 + 2 + 2 * 3 + 3


def test_unstructured_gates() -> None:
    """A unit goes when all weights that read it are closed."""

    def by_hand(model: Any, z: dict[str, Tensor]) -> nn.Module:
        with torch.no_grad():
            model.layers[1].weight.mul_(z["layers.1.weight"])
        return model

    shut = torch.zeros(4, 6, dtype=torch.bool)
    shut[:, 1] = shut[:, 4] = True
    shut[0, 0] = shut[2, 5] = shut[3] = True
    closed = {"layers.1.weight": shut.flatten().nonzero().flatten().tolist()}
    _, small = exact(
        MLP(5, 6, 4, 3),
        images(2, 5),
        {"layers.1.weight": {}},
        closed,
        by_hand=by_hand,
        where=l0.weights("layers.1.*eight"),
    )
    assert [tuple(f.weight.shape) for f in small.layers] == [(4, 5), (4, 4), (3, 4)]
    assert int((small.layers[1].weight == 0).sum()) == 2 + 4


@pytest.mark.slow
def test_unstructured_gates_on_a_convolution() -> None:
    def by_hand(model: Any, z: dict[str, Tensor]) -> nn.Module:
        with torch.no_grad():
            for name, gates in z.items():
                model.get_parameter(name).mul_(gates)
        return model

    shut = torch.rand(5, 4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    shut[:, 2] = True
    closed = {"conv2.weight": shut.flatten().nonzero().flatten().tolist()}
    _, small = exact(
        LeNet(),
        images(2, 1, 14, 14),
        {"conv1.weight": {}, "conv2.weight": {}},
        closed,
        by_hand=by_hand,
        where=l0.weights("conv*.weight"),
    )
    assert small.conv1.out_channels == 3


@pytest.mark.slow
def test_per_layer_refuses_a_shared_stream() -> None:
    with pytest.raises(ValueError, match=r"`stem`, `conv2` write the shared axis `stem`"):
        l0.attach(ResNet(), torch.randn(2, 2, 6, 6), where=l0.per_layer)


# ---------------------------------------------------------------- compact proves itself


@pytest.mark.slow
def test_a_wrong_plan_is_caught_and_the_layer_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = l0.attach(settled(LeNet()), images(2, 1, 14, 14)).eval()
    set_gates(gated, {"conv1": [3], "conv2": [0, 2]})
    right = gated.plan()
    wrong = copy.deepcopy(right.rows)
    wrong["conv2.weight"][1] = np.array([0, 1, 3])  # keeps the closed map 3 for map 2
    monkeypatch.setattr(type(gated), "plan", lambda self: l0.graph.Plan(right.units, wrong))
    with pytest.raises(l0.out.compaction.CompactionError, match="first at `conv2`"):
        l0.compact(gated)
    l0.compact(gated, verify=False)
    monkeypatch.setattr(type(gated), "plan", lambda self: right)
    l0.compact(gated)


@pytest.mark.slow
def test_a_forgotten_buffer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = l0.attach(settled(ResNet()), images(2, 2, 6, 6)).eval()
    set_gates(gated, {"conv1": [0]})
    right = gated.plan()
    rows = {**right.rows, "norm2.running_mean": {0: np.array([0, 1, 2, 3])}}
    monkeypatch.setattr(type(gated), "plan", lambda self: l0.graph.Plan(right.units, rows))
    with pytest.raises(l0.out.compaction.CompactionError, match="first at `norm2`"):
        l0.compact(gated)


@pytest.mark.slow
def test_compact_of_a_float32_network_is_proven_in_float64_and_stays_float32() -> None:
    model = settled(LeNet()).float()
    x = images(3, 1, 14, 14).float()
    gated = l0.attach(model, x).eval()
    set_gates(gated, {"conv1": [3], "fc1": [0]})
    small = l0.compact(gated)
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    torch.testing.assert_close(small(x), gated(x))


@pytest.mark.slow
def test_compact_leaves_modes_and_hooks_of_the_model() -> None:
    model = settled(ResNet()).train()
    model.norm1.eval()
    gated = l0.attach(model, images(2, 2, 6, 6))
    set_gates(gated, {"conv1": [0]})
    small = l0.compact(gated)
    assert {n: m.training for n, m in small.named_modules()} == {n: m.training for n, m in model.named_modules()}


@pytest.mark.slow
def test_a_compact_network_can_be_gated_and_compacted_again() -> None:
    model = net(
        lambda m, x: m.point(F.silu(m.depth(F.relu(m.conv(x))))),
        conv=nn.Conv2d(2, 6, 3),
        depth=nn.Conv2d(6, 6, 3, groups=6),
        point=nn.Conv2d(6, 3, 1),
    )
    x = images(2, 2, 7, 7)
    _, small = exact(model, x, {"conv": {"point": same}}, {"conv": [0, 4]})
    exact(small, x, {"conv": {"point": same}}, {"conv": [1]})


def test_not_finite_gates_are_refused() -> None:
    gated = l0.attach(settled(MLP(4, 5, 3)), images(2, 4))
    with torch.no_grad():
        dict(gated.named_gates())["layers.0"].log_alpha[2] = float("nan")
    for way_out in (l0.compact, l0.fold, partial(l0.finalize, at_most=0.5)):
        with pytest.raises(ValueError, match=r"layers\.0"):
            way_out(gated)
    for way_out in (l0.compact, l0.fold, partial(l0.finalize, at_most=0.5)):
        with pytest.raises(TypeError, match="`gated` must be what `attach` returned, got MLP"):
            way_out(gated.model)


@pytest.mark.slow
def test_fold_keeps_shapes_zeros_and_function() -> None:
    model = settled(ResNet())
    gated = l0.attach(model, images(2, 2, 6, 6), where=l0.shrinkable(streams=True)).eval()
    z = set_gates(gated, {"stem": [1, 4], "conv1": [0, 2]})
    flat = l0.fold(gated)
    assert type(flat) is ResNet
    assert {n: t.shape for n, t in flat.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    hand = masked_by_hand(model, z, {"stem": {"conv1": same, "head": same}, "conv1": {"conv2": same}})
    x = images(5, 2, 6, 6, seed=3)
    assert_same(hand(x), flat(x))
    assert not flat.conv2.weight[:, [0, 2]].any()
    assert not flat.head.weight[:, [1, 4]].any()
    assert flat.conv2.weight[:, [1, 3, 4]].all()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(flat.parameters(), model.parameters(), strict=True))


# ---------------------------------------------------------------- finalize


TRACED: dict[str, l0.graph.Graph] = {}


def known(name: str, model: nn.Module, x: Tensor, **how: Any) -> l0.Gated:
    """Traced once under each name: what is tested here comes after that."""
    gated = l0.attach(settled(model), x, graph=TRACED.get(name), **how)
    TRACED[name] = gated.graph
    return gated


def _ready(streams: bool = True) -> l0.Gated:
    model, where = ResNet(width=9, inner=11), l0.shrinkable(streams=streams)
    gated = known("residual", model, images(2, 2, 6, 6), where=where)
    set_gates(gated, {"conv1": [2]})
    return gated


@pytest.mark.slow
@pytest.mark.parametrize("cost", [l0.params, l0.macs, l0.units, l0.l0_norm], ids=lambda c: c.__name__)
@pytest.mark.parametrize("at_most", [0.9, 0.5, 0.31])
def test_finalize_brings_the_kept_cost_under_the_target_and_not_further(cost: Any, at_most: float) -> None:
    gated = _ready()
    before = gated.opens()
    weights = copy.deepcopy(gated.model.state_dict())
    values = torch.cat([g.value().detach() for _, g in gated.named_gates()])
    l0.finalize(gated, at_most, cost)
    target = at_most * l0.dense(cost, gated)
    assert float(cost(gated, kept=True)) <= target
    opens = gated.opens()
    assert bool((before | ~opens).all()), "nothing that was closed comes back"
    now = torch.cat([g.value().detach() for _, g in gated.named_gates()])
    assert torch.equal(now[opens], values[opens])
    assert all(torch.equal(weights[k], t) for k, t in gated.model.state_dict().items())
    for unit in torch.nonzero(before & ~opens).flatten().tolist():  # opening any of them again would be too much
        again = opens.clone()
        again[unit] = True
        with gated.assuming(again.double()):
            assert float(cost(gated, kept=True)) > target
    for _, gate in gated.named_gates():
        assert bool(gate.open().any())
    assert_counted(gated, l0.compact(gated), (images(2, 2, 6, 6),))


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [0.7, 0.5, 0.4])
@pytest.mark.parametrize("kind", ["groups", "stream"])
def test_finalize_leaves_no_room_for_another_unit(kind: str, at_most: float) -> None:
    """Closing one by one can overshoot: a group falls away as a whole, a stream's unit lies in many layers."""
    grouped = nn.Sequential(nn.Conv1d(2, 8, 1), nn.Conv1d(8, 12, 1, groups=4), nn.Conv1d(12, 5, 1), nn.Conv1d(5, 3, 1))
    model, x = (grouped, images(2, 2, 4)) if kind == "groups" else (ResNet(5, 4), images(2, 2, 6, 6))
    gated = known(kind, model, x, where=l0.shrinkable(streams=True))
    set_gates(gated, {})
    l0.finalize(gated, at_most)
    opens, target = gated.opens(), at_most * l0.dense(l0.params, gated)
    assert numel(l0.compact(gated)) <= target
    for unit in torch.nonzero(~opens).flatten().tolist():
        again = opens.clone()
        again[unit] = True
        with gated.assuming(again.double()):
            assert float(l0.params(gated, kept=True)) > target


def test_finalize_does_nothing_where_the_target_is_met() -> None:
    gated = _ready()
    before = copy.deepcopy(gated.state_dict())
    l0.finalize(gated, 1.0)
    assert all(torch.equal(before[k], t) for k, t in gated.state_dict().items())


def test_finalize_refuses_an_unreachable_target_and_changes_nothing() -> None:
    gated = _ready(streams=False)
    before = copy.deepcopy(gated.state_dict())
    # With one inner unit 171 + 18 + 81 + 2 + 90 + 18 + 30 of 2050 parameters are left.
    with pytest.raises(
        ValueError, match=r"`at_most` must be at least 0\.2 of the dense cost.*got 0\.05; it is in stem"
    ):
        l0.finalize(gated, 0.05)
    for wrong in (0, -1, 1.5, float("nan"), True, "half"):
        with pytest.raises((ValueError, TypeError), match="`at_most`"):
            l0.finalize(gated, wrong)
    assert all(torch.equal(before[k], t) for k, t in gated.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("cost", [l0.params, l0.macs, l0.units, l0.l0_norm], ids=lambda c: c.__name__)
def test_finalize_fills_what_training_left_unused(cost: Any) -> None:
    """All but two units of each set closed, and a target of 60 %: units come back until no other one fits."""
    gated = l0.attach(settled(LeNet((8, 8), 12)), images(2, 1, 14, 14))
    set_gates(gated, {name: list(range(2, gate.shape.numel())) for name, gate in gated.named_gates()})
    before, target = gated.opens(), 0.6 * l0.dense(cost, gated)
    weights = copy.deepcopy(gated.model.state_dict())
    evidence = {name: gate.evidence().clone() for name, gate in gated.named_gates()}
    l0.finalize(gated, 0.6, cost)
    assert torch.equal(gated.opens(), before), "without `fill` nothing that was closed comes back"
    l0.finalize(gated, 0.6, cost, fill=True)
    opens = gated.opens()
    assert bool((opens | ~before).all())
    assert float(cost(gated, kept=True)) <= target
    for unit in torch.nonzero(~opens).flatten().tolist():
        again = opens.clone()
        again[unit] = True
        with gated.assuming(again.double()):
            assert float(cost(gated, kept=True)) > target
    assert all(torch.equal(weights[k], t) for k, t in gated.model.state_dict().items())
    for name, gate in gated.named_gates():  # units of a set cost the same: the likelier ones come first
        new = gate.open() & (torch.arange(gate.shape.numel()) >= 2)
        if new.any() and not gate.open().all():
            assert evidence[name][new].min() >= evidence[name][~gate.open()].max()
        assert bool((gate.value()[new] < 0.25).all())
    assert_counted(gated, l0.compact(gated), (images(2, 1, 14, 14),))


@pytest.mark.slow
def test_many_units_come_back_together_and_the_last_ones_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hidden layers of 300, of which four units are open: as full as one by one, and it counts seldom."""
    asked: list[int] = []
    kept = bounding.Target.kept
    monkeypatch.setattr(bounding.Target, "kept", lambda self, opens: asked.append(1) or kept(self, opens))
    widths, often = [], []
    for several in (finalization.SEVERAL, 10**9):
        monkeypatch.setattr(finalization, "SEVERAL", several)
        gated = l0.attach(settled(MLP(4, 300, 300, 3)), images(2, 4), where=l0.shrinkable(inputs=False))
        for k, (_, gate) in enumerate(gated.named_gates()):
            likely = -4 - torch.rand(300, generator=torch.Generator().manual_seed(k))
            gate.log_alpha.data = torch.where(torch.arange(300) < 4, 4.0, likely)
        evidence = {name: gate.evidence().clone() for name, gate in gated.named_gates()}
        asked.clear()
        l0.finalize(gated, 0.3, l0.macs, fill=True)
        often.append(len(asked))
        widths.append([int(gate.open().sum()) for _, gate in gated.named_gates()])
        target, opens = 0.3 * l0.dense(l0.macs, gated), gated.opens()
        assert float(l0.macs(gated, kept=True)) <= target
        for unit in torch.nonzero(~opens).flatten().tolist():
            with gated.assuming((opens | (torch.arange(600) == unit)).double()):
                assert float(l0.macs(gated, kept=True)) > target
        for name, gate in ((n, g) for n, g in gated.named_gates() if not g.open().all()):  # the likelier ones
            assert evidence[name][gate.open()].min() >= evidence[name][~gate.open()].max()
    assert 2 * often[0] < often[1]
    assert all(abs(together - single) < 0.1 * single for together, single in zip(*widths, strict=True)), widths


@pytest.mark.slow
def test_a_set_is_not_emptied_by_closing_many_units_at_once() -> None:
    """A thousand small units beside few large ones, all as likely: both sets give, and none is used up."""
    gated = l0.attach(settled(MLP(4, 40, 40, 3)), images(2, 4), where=l0.per_layer)
    set_gates(gated, {})
    l0.finalize(gated, 0.2, l0.l0_norm)
    left = [int(gate.open().sum()) for _, gate in gated.named_gates()]
    assert float(l0.l0_norm(gated, kept=True)) <= 0.2 * l0.dense(l0.l0_norm, gated)
    assert min(left[1:]) >= 5, left


@pytest.mark.slow
@pytest.mark.parametrize("cost", [l0.params, l0.macs, l0.l0_norm], ids=lambda c: c.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_the_last_units_of_nested_sets_belong_together(cost: Any, seed: int) -> None:
    """Maps of conv2 and single inputs of fc1, which lie within maps, with evidence that knows nothing of one another:
    whatever the target, there is a network left. The least of all, with 1-1-1-1 left, counted by hand.
    """
    gated = known("nested", LeNet((4, 6), 8), images(2, 1, 14, 14), where=l0.per_layer)
    set_gates(gated, {}, seed)
    assert [gate.shape.numel() for _, gate in gated.named_gates()] == [4, 6, 24, 8]  # maps of 2×2 behind conv2
    one, dense = {
        "params": (10 + 10 + 2 + 6, 40 + 37 * 6 + 25 * 8 + 9 * 3),
        "macs": (9 * 144 + 9 * 16 + 1 + 3, 9 * 144 * 4 + 36 * 16 * 6 + 24 * 8 + 8 * 3),
        "l0_norm": (10 + 37 + 8 + 3, 40 + 37 * 6 + 24 * 8 + 8 * 3),
    }[cost.__name__]
    least = one / dense
    refuse_unreachable(gated, 1.0001 * least, cost)
    with pytest.raises(ValueError, match=rf"^`at_most` must be at least {least:.4g} of the dense cost"):
        refuse_unreachable(gated, 0.9999 * least, cost)
    for factor in (10, 3, 1.0001):
        if factor * least < 1:
            l0.finalize(gated, factor * least, cost)
            assert_counted(gated, l0.compact(gated), (images(2, 1, 14, 14),))
    assert float(cost(gated, kept=True)) == one


def test_targets_by_pattern_that_cannot_be_reached_name_the_pattern() -> None:
    gated = known("nested", LeNet((4, 6), 8), images(2, 1, 14, 14), where=l0.per_layer)
    refuse_unreachable(gated, {"conv*": 0.5, "conv1": 0.25}, l0.l0_norm)  # one map of four
    with pytest.raises(ValueError, match=r"^`at_most` for 'conv1' must be at least 0\.25 of the dense cost.*got 0\.2$"):
        refuse_unreachable(gated, {"conv*": 0.5, "conv1": 0.2}, l0.l0_norm)


@pytest.mark.slow
def test_finalize_by_pattern() -> None:
    gated = l0.attach(settled(LeNet((8, 8), 12)), images(2, 1, 14, 14))
    set_gates(gated, {})
    l0.finalize(gated, {"conv*": 0.4, "fc*": 0.6})
    for pattern, most in (("conv*", 0.4), ("fc*", 0.6)):
        assert float(l0.params(gated, kept=True, only=pattern)) <= most * l0.dense(
            costs.only(l0.params, pattern), gated
        )


def test_finalize_prefers_units_with_little_evidence() -> None:
    """All units of a layer cost the same: the least likely ones go."""
    gated = l0.attach(settled(MLP(4, 9, 3)), images(2, 4))
    set_gates(gated, {})
    (gate,) = (g for _, g in gated.named_gates())
    order = gate.evidence().argsort()
    l0.finalize(gated, 0.5, l0.units)
    assert sorted(order[:5].tolist()) == (~gate.open()).nonzero().flatten().tolist()


def opened(model: nn.Module, x: Tensor, open_: dict[str, int], **options: Any) -> l0.Gated:
    """With the first so many units of each placement open, all as likely."""
    gated = l0.attach(settled(model), x, **options)
    set_gates(gated, {name: list(range(open_[name], gate.shape.numel())) for name, gate in gated.named_gates()})
    return gated


def test_the_last_percent_does_not_cost_a_layer_that_is_cheap() -> None:
    """Of 31 % of the MACs 1 % must go: one map does it. Of the hidden units it would take thirty."""
    model = LeNet((10, 20), 64)
    open_ = {"conv1": 5, "conv2": 9, "fc1": 40}
    gated = opened(model, images(2, 1, 14, 14), open_)
    share = float(l0.macs(gated, kept=True)) / l0.dense(l0.macs, gated)
    l0.finalize(gated, share - 0.01, l0.macs)
    left = {name: int(gate.open().sum()) for name, gate in gated.named_gates()}
    assert sum(open_[name] - n for name, n in left.items()) <= 2, left
    assert float(l0.macs(gated, kept=True)) <= (share - 0.01) * l0.dense(l0.macs, gated)


def test_of_two_bounds_each_is_filled_as_far_as_the_other_allows() -> None:
    gated = opened(LeNet((10, 20), 64), images(2, 1, 14, 14), {"conv1": 3, "conv2": 8, "fc1": 40})
    targets = {cost: 0.3 * l0.dense(cost, gated) for cost in (l0.macs, l0.params)}
    finalization.bring_within(gated, dict.fromkeys(targets, 0.3), fill=True)
    opens = gated.opens()
    for unit in (~opens).nonzero().flatten():
        more = opens.clone()
        more[unit] = True
        with gated.assuming(more.double()):
            assert any(float(cost(gated, kept=True)) > most for cost, most in targets.items())
    assert all(float(cost(gated, kept=True)) <= most for cost, most in targets.items())


@pytest.mark.parametrize("fraction", [0.1, 0.02])
def test_weights_of_units_that_go_do_not_use_up_a_bound_on_weights(fraction: float) -> None:
    """What `compact` leaves is counted by hand: it has as many weights as there may be."""
    model = settled(MLP(20, 64, 64, 4))
    gated = l0.attach(model, images(2, 20), where=l0.weights("*.weight"))
    generator = torch.Generator().manual_seed(0)
    for _, gate in gated.named_gates():
        gate.log_alpha.data = 2 * torch.randn(gate.shape, generator=generator)
    l0.finalize(gated, fraction, l0.l0_norm, fill=True)
    small, most = l0.compact(gated.eval()), fraction * l0.dense(l0.l0_norm, gated)
    left = sum(int(p.count_nonzero()) for p in small.parameters() if p.ndim == 2)
    assert most - 1 <= left <= most
