"""The temperature of attention: everywhere the plain division of the scores, and folded into
weights on export."""

import dataclasses
import json

import pytest
import torch
from conftest import random_model
from installed import if_installed
from pairwise import pairwise

from thinker import checkpoint
from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.interop.gguf.gguf_quantization import rounded_model
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.interop.huggingface import load_pretrained, save_pretrained
from thinker.interop.load import load
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_temperature import (
    fold_attention_temperature,
    override_attention_temperature,
)
from thinker.native.compiler import has_compiler
from thinker.runtime.errors import UserError
from thinker.training.kernels import NATIVE, Kernels, fused_kernels

pytestmark = pytest.mark.usefixtures("one_thread")
NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
TOKENIZER = make_tokenizer("byte", [])
BYTES = {"vocab_size": TOKENIZER.vocab_size}
NO_BOS = {TOKENIZER.bos_id: -torch.inf}
FORMS = pairwise({
    "attention": ["full", "window(4)", "window(4) | global(3)", "topk(4)", "prefix(3)", "heads(window(3), full)", "LG"],
    "positions": ["rope", "alibi", "none"],
    "scores": [{}, {"attn_logit_softcap": 2.0}, {"attention_sinks": True}],
    "qk_norm": [True, False],
    "n_kv_heads": [4, 2, 1],
})  # fmt: skip


def of_form(form, **options):
    options = (
        {name: value for name, value in form.items() if name != "scores"} | form["scores"] | options
    )
    return random_model(**options, window=5 if form["attention"] == "LG" else None)


def with_divided_queries(model):
    """The same function without the key: the queries are divided where they are made."""
    temperature, plain = (
        model.config.attention_temperature,
        Thinker(dataclasses.replace(model.config)),
    )
    plain.load_state_dict(model.state_dict())
    for block in plain.blocks:
        attention = block.attention
        for parameter in (
            attention.q_norm.parameters() if model.config.qk_norm else attention.q_proj.parameters()
        ):
            parameter.data /= temperature
    override_attention_temperature(plain, 1.0)
    return plain.eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.no_grad()
def test_all_forms_of_attention_divide_the_scores_and_nothing_else(form):
    temperature = (
        4.0 if form["n_kv_heads"] == 1 else 0.25
    )  # powers of 4: nothing rounds differently, not even roots
    model = of_form(form, attention_temperature=temperature, max_seq_len=200)
    plain, tokens = with_divided_queries(model), torch.randint(61, (2, 150))
    for kernel in ("auto", "reference"):  # at this length, "auto" is the local kernel for windows
        model.kernel = plain.kernel = kernel
        logits = plain(tokens)
        assert torch.equal(model(tokens), logits)
    assert torch.equal(
        model.attention_weights(tokens[:, :20]), plain.attention_weights(tokens[:, :20])
    )
    caches = [each.new_cache(2, 150) for each in (model, plain)]
    for part in tokens.split((100, 1, 1, 48), dim=1):
        found, known = (each(part, cache=cache) for each, cache in zip((model, plain), caches))
        assert torch.equal(found, known)
    if (
        "topk" not in form["attention"]
    ):  # without positions, equal tokens have equal scores up to rounding
        torch.testing.assert_close(found, logits[:, -48:], rtol=0, atol=2e-4)
    override_attention_temperature(model, 1.0)
    assert not torch.allclose(model(tokens), logits, atol=1e-3)  # it matters


@pytest.mark.parametrize("kernel", ["sdpa", "blockwise", "local", "flex", "reference"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_each_kernel_equals_a_plain_softmax(kernel, qk_norm):
    window = kernel == "local"
    model = random_model(
        attention_temperature=1.7,
        qk_norm=qk_norm,
        max_seq_len=200,
        attention="window(9)" if window else "full",
    )
    tokens, names = (
        torch.randint(61, (1, 140)),
        [f"blocks.1.attention.{part}" for part in ("q", "k", "v", "heads")],
    )
    model.kernel = kernel
    with model.record(*names) as cache:
        model(tokens)
    q, k, v, heads = (cache[name].double() for name in names)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))  # (B, H, T, D)
    at = torch.arange(140)
    is_hidden = (at > at[:, None]) | (at <= at[:, None] - (9 if window else 140))
    weights = (q @ k.mT / 8**0.5 / 1.7).masked_fill(is_hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(heads, weights @ v, rtol=0, atol=1e-5)


@NEEDS_COMPILER
@pytest.mark.parametrize("case", pairwise({
    "how": [{}, {"compile": False}, {"dtype": "bf16"}, {"bits": 8}, {"bits": 4}, {"bits": 4, "compile": False}],
    "memory": [{}, {"window": 10, "sinks": 2}, *if_installed("speculation", {"speculate": 3}), {"use_cache": False}, {"slide": True}],
    "shape": [{"n_kv_heads": 4}, {"n_kv_heads": 2, "qk_norm": False}, {"n_kv_heads": 1, "attention_bias": True}],
}), ids=str)  # fmt: skip
def test_generated_texts_equal_those_of_divided_queries(case):
    model = random_model(
        attention_temperature=0.25, max_seq_len=16, norm_mean=0.3, **BYTES, **case["shape"]
    )
    params = SamplingParams(18, seed=3, logit_bias=NO_BOS)
    ours, plain = (
        Generator(each, TOKENIZER, **case["how"], **case["memory"]).generate(
            ["abcabc", "x"], params
        )
        for each in (model, with_divided_queries(model))
    )
    for one, same in zip(ours, plain):
        assert one.token_ids == same.token_ids
        assert one.logprobs == same.logprobs


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "form", [{}, {"attn_logit_softcap": 5.0}, {"positions": "alibi"}, {"attention": "window(5)"}]
)
@torch.no_grad()
def test_native_decoding_equals_the_model(form):
    model = random_model(attention_temperature=1.7, norm_mean=0.3, **BYTES, **form)
    generator = Generator(model, TOKENIZER, compile=True)
    tokens = torch.randint(256, (3, 12))
    cache = generator.model.new_cache(3)
    generator.decoder.step(tokens[:, :6], cache)
    for position in range(6, 12):
        logits = generator.decoder.step(tokens[:, position : position + 1], cache)
        torch.testing.assert_close(logits[:, 0], model(tokens)[:, position], rtol=0, atol=1e-3)


@pytest.mark.parametrize("is_fused", [False, pytest.param(True, marks=NEEDS_COMPILER)])
@pytest.mark.parametrize("form", FORMS[:6], ids=str)
def test_losses_and_gradients_equal_those_of_divided_queries(form, is_fused):
    model = of_form(form, attention_temperature=4.0)
    plain, tokens = with_divided_queries(model), torch.randint(61, (2, 33))
    kernels = Kernels(NATIVE, is_native=True) if is_fused else None
    losses = []
    for each in (model, plain):
        with fused_kernels(each, kernels):
            losses.append(each(tokens[:, :-1], targets=tokens[:, 1:])[0])
        losses[-1].backward()
    assert torch.equal(*losses)
    divided = ".q_norm." if model.config.qk_norm else ".q_proj."
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters()):
        if parameter.grad is not None:
            assert torch.equal(parameter.grad * (4 if divided in name else 1), twin.grad), name


EXPORTED = [{}, {"tie_embeddings": True}]
EXPORTED += [
    {"qk_norm": False, **more}
    for more in ({}, {"attention_bias": True}, {"attention": "window(5)"})
]


@pytest.mark.parametrize("form", EXPORTED, ids=str)
@torch.no_grad()
def test_an_exported_folder_computes_the_same_without_the_key(tmp_path, form):
    tokens = torch.randint(61, (2, 40))
    for temperature, tolerance in ((0.5, 0.0), (1.7, 1e-4)):
        model = random_model(attention_temperature=temperature, **form)
        folder = tmp_path / str(temperature)
        folder.mkdir()
        save_pretrained(model, None, folder)
        again = load_pretrained(folder)
        assert again.config.attention_temperature == 1
        torch.testing.assert_close(again(tokens), model(tokens), rtol=0, atol=tolerance)
        transformers = pytest.importorskip("transformers")
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(hf_model(tokens).logits, model(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_a_gguf_file_holds_the_divided_queries(tmp_path, dtype, qk_norm):
    gguf = pytest.importorskip("gguf")
    model = random_model(attention_temperature=0.5, qk_norm=qk_norm, **BYTES)
    plain, files = with_divided_queries(model), []
    for each in (model, plain):
        write_gguf(each, TOKENIZER, tmp_path / "model.gguf", dtype)
        reader = gguf.GGUFReader(tmp_path / "model.gguf")
        files.append({tensor.name: tensor.data.tobytes() for tensor in reader.tensors})
    assert files[0] == files[1]
    rounded, tokens = rounded_model(model, dtype), torch.randint(256, (1, 30))
    assert (rounded.config.attention_temperature, model.config.attention_temperature) == (1, 0.5)
    assert torch.equal(rounded(tokens), rounded_model(plain, dtype)(tokens))


def test_a_temperature_of_1_changes_no_bit_and_old_checkpoints_load(tmp_path):
    model = random_model()
    assert {block.attention.scale for block in model.blocks} == {8**-0.5}
    tensors = model.state_dict()
    folded = fold_attention_temperature(tensors, model.config)
    assert all(folded[name] is tensor for name, tensor in tensors.items())
    checkpoint.save(tmp_path / "new", model, {"step": 1})
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    assert values.pop("attention_temperature") == 1.0
    old = ThinkerConfig.from_dict(values)
    assert old == model.config


def test_checkpoints_keep_the_temperature(tmp_path):
    model = random_model(attention_temperature=1.7)
    checkpoint.save(tmp_path / "new", model, {"step": 1})
    again, _ = load(tmp_path / "new")
    tokens = torch.randint(61, (1, 20))
    assert torch.equal(again(tokens), model(tokens))


@torch.no_grad()
def test_another_temperature_without_training(random_model):
    model, tokens = random_model(), torch.randint(61, (1, 20))
    hot = random_model(attention_temperature=1.7)
    before, plain_config = model(tokens), model.config
    override_attention_temperature(model, 1.7)
    assert torch.equal(model(tokens), hot(tokens))
    assert plain_config.attention_temperature == 1  # another model may share it
    override_attention_temperature(model, 1)
    assert torch.equal(model(tokens), before)
    for wrong in (0, -1.0, 1e-4, 1e4, float("nan"), float("inf")):
        with pytest.raises(UserError, match="from 0.001 to 1000"):
            override_attention_temperature(model, wrong)
    with pytest.raises(UserError, match="linear attention does not support"):
        override_attention_temperature(random_model(attention="linear(8)"), 2.0)


@torch.no_grad()
def test_the_temperature_folds_into_a_norm_that_is_stored_less_1():
    model = random_model(attention_temperature=1.7, qk_norm_type="rmsnorm_one_plus")
    tokens = torch.randint(61, (2, 40))
    expected = model(tokens)
    tensors = fold_attention_temperature(model_tensors(model), model.config)
    plain = random_model(qk_norm_type="rmsnorm_one_plus")
    plain.load_state_dict(tensors)
    torch.testing.assert_close(plain(tokens), expected, rtol=0, atol=1e-5)
