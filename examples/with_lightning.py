"""A budget in Lightning: one more callback. Seconds on a CPU. Needs `pip install "ellzero[lightning]"`.

python examples/with_lightning.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ellzero.integrations.lightning import BudgetCallback


class Classifier(L.LightningModule):
    """As it was before there was a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Is the product of the first two coordinates positive?"""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=64, shuffle=True)


def main(epochs: int = 20, **options: object) -> nn.Module:
    L.seed_everything(0, verbose=False)
    # begin: lightning
    callback = BudgetCallback(torch.zeros(1, 20), network="model", macs=0.3)  # gates `module.model` as the fit begins
    trainer = L.Trainer(max_epochs=epochs, gradient_clip_val=1.0, callbacks=[callback], **options)
    trainer.fit(Classifier(), loader())  # or fit(..., ckpt_path="last.ckpt"): goes on, budget and all
    print(callback.budget)
    small = callback.budget.finish()
    # end: lightning
    print(small)
    return small


if __name__ == "__main__":
    main(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
