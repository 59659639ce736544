"""Every family that llama.cpp knows: written, computed alike there, and read again."""

import pytest
import torch

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.gguf.gguf_families import TABLE
from thinker.interop.gguf.gguf_quantization import rounded_model
from thinker.interop.gguf.verify_gguf import verify_gguf
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.interop.hf_config import config_differences, from_hf_config
from thinker.model import Thinker

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_thread")

BYTE = make_tokenizer("byte", [])
SIZES = {
    "vocab_size": BYTE.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ONE_HEAD_PER_KV = {"num_key_value_heads": 4}
WIDE_HEADS = {"head_dim": 32}
GEMMA = WIDE_HEADS | {"query_pre_attn_scalar": 32}
NO_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": BYTE.vocab_size, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
CONFIGS = {
    "llama": ("llama", SIZES | WIDE_HEADS),
    "llama with biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIZES | WIDE_HEADS),
    "smollm3": ("smollm3", SIZES | {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        SIZES
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.125,
        },
    ),
    "phi3": ("phi3", SIZES | {"partial_rotary_factor": 0.5}),
    "gemma": ("gemma", SIZES | WIDE_HEADS),
    "gemma2": ("gemma2", SIZES | GEMMA | {"sliding_window": 16}),
    "gemma3": ("gemma3_text", SIZES | GEMMA | {"sliding_window": 16, "num_hidden_layers": 7}),
    "gemma3 scaled": (
        "gemma3_text",
        SIZES
        | GEMMA
        | {
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "olmo": ("olmo", SIZES),
    "olmo2": ("olmo2", SIZES),
    "olmo3": ("olmo3", SIZES | {"sliding_window": 16, "num_hidden_layers": 5}),
    "stablelm": ("stablelm", SIZES | {"use_qkv_bias": True}),
    "stablelm parallel": (
        "stablelm",
        SIZES | {"use_parallel_residual": True, "qk_layernorm": True},
    ),
    "cohere": ("cohere", SIZES),
    "cohere scaled": ("cohere", SIZES | {"logit_scale": 0.25}),
    "starcoder2": ("starcoder2", SIZES),
    "phi": ("phi", SIZES | {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 narrow": ("gpt2", GPT2 | {"n_inner": 96, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", NO_HEADS),
    "gpt_neox serial": ("gpt_neox", NO_HEADS | {"use_parallel_residual": False, "rotary_pct": 1.0}),
}


def model_of(name, **changes):
    """A model with weights for which every part counts."""
    model_type, values = CONFIGS[name]
    config = from_hf_config({"model_type": model_type, **values, **changes})
    torch.manual_seed(0)
    model = Thinker(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter += 0.3 * torch.randn_like(parameter)
            else:  # without zeros, which hide what is before them
                parameter.copy_(1.5 * torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    return model


def test_every_architecture_has_a_model():
    assert {model_type for model_type, _ in CONFIGS.values()} == {row.model_type for row in TABLE}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_k_m"])
def test_what_is_written_is_read(tmp_path, name, dtype):
    model = model_of(name)
    write_gguf(model, BYTE, tmp_path / "model.gguf", dtype)
    again, tokenizer = load(tmp_path / "model.gguf")
    assert config_differences(model.config, again.config) == []
    assert tokenizer.encode("Hello") == BYTE.encode("Hello")
    wanted = model_tensors(rounded_model(model, dtype))
    found = model_tensors(again)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if model.config.norm == "rmsnorm_one_plus" and tensor.dim() == 1:
            # A file has the sum, which is what counts.
            assert torch.equal(found[key] + 1, tensor + 1), key
        else:
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_llama_cpp_computes_the_same(tmp_path, name, dtype):
    pytest.importorskip("llama_cpp")
    model = model_of(name)
    write_gguf(model, BYTE, tmp_path / "model.gguf", dtype)
    summary = verify_gguf(model, BYTE, tmp_path / "model.gguf", dtype, n_texts=10)
    assert "of those of the same weights" in summary
