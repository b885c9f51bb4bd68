"""A budget in the Trainer of Hugging Face: trained for real, against a plain loop, stopped and resumed."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ellzero as l0

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found")]
WORDS = torch.randint(0, 30, (32, 8), generator=torch.Generator().manual_seed(1))
STEPS = 12


@pytest.fixture(autouse=True)
def _installed() -> None:
    """Here and in functions: who only collects tests need not import it, which takes seconds."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")


def bert() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=8, num_labels=2, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    """A language model with its head tied to its embedding."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=30, tie_word_embeddings=True, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """With a column that no model knows."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(WORDS)

    def __getitem__(self, i: int) -> dict[str, Any]:
        mask = torch.ones_like(WORDS[i])
        return {"input_ids": WORDS[i], "attention_mask": mask, "labels": self.labels[i], "source": i}


CLASSES, SHIFTED = Sentences((WORDS[:, 0] > 14).long()), Sentences(WORDS)


@functools.cache  # tracing takes a while
def traced(make: Callable[[], nn.Module]) -> l0.Gated:
    masked = {"attention_mask": torch.ones_like(WORDS[:2])} if make is bert else {}  # slower: it is exported
    return l0.attach(make(), {"input_ids": WORDS[:2], **masked})


def attached(make: Callable[[], nn.Module]) -> l0.Gated:
    return copy.deepcopy(traced(make))


def trainer(gated: l0.Gated, home: Path, data: Sentences, budget: dict[str, Any] | None = None, **options: Any) -> Any:
    import transformers

    from ellzero.integrations.transformers import BudgetCallback

    here = {"output_dir": str(home), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    loop = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "save_strategy": "no"}
    loop["optim"] = "adamw_torch"
    args = transformers.TrainingArguments(**{**here, **loop, "logging_steps": 2, **options})
    callback = BudgetCallback(**{"params": 0.75, "learning": 0.5, **(budget or {})})
    made = transformers.Trainer(gated, args, train_dataset=data, eval_dataset=data, callbacks=[callback])
    made.remove_callback(transformers.PrinterCallback)
    return made, callback


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def size(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def seeds_its_noise(gated: l0.Gated, batches: list[Any]) -> None:
    """The noise of the n-th forward in training is the same, whoever calls; what it was called with is kept."""

    def before(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        if gated.training:
            torch.manual_seed(len(batches))
            batches.append(given)

    gated.register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.parametrize(("make", "data"), [(bert, CLASSES), (llama, SHIFTED)], ids=["bert", "llama"])
def test_a_training_is_the_plain_loop(make: Any, data: Sentences, tmp_path: Path) -> None:
    gated, seen = attached(make), []
    seeds_its_noise(gated, seen)
    hf, callback = trainer(gated, tmp_path, data, gradient_accumulation_steps=2)
    assert hf.label_names == ["labels"]
    hf.train()
    assert (callback.budget.done, callback.budget.phase, callback.budget.masked) == (STEPS, "tuning", None)
    assert len(seen) == 2 * STEPS
    assert all("source" not in batch for batch in seen)

    other = attached(make)
    seeds_its_noise(other, [])
    budget = l0.Budget(other, params=0.75, learning=0.5, steps=STEPS)
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: max(0.0, (STEPS - step) / STEPS))
    budget.drive(adam)
    other.train()
    for step in range(STEPS):
        for batch in seen[2 * step : 2 * step + 2]:
            out = other(**batch)
            (out.loss if "num_items_in_batch" in batch else out.loss / 2).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        adam.step()
        schedule.step()
        other.zero_grad()

    small, plain = callback.budget.finish(), budget.finish()
    for (name, p), q in zip(small.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert type(small) is type(make())
    assert 0.7 * size(make()) < size(small) <= 0.75 * size(make())
    told = [line for line in hf.state.log_history if "budget/params/kept" in line]
    assert [line["step"] for line in told] == [2, 4, 6, 8, 10, 12]
    assert told[-1]["budget/params/kept"] == pytest.approx(size(small) / size(make()))
    assert told[0]["budget/params/target"] > told[-1]["budget/params/target"] == pytest.approx(0.75)


def test_a_language_model_counts_the_words_that_it_predicts(tmp_path: Path) -> None:
    """The trainer asks the model whether labels are shifted, and so how many there are in a batch."""
    seen: list[Any] = []
    gated = attached(llama)
    seeds_its_noise(gated, seen)
    trainer(gated, tmp_path, SHIFTED, max_steps=1, gradient_accumulation_steps=2)[0].train()
    assert [int(batch["num_items_in_batch"]) for batch in seen] == [16 * 7, 16 * 7]


@pytest.mark.parametrize(
    ("make", "data", "stop"), [(bert, CLASSES, 5), (llama, SHIFTED, 9)], ids=["learning", "tuning"]
)
def test_a_stopped_training_goes_on_bit_for_bit(make: Any, data: Sentences, stop: int, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": stop}
    hf, whole = trainer(attached(make), tmp_path, data, {"ema": 0.9}, **saving)
    hf.train()
    again, resumed = trainer(attached(make), tmp_path, data, {"ema": 0.9}, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert resumed.budget.done == STEPS
    assert resumed.budget.masked is whole.budget.masked is None
    assert same(resumed.budget.finish(), whole.budget.finish())


def test_evaluation_has_the_loss_and_the_best_checkpoint_is_handed_over(tmp_path: Path) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "eval_delay": 13}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    hf, callback = trainer(attached(bert), tmp_path, CLASSES, {"ema": 0.5}, max_steps=24, **often, **best)
    hf.train()
    at = hf.state.best_global_step
    assert at in (16, 20)  # the largest loss, to be sure that it is not the last
    written = safetensors.torch.load_file(tmp_path / f"checkpoint-{at}" / "model.safetensors")
    state = torch.load(io.BytesIO(written["budget"].numpy().tobytes()))
    assert torch.equal(callback.budget.finish().classifier.weight, state["average"]["module.classifier.weight"])
    assert "eval_loss" in hf.evaluate()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 9}
    trainer(attached(bert), tmp_path, CLASSES, **saving)[0].train()
    checkpoint = str(tmp_path / "checkpoint-9")
    with pytest.raises(ValueError, match="`state_dict` is of another network"):
        trainer(attached(llama), tmp_path, SHIFTED)[0].train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"whose `bounds` is \{'params': 0.75\}, not \{'macs': 0.9\}"):
        trainer(attached(bert), tmp_path, CLASSES, {"macs": 0.9, "params": None})[0].train(
            resume_from_checkpoint=checkpoint
        )
    gated = attached(bert)
    safetensors.torch.save_file(gated.state_dict(), Path(checkpoint) / "model.safetensors")
    with pytest.raises(ValueError, match="must have the budget's state, got one without"):
        trainer(gated, tmp_path, CLASSES)[0].train(resume_from_checkpoint=checkpoint)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`model` must be gated, as in `Trainer"):
        trainer(bert(), tmp_path, CLASSES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`label_smoothing_factor` must be 0 for a gated language model"):
        trainer(attached(llama), tmp_path, SHIFTED, label_smoothing_factor=0.1)
    hf, _ = trainer(attached(bert), tmp_path, CLASSES, max_steps=2)
    hf.train()
    with pytest.raises(RuntimeError, match="must serve one training, got a second"):
        hf.train()


def test_mixed_precision_trains_within_the_budget(tmp_path: Path) -> None:
    hf, callback = trainer(attached(bert), tmp_path, CLASSES, bf16=True)
    hf.train()
    assert size(callback.budget.finish()) <= 0.75 * size(bert())


def test_no_steps_are_refused_and_not_taken_for_those_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`steps` must be a positive integer, got 0"):
        trainer(attached(llama), tmp_path, SHIFTED, {"steps": 0})[0].train()
