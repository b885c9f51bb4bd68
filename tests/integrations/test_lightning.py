"""A budget in Lightning: trained for real, against a plain loop with the same noise, stopped and resumed."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ellzero as l0

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402

from ellzero.integrations.lightning import BudgetCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # one process is what is wanted here
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),  # what saved is not needed
]
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()
EPOCHS = 20  # of two batches


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


@functools.cache  # tracing takes half a second
def traced() -> l0.Gated:
    return l0.attach(mlp(), X[:2])


class Classifier(lightning.LightningModule):
    """As a user writes one, but that it seeds the noise of every batch."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.net = copy.deepcopy(traced()) if network is None else network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        torch.manual_seed(100 * self.global_step + index)
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("error", (self.net(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(sgd, EPOCHS)}


class Notes(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[dict[str, float]] = []

    name, version = "notes", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append(metrics)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=32)


def callback(**options: Any) -> BudgetCallback:
    return BudgetCallback(X[:2], **{"network": "net", "macs": 0.4, "learning": 0.5, **options})


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 1}
    keeps = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    where = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": keeps}
    return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **where, **options})


def fitted(module: Any = None, *others: Any, options: dict[str, Any] | None = None, **budget: Any) -> BudgetCallback:
    ours = callback(**budget)
    trainer(ours, *others, **(options or {})).fit(Classifier() if module is None else module, loader())
    return ours


def by_hand(accumulate: int = 1, clip: float | None = None, autocast: bool = False) -> l0.Budget:
    gated = copy.deepcopy(traced())
    budget = l0.Budget(gated, macs=0.4, learning=0.5, steps=EPOCHS * 2 // accumulate)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    budget.drive(optimizer)
    gated.train()
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader()):
            torch.manual_seed(100 * budget.done + index)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(gated(x), y) / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(gated.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return budget


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def share(small: nn.Module) -> float:
    return sum(p.numel() for p in small.parameters() if p.ndim > 1) / (6 * 16 + 16 * 12 + 12 * 2)


@pytest.mark.parametrize("gated", [False, True], ids=["attaches", "takes"])
def test_a_fit_is_the_plain_loop(gated: bool) -> None:
    module = Classifier(None if gated else mlp())
    ours = fitted(module)
    assert ours.budget is not None
    assert (ours.budget.done, ours.budget.phase) == (40, "tuning")
    small = ours.budget.finish()
    assert 0.3 < share(small) <= 0.4
    assert same(small, by_hand().finish())
    assert module.net is ours.budget.gated


def test_accumulation_and_clipping_are_those_of_the_plain_loop() -> None:
    notes = Notes()
    ours = fitted(options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "logger": notes})
    assert ours.budget is not None
    assert ours.budget.steps == ours.budget.done == 20  # as the trainer expected
    assert same(ours.budget.finish(), by_hand(accumulate=2, clip=0.05).finish())
    told = [line for line in notes.written if "budget/macs/kept" in line]
    assert len(told) == 20  # once per step
    assert told[0]["budget/macs/target"] > told[-1]["budget/macs/target"] == pytest.approx(0.4)
    assert told[-1]["budget/macs/kept"] <= 0.4
    assert all("budget/macs/multiplier" in line for line in told)


def test_mixed_precision_is_that_of_the_plain_loop() -> None:
    ours = fitted(options={"precision": "bf16-mixed"})
    assert ours.budget is not None
    assert same(ours.budget.finish(), by_hand(autocast=True).finish())


def test_a_step_that_the_scaler_leaves_out_is_left_out() -> None:
    class Overflowing(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss * torch.inf if self.trainer.current_epoch == 3 else loss

    scaled = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    scaled.precision = "bf16-mixed"  # float16 is slow on a CPU; the scaler works alike
    ours = fitted(Overflowing(), options={"plugins": [scaled]})
    assert ours.budget is not None
    assert ours.budget.done == 38


def test_a_stopped_fit_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saving = ModelCheckpoint(
        tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
    )
    whole = fitted(None, saving, ema=0.9).budget
    assert whole is not None
    small = whole.finish()
    for stop in (6, 15):  # while gates learn, and when units have left
        resumed = callback(ema=0.9)
        trainer(resumed).fit(Classifier(), loader(), ckpt_path=tmp_path / f"epoch={stop - 1}.ckpt")
        assert resumed.budget is not None
        assert (resumed.budget.done, resumed.budget.masked) == (40, None)
        assert same(resumed.budget.finish(), small)
    module = Classifier()
    (told,) = trainer(callback()).test(module, loader(), ckpt_path=tmp_path / "epoch=14.ckpt", verbose=False)
    assert module.net.taken is not None
    with torch.no_grad():
        assert told["error"] == (module.net.eval()(X).argmax(1) != Y).float().mean()


def test_a_checkpoint_without_a_budget_is_refused(tmp_path: Path) -> None:
    module = Classifier()
    plain = trainer(max_epochs=1)
    plain.fit(module, loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="must have the budget's state, got one without"):
        trainer(callback()).fit(Classifier(), loader(), ckpt_path=tmp_path / "plain.ckpt")


def test_gates_that_no_optimizer_has_are_added() -> None:
    class Aware(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.model.parameters(), lr=0.05, momentum=0.9)

    ours = fitted(Aware())
    assert ours.budget is not None
    assert share(ours.budget.finish()) <= 0.4


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="`network` must name a network of the module, got 'body', and there are net"):
        fitted(network="body")
    with pytest.raises(ValueError, match="`example_inputs` must say what the network is called with"):
        trainer(BudgetCallback(network="net", macs=0.4)).fit(Classifier(mlp()), loader())
    with pytest.raises(ValueError, match="`steps` must be given where the trainer does not know"):
        fitted(options={"max_epochs": -1})
    ours = fitted(options={"max_epochs": 1})
    with pytest.raises(RuntimeError, match="must serve one fit, got a second"):
        trainer(ours).fit(Classifier(), loader())
