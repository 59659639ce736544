"""Conversion between ThinkerConfig and config.json of transformers."""

import re
from typing import Any

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import ThinkerConfig
from thinker.model.positions import RopeScaling
from thinker.runtime.errors import UserError, did_you_mean

ARCHITECTURES = {
    name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
}
SIZES = {  # key of config.json -> field of ThinkerConfig
    "vocab_size": "vocab_size", "hidden_size": "d_model", "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "max_position_embeddings": "max_seq_len",
}  # fmt: skip
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_SCALING = {  # key of rope_scaling -> field of RopeScaling
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim", "truncate": "truncate", ORIGINAL_LENGTH: "original_max_seq_len",
}  # fmt: skip
# Keys that from_hf_config() reads.
READ = {
    "model_type", "architectures", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "no_rope_layers", "no_rope_layer_interval", ORIGINAL_LENGTH, *SIZES,
}  # fmt: skip
# Keys that change the result, with the only value that Thinker supports.
REQUIRED_VALUES = {
    "hidden_act": "silu",
    **dict.fromkeys(
        ("mlp_bias", "attention_bias", "is_encoder_decoder", "rope_interleaved", "use_mrope"), False
    ),
    **dict.fromkeys(("is_decoder", "add_cross_attention"), False),
    **dict.fromkeys(
        ("quantization_config", "per_layer_config", "auto_map", "neftune_noise_alpha"), None
    ),
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
}
# Keys that do not change what the model computes.
IGNORED = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "pretraining_tp", "tokenizer_class",
    "_name_or_path", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p",
    "repetition_penalty", "num_beams", "output_scores", "use_bfloat16", "gradient_checkpointing",
    "_flash_attn_2_enabled", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "torchscript", "model_name", "is_llama_config",
    "transformers.js_config", "unsloth_version", "unsloth_fixed", "_attn_implementation_autoset",
    "_attn_implementation",
}  # fmt: skip
TYPES = {  # of keys whose type ThinkerConfig does not check
    **dict.fromkeys(("architectures", "layer_types", "no_rope_layers"), list),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict),
    **dict.fromkeys(
        ("sliding_window", "max_window_layers", "no_rope_layer_interval", ORIGINAL_LENGTH, *SIZES),
        int,
    ),
    "use_sliding_window": bool,
}
TYPE_NAMES = {list: "a list", dict: "a mapping", bool: "true or false", int: "an integer above 0"}


def from_hf_config(values: dict[str, Any]) -> ThinkerConfig:
    """Convert a config.json to a ThinkerConfig. Raises UserError for an unsupported key or value."""
    # A null differs from a missing key: Mistral has a window by default, and Qwen fewer KV heads than query heads.
    nulls, model_type = (
        {name for name, value in values.items() if value is None},
        values.get("model_type"),
    )
    values = {name: value for name, value in values.items() if value is not None}
    _check_values(values, model_type)
    if model_type != "llama" and "num_key_value_heads" not in values.keys() | nulls:
        raise UserError("config.json has no num_key_value_heads; add it")
    theta, scaling = _read_rope(values, 2e6 if model_type == "smollm3" else 1e4)
    fields = {ours: values[theirs] for theirs, ours in SIZES.items()}
    fields |= {
        "n_kv_heads": values.get("num_key_value_heads"),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    fields |= {
        "head_dim": values.get("head_dim", 128 if model_type == "qwen3" else None),
        "init": "fan_in",
    }
    fields |= {
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "attention_bias": model_type == "qwen2",
    }
    fields["tie_embeddings"] = values.get("tie_word_embeddings", model_type == "smollm3")
    fields["qk_norm"] = model_type == "qwen3"
    fields = {name: value for name, value in fields.items() if value is not None}
    n_layers = ThinkerConfig.from_dict(
        fields
    ).n_layers  # rejects wrong numbers before lists are built from them
    if model_type == "smollm3":
        every = values.get("no_rope_layer_interval", 4)
        uses_rope = values.get(
            "no_rope_layers", [int((layer + 1) % every != 0) for layer in range(n_layers)]
        )
        if len(uses_rope) != n_layers or any(flag not in (0, 1) for flag in uses_rope):
            wanted = "it must be a list with a 0 or a 1 for each layer"
            raise UserError(f"config.json: no_rope_layers is {uses_rope}; {wanted}")
        fields["no_rope_layers"] = [
            layer for layer in range(n_layers) if not uses_rope[layer]
        ] or None
    if "sliding_window" in nulls:
        values["sliding_window"] = None
    fields["attention"] = _read_windows(
        values, model_type, n_layers, fields.get("no_rope_layers") or []
    )
    return ThinkerConfig.from_dict(fields)


def _check_values(values: dict[str, Any], model_type: Any) -> None:
    """Raise UserError for an unsupported model type, key, type or value, or a missing size."""
    if model_type not in [*ARCHITECTURES]:  # it may be of any type
        known = (
            f"choose from {', '.join(ARCHITECTURES)}{did_you_mean(str(model_type), ARCHITECTURES)}"
        )
        raise UserError(f"config.json: model_type is {model_type!r}; {known}")
    for name, kind in TYPES.items():
        value = values.get(name)
        smallest = 0 if name == "max_window_layers" else 1
        if value is not None and (type(value) is not kind or (kind is int and value < smallest)):
            raise UserError(f"config.json: {name} is {value!r}; it must be {TYPE_NAMES[kind]}")
    for name, value in values.items():
        has_bias = name == "attention_bias" and model_type == "qwen2"
        if name in REQUIRED_VALUES and value != REQUIRED_VALUES[name] and not has_bias:
            raise UserError(
                f"config.json: {name} is {value!r}; Thinker supports only {REQUIRED_VALUES[name]!r}"
            )
        if name not in READ | REQUIRED_VALUES.keys() | IGNORED:
            raise UserError(
                f"config.json has an unsupported key {name}, which may change the output of {model_type}"
            )
    if not any(
        str(name).endswith("ForCausalLM") for name in values.get("architectures", ["ForCausalLM"])
    ):
        raise UserError(
            f"config.json: architectures is {values['architectures']}; it must contain a ...ForCausalLM"
        )
    if missing := [name for name in SIZES if name not in values]:
        raise UserError(f"config.json has no {missing[0]}; add it")


def _read_windows(
    values: dict[str, Any], model_type: str, n_layers: int, no_rope_layers: list[int]
) -> str | list[str]:
    """Attention pattern of the layers. Like our window(n), sliding_window includes the query itself."""
    window = values.get("sliding_window", None if model_type == "smollm3" else 4096)
    if model_type == "llama" or (
        model_type != "mistral" and not values.get("use_sliding_window", False)
    ):
        window = None
    first = 0 if model_type == "mistral" else values.get("max_window_layers", 28)
    windowed = no_rope_layers if model_type == "smollm3" else range(first, n_layers)
    default = [
        "sliding_attention" if window and i in windowed else "full_attention"
        for i in range(n_layers)
    ]
    layer_types = values.get("layer_types", default)
    patterns = {"full_attention": "full"} | (
        {"sliding_attention": f"window({window})"} if window else {}
    )
    if len(layer_types) != n_layers or any(kind not in [*patterns] for kind in layer_types):
        wanted = f"it must list one of {', '.join(patterns)} per layer"
        raise UserError(f"config.json: layer_types is {layer_types}; {wanted}")
    if layer_types != default and model_type in (
        "llama",
        "mistral",
    ):  # versions of transformers disagree here
        raise UserError(
            f"config.json: layer_types is {layer_types}; {model_type} needs {default[0]} in every layer"
        )
    layers = [patterns[kind] for kind in layer_types]
    return layers[0] if len(set(layers)) == 1 else layers


def _read_rope(values: dict[str, Any], default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling from rope_scaling or, with lower precedence, rope_parameters."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or values.get("rope_theta", default_theta)
    kind = rope.pop("rope_type", None) or rope.get("type", "default")
    rope = {name: value for name, value in rope.items() if value is not None and name != "type"}
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            "config.json: partial_rotary_factor is not 1; Thinker supports only 1 (RoPE on the whole head)"
        )
    if kind == "default" and not rope.keys() - {ORIGINAL_LENGTH}:
        return theta, None
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise UserError(
            f"config.json: rope_type is {kind!r}; choose from default, linear, dynamic, yarn, llama3"
        )
    max_length = values["max_position_embeddings"]
    if kind == "dynamic":
        rope[ORIGINAL_LENGTH] = max_length  # transformers ignores any other value
    elif kind != "linear":
        rope[ORIGINAL_LENGTH] = values.get(ORIGINAL_LENGTH) or rope.get(ORIGINAL_LENGTH, max_length)
    if kind != "linear" and (type(rope[ORIGINAL_LENGTH]) is not int or rope[ORIGINAL_LENGTH] < 1):
        raise UserError(
            f"config.json: {ORIGINAL_LENGTH} is {rope[ORIGINAL_LENGTH]!r}; it must be {TYPE_NAMES[int]}"
        )
    if kind == "yarn":
        rope.setdefault("factor", max_length / rope[ORIGINAL_LENGTH])
        if "attention_factor" in rope or not (rope.get("mscale") and rope.get("mscale_all_dim")):
            rope = {name: value for name, value in rope.items() if not name.startswith("mscale")}
    if unknown := [name for name in rope if name not in ROPE_SCALING]:
        raise UserError(f"config.json: rope_scaling has an unsupported key {unknown[0]}; remove it")
    return theta, {"type": kind} | {ROPE_SCALING[name]: value for name, value in rope.items()}


def hf_model_type(config: ThinkerConfig) -> str:
    """Return the equivalent model_type of transformers. Raises UserError with the reason if there is none."""
    layers = [pattern.text for pattern in config.patterns]
    windows = {text for text in layers if text != "full"}
    is_one_window = len(windows) <= 1 and all(
        re.fullmatch(r"window\(\d+\)", text) for text in windows
    )
    obstacles = {
        f"model.positions={config.positions}": config.positions != "rope",
        "model.attn_logit_softcap": config.attn_logit_softcap is not None,
        "model.attention_sinks": config.attention_sinks,
        "model.token_shift": config.token_shift,
        "model.n_kv_heads_per_layer": config.n_kv_heads_per_layer is not None,
        "both model.attention_bias and model.qk_norm": config.attention_bias and config.qk_norm,
        f"model.attention={config.attention}": not is_one_window,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise UserError(
                f"cannot export a model with {obstacle}; no transformers architecture supports it"
            )
    if config.no_rope_layers:
        if config.qk_norm or config.attention_bias or windows:
            raise UserError(
                "cannot export model.no_rope_layers with QK-norm, biases or windows; remove one of them"
            )
        return "smollm3"
    if config.qk_norm or config.attention_bias:
        return "qwen3" if config.qk_norm else "qwen2"
    if windows and "full" in layers:
        raise UserError(
            "cannot export windows in only some layers without model.qk_norm or model.attention_bias"
        )
    return "mistral" if windows else "llama"


def to_hf_config(config: ThinkerConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Create a config.json with keys that older versions also read. Raises the errors of hf_model_type()."""
    model_type = hf_model_type(config)
    values = {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type}
    values |= {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    values |= {
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
    }
    values |= {
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    values |= {
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    values |= {"initializer_range": 0.02, "torch_dtype": "float32", **special_token_ids(tokenizer)}
    if model_type in ("llama", "qwen3", "smollm3"):
        values["attention_bias"] = False
    if model_type in ("llama", "smollm3"):
        values["mlp_bias"] = False
    if config.rope_scaling is not None:
        scaling = vars(RopeScaling.from_dict(config.rope_scaling))
        scaling = {name: value for name, value in scaling.items() if value is not None}
        kind = scaling.pop("type")
        if kind == "dynamic":  # transformers reads the pretraining length from here
            values["max_position_embeddings"] = scaling.pop("original_max_seq_len")
        hf_keys = {ours: theirs for theirs, ours in ROPE_SCALING.items()}
        values["rope_scaling"] = {"rope_type": kind} | {
            hf_keys[name]: value for name, value in scaling.items()
        }
    layers = [pattern.text for pattern in config.patterns]
    window = next((int(text[7:-1]) for text in layers if text != "full"), None)
    if model_type == "mistral":
        values["sliding_window"] = window
    elif model_type in ("qwen2", "qwen3"):
        layer_types = [
            "full_attention" if text == "full" else "sliding_attention" for text in layers
        ]
        first = layer_types.index("sliding_attention") if window else config.n_layers
        values |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
        }
        values["layer_types"] = layer_types
    elif model_type == "smollm3":
        values["no_rope_layers"] = [
            int(layer not in config.no_rope_layers) for layer in range(config.n_layers)
        ]
    return values


def special_token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bos, eos and pad, always set because the default ids of transformers belong to other vocabularies."""
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    eos = tokenizer.eos_ids if len(tokenizer.eos_ids) > 1 else tokenizer.eos_id
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": tokenizer.eos_id}
