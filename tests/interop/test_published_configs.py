"""config.json files with the keys of published models: old ones, and those of their time.

The sizes are small; every other key, also those that transformers ignores, is as it was published.
"""

import json

import pytest
import torch
import transformers

from thinker.interop import load
from thinker.interop.hf_config import from_hf_config
from thinker.runtime.errors import UserError

GPT2 = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 96, "embd_pdrop": 0.1, "eos_token_id": 96, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 3,
"n_positions": 64, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
"summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 97}"""
PYTHIA = """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
"hidden_act": "gelu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 128,
"layer_norm_eps": 1e-05, "max_position_embeddings": 64, "model_type": "gpt_neox",
"num_attention_heads": 4, "num_hidden_layers": 3, "rotary_emb_base": 10000, "rotary_pct": 0.25,
"tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.24.0",
"use_cache": true, "use_parallel_residual": true, "vocab_size": 97}"""
NEOX_20B = """{"architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0,
"eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 32,
"initializer_range": 0.02, "intermediate_size": 128, "layer_norm_eps": 1e-05,
"max_position_embeddings": 64, "model_type": "gpt_neox", "num_attention_heads": 4,
"num_hidden_layers": 2, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false,
"torch_dtype": "float16", "use_cache": true, "vocab_size": 97}"""
TINY_STORIES = """{"activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"],
"attention_dropout": 0, "attention_layers": ["global", "local", "global", "local"],
"attention_types": [[["global", "local"], 2]], "bos_token_id": 96, "classifier_dropout": 0.1,
"embed_dropout": 0, "eos_token_id": 96, "gradient_checkpointing": false, "hidden_size": 32,
"initializer_range": 0.02, "intermediate_size": null, "layer_norm_epsilon": 1e-05,
"max_position_embeddings": 64, "model_type": "gpt_neo", "num_heads": 4, "num_layers": 4,
"resid_dropout": 0, "summary_activation": null, "summary_first_dropout": 0.1,
"summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"torch_dtype": "float32", "transformers_version": "4.28.1", "use_cache": true, "vocab_size": 97,
"window_size": 16}"""
OPT = """{"_name_or_path": "facebook/opt-125m", "activation_dropout": 0.0, "activation_function": "relu",
"architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
"do_layer_norm_before": true, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 128, "hidden_size": 32,
"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 64, "model_type": "opt",
"num_attention_heads": 4, "num_hidden_layers": 3, "pad_token_id": 1, "prefix": "</s>",
"torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": true,
"vocab_size": 97, "word_embed_proj_dim": 32}"""
GEMMA = """{"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 2, "eos_token_id": 1, "head_dim": 16, "hidden_act": "gelu",
"hidden_activation": null, "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
"max_position_embeddings": 64, "model_type": "gemma", "num_attention_heads": 4,
"num_hidden_layers": 3, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": true,
"vocab_size": 97}"""
GEMMA2 = """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
"eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 16,
"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32,
"initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 64,
"model_type": "gemma2", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
"pad_token_id": 0, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
"sliding_window": 16, "torch_dtype": "float32", "use_cache": true, "vocab_size": 97}"""
GEMMA3_1B = """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
"eos_token_id": [1, 96], "final_logit_softcapping": null, "head_dim": 16,
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32, "initializer_range": 0.02,
"intermediate_size": 64, "max_position_embeddings": 64, "model_type": "gemma3_text",
"num_attention_heads": 4, "num_hidden_layers": 7, "num_key_value_heads": 1, "pad_token_id": 0,
"query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
"rope_scaling": null, "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 6,
"torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 97}"""
GEMMA3_270M = """{"_sliding_window_pattern": 2, "architectures": ["Gemma3ForCausalLM"],
"attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": null,
"bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": null, "head_dim": 16,
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32, "initializer_range": 0.02,
"intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention",
"sliding_attention", "full_attention"], "max_position_embeddings": 64, "model_type": "gemma3_text",
"num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 1, "pad_token_id": 0,
"query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
"rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 16, "torch_dtype": "bfloat16",
"transformers_version": "4.55.0.dev0", "use_bidirectional_attention": false, "use_cache": true,
"vocab_size": 97}"""
OLMO = """{"architectures": ["OlmoForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"clip_qkv": null, "eos_token_id": 96, "hidden_act": "silu", "hidden_size": 32,
"initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 64,
"model_type": "olmo", "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4,
"pad_token_id": 1, "pretraining_tp": 1, "rope_scaling": null, "rope_theta": 10000.0,
"tie_word_embeddings": true, "torch_dtype": "float32", "transformers_version": "4.40.0.dev0",
"use_cache": true, "vocab_size": 97}"""
OLMO2 = """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"eos_token_id": 96, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
"intermediate_size": 64, "max_position_embeddings": 64, "model_type": "olmo2",
"num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4, "pad_token_id": 1,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false,
"torch_dtype": "float32", "use_cache": true, "vocab_size": 97}"""
OLMO3 = """{"architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"eos_token_id": 96, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
"intermediate_size": 64, "layer_types": ["sliding_attention", "sliding_attention",
"sliding_attention", "full_attention"], "max_position_embeddings": 64, "model_type": "olmo3",
"num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 4, "pad_token_id": 1,
"rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0,
"beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 16, "rope_type": "yarn"},
"rope_theta": 500000, "sliding_window": 16, "tie_word_embeddings": false, "use_cache": true,
"vocab_size": 97}"""
PHI2 = """{"_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"],
"attention_dropout": 0.0, "bos_token_id": 96, "embd_pdrop": 0.0, "eos_token_id": 96,
"hidden_act": "gelu_new", "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 128,
"layer_norm_eps": 1e-05, "max_position_embeddings": 64, "model_type": "phi",
"num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 2,
"partial_rotary_factor": 0.4, "qk_layernorm": false, "resid_pdrop": 0.1, "rope_scaling": null,
"rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "float16", "use_cache": true,
"vocab_size": 97}"""
PHI3 = """{"_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
"attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoConfig":
"configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
"bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 96, "hidden_act": "silu", "hidden_size": 32,
"initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 64,
"model_type": "phi3", "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4,
"original_max_position_embeddings": 64, "pad_token_id": 96, "resid_pdrop": 0.0,
"rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 31,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 97}"""
GRANITE = """{"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
"attention_multiplier": 0.125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
"hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
"logits_scaling": 8.0, "max_position_embeddings": 64, "mlp_bias": false, "model_type": "granite",
"num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0,
"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 97}"""
STABLELM = """{"architectures": ["StableLmForCausalLM"], "bos_token_id": 96, "eos_token_id": 96,
"hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 64,
"max_position_embeddings": 64, "model_type": "stablelm", "layer_norm_eps": 1e-05,
"num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4,
"partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": false,
"torch_dtype": "float16", "transformers_version": "4.38.0", "use_cache": true,
"use_qkv_bias": true, "vocab_size": 97}"""
STARCODER2 = """{"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
"attention_softmax_in_fp32": true, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
"hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "initializer_range": 0.018042,
"intermediate_size": 128, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 64,
"mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
"num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
"residual_dropout": 0.1, "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": true,
"scale_attn_weights": true, "sliding_window": 16, "torch_dtype": "float32", "use_bias": true,
"use_cache": true, "vocab_size": 97}"""
COMMAND_R = """{"architectures": ["CohereForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "bos_token_id": 5, "eos_token_id": 96, "hidden_act": "silu",
"hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "layer_norm_eps": 1e-05,
"logit_scale": 0.0625, "max_position_embeddings": 64, "model_max_length": 131072,
"model_type": "cohere", "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
"pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0, "torch_dtype": "float16",
"use_cache": true, "use_qk_norm": false, "vocab_size": 97}"""
LLAMA32 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 95, "eos_token_id": [94, 96], "head_dim": 8, "hidden_act": "silu",
"hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
"max_position_embeddings": 64, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 4,
"num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
"rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
"original_max_position_embeddings": 16, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 97}"""
QWEN25 = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 96,
"eos_token_id": 96, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
"intermediate_size": 64, "max_position_embeddings": 64, "max_window_layers": 24,
"model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 64, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 97}"""
PUBLISHED = {
    "gpt2": GPT2,
    "pythia": PYTHIA,
    "gpt-neox-20b": NEOX_20B,
    "TinyStories": TINY_STORIES,
    "opt-125m": OPT,
    "gemma-2b": GEMMA,
    "gemma-2-2b": GEMMA2,
    "gemma-3-1b": GEMMA3_1B,
    "gemma-3-270m": GEMMA3_270M,
    "OLMo-1B": OLMO,
    "OLMo-2-1B": OLMO2,
    "Olmo-3-7B": OLMO3,
    "phi-2": PHI2,
    "Phi-3-mini-4k": PHI3,
    "granite-3-2b": GRANITE,
    "stablelm-2-1.6b": STABLELM,
    "starcoder2-3b": STARCODER2,
    "command-r": COMMAND_R,
    "Llama-3.2-1B": LLAMA32,
    "Qwen2.5-0.5B": QWEN25,
}


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_a_folder_with_the_keys_of_a_published_model(tmp_path, name):
    (tmp_path / "config.json").write_text(PUBLISHED[name])
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.1)
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").rename(tmp_path / "model.safetensors")
    ours, _ = load(tmp_path)
    tokens = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    largest = expected.abs().max().item()
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5 * largest)
    assert expected.std() > 0.01 * largest


OPT_350M = json.loads(OPT) | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
OLMO_7B = json.loads(OLMO) | {"clip_qkv": 8.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
PHI3_128K = json.loads(PHI3) | {"rope_scaling": LONGROPE}
OTHERS = {
    "opt-350m": (OPT_350M, "word_embed_proj_dim is 16"),
    "OLMo-7B": (OLMO_7B, "clip_qkv is 8.0"),
    "Phi-3-mini-128k": (PHI3_128K, "rope_type is 'longrope'"),
    "falcon-rw-1b": ({"model_type": "falcon", "alibi": True}, "model_type is 'falcon'"),
    "mamba-130m": ({"model_type": "mamba"}, "model_type is 'mamba'"),
    "Qwen3-30B-A3B": ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_expressed_is_refused_in_one_sentence(name):
    values, message = OTHERS[name]
    with pytest.raises(UserError, match=message) as caught:
        from_hf_config(values)
    assert len(str(caught.value).splitlines()) == 1
