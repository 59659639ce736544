"""Model configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from thinker.model.patterns.pattern import CAUSAL, Pattern
from thinker.model.registries import ACTIVATIONS, MLPS, NORMS
from thinker.runtime.checks import check_types, divisors
from thinker.runtime.constants import MAX_SIZE
from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.model.rope_scaling import RopeScaling

POSITIONS = ("rope", "alibi", "relative", "learned", "sinusoidal", "none")
BIASES = ("alibi", "relative")  # positions that add a number per head to the scores
# Where the norms of a block are, and what attention and MLP read (model/transformer.py).
BLOCKS = ("pre_norm", "post_norm", "both_norms", "parallel", "parallel_one_norm")
QK_NORMS = ("rmsnorm", "rmsnorm_one_plus", "rmsnorm_width", "layernorm", "layernorm_per_head")
SIZES = (
    "vocab_size",
    "d_model",
    "n_layers",
    "n_heads",
    "max_seq_len",
    "n_kv_heads",
    "head_dim",
    "d_ff",
)
MAX_FLOAT = 1e18  # of floats, which may be written as integers; torch accepts these up to 2^63


@dataclass
class ThinkerConfig:
    """Architecture of a model; None derives a value from the other fields. Raises UserError if
    fields conflict."""

    vocab_size: int
    d_model: int = 256  # width of the residual stream
    n_layers: int = 4
    n_heads: int = 4  # query heads
    n_kv_heads: int | None = None  # KV heads; None: n_heads (MHA); 1: multi-query attention
    head_dim: int | None = None  # None: d_model / n_heads
    # width inside the MLP; None: 8/3 of d_model, rounded up to a multiple of 64
    d_ff: int | None = None
    max_seq_len: int = 1024  # longest sequence in training and generation
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True  # norm on queries and keys before RoPE, as in Qwen3; False: as in LLaMA
    tie_embeddings: bool = False  # share the embedding's weight with the LM head
    dropout: float = 0.0  # on the embedding and on the outputs of attention and MLP
    init: str = "fan_in"  # or "normal" (std 0.02), for comparison; see Thinker.init_weights
    # std of the LM head's initial weights; with 0 the first loss is exactly ln V
    head_init_std: float = 0.0
    # a pattern, a list of patterns, or letters; see model/patterns/pattern_parser.py
    attention: str | list = "full"
    # number of keys that each L layer attends to, with letters such as "LLLG"
    window: int | None = None
    positions: str = "rope"  # one of POSITIONS
    # such as {"type": "yarn", "factor": 4, "original_max_seq_len": 256}
    rope_scaling: dict | None = None
    attention_temperature: float = 1.0  # divides the attention scores, beside √head_dim
    attn_logit_softcap: float | None = None  # soft limit of the attention scores
    attention_sinks: bool = False  # learned score per head that lets it attend to nothing
    attention_bias: bool = False  # bias on queries, keys and values, as in Qwen2
    token_shift: bool = False  # add the embedding of the token before, scaled per channel
    value_embeddings: bool = False  # add an embedding of each token to its values in each layer
    # rows of a table of pairs: an embedding of the token before and the token is added; 0: none
    bigram_rows: int = 0
    no_rope_layers: list | None = None  # layers without RoPE, counted from 0, as in SmolLM3
    # KV heads per layer of a pruned model; None: n_kv_heads
    n_kv_heads_per_layer: list | None = None
    mlp: str = "swiglu"  # a name in model.registries.MLPS
    activation: str = "silu"  # in the MLP; a name in model.registries.ACTIVATIONS
    norm: str = "rmsnorm"  # of the blocks and the output; a name in model.registries.NORMS
    block: str = "pre_norm"  # one of BLOCKS
    # one of QK_NORMS: RMSNorm of each head (one_plus: Gemma 3), or of all heads at once (OLMo 2);
    # LayerNorm of each head (Phi), or with weights of its own and no bias (StableLM, Cohere)
    qk_norm_type: str = "rmsnorm"
    attention_out_bias: bool = False  # bias on the output of attention, as in GPT-2
    mlp_bias: bool = False
    head_bias: bool = False  # bias on the logits, as in Phi
    # channels of each head that RoPE rotates: pairs (i, i + D/2) with i < rope_dim/2; None: all
    rope_dim: int | None = None
    # RoPE base of layers with a pattern other than full, whose RoPE is then not scaled (Gemma 3)
    window_rope_theta: float | None = None
    position_offset: int = 0  # row of the first learned position, 2 in OPT
    attention_scale: float | None = None  # factor on the attention scores; None: 1/√head_dim
    embedding_scale: float = 1.0  # factor on the embedding, √d_model in Gemma
    residual_scale: float = 1.0  # factor on what each block adds, as in Granite
    logit_scale: float = 1.0  # factor on the logits, as in Cohere
    logit_softcap: float | None = None  # soft limit of the logits, as in Gemma 2

    def __post_init__(self) -> None:
        check_types(get_type_hints(ThinkerConfig), vars(self), "model.")
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and not 1 <= size <= MAX_SIZE:
                raise UserError(f"model.{name} is {size}; it must be from 1 to {MAX_SIZE:,}")
        self._set_widths()
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be in [0, 1)")
        if not (0 < self.rope_theta <= MAX_FLOAT and 0 < self.norm_eps <= MAX_FLOAT):
            raise UserError(
                f"model.rope_theta and model.norm_eps must be above 0 and at most {MAX_FLOAT:g}"
            )
        self._check_init()
        MLPS.get(self.mlp)
        ACTIVATIONS.get(self.activation)
        NORMS.get(self.norm)
        self._check_positions()
        self._check_attention()
        self._check_block()

    def _set_widths(self) -> None:
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        heads = f"model.n_heads = {self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            choices = ", ".join(str(n) for n in divisors(self.n_heads))
            raise UserError(
                f"model.n_kv_heads is {self.n_kv_heads}, which does not divide {heads} (use "
                f"{choices})"
            )
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise UserError(
                    f"model.d_model is {self.d_model}, not a multiple of {heads}; set "
                    f"model.head_dim"
                )
            self.head_dim = self.d_model // self.n_heads
        if self.head_dim % 2:
            raise UserError(
                f"the head dimension is {self.head_dim}; it must be even because RoPE rotates pairs"
            )
        if self.rope_dim is not None and (
            self.rope_dim % 2 or not 2 <= self.rope_dim <= self.head_dim
        ):
            raise UserError(
                f"model.rope_dim is {self.rope_dim}; it must be an even number from 2 to "
                f"head_dim = {self.head_dim}"
            )
        if self.d_ff is None:
            self.d_ff = -(-8 * self.d_model // (3 * 64)) * 64

    def _check_init(self) -> None:
        if self.init not in ("fan_in", "normal"):
            raise UserError(f"model.init is {self.init!r}; choose from: fan_in, normal")
        if not 0 <= self.head_init_std <= MAX_FLOAT:
            raise UserError(
                f"model.head_init_std is {self.head_init_std}; it must be from 0 to {MAX_FLOAT:g}"
            )
        if self.head_init_std > 0 and (self.tie_embeddings or self.init == "normal"):
            raise UserError(
                "model.head_init_std needs model.init=fan_in and model.tie_embeddings=false; "
                "remove it"
            )

    def _check_positions(self) -> None:
        if self.positions not in POSITIONS:
            raise UserError(
                f"model.positions is {self.positions!r}; choose from: {', '.join(POSITIONS)}"
            )
        for name in ("rope_scaling", "no_rope_layers", "rope_dim", "window_rope_theta"):
            if self.positions != "rope" and getattr(self, name) is not None:
                raise UserError(f"model.{name} works only with model.positions=rope; remove it")
        if self.position_offset and self.positions != "learned":
            raise UserError(
                "model.position_offset works only with model.positions=learned; remove it"
            )
        if not 0 <= self.position_offset <= MAX_SIZE:
            raise UserError(
                f"model.position_offset is {self.position_offset}; it must be from 0 to "
                f"{MAX_SIZE:,}"
            )
        if self.window_rope_theta is not None and not 0 < self.window_rope_theta <= MAX_FLOAT:
            raise UserError(
                f"model.window_rope_theta is {self.window_rope_theta}; it must be above 0 and at "
                f"most {MAX_FLOAT:g}"
            )
        self.parse_rope_scaling()  # raises UserError
        layers = self.no_rope_layers or []
        last = self.n_layers - 1
        if any(type(i) is not int or not 0 <= i <= last for i in layers):
            raise UserError(
                f"model.no_rope_layers is {layers}; it must be a list of layers from 0 to {last}"
            )

    def _check_attention(self) -> None:
        patterns = self.patterns  # raises UserError if model.attention is not valid
        softcap = self.attn_logit_softcap
        for name in ("attn_logit_softcap", "logit_softcap", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not 1e-9 <= value <= 1e9:
                raise UserError(
                    f"model.{name} is {value}; it must be a number from 1e-9 to 1e9, or null"
                )
        temperature = self.attention_temperature
        if not 1e-3 <= temperature <= 1e3:
            raise UserError(
                f"model.attention_temperature is {temperature}; it must be a number from "
                f"0.001 to 1000"
            )
        self._check_kv_heads_per_layer(patterns)
        last_token = max((token for pattern in patterns for token in pattern.tokens), default=0)
        is_known = self.vocab_size > 1  # 1 until the tokenizer is known
        if is_known and last_token >= self.vocab_size:
            raise UserError(
                f"model.attention names token {last_token}, which is not in the vocabulary (0 "
                f"to {self.vocab_size - 1})"
            )
        has_linear = any(pattern.n_features for pattern in patterns)
        has_scale = self.attention_scale is not None or temperature != 1
        has_changed_scores = has_scale or softcap or self.attention_sinks
        if has_linear and (has_changed_scores or self.positions in BIASES):
            raise UserError(
                "linear attention does not support attention_temperature, attention_scale, "
                "softcap, sinks, alibi or relative positions"
            )

    def _check_block(self) -> None:
        for name, choices in (("block", BLOCKS), ("qk_norm_type", QK_NORMS)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"model.{name} is {getattr(self, name)!r}; choose from: {', '.join(choices)}"
                )
        if self.qk_norm_type != "rmsnorm" and not self.qk_norm:
            raise UserError("model.qk_norm_type works only with model.qk_norm=true; remove it")
        if not 0 <= self.bigram_rows <= MAX_SIZE:
            raise UserError(
                f"model.bigram_rows is {self.bigram_rows}; it must be from 0 to {MAX_SIZE:,}"
            )
        for name in ("embedding_scale", "residual_scale", "logit_scale"):
            if not 1e-9 <= getattr(self, name) <= 1e9:
                raise UserError(
                    f"model.{name} is {getattr(self, name)}; it must be a number from 1e-9 to 1e9"
                )
        if self.residual_scale != 1 and self.block in ("post_norm", "both_norms"):
            raise UserError(
                f"model.residual_scale has no effect beside the norms of model.block={self.block}; "
                "remove it"
            )

    def _check_kv_heads_per_layer(self, patterns: list[Pattern]) -> None:
        counts = self.n_kv_heads_per_layer
        if counts is None:
            return
        are_valid = all(type(n) is int and 1 <= n <= self.n_kv_heads for n in counts)
        if len(counts) != self.n_layers or not are_valid:
            raise UserError(
                f"model.n_kv_heads_per_layer is {counts}; it must list {self.n_layers} numbers "
                f"from 1 to {self.n_kv_heads}"
            )
        if self.positions in BIASES or any(pattern.by_head for pattern in patterns):
            raise UserError(
                "model.n_kv_heads_per_layer does not work with alibi, relative positions or "
                "per-head patterns; remove it"
            )
        if self.value_embeddings:
            raise UserError(
                "model.n_kv_heads_per_layer does not work with model.value_embeddings; remove it"
            )

    def parse_rope_scaling(self) -> RopeScaling | None:
        """`rope_scaling` with its defaults. Raises UserError if it is not valid."""
        if self.rope_scaling is None:
            return None
        from thinker.model.rope_scaling import RopeScaling

        return RopeScaling.from_dict(self.rope_scaling)

    @property
    def patterns(self) -> list[Pattern]:
        """Attention pattern of each layer."""
        if self.attention == "full" and self.window is None:
            return [CAUSAL] * self.n_layers
        from thinker.model.patterns.pattern_parser import layer_patterns

        return layer_patterns(self.attention, self.n_layers, self.window, self.n_heads)

    def rope_of_layer(self, layer: int) -> str:
        """Which rotation a layer applies: "global", "window" (window_rope_theta) or "none"."""
        if self.positions != "rope" or layer in (self.no_rope_layers or []):
            return "none"
        if self.window_rope_theta is not None and self.patterns[layer].text != "full":
            return "window"
        return "global"

    def head_counts(self, layer: int) -> tuple[int, int]:
        """H and K of a layer; H / K is the same in all layers."""
        K = self.n_kv_heads
        if self.n_kv_heads_per_layer is not None:
            K = self.n_kv_heads_per_layer[layer]
        return K * self.n_heads // self.n_kv_heads, K

    @property
    def is_plain(self) -> bool:
        """Whether all layers use full attention, RoPE and plain scores, as in LLaMA and Qwen3."""
        if self.attn_logit_softcap is not None or self.attention_sinks:
            return False
        if self.positions != "rope" or self._has_dynamic_rope or self.no_rope_layers:
            return False
        if self.token_shift or self.value_embeddings or self.bigram_rows > 0:
            return False
        return all(pattern.text == "full" for pattern in self.patterns)

    @property
    def reads_token_before(self) -> bool:
        """Whether the input of a position depends on the token before it."""
        return self.token_shift or self.bigram_rows > 0

    @property
    def is_unbounded(self) -> bool:
        """Whether texts of any length can be decoded: no layer caches all keys, and positions are
        unbounded."""
        for pattern in self.patterns:
            if not pattern.fits_ring_buffer:
                return False
            if pattern.max_distance + pattern.n_global > self.max_seq_len:
                return False
        if self.positions not in ("rope", *BIASES, "none"):
            return False
        return self.max_cached_len == self.max_seq_len

    @property
    def max_cached_len(self) -> int:
        """Longest text that can be decoded with a cache, unless `is_unbounded`."""
        if self._has_dynamic_rope:  # a longer text changes the angles of the keys in the cache
            return min(self.max_seq_len, self.rope_scaling["original_max_seq_len"])
        return self.max_seq_len

    @property
    def _has_dynamic_rope(self) -> bool:
        return self.rope_scaling is not None and self.rope_scaling["type"] == "dynamic"

    @property
    def prefix(self) -> int:
        """Length of the bidirectional prefix, whose tokens have no loss."""
        return max(pattern.bidirectional_prefix for pattern in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ThinkerConfig:
        """The inverse of to_dict. Raises UserError for an unknown key or a wrong type."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise UserError(
                    f"the model config has an unknown key {name!r}; it may need a newer "
                    f"version of Thinker"
                )
        if "vocab_size" not in values:
            raise UserError("the model config has no vocab_size; add it")
        return cls(**values)
