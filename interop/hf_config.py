"""Conversion between ThinkerConfig and config.json of transformers."""

import re
from collections.abc import Iterable
from typing import Any

from thinker.data.tokenizers.pad_token import find_pad_token
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import ThinkerConfig
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import UserError, did_you_mean

# By model_type.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

# Keys of config.json, and the fields of ThinkerConfig that they set.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}

# Keys of rope_scaling, and the fields of RopeScaling that they set.
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    ORIGINAL_LENGTH: "original_max_seq_len",
}
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")

# Keys that from_hf_config() reads, besides SIZES.
READ = {
    "model_type",
    "architectures",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    ORIGINAL_LENGTH,
}

# Keys that change the result, with the only value that Thinker supports.
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,  # except in qwen2
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "per_layer_config": None,
    "auto_map": None,
    "neftune_noise_alpha": None,
    "pruned_heads": {},
}

# Keys that do not change what the model computes.
IGNORED = {
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "pretraining_tp",
    "tokenizer_class",
    "_name_or_path",
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "num_beams",
    "output_scores",
    "use_bfloat16",
    "gradient_checkpointing",
    "_flash_attn_2_enabled",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "torchscript",
    "model_name",
    "is_llama_config",
    "transformers.js_config",
    "unsloth_version",
    "unsloth_fixed",
    "_attn_implementation_autoset",
    "_attn_implementation",
}

# Types of keys that ThinkerConfig does not check.
TYPES = {
    "architectures": list,
    "layer_types": list,
    "no_rope_layers": list,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "sliding_window": int,
    "max_window_layers": int,
    "no_rope_layer_interval": int,
    ORIGINAL_LENGTH: int,
    **dict.fromkeys(SIZES, int),
    "use_sliding_window": bool,
}
TYPE_NAMES = {list: "a list", dict: "a mapping", bool: "true or false", int: "an integer above 0"}

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def from_hf_config(values: dict[str, Any]) -> ThinkerConfig:
    """Convert a config.json to a ThinkerConfig. Raises UserError for what it does not support."""
    # A null differs from a missing key: Mistral has a window by default, and Qwen fewer KV heads
    # than query heads.
    nulls = {name for name, value in values.items() if value is None}
    values = _without_none(values)
    model_type = values.get("model_type")
    _check_values(values, model_type)
    has_kv_heads = "num_key_value_heads" in values or "num_key_value_heads" in nulls
    if model_type != "llama" and not has_kv_heads:
        raise UserError("config.json has no num_key_value_heads; add it")

    # Defaults of transformers.
    is_qwen3 = model_type == "qwen3"
    is_smollm3 = model_type == "smollm3"
    default_theta = 2e6 if is_smollm3 else 1e4
    default_head_dim = 128 if is_qwen3 else None

    theta, scaling = _read_rope(values, default_theta)
    fields = {ours: values[theirs] for theirs, ours in SIZES.items()}
    fields["n_kv_heads"] = values.get("num_key_value_heads")
    fields["head_dim"] = values.get("head_dim", default_head_dim)
    fields["norm_eps"] = values.get("rms_norm_eps", 1e-6)
    fields["tie_embeddings"] = values.get("tie_word_embeddings", is_smollm3)
    fields["attention_bias"] = model_type == "qwen2"
    fields["qk_norm"] = is_qwen3
    fields["rope_theta"] = theta
    fields["rope_scaling"] = scaling
    fields["init"] = "fan_in"
    fields = _without_none(fields)

    # Rejects wrong numbers before lists are built from them.
    n_layers = ThinkerConfig.from_dict(fields).n_layers
    no_rope_layers = []
    if is_smollm3:
        no_rope_layers = _read_no_rope_layers(values, n_layers)
    if no_rope_layers:
        fields["no_rope_layers"] = no_rope_layers
    window = _read_window(values, model_type)
    if "sliding_window" in nulls:
        window = None
    fields["attention"] = _read_layer_types(values, model_type, window, n_layers, no_rope_layers)
    return ThinkerConfig.from_dict(fields)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_values(values: dict[str, Any], model_type: Any) -> None:
    """Raise UserError for an unsupported model type, key, type or value, or a missing size."""
    if model_type not in list(ARCHITECTURES):  # a list, as it may be of any type
        hint = did_you_mean(str(model_type), ARCHITECTURES)
        known = f"choose from {', '.join(ARCHITECTURES)}{hint}"
        raise UserError(f"config.json: model_type is {model_type!r}; {known}")

    for name, kind in TYPES.items():
        if name not in values:
            continue
        value = values[name]
        smallest = 0 if name == "max_window_layers" else 1
        # Compared by type(), because True is no integer here.
        if type(value) is not kind or (kind is int and value < smallest):
            raise UserError(f"config.json: {name} is {value!r}; it must be {TYPE_NAMES[kind]}")

    for name, value in values.items():
        if name in REQUIRED_VALUES:
            required = REQUIRED_VALUES[name]
            may_differ = name == "attention_bias" and model_type == "qwen2"
            if value != required and not may_differ:
                raise UserError(
                    f"config.json: {name} is {value!r}; Thinker supports only {required!r}"
                )
        elif name not in READ | SIZES.keys() | IGNORED:
            raise UserError(
                f"config.json has an unsupported key {name}, "
                f"which may change the output of {model_type}"
            )

    if "architectures" in values:
        names = values["architectures"]
        if not any(str(name).endswith("ForCausalLM") for name in names):
            raise UserError(
                f"config.json: architectures is {names}; it must contain a ...ForCausalLM"
            )
    for name in SIZES:
        if name not in values:
            raise UserError(f"config.json has no {name}; add it")


def _read_no_rope_layers(values: dict[str, Any], n_layers: int) -> list[int]:
    """The layers without RoPE. The key no_rope_layers has a 1 for each layer *with* RoPE."""
    interval = values.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    uses_rope = values.get("no_rope_layers", default)
    if len(uses_rope) != n_layers or any(flag not in (0, 1) for flag in uses_rope):
        wanted = "it must be a list with a 0 or a 1 for each layer"
        raise UserError(f"config.json: no_rope_layers is {uses_rope}; {wanted}")
    return [layer for layer in range(n_layers) if not uses_rope[layer]]


def _read_window(values: dict[str, Any], model_type: str) -> int | None:
    """Length of the window. Like that of our window(n), it includes the query itself."""
    if model_type == "llama":
        return None
    if model_type == "mistral" or values.get("use_sliding_window", False):
        default = None if model_type == "smollm3" else DEFAULT_WINDOW
        return values.get("sliding_window", default)
    return None


def _read_layer_types(
    values: dict[str, Any],
    model_type: str,
    window: int | None,
    n_layers: int,
    no_rope_layers: list[int],
) -> str | list[str]:
    """Attention pattern of all layers, or of each."""
    windowed: Iterable[int] = ()
    patterns = {"full_attention": "full"}
    if window is not None:
        patterns["sliding_attention"] = f"window({window})"
        if model_type == "mistral":
            windowed = range(n_layers)
        elif model_type == "smollm3":
            windowed = no_rope_layers
        else:
            windowed = range(values.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS), n_layers)
    default = ["full_attention"] * n_layers
    for layer in windowed:
        default[layer] = "sliding_attention"

    layer_types = values.get("layer_types", default)
    known = list(patterns)  # a list, as the values may be of any type
    if len(layer_types) != n_layers or any(kind not in known for kind in layer_types):
        wanted = f"it must list one of {', '.join(patterns)} per layer"
        raise UserError(f"config.json: layer_types is {layer_types}; {wanted}")
    # Versions of transformers disagree about layer_types of these models.
    if model_type in ("llama", "mistral") and layer_types != default:
        raise UserError(
            f"config.json: layer_types is {layer_types}; "
            f"{model_type} needs {default[0]} in every layer"
        )
    layers = [patterns[kind] for kind in layer_types]
    if len(set(layers)) == 1:
        return layers[0]
    return layers


def _read_rope(values: dict[str, Any], default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling from rope_scaling or, with lower precedence, rope_parameters."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or values.get("rope_theta", default_theta)
    kind = rope.pop("rope_type", None) or rope.get("type", "default")
    rope.pop("type", None)
    rope = _without_none(rope)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            "config.json: partial_rotary_factor is not 1; "
            "Thinker supports only 1 (RoPE on the whole head)"
        )
    if kind == "default" and not rope.keys() - {ORIGINAL_LENGTH}:
        return theta, None
    if kind not in ROPE_TYPES:
        choices = ", ".join(["default", *ROPE_TYPES])
        raise UserError(f"config.json: rope_type is {kind!r}; choose from {choices}")
    if kind != "linear":
        rope[ORIGINAL_LENGTH] = _read_original_length(values, rope, kind)
    if kind == "yarn":
        _complete_yarn(rope, values["max_position_embeddings"])
    scaling = {"type": kind}
    for name, value in rope.items():
        if name not in ROPE_SCALING:
            raise UserError(f"config.json: rope_scaling has an unsupported key {name}; remove it")
        scaling[ROPE_SCALING[name]] = value
    return theta, scaling


def _read_original_length(values: dict[str, Any], rope: dict[str, Any], kind: str) -> int:
    """The length of texts in pretraining."""
    max_length = values["max_position_embeddings"]
    if kind == "dynamic":
        return max_length  # transformers ignores any other value
    length = values.get(ORIGINAL_LENGTH) or rope.get(ORIGINAL_LENGTH, max_length)
    if type(length) is not int or length < 1:
        raise UserError(
            f"config.json: {ORIGINAL_LENGTH} is {length!r}; it must be {TYPE_NAMES[int]}"
        )
    return length


def _complete_yarn(rope: dict[str, Any], max_length: int) -> None:
    """Set the default factor, and remove what transformers ignores."""
    rope.setdefault("factor", max_length / rope[ORIGINAL_LENGTH])
    has_mscale = rope.get("mscale") and rope.get("mscale_all_dim")
    if "attention_factor" in rope or not has_mscale:
        rope.pop("mscale", None)
        rope.pop("mscale_all_dim", None)


def hf_model_type(config: ThinkerConfig) -> str:
    """Return the equivalent model_type of transformers.

    Raises UserError with the reason if there is none.
    """
    layers = [pattern.text for pattern in config.patterns]
    windows = {text for text in layers if text != "full"}
    # transformers has one sliding_window for all layers.
    is_one_window = len(windows) <= 1 and all(
        re.fullmatch(r"window\(\d+\)", text) for text in windows
    )
    obstacles = {
        f"model.positions={config.positions}": config.positions != "rope",
        "model.attn_logit_softcap": config.attn_logit_softcap is not None,
        "model.attention_sinks": config.attention_sinks,
        "model.token_shift": config.token_shift,
        f"model.mlp={config.mlp}": config.mlp != "swiglu",
        f"model.activation={config.activation}": config.activation != "silu",
        f"model.norm={config.norm}": config.norm != "rmsnorm",
        "model.n_kv_heads_per_layer": config.n_kv_heads_per_layer is not None,
        "both model.attention_bias and model.qk_norm": config.attention_bias and config.qk_norm,
        f"model.attention={config.attention}": not is_one_window,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise UserError(
                f"cannot export a model with {obstacle}; no transformers architecture supports it"
            )
    # Only smollm3 has layers without RoPE.
    if config.no_rope_layers:
        if config.qk_norm or config.attention_bias or windows:
            raise UserError(
                "cannot export model.no_rope_layers with QK-norm, biases or windows; "
                "remove one of them"
            )
        return "smollm3"
    if config.qk_norm:
        return "qwen3"
    if config.attention_bias:
        return "qwen2"
    if not windows:
        return "llama"
    if "full" in layers:
        raise UserError(
            "cannot export windows in only some layers without model.qk_norm "
            "or model.attention_bias"
        )
    return "mistral"


def to_hf_config(config: ThinkerConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Create a config.json with keys that older versions also read.

    Raises the errors of hf_model_type().
    """
    model_type = hf_model_type(config)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
    }
    for theirs, ours in SIZES.items():
        values[theirs] = getattr(config, ours)
    values |= {
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    }
    values |= special_token_ids(tokenizer, config.vocab_size)
    if model_type in ("llama", "qwen3", "smollm3"):
        values["attention_bias"] = False
    if model_type in ("llama", "smollm3"):
        values["mlp_bias"] = False
    if config.rope_scaling is not None:
        _write_rope_scaling(values, RopeScaling.from_dict(config.rope_scaling))
    if model_type == "smollm3":
        without = config.no_rope_layers
        values["no_rope_layers"] = [int(n not in without) for n in range(config.n_layers)]
    elif model_type != "llama":
        _write_windows(values, config)
    return values


def _write_rope_scaling(values: dict[str, Any], scaling: RopeScaling) -> None:
    """Set the keys of config.json for RoPE scaling."""
    fields = _without_none(vars(scaling))
    if scaling.type == "dynamic":
        # transformers reads the length of pretraining from here.
        values["max_position_embeddings"] = fields.pop("original_max_seq_len")
    rope = {"rope_type": fields.pop("type")}
    theirs = {ours: name for name, ours in ROPE_SCALING.items()}
    for ours, value in fields.items():
        rope[theirs[ours]] = value
    values["rope_scaling"] = rope


def _write_windows(values: dict[str, Any], config: ThinkerConfig) -> None:
    """Set the keys of config.json for windows in the attention of mistral, qwen2 or qwen3."""
    window = None
    first = config.n_layers
    layer_types = []
    for layer, pattern in enumerate(config.patterns):
        if pattern.text == "full":
            layer_types.append("full_attention")
            continue
        layer_types.append("sliding_attention")
        window = int(re.fullmatch(r"window\((\d+)\)", pattern.text)[1])
        first = min(first, layer)
    if values["model_type"] == "mistral":
        values["sliding_window"] = window
        return
    values["use_sliding_window"] = window is not None
    values["sliding_window"] = window
    values["max_window_layers"] = first
    values["layer_types"] = layer_types


def special_token_ids(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    """bos, eos and pad for a model with `vocab_size` ids.

    They are always set, because the default ids of transformers belong to other vocabularies.
    """
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    eos = tokenizer.eos_id
    if len(tokenizer.eos_ids) > 1:
        eos = tokenizer.eos_ids
    pad = find_pad_token(tokenizer, vocab_size)
    pad_id = None
    if pad is not None:
        pad_id = pad.id
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": pad_id}
