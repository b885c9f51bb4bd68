"""What is written down of a forward is what `torch.export` says of it; what cannot be vouched for is left to that."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.forwards import exporting, recording
from ellzero.graph.forwards.copying import duplicate, lean
from ellzero.graph.forwards.recording import Unrecorded, hollow, recorded, walked
from ellzero.graph.tracing import TraceError, as_inputs, mode, trace
from support.wild import Drawer


def operations(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    """Each operation and the module that it runs in; assertions, which only an export makes, are left out."""
    found = []
    for node in graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        module = stack[-1][0].removeprefix("L['self']").removeprefix(".") if stack else node.meta.get("module", "")
        if node.op == "call_function" and "assert" not in str(node.target) and "getitem" not in str(node.target):
            found.append((str(node.target).replace("lift_fresh_copy", "lift_fresh"), module))
    return found


class Many(nn.Module):
    """Cuts, joins, numbers, constants, changes in place, and a block of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Conv1d(8, 4, 3, padding=1)
        self.constant = torch.arange(8.0)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, *, shift: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
        h = F.relu(self.a(x), inplace=True) * 2 + self.constant + torch.tensor([shift] * 8)
        left, right = h.chunk(2, 1)
        h = self.norm(torch.cat([left.sin(), right], 1)) * self.scale
        h[:, :2] = 0
        values, _ = h.max(1)
        out = self.b(h[:, :, None].expand(-1, -1, 5)).to(torch.float64)
        return out.flatten(1), {
            "most": values,
            "all": torch.einsum("bi,ji->bj", h, self.a.weight.t() @ self.a.weight.new_ones(8, 8)),
        }


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout(), nn.Flatten(), nn.Linear(64, 2)
        ),
        (torch.randn(2, 3, 6, 6),),
    ),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), (torch.randn(2, 3, 8),)),
    "recurrent": lambda: (nn.LSTM(3, 4, num_layers=2), (torch.randn(5, 2, 3),)),
    "many": lambda: (Many(), {"x": torch.randn(3, 6), "shift": 0.25}),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_forward_is_the_exported_one(name: str, training: bool) -> None:
    model, example = NETWORKS[name]()
    args, kwargs = as_inputs(example)
    with mode(model, training):
        program = torch.export.export(model, args, kwargs, strict=False)
        graph, members = recorded(model, args, kwargs)
    assert operations(graph) == operations(program.graph)
    signature = program.graph_signature
    known = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    assert set(members.values()) == set(known.values())
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder" and node.name not in members]
    assert [name for name in inputs if not name.startswith("c_")] == [
        n for n in signature.user_inputs if isinstance(n, str)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_both_ways_find_the_same_axes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawer = Drawer(seed)
    inputs = torch.randn(2, drawer.input, *[drawer.space] * 2 * bool(drawer.space)), torch.ones(2, dtype=torch.long)
    model = drawer.network()

    def axes() -> list[tuple[Any, ...]]:
        found = trace(model, inputs).axes
        return [(a.name, a.size, a.frozen, a.stream, [(s.tensor, s.dims, s.role) for s in a.sites]) for a in found]

    try:
        usual = axes()
    except TraceError:
        return
    monkeypatch.setattr(exporting, "recorded", _refuses)
    assert axes() == usual


def _refuses(*_: Any) -> Any:
    raise Unrecorded("on purpose")


class Told(nn.Module):
    def __init__(self, by: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.by = nn.Linear(4, 4), by

    def forward(self, x: Tensor) -> Any:
        return self.by(self.a(x))


def written(h: Tensor) -> Tensor:
    into = torch.zeros(3, 2, 4)
    into[:, 0] = h  # a view is written to, and what it is a view of is asked
    return h if into.sum() > 0 else -h


def turned(h: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def caught(h: Tensor) -> Tensor:
    try:
        return h * h.sum().item()
    except Exception:  # as careless code does
        return h


class Hidden:
    """Something that holds a tensor, and does not say so."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_a_refusal_names_the_line_of_the_model_and_torch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Told(turned), nn.Linear(4, 2))
    with pytest.raises(TraceError) as error:
        trace(model, torch.randn(3, 4))
    said = str(error.value)
    assert said.startswith("the model cannot be traced with `example_inputs`: `return h if h.sum() > 0 else -h` (line ")
    assert "of test_recording.py, in `1`) goes by what the data are" in said
    assert len(said.splitlines()) == 1
    assert capfd.readouterr() == ("", "")


class Cautious(nn.Module):
    """Asks the data for a warning alone, and not where it is exported, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x[:, 0].eq(0).any():
            print("padded")
        n = int(torch.ones(len(x)).sum())  # of sizes alone
        made: Tensor = self.b(self.a(x).relu()) * n
        return made


def test_what_only_warns_is_recorded_as_it_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Cautious(), torch.randn(3, 4)
    with pytest.raises(Unrecorded):
        recorded(model, (x,), {})
    monkeypatch.setattr(torch.export, "export", _refuses)  # it would do, and take long
    assert [a.name for a in trace(model, x).axes if a.frozen is None] == ["a"]
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def test_what_types_and_sizes_tell_is_recorded() -> None:
    def by(h: Tensor) -> Tensor:
        layer = nn.Linear(4, 5).to(h.dtype)  # asks whether its numbers fit
        return layer(F.one_hot(h.argmax(1), 4).to(h) + h)

    graph, _ = recorded(Told(by), (torch.randn(3, 4),), {})
    assert "aten.one_hot.default" in [str(node.target) for node in graph.nodes]


@pytest.mark.parametrize(
    "by",
    [
        lambda h: h * h.sum().item(),
        lambda h: F.one_hot(h.argmax(1)),
        turned,
        lambda h: h[: int(h.argmax())],
        lambda h: h[h > 0],
        lambda h: h[torch.where(h[:, 0] > 0)],
        lambda h: h * len(h.nonzero()),
        lambda h: h * h.tolist()[0][0],
        lambda h: h * torch.from_numpy(h.detach().numpy()),
        lambda h: h * copy.deepcopy(h),
        lambda h: torch._foreach_mul_([h], 2.0) or h,
        written,
        caught,
        lambda h: Hidden(h),
    ],
)
def test_what_the_data_tell_or_hide_is_not_recorded(by: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unrecorded), torch.no_grad():
        recorded(Told(by), (torch.randn(3, 4),), {})
    if not isinstance(by(torch.ones(3, 4)), Hidden):  # that matters to who writes outputs down
        with pytest.raises(Unrecorded), torch.no_grad():
            walked(Told(by), (torch.randn(3, 4),), {})


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.ops.aten.linear.default, (torch.randn(2, 3, 4).transpose(0, 1), torch.randn(5, 4), torch.randn(5))),
        (torch.ops.aten.matmul.default, (torch.randn(3, 4), torch.randn(6, 4, 5))),
        (torch.ops.aten.matmul.default, (torch.randn(6, 4, 5).mT, torch.randn(4, 3))),
        (torch.ops.aten.bmm.default, (torch.randn(6, 4, 5).mT, torch.randn(6, 4, 3))),
        (torch.ops.aten.conv2d.default, (torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), None, [2, 1], [1])),
        (torch.ops.aten.conv2d.default, (torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), None, [2], [1, 1])),
    ],
)
def test_what_stands_for_a_product_is_laid_out_as_it_is(op: Any, args: tuple[Any, ...]) -> None:
    real, stand_in = op(*args), hollow(op, args, {})
    assert (stand_in.shape, stand_in.stride(), stand_in.dtype) == (real.shape, real.stride(), real.dtype)
    assert not stand_in.any()
    assert real.any()


def test_large_products_are_spared_and_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a recorded forward does not grow with the network, and the recorded operations are the same."""
    made: list[Tensor] = []
    kept: list[list[Any]] = []
    for few in (0, recording.FEW):
        monkeypatch.setattr(recording, "FEW", few)
        graph, _ = recorded(Told(lambda h: made.append(h) or h.relu()), (torch.randn(3, 4),), {})
        kept.append(operations(graph))
    assert kept[0] == kept[1]
    assert [bool(h.any()) for h in made] == [False, True]


def test_a_convolution_of_another_layout_is_carried_out() -> None:
    args = torch.randn(2, 6, 5, 3).permute(0, 3, 1, 2), torch.randn(4, 3, 3, 3)
    assert torch.equal(hollow(torch.ops.aten.conv2d.default, args, {}), torch.ops.aten.conv2d.default(*args))


def test_what_a_model_keeps_is_whole() -> None:
    kept: list[Tensor] = []

    def by(h: Tensor) -> Tensor:
        kept.append(torch.ones(4, 4) @ torch.ones(4, 4))
        return h @ kept[-1]

    for run in (recorded, walked):
        run(Told(by), (torch.ones(3, 4),), {})
        assert torch.equal(kept.pop(), torch.full((4, 4), 4.0))


@pytest.mark.parametrize("few", [0, recording.FEW])
def test_a_forward_that_takes_no_zeros_is_recorded_all_the_same(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FEW", few)

    def by(h: Tensor) -> Tensor:
        return torch.linalg.inv(h.mT @ h + torch.eye(4)) @ torch.linalg.cholesky(h.mT @ h)

    model = Told(by)
    nn.init.eye_(model.a.weight)
    graph, _ = recorded(model, (torch.eye(4),), {})
    assert [name for name, _ in operations(graph)][-1] == "aten.matmul.default"


def test_what_goes_around_autograd_or_is_mapped_is_followed() -> None:
    graph, _ = recorded(Told(lambda h: torch.vmap(torch.sin)(h * h.data)), (torch.ones(3, 4),), {})
    made = [node for node in graph.nodes if node.op != "placeholder"]
    assert [node.target.__name__ for node in made[:4]] == [
        "linear.default",
        "detach.default",
        "mul.Tensor",
        "sin.default",
    ]
    assert [node.all_input_nodes[-1] for node in made[1:]] == [made[0], made[1], made[2], made[3]]


def test_a_number_that_is_always_the_same_may_be_asked_for() -> None:
    same = torch.arange(3)
    model = Told(lambda h: h if bool((same == same).all()) else -h)
    graph, _ = recorded(model, (torch.ones(3, 4),), {})
    assert operations(graph)[-1][0] != "aten.neg.default"


def test_a_lean_copy_is_a_whole_one_but_for_its_parameters() -> None:
    class Odd(nn.Module):
        """Holds on to another module, to a list of tensors and to itself."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.first, self.me, self.seen = [self.inner[0]], self, [torch.ones(2)]

    model = Odd()
    model.inner[1].register_forward_hook(lambda *_: None)
    out = lean(model)
    assert isinstance(out, Odd)
    assert out.me is out
    assert out.first[0] is out.inner[0] is not model.inner[0]
    assert out.inner[0].weight is model.inner[0].weight
    assert out.seen[0] is not model.seen[0]
    assert out.inner[1].running_mean is not model.inner[1].running_mean
    assert list(out.inner[1]._forward_hooks.values()) == list(model.inner[1]._forward_hooks.values())
    out.inner[0].weight = nn.Parameter(torch.zeros(1, 3))
    out.inner[0].out_features = 1
    assert model.inner[0].weight.shape == (3, 3)
    assert model.inner[0].out_features == 3


@pytest.mark.parametrize("copied", [duplicate, lean])
def test_functions_of_a_copy_hold_its_own_modules(copied: Any) -> None:
    """`copy.deepcopy` leaves them to the original. What they hold beside modules of the model stays."""

    class Calls(nn.Module):
        def __init__(self, seen: list[Any]) -> None:
            super().__init__()
            self.a = layer = nn.Linear(2, 2)
            self.b = nn.Sequential(nn.Linear(2, 2))
            several, method = (layer, {"b": self.b}), self.b.forward
            self.of_one, self.of_several = lambda: layer, lambda: several
            self.of_method, self.of_function = lambda: method, lambda: self.of_one()
            self.plain, self.by_name = len, {"me": lambda: self}
            self.by_default, self.by_keyword = lambda m=layer: m, partial(lambda x, *, m=layer: m, 1)
            self.several = [lambda: layer, (partial(lambda m: m, layer), 3)]
            self.b.register_forward_hook(lambda *_: seen.append(self))

            def again(depth: int) -> nn.Module:
                return again(depth - 1) if depth else layer

            self.again = again

    seen: list[Any] = []
    model = Calls(seen)
    out = copied(model)
    for net in (out, model):
        assert net.of_one() is net.of_function() is net.again(2) is net.a
        assert net.of_several()[0] is net.a
        assert net.of_several()[1]["b"] is net.b
        assert net.of_method().__self__ is net.b
        assert net.by_name["me"]() is net
        assert net.by_default() is net.by_keyword() is net.several[0]() is net.several[1][0]() is net.a
        net.b(torch.zeros(1, 2))
    assert seen[0] is out
    assert seen[1] is model
    assert out.plain is len


def test_a_lean_copy_of_blocks_that_share_a_layer_shares_it_too() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), shared) for _ in range(3)))
    out = lean(model)
    assert out[0][1] is out[1][1] is out[2][1] is not shared
    assert out[0][1].weight is shared.weight


class Tables(nn.Module):
    """Keeps what it makes of its frequencies outside of itself, a table for each size of the batch."""

    def __init__(self, kept: dict[int, Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 8), nn.Linear(8, 3), lambda: kept
        self.register_buffer("frequencies", torch.rand(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept()
        if len(x) not in kept:
            kept[len(x)] = (self.frequencies @ torch.ones(1, len(x))).sum(1)
        return self.b(F.relu(self.a(x))) * kept[len(x)]


@pytest.mark.filterwarnings("ignore:with a batch of")
def test_what_a_model_keeps_outside_of_itself_stays_true() -> None:
    kept: dict[int, Tensor] = {}
    model = Tables(kept)
    l0.attach(model, torch.randn(2, 4))
    assert len(kept) > 1
    for batch, table in kept.items():
        torch.testing.assert_close(table, batch * model.frequencies[:, 0])
