"""Every family of the table against transformers, in configurations drawn by a seed."""

import copy
import json
import logging
import random
import warnings

import pytest
import torch
import transformers
from drawn_families import MAX_LEN, SEED, VOCAB, draw, drawn_model
from safetensors.torch import load_file

from thinker.interop import load
from thinker.interop.families import FAMILIES
from thinker.interop.hf_config import differing_fields, from_hf_config, hf_model_type, to_hf_config
from thinker.interop.huggingface import save_pretrained
from thinker.interop.verify_text import is_likeliest
from thinker.runtime.errors import UserError

N_GREEDY = 64
NUMBERS = [
    pytest.param(0),
    pytest.param(1, marks=pytest.mark.more),
    pytest.param(2, marks=pytest.mark.more),
]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_number = pytest.mark.parametrize("number", NUMBERS)


def some_tokens(n_rows=2, length=50):
    return torch.randint(VOCAB, (n_rows, length), generator=torch.Generator().manual_seed(0))


def rounding_of(theirs, tokens):
    """How much rounding changes their logits: between their two forms of attention, and between
    fp32 and fp64."""
    logits = theirs(tokens).logits
    eager = copy.deepcopy(theirs)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(theirs).double()(tokens).logits
    by_form = (eager(tokens).logits - logits).abs().max()
    by_dtype = (exact - logits).abs().max()
    return max(by_form.item(), by_dtype.item())


@each_family
@each_number
@torch.no_grad()
def test_a_drawn_model_is_computed_alike(tmp_path, family, number):
    theirs = drawn_model(family, number)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    tokens = some_tokens()
    expected = theirs(tokens).logits
    largest = expected.abs().max().item()
    difference = (ours(tokens) - expected).abs().max().item()
    assert difference <= 1e-5 * largest
    assert difference <= 2 * rounding_of(theirs, tokens)
    assert expected.std() > 0.01 * largest

    cache = ours.new_cache(1, MAX_LEN)
    past = None
    newest = tokens[:1, :6]
    for _ in range(N_GREEDY):
        mine = ours(newest, cache=cache)[0, -1]
        out = theirs(newest, past_key_values=past, use_cache=True)
        past = out.past_key_values
        newest = out.logits[:, -1:].argmax(-1)
        assert is_likeliest(mine, newest.item())


@each_family
@each_number
def test_an_export_has_the_tensors_of_the_file(tmp_path, family, number, caplog):
    theirs = drawn_model(family, number)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_pretrained(ours, None, tmp_path / "ours", model_type=family)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[name], written[name]) for name in stored)

    again, _ = load(tmp_path / "ours")
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert caplog.records == []
    with torch.no_grad():
        tokens = some_tokens()
        assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)


@each_family
@each_number
@torch.no_grad()
def test_the_first_family_that_can_express_a_model_computes_the_same(tmp_path, family, number):
    """Such as a Phi-3 without a partial rotation, which is a LLaMA."""
    theirs = drawn_model(family, number)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_pretrained(ours, None, tmp_path / "ours")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = some_tokens()
    expected = theirs(tokens).logits
    largest = expected.abs().max().item()
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-5 * largest)


@each_family
def test_missing_keys_have_the_defaults_of_transformers(family, tmp_path):
    """A config.json says only what differs from a default, and defaults differ between families."""
    full = drawn_model(family, 0).config.to_dict()
    changing = FAMILIES[family].keys - {"model_type", "architectures"}
    sizes = {key for part in FAMILIES[family].shape[:6] for key in part.keys}
    kept = {name: value for name, value in full.items() if name in sizes | {"model_type"}}
    for name in ("num_key_value_heads", "layer_types", "sliding_window", "use_sliding_window"):
        if full.get(name) is not None and name in changing:
            kept[name] = full[name]
    if family == "gpt_neo":
        kept["attention_types"] = full["attention_types"]
    known = type(drawn_model(family, 0).config)(**kept).to_dict()
    assert from_hf_config(dict(kept)) == from_hf_config(known)


@each_family
def test_what_is_written_is_read_back(family):
    values = drawn_model(family, 1).config.to_dict()
    config = from_hf_config(values)
    again = from_hf_config(json.loads(json.dumps(to_hf_config(config, None, family))))
    assert differing_fields(again, family) == []
    for name in again.to_dict().keys() - {"rope_scaling"}:  # which is written with its defaults
        assert getattr(again, name) == getattr(config, name)


def old_names(family, tensors):
    """The names of the first releases: without what comes before all modules."""
    prefix = {"gpt2": "transformer.", "opt": "model."}[family]
    renamed = {name.removeprefix(prefix): tensor.clone() for name, tensor in tensors.items()}
    if family == "gpt2":
        renamed["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        renamed["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    return renamed


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_old_files_of_torch_are_read(tmp_path, family, is_sharded):
    theirs = drawn_model(family, 0)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = old_names(family, theirs.state_dict())
    tensors.pop("lm_head.weight")
    if not theirs.config.tie_word_embeddings:
        tensors["lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    files = {"pytorch_model.bin": list(tensors)}
    if is_sharded:
        names = list(tensors)
        files = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        weight_map = {name: file for file, names in files.items() for name in names}
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    for file, names in files.items():
        torch.save({name: tensors[name] for name in names}, tmp_path / file)
    again, _ = load(tmp_path)
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())


class Malicious:
    def __reduce__(self):
        return print, ("this ran",)


def test_a_bin_file_runs_no_code(tmp_path, capsys):
    theirs = drawn_model("gpt2", 0)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"wte.weight": Malicious()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is damaged, or more than weights"):
        load(tmp_path)
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim is 8"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv is 8.0; Thinker supports only null"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'; choose from"),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, "attention_types is"),
        ("gpt_neo", {"attention_types": 5}, "attention_types is 5; it must be a list"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number from"),
        ("granite", {"residual_multiplier": -1.0}, "residual_scale is -1.0"),
        ("cohere", {"logit_scale": "big"}, "logit_scale is 'big'; it must be a number"),
        ("stablelm", {"use_qkv_bias": 1}, "use_qkv_bias is 1; it must be true or false"),
        ("gemma3_text", {"layer_types": ["odd"] * 2}, "layer_types is"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "llama needs full_attention"),
    ],
    ids=str,
)
def test_what_a_family_cannot_express_is_refused_by_name(family, change, message):
    values = drawn_model(family, 0).config.to_dict() | change
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace("[", r"\[")):
        from_hf_config(values)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe", "mamba", "bert", "t5", "falcon", "bloom", "mixtral", "cohere2", "gemma3", "gemma3n",
        "llama4", "modernbert", "olmoe",
    ],
)  # fmt: skip
def test_other_architectures_are_refused_in_one_sentence(model_type):
    """Without a similar name, which is another architecture."""
    known = f"model_type is '{model_type}', unsupported; Thinker knows cohere, "
    with pytest.raises(UserError, match=known) as e:
        from_hf_config({"model_type": model_type})
    assert len(str(e.value).splitlines()) == 1
    assert "did you mean" not in str(e.value)
    assert all(family in str(e.value) for family in FAMILIES)


WRONG = [
    None, True, False, -1, 0, 1, 3, 10**9, 10**30, 1e-300, 1e300, float("nan"), float("inf"), "x", "",
    [], [1], ["full_attention"] * 3, {}, {"a": 1}, [[["global"], 10**9]], [[["global", "local"], 2]],
    {"rope_type": "yarn"}, {"rope_type": "linear", "factor": "a"}, {"full_attention": 5},
    {"full_attention": {"rope_type": []}}, [None] * 3, 0.5,
]  # fmt: skip


@each_family
def test_wrong_values_are_one_sentence(family):
    rng = random.Random(f"{SEED} {family}")
    keys = sorted(FAMILIES[family].keys - {"model_type"})
    messages = []
    for _ in range(150):
        values = draw(family, rng.randrange(3)) | {"model_type": family}
        for key in rng.choices(keys, k=rng.choice([1, 1, 2, 3])):
            values[key] = rng.choice(WRONG)
        try:
            from_hf_config(values)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all(len(message.splitlines()) == 1 for message in messages)


def test_another_family_is_refused_with_what_it_lacks():
    config = from_hf_config(drawn_model("gpt2", 0).config.to_dict())
    assert hf_model_type(config) == "gpt2"
    with pytest.raises(UserError, match=r"llama cannot express this model; .*model.norm=layernorm"):
        to_hf_config(config, None, "llama")
