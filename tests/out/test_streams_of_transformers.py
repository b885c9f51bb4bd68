"""Streams of Hugging Face's transformers, through the RMSNorms that they write out and through centred LayerNorms.

Their norms cast to float32, so that they agree to its rounding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph
from support.oracles import assert_same, counted_macs, numel, set_gates, settled
from support.prenorm import masked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:with a batch of 1")]  # importing it takes seconds

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12}
ENDS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
WORDS = ENDS | {"pad_token_id": 0}  # GPT-2 would look for it in the words, and be exported, which takes seconds
LLAMA = SIZES | WORDS | {"num_key_value_heads": 2, "head_dim": 4, "use_cache": False}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 4, "use_cache": False} | WORDS
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_inner": 12, "use_cache": False} | ENDS
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", LLAMA),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", LLAMA),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "ViT": ("ViTForImageClassification", "ViTConfig", SIZES | {"image_size": 8, "patch_size": 4}),
}
CENTRED = ("GPT2", "ViT")


class Logits(nn.Module):
    """T5 gives the encoder's stream out beside its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        names = ["input_ids", "decoder_input_ids"] if len(args) > 1 else [self.model.main_input_name]
        out = self.model(**dict(zip(names, args, strict=True)))
        return out.logits


def stream_alone(graph: Graph) -> list[Placement]:
    streams = {axis.name for axis in graph.axes if axis.stream}
    return [p for p in l0.shrinkable(streams=True)(graph) if p.name in streams]


def made(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A model, an example, and inputs of another size."""
    transformers = pytest.importorskip("transformers")
    name, config, settings = MODELS[kind]
    torch.manual_seed(0)
    model = settled(Logits(getattr(transformers, name)(getattr(transformers, config)(**settings))))
    if kind == "ViT":
        return model, (torch.randn(2, 3, 8, 8).double(),), (torch.randn(3, 3, 8, 8).double(),)
    words = [torch.randint(20, (b, t)) for b, t in ((2, 5), (2, 3), (3, 7), (3, 4))]
    return model, tuple(words[:2][: 1 + (kind == "T5")]), tuple(words[2:][: 1 + (kind == "T5")])


@pytest.mark.parametrize("kind", MODELS)
def test_their_streams_shrink(kind: str) -> None:
    model, example, others = made(kind)
    if kind in CENTRED:
        model, dense = l0.centred(model, example), model
        assert_same(model(*others), dense(*others))
        assert kind == "ViT" or not model.model.config.tie_word_embeddings
    gated = l0.attach(model, example, where=stream_alone).eval()
    ((stream, gate),) = gated.named_gates()
    assert gate.shape == (16,)
    z = set_gates(gated, {stream: [0, 3, 4, 7, 9, 15]})[stream]
    small = l0.compact(gated)
    norms = {path: None for path, m in model.named_modules() if "Norm" in type(m).__name__ and m.weight.shape == (16,)}
    norms |= {path: f"{path}.bias" for path, m in model.named_modules() if type(m).__name__ == "RootMeanSquare"}
    if kind in ("Llama, tied", "Gemma", "T5"):
        norms["model.lm_head"] = None
    theirs = masked(model, z, norms)(*others)
    assert_same(gated(*others), theirs, 1e-5)
    assert_same(small(*others), theirs, 1e-5)
    assert float(l0.params(gated, kept=True)) == numel(small) < numel(model)
    assert float(l0.macs(gated, kept=True)) == pytest.approx(counted_macs(small, example) / 2, rel=1e-12)


@pytest.mark.parametrize("kind", ["Qwen2", "GPT2"])
def test_streams_heads_and_layers_go_together(kind: str) -> None:
    model, example, others = made(kind)
    model = l0.centred(model, example) if kind in CENTRED else model
    gated = l0.attach(model, example, where=l0.shrinkable(streams=True)).eval()
    assert sorted(gate.shape.numel() for _, gate in gated.named_gates()) == [4, 12, 16]
    set_gates(gated, {name: range(1, gate.shape.numel(), 2) for name, gate in gated.named_gates()})
    small = l0.compact(gated)
    assert_same(small(*others), gated(*others), 1e-5)
    assert float(l0.params(gated, kept=True)) == numel(small)
    assert float(l0.macs(gated, kept=True)) == pytest.approx(counted_macs(small, example) / 2, rel=1e-12)
