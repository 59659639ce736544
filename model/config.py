"""The shape of a Thinker."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from thinker.model.pattern_parser import layer_patterns
from thinker.model.patterns import LinearAttentionSpec, Pattern
from thinker.model.rope import RopeScaling
from thinker.runtime.errors import UserError

POSITIONS = ("rope", "alibi", "learned", "sinusoidal", "none")
LARGEST = 1 << 24  # of any size: the shapes of a file from a stranger shall stay numbers that can be reckoned with


@dataclass
class ThinkerConfig:
    """Everything that decides a Thinker's parameters and forward pass. Widths left at None follow from the others.

    Raises UserError where the numbers do not fit together.
    """

    vocab_size: int
    d_model: int = 256  # width of the residual stream
    n_layers: int = 4
    n_heads: int = 4  # query heads
    n_kv_heads: int | None = None  # key/value heads; None: as many as query heads (MHA); 1: multi-query
    head_dim: int | None = None  # None: d_model / n_heads
    d_ff: int | None = None  # width inside the MLP; None: 8/3 of d_model, rounded up to a multiple of 64
    max_seq_len: int = 1024  # the longest sequence that it is trained on, and so sampled to
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True  # RMSNorm on queries and keys before RoPE, as in Qwen3; False is the LLaMA form
    tie_embeddings: bool = False  # the head's matrix is the embedding's
    dropout: float = 0.0  # on the embedding and on what attention and MLP add to the residual stream
    init: str = "fan_in"  # how weights are drawn, see Thinker.init_weights; "normal" is GPT-2's, for comparison
    head_init_std: float = 0.0  # the head is drawn with this deviation; 0: the first loss is exactly ln V
    attention: str | list = "full"  # a pattern for all layers, or a list, or letters: see attention/patterns.py
    window: int | None = None  # keys that a layer L sees, where attention is letters such as "LLLG"
    positions: str = "rope"  # or alibi, learned, sinusoidal, none
    rope_scaling: dict | None = None  # such as {"type": "yarn", "factor": 4, "original_max_seq_len": 256}
    attn_logit_softcap: float | None = None  # of attention's scores; None: none
    attention_sinks: bool = False  # a learned score of each head for looking nowhere
    attention_bias: bool = False  # added to queries, keys and values, as in Qwen2
    no_rope_layers: list | None = None  # layers, from 0, whose queries and keys are not rotated, as in SmolLM3
    n_kv_heads_per_layer: list | None = None  # of each layer, where some have fewer: a pruned model's

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "max_seq_len", "n_kv_heads", "head_dim", "d_ff"):
            size = getattr(self, name)
            if size is not None and not 1 <= size <= LARGEST:
                raise UserError(f"model.{name} is {size}; it must be at least 1 and at most {LARGEST:,}")
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        if self.n_heads % self.n_kv_heads:
            divisors = [d for d in range(1, self.n_heads + 1) if self.n_heads % d == 0]
            raise UserError(
                f"model.n_heads ({self.n_heads}) must be a multiple of model.n_kv_heads ({self.n_kv_heads}); "
                f"possible: {', '.join(map(str, divisors))}"
            )
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise UserError(
                    f"model.d_model ({self.d_model}) must be a multiple of model.n_heads ({self.n_heads}), "
                    "or model.head_dim be given"
                )
            self.head_dim = self.d_model // self.n_heads
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"the width of a head is {self.head_dim}; RoPE turns pairs, so it must be even")
        if self.d_ff is None:
            self.d_ff = -(-8 * self.d_model // (3 * 64)) * 64
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must lie in [0, 1)")
        if not (0 < self.rope_theta < math.inf and 0 < self.norm_eps < math.inf):
            raise UserError("model.rope_theta and model.norm_eps must be positive numbers")
        if not 0 <= self.head_init_std < math.inf or (self.head_init_std and self.tie_embeddings):
            raise UserError("model.head_init_std must be at least 0, and 0 where the head is tied to the embedding")
        if self.init not in ("fan_in", "normal"):
            raise UserError(f"model.init is {self.init!r}; possible: fan_in, normal")
        if self.init == "normal" and self.head_init_std:
            raise UserError("model.head_init_std is read with model.init=fan_in only; leave it out")
        if self.positions not in POSITIONS:
            raise UserError(f"model.positions is {self.positions!r}; possible: {', '.join(POSITIONS)}")
        if self.rope_scaling is not None:
            if self.positions != "rope":
                raise UserError("model.rope_scaling is read with model.positions=rope only; leave it out")
            RopeScaling.from_dict(self.rope_scaling)
        if self.no_rope_layers is not None:
            layers = range(self.n_layers)
            if self.positions != "rope" or any(type(i) is not int or i not in layers for i in self.no_rope_layers):
                raise UserError(
                    f"model.no_rope_layers is {self.no_rope_layers}; with model.positions=rope it is a list of layers "
                    f"from 0 to {self.n_layers - 1}"
                )
        if self.attn_logit_softcap is not None and not 1e-9 <= self.attn_logit_softcap <= 1e9:
            raise UserError(
                f"model.attn_logit_softcap is {self.attn_logit_softcap}; it must be a number from 1e-9 to 1e9, or null"
            )
        if self.n_kv_heads_per_layer is not None:
            sizes, most = self.n_kv_heads_per_layer, self.n_kv_heads
            if len(sizes) != self.n_layers or any(type(n) is not int or not 1 <= n <= most for n in sizes):
                raise UserError(
                    f"model.n_kv_heads_per_layer is {sizes}; it must name {self.n_layers} numbers from 1 to {most}"
                )
            if self.positions == "alibi" or any(layer.by_head for layer in self.patterns):
                raise UserError(
                    "model.n_kv_heads_per_layer does not go with alibi, nor with patterns that differ by head"
                )
        unknown = [token for layer in self.patterns for token in layer.tokens if token >= self.vocab_size]
        if unknown and self.vocab_size > 1:  # a config is checked before its tokenizer is known
            raise UserError(
                f"model.attention names the token {unknown[0]}; the vocabulary ends at {self.vocab_size - 1}"
            )
        no_scores = any(isinstance(layer, LinearAttentionSpec) for layer in self.patterns)
        if no_scores and (self.attn_logit_softcap is not None or self.attention_sinks or self.positions == "alibi"):
            raise UserError(
                "linear attention has no scores: model.attn_logit_softcap, attention_sinks and alibi do not go with it"
            )

    @property
    def patterns(self) -> list[Pattern | LinearAttentionSpec]:
        """The pattern of each layer."""
        return layer_patterns(self.attention, self.n_layers, self.window, self.n_heads)

    def head_counts(self, layer: int) -> tuple[int, int]:
        """H and K of a layer; H / K is the same in all of them."""
        K = self.n_kv_heads if self.n_kv_heads_per_layer is None else self.n_kv_heads_per_layer[layer]
        return K * self.n_heads // self.n_kv_heads, K

    @property
    def is_plain(self) -> bool:
        """Whether every layer has full attention with RoPE and plain scores, as LLaMA and Qwen3 do."""
        plain_scores = self.attn_logit_softcap is None and not self.attention_sinks
        fixed_rope = self.positions == "rope" and (self.rope_scaling or {}).get("type") != "dynamic"
        fixed_rope = fixed_rope and not self.no_rope_layers
        return plain_scores and fixed_rope and {pattern.text for pattern in self.patterns} == {"full"}

    @property
    def is_unbounded(self) -> bool:
        """Whether texts of any length can be decoded: no layer keeps all keys, and positions are unbounded."""
        bounded = all(
            layer.fits_ring_buffer and layer.max_distance + layer.n_global <= self.max_seq_len
            for layer in self.patterns
        )
        return bounded and self.positions in ("rope", "alibi", "none") and self.max_cached_len == self.max_seq_len

    @property
    def max_cached_len(self) -> int:
        """The longest text that can be decoded with a cache, unless `is_unbounded`."""
        scaling = self.rope_scaling or {}  # of type dynamic, what a cache holds was turned for a shorter text
        return min(self.max_seq_len, scaling["original_max_seq_len"] if scaling.get("type") == "dynamic" else LARGEST)

    @property
    def prefix(self) -> int:
        """The length of the bidirectional prefix: a prompt without loss."""
        return max(layer.bidirectional_prefix for layer in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and strings, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ThinkerConfig:
        """The inverse of to_dict. Raises UserError on a key that this version does not know or a wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UserError(f"the model's configuration has a key {name!r} that this version does not know")
            kinds = str(known[name]).split(" | ")  # e.g. "int | None"; JSON may write 10000.0 as 10000
            allowed = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}
            allowed |= {"list": (list,), "dict": (dict,)}
            fits = isinstance(value, tuple(t for kind in kinds for t in allowed[kind]))
            if not fits or (isinstance(value, bool) and "bool" not in kinds):
                raise UserError(f"the model's configuration has {name} = {value!r}; it must be {known[name]}")
        if "vocab_size" not in values:
            raise UserError("the model's configuration lacks vocab_size")
        return cls(**values)
