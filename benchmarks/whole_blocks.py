"""Which branches of Hugging Face's architectures can go as a whole, and whether the network without some is the same.

    python benchmarks/whole_blocks.py [NAME ...]

Small networks from random configurations. Half of the blocks are closed, and some units. The compact network is
compared with the gated one on other words, or images, than the example's, in float64; in float32 where experts are
routed.
Prints for each how many blocks it has, how many are closed, the largest difference, and parameters counted and there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import ellzero as l0

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {**SIZES, "vocab_size": 50}
FEW = {"num_key_value_heads": 2}
OLD = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WORDS, **FEW)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**WORDS, **FEW)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**WORDS, **FEW, head_dim=4)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**WORDS)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**WORDS)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**WORDS, **FEW, head_dim=4)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**OLD, n_positions=32)),
    "gpt-j": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**OLD, rotary_dim=4)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**{k: v for k, v in WORDS.items() if k != "intermediate_size"}, ffn_dim=24, word_embed_proj_dim=16)
    ),
    "bert": lambda: hf.BertModel(hf.BertConfig(**WORDS)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**WORDS, **FEW, num_local_experts=4)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**WORDS, **FEW, head_dim=4, num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2)
    ),
}
ROUTED = ("mixtral", "qwen3-moe")


def inputs(name: str, batch: int, length: int) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, dtype=torch.float64)}
    told = {} if name == "bert" else {"use_cache": False}
    return {"input_ids": torch.randint(3, 50, (batch, length)), **told}


def judged(name: str) -> dict[str, Any]:
    """One architecture: its blocks, and what came of closing some of them."""
    torch.manual_seed(0)
    model = MAKERS[name]().eval()
    model = model if name in ROUTED else model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    gated = l0.attach(model, inputs(name, 2, 6), where=l0.shrinkable(blocks=True)).eval()
    for placement, (_, gate) in zip(gated.placements, gated.named_gates(), strict=True):
        whole = placement.block is not None
        gate.close_(torch.rand(gate.shape) < 0.3 if not whole else torch.tensor([placement.block % 2 == 0]))  # type: ignore[operator]
    small, others = l0.compact(gated), inputs(name, 3, 9)
    with torch.no_grad():
        made: list[Tensor] = [m(**others)[0] for m in (gated, small)]
    return {
        "blocks": len(gated.graph.blocks),
        "closed": len(gated.plan().blocks),
        "difference": float((made[0] - made[1]).abs().max()),
        "counted": int(l0.params(gated, kept=True)),
        "there": sum(p.numel() for p in small.parameters()),
    }


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    for name in names or MAKERS:
        print(name, *(f"{key} {value:g}" for key, value in judged(name).items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
