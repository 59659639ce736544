"""Every family that llama.cpp knows: written, computed alike there, and read again."""

import json

import pytest
import torch

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.interop.families import FAMILIES
from thinker.interop.families.tensors import to_their_tensors
from thinker.interop.gguf.export_gguf import export_gguf
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


ROWS_OF_256 = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
FOLDERS = {"gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3", "llama": "llama"}


@pytest.mark.parametrize("dtype", ["f32", "f16", "q4_k_m"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_a_sentencepiece_tokenizer_is_exported(tmp_path, name, dtype):
    """As published, and compared with llama.cpp: logits, ends of texts and tokens. Read back, the
    weights are those of the file, and its text is that of llama.cpp."""
    kinds = pytest.importorskip("tokenizer_kinds")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "folder"
    folder.mkdir()
    kind = kinds.build(FOLDERS[name], folder)
    config = json.loads((folder / "config.json").read_text())
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    n_ids = (max(vocab.values()) // 64 + 2) * 64
    model = model_of(name, **ROWS_OF_256, vocab_size=n_ids)
    values = CONFIGS[name][1] | ROWS_OF_256 | {"vocab_size": n_ids, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values | config))
    family = FAMILIES[kind.model_type]
    theirs = to_their_tensors(family, model.config, model_tensors(model))
    theirs = {key: tensor.contiguous() for key, tensor in theirs.items()}
    safetensors_torch.save_file(theirs, folder / "model.safetensors")

    out = tmp_path / "out.gguf"
    export = export_gguf(folder, out, dtype=dtype)
    tokenizer = load(folder)[1]
    again, its_tokenizer = load(out)
    assert config_differences(model.config, again.config) == []
    wanted = model_tensors(rounded_model(model, dtype))
    for key, tensor in model_tensors(again).items():
        if model.config.norm == "rmsnorm_one_plus" and tensor.dim() == 1:
            assert torch.equal(tensor + 1, wanted[key] + 1), key
        else:
            assert torch.equal(tensor, wanted[key]), key
    assert its_tokenizer.encode("Hi  you\n\n\n!") == tokenizer.encode("Hi  you\n\n\n!")

    llama_cpp = pytest.importorskip("llama_cpp")
    assert "1,000 texts tokenized identically" in export.compared[0]
    if dtype != "f32":
        return
    llama = llama_cpp.Llama(
        str(out), n_ctx=64, type_k=0, type_v=0, n_threads=1, verbose=False, logits_all=True
    )
    prompt = [*tokenizer.bos_prefix, *tokenizer.encode("def main():")]
    assert llama.tokenize(b"def main():", add_bos=bool(tokenizer.bos_prefix)) == prompt
    params = SamplingParams(max_new_tokens=24, temperature=0)
    ours = Generator(again, its_tokenizer).generate(["def main():"], params)[0]
    answer = []
    for number in llama.generate(prompt, temp=0):
        if number in tokenizer.eos_ids or len(answer) == 24:
            break
        answer.append(number)
    llama.close()
    assert tokenizer.decode(answer) == ours.text
