"""Gates that settle on the way, against the network that `finalize` gives and nobody has shrunk.

The oracle of the event is that network, in float64; of what comes after it, the optimizer's settings, an average kept
by hand, and the run that was not interrupted.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ellzero import gates
from ellzero.cli import main, opening
from ellzero.experiments.networks import WideResNet
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, events, saver
from ellzero.experiments.train.building import COSTS, architecture
from ellzero.experiments.train.loop import train, train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.objectives import costs
from ellzero.objectives.lagrangian import Lagrangian
from ellzero.out.compaction import compact
from ellzero.out.finalization import finalize
from support.oracles import assert_same, numel
from support.runs import SETTLING, begun, bits, doubled, gated_of, images, interrupted, leaves, recipe

pytestmark = pytest.mark.slow


def scattered(trainer: Trainer) -> Gated:
    """Gates in all states."""
    for _, gate in gated_of(trainer).named_gates():
        n = gate.shape.numel()
        with torch.no_grad():
            gate.log_alpha.copy_(torch.tensor([7 * (5 * k % n) / n - 4 for k in range(n)]))  # type: ignore[operator]
    return gated_of(trainer)


@pytest.mark.parametrize("case", ["blocks", "per layer", "penalty"])
def test_a_network_that_settles_is_the_finalised_one(case: str) -> None:
    """Folding and taking out change nothing: the oracle is a copy that `finalize` has closed, and nobody has shrunk."""
    changes: dict[str, Any] = {"ema": None}
    r = {
        "blocks": SETTLING.override(**changes),
        "per layer": recipe(
            "lenet5", placement="per_layer", penalty=None, cost="macs", at_most=0.2, shrink_at=(), settle_at=1,
        ),
        "penalty": SETTLING.override(at_most=None, penalty=0.1, **changes),
    }[case]  # fmt: skip
    trainer = doubled(r, {})
    gated = scattered(trainer)
    expected = copy.deepcopy(gated)
    noisy = {name: cost(gated).item() / costs.dense(cost, gated) for name, cost in COSTS.items()}
    had = {name: cost(gated, kept=True).item() / costs.dense(cost, gated) for name, cost in COSTS.items()}
    if r.at_most is not None:
        finalize(expected, r.at_most, COSTS[r.cost], fill=True)
    x = trainer.supply.scaled(images(r.data).test_x).double()
    before = expected.eval()(x)
    events.settle(trainer)
    assert trainer.step.fixed
    assert trainer.event is not None
    assert trainer.event["settled"]
    assert trainer.event["expected"] == pytest.approx(noisy, rel=1e-6)
    assert trainer.event["kept"] == pytest.approx(had, rel=1e-6)
    after = trainer.network(0)
    assert_same(after(x), before, 1e-12)
    settled = cast(Gated, after)
    assert {z for values in gates.values([gate for _, gate in settled.named_gates()]) for z in values.tolist()} == {
        0,
        1,
    }
    for name in ("params", "macs"):
        kept = float(COSTS[name](expected, kept=True))
        assert float(COSTS[name](settled, kept=True)) == pytest.approx(kept)
        assert float(COSTS[name](settled)) == pytest.approx(kept)
    live = gated_of(trainer)
    assert numel(live.model) < numel(expected.model)
    for name, width in trainer.event["widths"].items():
        layer: Any = live.model.get_submodule(name)
        assert layer.weight.shape[0] == width
        assert width % r.shrink_multiple == 0
    if case == "blocks":  # 30 % of 16, 32 and 64 maps, and all of that is used
        assert torch.equal(settled.opens(), expected.opens())
        assert [int(part.sum()) for part in settled.opens().split([16, 32, 64])] == [4, 9, 19]
        assert list(trainer.event["widths"].values()) == [4, 12, 20]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = begun(SETTLING, tmp_path_factory.mktemp("run") / "run")
    return train([SETTLING], images("cifar10"), folder)


def test_after_settling_the_weights_train_alone_and_by_the_schedule(run: Trainer) -> None:
    assert [h["tuning"] for h in run.history] == [False, True, True, True, True]
    assert [("shrunk" in h) for h in run.history] == [False, True, False, False, False]
    assert len({tuple(h["open"].values()) for h in run.history[1:]}) == 1
    assert [group["lr"] for group in run.optimizer.param_groups if group["rate"] == 0.05] == pytest.approx(
        [0.005] * sum(group["rate"] == 0.05 for group in run.optimizer.param_groups)
    )
    counted = [group for group in run.optimizer.param_groups if group["by_eq_17"]]
    assert counted
    assert all(group["weight_decay"] == 5e-4 * 0.5 for group in counted)
    (result,) = evaluation.results(run)
    assert result["gates"] == "raw"  # they settled as they were: the weights are averaged
    assert result["error_best"] == min(h["error"] for h in run.history[1:])
    assert result["costs"]["l0_norm"]["kept"] == result["costs"]["l0_norm"]["expected"] <= 0.3
    small = compact(cast(Gated, run.network(0)))
    assert result["costs"]["params"]["kept"] * numel(WideResNet(10, 1)) == pytest.approx(numel(small))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_settled_step_asks_no_gates_and_has_the_bits_of_one_that_does(compiled: bool) -> None:
    trainer = Trainer([SETTLING], images("cifar10"))
    objective = trainer.runs.template
    assert objective.held is None
    scattered(trainer)
    list(train_epoch(trainer))
    list(train_epoch(trainer))
    next(train_epoch(trainer))
    assert objective.held  # some closed units stay, so that widths are multiples
    index, noise = trainer.supply.epoch(trainer.epoch)
    x, y = trainer.supply.batch(index[0])
    loss = torch.compile(objective, backend="eager") if compiled else objective
    gradients = []
    for held in (objective.held, None, objective.held):
        objective.held = held
        objective.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if held is not None:
                patch.setattr(gates.HardConcreteGate, "value_from", None)
            loss(x[0], y[0], noise[0, 0, 0])[0].backward()
        gradients.append({name: p.grad for name, p in objective.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
        assert torch.equal(gradient, gradients[2][name]), name


def test_the_average_is_of_the_settled_network_alone(run: Trainer) -> None:
    """By hand: a second run is stepped from the event on, and its parameters averaged."""
    trainer = Trainer([SETTLING], images("cifar10"))
    scattered(trainer)
    list(train_epoch(trainer))
    for name, value in trainer.values().items():  # not yet
        assert torch.equal(value, trainer.runs.values()[name])
    list(train_epoch(trainer))
    assert trainer.step.fixed
    for name, value in trainer.values().items():
        assert torch.equal(value, trainer.runs.values()[name])
    seen = []
    for _ in range(2):
        for _ in train_epoch(trainer):
            seen.append({n: v.detach().clone() for n, v in trainer.runs.values().items()})
    weights = [0.5 ** (len(seen) - k) for k in range(len(seen))]
    for name, value in trainer.values().items():
        by_hand = sum(w * v[name] for w, v in zip(weights, seen, strict=True)) / sum(weights)
        torch.testing.assert_close(value, by_hand, rtol=1e-5, atol=1e-6)
    assert run.average.active


def test_where_gates_settle_at_the_end_there_is_nothing_to_average() -> None:
    trainer = train([SETTLING.override(epochs=2)], images("cifar10"))
    assert trainer.step.fixed
    assert trainer.history[-1]["error_without"].keys() == {"recalibration"}
    for name, value in trainer.values().items():
        assert torch.equal(value, trainer.runs.values()[name])


def test_a_look_gathers_statistics_of_the_average_and_leaves_those_of_training() -> None:
    """Against a copy of the averaged network whose batch norm has seen the same batches, and what a look must leave."""
    trainer = Trainer([SETTLING], images("cifar10"))
    scattered(trainer)
    for _ in range(3):
        list(train_epoch(trainer))
    before = {n: b.clone() for n, b in trainer.runs.template.named_buffers()}
    seen = evaluation.evaluate(trainer)
    assert all(torch.equal(b, before[n]) for n, b in trainer.runs.template.named_buffers())
    by_hand = copy.deepcopy(trainer.runs.network(0, trainer.values())).eval()
    for module in by_hand.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for index in trainer.supply.epoch(trainer.epoch)[0]:
            by_hand(trainer.supply.batch(index)[0][0])
        logits = by_hand.eval()(trainer.supply.scaled(trainer.data.test_x))
    wrong = float((logits.argmax(1) != trainer.data.test_y).float().mean())
    assert seen["error"].item() == pytest.approx(100 * wrong)
    evaluation.recalibrate(trainer)  # the same, for good
    expected = dict(by_hand.named_buffers())
    for name, buffer in trainer.runs.network(0).named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-5, atol=1e-6)


def test_who_looks_changes_nothing_in_what_comes_after() -> None:
    """Images, noise, dropped units, modes and statistics are those of a run that nobody has looked at, to the bit."""
    ends = []
    for looks in (False, True):
        trainer = Trainer([SETTLING.override(dropout=0.3)], images("cifar10"))
        scattered(trainer)
        for _ in range(3):
            for _ in train_epoch(trainer):
                if looks:  # in the middle of an epoch too
                    evaluation.evaluate(trainer)
        ends.append({name: bits(leaf) for name, leaf in leaves(saver.state(trainer)) if name != ".seconds"})
    assert ends[0] == ends[1]


def test_an_unfinished_run_is_evaluated_as_its_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The average has not got the statistics of training: they are gathered for it, or, without data, it is said."""
    r = SETTLING.override(ema=0.95, lr=0.1)
    trainer = Trainer([r], images("cifar10"))
    scattered(trainer)
    for _ in range(4):
        list(train_epoch(trainer))
    saver.save(trainer, Folder.create(tmp_path / "run", [r]))
    monkeypatch.setattr(opening, "load_data", lambda *_: images("cifar10"))
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["networks"]
    seen = evaluation.evaluate(trainer)["error"].item()
    assert found["error"] == found["error_compact"] == seen
    logits = trainer.network(0)(trainer.supply.scaled(trainer.data.test_x))
    assert 100 * (logits.argmax(1) != trainer.data.test_y).double().mean() != seen  # as training has them
    assert main(["compact", str(tmp_path / "run")]) == 0
    assert "the run is not finished: batch-norm statistics are those of training" in capsys.readouterr().err


@pytest.mark.parametrize("ema", [0.9, 0.9999])
def test_whoever_looks_without_the_data_sees_the_same_average(ema: float, tmp_path: Path) -> None:
    """Noise that stands in for the data makes epochs of another length, and the average begins with one of them."""
    r = SETTLING.override(ema=ema, recalibrate=False)
    trainer = Trainer([r], images("cifar10"))
    scattered(trainer)
    for _ in range(3):
        list(train_epoch(trainer))
    folder = Folder.create(tmp_path / "run", [r])
    saver.save(trainer, folder)
    expected = trainer.network(0).state_dict()
    seen = opening.restored(folder).network(0).state_dict()
    assert seen.keys() == expected.keys()
    assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []


@pytest.mark.parametrize("steps", [3, 4, 9])
def test_a_checkpoint_around_the_event_goes_on_to_the_bit(steps: int, run: Trainer, tmp_path: Path) -> None:
    """Of two steps an epoch: before the event, the step that it follows, and one long after it."""
    interrupted(begun(SETTLING, tmp_path / "run"), steps, run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settle_at": 0}, "`settle_at` must be an integer of at least 1, got 0"),
        ({"shrink_at": (4,)}, "`settle_at` must come after `shrink_at`, got 2 and \\[4\\]"),
        ({"finetune_epochs": 1}, "`finetune_epochs` must be 0 with `settle_at`"),
        ({"placement": None, "at_most": None}, "`settle_at` must be absent without gates"),
    ],
)
def test_settling_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SETTLING.override(**change)


def few(name: str, **changes: Any) -> Trainer:
    r = get(name).override(data="mnist5k", batch=8, epochs=2, settle_at=1, shrink_multiple=4, ema=None, **changes)
    return Trainer([r], images("mnist5k"))


def test_a_target_that_settling_cannot_reach_is_refused_before_the_training() -> None:
    with pytest.raises(ValueError, match=r"^`at_most` for 'fc1' must be at least"):
        few("gallego-mlp", at_most={"fc1": 0.001})


@pytest.mark.filterwarnings("ignore:every gate is open")  # as they are where nothing is nested
@pytest.mark.parametrize("name", ["louizos-mlp", "gallego-mlp", "louizos-lenet5"])
@pytest.mark.parametrize("closed", ["one", "all", "nested"])
def test_a_layer_that_is_closed_when_the_gates_settle_is_not_lost_for_good(name: str, closed: str) -> None:
    """Its gates would have opened again while they were noisy."""
    trainer = few(name, gate_lr=1e-6)
    members = {n: v for n, v in trainer.runs.values().items() if n.startswith("network.gates.")}
    with torch.no_grad():
        for key, value in members.items():
            if closed == "all" or (closed == "one" and "fc2" in key):
                value.copy_(-8 - 0.01 * torch.arange(len(value)).flip(0))
        if closed == "nested" and "lenet5" in name:  # inputs of fc1 are open in a map that is closed, and there alone
            members["network.gates.fc1.log_alpha"][16:] = -8
            members["network.gates.conv2.log_alpha"][:1] = -8
    list(train_epoch(trainer))
    assert trainer.step.fixed
    network = cast(Gated, trainer.network(0))
    compact(network)  # refuses where a layer is closed as a whole
    left = architecture(network)
    assert min(left.values()) >= 1
    if closed == "all" and trainer.recipe.at_most is None:  # one of each, the last: it is the most probable
        assert set(left.values()) == {1}
        assert all(bool(gate.open()[-1]) for _, gate in network.named_gates())


def test_until_they_settle_is_all_the_time_that_gates_and_multipliers_have() -> None:
    """The controller that sets itself and the target that comes down are those of a run that ends there."""
    short, long = (
        Trainer([get("demo").override(batch=8, epochs=n, settle_at=2, finetune_epochs=0)], images("mnist5k")).lagrangian
        for n in (2, 200)
    )

    def now(l: Lagrangian, step: float) -> torch.Tensor:  # noqa: E741
        assert l.warmup is not None
        return l.warmup.target(l.goal, torch.tensor(step))

    assert short.dual == long.dual
    for step in (0.0, 1.0, 2.0, 4.0):
        assert torch.equal(now(short, step), now(long, step))
    assert now(long, 2.0).item() == pytest.approx(0.2)  # half of the four steps


@pytest.mark.parametrize("change", [{"samples": 3}, {"extra_gradient": True}])
def test_gates_that_have_settled_are_not_drawn_and_so_not_more_than_once(change: dict[str, Any]) -> None:
    trainer = Trainer([SETTLING.override(**change)], images("cifar10"))
    calls = []
    gated_of(trainer).model.register_forward_hook(lambda *_: calls.append(trainer.step.fixed))
    for _ in range(3):
        list(train_epoch(trainer))
    assert calls == [False] * (4 * change.get("samples", 2)) + [True] * 2


def test_the_command_line_says_what_was_kept_before_settling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is the run that does not settle: the record of the epoch after which it would have."""
    monkeypatch.setattr(opening, "load_data", lambda *_: images("mnist5k"))
    words = [
        "train",
        "demo",
        "--batch",
        "16",
        "--finetune-epochs",
        "0",
        "--gate-lr",
        "0.5",
        "--device",
        "cpu",
        "--quiet",
    ]
    assert main([*words, "--epochs", "2", "--out", str(tmp_path / "learning")]) == 0
    learned = [h for h in Folder.open(tmp_path / "learning").history() if not h["tuning"]][-1]
    capsys.readouterr()
    words += ["--epochs", "4", "--settle-at", "2", "--every", "3", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    last = Folder.open(tmp_path / "run").history()[-1]
    assert (
        f"When the gates had learned, {100 * learned['kept']['macs']:.1f} % of macs were kept; "
        f"settling after epoch 2 made it {100 * last['kept']['macs']:.1f} %."
    ) in capsys.readouterr().out
    assert learned["kept"]["macs"] != last["kept"]["macs"]
