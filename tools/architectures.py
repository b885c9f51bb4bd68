"""Gates, closes and compacts Hugging Face architectures, made small and random, and says what came of each.

    python tools/architectures.py [--only Llama T5] [--json results/benchmarks/architectures.json]

Each gets a process of its own, which may take `--limit` seconds. LayerNorms lose their means where they can
(`l0.centred`), routers get shares (`l0.routed`), heads with slopes get numbers (`l0.numbered`), gates go on heads,
feed-forward layers, experts and streams, random units of each are closed, and the compact network is compared with the
gated one in float64: on other batches and lengths than the example's, and by the tokens that both generate with their
caches. "exact" is 1e-9 of the largest output, and the same tokens.
"""

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from provenance import write  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

import ellzero as l0  # noqa: E402
from support.oracles import set_gates, settled  # noqa: E402

Row = dict[str, Any]
ENDS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = SIZES | ENDS | {"max_position_embeddings": 32}
FEW_KEYS = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
ROUTED = FEW_KEYS | {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
EXPERTS = ROUTED | {"num_experts": 4, "moe_intermediate_size": 12}
LATENT = TEXT | {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 12, "experts_implementation": "batched_mm"}
SCAN = ENDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
NEO = {"attention_types": [[["global", "local"], 1]], "window_size": 4}
SHORT = ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 32}
BOTH = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH |= ENDS | {"d_model": 32, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 0}
BOTH |= {"max_position_embeddings": 32}
T5 = ENDS | {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 5}
STAGES = {"num_labels": 5, "depths": [1, 1], "image_size": 16, "patch_size": 2}
SOUND = SIZES | {"vocab_size": 12, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 4]}
SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4}
PAIR = {
    "projection_dim": 16,
    "text_config": TEXT | {"eos_token_id": 11},
    "vision_config": SIZES | {"image_size": 16, "patch_size": 4},
}


def small(kind: str, cls: str, base: Row, **more: Any) -> tuple[str, str, Row]:
    """What it reads, its class, and its configuration."""
    return kind, cls, base | more


# "text" reads words, a "decoder" goes on with them, "both" encodes and decodes.
ARCHITECTURES = {
    "BERT": small("text", "BertForMaskedLM", TEXT),
    "RoBERTa": small("text", "RobertaForMaskedLM", TEXT, max_position_embeddings=40),
    "DistilBERT": small(
        "text", "DistilBertForMaskedLM", ENDS, dim=32, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=32
    ),
    "ELECTRA": small("text", "ElectraForMaskedLM", TEXT, embedding_size=16),
    "ALBERT": small("text", "AlbertForMaskedLM", TEXT, embedding_size=16),
    "DeBERTa-v2": small("text", "DebertaV2ForMaskedLM", TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "MPNet": small("text", "MPNetForMaskedLM", TEXT),
    "ModernBERT": small("text", "ModernBertForMaskedLM", TEXT, cls_token_id=0, sep_token_id=0),
    "Longformer": small("text", "LongformerForMaskedLM", TEXT, attention_window=4),
    "XLNet": small("text", "XLNetLMHeadModel", ENDS, d_model=32, n_layer=2, n_head=4, d_inner=24),
    "GPT-2": small("decoder", "GPT2LMHeadModel", SHORT),
    "GPT-Neo": small("decoder", "GPTNeoForCausalLM", TEXT | NEO, num_layers=2, num_heads=4),
    "GPT-NeoX": small("decoder", "GPTNeoXForCausalLM", TEXT),
    "GPT-J": small("decoder", "GPTJForCausalLM", SHORT, rotary_dim=4),
    "CodeGen": small("decoder", "CodeGenForCausalLM", SHORT, n_head=8, rotary_dim=4),
    "OPT": small("decoder", "OPTForCausalLM", TEXT, ffn_dim=24, word_embed_proj_dim=32),
    "BLOOM": small("decoder", "BloomForCausalLM", ENDS, hidden_size=32, n_layer=2, n_head=4),
    "Falcon": small(
        "decoder", "FalconForCausalLM", TEXT, ffn_hidden_size=24, num_kv_heads=2, new_decoder_architecture=True
    ),
    "Falcon, ALiBi": small("decoder", "FalconForCausalLM", TEXT, ffn_hidden_size=24, alibi=True, multi_query=False),
    "MPT": small(
        "decoder", "MptForCausalLM", ENDS, d_model=32, n_layers=2, n_heads=4, expansion_ratio=1, max_seq_len=32
    ),
    "Llama": small("decoder", "LlamaForCausalLM", FEW_KEYS),
    "Mistral": small("decoder", "MistralForCausalLM", FEW_KEYS, sliding_window=4),
    "Qwen2": small("decoder", "Qwen2ForCausalLM", FEW_KEYS),
    "Qwen3": small("decoder", "Qwen3ForCausalLM", FEW_KEYS),
    "Gemma": small("decoder", "GemmaForCausalLM", FEW_KEYS),
    "Gemma 2": small("decoder", "Gemma2ForCausalLM", FEW_KEYS, sliding_window=4),
    "Phi": small("decoder", "PhiForCausalLM", TEXT),
    "Phi-3": small("decoder", "Phi3ForCausalLM", FEW_KEYS),
    "OLMo 2": small("decoder", "Olmo2ForCausalLM", FEW_KEYS),
    "StableLM": small("decoder", "StableLmForCausalLM", FEW_KEYS),
    "Cohere": small("decoder", "CohereForCausalLM", FEW_KEYS),
    "Cohere 2": small("decoder", "Cohere2ForCausalLM", FEW_KEYS, sliding_window=4),
    "GPTBigCode": small("decoder", "GPTBigCodeForCausalLM", SHORT, multi_query=True),
    "Gemma, one head of keys": small("decoder", "GemmaForCausalLM", FEW_KEYS | {"num_key_value_heads": 1}),
    "Mistral, one head of keys": small(
        "decoder", "MistralForCausalLM", FEW_KEYS | {"num_key_value_heads": 1}, sliding_window=4
    ),
    "StarCoder 2": small("decoder", "Starcoder2ForCausalLM", FEW_KEYS),
    "SmolLM 3": small("decoder", "SmolLM3ForCausalLM", FEW_KEYS),
    "Mixtral": small("decoder", "MixtralForCausalLM", ROUTED, num_local_experts=4),
    "Qwen2-MoE": small("decoder", "Qwen2MoeForCausalLM", EXPERTS, shared_expert_intermediate_size=24),
    "Qwen3-MoE": small("decoder", "Qwen3MoeForCausalLM", EXPERTS),
    "DeepSeek-V2": small("decoder", "DeepseekV2ForCausalLM", LATENT, q_lora_rank=None, first_k_dense_replace=2),
    "DeepSeek-V3": small("decoder", "DeepseekV3ForCausalLM", LATENT, q_lora_rank=16, first_k_dense_replace=1),
    "Mamba": small("decoder", "MambaForCausalLM", SCAN),
    "Mamba 2": small("decoder", "Mamba2ForCausalLM", SCAN, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "T5": small("both", "T5ForConditionalGeneration", T5),
    "T5, gated": small(
        "both", "T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "T5Gemma": small(
        "both",
        "T5GemmaForConditionalGeneration",
        {"vocab_size": 32, "encoder": FEW_KEYS, "decoder": FEW_KEYS | {"cross_attention_hidden_size": 32}},
    ),
    "BART": small("both", "BartForConditionalGeneration", BOTH),
    "mBART": small("both", "MBartForConditionalGeneration", BOTH),
    "Marian": small("both", "MarianMTModel", BOTH),
    "Pegasus": small("both", "PegasusForConditionalGeneration", BOTH),
    "ViT": small("image", "ViTForImageClassification", IMAGE),
    "DeiT": small("image", "DeiTForImageClassification", IMAGE),
    "BEiT": small("image", "BeitForImageClassification", IMAGE),
    "DINOv2": small("image", "Dinov2ForImageClassification", IMAGE, mlp_ratio=1),
    "Swin": small("image", "SwinForImageClassification", STAGES, embed_dim=16, num_heads=[2, 4], window_size=4),
    "ConvNeXt": small("image", "ConvNextForImageClassification", STAGES, hidden_sizes=[8, 16], num_stages=2),
    "ConvNeXt V2": small("image", "ConvNextV2ForImageClassification", STAGES, hidden_sizes=[8, 16], num_stages=2),
    "SegFormer": small(
        "image",
        "SegformerForImageClassification",
        {},
        num_labels=5,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        sr_ratios=[2, 1],
        num_attention_heads=[2, 4],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
    ),
    "Whisper": small(
        "speech",
        "WhisperForConditionalGeneration",
        BOTH,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "Wav2Vec2": small("sound", "Wav2Vec2ForCTC", SOUND, mask_time_prob=0.0),
    "HuBERT": small("sound", "HubertForCTC", SOUND, mask_time_prob=0.0),
    "CLIP": small("pair", "CLIPModel", PAIR),
    "SigLIP": small("pair", "SiglipModel", PAIR),
    "ViLT": small("pair", "ViltForMaskedLM", TEXT | {"image_size": 16, "patch_size": 4}),
}


def inputs(kind: str, batch: int, length: int) -> dict[str, Tensor]:
    """What a model of this kind is called with."""
    random = torch.Generator().manual_seed(batch)

    def words(n: int) -> Tensor:
        return torch.randint(2, 12, (batch, n), generator=random)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=random, dtype=torch.float64)

    match kind:
        case "both":
            return {"input_ids": words(length), "decoder_input_ids": words(length - 1)}
        case "image":
            return {"pixel_values": noise(3, 16, 16)}
        case "speech":
            return {"input_features": noise(8, 20), "decoder_input_ids": words(length)}
        case "sound":
            return {"input_values": noise(60 * length)}
        case "pair":
            return {"input_ids": words(length), "pixel_values": noise(3, 16, 16)}
    return {"input_ids": words(length)}


class Answer(nn.Module):
    """Gives out the answer alone, and not the stream that it was read from, as encoders and decoders do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        out = self.model(**given)
        return out.logits if "logits" in out else out.logits_per_image


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network, and how it is called but for its example."""
    kind, cls, options = ARCHITECTURES[name]
    Model = getattr(transformers, cls)
    model = settled(Answer(Model(Model.config_class(**options))))
    return model, {"use_cache": False} if kind in ("decoder", "both", "speech") else {}


class Fine(TorchFunctionMode):
    """Computes in float64 where a model would cast to float32, as norms do: rounding hides nothing then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def gated_share(gated: l0.Gated) -> float:
    """Of all weights, those that go if all gates close but the last of each axis."""
    graph = gated.graph
    free = np.repeat([a.frozen is None for a in graph.axes] + [False], [a.size for a in graph.axes] + [1])
    for served in graph.served:  # heads of keys go with their queries
        free[served.heads] = free[served.queries].all(1)
    gone = 0.0
    for name, p in gated.model.named_parameters():
        shares = [free[units].mean() for units in graph.units.get(name, {}).values()]
        gone += p.numel() * (1 - np.prod([1 - share for share in shares]))
    return float(gone / sum(p.numel() for p in gated.model.parameters()))


def judged(name: str) -> Row:
    """What came of one architecture."""
    kind = ARCHITECTURES[name][0]
    model, how = made(name)
    example = inputs(kind, 2, 5) | how
    row: Row = {"outcome": "refused"}
    try:
        model, row["centred"] = l0.centred(model, example), True
    except ValueError:
        row["centred"] = False
    for prepared in (l0.routed, l0.numbered):
        with suppress(ValueError):
            model = prepared(model, example)
    try:
        gated = l0.attach(model, example, where=l0.shrinkable(streams=True)).eval()
    except ValueError as error:
        return row | {"why": str(error)}
    row["gated"] = gated_share(gated)
    row["kinds"] = dict(Counter(a.kind for a in gated.axes if a.frozen is None))
    row["frozen"] = {a.name: a.frozen for a in gated.axes if a.frozen not in (None, "it is the model's output")}
    random = np.random.default_rng(0)
    closed = {n: random.permutation(g.shape.numel())[: g.shape.numel() // 2] for n, g in gated.named_gates()}
    set_gates(gated, {n: c.tolist() for n, c in closed.items()})
    try:
        small, folded = l0.compact(gated), l0.fold(gated)
    except Exception as error:
        return row | {"outcome": "failed", "why": str(error)}
    row["left"] = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in model.parameters())
    given = [inputs(kind, batch, length) | how for batch, length in ((2, 5), (3, 7), (1, 4))]
    with Fine():
        row["difference"] = max(difference(gated(**call), small(**call)) for call in given)
    wrong = row["difference"] > 1e-9
    if how:
        row["tokens"] = same_tokens(folded, small, kind)
        wrong = wrong or not row["tokens"]
    return row | {"outcome": "wrong" if wrong else "exact"}


@torch.no_grad()
def difference(a: Any, b: Any) -> float:
    """The largest, of the largest entry."""
    both = [(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True) if isinstance(x, Tensor)]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-4)) for x, y in both)


def same_tokens(a: nn.Module, b: nn.Module, kind: str) -> bool:
    prompt = {k: v for k, v in inputs(kind, 3, 4).items() if not k.startswith("decoder")}
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "use_cache": True, "pad_token_id": 1}
    tokens = [m.model.generate(**prompt, **options) for m in (a, b)]
    return torch.equal(*tokens)


def told(name: str, row: Mapping[str, Any]) -> str:
    what = f"{100 * row['gated']:.0f} % gated: " if "gated" in row else ""
    what += ", ".join(f"{n} {kind}" for kind, n in row.get("kinds", {}).items())
    return f"{name}: {row['outcome']}, {row['seconds']:.0f} s; {what} {row.get('why', '')}"[:400]


def _work(name: str, to: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        to.send(judged(name))
    except Exception as error:
        to.send({"outcome": "failed", "why": f"{type(error).__name__}: {error}"})


def apart(name: str, limit: float) -> Row:
    """What came of it, in a process of its own."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    worker, start = fork.Process(target=_work, args=(name, sender)), time.monotonic()
    worker.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(limit) else {"outcome": "hangs"}
    except EOFError:
        row = {"outcome": "failed", "why": "the process ended"}
    worker.kill()
    worker.join()
    return row | {"seconds": time.monotonic() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), help="which ones")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was found here too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = {}
    for name in options.only:
        rows[name] = apart(name, options.limit)
        print(told(name, rows[name]), flush=True)
    count = Counter(row["outcome"] for row in rows.values())
    print(", ".join(f"{n} {what}" for what, n in count.items()))
    if options.json:
        found = {"transformers": transformers.__version__, "architectures": rows}
        write(options.json, "architectures", found, {"limit": options.limit})
    return 1 if count["wrong"] + count["hangs"] + count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
