"""Tracing: what a model's axes are, against what one can see in the model, against its own second reading, and
against torch-pruning.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.tracing import as_inputs, batch_size, canonical_names
from support.oracles import assert_same, masked_by_hand, same, set_gates, settled
from support.zoo import MLP, LeNet, ResNet


def axes_of(model: nn.Module, x: Any) -> dict[str, l0.graph.Axis]:
    return {a.name: a for a in l0.graph.trace(model, x).axes}


def places(axis: l0.graph.Axis) -> set[tuple[str, tuple[int, ...], str]]:
    return {(s.tensor, s.dims, s.role) for s in axis.sites}


def test_lenet() -> None:
    """The papers' network: 20 maps, 50 maps that fc1 reads as blocks of 16, 500 units."""

    class LeNet5(LeNet):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
            self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    axes = axes_of(LeNet5(), torch.zeros(1, 1, 28, 28))
    assert {n: a.size for n, a in axes.items() if a.frozen is None} == {"conv1": 20, "conv2": 50, "fc1": 500}
    reader = axes["conv2"].readers[0]
    assert (reader.tensor, reader.dims) == ("fc1.weight", (1,))
    assert reader.units.tolist() == [k // 16 for k in range(800)]


def test_residual_stream_with_its_buffers() -> None:
    axes = axes_of(ResNet(), torch.zeros(1, 2, 6, 6))
    norms = {
        (f"{n}.{t}", (0,), "rides")
        for n in ("norm1", "norm")
        for t in ("weight", "bias", "running_mean", "running_var")
    }
    assert places(axes["stem"]) == norms | {
        ("stem.weight", (0,), "writes"),
        ("stem.bias", (0,), "rides"),
        ("conv2.weight", (0,), "writes"),
        ("conv2.bias", (0,), "rides"),
        ("conv1.weight", (1,), "reads"),
        ("head.weight", (1,), "reads"),
    }
    assert axes["stem"].stream
    assert not axes["conv1"].stream


def test_torch_pruning_finds_the_same_groups() -> None:
    pruning = pytest.importorskip("torch_pruning")
    model, x = ResNet(), torch.randn(1, 2, 6, 6)
    axes = axes_of(model, x)
    graph = pruning.DependencyGraph().build_dependency(copy.deepcopy(model), example_inputs=x)
    names = {m: n for n, m in graph.model.named_modules()}
    for layer in ("stem", "conv1"):
        group = graph.get_pruning_group(graph.model.get_submodule(layer), pruning.prune_conv_out_channels, idxs=[0])
        theirs = set()
        for dependency, _ in group:
            name, handler = names.get(dependency.target.module), dependency.handler.__name__
            if name is None:  # an operation without parameters
                continue
            reads = "in_channels" in handler and "batchnorm" not in handler
            theirs.add((name, "reads" if reads else "has"))
        ours = {(s.tensor.rpartition(".")[0], "reads" if s.role == "reads" else "has") for s in axes[layer].sites}
        assert ours == theirs


def test_tracing_leaves_the_model_as_it_is() -> None:
    model = ResNet().train()
    model.norm1.eval()
    modes = {n: m.training for n, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    l0.graph.trace(model, torch.randn(2, 2, 6, 6))
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert all(torch.equal(state[k], t) for k, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_forms_of_example_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.b(F.relu(self.a(x)) * (1 if scale is None else scale))

    x, scale = torch.zeros(2, 3), torch.ones(2, 1)
    for example in (x, (x,), [x, scale], {"x": x, "scale": scale}):
        assert axes_of(Two(), example)["a"].frozen is None
    with pytest.raises(TypeError, match=r"`example_inputs` must be a tuple .* got str"):
        l0.graph.trace(Two(), "x")
    with pytest.raises(l0.graph.TraceError, match="the model rejects `example_inputs`: RuntimeError"):
        l0.graph.trace(Two(), torch.zeros(2, 4))
    assert batch_size(as_inputs(x)) == 2


def test_per_example_scale_of_the_example_input_is_no_mixing() -> None:
    """Something of the batch's shape (n, 1) multiplies all units alike; of shape (n, units) it knows them by number."""

    class Scaled(MLP):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return self.layers[1](self.layers[0](x) * scale)

    assert axes_of(Scaled(3, 5, 2), (torch.zeros(2, 3), torch.ones(2, 1)))["layers.0"].frozen is None
    assert "the model's input `scale`" in str(
        axes_of(Scaled(3, 5, 2), (torch.zeros(2, 3), torch.ones(2, 5)))["layers.0"].frozen
    )


def test_a_batch_of_one_is_no_axis() -> None:
    assert axes_of(LeNet(), torch.zeros(1, 1, 14, 14)).keys() == axes_of(LeNet(), torch.zeros(3, 1, 14, 14)).keys()


def test_tied_weights_have_one_name() -> None:
    model = MLP(4, 4, 4)
    model.layers[1].weight = model.layers[0].weight
    assert canonical_names(model)["layers.1.weight"] == "layers.0.weight"
    assert "layers.1.weight" not in l0.graph.trace(model, torch.zeros(1, 4)).shapes


def test_what_only_training_mixes_is_frozen() -> None:
    class Helped(MLP):
        def forward(self, x: Tensor) -> Any:
            y = self.layers[0](x)
            return (self.layers[1](y), y.softmax(1)) if self.training else self.layers[1](y)

    assert axes_of(Helped(3, 5, 2), torch.zeros(2, 3))["layers.0"].frozen == "`softmax` mixes its units"


def test_macs_are_those_of_one_example() -> None:
    for n in (1, 3):
        products = l0.graph.trace(LeNet(), torch.zeros(n, 1, 14, 14)).products or ()
        assert {p.name: p.factor for p in products} == {"conv1": 144.0, "conv2": 16.0, "fc1": 1.0, "fc2": 1.0}


class Places(nn.Embedding):
    @torch.no_grad()
    def forward(self, count: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(count))


class Noting(nn.Module):
    """Asks the data for a number, so that it is exported, and looks places up without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.hidden, self.out = Places(9, 3), nn.Linear(3, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.sum().item()
        hidden = self.hidden(x + self.places(x.shape[1]))
        a, b = hidden.split(hidden.shape[-1] // 2, -1)
        return self.out(a.relu() * b)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_block_without_gradients_in_an_export_is_the_same_with_units_removed() -> None:
    gated = l0.attach(settled(Noting()), torch.randn(4, 6, 3, dtype=torch.float64)).eval()
    z = set_gates(gated, {"hidden": [1]})
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    assert_same(l0.compact(gated)(x), masked_by_hand(gated.model, z, {"hidden": {"out": same}})(x))
