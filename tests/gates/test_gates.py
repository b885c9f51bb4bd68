"""Gates against the distributions they are made of, all together against one at a time, and the papers' numbers."""

import copy
import math
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode

from ellzero import gates as g
from ellzero.gates.abstract import AbstractGate, Phi, together
from ellzero.gates.distributions import HardConcrete, Logistic, Rectified
from ellzero.gates.hard_concrete import HardConcreteGate, Median, Noiseless
from ellzero.gates.rectified import RectifiedGate

EVALUATIONS: list[tuple[Callable[[Sequence[AbstractGate]], list[Tensor]], Callable[[AbstractGate], Tensor]]] = [
    (g.values, AbstractGate.value),
    (lambda gates: together(gates, lambda gate, phi: gate.value_from(phi) != 0), AbstractGate.open),
    (lambda gates: together(gates, lambda gate, phi: gate.prob_from(phi)), AbstractGate.prob_open),
    (lambda gates: together(gates, lambda gate, phi: gate.evidence_from(phi)), AbstractGate.evidence),
]


def probabilities(gates: list[AbstractGate]) -> Tensor:
    """P(open) of all gates, evaluated together."""
    return g.flat(gates, lambda gate, phi: gate.prob_from(phi))


def alike() -> list[AbstractGate]:
    return [HardConcreteGate(5), HardConcreteGate((2, 3)), HardConcreteGate(1)]


def mixed() -> list[AbstractGate]:
    """Families, constants and precisions in an order that a group-by must undo."""
    return [
        HardConcreteGate(3),
        RectifiedGate((2, 2), base=Logistic),
        HardConcreteGate((2, 1), rule=Median()),
        HardConcreteGate(4, beta=torch.tensor([0.4, 0.5, 0.6, 0.7])),
        HardConcreteGate((2, 3), drop_rate=0.2),
        HardConcreteGate(2).double(),
        HardConcreteGate(2, learn_beta=True),
        RectifiedGate(3, base=Normal, learn_scale=False),
        RectifiedGate(3, base=Logistic),
    ]


def scattered(gates: list[AbstractGate], spread: float = 3.0) -> list[AbstractGate]:
    """The same gates, with locations all over: open, closed and between."""
    for gate in gates:
        location = gate.log_alpha if isinstance(gate, HardConcreteGate) else gate.loc
        nn.init.normal_(location, std=spread)
    return gates


def total(gates: Sequence[AbstractGate]) -> int:
    return sum(gate.shape.numel() for gate in gates)


# ---- all together and one at a time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [alike, mixed])
def test_drawing_together_is_drawing_one_by_one(make: Callable[[], list[AbstractGate]]) -> None:
    gates = scattered(make())
    u = torch.rand(total(gates))
    pieces = [p.view(gate.shape) for p, gate in zip(u.split([x.shape.numel() for x in gates]), gates, strict=True)]
    for gate, piece, z in zip(gates, pieces, g.draw(gates, u), strict=True):
        assert z.shape == gate.shape
        assert z.dtype == gate.phi()[0].dtype
        torch.testing.assert_close(z, gate.sample(piece), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [alike, mixed])
@pytest.mark.parametrize(("together", "alone"), EVALUATIONS)
def test_evaluating_together_is_evaluating_one_by_one(
    make: Callable[[], list[AbstractGate]],
    together: Callable[[Sequence[AbstractGate]], list[Tensor]],
    alone: Callable[[AbstractGate], Tensor],
) -> None:
    gates = scattered(make())
    for gate, result in zip(gates, together(gates), strict=True):
        torch.testing.assert_close(result, alone(gate), rtol=1e-6, atol=1e-7)


def test_nothing_to_draw() -> None:
    assert g.draw([]) == g.values([]) == []
    assert g.noise([]).shape == (0,)


class Kernels(TorchDispatchMode):
    """Counts what is computed; views cost nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def test_the_number_of_kernels_does_not_depend_on_the_number_of_gates() -> None:
    counts = []
    for n in (2, 40):
        gates = [HardConcreteGate((3, 2) if i % 2 else 4) for i in range(n)]
        with torch.no_grad(), Kernels() as kernels:
            g.draw(gates)
        counts.append(kernels.count)
    assert counts[0] == counts[1] <= 8  # rand, cat, logit, add, div, sigmoid, stretch, clamp


def test_gradients_reach_every_parameter() -> None:
    gates = mixed()
    u = torch.full((total(gates),), 0.4)  # inside (0, 1) for all of them
    sum(z.sum() for z in g.draw(gates, u)).backward()  # type: ignore[union-attr]
    for gate in gates:
        for name, p in gate.named_parameters():
            assert p.grad is not None and p.grad.ne(0).all(), name  # noqa: PT018


# ---- noise ----------------------------------------------------------------------------------------------------------


def test_noise_comes_from_the_default_generator_in_order() -> None:
    gates = alike()
    torch.manual_seed(3)
    drawn = g.draw(gates)
    torch.manual_seed(3)
    u = torch.rand(total(gates))
    for z, again in zip(drawn, g.draw(gates, u), strict=True):
        assert torch.equal(z, again)
    assert g.noise([HardConcreteGate(3).bfloat16()]).dtype == torch.float32


def test_ranks_seeded_alike_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = [HardConcreteGate(10_000)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    draws = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        draws.append(g.noise(gates))
    torch.manual_seed(0)
    u = torch.rand(10_000)
    golden = 0.6180339887
    for rank, drawn in enumerate(draws):
        torch.testing.assert_close(drawn, (u + rank * golden) % 1, rtol=0, atol=1e-6)
        assert drawn.min() >= 0
        assert drawn.max() < 1
    assert (draws[0] - draws[1]).abs().min() > 0.3


@pytest.mark.parametrize("wrong", [torch.rand(1), torch.rand(11), torch.rand(3, 4)])
def test_noise_of_another_shape_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`u` must have shape \(12,\), one entry per gate, got"):
        g.draw(alike(), wrong)
    with pytest.raises(ValueError, match=r"`u` must have shape \(2, 3\), got"):
        HardConcreteGate((2, 3)).sample(wrong)


# ---- hard concrete gates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_rate", "published"), [(0.5, 0.832), (0.2, 0.952), (0.3, 0.920)])
def test_initialised_by_drop_rate(drop_rate: float, published: float) -> None:
    gate = HardConcreteGate(20_000, drop_rate=drop_rate)
    assert gate.log_alpha.mean().item() == pytest.approx(math.log((1 - drop_rate) / drop_rate), abs=5e-4)
    assert gate.log_alpha.std().item() == pytest.approx(0.01, rel=0.05)
    assert gate.prob_open().mean().item() == pytest.approx(published, abs=1e-3)


@pytest.mark.slow
@given(log_alpha=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8), beta=st.floats(0.1, 2))
def test_a_gate_is_its_distribution(log_alpha: list[float], beta: float) -> None:
    gate = HardConcreteGate(len(log_alpha), beta=beta)
    gate.log_alpha.data = torch.tensor(log_alpha)
    z = HardConcrete(torch.tensor(log_alpha, dtype=torch.float64), beta)
    for ours, theirs in ((gate.prob_open(), z.prob_nonzero), (gate.value(), z.noiseless)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)
    assert torch.equal(gate.open(), gate.value() != 0)
    u = torch.rand(len(log_alpha))
    torch.testing.assert_close(gate.sample(u).double(), z.icdf(u.double()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rule", "threshold"), [(Noiseless(), 0.310), (Median(), 0.5)])
def test_the_rule_decides_when_a_gate_closes(rule: g.AbstractRule, threshold: float) -> None:
    gate = HardConcreteGate(40_001, rule=rule)
    gate.log_alpha.data = torch.linspace(-4, 0, 40_001)
    p = gate.prob_open()
    assert p[~gate.open()].max().item() == pytest.approx(threshold, abs=5e-4)
    assert p[gate.open()].min().item() == pytest.approx(threshold, abs=5e-4)


def test_rules_are_values() -> None:
    assert Noiseless() == Noiseless() != Median()
    assert len({Noiseless(), Noiseless(), Median()}) == 2
    assert [repr(Noiseless()), repr(Median())] == ["Noiseless()", "Median()"]


def test_an_expected_density_of_a_thousandth_can_be_trained() -> None:
    gates = [HardConcreteGate(50), HardConcreteGate((5, 10))]
    optimizer = torch.optim.Adam([gate.log_alpha for gate in gates], lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        probabilities(gates).sum().backward()
        optimizer.step()
    assert all(gate.prob_open().max() < 1e-3 for gate in gates)


def test_beta_may_be_a_float_a_tensor_or_learned() -> None:
    constant, given_, learned, one = (
        HardConcreteGate(3),
        HardConcreteGate(3, beta=torch.tensor([0.4, 0.6, 0.8])),
        HardConcreteGate(3, learn_beta=True),
        HardConcreteGate((2, 3), beta=torch.tensor(0.5), learn_beta=True),
    )
    assert constant.beta == 2 / 3
    assert list(constant.state_dict()) == ["log_alpha"]
    torch.testing.assert_close(given_.beta, torch.tensor([0.4, 0.6, 0.8]))
    assert [name for name, _ in given_.named_buffers()] == ["log_beta"]
    assert [name for name, _ in learned.named_parameters()] == ["log_alpha", "log_beta"]
    assert isinstance(learned.beta, Tensor)
    assert learned.beta.shape == (3,)
    assert isinstance(one.beta, Tensor)
    assert one.beta.shape == ()
    for gate in (given_, learned, one):
        z = HardConcrete(gate.log_alpha.double(), torch.as_tensor(gate.beta).double())
        torch.testing.assert_close(gate.prob_open().double(), z.prob_nonzero, rtol=1e-5, atol=1e-6)
    # However far an optimizer goes, β stays positive.
    with torch.no_grad():
        learned.log_beta.sub_(30)  # type: ignore[union-attr]
    assert (learned.beta > 0).all()
    assert learned.sample().isfinite().all()


def test_learned_beta_has_the_right_gradient() -> None:
    gate = HardConcreteGate(3, learn_beta=True).double()
    u = torch.tensor([0.3, 0.5, 0.6], dtype=torch.float64)

    def draw(log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        return torch.func.functional_call(_Drawer([gate]), {"0.log_alpha": log_alpha, "0.log_beta": log_beta}, (u,))[0]

    assert torch.autograd.gradcheck(draw, (gate.log_alpha, gate.log_beta))


# ---- rectified gates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [Normal, Logistic])
@pytest.mark.parametrize(("drop_rate", "published"), [(0.5, 0.832), (0.2, 0.952), (0.3, 0.920)])
def test_rectified_gates_start_as_open_as_hard_concrete_ones(base: Any, drop_rate: float, published: float) -> None:
    gate = RectifiedGate(5_000, base=base, drop_rate=drop_rate)
    assert gate.prob_open().mean().item() == pytest.approx(published, abs=1e-3)
    if drop_rate == 0.5:  # as many ones as zeros, as in a hard concrete of log α = 0
        assert gate.loc.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert RectifiedGate(5_000, base=base, drop_rate=drop_rate, scale=0.1).prob_open().mean().item() == pytest.approx(
        published, abs=1e-3
    )


@pytest.mark.parametrize("base", [Normal, Logistic])
def test_a_rectified_gate_is_its_distribution(base: Any) -> None:
    gate = RectifiedGate(9, base=base, scale=0.4)
    gate.loc.data = torch.linspace(-1, 2, 9)
    z = Rectified(base(gate.loc, torch.tensor(0.4)))
    torch.testing.assert_close(gate.prob_open(), z.prob_nonzero)
    assert torch.equal(gate.value(), gate.loc.clamp(0, 1))
    assert torch.equal(gate.open(), gate.loc > 0)
    n = 100_000
    draws = gate.sample_from(gate.phi(), torch.rand(n, 9))
    assert ((draws.mean(0) - z.mean).abs() < 5 * (z.variance / n).sqrt() + 1e-3).all()
    p = gate.prob_open()
    assert (((draws != 0).float().mean(0) - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-4).all()


# ---- closing for good -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [
        HardConcreteGate((3, 4)),
        HardConcreteGate((3, 4), rule=Median(), beta=1.7),
        HardConcreteGate((3, 4), rule=Median(), beta=torch.tensor([0.3, 0.9, 2.0, 5.0])),
        HardConcreteGate((3, 4), gamma=-2.0, zeta=1.5, rule=Median(), learn_beta=True),
        HardConcreteGate((3, 4), rule=Median(), beta=torch.tensor(20.0)).half(),
        HardConcreteGate((3, 4), gamma=-1e-30, beta=0.1),
        HardConcreteGate((3, 4)).bfloat16(),
        RectifiedGate((3, 4), base=Normal),
        RectifiedGate((3, 4), base=Logistic, scale=2.0).bfloat16(),
    ],
    ids=repr,
)
def test_closing_for_good(gate: AbstractGate) -> None:
    where = torch.rand(gate.shape) < 0.5
    before, value = copy.deepcopy(gate.state_dict()), gate.value()
    gate.close_(where)
    assert (gate.value()[where] == 0).all()
    assert torch.equal(gate.value()[~where], value[~where])
    for name, tensor in gate.state_dict().items():
        assert torch.equal(tensor.expand(gate.shape)[~where], before[name].expand(gate.shape)[~where]), name
    gate.check("gate")
    assert gate.prob_open()[where].max() < 1e-20
    for u in (0.0, 0.5, 1.0):
        assert (gate.sample(torch.full(gate.shape, u))[where] == 0).all()
    # Nothing pulls: neither the data term, nor the penalty.
    (gate.sample().sum() + gate.prob_open().sum()).backward()
    location = next(gate.parameters())
    assert location.grad is not None
    assert location.grad[where].abs().max().item() < 1e-12


@pytest.mark.parametrize("rule", [Noiseless(), Median()], ids=["noiseless", "median"])
@pytest.mark.parametrize("beta", [0.5, 2 / 3, 1.5])
def test_gates_are_opened_by_little_and_the_others_stay(rule: Any, beta: float) -> None:
    gate = HardConcreteGate(6, beta=beta, rule=rule)
    gate.close_(torch.tensor([True] * 4 + [False] * 2))
    before = gate.log_alpha.detach().clone()
    where = torch.tensor([True, True, False, False, False, False])
    gate.open_(where)
    assert gate.open().tolist() == [True, True, False, False, True, True]
    assert bool((gate.value()[:2] >= 0.1 - 1e-6).all() and (gate.value()[:2] <= 0.3).all())
    assert torch.equal(gate.log_alpha[2:], before[2:])
    rectified = RectifiedGate(3, base=Normal)
    rectified.close_(torch.tensor([True, True, False]))
    rectified.open_(torch.tensor([True, False, False]))
    assert rectified.open().tolist() == [True, False, True]
    assert rectified.value()[0].item() == pytest.approx(0.1)


def test_a_family_that_cannot_be_opened_again_says_so() -> None:
    gate = LogNormalGate(3)
    gate.open_(torch.zeros(3, dtype=torch.bool))  # nothing to open
    with pytest.raises(NotImplementedError, match="LogNormalGate has no `open_`"):
        gate.open_(torch.tensor([True, False, False]))


@pytest.mark.parametrize("where", [torch.ones(3), torch.ones(2, dtype=torch.bool)])
def test_a_mask_of_another_kind_is_refused(where: Tensor) -> None:
    for gate in (HardConcreteGate(3), RectifiedGate(3)):
        before = copy.deepcopy(gate.state_dict())
        with pytest.raises(ValueError, match=r"`where` must be a bool mask of shape \(3,\), got"):
            gate.close_(where)
        torch.testing.assert_close(gate.state_dict(), before, rtol=0, atol=0)


# ---- as modules -----------------------------------------------------------------------------------------------------


class _Drawer(nn.ModuleList):
    def forward(self, u: Tensor) -> list[Tensor]:
        return g.draw(list(self), u) + g.values(list(self)) + [probabilities(list(self))]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("make", [alike, mixed])
def test_compiles_in_one_graph(make: Callable[[], list[AbstractGate]]) -> None:
    module = _Drawer(scattered(make()))
    u = torch.rand(total(list(module)))  # type: ignore[arg-type]
    compiled = torch.compile(
        lambda u: (module(u), g.draw(list(module))),  # type: ignore[arg-type]
        fullgraph=True,
        backend="eager",
    )
    torch.manual_seed(1)
    given, drawn = compiled(u)
    torch.testing.assert_close(given, module(u))
    torch.manual_seed(1)
    torch.testing.assert_close(drawn, g.draw(list(module)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("make", [alike, mixed])
def test_exports(make: Callable[[], list[AbstractGate]]) -> None:
    module = _Drawer(scattered(make()))
    u = torch.rand(total(list(module)))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.export.export(module, (u,)).module()(u), module(u))


@pytest.mark.parametrize("make", [alike, mixed])
def test_vmaps_over_parameters_and_noise(make: Callable[[], list[AbstractGate]]) -> None:
    members = [_Drawer(scattered(make())) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(members)
    u = torch.rand(3, total(list(members[0])))  # type: ignore[arg-type]

    def one(state: dict[str, Tensor], u: Tensor) -> list[Tensor]:
        return torch.func.functional_call(members[0], state, (u,))

    batched = torch.func.vmap(one)({**parameters, **buffers}, u)
    for i, member in enumerate(members):
        torch.testing.assert_close([z[i] for z in batched], member(u[i]), rtol=1e-5, atol=1e-6)


def test_copies_pickles_and_loads() -> None:
    module = _Drawer(scattered(mixed()))
    u = torch.rand(total(list(module)))  # type: ignore[arg-type]
    fresh = _Drawer(mixed())
    fresh.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        torch.testing.assert_close(other(u), module(u), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_precision_is_sound_up_to_50(dtype: torch.dtype) -> None:
    extremes = torch.tensor([-50.0, -10.0, 0.0, 10.0, 50.0])
    gates: list[AbstractGate] = [HardConcreteGate(5), HardConcreteGate(5, learn_beta=True), RectifiedGate(5)]
    for gate in gates:
        next(gate.parameters()).data = extremes.clone()
        gate.to(dtype)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    for u in (0.0, 0.5, 1.0):
        out = g.draw(gates, torch.full((15,), u)) + g.values(gates) + [probabilities(gates)]
        assert all(z.dtype == computed and z.isfinite().all() for z in out)
        sum(z.sum() for z in out).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.isfinite().all() for gate in gates for p in gate.parameters())


def test_check_names_the_parameter_that_is_not_finite() -> None:
    gate = HardConcreteGate((2, 3), learn_beta=True)
    gate.check("fc1")
    gate.log_alpha.data[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"`fc1.log_alpha` must be finite, got 1 of 6 .* nan at index \(1, 2\)"):
        gate.check("fc1")
    gate.log_alpha.data[1, 2] = 0
    gate.log_beta.data[0, 0] = math.inf  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"`fc1.log_beta` must be finite, .* inf at index \(0, 0\)"):
        gate.check("fc1")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HardConcreteGate(0), ValueError, "`shape` must be .*, got 0"),
        (lambda: HardConcreteGate((3, -1)), ValueError, "`shape` must be"),
        (lambda: HardConcreteGate(True), ValueError, "`shape` must be"),
        (lambda: HardConcreteGate(2.5), ValueError, r"`shape` must be .*, got 2\.5"),
        (lambda: HardConcreteGate(3, drop_rate=0.0), ValueError, r"`drop_rate` must lie in \(0, 1\), got 0\.0"),
        (lambda: HardConcreteGate(3, drop_rate=1.0), ValueError, "`drop_rate`"),
        (lambda: HardConcreteGate(3, drop_rate=math.nan), ValueError, "`drop_rate`"),
        (lambda: HardConcreteGate(3, beta=0.0), ValueError, "`beta` must be positive and finite, got 0"),
        (lambda: HardConcreteGate(3, beta=torch.tensor([1.0, -1.0, 1.0])), ValueError, "`beta` must be positive"),
        (lambda: HardConcreteGate(3, beta=torch.ones(2)), ValueError, r"`beta` must broadcast to \(3,\), got .*\(2,\)"),
        (lambda: HardConcreteGate(3, gamma=0.0), ValueError, "`gamma` must be negative, got 0"),
        (lambda: HardConcreteGate(3, zeta=1.0), ValueError, "`zeta` must be greater than 1, got 1"),
        (lambda: HardConcreteGate(3, rule="median"), TypeError, "`rule` must be a test rule .*, got 'median'"),
        (lambda: RectifiedGate(3, drop_rate=2.0), ValueError, "`drop_rate`"),
        (lambda: RectifiedGate(3, scale=-1.0), ValueError, r"`scale` must be positive and finite, got -1\.0"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], AbstractGate], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_repr() -> None:
    assert repr(HardConcreteGate(3)) == "HardConcreteGate((3,), beta=0.6667, gamma=-0.1, zeta=1.1, rule=Noiseless())"
    assert repr(RectifiedGate((2, 3))) == "RectifiedGate((2, 3), base=Normal, learn_scale=True)"


# ---- room for other families ----------------------------------------------------------------------------------------


@final
class LogNormalGate(AbstractGate):
    """A continuous posterior: no atom at zero, kept by its signal-to-noise ratio."""

    def __init__(self, shape: int) -> None:
        super().__init__(shape)
        self.mu = nn.Parameter(torch.zeros(shape))
        self.log_sigma = nn.Parameter(torch.linspace(-2, 2, shape))

    def phi(self) -> Phi:
        return self.mu, self.log_sigma

    def constants(self) -> tuple[Hashable, ...]:
        return ()

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return torch.exp(phi[0] + phi[1].exp() * torch.special.ndtri(u))

    def value_from(self, phi: Phi) -> Tensor:
        return torch.where(self.evidence_from(phi) > 1, phi[0].exp(), 0.0)

    def prob_from(self, phi: Phi) -> Tensor:
        raise g.NoExpectation("a log-normal gate has P(z = 0) = 0: only a kept cost exists")

    def evidence_from(self, phi: Phi) -> Tensor:
        return torch.exp(-phi[1])

    def close_(self, where: Tensor) -> None:
        self.log_sigma.data[where] = 50.0


def test_a_family_without_an_atom_lives_beside_the_others() -> None:
    gates: list[AbstractGate] = [HardConcreteGate(2), LogNormalGate(4), HardConcreteGate(1)]
    assert [len(z) for z in g.draw(gates)] == [2, 4, 1]
    assert [bool(z) for z in g.values(gates)[1]] == [True, True, False, False]
    with pytest.raises(g.NoExpectation, match="only a kept cost exists"):
        probabilities(gates)
    assert issubclass(g.NoExpectation, TypeError)
