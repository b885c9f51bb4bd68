"""A loop that forgets something hears of it: loops that make one mistake each, and the right one, which hears none."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ellzero as l0
from support import traced

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def attached(*, norm: bool = False) -> l0.Gated:
    torch.manual_seed(0)
    between: list[nn.Module] = [nn.BatchNorm1d(5)] if norm else []
    return traced.attached(nn.Sequential(nn.Linear(6, 5), *between, nn.ReLU(), nn.Linear(5, 2)), X)


def loop(gated: l0.Gated, term: Callable[[l0.Gated], torch.Tensor], steps: int, *, forget: str = "") -> list[str]:
    """What a plain loop says, which forgets one thing."""
    moved = gated.model.parameters() if forget == "gates" else gated.parameters()
    optimizer = torch.optim.SGD(moved, lr=1e-3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            out = gated.model(X) if forget == "call" else gated(X)
            (out.square().mean() + term(gated)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(term, l0.Constraint) and forget != "ascend":
                term.ascend()
    return [str(warning.message) for warning in said]


TERMS: dict[str, Any] = {
    "penalty": lambda: l0.Penalty(l0.l0_norm, 1e-3),
    "constraint": lambda: l0.Constraint(l0.params, 0.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
def test_a_loop_that_forgets_nothing_hears_nothing(term: str) -> None:
    assert loop(attached(), TERMS[term](), 110) == []


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    ("forget", "said"), [("call", "call `gated(x)` in the loop, not the model"), ("gates", "`gated.param_groups(…)`")]
)
def test_a_loop_that_forgets_its_gates_hears_of_it_once(term: str, forget: str, said: str) -> None:
    messages = loop(attached(), TERMS[term](), 110, forget=forget)
    assert len(messages) == 1
    assert said in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    ("groups", "heard"),
    [
        (lambda gated: gated.parameters(), 1),
        (lambda gated: gated.param_groups(weight_decay=1e-2), 0),
        (lambda gated: gated.param_groups(gate_weight_decay=1e-2), 0),  # asked for
    ],
    ids=["one group", "groups", "asked"],
)
def test_weight_decay_on_gates_is_noticed_in_the_first_step(term: str, groups: Any, heard: int) -> None:
    gated, objective = attached(), TERMS[term]()
    adamw = torch.optim.AdamW(groups(gated))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            (gated(X).square().mean() + objective(gated)).backward()
            adamw.step()
    assert [w.filename for w in said] == [__file__] * heard
    assert all(
        "weight decay pulls on the gates: give the optimizer `gated.param_groups" in str(w.message) for w in said
    )


def test_multipliers_that_nobody_moves_are_noticed() -> None:
    messages = loop(attached(), l0.Constraint(l0.params, 0.6), 110, forget="ascend")
    assert len(messages) == 1
    assert "call `ascend()`" in messages[0]


def test_a_network_that_finalize_cuts_down_at_once_is_noticed() -> None:
    gated = attached()
    loop(gated, l0.Penalty(l0.l0_norm, 0.0), 2)
    with pytest.warns(UserWarning, match=r"`finalize` closed \d\d % of the dense `params` at once"):
        l0.finalize(gated, 0.5)
    l0.finalize(gated, 0.5)  # nothing is left to close


def test_a_run_in_which_nothing_closed_is_noticed() -> None:
    gated = attached()
    loop(gated, l0.Penalty(l0.l0_norm, 0.0), 2)
    with pytest.warns(UserWarning, match="every gate is open"):
        l0.compact(gated.eval())


def test_statistics_that_were_gathered_under_noise_are_noticed_until_they_are_gone() -> None:
    gated = attached(norm=True)
    gated.eval().train()  # nothing has run yet
    assert loop(gated, l0.Penalty(l0.l0_norm, 0.0), 3) == []
    with pytest.warns(UserWarning, match="gathered while gates were noisy"):
        gated.eval()
    l0.recalibrate(gated, [X])
    gated.train().eval()
    gated.train()(X)
    gated.fix()
    for _ in range(28):  # 0.9²⁸ = 0.052 of the noisy statistics are left
        gated(X)
    with pytest.warns(UserWarning, match="gathered while gates were noisy"):
        gated.eval()
    gated.train()(X)
    gated.eval()


def test_frozen_batch_norm_has_gathered_no_noise() -> None:
    gated = attached(norm=True)
    norm = next(m for m in gated.model.modules() if isinstance(m, nn.BatchNorm1d))
    norm.eval()
    assert loop(gated, l0.Penalty(l0.l0_norm, 0.0), 3) == []
    gated.eval()
    gated.train().fix()
    norm.eval()
    gated(X)
    gated.eval()
    gated.fix(False)
    gated.train()(X)
    with pytest.warns(UserWarning, match="gathered while gates were noisy"):
        gated.eval()


def test_a_network_without_batch_norm_has_no_statistics_to_speak_of() -> None:
    gated = attached()
    assert loop(gated, l0.Penalty(l0.l0_norm, 0.0), 3) == []
    gated.eval()


def test_gates_that_nothing_has_moved_are_noticed() -> None:
    """Whatever happened to them but learning: nobody knows then what can go."""
    gated = attached()
    for untouched in (gated, copy.deepcopy(gated).double(), gated.train(), gated.eval()):
        untouched(X.to(next(untouched.parameters())))
        with pytest.warns(UserWarning, match="no gate has moved since `attach`"):
            l0.compact(untouched)
    again, third = copy.deepcopy(gated), copy.deepcopy(gated)
    l0.finalize(third, 1.0)  # nothing to close
    with pytest.warns(UserWarning, match="nothing was learned about what `finalize` closes"):
        l0.finalize(third, 0.7)
    with torch.no_grad():
        gated.gates["0"].log_alpha[3] += 1
    l0.compact(gated)
    l0.finalize(copy.deepcopy(gated), 0.7)
    again.load_state_dict(gated.state_dict())
    l0.compact(again)


class Pair(nn.Module):
    """Two inputs through one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, one: torch.Tensor, two: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.b(self.norm(self.a(one) - self.a(two)).relu() * scale)  # type: ignore[no-any-return]


def test_statistics_of_a_network_with_several_inputs() -> None:
    """As a loader gives them, beside labels; a batch that does not fit leaves the statistics as they were."""
    gated = l0.attach(Pair(), (X, X, 2.0))
    norm: Any = gated.model.norm
    one, two = X, X.flip(0) + 1
    for batch in ((one, two), (one, two, torch.zeros(8)), ((one, two), torch.zeros(8)), {"one": one, "two": two}):
        norm.reset_running_stats()
        l0.recalibrate(gated, [batch])
        seen = gated.model.a(one) - gated.model.a(two)  # gates act behind the norm
        torch.testing.assert_close(norm.running_mean, seen.mean(0))
    before = copy.deepcopy(norm.state_dict())
    told = r"attached with \(a tensor \[8, 6\], a tensor \[8, 6\], a float\), got \(a tensor \[8, 6\]\) .*missing 1 req"
    with pytest.raises(ValueError, match=told):
        l0.recalibrate(gated, [(one, two), one])
    with pytest.raises(ValueError, match=r"got \(one=a tensor \[8, 6\]\)"):
        l0.recalibrate(gated, [{"one": one}])
    for wrong in (one, 3, "loader"):
        with pytest.raises(TypeError, match=r"`batches` must be batches one after .* got a (tensor|int|str)"):
            l0.recalibrate(gated, wrong)  # type: ignore[arg-type]
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    assert norm.momentum == 0.1


@pytest.mark.slow
def test_what_a_fused_optimizer_moves_has_moved() -> None:
    """Torch does not count what it writes."""
    gated, term = attached(), TERMS["penalty"]()
    adam = torch.optim.Adam(gated.param_groups(lr=1e-3), fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(110):
            (gated(X).square().mean() + term(gated)).backward()
            adam.step()
            adam.zero_grad()


def test_batches_are_taken_one_at_a_time() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(9):
            batch = torch.randn(4, 3)
            alive.add(batch)
            assert len(alive) <= 3  # this one, the last, and the first
            yield batch

    l0.recalibrate(torch.nn.BatchNorm1d(3), batches())


def test_terms_go_through_vmap() -> None:
    """Where nobody can look at a number."""
    networks = [attached(), attached()]
    values = torch.func.stack_module_state(networks)
    together = torch.func.vmap(lambda *v: torch.func.functional_call(Term(networks[0], TERMS["penalty"]()), v, ()))(
        *({"gated." + key: value for key, value in part.items()} for part in values)
    )
    torch.testing.assert_close(together, torch.stack([TERMS["penalty"]()(network) for network in networks]))


class Term(nn.Module):
    def __init__(self, gated: l0.Gated, term: Any) -> None:
        super().__init__()
        self.gated, self.term = gated, [term]

    def forward(self) -> torch.Tensor:
        return self.term[0](self.gated)
