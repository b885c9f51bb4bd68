"""`BudgetCallback` for Lightning: a budget in a `lightning.Trainer`, with nothing else changed in module and trainer.

What a budget is and does is in `ellzero.out.budget`; how it comes into a checkpoint and out again in `carrying.py`.
This file knows at which moment of a fit each belongs.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("`ellzero.integrations.lightning` needs Lightning: pip install 'ellzero[lightning]'") from error

from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.integrations.carrying import Carrier
from ellzero.out.budget import Budget


@final
class BudgetCallback(Callback):
    """What the network of a `LightningModule` may cost at the end.

    `training_step`, `configure_optimizers` and the trainer stay as they are: accumulation, clipping and mixed precision
    work, and a checkpoint goes on with `fit(ckpt_path=…)`. Kept cost, target and multiplier are logged once per
    optimizer step, as `budget/macs/kept` and so on. After the fit `callback.budget.finish()` is the small network.

    Args:
        example_inputs: what the network is called with, as in `attach`; not needed where it is gated already.
        network: the name of the network in the module: it is gated in place when a fit begins, before
            `configure_optimizers`.
        steps: optimizer steps of the whole run; as many as the trainer expects if `None`.
        **budget: all else that `Budget` takes, `macs=0.3` for example.

    Attributes:
        budget: the `Budget`, once the fit has begun.

    Raises:
        ValueError: in `fit`: the module has no such network, or the number of steps is not known.
    """

    def __init__(
        self, example_inputs: Any = None, *, network: str = "model", steps: int | None = None, **budget: Any
    ) -> None:
        self.budget: Budget | None = None
        self._example, self._network, self._steps, self._options = example_inputs, network, steps, budget
        self._logged = 0
        self._noise: dict[str, torch.Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gates the network, and waits for a checkpoint: it is loaded before there are optimizers."""
        gated = self._gated(pl_module)
        carrier = Carrier.of(gated)
        if stage != "fit":
            return
        if self.budget is not None:
            raise RuntimeError("a `BudgetCallback` must serve one fit, got a second: make another one")
        steps = trainer.estimated_stepping_batches if self._steps is None else self._steps
        if steps == float("inf"):
            raise ValueError(f"`steps` must be given where the trainer does not know how many there are, got {steps}")
        self.budget = Budget(gated, steps=steps, **self._options)
        carrier.begin(self.budget)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drives the optimizer that has just been made; its own state is loaded after this."""
        assert self.budget is not None
        gated = self.budget.gated
        gates = list(gated.gates.parameters())
        weights = {id(p) for p in gated.model.parameters()}

        def holds(optimizer: torch.optim.Optimizer, wanted: set[int]) -> bool:
            return any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])

        optimizer = next((o for o in trainer.optimizers if holds(o, weights)), None)
        if optimizer is None:
            raise ValueError(f"`configure_optimizers` must make an optimizer of `{self._network}`, got none")
        if not any(holds(o, {id(p) for p in gates}) for o in trainer.optimizers):
            optimizer.param_groups[0]["params"].extend(gates)  # not a group of their own: schedules have counted them
        self.budget.drive(optimizer)
        Carrier.of(gated).resume(self.budget, trainer.ckpt_path is not None)
        self._logged = self.budget.done

    def state_dict(self) -> dict[str, Any]:
        """What Lightning itself does not keep: where the numbers are that noise, and shuffling, are drawn from."""
        noise = {"noise": torch.get_rng_state()}
        return noise if self._gpu is None else noise | {"noise on a GPU": torch.cuda.get_rng_state(self._gpu)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the numbers for the moment when the epochs begin."""
        self._noise = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes on with the numbers that a checkpoint of the end of an epoch had, as the next epoch would have."""
        if not self._noise:
            return
        torch.set_rng_state(self._noise["noise"].cpu())
        if self._gpu is not None and "noise on a GPU" in self._noise:  # a fit may go on elsewhere
            torch.cuda.set_rng_state(self._noise["noise on a GPU"].cpu(), self._gpu)
        self._noise = {}
        for loader in tree_leaves(trainer.train_dataloader):
            if isinstance(loader, DataLoader) and loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # its iterator drew a seed, and is there already

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs, where the batch ended with a step."""
        assert self.budget is not None
        if self.budget.done != self._logged:
            self._logged = self.budget.done
            pl_module.log_dict({f"budget/{name}": value for name, value in self.budget.metrics().items()})

    @property
    def _gpu(self) -> torch.device | None:
        """Where the network is, and its noise is drawn, if that is a GPU."""
        device = None if self.budget is None else next(self.budget.gated.parameters()).device
        return device if device is not None and device.type == "cuda" else None

    def _gated(self, module: LightningModule) -> Gated:
        found = dict(module.named_children()).get(self._network)
        if found is None:
            there = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"`network` must name a network of the module, got {self._network!r}, and there are {there}"
            )
        if not isinstance(found, Gated):
            if self._example is None:
                raise ValueError(
                    "`example_inputs` must say what the network is called with, or it must be gated already"
                )
            found = attach(found, self._example)
            setattr(module, self._network, found)
        return found
