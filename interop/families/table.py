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
# Early files of Gemma say gelu and mean its approximation.
GEMMA_GELU = {"gelu": "gelu_pytorch_tanh"}
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


GEMMA_SCALE = Number(
    "query_pre_attn_scalar", "attention_scale", 256, _scale_from_width, _scale_to_width
)


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


def softcap(theirs: str, ours: str, default: float | None) -> Key:
    """A soft cap. Null: none."""
    return SoftcapKey(theirs, ours, float, default)


class SoftcapKey(Key):
    """A key that differs between null and missing."""

    def read(self, values: Any, fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        if self.theirs in values and values[self.theirs] is None:
            return
        super().read(values, fields)


# Names of weights

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
PHI3 = LLAMA | {
    "attention.q_proj": "self_attn.qkv_proj",
    "attention.k_proj": "self_attn.qkv_proj",
    "attention.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
# Norms of inputs and outputs, or of outputs alone.
GEMMA2 = LLAMA | {
    "attention_out": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
OLMO2 = GEMMA2
PHI = LLAMA | {
    "norm": "model.final_layernorm",
    "block_norm": "input_layernorm",
    "attention.o_proj": "self_attn.dense",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
STABLELM = LLAMA | {
    "block_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_layernorm.norms.{head}",
    "attention.k_norm": "self_attn.k_layernorm.norms.{head}",
}
STABLELM_LAYOUTS = {
    "self_attn.q_layernorm.norms.{head}": VectorPerHead(),
    "self_attn.k_layernorm.norms.{head}": VectorPerHead(),
}
COHERE = LLAMA | {"block_norm": "input_layernorm"}
COHERE_LAYOUTS = {"self_attn.q_norm": RowPerHead(), "self_attn.k_norm": RowPerHead()}
STARCODER2 = LLAMA | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.q_proj": "attn.c_attn",
    "attention.k_proj": "attn.c_attn",
    "attention.v_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPT2_LAYOUTS = {
    name: Transposed() for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
}
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
    "attention.q_proj": "attention.query_key_value",
    "attention.k_proj": "attention.query_key_value",
    "attention.v_proj": "attention.query_key_value",
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

RMS_NORM = norm_eps("rms_norm_eps", 1e-6)
LAYER_NORM = norm_eps("layer_norm_eps", 1e-5)

TABLE = [
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(128),
            SILU,
            RMS_NORM,
            tied(False),
            NO_BIAS,
            fixed(qk_norm=True),
            LayersAfter(),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(),
            SILU,
            RMS_NORM,
            tied(False),
            Fixed({"qk_norm": False} | BIAS_OF_QKV, keys=frozenset({"attention_bias"})),
            LayersAfter(),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            HeadDim(),
            SILU,
            RMS_NORM,
            tied(False),
            fixed(),
            ATTENTION_BIAS,
            MLP_BIAS,
            SameInAllLayers("llama", has_windows=False),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(),
            SILU,
            RMS_NORM,
            tied(False),
            fixed(),
            Only({"attention_bias": False}),
            SameInAllLayers("mistral", 4096),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(),
            SILU,
            RMS_NORM,
            tied(True),
            fixed(),
            NO_BIAS,
            NO_MLP_BIAS,
            LayersWithoutRope(),
            RopeKeys(theta=2e6),
        ],
        LLAMA,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            HeadDim(is_always_written=False),
            SILU,
            RMS_NORM,
            tied(False),
            fixed(),
            ATTENTION_BIAS,
            MLP_BIAS,
            SameInAllLayers("granite", has_windows=False),
            RopeKeys(),
            Key("embedding_multiplier", "embedding_scale", float, 1.0),
            Key("residual_multiplier", "residual_scale", float, 1.0),
            Number("logits_scaling", "logit_scale", 1.0, _inverse, _inverse),
            Number(
                "attention_multiplier", "attention_scale", 1.0, _scale_from_factor, _scale_to_factor
            ),
        ],
        LLAMA,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            SILU,
            norm_eps("rms_norm_eps", 1e-5),
            tied(False),
            fixed(),
            Only({"attention_bias": False}),
            SameInAllLayers("phi3"),
            RopeKeys(share_key="partial_rotary_factor"),
        ],
        PHI3,
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(256),
            RMS_NORM,
            tied(True),
            fixed(norm="rmsnorm_one_plus"),
            GemmaEmbedding(),
            Activation("hidden_act", "gelu_pytorch_tanh", GEMMA_GELU),
            ATTENTION_BIAS,
            CAUSAL,
            Only({"hidden_activation": "gelu_pytorch_tanh"}, is_written=True),
            SameInAllLayers("gemma", has_windows=False),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(256),
            RMS_NORM,
            tied(True),
            GemmaEmbedding(),
            fixed(norm="rmsnorm_one_plus", block="both_norms"),
            GEMMA_SCALE,
            ATTENTION_BIAS,
            CAUSAL,
            Activation("hidden_activation", "gelu_pytorch_tanh"),
            softcap("attn_logit_softcapping", "attn_logit_softcap", 50.0),
            softcap("final_logit_softcapping", "logit_softcap", 30.0),
            EveryNth(2),
            RopeKeys(),
        ],
        GEMMA2,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(256),
            RMS_NORM,
            tied(True),
            GemmaEmbedding(),
            fixed(
                norm="rmsnorm_one_plus",
                block="both_norms",
                qk_norm=True,
                qk_norm_type="rmsnorm_one_plus",
            ),
            GEMMA_SCALE,
            ATTENTION_BIAS,
            CAUSAL,
            Activation("hidden_activation", "gelu_pytorch_tanh"),
            softcap("attn_logit_softcapping", "attn_logit_softcap", None),
            softcap("final_logit_softcapping", "logit_softcap", None),
            EveryNth(6, period_key="sliding_window_pattern"),
            RopeKeysByLayer(theta=1e6, local_theta=1e4),
        ],
        GEMMA2,
    ),
    Family(
        "olmo",
        "OlmoForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            SILU,
            tied(False),
            ATTENTION_BIAS,
            Only({"clip_qkv": None}),
            fixed(norm="layernorm_no_weight", norm_eps=1e-5),
            SameInAllLayers("olmo", has_windows=False),
            RopeKeys(),
        ],
        LLAMA,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            SILU,
            norm_eps("rms_norm_eps", 1e-5),
            tied(False),
            ATTENTION_BIAS,
            fixed(block="post_norm", qk_norm=True, qk_norm_type="rmsnorm_width"),
            SameInAllLayers("olmo2", has_windows=False),
            RopeKeys(),
        ],
        OLMO2,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            SILU,
            norm_eps("rms_norm_eps", 1e-5),
            tied(False),
            ATTENTION_BIAS,
            fixed(block="post_norm", qk_norm=True, qk_norm_type="rmsnorm_width"),
            EveryNth(4),
            RopeKeysByLayer(theta=5e5),
        ],
        OLMO2,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            SILU,
            LAYER_NORM,
            tied(False),
            fixed(norm="layernorm"),
            flag("use_qkv_bias", BIAS_OF_QKV),
            flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
            flag("use_parallel_residual", {"block": "parallel_one_norm"}),
            SameInAllLayers("stablelm", has_windows=False),
            RopeKeys(share=0.25, share_key="partial_rotary_factor"),
        ],
        STABLELM,
        STABLELM_LAYOUTS,
    ),
    Family(
        "cohere",
        "CohereForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            HeadDim(is_always_written=False),
            SILU,
            LAYER_NORM,
            tied(True),
            fixed(norm="layernorm_no_bias", block="parallel_one_norm"),
            ATTENTION_BIAS,
            flag("use_qk_norm", {"qk_norm": True, "qk_norm_type": "layernorm_per_head"}),
            Key("logit_scale", "logit_scale", float, 0.0625),
            SameInAllLayers("cohere", has_windows=False),
            RopeKeys(theta=5e5),
        ],
        COHERE,
        COHERE_LAYOUTS,
        rotates_neighbors=True,
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        [
            *SIZES,
            OTHER_DEFAULT,
            HeadDim(is_always_written=False),
            tied(True),
            norm_eps("norm_epsilon", 1e-5),
            Activation("hidden_act", "gelu_pytorch_tanh"),
            fixed(norm="layernorm", mlp="ungated"),
            flag("use_bias", BIAS_OF_ALL, default=True),
            SameInAllLayers("starcoder2"),
            RopeKeys(),
        ],
        STARCODER2,
    ),
    Family(
        "phi",
        "PhiForCausalLM",
        [
            *SIZES,
            SAME_HEADS,
            LAYER_NORM,
            tied(False),
            Activation("hidden_act", "gelu_new"),
            fixed(
                norm="layernorm",
                mlp="ungated",
                block="parallel_one_norm",
                head_bias=True,
                **BIAS_OF_ALL,
            ),
            flag("qk_layernorm", {"qk_norm": True, "qk_norm_type": "layernorm"}),
            SameInAllLayers("phi", has_windows=False),
            RopeKeys(share=0.5, share_key="partial_rotary_factor"),
        ],
        PHI,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        [
            Key("vocab_size", "vocab_size"),
            Key("n_embd", "d_model"),
            FeedForwardWidth("n_inner"),
            Key("n_layer", "n_layers"),
            Key("n_head", "n_heads"),
            Key("n_positions", "max_seq_len"),
            Activation("activation_function", "gelu_new"),
            norm_eps("layer_norm_epsilon", 1e-5),
            tied(True),
            fixed(positions="learned", norm="layernorm", mlp="ungated", **BIAS_OF_ALL),
            Only({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}),
        ],
        GPT2,
        GPT2_LAYOUTS,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        [
            Key("vocab_size", "vocab_size"),
            Key("hidden_size", "d_model"),
            FeedForwardWidth("intermediate_size"),
            Key("num_layers", "n_layers"),
            Key("num_heads", "n_heads"),
            Key("max_position_embeddings", "max_seq_len"),
            Activation("activation_function", "gelu_new"),
            norm_eps("layer_norm_epsilon", 1e-5),
            tied(True),
            fixed(
                positions="learned",
                norm="layernorm",
                mlp="ungated",
                mlp_bias=True,
                attention_out_bias=True,
                attention_scale=1.0,
            ),
            GlobalOrLocal(),
        ],
        GPT_NEO,
        buffers=("attn.attention.bias", "attn.attention.masked_bias"),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        [
            *SIZES,
            Activation("hidden_act", "gelu"),
            LAYER_NORM,
            tied(False),
            fixed(norm="layernorm", mlp="ungated", mlp_bias=True),
            flag("attention_bias", BIAS_OF_ATTENTION, default=True),
            flag("use_parallel_residual", {"block": "parallel"}, default=True),
            RopeKeys(theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
        ],
        GPT_NEOX,
        {"attention.query_key_value": RowsByHead()},
        buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        [
            Key("vocab_size", "vocab_size"),
            Key("hidden_size", "d_model"),
            Key("ffn_dim", "d_ff"),
            Key("num_hidden_layers", "n_layers"),
            Key("num_attention_heads", "n_heads"),
            Key("max_position_embeddings", "max_seq_len"),
            Activation("activation_function", "relu"),
            tied(True),
            fixed(
                positions="learned",
                position_offset=2,
                norm="layernorm",
                norm_eps=1e-5,
                mlp="ungated",
            ),
            flag("enable_bias", BIAS_OF_ALL, default=True),
            Only(
                {
                    "do_layer_norm_before": True,
                    "layer_norm_elementwise_affine": True,
                    "_remove_final_layer_norm": False,
                }
            ),
            EmbeddingWidth(),
        ],
        OPT,
    ),
]

FAMILIES = {family.model_type: family for family in TABLE}
