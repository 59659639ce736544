"""A tiny random model of every family, made by transformers and saved with a tokenizer of its kind."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizer_kinds import build

from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.interop import load

CONTEXT = 96
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
# What distinguishes a family, in the form that differs most from the default block.
FORMS = {
    "qwen3": GROUPED | {"head_dim": 32},
    "qwen2": GROUPED,
    "llama": GROUPED | {"attention_bias": True, "mlp_bias": True},
    "mistral": GROUPED | {"sliding_window": 9},
    "smollm3": GROUPED | {"num_hidden_layers": 4},
    "granite": GROUPED
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.1,
    },
    "phi3": GROUPED,
    "gemma": GROUPED | {"head_dim": 32},
    "gemma2": GROUPED | {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24},
    "gemma3_text": GROUPED | {"head_dim": 32, "sliding_window": 9, "num_hidden_layers": 7},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": GROUPED | {"sliding_window": 9, "num_hidden_layers": 5},
    "stablelm": GROUPED
    | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "cohere": GROUPED | {"use_qk_norm": True, "logit_scale": 0.3},
    "starcoder2": GROUPED | {"sliding_window": 9},
    "phi": GROUPED | {"qk_layernorm": True},
    "gpt2": GPT2,
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": CONTEXT,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 9,
    },
    "gpt_neox": SIZES,
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "word_embed_proj_dim": 64,
    },
}
NAMES = list(FORMS)
_folders = tempfile.TemporaryDirectory(prefix="families-")


@cache
def family_folder(family):
    """A Hugging Face folder, which tests only read."""
    folder = Path(_folders.name, family)
    folder.mkdir()
    build(family, folder)
    ids = json.loads((folder / "config.json").read_text())
    ids.pop("model_type")
    vocab_size = load_tokenizer(folder).vocab_size
    config = transformers.AutoConfig.for_model(
        family, vocab_size=vocab_size, pad_token_id=None, **FORMS[family], **ids
    )
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 0.5 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, 0.2)
    model.save_pretrained(folder)
    return folder


@cache
def _loaded(family):
    return load(family_folder(family))


def family_model(family):
    """The model, which tests do not change, and its tokenizer."""
    return _loaded(family)
