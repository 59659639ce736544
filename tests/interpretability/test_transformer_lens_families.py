"""HookedThinker beside TransformerLens on Hugging Face folders of many families, each read by its own
library."""

from importlib.metadata import version

import pytest
import torch
from chat_templates import imported_bpe_tokenizer
from test_transformer_lens import close, names_of_weights

from thinker.interpretability.hooked import HookedThinker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*HookedTransformer is deprecated"),
]
lens = pytest.importorskip("transformer_lens", reason="pip install 'transformer_lens>=3.9,<4'")
transformers = pytest.importorskip("transformers")
if int(version("transformer_lens").split(".")[0]) > 3:
    pytest.skip("version 4 has no HookedTransformer", allow_module_level=True)

PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = PLAIN | {"num_key_value_heads": 2}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 4, "max_position_embeddings": 64},
    "gpt_neox": PLAIN | {"rotary_pct": 0.5},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
            "word_embed_proj_dim": 32},
    "mistral": GROUPED | {"sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "phi": PLAIN | {"partial_rotary_factor": 0.5},
    "phi3": GROUPED | {"pad_token_id": 0},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
                         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0},
    "olmo3": GROUPED | {"pad_token_id": 0, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
# What theirs knows of Gemma 2 by the names of published models alone.
GEMMA2 = {
    "d_model": 32, "d_head": 8, "n_heads": 4, "d_mlp": 48, "n_layers": 2, "n_ctx": 64, "eps": 1e-6,
    "act_fn": "gelu_pytorch_tanh", "normalization_type": "RMS", "rotary_base": 10000.0,
    "positional_embedding_type": "rotary", "use_attn_scale": True, "n_key_value_heads": 2, "window_size": 4,
    "use_local_attn": True, "attn_types": ["local", "global"], "attn_scores_soft_cap": 5.0, "output_logits_soft_cap": 2.0,
    "gated_mlp": True, "final_rms": True, "use_normalization_before_and_after": True,
    "original_architecture": "Gemma2ForCausalLM", "tokenizer_name": "none",
}  # fmt: skip


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / request.param
    folder.mkdir()
    tokenizer = imported_bpe_tokenizer(folder)
    torch.manual_seed(0)
    ids = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
    config = transformers.AutoConfig.for_model(request.param, **FAMILIES[request.param], **ids)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("process", [False, True])
@torch.no_grad()
def test_every_activation_of_a_family_is_theirs(folder, process, monkeypatch):
    # Their function looks the name up in a list of published models, which knows no folders.
    monkeypatch.setattr(lens.loading_from_pretrained, "get_official_model_name", str)
    # Theirs reads it where transformers 4 had it.
    monkeypatch.setattr(transformers.PhiConfig, "partial_rotary_factor", 0.5, raising=False)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, padding_side="right")
    name = "from_pretrained" if process else "from_pretrained_no_processing"
    if folder.name == "gemma2":
        config = GEMMA2 | {"d_vocab": hf_model.config.vocab_size, "rotary_dim": 8}
        convert = lambda *arguments, **options: dict(config)  # noqa: E731
        monkeypatch.setattr(lens.loading_from_pretrained, "convert_hf_model_config", convert)
    theirs = getattr(lens.HookedTransformer, name)(
        str(folder), hf_model=hf_model, tokenizer=tokenizer, device="cpu", default_prepend_bos=True
    )
    ours = getattr(HookedThinker, name)(folder)
    tokens = ours.to_tokens("Once upon a time there was")
    assert torch.equal(tokens, theirs.to_tokens("Once upon a time there was"))
    known_logits, known = theirs.run_with_cache(tokens)
    logits, cache = ours.run_with_cache(tokens)
    close(logits, known_logits)
    missing = set()
    if folder.name == "gemma2":  # whose logits have a cap here before they leave the LM head
        missing = {"unembed.hook_out"}
    if folder.name == "phi":  # whose one norm has two names there
        missing = {name for name in known if ".ln2." in name}
    assert set(cache.keys()) == set(known.keys()) - missing
    for name, value in cache.items():
        if folder.name == "olmo3" and process and name == "unembed.hook_in":
            continue  # theirs does not fold the last norm either
        close(value, known[name], name)
    for name in names_of_weights(theirs):
        if folder.name == "olmo3" and process and name == "W_U":
            continue
        close(getattr(ours, name), getattr(theirs, name), name)
    assert ours.cfg.parallel_attn_mlp == theirs.cfg.parallel_attn_mlp
    assert ours.cfg.act_fn == theirs.cfg.act_fn.replace("gelu_pytorch_tanh", "gelu_new")
    for name in ours.hook_dict:
        if name in known:

            def halve(value, hook):
                return 0.5 * value

            edited = ours.run_with_hooks(tokens, fwd_hooks=[(name, halve)])
            if folder.name == "phi" and ".ln1." in name:
                continue  # theirs edits the input of attention alone
            close(edited, theirs.run_with_hooks(tokens, fwd_hooks=[(name, halve)]), name)
