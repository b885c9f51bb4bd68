"""Products as transformers write them: experts, letters, scans, cuts, looked-up places. Closed units are gone, exactly.

The oracle is a copy whose weights are multiplied by hand, on other batches and lengths than the example's.
"""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.attention import Attention
from support.oracles import HIDDEN, assert_counted, assert_same, set_gates, settled


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def assert_exact(model: Any, closed: Mapping[str, list[int]], by_hand: Mapping[str, tuple[str, int, int]]) -> Any:
    """Closes units and compares: `by_hand` has for each parameter its gates, their dimension, and entries per unit."""
    settled(model)
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    assert {*closed} == {name for name, _ in gated.named_gates()}
    z = set_gates(gated, closed)
    hand = copy.deepcopy(model)
    with torch.no_grad():
        for name, (gates, dim, times) in by_hand.items():
            weight = hand.get_parameter(name)
            weight.mul_(z[gates].repeat_interleave(times).reshape(-1, *[1] * (weight.ndim - 1 - dim)))
    small = l0.compact(gated)
    for x in (draw(2, 5, 8), draw(3, 7, 8)):
        assert_same(gated(x), hand(x))
        assert_same(small(x), hand(x))
    assert_counted(gated, small, (draw(2, 5, 8),))
    return small


class Experts(nn.Module):
    """A mixture of experts with a tensor for all of them: each row goes through two, which the router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(torch.empty(4, 6, 8)), nn.Parameter(torch.empty(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        shares, picked = self.router(rows).softmax(-1).topk(2)
        up, down = (w[picked.reshape(-1)] for w in (self.up, self.down))
        h = torch.bmm(up, rows.repeat_interleave(2, 0)[..., None]).relu()
        y = torch.bmm(down, h).squeeze(-1) * shares.reshape(-1, 1)
        return self.out(x + y.view(-1, 2, 8).sum(1).view(x.shape))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_units_of_experts_go_in_all_of_them() -> None:
    small = assert_exact(Experts(), {"up": [1, 2, 5]}, {"down": ("up", 2, 1)})
    assert (small.up.shape, small.down.shape) == ((4, 3, 8), (4, 8, 3))


class Left(nn.Module):
    """A parameter on the left of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.last = nn.Linear(8, 5), nn.Parameter(torch.empty(6, 5)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.w @ self.first(x).relu().mT).mT.relu())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_parameter_on_the_left_reads_and_writes() -> None:
    closed = {"first": [0, 3], "w": [2]}
    small = assert_exact(Left(), closed, {"w": ("first", 1, 1), "last.weight": ("w", 1, 1)})
    assert small.w.shape == (5, 3)


class Spelt(nn.Module):
    """Attention in letters, with places that parameters hold for each head, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.empty(8, 4, 3)) for _ in range(4))
        self.bias = nn.Parameter(torch.empty(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bth,hnd->btnd", x, w) for w in (self.q, self.k, self.v))
        weights = torch.einsum("bind,bjnd->bnij", q + self.bias, k).softmax(-1)
        return x + torch.einsum("bind,hnd->bih", torch.einsum("bnij,bjnd->bind", weights, v), self.o)


@pytest.mark.slow
def test_heads_of_attention_in_letters() -> None:
    small = assert_exact(Spelt(), {"q": [1, 3]}, {"o": ("q", 1, 1)})
    assert {p.shape for p in small.parameters()} == {(8, 2, 3), (2, 3)}


class Whole(Attention):
    """Norms of queries and keys over all heads, as in OLMo 2; and a rest beside the angles that has no entries."""

    def __init__(self) -> None:
        super().__init__(size=4, written=True, angles=True)
        self.norm_q, self.norm_k = nn.RMSNorm(16), nn.RMSNorm(16)

    def made(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)
        q, k, v = (a.view(*a.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for a in made)
        return q, k, v

    def turned(self, a: Tensor) -> Tensor:
        return torch.cat([super().turned(a[..., :4]), a[..., 4:]], -1)


@pytest.mark.slow
def test_heads_with_a_norm_over_all_of_them_close_where_they_are_written() -> None:
    names = ("q.weight", "q.bias", "k.weight", "v.weight", "v.bias")
    small = assert_exact(Whole(), {"q": [0, 2]}, dict.fromkeys(names, ("q", 0, 4)))
    assert (small.num_heads, small.norm_q.weight.shape) == (2, (8,))


class Scan(nn.Module):
    """A state that begins with zeros, as many as a number that is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.decay = 6, nn.Parameter(torch.empty(6))
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, seen = torch.zeros(len(x), self.width, dtype=x.dtype), []
        for h in self.first(x).relu().unbind(1):
            state = state * self.decay.sigmoid() + h
            seen.append(self.last(state))
        return torch.stack(seen, 1)


def test_channels_of_a_scan() -> None:
    small = assert_exact(Scan(), {"first": [0, 4]}, {"last.weight": ("first", 1, 1)})
    assert (small.width, small.decay.shape) == (4, (4,))


class Relative(Attention):
    """Scores by distance, looked up as in DeBERTa, in a table for each head; a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__(projections="chunk")
        self.table = nn.Parameter(torch.empty(4, 3, 16))
        self.seen = nn.Buffer(torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        (q, k, v), t = self.made(x, x), x.shape[1]
        far = (torch.arange(t)[:, None] - torch.arange(t) + 8).expand(len(x), self.num_heads, -1, -1)
        scores = (q @ k.mT + torch.gather(q @ self.table, -1, far)).masked_fill(~self.seen[:, :, :t, :t], -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_heads_with_scores_that_are_looked_up() -> None:
    small = assert_exact(Relative(), {"qkv": [0, 1, 2]}, {"out.weight": ("qkv", 1, 3)})
    assert small.num_heads == 1


class Fused(nn.Module):
    """Queries, keys and values in one weight, fewer of keys; cut by numbers that are stored, or by literal ones."""

    def __init__(self, literal: bool = False) -> None:
        super().__init__()
        self.queries, self.keys, self.literal = 12, 6, literal
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [12, 6, 6] if self.literal else [self.queries, self.keys, self.keys]
        q, k, v = (a.unflatten(-1, (-1, 3)).transpose(1, 2) for a in self.qkv(x).split(sizes, -1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "keys"), [([2, 3], 3), ([1, 3], 6)])
def test_fewer_heads_of_keys_in_one_weight(closed: list[int], keys: int) -> None:
    small = assert_exact(Fused(), {"qkv": closed}, {"out.weight": ("qkv", 1, 3)})
    assert (small.queries, small.keys, small.qkv.out_features) == (6, keys, 6 + 2 * keys)


def test_literal_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing to gate.*split_sizes"):
        l0.attach(settled(Fused(literal=True)), draw(2, 5, 8))


class Steps(Experts):
    """With a kernel that takes some widths alone."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4, 6, 10], dtype=torch.int32)
        h = torch._grouped_mm(x.reshape(-1, 8), self.up.mT, offs=ends).relu()
        return self.out(torch._grouped_mm(h, self.down.mT, offs=ends))  # type: ignore[no-any-return]


def test_a_kernel_that_takes_some_widths_alone_is_refused_with_another_one() -> None:
    model = Steps()
    model.up, model.down = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 8, 8))
    with pytest.raises(ValueError, match=r"`_grouped_mm` takes widths in steps of 16 bytes alone.*batched_mm"):
        l0.attach(model, draw(2, 5, 8).float())


TWO: dict[str, Any] = {
    "letters with dots": lambda m, h: torch.einsum("...i,io->...o", h, m.w),
    "letters without an arrow": lambda m, h: torch.einsum("bti,iz", h, m.w),
    "dots without an arrow": lambda m, h: torch.einsum("...i,oi", h, m.w),
    "dots that are summed": lambda m, h: torch.einsum("b...i,io->bo", h, m.w)[:, None],
    "dots on both": lambda m, h: torch.einsum("...ti,...io->...to", h, m.w.expand(len(h), 6, 6)),
    "three": lambda m, h: torch.einsum("bti,ij,jk->btk", h, m.w, m.v),
    "three with dots": lambda m, h: torch.einsum("...i,ij,jk", h, m.w, m.v),
    "of several lengths": lambda m, h: torch.einsum("bti,bio->bto", h, m.w[None]),
    "a diagonal": lambda m, h: h * torch.einsum("bti,ii->bt", h, m.w)[..., None],
    "tensordot": lambda m, h: torch.tensordot(h, m.w, dims=([2], [0])),
    "inner": lambda m, h: torch.inner(h, m.w),
    **{kind: lambda m, h: m.cell(h.flatten(0, 1))[None] for kind in ("GRUCell", "RNNCell")},
    "LSTMCell": lambda m, h: m.cell(h.flatten(0, 1))[0][None],
}


class Between(nn.Module):
    """A product between layers that can shrink."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 6), nn.Linear(6, 7), nn.Linear(7, 3)
        self.w, self.v = (nn.Parameter(torch.empty(6, 6)) for _ in range(2))
        self.name, self.cell = name, getattr(nn, name)(6, 6) if name.endswith("Cell") else None

    def forward(self, x: Tensor) -> Tensor:
        h = TWO[self.name](self, self.a(x).relu())
        return self.out(self.b(h.relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TWO)
def test_every_product_counts_whether_its_units_can_go_or_not(name: str) -> None:
    """The counter is torch's. What has no rule, or is written as no rule follows it, would cost nothing else."""
    x = draw(2, 5, 8)
    gated = l0.attach(settled(Between(name)), x, where=HIDDEN).eval()
    assert_counted(gated, copy.deepcopy(gated.model), (x,))
    assert ("w" in dict(gated.named_gates())) is ("letters" in name or name.startswith(("dots without", "dots that")))
    for seed in range(2):
        closed = {n: torch.randperm(len(g.value()))[: 2 + seed].tolist() for n, g in gated.named_gates()}
        set_gates(gated, closed, seed)
        small = l0.compact(gated)
        assert_same(small(draw(3, 4, 8)), gated(draw(3, 4, 8)))
        assert_counted(gated, small, (x,))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(8, 6), nn.Linear(4, 3)
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.a(x).relu().to(torch.complex128) @ self.w).abs())  # type: ignore[no-any-return]


def test_complex_parameters_are_no_quantised_ones() -> None:
    gated = l0.attach(Complex().double(), draw(2, 8), where=HIDDEN).eval()
    assert [name for name, _ in gated.named_gates()] == ["a", "w"]
    set_gates(gated, {"a": [1, 4], "w": [0]})
    small: Any = l0.compact(gated)
    assert small.w.shape == (4, 3)
    assert bool(small.w.imag.abs().gt(0).all())
    assert_same(small(draw(3, 8)), gated(draw(3, 8)))


class Normed(nn.Module):
    """A batch norm whose statistics are over the units of `a`: by the tokens of a sequence, or by the batch."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.a, self.b, self.out = by, nn.Linear(8, 6), nn.Linear(6, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(5 if by == "tokens" else 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.norm(h) if self.by == "tokens" else self.norm(h.mT.reshape(-1, 1, 5)).view(len(x), -1, 5).mT
        return self.out(self.b(h.relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["tokens", "examples"])
def test_units_stay_over_which_a_batch_norm_takes_its_statistics(by: str) -> None:
    """In evaluation they could go; in training all others would change with them."""
    gated = l0.attach(settled(Normed(by)), draw(2, 5, 8), where=HIDDEN)
    assert [name for name, _ in gated.named_gates()] == ["b"]
    set_gates(gated, {"b": [0, 3]})
    small, x = l0.compact(gated.eval()), draw(4, 5, 8)
    gated.fix()
    assert_same(small.train()(x), gated.train()(x))
    assert_same(small.eval()(x), gated.eval()(x))
