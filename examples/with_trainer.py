"""A budget in the Trainer of Hugging Face: a gated model, and one more callback. Seconds on a CPU; no download. Needs
`pip install "ellzero[transformers]"`.

python examples/with_trainer.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ellzero as l0
from ellzero.integrations.transformers import BudgetCallback, from_pretrained, save_pretrained


def sentences() -> list[dict[str, Any]]:
    """Is the first word among the larger ones?"""
    words = torch.randint(0, 100, (256, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": w, "attention_mask": torch.ones_like(w), "labels": int(w[0] > 49)} for w in words]


def main(epochs: int = 4, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, num_labels=2, **sizes))
    data = sentences()
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=epochs, learning_rate=2e-3, report_to=[], **options
    )
    # begin: trainer
    example = {name: torch.stack([data[0][name], data[1][name]]) for name in ("input_ids", "attention_mask")}
    gated = l0.attach(model, example)
    callback = BudgetCallback(params=0.7)
    trainer = Trainer(gated, args, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()  # or train(resume_from_checkpoint=True): goes on, budget and all
    print(callback.budget, trainer.evaluate()["eval_loss"])
    small = callback.budget.finish()  # a BertForSequenceClassification again
    # end: trainer
    folder = Path(tempfile.mkdtemp(), "small")
    # begin: folder
    stock = save_pretrained(small, folder)  # whether the stock class loads it: BertForSequenceClassification
    again = from_pretrained(folder)  # loads it in any case
    # end: folder
    print(f"saved as a {type(again).__name__}, which the stock class {'loads' if stock else 'cannot build'}")
    print(f"{sum(p.numel() for p in small.parameters())} parameters")
    return small


if __name__ == "__main__":
    main(logging_steps=16, save_strategy="no")
