"""What does not fit is refused in one line that names it and says what to do; the oracle is the sentence, and exactness
where a network that failed works now.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.objectives.costs import kept
from support import traced
from support.oracles import assert_same, set_gates, settled


def net(forward: Callable[..., Any], **members: Any) -> nn.Module:
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, member in members.items():
        if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
            made.register_buffer(name, member)
        else:
            setattr(made, name, member)
    return made


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))


X = torch.ones(2, 4)


def through(act: Callable[..., Tensor], *more: Any, **members: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers with something between them."""
    forward = lambda m, x, *rest: m.o(act(m, m.a(x).relu(), *rest))  # noqa: E731
    return net(forward, a=nn.Linear(4, 6), o=nn.Linear(6, 3), **members), (X, *more)


def _routed(m: Any, x: Tensor) -> Tensor:
    h, best, out = m.a(x).relu(), m.r(x).argmax(1), torch.zeros(len(x), 3)
    for k, expert in enumerate((m.e, m.f)):
        rows = torch.where(best == k)[0]
        out.index_add_(0, rows, expert(h[rows]))
    return out


def _old_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 3))


def _cached() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), torch.zeros(2, 5, dtype=torch.long)


EXPERTS = {"a": nn.Linear(4, 6), "r": nn.Linear(4, 4), "e": nn.Linear(6, 3), "f": nn.Linear(6, 3)}
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "routed mixture": (lambda: (net(_routed, **EXPERTS), X), "`e`: `linear` in `e` has as many entries as the data"),
    "narrow by an item": (
        lambda: through(lambda m, h, n: h.narrow(1, 0, n.item()), torch.tensor(6)),
        "`a`: `narrow` gets a number that only the data tell, as an `item()` does",
    ),
    "bits": (
        lambda: through(lambda m, h: h.view(torch.int16).view(torch.float32)),
        "`a`: `view` reads its bits as numbers of another size",
    ),
    "buffer with a graph": (
        lambda: through(lambda m, h: h * m.b, b=weight(6) * 2),
        "a buffer that autograd remembers the making of, `b`: register it after `.detach()`",
    ),
    "weight norm by a hook": (lambda: (_old_norm(), X), "`0.weight` is a tensor that autograd remembers the making of"),
    "parallel": (lambda: (nn.DataParallel(mlp()), X), "`model` is wrapped in `DataParallel`: attach to what it wraps"),
    "lazy": (
        lambda: (nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3)), X),
        "no shape for `0.weight` yet: call it",
    ),
    "meta": (lambda: (mlp().to("meta"), X.to("meta")), "no numbers for `0.weight`, on the meta device: give it some"),
    "cache": (_cached, "it returns a cache: pass `use_cache=False`"),
}


@pytest.mark.parametrize("kind", [k if k != "cache" else pytest.param(k, marks=pytest.mark.slow) for k in REFUSED])
def test_what_cannot_be_gated_is_named_in_one_line(kind: str) -> None:
    make, sentence = REFUSED[kind]
    model, example = make()
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        l0.attach(model, example)
    assert len(str(error.value).splitlines()) == 1


def _kernel(view: Callable[[Tensor], Tensor], *shape: int, channels: int = 5, groups: int = 1) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.conv2d(m.a(x).relu(), view(m.w), groups=groups)
        return m.o(h.relu().mean((2, 3)))

    return net(forward, a=nn.Conv2d(3, channels, 1), w=weight(*shape), o=nn.Linear(8, 2))


IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "names of a dictionary": (
        lambda: net(lambda m, x: m.update(m.values(m.keys(x).relu())), **dict(_named())),
        X.double(),
        {"keys", "values"},
    ),
    "a kernel by rows": (lambda: _kernel(lambda w: w.view(len(w), -1, 3, 3), 8, 45), IMAGE, {"a", "w"}),
    "a kernel with its inputs fixed": (lambda: _kernel(lambda w: w.view(-1, 5, 3, 3), 8, 45), IMAGE, {"w"}),
    "a kernel in a row": (lambda: _kernel(lambda w: w.view(8, -1, 3, 3), 360), IMAGE, {"a"}),
    "a kernel in HWIO": (lambda: _kernel(lambda w: w.permute(3, 2, 0, 1), 3, 3, 5, 8), IMAGE, {"a", "w"}),
    "grouped, in HWIO": (
        lambda: _kernel(lambda w: w.permute(3, 2, 0, 1), 3, 3, 3, 8, channels=6, groups=2),
        IMAGE,
        set(),
    ),
    "without a batch": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)), IMAGE[0], {"0"}),
}


def _named() -> Any:
    return zip(("keys", "values", "update"), (nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKS)
def test_what_failed_obscurely_works_or_is_frozen(kind: str) -> None:
    make, x, names = WORKS[kind]
    model = settled(make())
    if not names:
        with pytest.raises(ValueError, match="`model` has nothing to gate"):
            l0.attach(model, x)
        return
    gated = l0.attach(model, x).eval()
    assert {name for name, _ in gated.named_gates()} == names
    set_gates(gated, {name: [0, 2] for name in names})
    small = l0.compact(gated)
    assert_same(gated(x), small(x))
    assert float(l0.params(gated, kept=True)) == sum(p.numel() for p in small.parameters())
    again = l0.attach(make().double(), x)
    again.load_state_dict(gated.state_dict())


def _nan() -> l0.Gated:
    gated = traced.attached(mlp(), X)
    with torch.no_grad():
        next(gated.gates.parameters())[0] = math.nan
    return gated


def _vector(gated: l0.Gated, **_: Any) -> Tensor:
    return gated.prob_open()


def _plain(gated: l0.Gated) -> Tensor:
    return gated.prob_open().sum()


def _column() -> l0.Gated:
    return l0.attach(nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300)), X, where=l0.weights("1.weight"))


ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "gate_lr": (
        lambda: traced.attached(mlp(), X).param_groups(gate_lr="x"),
        "`gate_lr` must be a number >= 0, got 'x'",
    ),  # type: ignore[arg-type]
    "vector in a penalty": (
        lambda: l0.Penalty(_vector, weight=1.0)(traced.attached(mlp(), X)),
        "`cost` must return a scalar tensor, got a tensor of shape (6,) from `_vector`",
    ),
    "vector in a constraint": (
        lambda: l0.Constraint(_vector, at_most=0.5)(traced.attached(mlp(), X)),
        "`cost` must return a scalar tensor, got a tensor of shape (6,) from `_vector`",
    ),
    "no number": (
        lambda: l0.Penalty(lambda gated: None, weight=1.0)(traced.attached(mlp(), X)),  # type: ignore[arg-type]
        "`cost` must return a scalar tensor, got None",
    ),
    "no kept": (lambda: kept(_plain), "`cost` must take `kept=True`, for what is kept now, got `_plain(gated"),  # type: ignore[arg-type]
    "no kept in finalize": (
        lambda: l0.finalize(traced.attached(mlp(), X), 0.5, _plain),  # type: ignore[arg-type]
        "`cost` must take `kept=True`, for what is kept now, got `_plain(gated",
    ),
    "no only": (
        lambda: l0.Constraint(_plain, at_most={"0": 0.5})(traced.attached(mlp(), X)),  # type: ignore[arg-type]
        "`cost` must take `only='0'`, for a part, got `_plain(gated",
    ),
    "pattern for nothing": (
        lambda: traced.attached(mlp(), X, gate={"fc*": l0.HardConcreteGate, "*": l0.HardConcreteGate}),
        "`gate` must use each of its patterns, and 'fc*' is the first that matches for none of 0",
    ),
    "pattern behind another": (
        lambda: traced.attached(mlp(), X, gate={"*": l0.HardConcreteGate, "0": l0.HardConcreteGate}),
        "`gate` must use each of its patterns, and '0' is the first that matches for none of 0",
    ),
    "MACs of single weights": (
        lambda: l0.Penalty(l0.macs, weight=1.0)(_column()),
        "`cost` must fall when gates close, got `macs`, which gates on single weights do not move",
    ),
    "MACs of single weights, bounded": (
        lambda: l0.Constraint(partial(l0.macs, only="1"), at_most=0.5)(_column()),
        "which gates on single weights do not move",
    ),
    "NaN in kept MACs": (lambda: l0.macs(_nan(), kept=True), "got 1 of 6 that are NaN, the first is number 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_is_refused_by_its_name(kind: str) -> None:
    call, sentence = ARGUMENTS[kind]
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        call()


def test_what_is_no_number_stays_visible() -> None:
    """A gate that is NaN: in training, in evaluation, in the term. A closed gate on an infinite unit: 0 · ∞."""
    gated = _nan()
    assert gated.train()(X).isnan().all()
    assert gated.eval()(X).isnan().all()
    assert l0.Penalty(l0.l0_norm, weight=1.0)(gated).isnan()
    model = settled(net(lambda m, x: m.o(m.a(x).exp()), a=nn.Linear(4, 6), o=nn.Linear(6, 3)))
    gated = l0.attach(model, X.double()).eval()
    set_gates(gated, {"a": [0]})
    with torch.no_grad():
        gated.model.get_parameter("a.weight")[0] = 1e4
    assert gated(X.double()).isnan().all()
    with torch.no_grad():
        gated.model.get_parameter("a.weight")[0] = 0
        finite = gated(X.double())
    assert_same(finite, l0.compact(gated)(X.double()))


class Shared(nn.Sequential):
    """Its copy is itself, so that whatever is tried out on one is done to the other."""

    def __deepcopy__(self, _: Any) -> "Shared":
        return self


def test_a_model_that_shares_its_parameters_with_its_copy_is_refused_and_left() -> None:
    model = Shared(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = {name: p.clone() for name, p in model.named_parameters()}
    axis = next(a for a in l0.attach(nn.Sequential(*model), torch.zeros(2, 3)).axes if a.frozen is None)
    for by_hand in (None, [axis]):
        with pytest.raises(ValueError, match="a copy of `model` must have parameters of its own"):
            l0.attach(model, torch.zeros(2, 3), axes=by_hand)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
