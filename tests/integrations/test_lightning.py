"""A budget in Lightning: trained for real, against a plain loop with the same noise, stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.slow,  # to import it alone takes ten seconds
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # one process is what is wanted here
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),  # what saved is not needed
]


@pytest.fixture(scope="module")
def fits() -> Any:
    pytest.importorskip("lightning.pytorch")
    from support import fits

    return fits


@pytest.mark.parametrize("gated", [False, True], ids=["attaches", "takes"])
def test_a_fit_is_the_plain_loop(fits: Any, gated: bool) -> None:
    module = fits.Classifier(None if gated else fits.mlp())
    ours = fits.fitted(module)
    assert ours.budget is not None
    assert (ours.budget.done, ours.budget.phase) == (40, "tuning")
    small = ours.budget.finish()
    assert 0.3 < fits.share(small) <= 0.4
    assert fits.same(small, fits.by_hand().finish())
    assert module.net is ours.budget.gated


def test_accumulation_and_clipping_are_those_of_the_plain_loop(fits: Any) -> None:
    notes = fits.Notes()
    ours = fits.fitted(options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "logger": notes})
    assert ours.budget is not None
    assert ours.budget.steps == ours.budget.done == 20  # as the trainer expected
    assert fits.same(ours.budget.finish(), fits.by_hand(accumulate=2, clip=0.05).finish())
    told = [line for line in notes.written if "budget/macs/kept" in line]
    assert len(told) == 20  # once per step
    assert told[0]["budget/macs/target"] > told[-1]["budget/macs/target"] == pytest.approx(0.4)
    assert told[-1]["budget/macs/kept"] <= 0.4
    assert all("budget/macs/multiplier" in line for line in told)


def test_mixed_precision_is_that_of_the_plain_loop(fits: Any) -> None:
    ours = fits.fitted(options={"precision": "bf16-mixed"})
    assert ours.budget is not None
    assert fits.same(ours.budget.finish(), fits.by_hand(autocast=True).finish())


def test_a_step_that_the_scaler_leaves_out_is_left_out(fits: Any) -> None:
    class Overflowing(fits.Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss * torch.inf if self.trainer.current_epoch == 3 else loss

    scaled = fits.lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    scaled.precision = "bf16-mixed"  # float16 is slow on a CPU; the scaler works alike
    ours = fits.fitted(Overflowing(), options={"plugins": [scaled]})
    assert ours.budget is not None
    assert ours.budget.done == 38


def test_a_stopped_fit_goes_on_bit_for_bit(fits: Any, tmp_path: Path) -> None:
    saving = fits.ModelCheckpoint(
        tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
    )
    whole = fits.fitted(None, saving, ema=0.9).budget
    assert whole is not None
    small = whole.finish()
    for stop in (6, 15):  # while gates learn, and when units have left
        resumed = fits.callback(ema=0.9)
        fits.trainer(resumed).fit(fits.Classifier(), fits.loader(), ckpt_path=tmp_path / f"epoch={stop - 1}.ckpt")
        assert resumed.budget is not None
        assert (resumed.budget.done, resumed.budget.masked) == (40, None)
        assert fits.same(resumed.budget.finish(), small)
    module = fits.Classifier()
    (told,) = fits.trainer(fits.callback()).test(
        module, fits.loader(), ckpt_path=tmp_path / "epoch=14.ckpt", verbose=False
    )
    assert module.net.taken is not None
    with torch.no_grad():
        assert told["error"] == (module.net.eval()(fits.X).argmax(1) != fits.Y).float().mean()


def test_noise_and_order_of_a_stopped_fit_go_on_too(fits: Any, tmp_path: Path) -> None:
    """Nobody seeds anything on the way: Lightning does not keep what random numbers are drawn from."""

    class Plain(fits.Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    shuffled = fits.DataLoader(fits.TensorDataset(fits.X, fits.Y), batch_size=32, shuffle=True)
    saving = fits.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole, resumed = fits.callback(learning=0.3), fits.callback(learning=0.3)
    torch.manual_seed(3)
    fits.trainer(whole, saving, max_epochs=8).fit(Plain(), shuffled)
    torch.manual_seed(4)
    fits.trainer(resumed, max_epochs=8).fit(Plain(), shuffled, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert whole.budget is not None
    assert resumed.budget is not None
    assert fits.same(whole.budget.finish(), resumed.budget.finish())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_noise_of_a_stopped_fit_on_a_gpu_goes_on_too(fits: Any, tmp_path: Path) -> None:
    class Plain(fits.Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    saving = fits.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole, resumed = fits.callback(learning=0.5), fits.callback(learning=0.5)
    on = {"max_epochs": 8, "accelerator": "gpu", "devices": 1}
    torch.manual_seed(3)
    fits.trainer(whole, saving, **on).fit(Plain(), fits.loader())
    torch.manual_seed(4)
    fits.trainer(resumed, **on).fit(Plain(), fits.loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert whole.budget is not None
    assert resumed.budget is not None
    ours, theirs = resumed.budget.finish().state_dict(), whole.budget.finish().state_dict()
    torch.testing.assert_close(ours, theirs)  # a GPU may round otherwise


def test_a_checkpoint_without_a_budget_is_refused(fits: Any, tmp_path: Path) -> None:
    module = fits.Classifier()
    plain = fits.trainer(max_epochs=1)
    plain.fit(module, fits.loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="must have the budget's state, got one without"):
        fits.trainer(fits.callback()).fit(fits.Classifier(), fits.loader(), ckpt_path=tmp_path / "plain.ckpt")


def test_gates_that_no_optimizer_has_are_added(fits: Any) -> None:
    class Aware(fits.Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.model.parameters(), lr=0.05, momentum=0.9)

    ours = fits.fitted(Aware())
    assert ours.budget is not None
    assert fits.share(ours.budget.finish()) <= 0.4


def test_mistakes_are_told(fits: Any) -> None:
    with pytest.raises(ValueError, match="`network` must name a network of the module, got 'body', and there are net"):
        fits.fitted(network="body")
    with pytest.raises(ValueError, match="`example_inputs` must say what the network is called with"):
        fits.trainer(fits.BudgetCallback(network="net", macs=0.4)).fit(fits.Classifier(fits.mlp()), fits.loader())
    with pytest.raises(ValueError, match="`steps` must be given where the trainer does not know"):
        fits.fitted(options={"max_epochs": -1})
    with pytest.raises(ValueError, match=r"`steps` must be a positive integer, got 2\.5"):
        fits.fitted(steps=2.5)
    ours = fits.fitted(options={"max_epochs": 1})
    with pytest.raises(RuntimeError, match="must serve one fit, got a second"):
        fits.trainer(ours).fit(fits.Classifier(), fits.loader())
