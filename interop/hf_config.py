"""Conversion between ThinkerConfig and config.json of transformers."""

from typing import Any

from thinker.data.tokenizers.pad_token import find_pad_token
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.families import FAMILIES, Family
from thinker.interop.families.config_parts import Only, check_type
from thinker.model import ThinkerConfig
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import UserError, did_you_mean

# Keys of all families that change the result, with the only value that Thinker supports.
COMMON = Only(
    {
        "is_encoder_decoder": False,
        "is_decoder": False,
        "add_cross_attention": False,
        "rope_interleaved": False,
        "use_mrope": False,
        "quantization_config": None,
        "per_layer_config": None,
        "auto_map": None,
        "neftune_noise_alpha": None,
        "pruned_heads": {},
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }
)

# Keys that do not change what the model computes.
IGNORED = {
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "initializer_range",
    "init_std",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "activation_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "resid_dropout",
    "embed_dropout",
    "residual_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "classifier_dropout",
    "dropout",
    "layerdrop",
    "reorder_and_upcast_attn",
    "n_ctx",
    "prefix",
    "task_specific_params",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "pretraining_tp",
    "tokenizer_class",
    "_name_or_path",
    "max_length",
    "model_max_length",
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

# Fields that a folder of transformers does not store, because they change only training, or are
# stored as a part of others.
NOT_STORED = ("init", "head_init_std", "dropout", "attention_temperature", "window")


def find_family(model_type: Any) -> Family:
    """The row of the model_type of a config.json. Raises UserError if it is not supported.

    A program wrote it, so it is not misspelled: a similar name is another architecture.
    """
    if model_type in list(FAMILIES):  # a list, as it may be of any type
        return FAMILIES[model_type]
    if model_type is None:
        raise UserError(f"config.json has no model_type; {_supported()}")
    raise UserError(f"config.json: model_type is {model_type!r}, unsupported; {_supported()}")


def _supported() -> str:
    return f"Thinker knows {', '.join(sorted(FAMILIES))}"


def from_hf_config(values: dict[str, Any]) -> ThinkerConfig:
    """Convert a config.json to a ThinkerConfig. Raises UserError for what it does not support."""
    family = find_family(values.get("model_type"))
    others = {name: values.get(name) for name in COMMON.keys - family.keys}
    COMMON.read(others, {})
    known = family.keys | COMMON.keys | IGNORED
    for name, value in values.items():
        if name not in known and value is not None:
            raise UserError(
                f"config.json has an unsupported key {name}, "
                f"which may change the output of {family.model_type}"
            )
    names = values.get("architectures")
    if names is not None:
        check_type("architectures", names, list)
        if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            raise UserError(
                f"config.json: architectures is {names}; it must contain a ...ForCausalLM"
            )
    fields: dict[str, Any] = {"init": "fan_in", "qk_norm": False}
    for part in family.shape:
        part.read(values, fields)
    ThinkerConfig.from_dict(fields)  # rejects wrong numbers before lists are built from them
    for part in family.choices:
        part.read(values, fields)
    return ThinkerConfig.from_dict(fields)


def hf_model_type(config: ThinkerConfig) -> str:
    """Return the equivalent model_type of transformers.

    Raises UserError with the reason if there is none.
    """
    nearest: tuple[str, list[str]] | None = None
    for model_type in FAMILIES:
        differences = differing_fields(config, model_type)
        if not differences:
            return model_type
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = model_type, differences
    model_type, differences = nearest
    found = describe_fields(config, differences)
    raise UserError(
        f"cannot export this model: no transformers architecture supports it; the nearest, "
        f"{model_type}, does not have {found}"
    )


def check_model_type(config: ThinkerConfig, model_type: str) -> None:
    """Raise UserError if a model_type that the user gives is not known, or cannot express a model,
    with the fields that differ."""
    if model_type not in FAMILIES:
        hint = did_you_mean(model_type.lower(), FAMILIES, cutoff=0.8)
        raise UserError(f"model_type is {model_type!r}; {_supported()}{hint}")
    differences = differing_fields(config, model_type)
    if differences:
        found = describe_fields(config, differences)
        raise UserError(f"{model_type} cannot express this model; it does not have {found}")


def describe_fields(config: ThinkerConfig, names: list[str]) -> str:
    """Fields of a model as config keys with their values, for messages."""
    return ", ".join(f"model.{name}={getattr(config, name)}" for name in names)


def differing_fields(config: ThinkerConfig, model_type: str) -> list[str]:
    """The fields that a family cannot express: those that change when its config.json is read
    back."""
    try:
        again = from_hf_config(_write(config, model_type))
    except UserError:
        # A field is so unusual that its value is refused.
        again = None
    if again is None:
        return list(_comparable(config))
    return config_differences(config, again)


def config_differences(config: ThinkerConfig, other: ThinkerConfig) -> list[str]:
    """The fields that differ, of those that a folder of transformers stores."""
    wanted = _comparable(config)
    found = _comparable(other)
    return [name for name, value in wanted.items() if found[name] != value]


def _comparable(config: ThinkerConfig) -> dict[str, Any]:
    """The fields that a folder of transformers stores, in one form."""
    values = config.to_dict()
    for name in NOT_STORED:
        del values[name]
    values["attention"] = [pattern.text for pattern in config.patterns]
    values["no_rope_layers"] = sorted(config.no_rope_layers or [])
    if config.rope_dim == config.head_dim:
        values["rope_dim"] = None
    if config.attention_scale == config.head_dim**-0.5:
        values["attention_scale"] = None
    if config.rope_scaling is not None:
        scaling = RopeScaling.from_dict(config.rope_scaling)
        values["rope_scaling"] = vars(scaling)
        if scaling.type == "dynamic":  # the length of pretraining is stored instead
            values["max_seq_len"] = None
    return values


def _write(config: ThinkerConfig, model_type: str) -> dict[str, Any]:
    family = FAMILIES[model_type]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    }
    for part in family.parts:
        part.write(config, values)
    return values


def to_hf_config(
    config: ThinkerConfig, tokenizer: Tokenizer | None, model_type: str | None = None
) -> dict[str, Any]:
    """Create a config.json with keys that older versions also read.

    model_type: of transformers; None: hf_model_type(). Raises UserError if it cannot express the
    model.
    """
    if model_type is None:
        model_type = hf_model_type(config)
    else:
        check_model_type(config, model_type)
    values = _write(config, model_type)
    values |= special_token_ids(tokenizer, config.vocab_size)
    return values


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
