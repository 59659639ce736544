"""The peers that we are measured beside, with the same weights."""

from __future__ import annotations

from typing import Any

from model import Thinker

NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "blocks": "model.layers",
}


def as_transformers(thinker: Thinker) -> Any:
    """The same model as transformers' Qwen3ForCausalLM, or LlamaForCausalLM without QK-norm, in fp32."""
    import transformers

    config = thinker.config
    family = "Qwen3" if config.qk_norm else "Llama"
    theirs = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings,
        attention_bias=False,
    )
    other = getattr(transformers, f"{family}ForCausalLM")(theirs).eval()
    state = {
        ".".join(NAMES.get(part, part) for part in name.split(".")): tensor
        for name, tensor in thinker.state_dict().items()
    }
    other.load_state_dict(state)
    return other
