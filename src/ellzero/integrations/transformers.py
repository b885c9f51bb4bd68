"""Hugging Face: `BudgetCallback` for its Trainer, `save_pretrained` and `from_pretrained` for its folders.

What a budget is and does is in `ellzero.out.budget`; how it comes into a checkpoint and out again in `carrying.py`; how
a small network comes into a folder in `pretrained.py`. This file knows at which moment of a training each belongs.
"""

from __future__ import annotations

from typing import Any, final

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "`ellzero.integrations.transformers` needs Transformers: pip install 'ellzero[transformers]'"
    ) from error

from ellzero.gated.module import Gated
from ellzero.integrations.carrying import Carrier
from ellzero.integrations.pretrained import from_pretrained, save_pretrained
from ellzero.out.budget import Budget

__all__ = ["BudgetCallback", "from_pretrained", "save_pretrained"]


@final
class BudgetCallback(TrainerCallback):
    """What the network of a `Trainer` may cost at the end.

    The trainer's model is what `attach` returned; its arguments, data and optimizer stay as they are. A checkpoint goes
    on with `train(resume_from_checkpoint=…)`. Kept cost, target and multiplier come to every log, as
    `budget/macs/kept` and so on. After the training `callback.budget.finish()` is the small network.

    Args:
        steps: optimizer steps of the whole run; as many as the trainer does if `None`.
        **budget: all else that `Budget` takes, `macs=0.3` for example.

    Attributes:
        budget: the `Budget`, once the training has begun.

    Raises:
        TypeError: when the trainer is made: its model is not gated.
        ValueError: when the trainer is made: it smooths the labels of a language model, or shards parameters.
    """

    def __init__(self, *, steps: int | None = None, **budget: Any) -> None:
        self.budget: Budget | None = None
        self._steps, self._options = steps, budget

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """Waits for a checkpoint: it is loaded before there is an optimizer."""
        gated = known["model"]
        if not isinstance(gated, Gated):
            raise TypeError(f"`model` must be gated, as in `Trainer(l0.attach(model, …))`, got {type(gated).__name__}")
        if args.label_smoothing_factor and type(gated.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # The trainer asks for the class by its name, and would compare each word with itself, not with the next.
            raise ValueError(
                "`label_smoothing_factor` must be 0 for a gated language model: labels would not be shifted"
            )
        if args.fsdp or args.deepspeed:
            raise ValueError("`fsdp` and `deepspeed` must be off: gates cannot be applied to sharded parameters yet")
        Carrier.of(gated)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """Drives the optimizer, and goes on where a checkpoint stopped: both are loaded by now."""
        if self.budget is not None:
            raise RuntimeError("a `BudgetCallback` must serve one training, got a second: make another one")
        carrier = Carrier.of(known["model"])
        budget = Budget(known["model"], steps=state.max_steps if self._steps is None else self._steps, **self._options)
        budget.drive(known["optimizer"])
        carrier.resume(budget, state.global_step > 0)
        carrier.begin(budget)
        self.budget = budget

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """Adds to the log what the budget has to say."""
        if self.budget is None or self.budget.phase == "finished" or "loss" not in known["logs"]:
            return
        metrics = {f"budget/{name}": value for name, value in self.budget.metrics().items()}
        known["logs"].update(metrics)
        state.log_history[-1].update(metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """Follows the trainer where it has gone back to its best checkpoint (`load_best_model_at_end`)."""
        assert self.budget is not None
        carrier = Carrier.of(known["model"])
        carrier.resume(self.budget, carrier.found is not None)
