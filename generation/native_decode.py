"""The decoding step of a model on a CPU: a list of native operations, run by one call."""

import ctypes
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from thinker.generation.inference_linear import MAX_NATIVE_ROWS, QuantizedLinear
from thinker.model import KVCache, Thinker
from thinker.model.input_checks import check_inputs
from thinker.model.masks import ForwardContext
from thinker.model.patterns import CAUSAL
from thinker.model.positions import MAX_TABLE_LEN
from thinker.native import operations as native
from thinker.native.operations import Operation, Visible, Workspace, linear_operation


class NativeThinker:
    """model(tokens, cache=cache) for a few new positions, without torch's overhead for each operation.

    Activations are in fp32. These passes run in the model instead: the first of a cache, of more than 16 rows, of
    several positions if a layer has a mask, with recorded or patched activations, and with linear or top-k attention,
    learned or sinusoidal positions.
    """

    def __init__(self, model: Thinker) -> None:
        """`model`: from prepare_for_inference(native=True)."""
        config = model.config
        self.model = model
        by_mask = all(not (pattern.by_score or pattern.n_features) for pattern in config.patterns)
        self.is_supported = by_mask and config.positions in ("rope", "alibi", "none")
        self.is_causal = config.positions != "alibi" and all(pattern == CAUSAL for pattern in config.patterns)
        self._hooked = [module for module in model.modules() if hasattr(module, "hooks")]
        self._lock = threading.Lock()  # the buffers serve one call at a time
        self._bound_to: tuple = ()
        self._rope: tuple[Tensor, Tensor] | None = None
        self._kept: list[Tensor] = []  # tensors whose memory the operations read
        if self.is_supported:
            self._allocate()
            operations = list(self._operations())
            self._operations = (Operation * len(operations))(*operations)

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        n_rows, T = tokens.numel(), tokens.shape[1]
        is_first = max(cache.lengths) == 0
        fits = self.is_supported and type(cache) is KVCache and n_rows <= MAX_NATIVE_ROWS
        if not fits or is_first or (T > 1 and not self.is_causal) or any(module.hooks for module in self._hooked):
            return self.model(tokens, cache=cache)
        with self._lock:
            check_inputs(self.model.config, self.model.device, self.model.dtype, tokens, None, None, None, cache)
            if self.is_causal:
                self._prepare_causal(cache, *tokens.shape)
            else:
                self._prepare_masks(self.model.make_context(tokens, tokens, None, cache), *tokens.shape)
            self._bind(cache)
            tokens = tokens.long().contiguous()
            self._work.step.tokens = tokens.data_ptr()
            self._work.run(self._operations, n_rows, T)
            return self._logits[:n_rows].clone().view(*tokens.shape, -1)

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

    def _prepare_causal(self, cache: KVCache, B: int, T: int) -> None:
        """Add T positions to a cache of full attention: each attends to all slots up to its own."""
        starts = cache.reserve(B, T)
        positions = [start + t for start in starts for t in range(T)]
        if self.model.rope is not None:
            self.model.rope.check_growth(max(cache.lengths))
        for slots, lengths in self._slots.values():
            slots[: B * T] = positions
            lengths[: B * T] = [position + 1 for position in positions]
        self._set_rope(positions)

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
        self._set_rope(context.positions.expand(B, T).flatten().tolist())

    def _set_rope(self, positions: list[int]) -> None:
        """Point to tables of cos and sin that have a row for each position."""
        step, n, rope = self._work.step, len(positions), self.model.rope
        if rope is None:
            return
        end = max(positions) + 1
        if end > MAX_TABLE_LEN:  # a table of one row per position
            rows, positions = torch.tensor(positions), range(n)
            self._far = tables = rope(rows, end, torch.float32)
        else:
            if self._rope is None or len(self._rope[0]) < end:
                length = int(min(max(2 * end, 256), MAX_TABLE_LEN, rope.max_static_len))
                self._rope = rope(torch.arange(length), length, torch.float32)
            tables = self._rope
        step.cosines, step.sines = (table.data_ptr() for table in tables)
        self._positions[:n] = positions

    def _bind(self, cache: KVCache) -> None:
        """Point to the tensors of a cache, unless they are those of the last step."""
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        addresses = cache.max_len, cache.slack, len(cache.lengths), *(tensor.data_ptr() for tensor in tensors)
        if addresses == self._bound_to:  # equal sizes, so equal strides, too
            return
        by_layer = [operation for operation in self._operations if operation.kind in (native.ROTATE, native.ATTEND)]
        for index, layer in enumerate(cache.layers):
            for operation in by_layer[2 * index : 2 * index + 2]:
                operation.keys.bind(layer.keys)
                operation.values.bind(layer.values)
        self._work.set_scores(max(layer.keys.shape[2] for layer in cache.layers))
        self._bound_to = addresses
