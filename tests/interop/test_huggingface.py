"""Hugging Face folders: every tensor comes back, and transformers' own models are computed alike
here."""

import functools
import itertools
import json
import math
import re
import shutil

import pytest
import torch
from conftest import random_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.interop import load, verify_export
from thinker.interop.hf_config import from_hf_config, hf_model_type, to_hf_config
from thinker.interop.huggingface import INDEX, save_pretrained, write_tensors
from thinker.interop.verify_export import adversarial_texts, verify_hf_export
from thinker.interop.verify_text import is_likeliest
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import RunError, UserError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLE = "Once upon a time there was a naïve café in 日本, and don't we'll 12345 know it. " * 30


def gpt2_like():
    base = make_tokenizer("bpe:400", [SAMPLE])
    tokens = [base.token_bytes(i) or None for i in range(base.vocab_size)]
    return Tokenizer(
        "tiktoken:like-gpt2", tokens, {"<|endoftext|>": base.bos_id}, "<|endoftext|>", GPT2
    )


TOKENIZERS = {spec: make_tokenizer(spec, [SAMPLE]) for spec in ("byte", "char", "bpe:400")} | {
    "gpt2-like": gpt2_like()
}


def spread(n, first, second):
    """All pairs of a value of the first and one of the second; by default one in `n` of them, with
    all values."""
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [
        pytest.param(a, b, marks=[pytest.mark.stress] if (i + j) % n else [], id=f"{a}-{b}")
        for (i, a), (j, b) in pairs
    ]


# In this order each tokenizer meets each number of KV heads, tied and untied weights, with and
# without QK-norm.
SHAPES = {
    f"{heads}-{'tied' if tied else 'untied'}-{'qwen3' if qk_norm else 'llama'}": {
        "n_kv_heads": n_kv_heads,
        "tie_embeddings": tied,
        "qk_norm": qk_norm,
    }
    for tied in (False, True)
    for qk_norm in (False, True)
    for heads, n_kv_heads in {"mha": 4, "gqa": 2, "mqa": 1}.items()
}


@functools.cache
def some_texts(kind):
    return list(itertools.islice(adversarial_texts(list(TOKENIZERS[kind].special_tokens)), 100))


@pytest.mark.parametrize(("shape", "kind"), spread(4, SHAPES, TOKENIZERS))
def test_there_and_back(tmp_path, shape, kind, monkeypatch, stress):
    monkeypatch.setattr(verify_export, "MAX_GREEDY_TOKENS", 64 if stress else 20)
    tokenizer = TOKENIZERS[kind]
    model = random_model(**SHAPES[shape], head_dim=10, vocab_size=tokenizer.vocab_size + 3)
    save_pretrained(model, tokenizer, tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    compared = verify_hf_export(model, tokenizer, tmp_path, n_texts=100)
    assert compared.endswith("tokens, 100 texts tokenized identically, identical text after 'The'")
    again, its_tokenizer = load(tmp_path)
    assert again.config == model.config
    ours, back = model.state_dict(), again.state_dict()
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    assert (again.lm_head.weight is again.embedding.weight) == model.config.tie_embeddings
    texts = some_texts(kind)
    assert [its_tokenizer.encode(text) for text in texts] == [
        tokenizer.encode(text) for text in texts
    ]
    assert its_tokenizer.bos_prefix == [tokenizer.bos_id]


FORMS = {
    "llama": {"qk_norm": False, "rope_theta": 5e5, "norm_eps": 1e-5},
    "mistral": {"qk_norm": False, "attention": "window(7)"},
    "qwen2": {
        "qk_norm": False,
        "attention_bias": True,
        "attention": ["full", "window(5)", "window(5)"],
    },
    "qwen3": {"attention": ["window(6)", "full", "window(6)"]},
    "smollm3": {"qk_norm": False, "no_rope_layers": [0, 2], "tie_embeddings": True},
}
ROPES = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 2, "original_max_seq_len": 32},
    "yarn": {"type": "yarn", "factor": 4, "original_max_seq_len": 32, "beta_fast": 8.0, "beta_slow": 1.0,
             "attention_factor": 1.25, "truncate": False},
    "yarn-mscale": {"type": "yarn", "factor": 4, "original_max_seq_len": 32, "mscale": 0.7, "mscale_all_dim": 1.1},
    "llama3": {"type": "llama3", "factor": 8, "original_max_seq_len": 16, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize(("family", "rope"), spread(3, FORMS, ROPES))
def test_every_form_that_the_format_has(tmp_path, family, rope):
    model = random_model(n_layers=3, rope_scaling=ROPES[rope], max_seq_len=32, **FORMS[family])
    assert hf_model_type(model.config) == family
    save_pretrained(model, None, tmp_path)
    compared = verify_hf_export(model, None, tmp_path)
    assert compared.endswith(f", {28 if rope == 'dynamic' else 64} equal greedy tokens")
    again, tokenizer = load(tmp_path)
    assert tokenizer is None
    with torch.no_grad():
        tokens = torch.randint(model.config.vocab_size, (1, 90))
        torch.testing.assert_close(again(tokens), model(tokens), rtol=0, atol=0)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    config = again.config.to_dict() | {"rope_scaling": None}
    assert config == model.config.to_dict() | {"rope_scaling": None}


@pytest.mark.parametrize("form", [{"positions": "alibi"}, {"positions": "none"}, {"attn_logit_softcap": 5.0},
                                  {"attention_sinks": True}, {"token_shift": True}, {"value_embeddings": True}, {"bigram_rows": 7},
                                  {"attention": "window(4) | global(2)"}, {"attention": "linear(8)"},
                                  {"attention_bias": True}, {"attention": ["window(3)", "window(4)"]},
                                  {"attention": ["full", "window(4)"], "qk_norm": False},
                                  {"no_rope_layers": [1]}], ids=str)  # fmt: skip
def test_what_the_format_cannot_express_is_refused_with_the_reason(tmp_path, form):
    with pytest.raises(
        UserError, match="no transformers architecture|smollm3|cannot export"
    ) as caught:
        save_pretrained(random_model(**form), None, tmp_path)
    assert any(key in str(caught.value) for key in ("model.", "QK-norm"))
    assert list(tmp_path.iterdir()) == []


# Models that were made there

THEIR_ROPES = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "rope_theta": 5e5},
}  # fmt: skip
THEIR_FORMS = {
    "llama": {"tie_word_embeddings": True, "head_dim": 12},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "qwen3": {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
              "sliding_window": 7},
    "smollm3": {"no_rope_layer_interval": 2},
}  # fmt: skip


def their_model(family, rope="default", **more):
    """With weights that matter, every one of them."""
    sizes = {"vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0,
             "eos_token_id": 0, "pad_token_id": 0, "rope_parameters": dict(THEIR_ROPES[rope])}  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes | THEIR_FORMS[family] | more)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.3)
    return model


def their_greedy(model, tokens, steps):
    past, drawn = None, []
    for _ in range(steps):
        out = model(tokens, past_key_values=past, use_cache=True)
        tokens, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        drawn.append(tokens.item())
    return drawn


@pytest.mark.parametrize(("family", "rope"), spread(2, THEIR_FORMS, THEIR_ROPES))
def test_their_models_are_computed_alike(tmp_path, family, rope):
    theirs = their_model(family, rope)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    tokens = torch.randint(
        89, (2, 100), generator=torch.Generator().manual_seed(0)
    )  # three times the original length
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
        assert expected.std() > 0.5
        if rope == "dynamic":
            with pytest.raises(UserError, match="dynamic"):
                ours.new_cache(2, 200).append(2, 1) and ours(tokens, cache=ours.new_cache(2, 200))
            return
        drawn, cache, newest = [], ours.new_cache(1, 80), tokens[:1, :6]
        for _ in range(64):
            newest = ours(newest, cache=cache)[:, -1:].argmax(-1)
            drawn.append(newest.item())
        assert drawn == their_greedy(theirs, tokens[:1, :6], 64)


@pytest.mark.parametrize("family", THEIR_FORMS)
def test_older_spellings_of_a_configuration(tmp_path, family):
    """rope_theta and rope_scaling beside the rest, layers' kinds by max_window_layers, no head_dim,
    torch_dtype."""
    model = their_model(family, "yarn")
    model.save_pretrained(tmp_path)
    tokens = torch.randint(89, (1, 60))
    expected = load(tmp_path)[0](tokens)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    values["torch_dtype"] = values.pop("dtype")
    if family == "qwen2":
        del values["layer_types"]
    if family not in ("qwen3", "llama"):
        values.pop("head_dim", None)
    if family == "smollm3":
        del values["no_rope_layers"], values["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert torch.equal(load(tmp_path)[0](tokens), expected)


def test_what_is_null_is_not_what_is_left_out(tmp_path):
    """A Mistral without windows says null; a Qwen that says null has as many KV heads as query
    heads."""
    theirs = their_model("mistral", sliding_window=None)
    theirs.save_pretrained(tmp_path / "mistral")
    ours, _ = load(tmp_path / "mistral")
    assert ours.config.attention == "full"
    tokens = torch.randint(89, (1, 60))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    values = json.loads((tmp_path / "mistral" / "config.json").read_text())
    del values["sliding_window"]
    for sliding_window in ({}, {"sliding_window": 4096}):
        assert from_hf_config(values | sliding_window).attention == "window(4096)"
    values = transformers.Qwen2Config(num_key_value_heads=None).to_dict() | {
        "num_key_value_heads": None
    }
    assert from_hf_config(values).n_kv_heads == transformers.Qwen2Config().num_attention_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shards_and_precisions(tmp_path, dtype):
    model = their_model("llama", tie_word_embeddings=False).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours, _ = load(tmp_path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    tokens = torch.randint(89, (1, 30))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        expected = ours(tokens)
        if dtype != torch.float32:  # fp32 is mapped: see test_mapped_weights.py
            for path in tmp_path.glob("*.safetensors"):
                path.write_bytes(b"\xff" * path.stat().st_size)
        assert torch.equal(ours(tokens), expected)  # the model does not change with its files


def test_our_shards(tmp_path):
    model = random_model()
    save_pretrained(model, None, tmp_path, max_shard_bytes=10_000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) == {
        file.name for file in files
    }
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert verify_hf_export(model, None, tmp_path).endswith("equal greedy tokens")
    again, _ = load(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values())
    )


def test_the_proof_sees_other_weights_and_another_tokenizer(tmp_path):
    tokenizer = TOKENIZERS["bpe:400"]
    model = random_model(vocab_size=tokenizer.vocab_size)
    save_pretrained(model, tokenizer, tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    verify_hf_export(model, tokenizer, tmp_path, n_texts=50)
    tensors = load_file(tmp_path / "model.safetensors")
    other = tensors | {
        "model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"] * 1.001
    }
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="logits from transformers differ"):
        verify_hf_export(model, tokenizer, tmp_path, n_texts=50)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][60:]
    content["model"]["ignore_merges"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="differently"):
        verify_hf_export(model, tokenizer, tmp_path)


@pytest.mark.parametrize("kind", ["byte", "bpe:400", "gpt2-like"])
def test_the_obvious_three_lines_give_the_generators_text(tmp_path, kind):
    tokenizer = gpt2_like() if kind == "gpt2-like" else TOKENIZERS[kind]
    assert tokenizer.bos_prefix == [tokenizer.bos_id]
    model = random_model(vocab_size=tokenizer.vocab_size)
    save_pretrained(model, tokenizer, tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    assert verify_hf_export(model, tokenizer, tmp_path, n_texts=20).endswith(
        "identical text after 'The'"
    )
    known = Generator(model, tokenizer).generate(
        "A boy", SamplingParams(max_new_tokens=30, temperature=0)
    )[0]
    its_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    its_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    output = its_model.generate(
        **its_tokenizer("A boy", return_tensors="pt"), max_new_tokens=30, do_sample=False
    )
    assert its_tokenizer.decode(output[0], skip_special_tokens=True) == "A boy" + known.text
    _, again = load(tmp_path)  # which does not add BOS twice
    assert again.bos_prefix == tokenizer.bos_prefix
    assert Generator(model, again).encode("A boy") == Generator(model, tokenizer).encode("A boy")
    assert verify_hf_export(model, again, tmp_path, n_texts=20)


def test_tokens_that_rounding_may_swap_are_equal(tmp_path):
    """Two tokens have the same logits, so that their order depends on how they are computed."""
    tokenizer = TOKENIZERS["bpe:400"]
    model = random_model(vocab_size=tokenizer.vocab_size)
    save_pretrained(model, tokenizer, tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    start = torch.tensor([[*tokenizer.bos_prefix, *tokenizer.encode("The")]])
    best = int(model(start)[0, -1].argmax())
    twin = tokenizer.encode("x")[0]
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    logit = model(start)[0, -1, best].item()
    nearly = model.lm_head.weight.detach().clone()
    nearly[twin if best < twin else best] *= 1 + 1e-6 * math.copysign(
        1, logit
    )  # the one that is not taken here
    save_file(
        tensors | {"lm_head.weight": nearly},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    compared = verify_hf_export(model, tokenizer, tmp_path, n_texts=20)
    assert "0 identical tokens after 'The', up to a tie between the largest logits" in compared
    assert is_likeliest(torch.tensor([1.0, 1.0 + 5e-6]), 0)
    assert not is_likeliest(torch.tensor([1.0, 1.0 + 5e-5]), 0)


def test_the_proof_sees_a_tokenizer_that_does_not_add_bos(tmp_path):
    tokenizer = TOKENIZERS["bpe:400"]
    model = random_model(vocab_size=tokenizer.vocab_size)
    save_pretrained(model, tokenizer, tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    content = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="transformers continues 'The' as"):
        verify_hf_export(model, tokenizer, tmp_path, n_texts=20)


# What is refused, by name


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    their_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', unsupported; Thinker knows cohere, gemma"),
        ({"model_type": None}, "config.json has no model_type; Thinker knows cohere"),
        ({"model_type": "gpt2"}, "an unsupported key head_dim"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; choose from silu"),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.down_proj.bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({"attn_logit_softcapping": 30.0}, "an unsupported key attn_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type is 'longrope'",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "odd": 1}},
            "rope_scaling has an unsupported key odd",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "full_attention": {}}},
            "rope_parameters differs by layer",
        ),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be an integer above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be a mapping"),
        ({"architectures": 5}, "architectures is 5; it must be a list"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": "a",
                }
            },
            "original_max_position_embeddings is 'a'",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "mistral needs sliding"),
        ({"model_type": "qwen3", "layer_types": [["full_attention"]] * 2}, "layer_types"),
        ({"model_type": "qwen2", "max_window_layers": "a"}, "max_window_layers is 'a'"),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers is [1]; it must be a list with a 0 or a 1",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": {"a": 1}},
            "no_rope_layers is {'a': 1}; it must be a list",
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"num_hidden_layers": 10**6}, "fewer tensors"),
        ({"num_hidden_layers": 1}, "has an unknown tensor model.layers.1"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"intermediate_size": 40}, "must be F32, BF16 or F16"),
        ({"model_type": "qwen3"}, "no tensor model.layers.0.self_attn.k_norm"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "window"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused_by_name(tmp_path, theirs, change, message):
    shutil.copytree(theirs, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path)


def test_what_versions_compute_differently(tmp_path):
    """A head of its own in the file of tied weights is refused; one file goes before an index;
    windows have a width."""
    their_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    with pytest.raises(
        UserError, match=r"lm_head.weight differs from the embedding, but config.json ties them"
    ):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"lm_head.weight": "other.safetensors"}})
    )
    tokens = torch.randint(89, (1, 30))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(
            load(tmp_path)[0](tokens), theirs(tokens).logits, rtol=0, atol=1e-4
        )
    values = transformers.Qwen3Config(use_sliding_window=True, max_window_layers=0).to_dict()
    known = values["sliding_window"]
    del values["sliding_window"], values["layer_types"]
    assert from_hf_config(values).attention == f"window({known})"


def test_keys_of_full_dumps_are_no_reason_to_refuse(theirs):
    values = json.loads((theirs / "config.json").read_text())
    dumped = {
        "max_length": 20,
        "do_sample": False,
        "top_k": 50,
        "is_decoder": False,
        "pruned_heads": {},
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    known = from_hf_config(
        values | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    assert from_hf_config(values | dumped | {"rope_parameters": rope}) == known


def test_files_that_are_missing_or_hostile(tmp_path, theirs):
    shutil.copytree(theirs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is damaged, or more than weights"):
        load(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../../x.safetensors"}})
    )
    with pytest.raises(UserError, match="lists no tensor files"):
        load(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        load(tmp_path)
    with pytest.raises(UserError, match="is a single model"):
        load(tmp_path, checkpoint="best")


def test_the_numbers_of_special_tokens_are_always_written():
    tokenizer = TOKENIZERS["byte"]
    values = to_hf_config(ThinkerConfig(vocab_size=257, qk_norm=False), tokenizer)
    assert values["bos_token_id"] == values["eos_token_id"] == tokenizer.bos_id
    assert from_hf_config(values) == ThinkerConfig(vocab_size=257, qk_norm=False)


def test_a_model_without_a_boundary_in_front_is_sampled_as_there(tmp_path):
    """Qwen's prompts begin with nothing; several tokens may end a text."""
    tokenizer = gpt2_like()
    tokenizer.bos_prefix = []
    model = their_model("qwen3", vocab_size=tokenizer.vocab_size)
    model.save_pretrained(tmp_path)
    tokenizer_conversion.write(tokenizer, tmp_path, 64)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.bos_id, 65]})
    )
    ours, its = load(tmp_path)
    assert its.bos_prefix == []
    found = Generator(ours, its).generate(
        ["Once", ""], SamplingParams(max_new_tokens=20, temperature=0)
    )
    prompt = torch.tensor([its.encode("Once")])
    expected = their_greedy(model, prompt, 20)
    stops = [at for at, token in enumerate(expected) if token in (tokenizer.bos_id, 65)]
    assert found[0].token_ids == expected[: stops[0] + 1 if stops else 20]
    assert found[0].prompt_tokens == prompt.shape[1]
    assert found[1].prompt_tokens == 1  # an empty prompt is the BOS token alone
    assert isinstance(ours, Thinker)


def test_weights_that_cannot_be_written_are_one_line(tmp_path):
    with pytest.raises(RunError, match="cannot be written: .*No such file"):
        write_tensors({"a": torch.zeros(3)}, tmp_path / "nowhere" / "a.safetensors")
