"""The decoding step of a model on a CPU: a list of native operations, run by one call."""

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from thinker.generation.inference_linear import MAX_NATIVE_ROWS, QuantizedLinear
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker
from thinker.model.masks import ForwardContext
from thinker.model.patterns import CAUSAL
from thinker.model.positions import MAX_TABLE_LEN
from thinker.native import operations as native
from thinker.native.operations import Operation, Visible, Workspace, linear_operation

MAX_STEPS = 16  # tokens per row to sample at once
MAX_SECONDS = 0.03  # for them, so that text still appears token by token to a reader


class NativeThinker:
    """model(tokens, cache=cache) for a few new positions, without torch's overhead for each operation.

    Activations are in fp32. These passes run in the model instead: the first of a cache, of more than 16 rows, of
    several positions if a layer has a mask, with recorded or patched activations, and with linear or top-k attention,
    learned or sinusoidal positions, or token shift.
    """

    def __init__(self, model: Thinker) -> None:
        """`model`: from prepare_for_inference(native=True)."""
        config = model.config
        self.model = model
        by_mask = all(not (pattern.by_score or pattern.n_features) for pattern in config.patterns)
        has_native_input = config.positions in ("rope", "alibi", "none") and not config.token_shift
        self.is_supported = by_mask and has_native_input
        self.is_causal = config.positions != "alibi" and all(pattern == CAUSAL for pattern in config.patterns)
        self._hooked = [module for module in model.modules() if hasattr(module, "hooks")]
        self.seconds_per_step = math.inf  # of the newest step
        self._lock = threading.Lock()  # the buffers serve one call at a time
        self._bound_to: tuple[Callable[[], KVCache | None], int] = lambda: None, 0  # a weak reference
        self._rope: tuple[Tensor, Tensor] | None = None
        self._kept: list[Tensor] = []  # tensors whose memory the operations read
        if self.is_supported:
            self._allocate()
            operations = list(self._operations())
            self._operations = (Operation * len(operations))(*operations)

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        n_rows, T = tokens.numel(), tokens.shape[-1]
        fits = self.is_supported and type(cache) is KVCache and n_rows <= MAX_NATIVE_ROWS
        has_mask = T > 1 and not self.is_causal
        if not fits or has_mask or max(cache.lengths) == 0 or not self._are_valid(tokens, cache):
            return self.model(tokens, cache=cache)
        with self._lock:
            if self.is_causal:
                self._prepare_causal(cache, *tokens.shape)
            else:
                self._prepare_masks(self.model.make_context(tokens, tokens, None, cache), *tokens.shape)
            self._bind(cache)
            tokens, start = tokens.contiguous(), time.perf_counter()
            self._work.step.tokens = tokens.data_ptr()
            self._work.run(self._operations, n_rows, T)
            self.seconds_per_step = time.perf_counter() - start
            return self._logits[:n_rows].clone().view(*tokens.shape, -1)

    def sample(
        self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor, n_remaining: int
    ) -> list[list[SampledToken]]:
        """Sample up to `n_remaining` tokens per sequence, the first from logits (B, 1, V).

        Fast models sample several without returning to Python, for up to MAX_SECONDS. See batch_sampling.is_unfiltered
        for what `sequences` need.
        """
        B, n_ids, temperature = len(sequences), sequences[0].tokenizer.vocab_size, sequences[0].params.temperature
        can_step = self.is_supported and self.is_causal and type(cache) is KVCache and B <= MAX_NATIVE_ROWS
        can_step = can_step and not any(module.hooks for module in self._hooked)
        n_steps = max(1, min(MAX_STEPS, n_remaining, int(MAX_SECONDS / self.seconds_per_step))) if can_step else 1
        uniforms = [sequence.uniform(step) for step in range(n_steps) for sequence in sequences]
        logits = logits[:, 0].float().contiguous()  # (B, V)
        if n_steps == 1:
            tokens, logprobs = native.sample(logits, n_ids, temperature, uniforms)
        else:
            with self._lock:
                start = time.perf_counter()
                self._prepare_causal(cache, B, 1, n_steps - 1)
                self._bind(cache)
                (visible,) = self._visible.values()
                tokens, logprobs = self._work.sample_steps(
                    self._operations, visible, logits, n_ids, temperature, uniforms
                )
                self.seconds_per_step = (time.perf_counter() - start) / (n_steps - 1)
        return [[(token, logprob, {}) for token, logprob in zip(tokens[row::B], logprobs[row::B])] for row in range(B)]

    def _are_valid(self, tokens: Tensor, cache: KVCache) -> bool:
        """Whether the kernels can read these inputs, and no activation is recorded. The model reports mistakes."""
        config, ids = self.model.config, tokens.flatten().tolist()
        is_tensor = tokens.dim() == 2 and tokens.dtype == torch.int64 and 0 <= min(ids) <= max(ids) < config.vocab_size
        is_recorded = any(module.hooks for module in self._hooked)
        fits = len(cache.layers) == config.n_layers and cache.head_dim == config.head_dim
        return is_tensor and fits and cache.dtype == self.model.dtype and not is_recorded

    def _allocate(self) -> None:
        config, N = self.model.config, MAX_NATIVE_ROWS

        def buffer(width: int) -> Tensor:
            return torch.empty(N, width, dtype=torch.float32, device="cpu")

        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        D, H, K = config.head_dim, max(H for H, _ in heads), max(K for _, K in heads)
        self._x, self._qkv, self._y = buffer(config.d_model), buffer((H + 2 * K) * D), buffer(H * D)
        self._gate_up, self._logits = buffer(2 * config.d_ff), buffer(config.vocab_size)
        self._work = Workspace(N, max(config.d_model, H * D, config.d_ff))
        self._positions = (ctypes.c_int64 * N)()
        self._work.step.positions = self._positions
        patterns = dict.fromkeys(config.patterns)
        self._visible = {pattern: Visible() for pattern in patterns}
        self._slots = {pattern: ((ctypes.c_int64 * N)(), (ctypes.c_int64 * N)()) for pattern in patterns}
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
            shared = {"H": H, "K": K, "D": D, "visible": ctypes.pointer(self._visible[pattern]), "x": qkv.data_ptr()}
            norm = attention.qk_norm
            has_norm = not isinstance(norm, nn.Identity)
            yield Operation(kind=native.ROTATE, **shared, norm=self._vector(norm.weight) if has_norm else None,
                            eps=norm.eps if has_norm else 0,
                            rotates=model.rope is not None and attention.use_rope)  # fmt: skip
            yield Operation(kind=native.ATTEND, **shared, out=y.data_ptr(), attention_scale=D**-0.5,
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
        operation.transform, operation.adds, operation.x, operation.out = transform, adds, x.data_ptr(), out.data_ptr()
        if norm is not None:
            operation.transform, operation.norm, operation.eps = native.RMS_NORM, self._vector(norm.weight), norm.eps
        return operation

    def _vector(self, tensor: Tensor) -> int:
        """The address of a vector in fp32."""
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _prepare_causal(self, cache: KVCache, B: int, T: int, n_steps: int = 1) -> None:
        """Add T positions per step to a cache of full attention: each attends to all slots up to its own."""
        starts = cache.reserve(B, T * n_steps)
        positions = [start + t for start in starts for t in range(T)]
        if self.model.rope is not None:
            self.model.rope.check_growth(max(cache.lengths))
        for slots, lengths in self._slots.values():
            slots[: B * T] = positions
            lengths[: B * T] = [position + 1 for position in positions]
        self._set_rope(positions, max(cache.lengths))

    def _prepare_masks(self, context: ForwardContext, B: int, T: int) -> None:
        """Refer to the masks that torch built for each pattern."""
        by_pattern = dict(zip(self.model.config.patterns, zip(context.masks, context.slots)))
        self._masks = []
        for pattern, (mask, cache_slots) in by_pattern.items():
            slots, lengths = self._slots[pattern]
            slots[: B * T] = cache_slots.slot_mapping.expand(B, T).flatten().tolist()
            lengths[: B * T] = [cache_slots.kv_len] * (B * T)
            visible, allowed = self._visible[pattern], mask.allowed
            visible.mask = None
            if allowed is not None:
                allowed = allowed if allowed.dtype == torch.bool else allowed.float()
                allowed = allowed.expand(B, self.model.config.n_heads, T, -1)
                self._masks.append(allowed)
                visible.mask, visible.is_bool = allowed.data_ptr(), allowed.dtype == torch.bool
                visible.row, visible.head, visible.query, visible.slot = allowed.stride()
        self._set_rope(context.positions.expand(B, T).flatten().tolist(), context.end)

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
        by_layer = [operation for operation in self._operations if operation.kind in (native.ROTATE, native.ATTEND)]
        for index, layer in enumerate(cache.layers):
            for operation in by_layer[2 * index : 2 * index + 2]:
                operation.keys.bind(layer.keys)
                operation.values.bind(layer.values)
        self._work.set_scores(max(layer.keys.shape[2] for layer in cache.layers))
        self._bound_to = weakref.ref(cache), cache.n_moves
