"""The families that are read and written: their keys in config.json, and the names of their
weights.

Each default is that of transformers for a key that is missing. A model is exported as the first
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
    rounded,
)
from thinker.interop.families.family import ConfigPart, Family
from thinker.interop.families.layouts import RowPerHead, RowsByHead, Transposed, VectorPerHead
from thinker.interop.families.rope_parts import RopeKeys, RopeKeysByLayer
from thinker.interop.families.window_parts import (
    EveryNth,
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
SAME_HEADS = KVHeads()
OTHER_DEFAULT = KVHeads(is_required=True)


def tied(default: bool) -> Key:
    """Whether the LM head shares the weight of the embedding."""
    return Key("tie_word_embeddings", "tie_embeddings", bool, default)


def norm_eps(name: str, default: float) -> Key:
    """The epsilon of the norms."""
    return Key(name, "norm_eps", float, default)


def fixed(**fields: Any) -> Fixed:
    """Fields that all models of a family have."""
    return Fixed({"qk_norm": False} | fields)


BIAS_OF_QKV = {"attention_bias": True}
BIAS_OF_ATTENTION = {"attention_bias": True, "attention_out_bias": True}
BIAS_OF_ALL = BIAS_OF_ATTENTION | {"mlp_bias": True}


def flag(name: str, fields: dict[str, Any], default: bool = False) -> Flag:
    """A key that gives all these fields their value, or none of them."""
    return Flag(name, fields, {}, default)


MLP_BIAS = Key("mlp_bias", "mlp_bias", bool, False)
ATTENTION_BIAS = flag("attention_bias", BIAS_OF_ATTENTION)
NO_BIAS = Only({"attention_bias": False}, is_written=True)
NO_MLP_BIAS = Only({"mlp_bias": False}, is_written=True)
SILU = Activation("hidden_act", "silu")
CAUSAL = Only({"use_bidirectional_attention": False})


def _usual_scale(fields: dict[str, Any]) -> float:
    head_dim = fields.get("head_dim")
    if head_dim is None:
        head_dim = fields["d_model"] // fields["n_heads"]
    return head_dim**-0.5


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


class GemmaEmbedding:
    """The factor √d_model on the embedding, which config.json does not name."""

    keys = frozenset()

    def read(self, values: Any, fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        fields["embedding_scale"] = fields["d_model"] ** 0.5

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""


class EmbeddingWidth:
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
GEMMA3_WINDOWS = EveryNth(6, period_key="sliding_window_pattern")
STABLELM_FLAGS = (
    flag("use_qkv_bias", BIAS_OF_QKV),
    flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
    flag("use_parallel_residual", {"block": "parallel_one_norm"}),
)
COHERE_KEYS = (
    ATTENTION_BIAS,
    flag("use_qk_norm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
    Key("logit_scale", "logit_scale", float, 0.0625),
    RopeKeys(theta=5e5),
)
STARCODER2_KEYS = (
    Activation("hidden_act", "gelu_pytorch_tanh"),
    flag("use_bias", BIAS_OF_ALL, default=True),
)
PHI_FIELDS = fixed(
    norm="layernorm", mlp="ungated", block="parallel_one_norm", head_bias=True, **BIAS_OF_ALL
)
PHI_QK_NORM = flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm"})
GPT2_KEYS = (Activation("activation_function", "gelu_new"), norm_eps("layer_norm_epsilon", 1e-5))
GPT2_SCORES = Only({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
NEO_BIAS = {"mlp_bias": True, "attention_out_bias": True}
GPT_NEOX_FLAGS = (
    flag("attention_bias", BIAS_OF_ATTENTION, default=True),
    flag("use_parallel_residual", {"block": "parallel"}, default=True),
)
GPT_NEOX_ROPE = RopeKeys(theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct")
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
    """Modules of ours that are one module there."""
    return dict.fromkeys(modules, theirs)


LLAMA = {
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
PHI3 = LLAMA | together("self_attn.qkv_proj", *QKV)
PHI3 |= together("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")
# Norms of inputs and outputs, or (OLMo) of outputs alone.
GEMMA2 = LLAMA | {
    "attention_out": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
COHERE = LLAMA | {"block_norm": "input_layernorm"}
COHERE_LAYOUTS = {"self_attn.q_norm": RowPerHead(), "self_attn.k_norm": RowPerHead()}
STABLELM = COHERE | {
    "attention.q_norm": "self_attn.q_layernorm.norms.{head}",
    "attention.k_norm": "self_attn.k_layernorm.norms.{head}",
}
STABLELM_LAYOUTS = {
    "self_attn.q_layernorm.norms.{head}": VectorPerHead(),
    "self_attn.k_layernorm.norms.{head}": VectorPerHead(),
}
PHI = COHERE | {
    "norm": "model.final_layernorm",
    "attention.o_proj": "self_attn.dense",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
STARCODER2 = LLAMA | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GPT2 = {
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
GPT_NEO = GPT2 | {
    "attention.q_proj": "attn.attention.q_proj",
    "attention.k_proj": "attn.attention.k_proj",
    "attention.v_proj": "attn.attention.v_proj",
    "attention.o_proj": "attn.attention.out_proj",
}
GPT_NEOX = {
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
OPT = {
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
RMS = (SILU, norm_eps("rms_norm_eps", 1e-6))
RMS_1E5 = (SILU, norm_eps("rms_norm_eps", 1e-5))
LAYER_NORM = norm_eps("layer_norm_eps", 1e-5)
RARE_HEAD_DIM = HeadDim(is_always_written=False)
ROPE = RopeKeys()
PARTIAL = "partial_rotary_factor"
GEMMA = (OTHER_DEFAULT, HeadDim(256), norm_eps("rms_norm_eps", 1e-6), tied(True))
GEMMA += (ATTENTION_BIAS, CAUSAL, GemmaEmbedding())
GEMMA2_FIELDS = {"norm": "rmsnorm_one_plus", "block": "both_norms"}
OLMO2_FIELDS = {"block": "post_norm", "qk_norm": True, "qk_norm_type": "rmsnorm_width"}
GPT_FIELDS = {"norm": "layernorm", "mlp": "ungated"}

TABLE = [
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        [*SIZES, OTHER_DEFAULT, HeadDim(128), *RMS, tied(False)],
        [fixed(qk_norm=True), NO_BIAS, LayersAfter(), ROPE],
        LLAMA,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        [*SIZES, OTHER_DEFAULT, HeadDim(), *RMS, tied(False)],
        [fixed(**BIAS_OF_QKV), Unread("attention_bias"), LayersAfter(), ROPE],
        LLAMA,
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        [*SIZES, SAME_HEADS, HeadDim(), *RMS, tied(False)],
        [fixed(), ATTENTION_BIAS, MLP_BIAS, NoWindows(), ROPE],
        LLAMA,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        [*SIZES, OTHER_DEFAULT, HeadDim(), *RMS, tied(False)],
        [fixed(), SameInAllLayers(4096), ROPE],
        LLAMA,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        [*SIZES, OTHER_DEFAULT, HeadDim(), *RMS, tied(True)],
        [fixed(), NO_BIAS, NO_MLP_BIAS, LayersWithoutRope(), RopeKeys(theta=2e6)],
        LLAMA,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        [*SIZES, SAME_HEADS, RARE_HEAD_DIM, *RMS, tied(False)],
        [fixed(), ATTENTION_BIAS, MLP_BIAS, NoWindows(), ROPE, *GRANITE_SCALES],
        LLAMA,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        [*SIZES, SAME_HEADS, *RMS_1E5, tied(False)],
        [fixed(), SameInAllLayers(), RopeKeys(share_key=PARTIAL)],
        PHI3,
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        [*SIZES, *GEMMA],
        [fixed(norm="rmsnorm_one_plus"), *GEMMA_ACTIVATION, NoWindows(), ROPE],
        LLAMA,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        [*SIZES, *GEMMA],
        [fixed(**GEMMA2_FIELDS), *gemma2_keys(GEMMA2_CAP, 30.0), EveryNth(2), ROPE],
        GEMMA2,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        [*SIZES, *GEMMA, fixed(qk_norm=True, qk_norm_type="rmsnorm_one_plus", **GEMMA2_FIELDS)],
        [*gemma2_keys(NO_CAP, None), GEMMA3_WINDOWS, RopeKeysByLayer(theta=1e6, local_theta=1e4)],
        GEMMA2,
    ),
    Family(
        "olmo",
        "OlmoForCausalLM",
        [*SIZES, SAME_HEADS, SILU, tied(False), Only({"clip_qkv": None})],
        [fixed(norm="layernorm_no_weight", norm_eps=1e-5), ATTENTION_BIAS, NoWindows(), ROPE],
        LLAMA,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        [*SIZES, SAME_HEADS, *RMS_1E5, tied(False)],
        [fixed(**OLMO2_FIELDS), ATTENTION_BIAS, NoWindows(), ROPE],
        GEMMA2,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        [*SIZES, SAME_HEADS, *RMS_1E5, tied(False)],
        [fixed(**OLMO2_FIELDS), ATTENTION_BIAS, EveryNth(4), RopeKeysByLayer(theta=5e5)],
        GEMMA2,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        [*SIZES, OTHER_DEFAULT, SILU, LAYER_NORM, tied(False), fixed(norm="layernorm")],
        [*STABLELM_FLAGS, NoWindows(), RopeKeys(share=0.25, share_key=PARTIAL)],
        STABLELM,
        STABLELM_LAYOUTS,
    ),
    Family(
        "cohere",
        "CohereForCausalLM",
        [*SIZES, SAME_HEADS, RARE_HEAD_DIM, SILU, LAYER_NORM, tied(True)],
        [fixed(norm="layernorm_no_bias", block="parallel_one_norm"), *COHERE_KEYS, NoWindows()],
        COHERE,
        COHERE_LAYOUTS,
        rotates_neighbors=True,
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        [*SIZES, OTHER_DEFAULT, RARE_HEAD_DIM, norm_eps("norm_epsilon", 1e-5), tied(True)],
        [fixed(**GPT_FIELDS), *STARCODER2_KEYS, SameInAllLayers(), ROPE],
        STARCODER2,
    ),
    Family(
        "phi",
        "PhiForCausalLM",
        [*SIZES, SAME_HEADS, LAYER_NORM, tied(False), Activation("hidden_act", "gelu_new")],
        [PHI_FIELDS, PHI_QK_NORM, NoWindows(), RopeKeys(share=0.5, share_key=PARTIAL)],
        PHI,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        [*GPT2_SIZES, *GPT2_KEYS, tied(True)],
        [fixed(positions="learned", **GPT_FIELDS, **BIAS_OF_ALL), GPT2_SCORES],
        GPT2,
        GPT2_LAYOUTS,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        [*GPT_NEO_SIZES, *GPT2_KEYS, tied(True)],
        [
            fixed(positions="learned", attention_scale=1.0, **GPT_FIELDS, **NEO_BIAS),
            GlobalOrLocal(),
        ],
        GPT_NEO,
        buffers=("attn.attention.bias", "attn.attention.masked_bias"),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        [*SIZES, Activation("hidden_act", "gelu"), LAYER_NORM, tied(False)],
        [fixed(mlp_bias=True, **GPT_FIELDS), *GPT_NEOX_FLAGS, GPT_NEOX_ROPE],
        GPT_NEOX,
        {"attention.query_key_value": RowsByHead()},
        buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        [*OPT_SIZES, EmbeddingWidth(), Activation("activation_function", "relu"), tied(True)],
        [fixed(**OPT_FIELDS), flag("enable_bias", BIAS_OF_ALL, default=True), OPT_NORMS],
        OPT,
    ),
]

FAMILIES = {family.model_type: family for family in TABLE}
