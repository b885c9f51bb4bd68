"""Saving: what comes back computes the same, bit for bit; what is not ours or does not fit is refused."""

import copy
import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.standins.layers import Closed, Select, put_select
from support.traced import attached


class LeNet(nn.Module):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(6 * 4, hidden), nn.Linear(hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = self.conv2(x).relu().flatten(1)
        return self.fc2(self.fc1(x).relu())


class Residual(nn.Module):
    """Two branches; strides, dilation and paddings that a `Closed` has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding="same")
        self.down = nn.Conv2d(6, 6, 1, stride=2)
        self.a, self.norm, self.b = (
            nn.Conv2d(6, 5, 3, stride=2, padding=2, dilation=2),
            nn.BatchNorm2d(5),
            nn.Conv2d(5, 6, 1),
        )
        self.c, self.d = nn.Linear(6, 7), nn.Linear(7, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.down(x) + self.b(self.norm(self.a(x)).relu())
        x = x.mean((2, 3))
        x = x + self.d(self.c(x).relu())
        return self.head(x)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=4)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.norm, self.c = nn.BatchNorm2d(12), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).relu())
        return self.c(self.norm(self.depth(x)).relu())


class Tied(nn.Module):
    """Two layers that share a weight and have biases of their own, a layer used twice, and a hidden buffer."""

    scale: Tensor

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, hidden), nn.Linear(6, hidden)
        self.two.weight = self.one.weight
        self.out = nn.Linear(hidden, 3)
        self.register_buffer("scale", torch.rand(hidden), persistent=False)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.out(self.one(x).relu() * self.scale) + self.out(self.two(x).relu())


class TwoNames(Tied):
    """One module under two names."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.again = self.out


class Recurrent(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(10, 4), nn.LSTM(4, 5, batch_first=True)
        self.head, self.out = nn.Linear(5, hidden), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.head(self.lstm(self.embed(x))[0]).relu())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 3), nn.Identity())


IMAGE = torch.randn(3, 3, 9, 9, generator=torch.Generator().manual_seed(1))
DIGIT = IMAGE[:, :1].repeat(1, 1, 2, 2)[..., :10, :10]
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Any]] = {
    "mlp": (mlp, IMAGE[0, 0, :, :6], l0.shrinkable),
    "mlp with selected inputs": (mlp, IMAGE[0, 0, :, :6], l0.per_layer),
    "lenet": (LeNet, DIGIT, l0.shrinkable),
    "lenet with selected inputs": (LeNet, DIGIT, l0.per_layer),
    "residual": (Residual, IMAGE, l0.shrinkable),
    "streams": (Residual, IMAGE, l0.shrinkable(streams=True)),
    "grouped": (Grouped, IMAGE, l0.shrinkable),
    "tied": (Tied, IMAGE[0, 0, :, :4], l0.shrinkable),
    "unstructured": (mlp, IMAGE[0, 0, :, :6], l0.weights("*.weight")),
}


def close_some(gated: l0.Gated, share: float = 0.5) -> None:
    for _, gate in gated.named_gates():
        closed = torch.rand(gate.shape) < share
        closed.view(-1)[0] = False
        gate.close_(closed)


def close_all(gated: l0.Gated, *names: str) -> None:
    for name, gate in gated.named_gates():
        if name in names:
            gate.close_(torch.ones(gate.shape, dtype=torch.bool))


def disturbed(model: nn.Module) -> nn.Module:
    """Batch-norm statistics that are not at their start, so that a buffer left behind would show."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
        elif "tracked" in name:
            buffer.fill_(3)
    return model.eval()


def made(case: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A compact network, a fresh dense one, and an input."""
    build, x, where = CASES[case]
    gated = attached(disturbed(build()), x, where=where)
    close_some(gated, 0.9 if case == "unstructured" else 0.5)
    small = l0.compact(gated)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in build().parameters())
    return small, disturbed(build()), x


def closed_branches() -> tuple[nn.Module, nn.Module, Tensor]:
    gated = attached(disturbed(Residual()), IMAGE)
    close_all(gated, "a", "c")
    small = l0.compact(gated)
    assert [type(m) for m in (small.a, small.norm, small.b, small.c, small.d)] == [Closed, nn.Identity, *[Closed] * 3]
    return small, disturbed(Residual()), IMAGE


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that `load` might have changed."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    held = {name: (id(t), t.dtype, t.clone().tolist()) for name, t in tensors.items()}
    return {"text": str(model), "tensors": held, "modules": [(n, id(m)) for n, m in model.named_modules()]}


def assert_same(small: nn.Module, loaded: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(loaded(x), small(x), rtol=0, atol=0)
    assert str(loaded) == str(small)  # every size in every layer's attributes
    ours, theirs = loaded.state_dict(), small.state_dict()
    assert list(ours) == list(theirs)
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_comes_back_is_the_same_network(case: str, tmp_path: Path) -> None:
    small, fresh, x = made(case)
    l0.save(small, tmp_path / "small")
    assert l0.load(fresh, str(tmp_path / "small")) is fresh
    assert_same(small, fresh, x)
    if "selected" in case:
        assert any(isinstance(m, Select) for m in fresh.modules())
    assert all(p.requires_grad for p in fresh.parameters())
    fresh.train()(x).sum().backward()  # it can be trained on


def test_closed_layers_come_back(tmp_path: Path) -> None:
    small, fresh, x = closed_branches()
    l0.save(small, tmp_path / "small")
    l0.load(fresh, tmp_path / "small")
    assert_same(small, fresh, x)
    for x in (torch.randn(1, 3, 20, 13), torch.randn(2, 3, 8, 8)):  # the window is the layer's, not the example's
        assert torch.equal(fresh(x), small(x))


def test_a_closed_layer_with_fewer_outputs_keeps_their_biases(tmp_path: Path) -> None:
    gated = attached(disturbed(Residual()), IMAGE, where=l0.shrinkable(streams=True))
    close_all(gated, "a", "c")
    dict(gated.named_gates())["down"].close_(torch.tensor([True, False, True, False, False, False]))
    small = l0.compact(gated)
    fresh = disturbed(Residual())
    l0.save(small, tmp_path / "small")
    l0.load(fresh, tmp_path / "small")
    assert isinstance(small.b, Closed)
    assert small.b.outputs == 4
    assert_same(small, fresh, IMAGE)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    small, fresh, _ = made("tied")
    l0.save(small, tmp_path / "small")
    stored = load_file(tmp_path / "small")
    assert "one.weight" in stored
    assert "two.weight" not in stored
    l0.load(fresh, tmp_path / "small")
    assert fresh.two.weight is fresh.one.weight
    assert len(list(fresh.parameters())) == len(list(small.parameters()))
    assert torch.equal(fresh.scale, small.scale)
    assert "scale" not in fresh.state_dict()  # the buffer is as hidden as it was


@pytest.mark.parametrize("build", [TwoNames, Recurrent])
def test_a_narrower_network_of_the_same_class_is_a_compact_one(build: Callable[..., nn.Module], tmp_path: Path) -> None:
    x = torch.arange(6).reshape(2, 3) if build is Recurrent else IMAGE[0, 0, :, :4]
    small, fresh = build(5), build()
    l0.save(small, tmp_path / "small")
    assert_same(small, l0.load(fresh, tmp_path / "small"), x)
    assert len(list(fresh.parameters())) == len(list(small.parameters()))


def test_a_module_under_two_names_selects_once(tmp_path: Path) -> None:
    small, fresh = TwoNames(), TwoNames()
    index, width = torch.tensor([1, 2, 6]), small.out.in_features
    small.out.weight = nn.Parameter(small.out.weight[:, index].detach())
    small.out.in_features = 3
    put_select(small.out, index, width)
    l0.save(small, tmp_path / "small")
    l0.load(fresh, tmp_path / "small")
    assert fresh.again is fresh.out
    assert_same(small, fresh, IMAGE[0, 0, :, :4])
    assert fresh.out.select.width == width
    with pytest.raises(ValueError, match=f"must be {width} wide"):
        fresh.out(torch.zeros(1, width + 1))


def test_groups_that_look_depthwise_after_one_compaction_come_back_after_two(tmp_path: Path) -> None:
    """4 groups of 2 channels, compacted to 4 of 1, then to 3 of 1: the shapes alone would give 4 groups of 1, or 3."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    dense = copy.deepcopy(net)
    with torch.no_grad():
        for layer, keep in ((net[0], [0, 2, 4]), (net[1], [0, 2, 4])):
            layer.weight, layer.bias = nn.Parameter(layer.weight[keep]), nn.Parameter(layer.bias[keep])
        net[1].weight = nn.Parameter(net[1].weight[:, :1])
        net[3].weight = nn.Parameter(net[3].weight[:, :3])
    net[0].out_channels = net[1].in_channels = net[1].out_channels = net[1].groups = net[3].in_channels = 3
    l0.save(net, tmp_path / "small")
    assert_same(net, l0.load(dense, tmp_path / "small"), IMAGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    small, fresh, x = made("lenet with selected inputs")
    small.to(dtype)
    l0.save(small, tmp_path / "small")
    l0.load(fresh, tmp_path / "small")
    assert {p.dtype for p in fresh.parameters()} == {dtype}
    assert_same(small, fresh, x.to(dtype))


def test_a_fresh_model_needs_no_memory_and_keeps_what_was_frozen(tmp_path: Path) -> None:
    small, _, x = made("lenet with selected inputs")
    l0.save(small, tmp_path / "small")
    with torch.device("meta"):
        fresh = LeNet().eval()
    fresh.conv1.weight.requires_grad_(False)
    assert_same(small, l0.load(fresh, tmp_path / "small"), x)
    assert [n for n, p in fresh.named_parameters() if not p.requires_grad] == ["conv1.weight"]


def test_saving_changes_nothing_and_leaves_no_other_file(tmp_path: Path) -> None:
    small, _, _ = closed_branches()
    before = state(small)
    l0.save(small, tmp_path / "small")
    l0.save(small, tmp_path / "small")  # over the first
    assert state(small) == before
    assert os.listdir(tmp_path) == ["small"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "small").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small"
    l0.save(nn.Linear(3, 2), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        l0.save(nn.Linear(3, 2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["small"]


def test_who_reads_the_old_file_while_it_is_replaced_goes_on_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "small"
    l0.save(nn.Linear(3, 2), path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        l0.save(nn.Linear(5, 4), path)
        assert reader.read() == before
    assert path.read_bytes() != before


def test_the_loaded_network_does_not_live_on_the_file(tmp_path: Path) -> None:
    small, fresh, x = made("mlp")
    l0.save(small, tmp_path / "small")
    l0.load(fresh, tmp_path / "small")
    size = (tmp_path / "small").stat().st_size
    (tmp_path / "small").write_bytes(b"\xff" * size)
    assert_same(small, fresh, x)


# ---------------------------------------------------------------- refusals


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])["__metadata__"]


def of_before(metadata: dict[str, Any]) -> dict[str, Any]:
    """The header of a file from before there were checksums: what such a file may hold is checked by itself."""
    return {key: value for key, value in metadata.items() if key not in ("sha256", "layers", "outputs")}


def rewritten(path: Path, **changes: Any) -> None:
    """Writes the file again with another structure in its header."""
    metadata, tensors = of_before(header(path)), load_file(path)
    structure = json.loads(metadata["structure"])
    save_file(tensors, path, metadata | {"structure": json.dumps({**structure, **changes})})


def test_save_refuses(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    gated = attached(mlp(), torch.zeros(1, 6))
    with pytest.raises(TypeError, match=r"`small` has gates still; compact it first"):
        l0.save(gated, tmp_path / "x")
    with pytest.raises(TypeError, match=r"`small` has gates still"):
        l0.save(nn.Sequential(gated), tmp_path / "x")
    with pytest.raises(TypeError, match=r"`small` must be an nn.Module, got dict"):
        l0.save({}, tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`path` must be a str or a path, got int"):
        l0.save(mlp(), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`path` must not end in .pt, which says another format"):
        l0.save(mlp(), tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="`path` must lie in a folder that exists"):
        l0.save(mlp(), tmp_path / "no" / "x")
    with pytest.raises(IsADirectoryError, match="`path` must be a file, got the folder"):
        l0.save(mlp(), tmp_path)
    with pytest.raises(ValueError, match=r"`small` keeps state that is not a tensor.*_extra_state"):
        l0.save(Extra(2, 2), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def not_ours(path: Path) -> list[tuple[str, Callable[[], Any]]]:
    """What the message says, and how to spoil the file."""
    whole, metadata, tensors = path.read_bytes(), of_before(header(path)), {"0.weight": torch.zeros(7, 6)}
    future = metadata | {"format_version": "99", "ellzero": "7"}
    return [
        ("format None", lambda: save_file(tensors, path)),
        ("format 'pt'", lambda: save_file(tensors, path, {"format": "pt"})),
        ("version 99 of the format, written by ellzero 7", lambda: save_file(tensors, path, future)),
        ("incomplete", lambda: path.write_bytes(whole[:-5])),
        ("header", lambda: path.write_bytes(whole[:20])),
        ("header", lambda: path.write_bytes(b"")),
        ("header", lambda: path.write_bytes(bytes(range(256)) * 4)),
        ("Expecting property name", lambda: save_file(tensors, path, metadata | {"structure": "{"})),
        ("unexpected keyword argument 'more'", lambda: rewritten(path, more=1)),
        ("its header is damaged", lambda: rewritten(path, closed=["0"])),
        ("its header is damaged", lambda: rewritten(path, closed={"0": "3"})),
        ("its header is damaged", lambda: rewritten(path, tied={"2.weight": ["0.weight"]})),
        ("its header is damaged", lambda: rewritten(path, groups={"0": None})),
        ("recursion", lambda: save_file(tensors, path, metadata | {"structure": "[" * 100_000})),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(14))
def test_load_refuses_a_file_that_is_not_ours(number: int, tmp_path: Path) -> None:
    path = tmp_path / "small"
    small, fresh, _ = made("mlp")
    l0.save(small, path)
    before = state(fresh)
    message, spoil = not_ours(path)[number]
    spoil()
    with pytest.raises(ValueError, match=f"(?is)`path` must be a file that `save` wrote, got .*small.*: .*{message}"):
        l0.load(fresh, path)
    assert state(fresh) == before


def test_load_refuses_another_network(tmp_path: Path) -> None:
    path = tmp_path / "small"
    small, fresh, _ = made("lenet with selected inputs")
    l0.save(small, path)
    fewer = nn.Sequential(nn.Linear(6, 7))
    narrow = LeNet(hidden=1)
    whole_numbers = LeNet()
    whole_numbers.fc1.bias = nn.Parameter(torch.zeros(12, dtype=torch.int64), requires_grad=False)
    deeper = LeNet()
    deeper.fc3 = nn.Linear(2, 2)
    flat = LeNet()
    flat.fc1.weight = nn.Parameter(flat.fc1.weight[0].detach())
    refusals = {
        "another network.*a `LeNet` was saved, this is a `Sequential`.*there is a layer": fewer,
        r"`fc1.bias` has shape .* which does not fit into \(1,\)": narrow,
        "`fc1.bias` is of torch.float32, here it is of torch.int64": whole_numbers,
        "missing `fc3.bias`, `fc3.weight`, unexpected nothing": deeper,
        r"`fc1.weight` has shape .* which does not fit into \(24,\)": flat,
    }
    for message, model in refusals.items():
        before = state(model)
        with pytest.raises(ValueError, match=message):
            l0.load(model, path)
        assert state(model) == before
    with pytest.raises(ValueError, match="`model` must be a fresh dense network, got one that was made smaller"):
        l0.load(copy.deepcopy(small), path)
    with pytest.raises(TypeError, match=r"`model` must be a fresh dense network .* got one with gates"):
        l0.load(attached(fresh, DIGIT), path)
    with pytest.raises(TypeError, match=r"`model` must be an nn.Module, got type"):
        l0.load(LeNet, path)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="`path` must be a str or a path, got list"):
        l0.load(fresh, [path])  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="`path` must be a file that `save` wrote, and there is no"):
        l0.load(fresh, tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="`path` must be a file, got the folder"):
        l0.load(fresh, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selects": ["fc1", "fc9"]}, "there is a layer `fc9`"),
        ({"selects": []}, "unexpected `fc1.select.index`"),
        ({"widths": {"fc1": 2}}, "`fc1.select.index` does not pick"),
        ({"closed": {"conv1": 3}}, "missing nothing, unexpected `conv1.weight`"),
        ({"closed": {"conv1": 99}}, "`conv1` has 99 outputs"),
        ({"closed": {"conv1": None}}, "`conv1` is an identity"),
        ({"closed": {"": 3}}, "`` is a linear or convolutional layer"),
        ({"tied": {"fc2.weight": "nothing"}}, "`fc2.weight` is tied to `nothing`, which is missing"),
        ({"groups": {"fc1": 2}}, "`fc1` is a convolution in 2 groups"),
        ({"groups": {"conv1": 2}}, "`conv1` is a convolution in 2 groups"),
    ],
)
def test_load_refuses_a_header_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "small"
    small, fresh, _ = made("lenet with selected inputs")
    l0.save(small, path)
    rewritten(path, **changes)
    before = state(fresh)
    with pytest.raises(ValueError, match=f"file of another network .*: .*{message}"):
        l0.load(fresh, path)
    assert state(fresh) == before


def test_load_refuses_a_closed_layer_without_its_bias(tmp_path: Path) -> None:
    path = tmp_path / "small"
    small, fresh, _ = closed_branches()
    l0.save(small, path)
    tensors, metadata = load_file(path), of_before(header(path))
    del tensors["b.bias"]
    save_file(tensors, path, metadata)
    before = state(fresh)
    with pytest.raises(ValueError, match=r"missing `b.bias`, unexpected nothing"):
        l0.load(fresh, path)
    assert state(fresh) == before


@pytest.mark.parametrize("spoil", [lambda i: i - 1000, lambda i: i + 1000, lambda i: i.float(), lambda i: i[:-1]])
def test_load_refuses_a_select_that_picks_what_is_not_there(spoil: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    path = tmp_path / "small"
    small, fresh, _ = made("lenet with selected inputs")
    l0.save(small, path)
    tensors, metadata = load_file(path), of_before(header(path))
    tensors["fc1.select.index"] = spoil(tensors["fc1.select.index"])
    save_file(tensors, path, metadata)
    before = state(fresh)
    with pytest.raises(ValueError, match=r"`fc1.select.index` does not pick .* of at most 24 inputs"):
        l0.load(fresh, path)
    assert state(fresh) == before


# ---------------------------------------------------------------- the other ways out

WAYS_OUT = [*(c for c in CASES if c in ("mlp", "lenet with selected inputs", "grouped")), "closed branches"]


def compacted(case: str) -> tuple[nn.Module, Tensor]:
    small, _, x = closed_branches() if case == "closed branches" else made(case)
    return small, x


@pytest.mark.slow
@pytest.mark.parametrize("case", WAYS_OUT)
def test_compact_networks_go_through_torch_export(case: str, tmp_path: Path) -> None:
    small, x = compacted(case)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(small, (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "small.pt2")
    back = torch.export.load(tmp_path / "small.pt2").module()
    for n in (1, 2, 7):
        xs = torch.cat([x, x, -x])[:n]
        torch.testing.assert_close(back(xs), small(xs), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in WAYS_OUT if case not in ("mlp", "grouped")])
def test_compact_networks_go_through_onnx(case: str, tmp_path: Path) -> None:
    """A plain one goes through the command `compact` in its own tests; groups through `torch.export`, as above."""
    onnxruntime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    small, x = compacted(case)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.onnx.export(small, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    for n in (1, 2, 7):
        xs = torch.cat([x, x, -x])[:n]
        (out,) = session.run(None, {session.get_inputs()[0].name: xs.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), small(xs).detach(), rtol=1e-5, atol=1e-5)


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    """Safetensors' own writer shuffles its metadata: the files of equal runs would differ."""
    written = set()
    for number in range(6):
        network = nn.Linear(3, 2)
        nn.init.ones_(network.weight)
        nn.init.zeros_(network.bias)
        l0.save(network, tmp_path / str(number))
        written.add((tmp_path / str(number)).read_bytes())
    (data,) = written
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert torch.equal(load_file(tmp_path / "0")["weight"], torch.ones(2, 3))


# ---------------------------------------------------------------- damage, and another function


class Own(nn.Module):
    """The same tensors for every function that its forward may apply."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 7), nn.Linear(7, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


@pytest.mark.slow
def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "small"
    network = Own().eval()
    l0.save(network, path)
    data, x, silent = path.read_bytes(), torch.ones(2, 6), []
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        try:
            loaded = l0.load(Own().eval(), path)
        except ValueError:
            continue
        if not torch.equal(loaded(x), network(x)):
            silent.append(place)
    assert silent == []


def test_a_file_of_before_has_no_checksum_and_loads(tmp_path: Path) -> None:
    small, fresh, x = made("mlp")
    l0.save(small, tmp_path / "small")
    save_file(load_file(tmp_path / "small"), tmp_path / "small", of_before(header(tmp_path / "small")))
    assert_same(small, l0.load(fresh, tmp_path / "small"), x)


@pytest.mark.parametrize(
    ("small", "other", "message"),
    [
        ([nn.ReLU()], [nn.Tanh()], "`1` is a ReLU, here a Tanh"),
        ([nn.LeakyReLU(0.1)], [nn.LeakyReLU(0.2)], "`1` has negative_slope 0.1, here 0.2"),
        ([nn.ReLU()], [nn.Identity()], "`1` is a ReLU, here nothing"),
        ([nn.Identity()], [nn.ReLU()], "`1` is nothing, here a ReLU"),
        ([nn.ReLU()], [nn.ReLU(), nn.Softmax(-1)], "`2` is nothing, here a Softmax"),
        ([nn.Dropout(0.3), nn.ReLU(inplace=True)], [nn.Dropout(0.5), nn.ReLU()], None),
        ([nn.SyncBatchNorm(7)], [nn.BatchNorm1d(7)], None),
        ([nn.LayerNorm(7, eps=1e-5)], [nn.LayerNorm(7, eps=1e-3)], "`1` has eps 1e-05, here 0.001"),
    ],
)
def test_another_function_of_the_same_shapes_is_refused(
    small: list[nn.Module], other: list[nn.Module], message: str | None, tmp_path: Path
) -> None:
    l0.save(nn.Sequential(nn.Linear(6, 7), *small), tmp_path / "small")
    fresh = nn.Sequential(nn.Linear(6, 7), *other)
    before = state(fresh)
    if message is None:  # it computes the same in evaluation
        l0.load(fresh, tmp_path / "small")
        return
    with pytest.raises(ValueError, match=f"file of another network .*: {message} in "):
        l0.load(fresh, tmp_path / "small")
    assert state(fresh) == before


def test_another_function_in_the_forward_is_refused(tmp_path: Path) -> None:
    """No module shows it: what `compact` saw of the example's shape does."""
    gated, same = l0.attach(Own(), torch.zeros(2, 6)), Own()
    close_some(gated)
    l0.save(l0.compact(gated), tmp_path / "small")
    drawn = torch.get_rng_state()
    l0.load(same, tmp_path / "small")
    assert torch.equal(torch.get_rng_state(), drawn)  # nobody's random numbers move
    fresh = Own(torch.tanh)
    before = state(fresh)
    with pytest.raises(ValueError, match=r"file of another network .*: on a fixed input it gave .*, here "):
        l0.load(fresh, tmp_path / "small")
    assert state(fresh) == before
