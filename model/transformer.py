"""The Thinker: the whole forward pass on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import nan

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.activations import ActivationCache, Edit, activation_names, taps
from thinker.model.attend import AttentionMask
from thinker.model.attention import Attention
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.linear_cross_entropy import linear_cross_entropy
from thinker.model.kv_cache import KVCache, LayerCache, looking
from thinker.model.linear import Linear
from thinker.model.linear_attention import LinearAttention
from thinker.model.masks import ForwardContext, MaskBuilder
from thinker.model.norm import RMSNorm
from thinker.model.patterns import Linear as LinearPattern
from thinker.model.patterns import Pattern, TokenInfo
from thinker.model.positions import sinusoidal_embedding
from thinker.model.rope import Rope, RopeScaling
from thinker.runtime.errors import UserError


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_ff)
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.register_module("gate_up_proj", None)  # the two in one piece, in the form for decoding
        self.down_proj = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)  # (B, T, d_ff) each
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ThinkerConfig, pattern: Pattern | LinearPattern, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        linear = isinstance(pattern, LinearPattern)
        self.attention = LinearAttention(config, pattern.features, layer) if linear else Attention(config, layer)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, sight: AttentionMask, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, sight, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Thinker(nn.Module):
    """A decoder-only transformer: pre-norm blocks of grouped-query attention with RoPE, and SwiGLU.

    With QK-norm this is what Hugging Face calls `qwen3`, without it `llama`: weights carry over unchanged.

    Weights may stay in fp32 while activations run in `activation_dtype` (None: the weights' own): each matrix is
    cast where it is used, norms and the softmax of the loss are computed in fp32.
    """

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_dtype: torch.dtype | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.kernel = "auto"  # of attention; one of attention.attend.KERNELS forces it
        self.looking: MaskBuilder | None = None
        scaling = RopeScaling.from_dict(config.rope_scaling) if config.rope_scaling else None
        self.rope = Rope(config.head_dim, config.rope_theta, scaling) if config.positions == "rope" else None
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_seq_len, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config, pattern, layer) for layer, pattern in enumerate(config.patterns))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = Linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew.

        | parameter | drawn from |
        |---|---|
        | embedding | normal, deviation 1; 0.02 where the head is tied to it |
        | q, k, v, gate, up | normal, deviation 1/√(columns): outputs as large as inputs |
        | o, down | zero: every block begins as the identity |
        | head | normal, deviation `head_init_std`; 0: the first loss is exactly ln V; where tied, the embedding |
        | learned positions | normal, deviation 0.02 |
        | gains of the norms | one |
        | sinks, biases | zero |

        With `init` "normal" every matrix is drawn with deviation 0.02 (Radford et al. 2019, GPT-2).
        """
        for name, parameter in self.named_parameters():
            if self.config.init == "normal" and parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=generator)
            elif name == "embedding.weight":
                parameter.normal_(0, 0.02 if self.config.tie_embeddings else 1.0, generator=generator)
            elif name == "positions.weight":
                parameter.normal_(0, 0.02, generator=generator)
            elif parameter.dim() == 1:
                parameter.fill_(0 if name.endswith(("sinks", "bias")) else 1)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name == "lm_head.weight":
                parameter.normal_(0, self.config.head_init_std, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the activations."""
        return self.activation_dtype or self.embedding.weight.dtype

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        last_logits_only: bool = False,
        document_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One pass, for training, prefill and decoding alike.

        Args:
            tokens: (B, T) int64; or, instead, `embeddings`: (B, T, C).
            targets: (B, T) int64, the token after each; IGNORE_INDEX (−1) is not counted.
            cache: take the T positions as the next ones of what it holds, and add them to it. For inference:
                no gradient flows.
            last_logits_only: compute the logits of the last position alone.
            document_ids: (B, T) int64, a number for each document of a window, another one than its neighbours'. None
                sees across a border, and positions count from each one's beginning: its logits are those it has alone.

        Returns: logits (B, T, V), or (B, 1, V) with last_logits_only; with targets, (sum of losses in nats,
            fp32; number of targets counted).

        Raises UserError on shapes that do not fit, or a cache that is full.
        """
        if (tokens is None) == (embeddings is None):
            raise UserError("give a Thinker either tokens or embeddings")
        given = tokens if embeddings is None else embeddings
        if given.dim() != (2 if embeddings is None else 3) or 0 in given.shape:
            raise UserError(f"tokens must be (B, T) and embeddings (B, T, C), not empty; got {tuple(given.shape)}")
        if cache is not None and torch.is_grad_enabled():
            with torch.no_grad():
                options = {
                    "targets": targets,
                    "cache": cache,
                    "last_logits_only": last_logits_only,
                    "document_ids": document_ids,
                }
                return self(tokens, embeddings=embeddings, **options)
        place = self.make_context(given, tokens, document_ids, cache)
        x = self.embed(given, place)  # (B, T, C)
        rope = None if self.rope is None else self.rope(place.positions, place.end, self.dtype)
        x = self.forward_blocks(x, rope, place, cache, last_logits_only)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        if self.config.prefix:  # a position that sees the next one has nothing to predict
            targets = targets.masked_fill(place.positions < self.config.prefix - 1, -1)
        return linear_cross_entropy(x, self.lm_head.weight, targets, self.lm_head.cached_weight)

    def make_context(
        self, given: Tensor, tokens: Tensor | None, documents: Tensor | None = None, cache: KVCache | None = None
    ) -> ForwardContext:
        """Where the positions of a pass stand: a whole sequence's, or the next ones of a cache, with room made there.

        Raises UserError, with nothing changed, where the model or the cache has no such positions.
        """
        if documents is not None and (cache is not None or documents.shape != given.shape[:2]):
            raise UserError(f"a cache holds one document a row; without one documents are {tuple(given.shape[:2])}")
        if tokens is None and any(pattern.by_token for pattern in self.config.patterns):
            raise UserError("model.attention asks for tokens by their ids; embeddings have none")
        end = given.shape[1] + (0 if cache is None else max(cache.lengths))
        if self.positions is not None and end > (learned := len(self.positions.weight)):
            raise UserError(
                f"the model has learned {learned} positions (model.max_seq_len), and there are {end} tokens"
            )
        if self.rope is not None and not (cache is None and documents is None):
            self.rope.check_growth(end)
        if cache is not None:
            return cache.append(*given.shape[:2], tokens)
        positions = torch.arange(given.shape[1], device=given.device)  # (T,)
        if documents is not None:
            begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # (B, T)
            positions = positions - torch.where(begins, positions, 0).cummax(dim=1).values
            documents = begins.cumsum(dim=1)  # from 1 on, whatever numbers they were given
        made_for = self.dtype, given.device, self.kernel
        if self.looking is None or self.looking.made_for != made_for:
            self.looking = looking(self.config, *made_for)
        return self.looking.whole(TokenInfo(positions, documents, tokens if self.looking.by_token else None))

    def embed(self, given: Tensor, place: ForwardContext) -> Tensor:
        """What enters the first block: tokens (B, T) or their embeddings (B, T, C) -> (B, T, C), with positions."""
        x = self.embedding(given) if given.dim() == 2 else given
        if self.positions is not None:
            x = x + self.positions(place.positions)
        elif self.config.positions == "sinusoidal":
            x = x + sinusoidal_embedding(place.positions, x.shape[-1]).to(x.dtype)
        return x

    def forward_blocks(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        place: ForwardContext,
        cache: KVCache | None = None,
        last_logits_only: bool = False,
    ) -> Tensor:
        """What lies between embedding and head: x (B, T, C), rope 2 x (T, D) -> (B, T, C)."""
        x = self.dropout(x.to(self.dtype))
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        for block, sight, layer in zip(self.blocks, place.sights, layers):
            x = block(x, rope, sight, layer)  # (B, T, C)
        return self.norm(x[:, -1:] if last_logits_only else x)

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, slack: int = 0) -> KVCache:
        """An empty cache of this model's shape, device and precision for `max_len` positions, or config.max_seq_len.

        `slack`: how many positions it can always be taken back (KVCache.truncate).
        """
        return KVCache(self.config, batch_size, max_len or self.config.max_seq_len, self.device, self.dtype, slack)

    def record(self, *names: str) -> AbstractContextManager[ActivationCache]:
        """`with model.record("blocks.*.attention.weights") as seen:` keeps what is named of each pass: seen[name].

        Names: activation_names(); `*` stands for one part of a name. Raises UserError for one that there is not.
        """
        return taps(self, names, {})

    def patch(self, changes: Mapping[str, Edit]) -> AbstractContextManager[ActivationCache]:
        """`with model.patch({"blocks.3.attention.heads.1": "zero"}):` changes what passes there.

        To "zero"; "mean", that of the pass, over its texts and positions (of weights over texts); a number or a tensor
        that can be broadcast; or what a function makes of it. Raises UserError for a name that there is not, or whose
        activation is only seen.
        """
        return taps(self, (), changes)

    def activation_names(self) -> list[str]:
        """All that can be tapped, in the order of the pass: see model.taps.activation_names."""
        return activation_names(self)

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> Tensor:
        """Every attention matrix of one ordinary forward pass, (layers, B, H, T, T); rows are queries and sum to 1.

        Where a layer has fewer heads than others (config.n_kv_heads_per_layer), nan takes the others' place.
        """
        with self.record("blocks.*.attention.weights") as seen:
            self(tokens)
        by_head = [weights.transpose(0, 1) for weights in seen.values()]  # (H, B, T, T) each
        return nn.utils.rnn.pad_sequence(by_head, batch_first=True, padding_value=nan).transpose(1, 2)
