"""Experts of a mixture close as a whole, and their rows of the router with them, exactly.

The oracle is a copy with a forward hook of the test's own: it adds the logarithm of the gates to the router's logits,
−∞ where they are closed. The library's shares have no part in it.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph import ClosedAxisError
from ellzero.graph.standins.layers import Closed
from support.formers import Mixture
from support.oracles import HIDDEN, assert_counted, assert_same, set_gates, settled


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Router(nn.Module):
    """As in Mixtral: it computes logits and picks in one forward."""

    def __init__(self, scores: str) -> None:
        super().__init__()
        self.scores, self.weight = scores, nn.Parameter(torch.empty(4, 8))
        self.told = nn.Identity()  # where the oracle gets in

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.told(F.linear(x, self.weight))
        if self.scores == "picked first":  # as in GPT-OSS
            shares, picked = logits.topk(2)
            return shares.softmax(-1), picked
        shares, picked = (logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)).topk(2)
        return (shares if self.scores == "whole" else shares / shares.sum(-1, keepdim=True)), picked


class Experts(nn.Module):
    """A mixture with a tensor for all experts: each row goes through two."""

    def __init__(self, scores: str = "renormalised") -> None:
        super().__init__()
        self.scores = scores
        self.router: Any = nn.Linear(8, 4) if scores == "layer" else Router(scores)
        self.up, self.down = nn.Parameter(torch.empty(4, 6, 8)), nn.Parameter(torch.empty(4, 8, 6))
        self.bias, self.out = nn.Parameter(torch.empty(4, 6)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        shares, picked = self.router(rows).softmax(-1).topk(2) if self.scores == "layer" else self.router(rows)
        picked = picked.reshape(-1)
        h = torch.bmm(self.up[picked], rows.repeat_interleave(2, 0)[..., None]).squeeze(-1) + self.bias[picked]
        y = torch.bmm(self.down[picked], h.relu()[..., None]).squeeze(-1) * shares.reshape(-1, 1)
        if self.scores == "by number":
            y = y * (picked[:, None] != 1)
        elif self.scores == "by number, in another order":
            y = y * (picked[torch.arange(len(picked)).flip(0)][:, None] != 1)
        elif self.scores == "by two numbers":
            y = y * self.up[picked, :, picked].sum(1, keepdim=True)
        return self.out(x + y.view(-1, 2, 8).sum(1).view(x.shape))  # type: ignore[no-any-return]


def by_hand(model: Any, experts: Tensor, units: Tensor) -> Any:
    """A copy with the logarithms of gates on its logits, and gates on what its experts read in the middle."""
    out = copy.deepcopy(model)
    place = out.router if model.scores == "layer" else out.router.told
    place.register_forward_hook(lambda _, __, logits: logits + experts.log())
    with torch.no_grad():
        out.down.mul_(units)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["layer", "renormalised", "whole", "picked first"])
def test_experts_go_with_their_rows_of_the_router(scores: str) -> None:
    model: Any = settled(Experts(scores))
    reasons = [str(axis.frozen) for axis in l0.attach(model, draw(2, 5, 8), where=HIDDEN).axes if axis.size == 4]
    assert reasons
    assert all(reason.endswith("which `l0.routed` may do away with if they are experts") for reason in reasons), reasons
    routed = l0.routed(model, draw(2, 5, 8))
    assert torch.equal(routed(draw(3, 7, 8)), model(draw(3, 7, 8)))
    gated = l0.attach(routed, draw(2, 5, 8), where=HIDDEN).eval()
    for closed, left in (([1], 3), ([0, 3], 2), ([0, 1, 2], 2)):  # two are picked: so many stay
        z = set_gates(gated, {"router": closed, "up": [0, 2, 4]})
        small, hand = l0.compact(gated), by_hand(model, z["router"], z["up"])
        for x in (draw(2, 5, 8), draw(3, 7, 8)):
            assert_same(gated(x), hand(x))
            assert_same(small(x), hand(x))
        assert (small.router.weight.shape, small.up.shape) == ((left, 8), (left, 3, 8))
        assert_counted(gated, small, (draw(2, 5, 8),))


def attached() -> l0.Gated:
    return l0.attach(l0.routed(settled(Experts("layer")), draw(2, 5, 8)), draw(2, 5, 8), where=HIDDEN)


@pytest.mark.slow
def test_finalize_leaves_as_many_as_are_picked_and_none_is_no_mixture() -> None:
    gated = attached()
    set_gates(gated, {})
    l0.finalize(gated, 0.3)
    gates = dict(gated.named_gates())
    assert int(gates["router"].open().sum()) == 2
    # Of each expert 6 · 8 + 6 + 8 · 6 weights, and 9 of the router.
    assert float(l0.dense(l0.l0_norm, gated)) == 4 * (6 * 8 + 6 + 8 * 6 + 9)
    set_gates(gated, {"router": [0, 1, 2, 3]})
    with pytest.raises(ClosedAxisError, match="every expert of `router` is closed"):
        l0.compact(gated)


@pytest.mark.slow
def test_gates_learn_and_a_draw_that_closes_all_has_numbers() -> None:
    gated = attached().train()
    gate = dict(gated.named_gates())["router"]
    gate.log_alpha.data.zero_()
    gated(draw(2, 5, 8), gate_noise=torch.full((10,), 0.5)).square().sum().backward()
    assert bool((gate.log_alpha.grad.isfinite() & (gate.log_alpha.grad != 0)).all())
    assert gated.model.router.shares.open.grad is None
    set_gates(gated, {"router": [0, 1, 2, 3]})
    assert bool(gated(draw(2, 5, 8)).isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ("sigmoid", "`topk` in `router` mixes its units after a sigmoid, .* `where=l0.shrinkable.blocks=True"),
        ("by number", "`ne` goes by the numbers"),
        ("by number, in another order", "`index` goes by the numbers"),
        ("by two numbers", "`index` picks units by their number"),
    ],
)
def test_what_goes_by_more_than_the_largest_shares_is_refused(scores: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"no router whose experts could go: {why}"):
        l0.routed(settled(Experts(scores)), draw(2, 5, 8))


def test_without_a_router_it_says_so() -> None:
    with pytest.raises(ValueError, match="no logits of a linear map go through a softmax and a `topk`"):
        l0.routed(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), draw(2, 8).float())


@pytest.mark.slow
def test_files_and_compilers_know_it() -> None:
    gated = attached().eval()
    set_gates(gated, {"router": [2]})
    small = l0.compact(gated)
    whole = torch.compile(small, fullgraph=True, backend="eager")
    assert_same(whole(draw(2, 5, 8)), small(draw(2, 5, 8)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found")
def test_a_mixtral_without_an_expert_is_a_stock_one_with_one_less(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
    sizes |= {"num_key_value_heads": 2, "head_dim": 4, "vocab_size": 20, "num_experts_per_tok": 2}

    def made(experts: int) -> Any:
        config = transformers.MixtralConfig(num_local_experts=experts, experts_implementation="batched_mm", **sizes)
        return transformers.MixtralForCausalLM(config).eval()

    torch.manual_seed(0)
    whole, fewer, words = made(4), made(3), torch.randint(20, (3, 7))
    example = {"input_ids": torch.randint(20, (2, 5)), "use_cache": False}
    gated = l0.attach(l0.routed(whole, example), example).eval()
    for name, gate in gated.named_gates():
        gate.log_alpha.data.fill_(10.0)
        if name.endswith("mlp.gate"):
            gate.close_(torch.tensor([False, True, False, False]))
    small, left = l0.compact(gated), torch.tensor([0, 2, 3])
    kept = {k: v[left] if "experts" in k or k.endswith("mlp.gate.weight") else v for k, v in whole.state_dict().items()}
    fewer.load_state_dict(kept)
    assert_same(small(words).logits, fewer(words).logits)
    assert torch.equal(*(m.generate(words, do_sample=False, max_new_tokens=6) for m in (small, fewer)))
    assert save_pretrained(small, tmp_path)
    assert type(whole).from_pretrained(tmp_path).config.num_local_experts == 3
    small.model.layers[0].mlp.gate.shares.open[1] = 0.5
    assert not save_pretrained(small, tmp_path / "other")
    again = from_pretrained(tmp_path / "other")
    assert again.model.layers[0].mlp.gate.shares.open.tolist() == [1.0, 0.5, 1.0]
    assert torch.equal(*(m.generate(words, do_sample=False, max_new_tokens=6) for m in (small, again)))


class Normed(nn.Module):
    """A mixture that is added to what it reads, with a norm behind the sum: there twice the input is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixture, self.norm = nn.Linear(8, 8), Mixture(8, 6, 4, 2, "whole"), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.norm(x + self.mixture(x))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_mixture_without_units_is_still_one() -> None:
    """Its module is no layer that an identity could stand for, though nothing shows behind such a norm."""
    gated = l0.attach(settled(Normed()), draw(2, 5, 8))
    assert [axis.can_vanish for axis in gated.axes if axis.name == "mixture"] == [False]


def test_a_router_that_reads_nothing_keeps_its_shares(tmp_path: Path) -> None:
    """Its logits are its bias then; what gates say of experts is added to it as before."""

    def network(seed: int) -> Any:
        return l0.routed(settled(nn.Sequential(nn.Linear(5, 8), Experts("layer")), seed), draw(2, 4, 5))

    gated = l0.attach(network(0), draw(2, 4, 5), where=l0.shrinkable(parts=True)).eval()
    z = set_gates(gated, {"1.router": [1], "1.router.inputs": list(range(8))}, seed=3)
    small = l0.compact(gated)
    masked, others = network(0), draw(3, 7, 5)
    masked[1] = by_hand(masked[1], z["1.router"], z["1"])
    with torch.no_grad():
        masked[1].router.weight.zero_()
        masked[0].weight.mul_(z["0.inputs"])
        masked[1].out.weight.mul_(z["1.out.inputs"])
    assert isinstance(small[1].router, Closed)
    assert_same(small(others), masked(others))
    assert_counted(gated, small, [draw(2, 4, 5)])
    l0.save(small, tmp_path / "small.safetensors")
    assert_same(l0.load(network(1), tmp_path / "small.safetensors")(others), small(others))
