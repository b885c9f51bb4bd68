"""Every rule against real execution: disturb one unit, and only entries that carry the unit may change.

That is the invariant of `values.py`: a rule carries a unit to all entries that depend on it, or a weight's contracting
dimension consumes it, or it is frozen. The operands are parameters, so that all their dimensions carry units, batch and
space too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.graph.resizing import resize
from ellzero.graph.rules.call import RULES, tensors
from ellzero.graph.rules.entrywise import BINARY, DRAWN_IN_TRAINING, UNARY
from ellzero.graph.ties import Ties, classes
from ellzero.graph.tracing import _Walk
from ellzero.graph.values import Value

Op = Callable[..., Any]


class _Recorder(_Walk):
    """Keeps what reaches the output, instead of freezing it."""

    outputs: list[Value]
    ops: set[str]

    def _value(self, node: Any, number: int, values: Any, *rest: Any) -> Any:
        if node.op == "output":
            self.outputs = tensors([torch.fx.node.map_arg(node.args, lambda n: values[n])])
            return None
        return super()._value(node, number, values, *rest)

    def _call(self, *args: Any) -> Any:
        call = super()._call(*args)
        self.ops = {*getattr(self, "ops", set()), call.op}
        return call


class _One(nn.Module):
    """One operation on parameters. All numbers are in (0.1, 0.9), where every function below is defined and strictly
    varies.
    """

    def __init__(self, op: Op, shapes: tuple[tuple[int, ...], ...]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.op = op
        self.operands = nn.ParameterList(
            0.1 + 0.8 * torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes
        )

    def forward(self, x: Tensor) -> Any:
        return self.op(*self.operands)


@cache
def walked(op: Op, *shapes: tuple[int, ...]) -> tuple[_One, Ties, _Recorder]:
    model = _One(op, shapes).eval()
    names = {n: tuple(p.shape) for n, p in model.named_parameters()}
    ties = Ties(names, tuple(names))
    walk = _Recorder(model, ties, float("inf"), training=False)
    walk.go(((torch.zeros(1),), {}))
    return model, ties, walk


def flat(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for part in out for t in flat(part)]


def assert_sound(op: Op, *shapes: tuple[int, ...]) -> int:
    """Returns how many units were carried to the output."""
    model, ties, walk = walked(op, *shapes)
    root = classes(ties.count, ties.pairs)
    stopped = {int(r) for atoms, _ in ties.freezes for r in root[atoms]}
    ignored, reads = ties.mask(ties.ignored), ties.mask(ties.roles["reads"])
    read = {int(r) for r in root[np.flatnonzero(reads)]}
    tabled = {int(r) for (_, _, role), atoms in ties.tables.items() if role == "reads" for r in root[atoms].ravel()}
    with torch.no_grad():
        before = [t.clone() for t in flat(model(torch.zeros(1)))]
    assert [tuple(t.shape) for t in before] == [v.shape for v in walk.outputs]
    carried = 0
    for name, parameter in model.named_parameters():
        for dim, _size in enumerate(parameter.shape):
            for index, atom in enumerate(ties.atoms(name, dim).tolist()):
                unit = int(root[atom])
                if unit in stopped or unit in read or unit in tabled or ignored[atom]:
                    continue
                old = parameter.detach().clone()
                with torch.no_grad():
                    parameter.select(dim, index).mul_(0.7)
                    after = flat(model(torch.zeros(1)))
                    parameter.copy_(old)
                for was, now, value in zip(before, after, walk.outputs, strict=True):
                    may = torch.zeros(was.shape, dtype=torch.bool)
                    for group, atoms in value.carried.items():
                        here = torch.tensor(root[atoms] == unit)
                        may |= here.reshape([value.shape[d] if d in group else 1 for d in range(value.ndim)])
                    assert not bool(((was != now) & ~may).any()), (
                        f"{name}[{dim}] index {index} reaches entries that do not carry it"
                    )
                    assert bool(((was == now) | may).all())
                    carried += int(may.any())
    return carried


C, B, V = (2, 4, 5, 3), (2, 3, 4), (4, 6)
EXTRA: dict[str, tuple[Any, ...]] = {
    "pow": (2.0,),
    "threshold": (0.5, 0.1),
    "clamp": (0.2, 0.8),
    "clip": (0.2, 0.8),
    "clamp_min": (0.5,),
    "clamp_max": (0.5,),
    "full_like": (1.0,),
    "dropout": (0.5, False),
    "feature_dropout": (0.5, False),
    "alpha_dropout": (0.5, False),
    "feature_alpha_dropout": (0.5, False),
    "native_dropout": (0.5, False),
    "fill": (0.5,),
    "fake_quantize_per_tensor_affine": (0.1, 0, 0, 255),
}
RANDOM = {"empty_like"}  # two runs differ by themselves
BITS = {"logical_not", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"}  # on truth values, below


def _into_a_part(whole: Tensor, part: Tensor) -> Tensor:
    whole[:, 1:2].copy_(part)
    return whole


OPS: dict[str, tuple[Op, tuple[tuple[int, ...], ...]]] = {
    **{
        n: (lambda p, n=n: getattr(torch.ops.aten, n)(p, *EXTRA.get(n, ())), (B,))
        for n in (UNARY + " " + DRAWN_IN_TRAINING).split()
        if n not in RANDOM | BITS
    },
    **{
        n: (lambda p, q, n=n: getattr(torch.ops.aten, n)(p, q), (B, (3, 1)))
        for n in BINARY.split()
        if n not in BITS | {"where", "masked_fill", "lerp", "addcmul", "addcdiv", "copysign", "fmod"}
    },
    "bits": (lambda p, q: ((p > 0.5) & (q > 0.5) | ~(p > 0.3) ^ (q > 0.6)) * 1.0, (B, (4,))),
    "where": (lambda p, q: torch.where(p > 0.5, p, q), (B, (4,))),
    "masked_fill": (lambda p: p.masked_fill(p > 0.5, 0.0), (B,)),
    "lerp": (lambda p, q: torch.lerp(p, q, 0.3), (B, B)),
    "addcmul": (lambda p, q, r: torch.addcmul(p, q, r), (B, (4,), (3, 1))),
    "addcdiv": (lambda p, q, r: torch.addcdiv(p, q, r), (B, (4,), (3, 1))),
    "copysign": (lambda p, q: torch.copysign(p, q), (B, (4,))),
    "fmod": (lambda p, q: torch.fmod(p, q), (B, (4,))),
    "add": (lambda p, q: p + q, (B, (4,))),
    "sub": (lambda p, q: 1 - (p - q), (B, (3, 1))),
    "in place": (lambda p, q: (p * 1).add_(q), (B, (4,))),
    "to": (lambda p: p.clone().contiguous().to(torch.float32).double(), (B,)),
    "prelu": (lambda p, w: F.prelu(-p, w), (C, (4,))),
    "prelu with one slope": (lambda p, w: F.prelu(-p, w), (C, (1,))),
    "glu": (lambda p: F.glu(p, 1), (C,)),
    "linear": (F.linear, (B, (5, 4), (5,))),
    "linear by a product": (lambda p, w, v: F.linear(p, w * v), (B, (5, 4), (5, 1))),
    "matmul": (lambda p, w: p @ w, (B, (4, 5))),
    "matmul of activations": (lambda p, q: (p * 1) @ (q * 1), (B, (2, 4, 5))),
    "matmul with a broadcast": (lambda p, q: (p * 1) @ (q * 1), (B, (4, 5))),
    "vector": (lambda p, q: (p * 1) @ q, (B, (4,))),
    "bmm": (lambda p, q: torch.bmm(p, q), (B, (2, 4, 5))),
    "mm": (lambda p, q: torch.mm(p * 1, q * 1), (V, (6, 3))),
    "addmm": (lambda b, p, w: torch.addmm(b, p, w), ((5,), V, (6, 5))),
    "einsum": (lambda p, q: torch.einsum("bij,bjk->bki", p, q), (B, (2, 4, 5))),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [1, 1]]), w), (V,)),
    **{
        f"conv{d}d": (lambda p, w, b, f=f: f(p, w, b, padding=1), ((2, 4, *[5] * d), (6, 4, *[3] * d), (6,)))
        for d, f in ((1, F.conv1d), (2, F.conv2d), (3, F.conv3d))
    },
    **{
        f"conv_transpose{d}d": (lambda p, w, b, f=f: f(p, w, b, stride=2), ((2, 4, *[3] * d), (4, 6, *[2] * d), (6,)))
        for d, f in ((1, F.conv_transpose1d), (2, F.conv_transpose2d), (3, F.conv_transpose3d))
    },
    "unbatched convolution": (lambda p, w: F.conv2d(p, w), ((4, 5, 3), (6, 4, 3, 3))),
    "convolution with groups": (lambda p, w, b: F.conv2d(p, w, b, groups=2), (C, (6, 2, 3, 3), (6,))),
    "depthwise": (lambda p, w, b: F.conv2d(p, w, b, groups=4), (C, (8, 1, 3, 3), (8,))),
    "transposed with groups": (lambda p, w: F.conv_transpose2d(p, w, groups=2), (C, (4, 3, 2, 2))),
    "transposed depthwise": (lambda p, w: F.conv_transpose2d(p, w, groups=4), (C, (4, 2, 2, 2))),
    "batch_norm": (lambda p, m, v, w, b: F.batch_norm(p, m.detach(), v.detach(), w, b), (C, (4,), (4,), (4,), (4,))),
    "batch_norm of vectors": (lambda p, m, v: F.batch_norm(p, m.detach(), v.detach()), (V, (6,), (6,))),
    "instance_norm": (lambda p, w, b: F.instance_norm(p, weight=w, bias=b), (C, (4,), (4,))),
    "layer_norm": (lambda p, w, b: F.layer_norm(p, (4,), w, b), (B, (4,), (4,))),
    "layer_norm over two": (lambda p: F.layer_norm(p, (3, 4)), (B,)),
    "rms_norm": (lambda p, w: F.rms_norm(p, (4,), w), (B, (4,))),
    "group_norm": (lambda p, w, b: F.group_norm(p, 2, w, b), (C, (4,), (4,))),
    "group_norm by channel": (lambda p, w: F.group_norm(p, 4, w), (C, (4,))),
    **{
        f"{n} along {d}": (lambda p, n=n, d=d: getattr(torch, n)(p, d), (B,))
        for d in (1, -1)
        for n in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
    },
    "sort": (lambda p: torch.sort(p, 1)[0], (B,)),
    "sort, largest first": (lambda p: torch.sort(p, dim=-2, descending=True)[0], (B,)),
    "stable sort": (lambda p: torch.sort(p, stable=True, dim=0)[0], (B,)),
    "argsort": (lambda p: torch.argsort(p, 1) * 1.0, (B,)),
    "topk": (lambda p: torch.topk(p, 2, 1)[0], (B,)),
    "topk of the last": (lambda p: torch.topk(p, 2)[0], (B,)),
    "local_response_norm": (lambda p: F.local_response_norm(p, 3), (C,)),
    **{
        f"{n} over {d}": (lambda p, n=n, d=d: getattr(torch, n)(p, d), (B,))
        for d in (0, -1)
        for n in ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod")
    },
    **{
        f"{n} of all": (lambda p, n=n: getattr(torch, n)(p), (B,))
        for n in ("mean", "sum", "max", "std", "prod", "norm")
    },
    "mean of two": (lambda p: p.mean((1, 2), keepdim=True), (B,)),
    "max": (lambda p: torch.max(p, 1)[0], (B,)),
    "max of two": (lambda p, q: torch.max(p, q) + torch.min(p, q), (B, B)),
    "argmax": (lambda p: torch.argmax(p, 1) * 1.0, (B,)),
    "norm": (lambda p: torch.norm(p, dim=1), (B,)),
    "vector norm": (lambda p: torch.linalg.vector_norm(p, 2, (1,)), (B,)),
    "normalize": (lambda p: F.normalize(p, dim=1), (B,)),
    "any": (lambda p: ((p > 0.5).any(1) | (p > 0.3).all(1)) * 1.0, (B,)),
    **{
        f"{k}_pool{d}d": (lambda p, k=k, d=d: getattr(F, f"{k}_pool{d}d")(p, 2), ((2, 4, *[4] * d),))
        for k in ("max", "avg", "adaptive_avg", "adaptive_max")
        for d in (1, 2, 3)
    },
    "unbatched pool": (lambda p: F.max_pool2d(p, 2), ((4, 6, 6),)),
    **{
        f"upsample {m}": (lambda p, m=m: F.interpolate(p, scale_factor=2, mode=m), (C,))
        for m in ("nearest", "bilinear", "bicubic", "nearest-exact")
    },
    **{
        f"upsample {m} {d}d": (lambda p, m=m: F.interpolate(p, scale_factor=2, mode=m), ((2, 3, *[2] * d),))
        for m, d in (("nearest", 1), ("nearest", 3), ("linear", 1), ("trilinear", 3))
    },
    "upsample smoothly": (lambda p: F.interpolate(p, size=(3, 2), mode="bilinear", antialias=True), (C,)),
    **{
        f"pad {m}": (lambda p, m=m: F.pad(p, (1, 1), mode=m), ((2, 4, 5),))
        for m in ("constant", "reflect", "replicate", "circular")
    },
    "pad channels": (lambda p: F.pad(p, (0, 0, 1, 0)), ((2, 4, 5),)),
    "roll": (lambda p: torch.roll(p, (1, 2), (0, 2)), (B,)),
    "roll of all": (lambda p: torch.roll(p, 1), (B,)),
    "flip": (lambda p: p.flip(1), (B,)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4))),
    "view": (lambda p: p.view(6, 4).unflatten(1, (2, 2)).flatten(0, 1), (B,)),
    "shuffle": (lambda p: p.reshape(2, 2, 2, 5, 3).transpose(1, 2).reshape(2, 4, 5, 3), (C,)),
    "squeeze": (lambda p: p.unsqueeze(1).squeeze(-1).squeeze(), ((2, 3, 1),)),
    "permute": (lambda p: p.permute(2, 0, 1).transpose(0, 1).swapaxes(-1, 0).mT, (B,)),
    "t": (lambda p: p.t().T, (V,)),
    "movedim": (lambda p: p.movedim((0, 2), (2, 0)).moveaxis(0, 1), (B,)),
    "slice": (lambda p: p[:, 1:, ::2].narrow(2, 0, 1), (B,)),
    "slice from the end": (lambda p: p[:, -2:, :-1], (B,)),
    "select": (lambda p: p[:, 1] + p.select(1, -1), (B,)),
    "index": (lambda p: p[:, torch.tensor([2, 0])], (B,)),
    "index_select": (lambda p: p.index_select(1, torch.tensor([2, 0])), (B,)),
    "gather": (lambda p: p.gather(1, torch.zeros(2, 2, 4, dtype=torch.long)), (B,)),
    "gather by one index": (lambda p: p.gather(2, torch.tensor([[[1, 0]]]).expand(2, 3, 2)), (B,)),
    "zeros": (lambda p: p + torch.zeros(2, 3, 4) + p.new_zeros(3, 4), (B,)),
    "ones": (lambda p: p * torch.ones(2, 3, 4) * p.new_ones(3, 4), (B,)),
    "bmm by several matrices": (lambda p, w: torch.bmm(p.exp(), w), (B, (2, 4, 5))),
    "bmm by matrices on the left": (lambda p, w: torch.bmm(w, p.exp()), (B, (2, 5, 3))),
    "bmm by matrices that are picked": (lambda p, w: torch.bmm(p.exp(), w[torch.tensor([1, 0])]), (B, (3, 4, 5))),
    "matmul by a matrix on the left": (lambda p, w: w @ p.exp(), (B, (5, 3))),
    "einsum of activations": (lambda p, q: torch.einsum("bij,bjk->kbi", p.exp(), q.exp()), (B, (2, 4, 5))),
    "einsum over two": (lambda p, q: torch.einsum("bij,kij->kb", p.exp(), q), (B, (5, 3, 4))),
    "einsum along both": (lambda p, q: torch.einsum("bij,bjk->bki", p.exp(), q), (B, (2, 4, 5))),
    "index_add": (lambda p, q: p.index_add(1, torch.tensor([2, 0]), q, alpha=2), (B, (2, 2, 4))),
    "index_copy": (lambda p, q: p.index_copy(-1, torch.tensor([2, 0]), q), (B, (2, 3, 2))),
    "copy": (lambda p, q: p.exp().copy_(q), (B, (3, 4))),
    "copy into a part": (lambda p, q: _into_a_part(p.exp(), q), (B, (2, 1, 4))),
    "split": (lambda p: p.split([1, 3], 2), (B,)),
    "split evenly": (lambda p: [*p.split(2, 2), *p.chunk(3, 1), *p.tensor_split(2, 1)], (B,)),
    "unbind": (lambda p: p.unbind(1), (B,)),
    "cat": (lambda p, q: torch.cat([p, q, p], 1), (B, (2, 2, 4))),
    "stack": (lambda p, q: torch.stack([p, q], 1), (B, B)),
    "expand": (lambda p: p.expand(2, 3, 4), ((3, 1),)),
    "repeat": (lambda p: p.repeat(2, 1, 2, 1), (B,)),
    "tile": (lambda p: p.tile(2), (B,)),
    "repeat_interleave": (lambda p: p.repeat_interleave(2, 1), (B,)),
    "pixel_shuffle": (lambda p: F.pixel_shuffle(p, 2), ((2, 8, 2, 3),)),
    "pixel_unshuffle": (lambda p: F.pixel_unshuffle(p, 2), ((2, 2, 4, 6),)),
    "channel_shuffle": (lambda p: F.channel_shuffle(p, 2), ((2, 6, 2, 2),)),
    "_weight_norm": (lambda p, q: torch._weight_norm(p, q, 0), ((3, 4), (3, 1))),
    "_weight_norm along 1": (lambda p, q: torch._weight_norm(p, q, 1), ((3, 4), (1, 4))),
    "index between": (lambda p: p[:, torch.tensor([[2, 0]]), torch.tensor([[1], [3]])], (C,)),
    "index apart": (lambda p: p[torch.tensor([1, 0]), :, torch.tensor([1, 3])], (C,)),
    "grid_sample": (lambda p: F.grid_sample(p, torch.full((2, 3, 2, 2), 0.3).to(p), align_corners=False), (C,)),
    "im2col": (lambda p: F.unfold(p[0], (2, 3)), (C,)),
    "baddbmm": (lambda p, q, r: torch.baddbmm(p, q, r), ((5,), B, (2, 4, 5))),
    "einsum with a matrix": (lambda p, q: torch.einsum("bij,kj->kib", p.exp(), q), (B, (5, 4))),
    "einsum, matrix first": (lambda p, q: torch.einsum("jk, bij -> bik", q, p.exp()), (B, (4, 5))),
    "einsum with a cube": (lambda p, q: torch.einsum("bij,jkl->bikl", p.exp(), q), (B, (4, 5, 2))),
    "einsum of three": (lambda p, q: torch.einsum("bij,jk,k->bik", p.exp(), q, q[0]), (B, (4, 5))),
    "einsum with dots": (lambda p, q: torch.einsum("...j,kj->...k", p.exp(), q), (B, (5, 4))),
    "einsum, dots on both": (lambda p, q: torch.einsum("...ij,...jk->...k", p.exp(), q), (B, (2, 4, 5))),
    "einsum without an arrow": (lambda p, q: torch.einsum("bij,kj", p.exp(), q), (B, (5, 4))),
    "einsum of one": (lambda p: torch.einsum("bij->bj", p), (B,)),
    "tensordot": (lambda p, q: torch.tensordot(p, q, 1), (B, (4, 5))),
    "inner": (lambda p, q: torch.inner(p, q), (B, (5, 4))),
    "mv": (lambda p, q: torch.mv(p, q) + torch.dot(q, q), ((3, 4), (4,))),
    "bilinear": (lambda p, q, w: F.bilinear(p, p, w) * q, ((3, 4), (3, 1), (5, 4, 4))),
    "einsum, a diagonal": (lambda p, q: torch.einsum("bjj,kj->bk", p.exp(), q), ((2, 4, 4), (5, 4))),
    "unfold": (lambda p: F.unfold(p, 2), (C,)),
    "diagonal": (lambda p: p.diagonal(dim1=1, dim2=2), ((2, 3, 3),)),
    "outer": (lambda p, q: p[:, None] * q[None], ((3,), (4,))),
    "tril": (lambda p: p.tril(), (B,)),
    "one_hot": (lambda p: p * F.one_hot(p.argmax(-1), 4), (B,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_only_entries_that_carry_it_depend_on_a_unit(name: str) -> None:
    op, shapes = OPS[name]
    assert_sound(op, *shapes)


def test_units_are_carried_where_they_can_be() -> None:
    """The oracle above would be content with rules that freeze everything."""
    for name in (
        "relu",
        "mul",
        "add",
        "batch_norm",
        "view",
        "cat",
        "split",
        "max_pool2d",
        "upsample bilinear",
        "pixel_shuffle",
        "repeat",
        "index_add",
        "copy",
        "gather by one index",
        "zeros",
        "bmm by several matrices",
        "einsum of activations",
    ):
        op, shapes = OPS[name]
        assert assert_sound(op, *shapes) > 0, name


def test_the_oracle_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "cumsum", RULES["relu"])
    with pytest.raises(AssertionError, match="that do not carry it"):
        assert_sound(lambda p: p.cumsum(1), B)


def test_an_operation_without_a_rule_freezes_with_its_name() -> None:
    _, ties, _ = walked(lambda p: torch.fft.fft(p).real, B)
    assert any("there is no rule for `fft_fft`" in reason for _, reason in ties.freezes)


ELSEWHERE = {
    "bernoulli",
    "rand_like",
    "randn_like",
    "empty",
    "empty_like",
    "new_empty",
    "view_as_complex",
    "view_as_real",
    "gru",
    "lstm",
    "rnn_relu",
    "rnn_tanh",
    "gru_cell",
    "lstm_cell",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "_grouped_mm",
    "_log_softmax",
    "_softmax",
    "_reshape_alias",
    "_to_copy",
    "_unsafe_view",
    "alias",
    "argmin",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "broadcast_to",
    "concat",
    "concatenate",
    "constant_pad_nd",
    "contiguous",
    "convolution",
    "double",
    "float",
    "half",
    "lift_fresh_copy",
    "local_response_norm",
    "logical_not",
    "max_pool1d_with_indices",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "native_channel_shuffle",
    "norm",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "reshape_as",
    "subtract",
    "swapdims",
    "type_as",
    "unsafe_chunk",
    "unsafe_split",
    "view_as",
    "response_norm",
    "with_shares",
}  # random, recurrent (test_compact), of our own (test_routing, test_response_norms), or other names


def test_every_rule_has_an_oracle() -> None:
    met = set().union(*(walked(op, *shapes)[2].ops for op, shapes in OPS.values()))
    assert RULES.keys() - met <= ELSEWHERE


# ---------------------------------------------------------------- resizing


def test_attributes_follow_the_tensors() -> None:
    def cut(module: nn.Module, **shapes: tuple[int, ...]) -> nn.Module:
        for name, shape in shapes.items():
            setattr(module, name, nn.Parameter(torch.zeros(shape)))
        resize(module)
        return module

    linear = cut(nn.Linear(4, 6), weight=(5, 3))
    assert (linear.in_features, linear.out_features) == (3, 5)
    conv = cut(nn.Conv2d(8, 12, 3, groups=4), weight=(8, 1, 3, 3))
    assert (conv.in_channels, conv.out_channels, conv.groups) == (4, 8, 4)
    depth = cut(nn.Conv2d(8, 16, 3, groups=8), weight=(6, 1, 3, 3))
    assert (depth.in_channels, depth.out_channels, depth.groups) == (3, 6, 3)
    up = cut(nn.ConvTranspose1d(8, 12, 3, groups=4), weight=(4, 2, 3))
    assert (up.in_channels, up.out_channels, up.groups) == (4, 8, 4)
    assert cut(nn.BatchNorm2d(6), weight=(4,)).num_features == 4
    group = cut(nn.GroupNorm(6, 6), weight=(4,))
    assert (group.num_groups, group.num_channels) == (4, 4)
    group = cut(nn.GroupNorm(6, 24), weight=(16,))
    assert (group.num_groups, group.num_channels) == (4, 16)
    assert cut(nn.Embedding(9, 6), weight=(9, 4)).embedding_dim == 4
    assert cut(nn.LayerNorm(6), weight=(4,)).normalized_shape == (4,)

    class Own(nn.Linear):
        """A subclass is resized as what it is."""

    assert cut(Own(4, 6), weight=(5, 3)).out_features == 5


def test_a_norm_of_the_users_own_is_resized_as_its_base() -> None:
    class Norm(nn.BatchNorm2d):
        """Someone's own."""

    norm = Norm(5, affine=False)
    norm.running_mean, norm.running_var = torch.zeros(3), torch.ones(3)
    resize(norm)
    assert norm.num_features == 3
