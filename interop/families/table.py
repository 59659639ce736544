"""The families that are read and written: their keys in config.json, and the names of their
weights.

Each default is what transformers uses if a key is missing. A model is exported as the first
family here that can express it.
"""

from __future__ import annotations

from typing import Any

from thinker.interop.families.config_parts import (
    Activation,
    FeedForwardWidth,
    Fixed,
    Flag,
    HeadDim,
    Key,
    KVHeads,
    Number,
    Only,
    Unread,
    read_head_dim,
    rounded,
)
from thinker.interop.families.family import ConfigPart, Family
from thinker.interop.families.layouts import RowPerHead, RowsByHead, Transposed, VectorPerHead
from thinker.interop.families.rope_parts import RopeKeys, RopeKeysByLayer
from thinker.interop.families.window_parts import (
    FullEveryNth,
    GlobalOrLocal,
    LayersAfter,
    LayersWithoutRope,
    NoWindows,
    SameInAllLayers,
)
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

# Keys of config.json

SIZES: list[ConfigPart] = [
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "d_model"),
    Key("intermediate_size", "d_ff"),
    Key("num_hidden_layers", "n_layers"),
    Key("num_attention_heads", "n_heads"),
    Key("max_position_embeddings", "max_seq_len"),
]
KV_HEADS = KVHeads()
KV_HEADS_REQUIRED = KVHeads(is_required=True)


def tied(default: bool) -> Key:
    """Whether the LM head shares the weight of the embedding."""
    return Key("tie_word_embeddings", "tie_embeddings", bool, default)


def norm_eps(name: str, default: float) -> Key:
    """The epsilon of the norms."""
    return Key(name, "norm_eps", float, default)


BIAS_OF_QKV = {"attention_bias": True}
BIAS_OF_ATTENTION = {"attention_bias": True, "attention_out_bias": True}
BIAS_OF_ALL = BIAS_OF_ATTENTION | {"mlp_bias": True}


MLP_BIAS = Key("mlp_bias", "mlp_bias", bool, False)
ATTENTION_BIAS = Flag("attention_bias", BIAS_OF_ATTENTION)
NO_BIAS = Only({"attention_bias": False}, is_written=True)
NO_MLP_BIAS = Only({"mlp_bias": False}, is_written=True)
SILU = Activation("hidden_act", "silu")
CAUSAL = Only({"use_bidirectional_attention": False})


def _usual_scale(fields: dict[str, Any]) -> float:
    return read_head_dim(fields) ** -0.5


def _scale_from_width(width: float, fields: dict[str, Any]) -> float | None:
    return _scale_from_factor(width**-0.5, fields)


def _scale_to_width(scale: float | None, config: ThinkerConfig) -> float:
    if scale is None:
        return config.head_dim
    return rounded(scale**-2)


def _scale_from_factor(scale: float, fields: dict[str, Any]) -> float | None:
    if scale == _usual_scale(fields):
        return None
    return scale


def _scale_to_factor(scale: float | None, config: ThinkerConfig) -> float:
    if scale is None:
        return config.head_dim**-0.5
    return scale


def _inverse(number: float, _: object) -> float:
    if number == 1:
        return 1.0
    inverse = 1 / number
    if 1 / rounded(inverse) == number:
        return rounded(inverse)
    return inverse


class GemmaEmbedding(ConfigPart):
    """The factor √d_model on the embedding, which config.json does not name."""

    def read(self, values: Any, fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        fields["embedding_scale"] = fields["d_model"] ** 0.5


class EmbeddingWidth(ConfigPart):
    """OPT's width of the embedding, which must be that of the model: there is no projection."""

    keys = frozenset({"word_embed_proj_dim"})

    def read(self, values: Any, fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        width = values.get("word_embed_proj_dim")
        if width is not None and width != fields["d_model"]:
            raise UserError(
                f"config.json: word_embed_proj_dim is {width!r}; Thinker supports only that of "
                f"hidden_size, {fields['d_model']}"
            )

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values["word_embed_proj_dim"] = config.d_model


class SoftcapKey(Key):
    """A key that differs between null and missing."""

    def read(self, values: Any, fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        if self.theirs in values and values[self.theirs] is None:
            return
        super().read(values, fields)


# Keys of single families

GRANITE_SCALES = (
    Key("embedding_multiplier", "embedding_scale", float, 1.0),
    Key("residual_multiplier", "residual_scale", float, 1.0),
    Number("logits_scaling", "logit_scale", 1.0, _inverse, _inverse),
    Number("attention_multiplier", "attention_scale", 1.0, _scale_from_factor, _scale_to_factor),
)
# Early files of Gemma say gelu and mean its approximation.
GEMMA_ACTIVATION = (
    Activation("hidden_act", "gelu_pytorch_tanh", {"gelu": "gelu_pytorch_tanh"}),
    Only({"hidden_activation": "gelu_pytorch_tanh"}, is_written=True),
)


def gemma2_keys(score_cap: ConfigPart, logit_cap: float | None) -> list[ConfigPart]:
    """Keys of Gemma 2 and 3. score_cap: the soft cap of attention scores. logit_cap: the default of
    the soft cap of logits."""
    return [
        score_cap,
        Number("query_pre_attn_scalar", "attention_scale", 256, _scale_from_width, _scale_to_width),
        Activation("hidden_activation", "gelu_pytorch_tanh"),
        Unread("hidden_act"),
        SoftcapKey("final_logit_softcapping", "logit_softcap", float, logit_cap),
    ]


GEMMA2_CAP = SoftcapKey("attn_logit_softcapping", "attn_logit_softcap", float, 50.0)
# transformers has this key for Gemma 3, too, and does not apply it.
NO_CAP = Only({"attn_logit_softcapping": None})
GEMMA3_ROPE = RopeKeysByLayer(theta=1e6, local_theta=1e4)
GEMMA3_WINDOWS = FullEveryNth(6, period_key="sliding_window_pattern")
STABLELM_FLAGS = (
    Flag("use_qkv_bias", BIAS_OF_QKV),
    Flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
    Flag("use_parallel_residual", {"block": "parallel_one_norm"}),
)
COHERE_KEYS = (
    ATTENTION_BIAS,
    Flag("use_qk_norm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
    Key("logit_scale", "logit_scale", float, 0.0625),
    RopeKeys(theta=5e5),
)
# Published folders name their own code, which newer versions of transformers do not need.
OWN_CODE = Unread("auto_map")
STARCODER2_KEYS = (
    Unread("mlp_type", "norm_type", "layer_norm_epsilon", "scale_attn_weights"),
    Unread("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    Activation("hidden_act", "gelu_pytorch_tanh"),
    Flag("use_bias", BIAS_OF_ALL, default=True),
)
PHI_FIELDS = Fixed(
    norm="layernorm", mlp="ungated", block="parallel_one_norm", head_bias=True, **BIAS_OF_ALL
)
PHI_QK_NORM = Flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm"})
GPT2_KEYS = (Activation("activation_function", "gelu_new"), norm_eps("layer_norm_epsilon", 1e-5))
GPT2_SCORES = Only({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
NEO_BIAS = {"mlp_bias": True, "attention_out_bias": True}
GPT_NEOX_FLAGS = (
    Flag("attention_bias", BIAS_OF_ATTENTION, default=True),
    Flag("use_parallel_residual", {"block": "parallel"}, default=True),
)
GPT_NEOX_ROPE = RopeKeys(theta_key="rotary_emb_base", fraction=0.25, fraction_key="rotary_pct")
OPT_FIELDS = {
    "positions": "learned",
    "position_offset": 2,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "mlp": "ungated",
}
OPT_NORMS = Only(
    {
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    }
)

# Names of weights

QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def together(theirs: str, *modules: str) -> dict[str, str]:
    """Modules of ours that are one module in transformers."""
    return dict.fromkeys(modules, theirs)


LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
PHI3_NAMES = LLAMA_NAMES | together("self_attn.qkv_proj", *QKV)
PHI3_NAMES |= together("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")
# Norms of inputs and outputs, or (OLMo) of outputs alone.
GEMMA2_NAMES = LLAMA_NAMES | {
    "after_attention": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
COHERE_NAMES = LLAMA_NAMES | {"block_norm": "input_layernorm"}
COHERE_LAYOUTS = {"self_attn.q_norm": RowPerHead(), "self_attn.k_norm": RowPerHead()}
STABLELM_NAMES = COHERE_NAMES | {
    "attention.q_norm": "self_attn.q_layernorm.norms.{head}",
    "attention.k_norm": "self_attn.k_layernorm.norms.{head}",
}
STABLELM_LAYOUTS = {
    "self_attn.q_layernorm.norms.{head}": VectorPerHead(),
    "self_attn.k_layernorm.norms.{head}": VectorPerHead(),
}
PHI_NAMES = COHERE_NAMES | {
    "norm": "model.final_layernorm",
    "attention.o_proj": "self_attn.dense",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
STARCODER2_NAMES = LLAMA_NAMES | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GPT2_NAMES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    **together("attn.c_attn", *QKV),
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPT2_LAYOUTS = dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), Transposed())
GPT_NEO_NAMES = GPT2_NAMES | {
    "attention.q_proj": "attn.attention.q_proj",
    "attention.k_proj": "attn.attention.k_proj",
    "attention.v_proj": "attn.attention.v_proj",
    "attention.o_proj": "attn.attention.out_proj",
}
GPT_NEOX_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "blocks": "gpt_neox.layers",
    "attention_norm": "input_layernorm",
    **together("attention.query_key_value", *QKV),
    "attention.o_proj": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
OPT_NAMES = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
    "blocks": "model.decoder.layers",
    "attention_norm": "self_attn_layer_norm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}

# Families

GPT2_SIZES: list[ConfigPart] = [
    Key("vocab_size", "vocab_size"),
    Key("n_embd", "d_model"),
    FeedForwardWidth("n_inner"),
    Key("n_layer", "n_layers"),
    Key("n_head", "n_heads"),
    Key("n_positions", "max_seq_len"),
]
GPT_NEO_SIZES: list[ConfigPart] = [
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "d_model"),
    FeedForwardWidth("intermediate_size"),
    Key("num_layers", "n_layers"),
    Key("num_heads", "n_heads"),
    Key("max_position_embeddings", "max_seq_len"),
]
OPT_SIZES: list[ConfigPart] = [
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "d_model"),
    Key("ffn_dim", "d_ff"),
    Key("num_hidden_layers", "n_layers"),
    Key("num_attention_heads", "n_heads"),
    Key("max_position_embeddings", "max_seq_len"),
]
SILU_RMS = (SILU, norm_eps("rms_norm_eps", 1e-6))
SILU_RMS_1E5 = (SILU, norm_eps("rms_norm_eps", 1e-5))
LAYER_NORM = norm_eps("layer_norm_eps", 1e-5)
RARE_HEAD_DIM = HeadDim(is_always_written=False)
ROPE = RopeKeys()
PARTIAL = "partial_rotary_factor"
GEMMA_SHAPE = (KV_HEADS_REQUIRED, HeadDim(256), norm_eps("rms_norm_eps", 1e-6), tied(True))
GEMMA_SHAPE += (ATTENTION_BIAS, CAUSAL, GemmaEmbedding())
GEMMA2_FIELDS = {"norm": "rmsnorm_one_plus", "block": "both_norms"}
GEMMA3_FIELDS = GEMMA2_FIELDS | {"qk_norm": True, "qk_norm_type": "rmsnorm_one_plus"}
OLMO2_FIELDS = {"block": "post_norm", "qk_norm": True, "qk_norm_type": "rmsnorm_width"}
GPT_FIELDS = {"norm": "layernorm", "mlp": "ungated"}

TABLE = [
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, HeadDim(128), *SILU_RMS, tied(False)],
        [Fixed(qk_norm=True), NO_BIAS, LayersAfter(), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, HeadDim(), *SILU_RMS, tied(False)],
        [Fixed(**BIAS_OF_QKV), Unread("attention_bias"), LayersAfter(), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        [*SIZES, KV_HEADS, HeadDim(), *SILU_RMS, tied(False)],
        [ATTENTION_BIAS, MLP_BIAS, NoWindows(), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, HeadDim(), *SILU_RMS, tied(False)],
        [SameInAllLayers(4096), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, HeadDim(), *SILU_RMS, tied(True)],
        [NO_BIAS, NO_MLP_BIAS, LayersWithoutRope(), RopeKeys(theta=2e6)],
        LLAMA_NAMES,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        [*SIZES, KV_HEADS, RARE_HEAD_DIM, *SILU_RMS, tied(False)],
        [ATTENTION_BIAS, MLP_BIAS, NoWindows(), ROPE, *GRANITE_SCALES],
        LLAMA_NAMES,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        [*SIZES, KV_HEADS, *SILU_RMS_1E5, tied(False)],
        [OWN_CODE, SameInAllLayers(), RopeKeys(fraction_key=PARTIAL)],
        PHI3_NAMES,
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        [*SIZES, *GEMMA_SHAPE],
        [Fixed(norm="rmsnorm_one_plus"), *GEMMA_ACTIVATION, NoWindows(), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        [*SIZES, *GEMMA_SHAPE],
        [Fixed(**GEMMA2_FIELDS), *gemma2_keys(GEMMA2_CAP, 30.0), FullEveryNth(2), ROPE],
        GEMMA2_NAMES,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        [*SIZES, *GEMMA_SHAPE],
        [Fixed(**GEMMA3_FIELDS), *gemma2_keys(NO_CAP, None), GEMMA3_WINDOWS, GEMMA3_ROPE],
        GEMMA2_NAMES,
    ),
    Family(
        "olmo",
        "OlmoForCausalLM",
        [*SIZES, KV_HEADS, SILU, tied(False), Only({"clip_qkv": None})],
        [Fixed(norm="layernorm_no_weight", norm_eps=1e-5), ATTENTION_BIAS, NoWindows(), ROPE],
        LLAMA_NAMES,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        [*SIZES, KV_HEADS, *SILU_RMS_1E5, tied(False)],
        [Fixed(**OLMO2_FIELDS), ATTENTION_BIAS, NoWindows(), ROPE],
        GEMMA2_NAMES,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        [*SIZES, KV_HEADS, *SILU_RMS_1E5, tied(False)],
        [Fixed(**OLMO2_FIELDS), ATTENTION_BIAS, FullEveryNth(4), RopeKeysByLayer(theta=5e5)],
        GEMMA2_NAMES,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, SILU, LAYER_NORM, tied(False), Fixed(norm="layernorm")],
        [*STABLELM_FLAGS, NoWindows(), RopeKeys(fraction=0.25, fraction_key=PARTIAL)],
        STABLELM_NAMES,
        STABLELM_LAYOUTS,
    ),
    Family(
        "cohere",
        "CohereForCausalLM",
        [*SIZES, KV_HEADS, RARE_HEAD_DIM, SILU, LAYER_NORM, tied(True)],
        [Fixed(norm="layernorm_no_bias", block="parallel_one_norm"), *COHERE_KEYS, NoWindows()],
        COHERE_NAMES,
        COHERE_LAYOUTS,
        rotates_neighbors=True,
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        [*SIZES, KV_HEADS_REQUIRED, RARE_HEAD_DIM, norm_eps("norm_epsilon", 1e-5), tied(True)],
        [Fixed(**GPT_FIELDS), *STARCODER2_KEYS, SameInAllLayers(), ROPE],
        STARCODER2_NAMES,
    ),
    Family(
        "phi",
        "PhiForCausalLM",
        [*SIZES, KV_HEADS, LAYER_NORM, tied(False), Activation("hidden_act", "gelu_new")],
        [PHI_FIELDS, PHI_QK_NORM, NoWindows(), RopeKeys(fraction=0.5, fraction_key=PARTIAL)],
        PHI_NAMES,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        [*GPT2_SIZES, *GPT2_KEYS, tied(True)],
        [Fixed(positions="learned", **GPT_FIELDS, **BIAS_OF_ALL), GPT2_SCORES],
        GPT2_NAMES,
        GPT2_LAYOUTS,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        [*GPT_NEO_SIZES, *GPT2_KEYS, tied(True)],
        [
            Fixed(positions="learned", attention_scale=1.0, **GPT_FIELDS, **NEO_BIAS),
            GlobalOrLocal(),
        ],
        GPT_NEO_NAMES,
        buffers=("attn.attention.bias", "attn.attention.masked_bias"),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        [*SIZES, Activation("hidden_act", "gelu"), LAYER_NORM, tied(False)],
        [Fixed(mlp_bias=True, **GPT_FIELDS), *GPT_NEOX_FLAGS, GPT_NEOX_ROPE],
        GPT_NEOX_NAMES,
        {"attention.query_key_value": RowsByHead()},
        buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        [*OPT_SIZES, EmbeddingWidth(), Activation("activation_function", "relu"), tied(True)],
        [Fixed(**OPT_FIELDS), Flag("enable_bias", BIAS_OF_ALL, default=True), OPT_NORMS],
        OPT_NAMES,
    ),
]

FAMILIES = {family.model_type: family for family in TABLE}
