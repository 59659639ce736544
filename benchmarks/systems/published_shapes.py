"""The shapes of published models, which benchmarks fill with random weights."""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model of transformers without its weights."""

    model_type: str
    config: dict[str, Any]
    note: str = ""  # how it differs from the published one


PUBLISHED = {
    "gpt2": Published("gpt2", {"vocab_size": 50257}),
    "pythia-70m": Published(
        "gpt_neox",
        {
            "vocab_size": 50304,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 2048,
        },
    ),
    "TinyStories-33M": Published(
        "gpt_neo",
        {
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_layers": 4,
            "num_heads": 16,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 256,
            "max_position_embeddings": 2048,
        },
    ),
    "gemma-3-270m": Published(
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
        },
    ),
    "SmolLM2-135M": Published(
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": Published(
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.2-1B": Published(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
    ),
    "OLMo-2-1B": Published(
        "olmo2",
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "phi-3-mini": Published(
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
        },
        "4 of 32 layers",
    ),
}

# Changes that make a model small, by model_type.
ONE_LAYER = {
    "gpt2": {"n_layer": 1, "n_embd": 96},
    "gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]], "hidden_size": 96},
}
FEW_TOKENS = 300


def small_config(published: Published) -> dict[str, Any]:
    """The config of a model with one layer and few tokens."""
    changes = ONE_LAYER.get(published.model_type, {"num_hidden_layers": 1})
    return published.config | changes | {"vocab_size": FEW_TOKENS}
