"""Folders of Hugging Face: small networks, cut by hand, come back from them as they were, or nothing is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ellzero as l0

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found")]
IDS = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
ENDS = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Here and in functions: who only collects tests need not import it, which takes seconds."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()


def narrow(network: nn.Module, **widths: tuple[int, int]) -> None:
    """Keeps the first entries of a dimension of the weights of layers, and of biases with the weights' first."""
    from ellzero.graph.resizing import resize

    for name, (dim, size) in widths.items():
        layer = network.get_submodule(name.replace("__", "."))
        layer.weight = nn.Parameter(layer.weight.detach().narrow(dim, 0, size).clone())
        outputs = 1 if type(layer).__name__ == "Conv1D" else 0
        if dim == outputs and layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach()[:size].clone())
        resize(layer)


def decoder(
    kind: str, hidden: Sequence[int], kept: Sequence[int] = (2, 2), *, kv: int = 2, **more: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Two layers with so many hidden units and groups of heads."""
    import transformers

    torch.manual_seed(0)
    heads = {"num_key_value_heads": kv, "head_dim": 4, "max_position_embeddings": 32}
    said = {**SIZES, **ENDS, **heads, **more}
    config = getattr(transformers, f"{kind}Config")(
        **{name: value for name, value in said.items() if value is not None}
    )
    network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for layer, units, groups in zip(network.model.layers, hidden, kept, strict=True):
        narrow(layer, mlp__gate_proj=(0, units), mlp__up_proj=(0, units), mlp__down_proj=(1, units))
        queries = 4 * groups * 4 // kv
        narrow(layer, self_attn__q_proj=(0, queries), self_attn__o_proj=(1, queries))
        narrow(layer, self_attn__k_proj=(0, 4 * groups), self_attn__v_proj=(0, 4 * groups))
    return network, {"input_ids": IDS}


def gpt2(hidden: Sequence[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **ENDS)
    network = transformers.GPT2LMHeadModel(config).eval()
    for layer, units in zip(network.transformer.h, hidden, strict=True):
        narrow(layer, mlp__c_fc=(1, units), mlp__c_proj=(0, units))
    return network, {"input_ids": IDS}


def bert(hidden: Sequence[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    network = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, vocab_size=30)).eval()
    for layer, units in zip(network.bert.encoder.layer, hidden, strict=True):
        narrow(layer, intermediate__dense=(0, units), output__dense=(1, units))
    return network, {"input_ids": IDS}


def vit(hidden: Sequence[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    network = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)).eval()
    for layer, units in zip(network.vit.layers, hidden, strict=True):
        narrow(layer, mlp__fc1=(0, units), mlp__fc2=(1, units))
    return network, {"pixel_values": torch.randn(2, 3, 8, 8)}


def stream() -> tuple[nn.Module, dict[str, Tensor]]:
    """Of a narrower stream, made narrow, with the configuration of a wider one."""
    import transformers

    heads = {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32, "intermediate_size": 12}
    narrower = {"hidden_size": 12, "rms_norm_eps": 2e-6}
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **ENDS, **heads, **narrower})).eval()
    small.config = transformers.LlamaConfig(**{**SIZES, **ENDS, **heads, "intermediate_size": 32})
    return small, {"input_ids": IDS}


def same(one: nn.Module, other: nn.Module, inputs: dict[str, Tensor]) -> bool:
    with torch.no_grad():
        return torch.equal(one(**inputs).logits, other(**inputs).logits)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: decoder("Llama", (12, 12), (1, 1)), {"num_attention_heads": 2, "num_key_value_heads": 1}),
        (lambda: decoder("Qwen3", (12, 12), (3, 3), kv=4), {"num_attention_heads": 3, "num_key_value_heads": 3}),
        (lambda: decoder("Qwen2", (12, 12), (1, 1), head_dim=None), {"num_attention_heads": 2, "head_dim": 4}),
        (stream, {"hidden_size": 12, "rms_norm_eps": 2e-6, "num_attention_heads": 4}),
        (lambda: gpt2((12, 12)), {"n_inner": 12, "n_head": 2}),
        (lambda: bert((12, 12)), {"num_attention_heads": 4}),
        (lambda: vit((12, 12)), {"num_attention_heads": 4}),
    ],
    ids=["llama", "qwen3", "qwen2", "stream", "gpt2", "bert", "vit"],
)
def test_the_stock_class_loads_what_the_configuration_can_say(make: Any, said: Any, tmp_path: Path) -> None:
    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    small, inputs = make()
    before = small.config.to_dict()
    assert save_pretrained(small, tmp_path / "small", example_inputs=inputs)
    assert small.config.to_dict() == before
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config.get("intermediate_size", 12) == 12
    assert {name: config[name] for name in said} == said
    assert same(type(small).from_pretrained(tmp_path / "small"), small, inputs)
    again = from_pretrained(tmp_path / "small")
    assert type(again) is type(small)
    assert same(again, small, inputs)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: decoder("Llama", (12, 8)), {"0": {"intermediate_size": 12}, "1": {"intermediate_size": 8}}),
        # Its configuration refuses numbers of heads that do not divide the width, and per layer.
        (lambda: decoder("Llama", (12, 12), (3, 3), kv=4), None),
        (
            lambda: decoder("Qwen3", (12, 32), (2, 1), tie_word_embeddings=True),
            {"0": {"intermediate_size": 12}, "1": {"num_attention_heads": 2, "num_key_value_heads": 1}},
        ),
    ],
    ids=["llama", "three-heads", "qwen3"],
)
def test_other_networks_come_back_by_our_loader_alone(make: Any, said: Any, tmp_path: Path) -> None:
    import transformers

    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    small, inputs = make()
    small = small.to(torch.bfloat16)
    small.generation_config.max_new_tokens = 7
    (tmp_path / "tokenizer.json").touch()  # is the user's
    assert not save_pretrained(small, tmp_path)
    again = from_pretrained(tmp_path)
    assert same(again, small, inputs)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == small.config.tie_word_embeddings
    tokens = small.generate(IDS, do_sample=False)
    assert tokens.shape[1] > IDS.shape[1]
    assert torch.equal(again.generate(IDS, do_sample=False), tokens)
    assert json.loads((tmp_path / "config.json").read_text()).get("per_layer_config") == said
    for kind in (type(small), transformers.AutoModelForCausalLM):
        for loose in (False, True):  # with True, the stock class would make new layers for those that do not fit
            with pytest.raises(OSError, match=r"no file named model\.safetensors"):
                kind.from_pretrained(tmp_path, ignore_mismatched_sizes=loose)
    assert "from ellzero.integrations.transformers import from_pretrained" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2", "Bloom", "ConvNextV2"])
def test_what_was_centred_or_numbered_comes_back(kind: str, tmp_path: Path) -> None:
    """The stock class makes LayerNorms, attention with all its slopes, response norms with an eps in their code."""
    import transformers

    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 4, "use_cache": False} | ENDS
    if kind == "GPT2":
        del sizes["pad_token_id"]  # it would look for it in the words, and be exported, which takes seconds
    if kind == "ConvNextV2":
        config = transformers.ConvNextV2Config(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, patch_size=2)
        model, example = (
            transformers.ConvNextV2ForImageClassification(config),
            {"pixel_values": torch.randn(2, 3, 8, 8)},
        )
    else:
        config = getattr(transformers, f"{kind}Config")(
            **sizes, **{"GPT2": {"n_embd": 16}, "Bloom": {"hidden_size": 16}}[kind]
        )
        model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else "BloomForCausalLM")(config)
        example = {"input_ids": IDS}
    prepared = (l0.numbered if kind == "Bloom" else l0.centred)(model.eval(), example)
    gated = l0.attach(prepared, example, where=l0.shrinkable(streams=kind == "GPT2")).eval()
    for _, gate in gated.named_gates():
        gate.close_(torch.arange(gate.shape.numel()) % 3 == 1)
    small = l0.compact(gated)
    assert not save_pretrained(small, tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert same(again, small, example)
    if kind != "ConvNextV2":
        assert torch.equal(
            *(m.generate(IDS, do_sample=False, max_new_tokens=4, pad_token_id=0) for m in (small, again))
        )


def test_what_compact_returns_is_compared_on_inputs_like_the_example(tmp_path: Path) -> None:
    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    gated = l0.attach(vit((32, 32))[0], {"pixel_values": torch.randn(2, 3, 8, 8)})
    for name, gate in gated.named_gates():
        closed = torch.zeros(gate.shape, dtype=torch.bool)
        closed[: 20 if "mlp" in name else 1] = "layers.0" in name
        gate.close_(closed)
    small = l0.compact(gated)
    assert not save_pretrained(small, tmp_path)  # without an example: `dummy_inputs` are words
    inputs = {"pixel_values": torch.randn(3, 3, 8, 8)}
    again = from_pretrained(tmp_path)
    assert same(again, small.eval(), inputs)
    layers = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    assert layers == {"0": {"intermediate_size": 12, "num_attention_heads": 3, "head_dim": 4}, "1": {"head_dim": 4}}
    with torch.no_grad():
        assert (again(**inputs).logits - gated.eval()(**inputs).logits).abs().max() < 1e-6


def test_a_uniform_budget_ends_in_the_stock_class(tmp_path: Path) -> None:
    from ellzero.integrations.transformers import save_pretrained

    network, inputs = decoder("Llama", (64, 64), intermediate_size=64, use_cache=False, tie_word_embeddings=True)
    gated = l0.attach(network.train(), inputs)
    budget = l0.Budget(gated, params={"*mlp*": 0.5, "*self_attn*": 0.6}, steps=6, uniform="blocks")
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for _ in range(6):
        gated(**inputs, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    small = budget.finish()
    assert save_pretrained(small, tmp_path)
    again = type(small).from_pretrained(tmp_path)
    config = again.config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (32, 2, 1)
    assert same(again, small.eval(), {"input_ids": IDS[:, :5]})
    assert torch.equal(again.generate(IDS, max_length=14), small.generate(IDS, max_length=14))


def damaged(file: Path) -> None:
    """Changes one number."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_a_damaged_weight_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from ellzero.integrations import pretrained

    small, _ = decoder("Llama", (12, 8))
    pretrained.save_pretrained(small, tmp_path / "own")
    damaged(tmp_path / "own" / pretrained.WEIGHTS)
    with pytest.raises(ValueError, match="its checksum is wrong"):
        pretrained.from_pretrained(tmp_path / "own")

    right = pretrained.save
    monkeypatch.setattr(pretrained, "save", lambda *a: (right(*a), damaged(a[1])))
    with pytest.raises(RuntimeError, match=r"does not come back the same, and is removed: .*checksum is wrong"):
        pretrained.save_pretrained(small, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]

    def writes_wrong(self: Any, folder: Path) -> None:
        write(self, folder)
        damaged(folder / "model.safetensors")

    write = transformers.PreTrainedModel.save_pretrained
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", writes_wrong)
    with pytest.raises(RuntimeError, match="does not come back the same"):
        pretrained.save_pretrained(decoder("Llama", (12, 12))[0], tmp_path / "new")
    monkeypatch.setattr(pretrained, "save", right)
    assert not pretrained.save_pretrained(decoder("Llama", (12, 12))[0], tmp_path / "new")  # what works is left


def test_outputs_decide_where_tensors_are_the_same(tmp_path: Path) -> None:
    """A number that is neither in the configuration nor in a tensor would be lost."""
    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    small, inputs = decoder("Llama", (12, 12))
    small.model.layers[1].self_attn.scaling = 5.0
    with pytest.raises(RuntimeError, match="does not come back the same, and is removed: its outputs are others"):
        save_pretrained(small.train(), tmp_path / "small")
    assert list(tmp_path.iterdir()) == []
    assert all(module.training for module in small.modules())

    small, inputs = decoder("Llama", (12, 12))
    small.model.norm.variance_epsilon = (
        0.1  # as of a norm that got narrower: our file has it, the configuration has not
    )
    assert not save_pretrained(small, tmp_path / "small")
    assert same(from_pretrained(tmp_path / "small"), small, inputs)


def test_mistakes_are_told(tmp_path: Path) -> None:
    from ellzero.integrations.transformers import from_pretrained, save_pretrained

    small, _ = decoder("Llama", (12, 12))
    with pytest.raises(TypeError, match=r"`small` must be a `PreTrainedModel`, got Linear; `l0.save` takes any module"):
        save_pretrained(nn.Linear(2, 2), tmp_path)
    with pytest.raises(TypeError, match="`small` has gates still; compact it first"):
        save_pretrained(l0.attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(1, 2)), tmp_path)
    with pytest.raises(
        ValueError, match="`example_inputs` must be what `small` runs on, got ValueError: You must specify"
    ):
        save_pretrained(small, tmp_path, example_inputs={"pixels": IDS})
    with pytest.raises(FileNotFoundError, match="`folder` must be one that `save_pretrained` wrote"):
        from_pretrained(tmp_path)
    safetensors.torch.save_file({"old": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"`folder` must hold no network yet, got .* with model.safetensors"):
        save_pretrained(small, tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Mine"]}')
    with pytest.raises(ValueError, match=r"`model_class` must be given for a network that is not of .* got a `Mine`"):
        from_pretrained(tmp_path)
