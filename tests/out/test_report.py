"""The report's numbers against independent counts: entries of tensors, torch's FLOP counter, sums over the gates."""

import json
import re
from dataclasses import FrozenInstanceError, asdict, replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0
from ellzero.gates.abstract import AbstractGate, Phi
from ellzero.out.reporting import AxisRow, Count, GateRow, Report
from ellzero.out.tables import families, layers_of, span
from support import traced


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2).flatten(1)
        return self.fc2(self.fc1(x).relu())


class Residual(nn.Module):
    """A stream, a branch, and a layer that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(x + self.down(self.up(x).relu()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def entries(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def multiplications(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    return counter.get_total_flops() // 2 // len(x)


def close(gated: l0.Gated, name: str, kept: int) -> None:
    gate = dict(gated.named_gates())[name]
    gate.close_(torch.randperm(gate.shape.numel()).reshape(gate.shape) >= kept)


def lenet() -> tuple[l0.Gated, Tensor]:
    """The papers' 9-18-65-25: every one of the 65 inputs lies in one of the 18 maps, and each map has one."""
    x = torch.randn(2, 1, 28, 28)
    gated = traced.attached(LeNet5(), x, where=l0.per_layer)
    for name, kept in (("conv1", 9), ("conv2", 18), ("fc2", 25)):
        close(gated, name, kept)
    maps = dict(gated.named_gates())["conv2"].open().nonzero().flatten()
    inputs = torch.zeros(50, 16, dtype=torch.bool)
    inputs[maps, :3] = True
    inputs[maps[:11], 3] = True
    dict(gated.named_gates())["fc1"].close_(~inputs.flatten())
    return gated, x


@pytest.fixture(scope="module")
def lenet_report() -> tuple[l0.Gated, l0.out.reporting.Report, Tensor]:
    gated, x = lenet()
    return gated, l0.report(gated), x


def test_units_gates_and_picked_inputs_are_told_apart(
    lenet_report: tuple[l0.Gated, l0.out.reporting.Report, Tensor],
) -> None:
    _, report, _ = lenet_report
    assert [(a.name, a.dense, a.kept, a.state) for a in report.axes] == [
        ("conv1", 20, 9, "gated"),
        ("conv1.input", 1, 1, "frozen"),
        ("conv2", 50, 18, "gated"),
        ("fc1", 500, 25, "gated"),
        ("fc2", 10, 10, "frozen"),
    ]
    assert [(g.name, g.dense, g.kept) for g in report.gates] == [
        ("conv1", 20, 9),
        ("conv2", 50, 18),
        ("fc1", 800, 65),
        ("fc2", 500, 25),
    ]
    assert [(i.name, i.dense, i.kept) for i in report.inputs] == [("fc1", 800, 65)]
    assert report.axes[-1].why == "it is the model's output"


def test_totals_are_those_of_the_two_networks(lenet_report: tuple[l0.Gated, l0.out.reporting.Report, Tensor]) -> None:
    gated, report, x = lenet_report
    small = l0.compact(gated)
    assert report.params.dense == entries(gated.model) == 431_080
    assert report.params.kept == entries(small) == 9 * 26 + 18 * (9 * 25 + 1) + 25 * (65 + 1) + 10 * (25 + 1)
    assert report.macs is not None
    assert report.macs.dense == multiplications(gated.model, x) == 2_293_000
    assert report.macs.kept == multiplications(small, x)
    assert report.l0_norm.dense == 20 * 26 + 50 * 501 + 800 * 500 + 500 * 10
    assert report.l0_norm.kept == 9 * 26 + 18 * 501 + 65 * 500 + 25 * 10


def test_expected_counts_are_sums_over_the_gates(
    lenet_report: tuple[l0.Gated, l0.out.reporting.Report, Tensor],
) -> None:
    gated, report, _ = lenet_report
    p = {name: gate.prob_open().double() for name, gate in gated.named_gates()}
    assert [g.expected for g in report.gates] == pytest.approx([q.sum().item() for q in p.values()], rel=1e-5)
    inputs = p["conv2"].repeat_interleave(16) * p["fc1"]
    maps = p["conv2"] * (1 - (1 - p["fc1"].reshape(50, 16)).prod(1))
    n1, n2, n3, n4 = (t.sum().item() for t in (p["conv1"], maps, inputs, p["fc2"]))
    by_axis = {a.name: a.expected for a in report.axes}
    assert by_axis == pytest.approx({"conv1": n1, "conv1.input": 1, "conv2": n2, "fc1": n4, "fc2": 10}, rel=1e-5)
    assert report.inputs[0].expected == pytest.approx(n3, rel=1e-5)
    expected = n1 * 26 + n2 * (n1 * 25 + 1) + n4 * (n3 + 1) + 10 * n4 + 10
    assert report.params.expected == pytest.approx(expected, rel=1e-4)
    assert report.l0_norm.expected == pytest.approx(
        (26 * p["conv1"].sum() + 501 * p["conv2"].sum() + 500 * p["fc1"].sum() + 10 * p["fc2"].sum()).item(), rel=1e-5
    )


def test_inputs_that_are_all_open_are_all_kept() -> None:
    gated = traced.attached(LeNet5(), torch.randn(2, 1, 28, 28), where=l0.per_layer)
    assert [(i.name, i.dense, i.kept) for i in l0.report(gated).inputs] == [("fc1", 800, 800)]


def test_channels_that_come_back_to_even_out_groups_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1))
    gated = l0.attach(model, torch.randn(2, 3, 4, 4))
    dict(gated.named_gates())["0"].close_(torch.tensor([True, True, False, False, False, False]))  # 1 and 3 left
    report = l0.report(gated)
    assert [(g.name, g.kept) for g in report.gates] == [("0", 4), ("1", 4)]
    assert [(a.name, a.kept) for a in report.axes if a.state == "gated"] == [("0", 6), ("1", 4)]
    assert report.params.kept == entries(l0.compact(gated))
    assert "Gates by placement" in str(report)


@pytest.mark.slow
def test_a_large_network_is_counted_exactly() -> None:
    """More weights than float32 can count one by one."""
    model = nn.Sequential(nn.Linear(1, 4099), nn.ReLU(), nn.Linear(4099, 4099), nn.ReLU(), nn.Linear(4099, 1))
    report = l0.report(l0.attach(model, torch.zeros(1, 1)))
    assert report.params.dense == report.params.kept == entries(model)
    assert entries(model) > 2**24


@pytest.mark.slow
def test_streams_unreached_and_closed_branches_are_said() -> None:
    gated = l0.attach(Residual(), torch.randn(3, 4))
    report = l0.report(gated)
    states = {a.name: (a.state, a.why) for a in report.axes}
    assert states["stem"] == ("not gated", "a residual stream (`streams=True` gates it)")
    assert states["up"] == ("gated", None)
    assert report.unreached == ("spare.weight", "spare.bias")
    assert report.params.dense == entries(gated.model)  # they count: they stay
    assert "does not reach spare.weight, spare.bias" in str(report)
    close(gated, "up", 0)
    report = l0.report(gated)
    up = next(a for a in report.axes if a.name == "up")
    assert (up.kept, up.state, up.why) == (0, "closed", "every unit of it; its layers are taken out")
    assert report.refusal is None
    assert report.params.kept == entries(l0.compact(gated))


@pytest.mark.slow
def test_an_axis_that_nothing_carries_on_without_is_reported_with_the_refusal() -> None:
    gated = traced.attached(mlp(), torch.zeros(2, 6))
    close(gated, "0", 0)
    report = l0.report(gated, speed=True)
    assert report.axes[0].state == "closed"
    assert report.speed is None
    assert report.refusal is not None
    with pytest.raises(l0.graph.ClosedAxisError) as refused:
        l0.compact(gated)
    assert report.refusal == str(refused.value)
    assert "`compact` would refuse this network: every unit of axis `0` is closed" in report.markdown()


def test_unstructured_gates() -> None:
    gated = traced.attached(mlp(), torch.zeros(2, 6), where=l0.weights("2.weight"))
    dict(gated.named_gates())["2.weight"].close_(torch.arange(35).reshape(5, 7) % 7 < 3)  # three whole columns
    report = l0.report(gated)
    assert [(g.name, g.dense, g.kept) for g in report.gates] == [("2.weight", 35, 20)]
    assert [(a.name, a.kept) for a in report.axes if a.state == "gated"] == [("0", 4)]
    assert next(a.why for a in report.axes if a.state == "not gated") == "no gate decides about it"
    assert report.params.kept == entries(l0.compact(gated))


def test_axes_by_hand_have_no_macs() -> None:
    model = mlp()
    axes = [a for a in l0.graph.trace(model, torch.zeros(2, 6)).axes if a.frozen is None]
    report = l0.report(l0.attach(model, torch.zeros(2, 6), axes=axes))
    assert report.macs is None
    assert report.params.dense == entries(model)
    assert "MACs" not in str(report)


class Switch(AbstractGate):
    """A family without an atom at zero: open where its parameter is positive."""

    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        self.strength = nn.Parameter(torch.arange(1.0, 1.0 + self.shape.numel()).reshape(self.shape))

    def phi(self) -> Phi:
        return (self.strength,)

    def constants(self) -> tuple[()]:
        return ()

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return phi[0] * u

    def value_from(self, phi: Phi) -> Tensor:
        return phi[0].relu()

    def prob_from(self, phi: Phi) -> Tensor:
        raise l0.gates.NoExpectation("a switch is always open")

    def evidence_from(self, phi: Phi) -> Tensor:
        return phi[0]

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        self.strength[where] = -1.0


def test_gates_without_an_expectation_show_a_dash() -> None:
    gated = traced.attached(mlp(), torch.zeros(2, 6), gate=Switch)
    close(gated, "0", 4)
    report = l0.report(gated)
    assert [(a.name, a.expected, a.kept) for a in report.axes if a.state == "gated"] == [("0", None, 4), ("2", None, 5)]
    assert report.params.expected is report.macs.expected is report.l0_norm.expected is report.gates[0].expected is None  # type: ignore[union-attr]
    assert report.params.kept == entries(l0.compact(gated))
    assert re.search(r"parameters +107 +– +\d+ \(\d+\.\d+%\)", str(report))
    assert "| 0 | 7 | – | 4 | gated |" in report.markdown()
    assert json.loads(report.json())["params"]["expected"] is None


# ---------------------------------------------------------------- forms


def test_json_is_the_fields_and_nothing_else(lenet_report: tuple[l0.Gated, l0.out.reporting.Report, Tensor]) -> None:
    report = lenet_report[1]
    data = json.loads(report.json())
    assert list(data) == [
        *("format", "format_version", "model", "axes", "inputs", "gates", "params", "macs", "l0_norm"),
        *("unreached", "turns", "refusal", "speed"),
    ]
    assert (data.pop("format"), data.pop("format_version")) == ("ellzero.report", 1)
    assert data | {"full": False} == json.loads(json.dumps(asdict(report)))
    assert data["axes"][0].keys() == {"name", "dense", "expected", "kept", "state", "why", "kind"}
    assert data["gates"][0].keys() == {"name", "dense", "expected", "kept", "family"}
    assert data["params"].keys() == {"name", "dense", "expected", "kept"}


def test_text_fits_and_says_what_is_what(lenet_report: tuple[l0.Gated, l0.out.reporting.Report, Tensor]) -> None:
    report = lenet_report[1]
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"axis +dense +expected +kept +state", text)
    assert re.search(r"placement +gates +expected open +kept open", text)
    assert re.search(r"fc1 +800 +[\d.,]+ +65\n", text)
    assert re.search(r"parameters +431,080 +[\d.,]+ \([\d.]+%\) +6,212 \(1\.44%\)", text)
    assert "fc2 10 10.0 10 frozen: it is the model's output" in re.sub(" +", " ", text)
    assert "rule=Noiseless()" in text
    console = Console(width=100, record=True, file=StringIO())
    console.print(report)
    assert [line.rstrip() for line in console.export_text().splitlines()] == text.splitlines()


def test_gates_are_shown_apart_only_where_they_differ_from_units() -> None:
    gated = traced.attached(mlp(), torch.zeros(2, 6))
    assert "Gates by placement" not in str(l0.report(gated))
    assert "Inputs picked" not in str(l0.report(gated))


def test_markdown_is_a_table_with_its_pipes_escaped() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a|b": nn.Linear(3, 4), "[bold]c": nn.Linear(4, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["[bold]c"](self.layers["a|b"](x).relu())

    report = l0.report(l0.attach(Net(), torch.zeros(2, 3)))
    for line in report.markdown().splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6)
    assert r"layers.a\|b" in report.markdown()
    assert "layers.[bold]c" in str(report)
    assert report._repr_markdown_() == report.markdown()


def test_each_family_is_named_with_its_rule() -> None:
    makers = {"0": partial(l0.HardConcreteGate, rule=l0.gates.Median()), "*": l0.gates.RectifiedGate}
    report = l0.report(traced.attached(mlp(), torch.zeros(2, 6), gate=makers))
    assert [g.family for g in report.gates] == [
        "HardConcreteGate(beta=0.6667, gamma=-0.1, zeta=1.1, rule=Median())",
        "RectifiedGate(base=Normal, learn_scale=True)",
    ]
    assert "rule=Median()) on 0." in str(report)


def test_a_report_is_a_value() -> None:
    gated = traced.attached(mlp(), torch.zeros(2, 6))
    first = l0.report(gated)
    assert first == l0.report(gated)
    assert hash(first) == hash(l0.report(gated))
    with pytest.raises(FrozenInstanceError):
        first.model = "x"  # type: ignore[misc]
    close(gated, "0", 2)
    assert first.axes[0].kept == 7
    assert l0.report(gated).axes[0].kept == 2


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_speed_is_measured_on_both_networks(dtype: torch.dtype) -> None:
    gated = traced.attached(mlp().train(), torch.zeros(3, 6)).to(dtype)
    close(gated, "0", 2)
    seen: list[tuple[bool, torch.dtype]] = []
    handle = gated.model.register_forward_pre_hook(lambda m, args: seen.append((m.training, args[0].dtype)))
    report = l0.report(gated, speed=True)
    handle.remove()
    speed = report.speed
    assert speed is not None
    assert seen == [(False, dtype)] * (2 * (speed.runs + 5))  # the hook is on the compact copy too: both, in evaluation
    assert gated.model.training
    assert speed.ratio == speed.dense_s / speed.compact_s > 0
    assert (speed.batch, speed.threads) == (3, torch.get_num_threads())
    assert speed.device.startswith("CPU")
    assert f"Measured speed: the compact network runs {speed.ratio:.2f} times as fast" in report.markdown()
    assert max(map(len, str(report).splitlines())) <= 100


# ---------------------------------------------------------------- refusals


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`gated` must be what `attach` returned, got Sequential"):
        l0.report(mlp())  # type: ignore[arg-type]
    gated = traced.attached(mlp(), torch.zeros(2, 6))
    with torch.no_grad():
        dict(gated.named_gates())["2"].log_alpha[3] = torch.nan  # type: ignore[index]
    with pytest.raises(ValueError, match=r"`2.log_alpha` must be finite, got 1 of 5 .* the first nan at index \(3,\)"):
        l0.report(gated)


# ---------------------------------------------------------------- repeated layers


def tall(layers: int, kept: list[int], full: bool = False) -> Report:
    """A report on layers with heads and a norm before them, by hand; those that keep no head are closed."""
    axes = [AxisRow("embed", 8, 7.5, 8, "gated", None, "stream"), AxisRow("head", 5, 5.0, 5, "frozen", "it is asked")]
    for k in range(layers):
        state, why = ("gated", None) if kept[k] else ("closed", "every unit of it; its layers are taken out")
        axes.append(AxisRow(f"blocks.{k}.qkv", 4, kept[k] + 0.25, kept[k], state, why, "heads"))  # type: ignore[arg-type]
        axes.append(AxisRow(f"blocks.{k}.up.input", 8, 8.0, 8, "frozen", f"it reads `blocks.{k}.norm`"))
    gates = tuple(GateRow(a.name, a.dense, a.expected, a.kept, "Gate()") for a in axes if a.state != "frozen")
    total, unreached = Count("all", 9, 9.0, 9), tuple(f"blocks.{k}.spare" for k in range(layers))
    return Report("Net", tuple(axes), (), gates, total, None, total, unreached, (), None, None, full)


def lines(report: Report) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in str(report).splitlines()]


def test_repeated_layers_share_a_line_with_what_each_keeps() -> None:
    report = tall(6, [3, 0, 4, 1, 0, 2])
    text = " ".join(lines(report))
    assert "embed 8 7.5 8 gated stream head 5 5.0 5 frozen: it is asked" in text
    closed = "closed in 1, 4: every unit of it; its layers are taken out"
    assert f"blocks.0–5.qkv 24 11.5 10 gated heads: 3 0 4 1 0 2 of 4 in each; {closed}" in text
    assert "blocks.0–5.up.input 48 48.0 48 frozen: it reads `blocks.*.norm`" in text
    assert "does not reach blocks.0–5.spare;" in text
    assert "all 14 axes: `full=True`, or `--full`" in text
    assert "Gates by placement" not in text
    assert "| blocks.0–5.qkv | 24 | 11.5 | 10 | gated heads: 3 0 4" in report.markdown()
    assert max(map(len, str(report).splitlines())) <= 100
    alike = " ".join(lines(tall(6, [2] * 6)))
    assert "blocks.0–5.qkv 24 13.5 12 gated heads: 2 of 4 in each" in alike
    many = " ".join(lines(tall(30, [1, 4, *[2] * 28])))
    assert "blocks.0–29.qkv 120 68.5 61 gated heads: 1 to 4 of 4 in each" in many
    assert len(lines(tall(300, [2] * 300))) == len(lines(tall(6, [2] * 6)))


@pytest.mark.parametrize(("layers", "full"), [(5, False), (6, True)])
def test_few_axes_are_listed_one_by_one_and_all_where_asked_for(layers: int, full: bool) -> None:
    report = tall(layers, [3, 0, 4, 1, 2, 2], full)
    found = lines(report)
    assert "embed 8 7.5 8 gated" in found
    for k, kept in enumerate([3, 0, 4, 1, 2, 2][:layers]):
        state = "gated" if kept else "closed: every unit of it; its layers are taken out"
        assert f"blocks.{k}.qkv 4 {kept}.2 {kept} {state}" in found
        assert f"blocks.{k}.up.input 8 8.0 8 frozen: it reads `blocks.{k}.norm`" in found
    assert "`full=True`" not in str(report)
    assert len(json.loads(tall(6, [3] * 6).json())["axes"]) == 14


def test_gates_that_are_not_the_units_share_lines_too() -> None:
    report = tall(6, [3] * 6)
    text = " ".join(lines(replace(report, gates=tuple(replace(g, kept=1 + k % 3) for k, g in enumerate(report.gates)))))
    assert "placement gates expected open kept open kept in each layer" in text
    assert "blocks.0–5.qkv 24 19.5 12 2 3 1 2 3 1 of 4 in each" in text


def test_names_of_a_family_are_told_as_one_without_telling_more() -> None:
    assert span([f"a.{k}.b.{j}" for k in range(3) for j in range(4)]) == "a.0–2.b.0–3"
    assert span(["a.0.b.0", "a.0.b.1", "a.1.b.0"]) == "a.*.b.*"  # not all of 0–1 by 0–1
    assert span([f"{k}" for k in (0, 3, 6, 9, 12)]) == "*"
    assert layers_of(["a.0.b.1", "a.10.b.1"]) == ["0", "10"]
    assert layers_of(["a.0.b.1", "a.1.b.0"]) == ["0.1", "1.0"]
    assert families(["conv1", "conv2", "l.0", "l.1", "l.0a"], str) == [["conv1"], ["conv2"], ["l.0", "l.1"], ["l.0a"]]
