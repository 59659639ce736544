"""GGUF files: read back bit for bit, and computed alike by llama.cpp where that is installed."""

import json

import numpy as np
import pytest
import regex
import torch
from conftest import ROOT, random_model
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2, merges_of
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop.gguf.gguf_quantization import DTYPES, FALLBACKS, quantize, rounded_model
from thinker.interop.gguf.verify_gguf import check_ends, verify_gguf
from thinker.interop.gguf.write_gguf import LLAMA3, TIKTOKEN_GPT2, write_gguf
from thinker.runtime.errors import RunError, UserError

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLE = (ROOT / "README.md").read_text(encoding="utf-8")
BPE = make_tokenizer(
    "bpe:500", [SAMPLE, "1000 2026\n" * 200]
)  # with numbers, which qwen2 splits into digits
FORMS = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "llama-tied-mqa": {"qk_norm": False, "tie_embeddings": True, "n_kv_heads": 1},
    "qwen2": {"qk_norm": False, "attention_bias": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {
        "qk_norm": False,
        "rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_seq_len": 16},
    },
}


def other_split(pattern):
    tokens = [BPE.token_bytes(i) or None for i in range(BPE.vocab_size)]
    return Tokenizer("hf", tokens, {"<|bos|>": BPE.bos_id}, pattern=pattern)


TOKENIZERS = {
    "byte": make_tokenizer("byte", []),
    "bpe": BPE,
    "gpt2": other_split(GPT2),
    "llama3": other_split(LLAMA3),
}
TOKENIZERS["tiktoken-gpt2"] = other_split(TIKTOKEN_GPT2)
TOKENIZERS["qwen2"] = other_split(LLAMA3.replace("{1,3}", ""))


@given(
    st.text(
        st.one_of(
            st.sampled_from("aZé1٣½ '\t\r\n\u00a0\u3000.!st"),
            st.characters(exclude_categories=["Cs"]),
        )
    )
)
def test_tiktoken_gpt2_splits_as_gpt2(text):
    assert openai_public.r50k_pat_str == TIKTOKEN_GPT2
    assert regex.findall(TIKTOKEN_GPT2, text) == regex.findall(GPT2, text)


def check_rounded_weights(tensors, rounded):
    """The rounded model has the weights of a file, which are close to those of the original."""
    found = {
        name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name, tensor in tensors.items()
    }
    block, is_llama = (
        rounded.blocks[1],
        not (rounded.config.qk_norm or rounded.config.attention_bias),
    )
    same = {
        "ffn_up": block.mlp.up_proj,
        "attn_v": block.attention.v_proj,
        "attn_q": block.attention.q_proj,
    }
    for name, layer in same.items():
        weight = layer.weight.detach()
        if name == "attn_q" and is_llama:  # llama.cpp rotates neighbors
            weight = weight.view(4, 2, -1, 64).transpose(1, 2).reshape(weight.shape)
        assert np.array_equal(found[f"blk.1.{name}.weight"], weight.numpy())
    assert np.array_equal(found["token_embd.weight"], rounded.embedding.weight.detach().numpy())
    assert np.array_equal(found["output_norm.weight"], rounded.norm.weight.detach().numpy())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tmp_path, form, dtype):
    model = random_model(vocab_size=BPE.vocab_size + 2, d_model=64, d_ff=80, **FORMS[form])
    path = tmp_path / "model.gguf"
    write_gguf(model, BPE, path, dtype)
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    down = tensors["blk.1.ffn_down.weight"].data
    assert down.dtype == {"f32": np.float32}.get(
        dtype, np.float16
    )  # its rows of 80 do not divide into blocks of 32
    assert np.array_equal(
        down, model.blocks[1].mlp.down_proj.weight.detach().numpy().astype(down.dtype)
    )
    up = FALLBACKS.get(dtype.removesuffix("_m"), dtype)  # rows of 64, not 256
    assert tensors["blk.1.ffn_up.weight"].tensor_type.name == up.upper()
    check_rounded_weights(tensors, rounded_model(model, dtype))
    assert tensors["output_norm.weight"].data.dtype == np.float32
    assert ("output.weight" in tensors) == (not model.config.tie_embeddings)
    assert ("rope_freqs.weight" in tensors) == (form == "llama3")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = fields["general.architecture"]
    assert family == {"llama-tied-mqa": "llama", "linear": "qwen3", "llama3": "llama"}.get(
        form, form
    )
    assert fields[f"{family}.attention.head_count_kv"] == model.config.n_kv_heads
    file_type = gguf.LlamaFileType(fields["general.file_type"]).name
    assert file_type == {"f32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype.upper()}")
    assert fields["tokenizer.ggml.bos_token_id"] == BPE.bos_id
    assert len(fields["tokenizer.ggml.tokens"]) == BPE.vocab_size + 2
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges_of(BPE)]
    assert fields["tokenizer.ggml.add_bos_token"] is True


def with_ends(ends):
    """Bytes and five special tokens, of which `ends` are EOS tokens."""
    names = ["<|bos|>", "<|answer_end|>", "<|message_end|>", "<|endoftext|>", "<|last|>"]
    special = {name: 256 + i for i, name in enumerate(names)}
    tokens = [bytes([b]) for b in range(256)] + [None] * len(names)
    return Tokenizer("byte", tokens, special, eos_ids=ends)


def end_fields(path):
    fields = gguf.GGUFReader(path).fields.items()
    return {key.split(".")[-1]: field.contents() for key, field in fields
            if "token_id" in key and "bos" not in key}  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "fields"),
    [
        ([256], {"eos_token_id": 256}),
        ([256, 257], {"eos_token_id": 256, "eot_token_id": 257, "eos_token_ids": [256, 257]}),
        ([257, 256, 257], {"eos_token_id": 257, "eot_token_id": 256, "eos_token_ids": [257, 256]}),
        (
            [258, 256, 10],
            {
                "eos_token_id": 258,
                "eot_token_id": 256,
                "eom_token_id": 10,
                "eos_token_ids": [258, 256, 10],
            },
        ),
    ],
)
def test_every_eos_token_is_stored(tmp_path, ends, fields):
    """In the keys that llama.cpp reads in llama-vocab.cpp, and in the one of Ollama's engine."""
    tokenizer = with_ends(ends)
    write_gguf(random_model(vocab_size=261), tokenizer, tmp_path / "x.gguf", "f32")
    assert end_fields(tmp_path / "x.gguf") == fields


def test_more_eos_tokens_than_llama_cpp_reads_are_refused(tmp_path):
    with pytest.raises(UserError, match="has 4 EOS tokens .*llama.cpp reads at most 3"):
        write_gguf(random_model(vocab_size=261), with_ends([256, 257, 258, 259]), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_stored_eos_tokens_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_eot_token_id", lambda *given: None)
    with pytest.raises(RunError, match="differs from what was written"):
        write_gguf(random_model(vocab_size=261), with_ends([256, 257]), tmp_path / "x.gguf", "f32")


def test_the_ends_of_texts_are_compared():
    tokenizer = with_ends([256, 257])
    assert check_ends(tokenizer, {256, 257}.__contains__) == "it ends texts at the same tokens"
    more = check_ends(tokenizer, {256, 257, 259}.__contains__)
    assert more == "it ends texts at the same tokens and at <|endoftext|>"
    with pytest.raises(RunError, match="does not end a text at EOS token 257"):
        check_ends(tokenizer, {256}.__contains__)


def test_llama_cpp_ends_texts_at_every_eos_token(tmp_path):
    pytest.importorskip("llama_cpp")
    tokenizer, path = with_ends([257, 256, 258]), tmp_path / "model.gguf"
    model = random_model(vocab_size=261, d_model=64)
    write_gguf(model, tokenizer, path, "f32")
    summary = verify_gguf(model, tokenizer, path, "f32", n_texts=10)
    assert "it ends texts at the same tokens and at <|endoftext|>" in summary
    write_gguf(model, with_ends([257]), path, "f32")
    with pytest.raises(RunError, match="does not end a text at EOS token 256"):
        verify_gguf(model, tokenizer, path, "f32", n_texts=10)


@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_computes_the_same(tmp_path, form):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = random_model(vocab_size=BPE.vocab_size + 2, d_model=64, max_seq_len=128, **FORMS[form])
    path = tmp_path / "model.gguf"
    write_gguf(model, BPE, path, "f32")
    llama = llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False
    )
    tokens = torch.randint(BPE.vocab_size - 1, (1, 100))
    llama.eval(tokens[0].tolist())
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(llama.scores[:100]), model(tokens)[0], rtol=0, atol=1e-4
        )
    llama.close()
    assert "64 equal greedy tokens" in verify_gguf(model, BPE, path, dtype="f32")


STEPS = {
    "f32": 0,
    "f16": 2**-11,
    "q8_0": 1 / 254,
    "q5_1": 1 / 31,
    "q5_0": 1 / 16,
    "q4_1": 1 / 15,
    "q4_0": 1 / 8,
}


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.floats(-4, 4), st.integers(1, 3))
def test_rounding_changes_weights_by_at_most_a_step(seed, dtype, exponent, n_blocks):
    model = random_model(d_model=32 * n_blocks, n_layers=1)
    weight = model.blocks[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.copy_(
            torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 10**exponent
        )
        weight[0] = 0
    rounded = rounded_model(model, dtype).blocks[0].mlp.up_proj.weight
    stored = FALLBACKS.get(dtype.removesuffix("_m"), dtype)
    blocks = weight.detach().view(-1, 32)
    largest = blocks.abs().amax(1, keepdim=True)
    error = (rounded.detach().view(-1, 32) - blocks).abs()
    assert (error <= largest * (STEPS[stored] + 2**-10 * (dtype != "f32")) + 1e-6).all()
    assert not rounded[0].any()
    order = torch.randperm(len(weight))
    shuffled = quantize("w", weight[order], stored)
    assert np.array_equal(shuffled, quantize("w", weight, stored)[order])


def test_a_dtype_or_weight_that_gguf_does_not_have_is_refused(tmp_path):
    model = random_model(vocab_size=BPE.vocab_size)
    for dtype in ("q2_k", "F16"):
        with pytest.raises(UserError, match=f"dtype is '{dtype}'; use f32, "):
            write_gguf(model, BPE, tmp_path / "x.gguf", dtype)
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight[0, 0] = 1e8
    for dtype in DTYPES[1:]:
        stored = FALLBACKS.get(dtype.removesuffix("_m"), dtype)
        with pytest.raises(RunError, match=f"up_proj.weight as {stored} has non-finite weights"):
            rounded_model(model, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_has_the_logits_of_the_same_weights_and_only_those(tmp_path, form, dtype):
    pytest.importorskip("llama_cpp")
    model, path = (
        random_model(vocab_size=BPE.vocab_size + 2, d_model=64, **FORMS[form]),
        tmp_path / "model.gguf",
    )
    write_gguf(model, BPE, path, dtype)
    assert "of those of the same weights" in verify_gguf(model, BPE, path, dtype, n_texts=10)
    wrong = random_model(vocab_size=BPE.vocab_size + 2, d_model=64, **FORMS[form])
    weight = wrong.blocks[1].attention.v_proj.weight.data
    for change in (lambda: weight.mul_(2), lambda: weight.div_(2)[:2].copy_(weight[[1, 0]])):
        change()
        with pytest.raises(RunError, match="logits from llama.cpp differ"):
            verify_gguf(wrong, BPE, path, dtype, n_texts=10)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_llama_cpp_tokenizes_alike(tmp_path, kind):
    pytest.importorskip("llama_cpp")
    tokenizer, path = TOKENIZERS[kind], tmp_path / "model.gguf"
    model = random_model(vocab_size=tokenizer.vocab_size, d_model=64)
    write_gguf(model, tokenizer, path, "f16")
    assert "texts tokenized identically" in verify_gguf(
        model, tokenizer, path, dtype="f16", n_texts=2000
    )
    if kind == "bpe":
        with pytest.raises(RunError, match="differently"):
            verify_gguf(model, TOKENIZERS["qwen2"], path, dtype="f16", n_texts=2000)
        with pytest.raises(RunError, match="logits"):
            verify_gguf(
                random_model(3, vocab_size=tokenizer.vocab_size, d_model=64),
                tokenizer,
                path,
                dtype="f32",
            )


@pytest.mark.parametrize("form", [{"attention": "window(8)"}, {"attn_logit_softcap": 3.0},
                                  {"qk_norm": False, "no_rope_layers": [1]},
                                  {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq_len": 32}}],
                         ids=str)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(tmp_path, form):
    with pytest.raises(UserError, match="model\\."):
        write_gguf(random_model(vocab_size=BPE.vocab_size, **form), BPE, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("kind", ["char", "odd", "normalized"])
def test_tokenizers_that_it_does_not_have_are_refused(tmp_path, kind):
    tokenizer = {
        "char": make_tokenizer("char", [SAMPLE]),
        "odd": other_split(r"\p{N}|[^\p{N}]+"),
    }.get(kind)
    if kind == "normalized":
        tokenizer_conversion.write(BPE, tmp_path, 64)
        content = json.loads((tmp_path / "tokenizer.json").read_text()) | {
            "normalizer": {"type": "NFC"}
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = tokenizer_conversion.read(tmp_path)
        assert tokenizer.normalizer == "NFC"
    with pytest.raises(UserError, match="llama.cpp|normalizer"):
        write_gguf(random_model(vocab_size=tokenizer.vocab_size), tokenizer, tmp_path / "x.gguf")
