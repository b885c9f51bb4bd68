"""A Llama of 1.1 billion parameters with gates on its feed-forward layers: seconds and memory of a training step
against those of the same model without gates.

python benchmarks/large_model.py --device cuda [--json FILE]
python benchmarks/large_model.py --small           # a tiny one, to try the script

Random weights and random words, bfloat16, activation checkpointing in every layer, AdamW. Gates multiply activations
(`apply="activations"`) and learn under a budget. Memory is the peak of a few steps of each model alone; times are those
of both models in turns, medians. Then the gated one settles and is compacted. Goals: at most 1.10 of the seconds and
1.05 of the memory. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import write
from torch import nn

import ellzero as l0
from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def feed_forward(graph: Graph) -> Sequence[Placement]:
    """Gates on the hidden units of feed-forward layers alone."""
    return [p for p in l0.shrinkable()(graph) if ".mlp." in p.name]


def made(device: torch.device, small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = SMALL if small else SIZES
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=320 if small else 32_000, use_cache=False)
    with device:
        model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> Callable[[], None]:
    """A step; the gradients of the weights are clipped, which are the same with gates and without."""
    weights = list((model.model if isinstance(model, l0.Gated) else model).parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return step


def synchronized(device: torch.device, step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(device: torch.device, step: Callable[[], None]) -> int:
    """Bytes at most in three steps, of which the first makes the optimizer's state."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        synchronized(device, step)
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, found = torch.device(args.device), dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 16) if args.small else (args.batch, args.length)
    words = torch.randint(0, 320 if args.small else 32_000, shape, generator=generator).to(device)
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def dense() -> Callable[[], None]:
        model: Any = made(device, args.small).train()
        model.gradient_checkpointing_enable(**checkpointing)
        return step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-5), words)

    step = dense()
    found["dense peak GiB"] = peak(device, step) / 2**30
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    model: Any = made(device, args.small)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    began = time.perf_counter()
    example = {"input_ids": words[:1, :16]}
    gated = l0.attach(model.eval(), example, where=feed_forward, apply="activations").train()
    found["attach s"] = time.perf_counter() - began
    model.gradient_checkpointing_enable(**checkpointing)
    budget = l0.Budget(gated, macs=0.6, steps=1000, shrink=False)
    optimizer = torch.optim.AdamW(gated.param_groups(lr=1e-5))
    budget.drive(optimizer)
    ours = step_of(gated, optimizer, words)
    found["gated peak GiB"] = peak(device, ours) / 2**30

    theirs, taken = dense(), dict[str, list[float]](dense=[], gated=[])
    synchronized(device, theirs)
    for _ in range(args.rounds):
        taken["dense"].append(synchronized(device, theirs))
        taken["gated"].append(synchronized(device, ours))
    found |= {f"{name} step s": statistics.median(seconds) for name, seconds in taken.items()}
    pairs = zip(taken["gated"], taken["dense"], strict=True)
    found["step, gated / dense"] = statistics.median(a / b for a, b in pairs)
    if device.type == "cuda":
        found["memory, gated / dense"] = found["gated peak GiB"] / found["dense peak GiB"]
    del theirs
    budget.settle(optimizer)
    began = time.perf_counter()
    small = budget.finish()
    found["compact s"] = time.perf_counter() - began
    found["parameters left"] = sum(p.numel() for p in small.parameters())
    found |= budget.metrics()
    for name, value in found.items():
        print(f"{name}: {value:,.3f}" if isinstance(value, float) else f"{name}: {value}")
    if args.json is not None:
        write(args.json, "large_model", found, vars(args), args.device)


if __name__ == "__main__":
    main()
