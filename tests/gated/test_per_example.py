"""Noise for each example of a batch: forwards against those of single examples, and against formulas by hand."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.base.local import TINY
from ellzero.gates import ARM, BernoulliGate, GaussianWeightGate, GNJGate, SBPGate, SparseVDGate, STGGate
from support.oracles import assert_same


class Small(nn.Module):
    """Maps that a linear layer reads in blocks, and a linear layer along the last of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 3, 3), nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        out: Tensor = self.fc2(F.relu(self.fc1(h))[:, None].expand(-1, 4, -1))
        return out


def everywhere(graph: l0.graph.Graph) -> list[l0.Placement]:
    return [*l0.per_layer()(graph), *l0.weights("*")(graph)]


def network(**how: Any) -> tuple[l0.Gated, Tensor]:
    torch.manual_seed(3)
    x, net = torch.randn(6, 1, 6, 6), Small()
    gated = l0.attach(net, x, **{"where": l0.per_layer(), "per_example": True, **how}).double().train()
    with torch.no_grad():
        for _, gate in gated.named_gates():
            for parameter in gate.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.requires_grad)
    return gated, x.double()


@pytest.mark.parametrize("family", [SBPGate, STGGate, GNJGate])
def test_each_example_has_a_draw_of_its_own(family: Any) -> None:
    gated, x = network(gate=family)
    torch.manual_seed(7)
    out = gated(x)
    torch.manual_seed(7)
    noise = torch.rand(len(x), gated.liveness.size)
    one_by_one = [gated(image[None], gate_noise=u) for image, u in zip(x, noise, strict=True)]
    assert_same(out, torch.cat(one_by_one))
    (slope,) = torch.autograd.grad(out.sum(), gated.model.fc1.weight)  # type: ignore[union-attr,arg-type]
    (expected,) = torch.autograd.grad(torch.cat(one_by_one).sum(), gated.model.fc1.weight)  # type: ignore[union-attr,arg-type]
    assert_same(slope, expected)


def test_noise_on_weights_is_drawn_in_the_outputs() -> None:
    """mean + √variance·ε of each layer, with gates on units multiplied into the inputs of both."""
    noise = dict.fromkeys(("*.weight", "*.bias"), GaussianWeightGate)
    gated, x = network(where=everywhere, gate={**noise, "*": GNJGate})
    gates: dict[str, Any] = dict(gated.named_gates())
    torch.manual_seed(11)
    out = gated(x)
    torch.manual_seed(11)
    normal = torch.special.ndtri(torch.rand(len(x), 3 + 12 + 5).clamp(1e-6, 1 - 1e-6))
    z = {
        name: gates[name].mu + (gates[name].log_var / 2).exp() * part
        for name, part in zip(("conv", "fc1", "fc2"), normal.split([3, 12, 5], 1), strict=True)
    }

    def layer(name: str, h: Tensor, call: Any) -> Tensor:
        own = gated.model.get_submodule(name)
        mean = call(h, own.weight, own.bias)
        variance = call(h.square(), gates[f"{name}.weight"].log_var.exp(), gates[f"{name}.bias"].log_var.exp())
        return mean + (variance + TINY).sqrt() * torch.randn_like(mean)  # type: ignore[no-any-return]

    h = F.max_pool2d(F.relu(layer("conv", x, F.conv2d)), 2).flatten(1)
    h = F.relu(layer("fc1", h * z["conv"].repeat_interleave(4, 1) * z["fc1"], F.linear))
    assert_same(out, layer("fc2", (h * z["fc2"])[:, None].expand(-1, 4, -1), F.linear))


def test_the_outputs_have_the_moments_of_weights_that_are_drawn() -> None:
    """Of one layer, w·x is Gaussian whichever way it is drawn: means and variances of 20,000 draws to five errors."""
    many, x = 20_000, torch.tensor([[0.5, -2.0, 1.0]])
    net = nn.Sequential(nn.Linear(3, 2))
    gate = partial(SparseVDGate, start=-1.0, clip=False)
    gated = l0.attach(net, x, where=l0.weights("0.weight"), gate=gate, per_example=True).train()
    torch.manual_seed(0)
    out = gated(x.expand(many, -1)).detach()
    mean, variance = net(x)[0].detach(), x.square().sum() * torch.tensor(-1.0).exp()
    torch.testing.assert_close(out.mean(0), mean, rtol=0, atol=5 * float((variance / many).sqrt()))
    torch.testing.assert_close(out.var(0), variance.expand(2), rtol=5 * (2 / many) ** 0.5, atol=0)


def test_without_noise_nothing_is_drawn() -> None:
    gated, x = network(
        where=everywhere, gate={"*.weight": GaussianWeightGate, "*.bias": GaussianWeightGate, "*": GNJGate}
    )
    plain, _ = network(
        where=everywhere,
        gate={"*.weight": GaussianWeightGate, "*.bias": GaussianWeightGate, "*": GNJGate},
        per_example=False,
    )
    state = torch.get_rng_state()
    assert_same(gated.eval()(x), plain.eval()(x))
    assert_same(gated.train().fix()(x), plain.train().fix()(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_have_it_is_refused() -> None:
    x = torch.randn(2, 4, 5, 5)
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(36, 2))
    with pytest.raises(
        ValueError, match=r"`per_example` needs gates on the inputs of layers without groups, and `1.weight`"
    ):
        l0.attach(grouped, x, gate=GNJGate, per_example=True)
    turned = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 3))
    with pytest.raises(ValueError, match=r"layers of type Linear, .*, and `1.weight` is in a ConvTranspose2d"):
        l0.attach(turned, x, gate=GNJGate, per_example=True)
    with pytest.raises(ValueError, match="`per_example` must be false for `conv`, as it learns from the loss"):
        network(gate=partial(BernoulliGate, estimator=ARM()))
    gated, images = network(gate=GNJGate)
    with pytest.raises(ValueError, match="one entry per gate"):
        gated(images, gate_noise=torch.rand(6, gated.liveness.size))
    with pytest.raises(ValueError, match="a leading dimension among the inputs"):
        gated()


class Turned(nn.Module):
    """Its second layer reads positions as rows, of which there are more than examples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.relu(self.fc1(x)).flatten(0, 1))
        return out


def test_rows_that_are_no_examples_are_refused() -> None:
    x = torch.randn(2, 5, 4)
    gated = l0.attach(Turned(), x, gate=GNJGate, per_example=True).train()
    with pytest.raises(RuntimeError, match=r"`fc2.weight` reads 10 rows of 2 examples"):
        gated(x)
