"""The forward pass of a model on a CPU with a cache: a list of native operations, run by one call."""

import ctypes
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor, nn

from thinker.features.structured_output.constraints import allowed_tokens
from thinker.generation.caches.quantized_cache import MAX_PER_PASS, QuantizedCache, QuantizedLayer
from thinker.generation.decoders.inference_linear import QuantizedLinear
from thinker.generation.decoders.inference_model import known_modules
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker
from thinker.model.inspection.activation_hooks import has_open_hooks
from thinker.model.masks import ForwardContext
from thinker.model.patterns.patterns import CAUSAL
from thinker.model.positions import MAX_TABLE_LEN
from thinker.native import operations as native
from thinker.native.operations import Operation, Visible, Workspace, linear_operation

MIN_ROWS_TO_PREFILL = 64  # below, torch reads prompts faster
MAX_STEPS = 16  # tokens per row to sample at once
CACHES = (KVCache, QuantizedCache)  # that the kernels read
MAX_SECONDS = 0.03  # for them, so that text still appears token by token to a reader


class NativeThinker:
    """model(tokens, cache=cache) without torch's overhead for each operation.

    Activations are in fp32. If `is_batch_invariant`, which needs full attention and a processor with AVX-512, all
    passes are native, and a position is computed alike in each: its logits, keys and values have the same bits whatever
    the batch, and however the text is split into passes. Otherwise the model runs the first pass of a cache, those of
    many rows, and those of several positions if a layer has a mask. It also runs all passes with recorded or patched
    activations, linear attention or choice by content, learned or sinusoidal positions, or token shift.
    """

    def __init__(self, model: Thinker) -> None:
        """`model`: from fuse_for_inference(native=True)."""
        config = model.config
        self.model = model
        by_mask = all(not (pattern.by_content or pattern.n_features) for pattern in config.patterns)
        has_native_input = config.positions in ("rope", "alibi", "none") and not config.token_shift
        is_known = all(known_modules(model))
        self.is_supported = by_mask and has_native_input and is_known
        self.is_causal = config.positions != "alibi" and all(
            pattern == CAUSAL for pattern in config.patterns
        )
        self.max_rows = native.max_rows()
        self.is_batch_invariant = (
            self.is_supported and self.is_causal and self.max_rows >= MIN_ROWS_TO_PREFILL
        )
        # Hooks of torch, which a user or an open record() has registered.
        self._hooks: list[dict] = []
        for module in model.modules():
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.seconds_per_step = math.inf  # of the newest step
        self._lock = threading.Lock()  # the buffers serve one call at a time
        self._bound_to: tuple[Callable[[], KVCache | None], int] = (
            lambda: None,
            0,
        )  # a weak reference
        self._rope: tuple[Tensor, Tensor] | None = None
        self._kept: list[Tensor] = []  # tensors whose memory the operations read
        if self.is_supported:
            self._allocate()
            operations = list(self._operations())
            self._operations = (Operation * len(operations))(*operations)
            self._lm_head = (Operation * 1)(operations[-1])

    def __call__(self, tokens: Tensor, cache: KVCache, last_logits_only: bool = False) -> Tensor:
        """tokens (B, T) -> logits (B, T or 1, V)."""
        if not (self.is_supported and type(cache) in CACHES and self._are_valid(tokens, cache)):
            return self.model(tokens, cache=cache, last_logits_only=last_logits_only)
        B, T = tokens.shape
        is_early_or_large = max(cache.lengths) == 0 or tokens.numel() > self.max_rows
        has_mask = T > 1 and not self.is_causal
        if not self.is_batch_invariant and (is_early_or_large or has_mask):
            return self.model(tokens, cache=cache, last_logits_only=last_logits_only)
        if self.is_causal:
            starts = cache.reserve(B, T)
            rows = [row for row in range(B) for _ in range(T)]
            positions = [start + t for start in starts for t in range(T)]
            wanted = range(T - 1, B * T, T) if last_logits_only else range(B * T)
            logits = self._read(cache, rows, positions, tokens.flatten().tolist(), wanted)
            return logits.view(B, -1, logits.shape[1])
        with self._lock:
            self._prepare_masks(self.model.make_context(tokens, tokens, None, cache), B)
            return self._run(cache, tokens.flatten().tolist(), list(range(B)), list(range(B))).view(
                B, 1, -1
            )

    def read(
        self, cache: KVCache, rows: list[int], tokens: list[int], wanted: AbstractSequence[int]
    ) -> Tensor:
        """Append each token to its row of a cache of full attention, in any order of rows.

        Returns the logits after the tokens with the indices `wanted`, (len(wanted), V).
        """
        positions, lengths = [], list(cache.lengths)
        for row in rows:
            positions.append(lengths[row])
            lengths[row] += 1
        assert max(lengths) <= cache.max_len
        cache.lengths = lengths
        return self._read(cache, rows, positions, tokens, wanted)

    def sample(
        self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor, n_remaining: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:  # fmt: skip
        """Sample up to `n_remaining` tokens per sequence, the first from logits (B, 1, V).

        Fast models sample several without returning to Python, for up to MAX_SECONDS. All `sequences` are
        unfiltered. `rows`: their rows in the cache (default: all rows, in order).
        """
        B, n_ids = len(sequences), sequences[0].tokenizer.vocab_size
        temperatures = [sequence.params.temperature for sequence in sequences]
        can_step = (
            self.is_supported
            and self.is_causal
            and type(cache) in CACHES
            and len(sequences) <= self.max_rows
        )
        can_step = can_step and not self._has_hooks()
        allowed = allowed_tokens([sequence.constraint for sequence in sequences])
        can_step = can_step and allowed is None
        n_steps = (
            max(1, min(MAX_STEPS, n_remaining, int(MAX_SECONDS / self.seconds_per_step)))
            if can_step
            else 1
        )
        uniforms = [sequence.uniform(step) for step in range(n_steps) for sequence in sequences]
        logits = logits[:, 0].float().contiguous()  # (B, V)
        if n_steps == 1:
            tokens, logprobs = native.sample(logits, n_ids, temperatures, uniforms, allowed)
        else:
            rows = list(range(B)) if rows is None else rows
            with self._lock:
                start = time.perf_counter()
                positions, lengths = [cache.lengths[row] for row in rows], list(cache.lengths)
                for row in rows:
                    lengths[row] += n_steps - 1
                cache.lengths, cache.high_water = lengths, list(map(max, cache.high_water, lengths))
                self._prepare_causal(positions, max(lengths))
                self._bind(cache)
                self._cache_rows[:B] = rows
                (visible,) = self._visible.values()
                tokens, logprobs = self._work.sample_steps(
                    self._operations, visible, logits, n_ids, temperatures, uniforms
                )
                self.seconds_per_step = (time.perf_counter() - start) / (n_steps - 1)
        return [
            [(token, logprob, {}) for token, logprob in zip(tokens[row::B], logprobs[row::B])]
            for row in range(B)
        ]

    def _read(
        self,
        cache: KVCache,
        rows: list[int],
        positions: list[int],
        tokens: list[int],
        wanted: AbstractSequence[int],
    ) -> Tensor:
        """As read(), for positions that the cache already counts."""
        if self.model.rope is not None:
            self.model.rope.check_growth(max(positions) + 1)
        logits = []
        with self._lock:
            for start, end in self._parts(cache, rows):
                part = slice(start, end)
                self._prepare_causal(positions[part], max(positions[part]) + 1)
                indices = [index - start for index in wanted if start <= index < end]
                logits.append(self._run(cache, tokens[part], rows[part], indices))
        return torch.cat(logits)

    def _parts(self, cache: KVCache, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Begin and end of parts of `rows` that one pass can read."""
        has_rings = any(
            isinstance(layer, QuantizedLayer) and layer.n_newest for layer in cache.layers
        )
        max_per_row = MAX_PER_PASS if has_rings else self.max_rows
        start, counts = 0, Counter()
        for index, row in enumerate(rows):
            if index - start == self.max_rows or counts[row] == max_per_row:
                yield start, index
                start, counts = index, Counter()
            counts[row] += 1
        yield start, len(rows)

    def _run(self, cache: KVCache, tokens: list[int], rows: list[int], wanted: list[int]) -> Tensor:
        """Run all operations on prepared positions. Returns the logits of the wanted rows, (len(wanted), V)."""
        n, start = len(tokens), time.perf_counter()
        self._bind(cache)
        self._tokens[:n], self._cache_rows[:n] = tokens, rows
        if len(wanted) == n:
            self._work.run(self._operations, n)
        else:  # few need the LM head
            self._work.run(self._operations, n, len(self._operations) - 1)
            self._x[: len(wanted)] = self._x[wanted]
            self._work.run(self._lm_head, len(wanted))
        self.seconds_per_step = time.perf_counter() - start
        return self._logits[: len(wanted)].clone()

    def _are_valid(self, tokens: Tensor, cache: KVCache) -> bool:
        """Whether the kernels can read these inputs, and no activation is recorded. The model reports mistakes."""
        config, ids = self.model.config, tokens.flatten().tolist()
        is_tensor = (
            tokens.dim() == 2
            and tokens.dtype == torch.int64
            and 0 <= min(ids) <= max(ids) < config.vocab_size
        )
        fits = len(cache.layers) == config.n_layers and cache.head_dim == config.head_dim
        return is_tensor and fits and cache.dtype == self.model.dtype and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Whether any activation is recorded, patched, or seen by a hook of the user."""
        return any(self._hooks) or has_open_hooks(self.model)

    def _allocate(self) -> None:
        config, N = self.model.config, self.max_rows

        def buffer(width: int) -> Tensor:
            return torch.empty(N, width, dtype=torch.float32, device="cpu")

        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        D, H, K = config.head_dim, max(H for H, _ in heads), max(K for _, K in heads)
        self._x, self._qkv, self._y = buffer(config.d_model), buffer((H + 2 * K) * D), buffer(H * D)
        self._gate_up, self._logits = buffer(2 * config.d_ff), buffer(config.vocab_size)
        self._work = Workspace(N, max(config.d_model, H * D, config.d_ff))
        self._tokens, self._positions, self._cache_rows = ((ctypes.c_int64 * N)() for _ in range(3))
        step = self._work.step
        step.tokens, step.positions, step.cache_rows = (
            self._tokens,
            self._positions,
            self._cache_rows,
        )
        patterns = dict.fromkeys(config.patterns)
        self._visible = {pattern: Visible() for pattern in patterns}
        self._slots = {
            pattern: ((ctypes.c_int64 * N)(), (ctypes.c_int64 * N)()) for pattern in patterns
        }
        for pattern, (slots, lengths) in self._slots.items():
            self._visible[pattern].slots, self._visible[pattern].length = slots, lengths

    def _operations(self) -> Iterator[Operation]:
        """The forward pass of Thinker, in order."""
        model, config = self.model, self.model.config
        x, qkv, y, gate_up = self._x, self._qkv, self._y, self._gate_up
        weight = model.embedding.weight
        yield Operation(kind=native.EMBED, format=native.FORMATS[weight.dtype], n_out=config.d_model,
                        weight=weight.data_ptr(), out=x.data_ptr())  # fmt: skip
        for block, pattern in zip(model.blocks, config.patterns):
            attention, mlp = block.attention, block.mlp
            H, K, D = attention.n_heads, attention.n_kv_heads, attention.head_dim
            yield self._linear(attention.qkv_proj, x, qkv, block.attention_norm)
            shared = {
                "H": H,
                "K": K,
                "D": D,
                "visible": ctypes.pointer(self._visible[pattern]),
                "x": qkv.data_ptr(),
            }
            norm = attention.qk_norm
            has_norm = not isinstance(norm, nn.Identity)
            yield Operation(kind=native.ROTATE, **shared, norm=self._vector(norm.weight) if has_norm else None,
                            eps=norm.eps if has_norm else 0,
                            rotates=model.rope is not None and attention.use_rope)  # fmt: skip
            yield Operation(kind=native.ATTEND, **shared, out=y.data_ptr(), attention_scale=attention.scale,
                            softcap=attention.attn_logit_softcap or 0,
                            sinks=None if attention.sinks is None else self._vector(attention.sinks))  # fmt: skip
            yield self._linear(attention.o_proj, y, x, adds=True)
            yield self._linear(mlp.gate_up_proj, x, gate_up, block.mlp_norm)
            yield self._linear(mlp.down_proj, gate_up, x, transform=native.SWIGLU, adds=True)
        yield self._linear(model.lm_head, x, self._logits, model.norm)

    def _linear(
        self, module: nn.Module, x: Tensor, out: Tensor, norm: nn.Module | None = None,
        transform: int = native.NO_TRANSFORM, adds: bool = False,
    ) -> Operation:  # fmt: skip
        """out = [out +] module(transform(x))."""
        weight = module.packed if isinstance(module, QuantizedLinear) else module.weight
        operation = linear_operation(weight, None)
        operation.bias = None if module.bias is None else self._vector(module.bias)
        operation.transform, operation.adds, operation.x, operation.out = (
            transform,
            adds,
            x.data_ptr(),
            out.data_ptr(),
        )
        if norm is not None:
            operation.transform, operation.norm, operation.eps = (
                native.RMS_NORM,
                self._vector(norm.weight),
                norm.eps,
            )
        return operation

    def _vector(self, tensor: Tensor) -> int:
        """The address of a vector in fp32."""
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _prepare_causal(self, positions: list[int], end: int) -> None:
        """Set positions below `end` in a cache of full attention: each attends to all slots up to its own."""
        for slots, lengths in self._slots.values():
            slots[: len(positions)] = positions
            lengths[: len(positions)] = [position + 1 for position in positions]
        self._set_rope(positions, end)

    def _prepare_masks(self, context: ForwardContext, B: int) -> None:
        """Refer to the masks that torch built for each pattern, for one new position per row."""
        by_pattern = dict(zip(self.model.config.patterns, zip(context.masks, context.slots)))
        self._masks = []
        for pattern, (mask, cache_slots) in by_pattern.items():
            slots, lengths = self._slots[pattern]
            slots[:B] = cache_slots.slot_mapping.expand(B, 1).flatten().tolist()
            lengths[:B] = [cache_slots.kv_len] * B
            visible, allowed = self._visible[pattern], mask.allowed
            visible.mask = None
            if allowed is not None:
                allowed = allowed if allowed.dtype == torch.bool else allowed.float()
                allowed = allowed.expand(B, self.model.config.n_heads, 1, -1)[:, :, 0]
                self._masks.append(allowed)
                visible.mask, visible.is_bool = allowed.data_ptr(), allowed.dtype == torch.bool
                visible.row, visible.head, visible.slot = allowed.stride()
        self._set_rope(context.positions.expand(B, 1).flatten().tolist(), context.end)

    def _set_rope(self, positions: list[int], end: int) -> None:
        """Point to tables of cos and sin that have a row for each position, and for those up to `end`."""
        step, n, rope = self._work.step, len(positions), self.model.rope
        if rope is None:
            return
        if end > MAX_TABLE_LEN:  # a table of one row per position
            rows, positions = torch.tensor(positions, device="cpu"), range(n)
            self._far = tables = rope(rows, end, torch.float32)
        else:
            if self._rope is None or len(self._rope[0]) < end:
                length = int(min(max(2 * end, 256), MAX_TABLE_LEN, rope.max_static_len))
                self._rope = rope(torch.arange(length, device="cpu"), length, torch.float32)
            tables = self._rope
        step.cosines, step.sines = (table.data_ptr() for table in tables)
        self._positions[:n] = positions

    def _bind(self, cache: KVCache) -> None:
        """Point to the tensors of a cache, unless they are those of the last step."""
        if self._bound_to[0]() is cache and self._bound_to[1] == cache.n_moves:
            return
        by_layer = [
            operation
            for operation in self._operations
            if operation.kind in (native.ROTATE, native.ATTEND)
        ]
        for index, layer in enumerate(cache.layers):
            for operation in by_layer[2 * index : 2 * index + 2]:
                if isinstance(layer, QuantizedLayer):
                    operation.keys.bind_quantized(
                        layer.keys, layer.key_scale, layer.newest_keys, layer.bits
                    )
                    operation.values.bind_quantized(
                        layer.values, layer.value_scale, layer.newest_values, layer.bits
                    )
                else:
                    operation.keys.bind(layer.keys)
                    operation.values.bind(layer.values)
        self._work.set_scores(max(layer.keys.shape[2] for layer in cache.layers))
        self._bound_to = weakref.ref(cache), cache.n_moves
