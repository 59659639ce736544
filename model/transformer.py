"""The model and its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.attention import AnyCache, Attention, LinearAttention
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.config import ThinkerConfig
from thinker.model.input_checks import check_inputs, tokens_to_inspect
from thinker.model.kernels import load_kernel
from thinker.model.kv_cache import KVCache
from thinker.model.layers import (
    VALUE_EMBEDDING_STD,
    BigramEmbedding,
    LearnedPositions,
    Linear,
    LogitTransform,
    OnePlusRMSNorm,
    Scale,
    ScaledEmbedding,
    TransformedLinear,
    ValueEmbeddings,
)
from thinker.model.masks import CacheSlots, ForwardContext, MaskBuilder
from thinker.model.patterns.pattern import Pattern, TokenInfo
from thinker.model.positions import RelativeBias, Rope, Rotation, sinusoidal_embedding
from thinker.model.registries import ACTIVATIONS, MLPS, NORMS
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory

if TYPE_CHECKING:
    from thinker.model.inspection.activation_hooks import ActivationCache, Patch
    from thinker.model.kernels.linear_cross_entropy import ChunkLoss


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) · up(x)), or with another
    activation."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_ff, config.mlp_bias)
        self.up_proj = Linear(config.d_model, config.d_ff, config.mlp_bias)
        self.down_proj = Linear(config.d_ff, config.d_model, config.mlp_bias)
        self.activation = ACTIVATIONS.get(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        gate = self.gate_proj(x)  # (B, T, d_ff)
        up = self.up_proj(x)  # (B, T, d_ff)
        return self.down_proj(self.activation(gate) * up)


class UngatedMLP(nn.Module):
    """The MLP of the first transformer (arXiv:1706.03762): down(activation(up(x)))."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.d_model, config.d_ff, config.mlp_bias)
        self.down_proj = Linear(config.d_ff, config.d_model, config.mlp_bias)
        self.activation = ACTIVATIONS.get(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down_proj(self.activation(self.up_proj(x)))


MLPS.register("swiglu", MLP)
MLPS.register("ungated", UngatedMLP)


class Block(nn.Module):
    """x + f(norm(x)), where f is attention, and then the MLP.

    With model.block=post_norm (OLMo 2) it is x + norm(f(x)), and with both_norms (Gemma 2) x +
    norm(f(norm(x))).
    """

    def __init__(self, config: ThinkerConfig, pattern: Pattern, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm_before(config)
        self.attention = new_attention(config, pattern, layer)
        self.after_attention = norm_after(config)
        self.mlp_norm = norm_before(config)
        self.mlp = MLPS.get(config.mlp)(config)
        self.after_mlp = norm_after(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        cache: AnyCache = None,
        slots: CacheSlots | None = None,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        y = self.attention(self.attention_norm(x), rope, mask, cache, slots, token_values)
        x = x + self.dropout(self.after_attention(y))
        del y  # before the MLP needs memory
        y = self.mlp(self.mlp_norm(x))
        return x + self.dropout(self.after_mlp(y))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): attention and MLP read the same input (GPT-J,
    GPT-NeoX), with model.block=parallel_one_norm through one norm (Phi, Cohere)."""

    def __init__(self, config: ThinkerConfig, pattern: Pattern, layer: int) -> None:
        super().__init__()
        self.block_norm = nn.Identity()
        self.attention_norm = nn.Identity()
        self.mlp_norm = nn.Identity()
        if config.block == "parallel_one_norm":
            self.block_norm = new_norm(config)
        else:
            self.attention_norm = new_norm(config)
            self.mlp_norm = new_norm(config)
        self.attention = new_attention(config, pattern, layer)
        self.mlp = MLPS.get(config.mlp)(config)
        self.after_attention = norm_after(config)
        self.after_mlp = norm_after(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        cache: AnyCache = None,
        slots: CacheSlots | None = None,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        normed = self.block_norm(x)
        attended = self.attention(
            self.attention_norm(normed), rope, mask, cache, slots, token_values
        )
        hidden = self.mlp(self.mlp_norm(normed))
        x = x + self.dropout(self.after_attention(attended))
        return x + self.dropout(self.after_mlp(hidden))


def new_block(config: ThinkerConfig, pattern: Pattern, layer: int) -> nn.Module:
    """The block that the config chooses."""
    if config.block in ("parallel", "parallel_one_norm"):
        return ParallelBlock(config, pattern, layer)
    return Block(config, pattern, layer)


def new_norm(config: ThinkerConfig) -> nn.Module:
    """A norm of the residual stream."""
    return NORMS.get(config.norm)(config.d_model, config.norm_eps)


def new_attention(config: ThinkerConfig, pattern: Pattern, layer: int) -> Attention:
    """The attention of a layer with this pattern."""
    if pattern.n_features > 0:
        return LinearAttention(config, pattern.n_features, layer)
    return Attention(config, layer)


def norm_before(config: ThinkerConfig) -> nn.Module:
    """What the input of attention or MLP goes through: a norm or nothing."""
    if config.block == "post_norm":
        return nn.Identity()
    return new_norm(config)


def norm_after(config: ThinkerConfig) -> nn.Module:
    """What the output of attention or MLP goes through before it is added to x: a norm, a factor or
    nothing."""
    if config.block in ("post_norm", "both_norms"):
        return new_norm(config)
    if config.residual_scale != 1:
        return Scale(config.residual_scale)
    return nn.Identity()


class Thinker(nn.Module):
    """A decoder-only transformer: by default pre-norm blocks of grouped-query attention with
    QK-norm and RoPE, and SwiGLU, which is Hugging Face's `qwen3`.

    interop/families/table.py lists what else a config can express. `activation_dtype` (None: the
    dtype of the weights) enables mixed precision: each matrix is cast when it is used; the
    statistics of norms and the softmax of the loss stay in fp32.
    """

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        check_types({"config": ThinkerConfig}, locals())
        self.config = config
        self.activation_dtype: torch.dtype | None = None
        # Set when the blocks are compiled; on CUDA this also compiles the loss.
        self.is_compiled = False
        self.kernel = "auto"  # or one of attention_dispatch.KERNELS
        self.mask_builder: MaskBuilder | None = None
        self._built_for: tuple[torch.dtype, torch.device, str] | None = None

        embedding = _random(config.vocab_size, config.d_model)
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=False)
        if config.embedding_scale != 1:
            self.embedding = ScaledEmbedding(embedding, config.embedding_scale)
        # As the token shift of RWKV (Peng et al. 2023, arXiv:2305.13048), but only on the
        # embedding.
        self.token_shift: nn.Parameter | None = None  # (C,)
        if config.token_shift:
            self.token_shift = nn.Parameter(torch.zeros(config.d_model))
        self.bigram_embedding: BigramEmbedding | None = None
        if config.bigram_rows:
            self.bigram_embedding = BigramEmbedding(config.bigram_rows, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.rope: Rope | None = None
        self.window_rope: Rope | None = None
        if config.positions == "rope":
            scaling = config.parse_rope_scaling()
            self.rope = Rope(config.head_dim, config.rope_theta, scaling, config.rope_dim)
        if config.window_rope_theta is not None:
            self.window_rope = Rope(
                config.head_dim, config.window_rope_theta, rope_dim=config.rope_dim
            )
        self.positions: LearnedPositions | None = None
        if config.positions == "learned":
            table = _random(config.max_seq_len + config.position_offset, config.d_model)
            self.positions = LearnedPositions(table, config.position_offset)
        self.relative_bias: RelativeBias | None = None
        if config.positions == "relative":
            self.relative_bias = RelativeBias(config.n_heads)
        self.rope_kinds = [config.rope_of_layer(layer) for layer in range(config.n_layers)]
        self.blocks = nn.ModuleList(
            new_block(config, pattern, layer) for layer, pattern in enumerate(config.patterns)
        )
        self.value_embeddings: ValueEmbeddings | None = None
        if config.value_embeddings:
            self.value_embeddings = ValueEmbeddings(
                config.n_layers, config.vocab_size, config.n_kv_heads, config.head_dim
            )
        self.norm = new_norm(config)
        self.logit_transform: LogitTransform | None = None
        if config.logit_scale != 1 or config.logit_softcap is not None:
            self.logit_transform = LogitTransform(config.logit_scale, config.logit_softcap)
        self.lm_head = new_lm_head(config, self.logit_transform)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        if not self.embedding.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialize all weights; `init` "normal" has the std of GPT-2 (Radford et al. 2019) in all
        matrices."""
        embedding_std = 1.0
        if self.config.tie_embeddings:
            embedding_std = 0.02
        for name, parameter in self.named_parameters():
            is_vector = parameter.dim() == 1
            if is_vector and name.endswith(("sinks", "bias", "token_shift")):
                parameter.fill_(0)
            elif is_vector:  # the weight of a norm
                parameter.fill_(1)
            elif name == "relative_bias.weight":
                parameter.zero_()
            elif self.config.init == "normal" or name == "positions.weight":
                parameter.normal_(0, 0.02, generator=generator)
            elif name == "embedding.weight":
                parameter.normal_(0, embedding_std, generator=generator)
            elif name.startswith("bigram_embedding."):
                parameter.zero_()
            elif name.startswith("value_embeddings."):
                parameter.normal_(0, VALUE_EMBEDDING_STD, generator=generator)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # every block starts as the identity
            elif name == "lm_head.weight":  # with std 0 the first loss is exactly ln V
                parameter.normal_(0, self.config.head_init_std, generator=generator)
            else:  # q, k, v, gate, up: outputs keep the scale of inputs
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        for module in self.modules():
            if isinstance(module, OnePlusRMSNorm):
                module.weight.fill_(0)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle everything except cached masks, which contain functions."""
        return vars(self) | {"mask_builder": None, "_built_for": None}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations; inside torch.autocast, the autocast dtype."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
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
        target_losses: Tensor | None = None,
        chunk_loss: ChunkLoss | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run one pass, for training, prefill or decoding.

        Args:
            tokens: (B, T) int64; alternatively pass `embeddings`, (B, T, C).
            targets: (B, T) int64, the next token of each position; IGNORE_INDEX (−1) is ignored.
            cache: the T positions follow the cached ones and are added to the cache. For inference
                only: no gradients.
            last_logits_only: compute only the logits of the last position.
            document_ids: (B, T) int64, different for adjacent documents. Attention stays within
                each document, whose positions count from 0, so its logits do not depend on other
                documents.
            target_losses: (B, T) fp32, contiguous; is filled with the loss of each target in nats,
                0 if it is ignored.
            chunk_loss: replaces the cross-entropy (kernels/linear_cross_entropy.py), for training
                only.

        Returns: logits (B, T or 1, V); with targets, (sum of losses in nats, fp32; number of
        targets). Raises UserError
            if shapes do not fit, an id is out of range (on a CPU), or the cache is full. Warns
            beyond the context.
        """
        inputs = check_inputs(
            self.config, self.device, self.dtype, tokens, embeddings, targets, document_ids, cache
        )
        if targets is not None and last_logits_only:
            raise UserError(
                "last_logits_only cannot be combined with targets, which need the logits of "
                "all positions"
            )
        if target_losses is not None and (targets is None or target_losses.shape != targets.shape):
            raise UserError("target_losses needs targets of the same shape")
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            context = self.make_context(inputs, tokens, document_ids, cache)
            x = self.forward_blocks(inputs, context, cache, last_logits_only)  # (B, T, C)
            if targets is None:
                return self.lm_head(x)  # (B, T, V)
            if self.config.prefix:  # no loss if a position attends to its target
                targets = targets.masked_fill(context.positions < self.config.prefix - 1, -1)
            # Imported at the first loss: a model that only writes text computes none.
            linear_cross_entropy = load_kernel("loss")
            # It multiplies by the cast weight, and gives the weight itself a gradient in fp32.
            cast_weight = self.lm_head.cast_weight(x.dtype).detach()
            return linear_cross_entropy(
                x,
                self.lm_head.weight,
                targets,
                cast_weight,
                self.is_compiled and x.is_cuda,
                target_losses,
                chunk_loss,
                self.lm_head.bias,
                self.logit_transform,
            )

    def make_context(
        self,
        inputs: Tensor,
        tokens: Tensor | None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ForwardContext:
        """Context of a whole sequence, or of the next positions of a cache. Raises UserError if
        they do not fit."""
        if tokens is None and any(pattern.tokens for pattern in self.config.patterns):
            raise UserError(
                "model.attention selects tokens by id, but embeddings have no ids; pass tokens"
            )
        has_tables = self.value_embeddings is not None or self.bigram_embedding is not None
        if tokens is None and has_tables:
            raise UserError(
                "model.value_embeddings and model.bigram_rows need token ids; pass tokens, not "
                "embeddings"
            )
        if tokens is None and cache is not None and self.token_shift is not None:
            raise UserError(
                "model.token_shift with a cache needs token ids; pass tokens, not embeddings"
            )
        end = inputs.shape[1]
        if cache is not None:
            end += max(cache.lengths)
        if self.positions is not None and end > self.config.max_seq_len:
            raise UserError(
                f"the sequence has {end} tokens, more than the {self.config.max_seq_len} "
                f"learned positions; shorten it"
            )
        if self.rope is not None and (cache is not None or document_ids is not None):
            self.rope.check_growth(end)
        if cache is not None:
            cache.mask_builder.relative_bias = self.relative_bias
            context = cache.append(*inputs.shape[:2], tokens)
        else:
            positions = torch.arange(inputs.shape[1], device=inputs.device)  # (T,)
            if document_ids is not None:
                is_new = document_ids[:, 1:] != document_ids[:, :-1]
                is_first = F.pad(is_new, (1, 0), value=True)  # (B, T), of a document
                starts = torch.where(is_first, positions, 0).cummax(dim=1).values
                positions = positions - starts  # (B, T)
                document_ids = is_first.cumsum(dim=1)  # renumbered from 1
            built_for = self.dtype, inputs.device, self.kernel
            if built_for != self._built_for:
                self.mask_builder = MaskBuilder.of_model(self.config, *built_for)
                self._built_for = built_for  # set last because other threads may read it
            self.mask_builder.relative_bias = self.relative_bias
            query = TokenInfo(positions, document_ids)
            if self.mask_builder.by_token:
                query.token_id = tokens
            context = self.mask_builder.whole_sequence(query)
        context.ropes = self.rotations(context.positions, context.end)
        if self.value_embeddings is not None:
            context.token_values = self.value_embeddings(tokens, self.dtype)
        return context

    def rotations(self, positions: Tensor, end: int) -> list[Rotation]:
        """Per layer the tables of RoPE at positions (T,) or (B, T), all below `end`; None without
        RoPE."""
        tables: dict[str, Rotation] = {"none": None}
        if self.rope is not None:
            tables["global"] = self.rope(positions, end, self.dtype)
        if self.window_rope is not None:
            tables["window"] = self.window_rope(positions, end, self.dtype)
        return [tables[kind] for kind in self.rope_kinds]

    def forward_blocks(
        self,
        inputs: Tensor,
        context: ForwardContext,
        cache: KVCache | None = None,
        last_logits_only: bool = False,
    ) -> Tensor:
        """Map tokens (B, T) or embeddings (B, T, C) to the input of the LM head, (B, T, C)."""
        x = self.dropout(self.embed(inputs, context).to(self.dtype))
        caches = [None] * len(self.blocks)
        if cache is not None:
            caches = cache.layers
        per_layer = (context.ropes, context.masks, caches, context.slots, context.token_values)
        for block, *inputs_of_layer in zip(self.blocks, *per_layer, strict=True):
            x = block(x, *inputs_of_layer)  # (B, T, C)
        if last_logits_only:
            x = x[:, -1:]
        return self.norm(x)

    def embed(self, inputs: Tensor, context: ForwardContext) -> Tensor:
        """Tokens (B, T), or embeddings (B, T, C), and what the input adds about order -> (B, T,
        C)."""
        x = self.embedding(inputs) if inputs.dim() == 2 else inputs
        if self.token_shift is not None:
            before = F.pad(x, (0, 0, 1, -1))  # (B, T, C)
            if context.token_before is not None:
                before[:, :1] = self.embedding(context.token_before)
            is_first = context.positions == 0  # (T,) or (B, T): no token before it
            x = x + (self.token_shift * before).masked_fill(is_first.unsqueeze(-1), 0)
        if self.bigram_embedding is not None:
            is_first = context.positions == 0  # (T,) or (B, T)
            x = x + self.bigram_embedding(inputs, context.token_before, is_first)
        if self.positions is not None:
            x = x + self.positions(context.positions)
        elif self.config.positions == "sinusoidal":
            x = x + sinusoidal_embedding(context.positions, x.shape[-1]).to(x.dtype)
        return x

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, slack: int = 0) -> KVCache:
        """Create an empty cache for `max_len` positions (default: config.max_seq_len); `slack` as
        in KVCache."""
        if max_len is None:
            max_len = self.config.max_seq_len
        size = KVCache(self.config, batch_size, max_len, "meta", self.dtype, slack).nbytes
        check_memory({"cache": size}, self.device, "use a smaller batch_size or max_len")
        return KVCache(self.config, batch_size, max_len, self.device, self.dtype, slack)

    def record(self, *names: str) -> AbstractContextManager[ActivationCache]:
        """Record activations of each pass: `with model.record("blocks.*.attention.weights") as
        cache:`."""
        from thinker.model.inspection.activation_hooks import open_hooks

        return open_hooks(self, names, {})

    def patch(self, patches: Mapping[str, Patch]) -> AbstractContextManager[ActivationCache]:
        """Replace activations of each pass: `with model.patch({"blocks.3.attention.heads.1":
        "zero"}):`.

        A patch is "zero"; "mean" over batch and positions (for scores and weights, over the batch);
        a number or tensor, which is broadcast; or a function of the activation. Raises UserError
        for an unknown name.
        """
        from thinker.model.inspection.activation_hooks import open_hooks

        return open_hooks(self, (), patches)

    def activation_names(self) -> list[str]:
        """All names that can be recorded, in the order of the pass (see
        docs/guides/inspecting.md)."""
        from thinker.model.inspection.activation_hooks import hook_points

        return list(hook_points(self))

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor | str, tokenizer: Any = None) -> Tensor:
        """Return the attention matrices of a pass, (layers, B, H, T, T); rows are queries, missing
        heads are NaN.

        tokens: (B, T), or a text, which is encoded as a prompt and needs the `tokenizer` returned
        by load().
        """
        with self.record("blocks.*.attention.weights") as cache:
            self(tokens_to_inspect(tokens, tokenizer, self.config, self.device))
        by_head = [weights.transpose(0, 1) for weights in cache.values()]  # (H, B, T, T) each
        layers = nn.utils.rnn.pad_sequence(by_head, batch_first=True, padding_value=torch.nan)
        return layers.transpose(1, 2)


def new_lm_head(config: ThinkerConfig, transform: LogitTransform | None) -> Linear:
    """The matrix that maps (..., C) to logits (..., V)."""
    if transform is None:
        return Linear(config.d_model, config.vocab_size, config.head_bias)
    return TransformedLinear(config.d_model, config.vocab_size, config.head_bias, transform)


def _random(*shape: int) -> Tensor:
    """Normal numbers; nothing on the meta device, for which torch would spend a second importing
    its compiler."""
    tensor = torch.empty(shape)
    if not tensor.is_meta:
        tensor.normal_()
    return tensor
