"""The architectures of llama.cpp: how the keys of a GGUF header and the names of its tensors map to
those of transformers, in both directions.

A header becomes the config.json of a family of interop/families/, which then decides what is
supported. Reading a header back shows what it cannot describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.interop.families import FAMILIES, Family
from thinker.interop.families.layouts import Layout, RowPerHead, Rows
from thinker.interop.families.tensors import group_tensors, to_their_tensors
from thinker.interop.hf_config import (
    config_differences,
    describe_fields,
    differing_fields,
    from_hf_config,
    to_hf_config,
)
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

# Keys of a header, without the name of the architecture, and those of config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
USUAL = SIZES | {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
HEAD_DIM = {"attention.key_length": "head_dim"}
RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
PARALLEL = {"use_parallel_residual": "use_parallel_residual"}

# Keys that are read in another way, and keys that do not change what the model computes.
ROPE_DIM = "rope.dimension_count"
WINDOWED_LAYERS = "attention.sliding_window_pattern"
SCALING_TYPE = "rope.scaling.type"
SCALING_FACTOR = "rope.scaling.factor"
OTHER_KEYS = {ROPE_DIM, WINDOWED_LAYERS, SCALING_TYPE, SCALING_FACTOR}
OTHER_KEYS |= {"attention.key_length", "attention.value_length", "vocab_size"}
OTHER_KEYS |= {"attention.head_count_kv"}
IGNORED = {
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # of yarn and longrope, which are refused
    "rope.dimension_sections",
}
# Ends of keys whose values llama.cpp reads as f32.
NUMBERS = ("epsilon", "freq_base", "freq_base_swa", "scale", "softcapping")
# Keys with the only value that is supported.
ONLY = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}

Values = dict[str, Any]  # of a header, or of config.json


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, for a family of transformers."""

    name: str  # general.architecture
    model_type: str
    keys: dict[str, str]  # of the header -> of config.json
    # Keys of config.json that are true if block 0 has this tensor.
    flags: dict[str, str] = field(default_factory=dict)
    # Keys of the header with the only value that is supported.
    only: Values = field(default_factory=dict)
    # Keys of config.json that llama.cpp takes for granted.
    assumed: Values = field(default_factory=dict)
    head_width_key: str | None = None  # of config.json, for what llama.cpp derives from head_dim
    fraction_key: str | None = None  # of config.json: the fraction of channels that RoPE rotates
    has_windowed_layers: bool = False
    rotates_neighbors: bool = False  # as Family.rotates_neighbors
    layouts: dict[str, Layout] = field(default_factory=dict)
    is_tied: bool | None = None  # None: as the file says
    adds_one_to_norms: bool = False  # a file has 1 + weight, where transformers stores the weight


class PlusOne(Rows):
    """The weight of a norm plus 1."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        return [theirs[0] - 1]

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        return [ours[0] + 1]


BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
NORM_OF_HEADS = {"attn_q_norm": RowPerHead(), "attn_k_norm": RowPerHead()}

TABLE = [
    Architecture("qwen3", "qwen3", USUAL | HEAD_DIM | RMS_NORM),
    Architecture("qwen2", "qwen2", USUAL | HEAD_DIM | RMS_NORM),
    Architecture("llama", "llama", USUAL | HEAD_DIM | RMS_NORM, BIASES, rotates_neighbors=True),
    Architecture(
        "smollm3",
        "smollm3",
        USUAL | HEAD_DIM | RMS_NORM,
        assumed={"no_rope_layer_interval": 4},
        rotates_neighbors=True,
    ),
    Architecture(
        "granite",
        "granite",
        USUAL
        | HEAD_DIM
        | RMS_NORM
        | {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
            "attention.scale": "attention_multiplier",
        },
        BIASES,
        only={"rope.scaling.finetuned": True},  # without it, llama.cpp has no RoPE in this one
        rotates_neighbors=True,
    ),
    Architecture("phi3", "phi3", USUAL | RMS_NORM, fraction_key="partial_rotary_factor"),
    Architecture(
        "gemma", "gemma", USUAL | HEAD_DIM | RMS_NORM, is_tied=True, adds_one_to_norms=True
    ),
    Architecture(
        "gemma2",
        "gemma2",
        USUAL | HEAD_DIM | RMS_NORM | WINDOW | SOFT_CAPS,
        head_width_key="query_pre_attn_scalar",
        adds_one_to_norms=True,
        is_tied=True,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        USUAL
        | HEAD_DIM
        | RMS_NORM
        | WINDOW
        | {"final_logit_softcapping": "final_logit_softcapping"}
        | {"rope.freq_base_swa": "rope_local_base_freq"},
        head_width_key="query_pre_attn_scalar",
        adds_one_to_norms=True,
        has_windowed_layers=True,
    ),
    Architecture(
        "olmo", "olmo", USUAL, only={"attention.layer_norm_epsilon": 1e-5}, rotates_neighbors=True
    ),
    Architecture("olmo2", "olmo2", USUAL | RMS_NORM, is_tied=False),
    Architecture(
        "olmo2", "olmo3", USUAL | RMS_NORM | WINDOW, has_windowed_layers=True, is_tied=False
    ),
    Architecture(
        "stablelm",
        "stablelm",
        USUAL | LAYER_NORM | PARALLEL,
        {"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        fraction_key="partial_rotary_factor",
        layouts=NORM_OF_HEADS,
        is_tied=False,
    ),
    # llama.cpp reads norms of queries and keys only with 64 layers or more.
    Architecture(
        "command-r",
        "cohere",
        USUAL | HEAD_DIM | LAYER_NORM | {"logit_scale": "logit_scale"},
        rotates_neighbors=True,
        is_tied=True,
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        USUAL | HEAD_DIM | {"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    Architecture(
        "phi2", "phi", USUAL | LAYER_NORM, fraction_key="partial_rotary_factor", is_tied=False
    ),
    Architecture(
        "gpt2",
        "gpt2",
        {
            "vocab_size": "vocab_size",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
    ),
    Architecture(
        "gptneox",
        "gpt_neox",
        SIZES | LAYER_NORM | PARALLEL | {"rope.freq_base": "rotary_emb_base"},
        fraction_key="rotary_pct",
        is_tied=False,
    ),
]
NAMES = list(dict.fromkeys(architecture.name for architecture in TABLE))


def find_by_config(config: ThinkerConfig) -> Architecture:
    """The first row whose header can describe a model. Raises UserError if there is none."""
    nearest: list[str] | None = None
    for row in TABLE:
        differences = _differing_fields(row, config)
        if not differences:
            return row
        if nearest is None or len(differences) < len(nearest):
            nearest = differences
    names = describe_fields(config, nearest or [])
    raise UserError(f"cannot export a model with {names} to GGUF; llama.cpp does not support it")


def _differing_fields(row: Architecture, config: ThinkerConfig) -> list[str]:
    """The fields that a header cannot describe: those that differ when it is read back."""
    if config.rope_scaling is not None and config.rope_scaling.get("type") == "llama3":
        config = replace(config, rope_scaling=None)  # which a tensor describes
    differences = differing_fields(config, row.model_type)
    if differences:
        return differences
    with torch.device("meta"):
        tensors = model_tensors(Thinker(config))
    shapes = {}
    for name, tensor in to_their_tensors(family_of(row), config, tensors).items():
        shapes[name] = list(tensor.shape)
    fields = {f"{row.name}.{name}": value for name, value in to_header(row, config).items()}
    found = from_hf_config(to_config(row, fields, shapes))
    return config_differences(config, found)


def find_by_header(fields: Mapping[str, Any]) -> Architecture:
    """The row of a header. Raises UserError if it is not supported."""
    name = fields.get("general.architecture")
    rows = [row for row in TABLE if row.name == name]
    if not rows:
        raise UserError(f"its architecture is {name!r}; those that are read: {', '.join(NAMES)}")
    has_window = bool(fields.get(f"{name}.attention.sliding_window"))
    for row in rows:
        if len(rows) == 1 or row.has_windowed_layers == has_window:
            return row
    return rows[0]


def family_of(row: Architecture) -> Family:
    """The family with the names and the layout of the tensors in a GGUF file."""
    import gguf

    family = FAMILIES[row.model_type]
    name_map = gguf.get_tensor_name_map(_arch(row), 1)
    prefix = f"{family.names['blocks']}.0."
    names = {"blocks": "blk", "lm_head": "output"}
    for ours, theirs in family.names.items():
        theirs = theirs.removesuffix(".norms.{head}")  # one tensor for all heads
        if ours == "blocks":
            continue
        found = name_map.get_name(theirs)
        if found is None:
            found = name_map.get_name(prefix + theirs)
        if found is not None:  # else a part that no model of this architecture has
            names[ours] = found.removeprefix("blk.0.")
    layouts = dict(row.layouts)
    if row.adds_one_to_norms:
        layouts |= {name: PlusOne() for name in names.values() if "norm" in name}
    return replace(
        family,
        names=names,
        layouts=layouts,
        rotates_neighbors=row.rotates_neighbors,
        buffers=("rope_freqs.weight",),
    )


def stored_with(config: ThinkerConfig, names: Iterable[str]) -> dict[str, str]:
    """Which of our tensors decides the data type of each: the last of those that a file stores as
    one, such as the matrix for values."""
    try:
        row = find_by_config(config)
    except UserError:  # llama.cpp does not have it, but its weights can be rounded all the same
        return {name: name for name in names}
    deciding = {}
    for group in group_tensors(family_of(row), config, names):
        for name in group.ours:
            deciding[name] = group.ours[-1]
    return deciding


def _arch(row: Architecture) -> Any:
    """The gguf package's own number of an architecture."""
    import gguf

    for arch, name in gguf.MODEL_ARCH_NAMES.items():
        if name == row.name:
            return arch
    raise UserError(f"this version of the gguf package does not know {row.name}; update it")


def to_config(row: Architecture, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Values:
    """The config.json that a header stands for.

    tensors: the shape of each tensor, by its name. Raises UserError for a key that may change what
    the model computes.
    """
    header = {}
    for name, value in fields.items():
        if name.startswith(f"{row.name}."):
            header[name.removeprefix(f"{row.name}.")] = value
    only = ONLY | row.only
    for name, value in header.items():
        if name in only:
            if value != only[name]:
                raise UserError(f"{row.name}.{name} is {value}; Thinker supports only {only[name]}")
        elif name not in row.keys.keys() | OTHER_KEYS | IGNORED:
            raise UserError(
                f"its key {row.name}.{name} may change the output, and is not supported"
            )
    config = {"model_type": row.model_type} | row.assumed
    for name, theirs in row.keys.items():
        if name in header:
            config[theirs] = header[name]
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and len(embedding) == 2:
        config["vocab_size"] = embedding[0]
    if "num_key_value_heads" in row.keys.values():
        config.setdefault("num_key_value_heads", config.get(row.keys["attention.head_count"]))
    for key, tensor in row.flags.items():
        config[key] = f"blk.0.{tensor}" in tensors
    config["tie_word_embeddings"] = row.is_tied is not False and "output.weight" not in tensors
    _read_heads(row, header, config)
    _read_windows(row, header, config)
    _read_scaling(row, header, config)
    return config


def _read_heads(row: Architecture, header: Values, config: Values) -> None:
    """Set the width of a head and the fraction of it that RoPE rotates."""
    sizes = [header.get("embedding_length"), header.get("attention.head_count")]
    if not all(type(size) is int and size > 0 for size in sizes):
        return  # from_hf_config() refuses them
    d_model, n_heads = sizes
    width = d_model // n_heads
    head_dim = header.get("attention.key_length", width)
    if type(head_dim) is not int or head_dim < 1:
        raise UserError(f"its key {row.name}.attention.key_length is {head_dim!r}")
    if header.get("attention.value_length", head_dim) != head_dim:
        raise UserError("its heads have keys and values of different lengths")
    if "attention.key_length" in row.keys:
        config["head_dim"] = head_dim
    elif head_dim != width:
        raise UserError(f"its heads have {head_dim} channels; {row.model_type} needs {width}")
    if row.head_width_key is not None:
        config[row.head_width_key] = head_dim
    n_rotated = header.get(ROPE_DIM, head_dim)
    if type(n_rotated) is not int or not 0 < n_rotated <= head_dim:
        raise UserError(f"its key {row.name}.{ROPE_DIM} is {n_rotated!r}")
    if row.fraction_key is not None:
        # Rounded up by less than a channel, as config.json's reader rounds down.
        config[row.fraction_key] = min(1.0, (n_rotated + 0.5) / head_dim)
    elif n_rotated != head_dim and "rope.freq_base" in row.keys:
        raise UserError(
            f"it rotates {n_rotated} of {head_dim} channels; {row.model_type} rotates all"
        )


def _read_windows(row: Architecture, header: Values, config: Values) -> None:
    """Set layer_types from a list that says which layers have a window."""
    windowed = header.get(WINDOWED_LAYERS)
    if windowed is None:
        return
    if not row.has_windowed_layers or not isinstance(windowed, list):
        raise UserError(f"its key {row.name}.{WINDOWED_LAYERS} is not supported")
    kinds = {True: "sliding_attention", False: "full_attention"}
    config["layer_types"] = [kinds[bool(value)] for value in windowed]


def _read_scaling(row: Architecture, header: Values, config: Values) -> None:
    """Set rope_scaling."""
    kind = header.get(SCALING_TYPE, "none")
    if kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": header.get(SCALING_FACTOR)}
    elif kind != "none":
        raise UserError(f"its RoPE scaling is {kind!r}; none, linear and that of Llama 3 are read")


def to_header(row: Architecture, config: ThinkerConfig) -> Values:
    """The keys of a header that describe a model, without the name of the architecture."""
    values = to_hf_config(config, None, row.model_type)
    header = dict(row.only)
    for name, theirs in row.keys.items():
        value = values.get(theirs)
        if value is not None and name.endswith(NUMBERS):
            value = float(value)
        if value is not None:
            header[name] = value
    header["attention.head_count_kv"] = config.n_kv_heads
    header["attention.key_length"] = config.head_dim
    header["attention.value_length"] = config.head_dim
    if "rope.freq_base" in row.keys:
        header[ROPE_DIM] = config.head_dim
        if config.rope_dim is not None:
            header[ROPE_DIM] = config.rope_dim
    if row.has_windowed_layers:
        header[WINDOWED_LAYERS] = [pattern.text != "full" for pattern in config.patterns]
    if config.rope_scaling is not None and config.rope_scaling["type"] == "linear":
        header[SCALING_TYPE] = "linear"
        header[SCALING_FACTOR] = float(config.rope_scaling["factor"])
    return header
