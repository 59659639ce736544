"""Random configurations of every family, drawn by a seed, as models of transformers.

The environment variable THINKER_SEED draws fresh ones.
"""

import os
import random

import torch
import transformers

from thinker.interop.families import FAMILIES

SEED = int(os.environ.get("THINKER_SEED", "57"))
VOCAB = 97
MAX_LEN = 96


def draw(family: str, number: int) -> dict:
    """Keys of a transformers config. The first numbers are MHA, grouped and multi-query attention
    where the family has them."""
    rng = random.Random(f"{SEED} {family} {number}")
    n_kv_heads = [4, 2, 1][number % 3]
    head_dim = rng.choice([8, 16])  # of which any share is even
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 4 * head_dim,
        "intermediate_size": rng.choice([40, 64, 72]),
        "num_hidden_layers": rng.choice([2, 3, 4]),
        "num_attention_heads": 4,
        "num_key_value_heads": n_kv_heads,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    rope = draw_rope(rng)
    return MORE[family](rng, values, rope)


def draw_rope(rng: random.Random) -> dict:
    """RoPE with a base and, half of the time, a scaling."""
    theta = rng.choice([1e4, 5e5])
    kinds = [
        {"rope_type": "default"},
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ]
    return {"rope_theta": theta} | rng.choice(kinds)


def kinds_of_layers(rng: random.Random, values: dict) -> list[str]:
    """A kind for each layer, both of them present."""
    kinds = ["full_attention", "sliding_attention"]
    more = rng.choices(kinds, k=values["num_hidden_layers"] - 2)
    return rng.sample([*kinds, *more], k=values["num_hidden_layers"])


def llama(rng, values, rope):
    bias = {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    return values | bias | {"rope_parameters": rope, "head_dim": rng.choice([8, 10])}


def mistral(rng, values, rope):
    window = rng.choice([None, 5, 9])
    return values | {"rope_parameters": rope, "sliding_window": window}


def qwen2(rng, values, rope):
    windows = {"use_sliding_window": True, "sliding_window": 7}
    windows["layer_types"] = kinds_of_layers(rng, values)
    return values | {"rope_parameters": rope} | rng.choice([{}, windows])


def qwen3(rng, values, rope):
    return qwen2(rng, values, rope) | {"head_dim": rng.choice([8, 10])}


def smollm3(rng, values, rope):
    return values | {"rope_parameters": rope, "no_rope_layer_interval": rng.choice([2, 3])}


def granite(rng, values, rope):
    return values | {
        "rope_parameters": rope,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "embedding_multiplier": rng.choice([1.0, 12.0]),
        "residual_multiplier": rng.choice([1.0, 0.22]),
        "logits_scaling": rng.choice([1.0, 6.0, 13.0]),
        "attention_multiplier": rng.choice([0.1, 0.3]),
    }


def phi3(rng, values, rope):
    rope = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    rope["partial_rotary_factor"] = rng.choice([1.0, 0.75, 0.5])
    return values | {"rope_parameters": rope, "sliding_window": rng.choice([None, 6])}


def gemma(rng, values, rope):
    return values | {"rope_parameters": rope, "head_dim": rng.choice([8, 16])}


def gemma2(rng, values, rope):
    more = {
        "sliding_window": rng.choice([5, 9]),
        "query_pre_attn_scalar": rng.choice([8, 24]),
        "attn_logit_softcapping": rng.choice([None, 5.0]),
        "final_logit_softcapping": rng.choice([None, 3.0]),
        "layer_types": kinds_of_layers(rng, values),
    }
    return gemma(rng, values, rope) | more


def gemma3_text(rng, values, rope):
    ropes = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}
    ropes["sliding_attention"]["rope_type"] = "default"
    more = {"rope_parameters": ropes, "attn_logit_softcapping": None}
    return gemma2(rng, values, rope) | more


def olmo(rng, values, rope):
    return values | {"rope_parameters": rope, "attention_bias": rng.random() < 0.5}


def olmo3(rng, values, rope):
    same = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    ropes = {"full_attention": rope, "sliding_attention": same}
    more = {"sliding_window": rng.choice([5, 9]), "layer_types": kinds_of_layers(rng, values)}
    return olmo(rng, values, rope) | more | {"rope_parameters": ropes}


def stablelm(rng, values, rope):
    share = rng.choice([0.25, 0.5, 1.0])
    return values | {
        "rope_parameters": rope | {"partial_rotary_factor": share},
        "use_qkv_bias": rng.random() < 0.5,
        "qk_layernorm": rng.random() < 0.5,
        "use_parallel_residual": rng.random() < 0.5,
    }


def starcoder2(rng, values, rope):
    more = {"use_bias": rng.random() < 0.5, "sliding_window": rng.choice([None, 6])}
    return values | more | {"rope_parameters": rope}


def cohere(rng, values, rope):
    more = {"use_qk_norm": rng.random() < 0.5, "attention_bias": rng.random() < 0.5}
    more["logit_scale"] = rng.choice([0.0625, 0.3, 1.0])
    return values | more | {"rope_parameters": rope}


def phi(rng, values, rope):
    share = rng.choice([0.25, 0.5, 1.0])
    more = {"qk_layernorm": rng.random() < 0.5}
    return values | more | {"rope_parameters": rope | {"partial_rotary_factor": share}}


def gpt2(rng, values, rope):
    return {
        "vocab_size": VOCAB,
        "n_embd": values["hidden_size"],
        "n_layer": values["num_hidden_layers"],
        "n_head": rng.choice([2, 4]),
        "n_positions": 2 * MAX_LEN,
        "n_inner": rng.choice([None, 40]),
        "activation_function": rng.choice(["gelu_new", "relu", "gelu"]),
        "tie_word_embeddings": values["tie_word_embeddings"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def gpt_neo(rng, values, rope):
    kinds = rng.choice([["global", "local"], ["local"], ["global"]])
    return {
        "vocab_size": VOCAB,
        "hidden_size": values["hidden_size"],
        "num_layers": 2 * len(kinds),
        "num_heads": 4,
        "max_position_embeddings": 2 * MAX_LEN,
        "intermediate_size": rng.choice([None, 40]),
        "attention_types": [[kinds, 2]],
        "window_size": rng.choice([4, 9]),
        "tie_word_embeddings": values["tie_word_embeddings"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def gpt_neox(rng, values, rope):
    del values["num_key_value_heads"]
    share = rng.choice([0.25, 0.5, 1.0])
    return values | {
        "rope_parameters": rope | {"partial_rotary_factor": share},
        "use_parallel_residual": rng.random() < 0.7,
        "attention_bias": rng.random() < 0.7,
        "hidden_act": rng.choice(["gelu", "gelu_new"]),
    }


def opt(rng, values, rope):
    del values["num_key_value_heads"], values["pad_token_id"]
    values["ffn_dim"] = values.pop("intermediate_size")
    values["max_position_embeddings"] = 2 * MAX_LEN
    more = {"enable_bias": rng.random() < 0.5, "word_embed_proj_dim": values["hidden_size"]}
    return values | more | {"pad_token_id": 1}


MORE = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "smollm3": smollm3,
    "granite": granite,
    "phi3": phi3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "olmo": olmo,
    "olmo2": olmo,
    "olmo3": olmo3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
    "cohere": cohere,
    "phi": phi,
    "gpt2": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "opt": opt,
}
assert MORE.keys() == FAMILIES.keys()


def drawn_model(family: str, number: int) -> torch.nn.Module:
    """A model of transformers with random weights that all matter."""
    config = transformers.AutoConfig.for_model(family, **draw(family, number))
    torch.manual_seed(number)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.1)
    return model
