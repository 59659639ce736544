"""The forward pass of a model on a CPU as a list of native operations, run by one call."""

import ctypes
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from thinker.model import KVCache, Thinker
from thinker.model.attention import Attention
from thinker.model.masks import ForwardContext
from thinker.model.patterns.pattern import Pattern
from thinker.model.positions import MAX_TABLE_LEN
from thinker.native import operations as native
from thinker.native.operations import Operation, Visible, Workspace, linear_operation


class NativeForward:
    """The operations of a model, and the memory that they read and write.

    It serves one pass at a time: prepare_causal() or prepare_masks() sets the positions, then run()
    or sample_steps() reads tokens at them.
    """

    def __init__(self, model: Thinker) -> None:
        """`model`: from fuse_for_inference(native=True); unknown_parts() yields nothing."""
        self.model = model
        self._bound_to: Callable[[], KVCache | None] = lambda: None  # a weak reference
        self._bound_moves = 0  # n_moves of that cache when it was bound
        self._rope: tuple[Tensor, Tensor] | None = None
        self._kept: list[Tensor] = []  # tensors whose memory the operations read
        self._allocate()
        operations = list(self._list_operations())
        self._operations = (Operation * len(operations))(*operations)
        self._lm_head = (Operation * 1)(operations[-1])

    def run(self, cache: KVCache, tokens: list[int], rows: list[int], wanted: list[int]) -> Tensor:
        """Read each token into its row of a cache, at the prepared positions.

        Returns the logits after the tokens with the indices `wanted`, (len(wanted), V).
        """
        n = len(tokens)
        self._bind(cache)
        self._tokens[:n] = tokens
        self._cache_rows[:n] = rows
        if len(wanted) == n:
            self._work.run(self._operations, n)
        else:  # few need the LM head
            self._work.run(self._operations, n, len(self._operations) - 1)
            self._x[: len(wanted)] = self._x[wanted]
            self._work.run(self._lm_head, len(wanted))
        return self._logits[: len(wanted)].clone()

    def sample_steps(
        self,
        cache: KVCache,
        rows: list[int],
        logits: Tensor,
        n_ids: int,
        temperatures: list[float],
        uniforms: list[float],
    ) -> tuple[list[int], list[float]]:
        """Sample tokens for rows of a cache of full attention, from prepared positions on.

        The other arguments and what it returns are as in Workspace.sample_steps().
        """
        self._bind(cache)
        self._cache_rows[: len(rows)] = rows
        (visible,) = self._visible.values()
        return self._work.sample_steps(
            self._operations, visible, logits, n_ids, temperatures, uniforms
        )

    def prepare_causal(self, positions: list[int], end: int) -> None:
        """Set positions below `end`, each of which attends to all slots up to its own."""
        for slots, lengths in self._slots.values():
            slots[: len(positions)] = positions
            lengths[: len(positions)] = [position + 1 for position in positions]
        self._set_rope(positions, end)

    def prepare_masks(self, context: ForwardContext, B: int) -> None:
        """Refer to the masks that torch built for each pattern, for one new position per row."""
        n_heads = self.model.config.n_heads
        by_pattern = dict(zip(self.model.config.patterns, zip(context.masks, context.slots)))
        self._masks = []
        for pattern, (mask, cache_slots) in by_pattern.items():
            slots, lengths = self._slots[pattern]
            slots[:B] = cache_slots.slot_mapping.expand(B, 1).flatten().tolist()
            lengths[:B] = [cache_slots.kv_len] * B
            visible = self._visible[pattern]
            visible.mask = None
            if mask.allowed is not None:
                is_bool = mask.allowed.dtype == torch.bool
                allowed = mask.allowed if is_bool else mask.allowed.float()
                allowed = allowed.expand(B, n_heads, 1, -1)[:, :, 0]  # (B, H, S)
                self._masks.append(allowed)
                visible.mask = allowed.data_ptr()
                visible.is_bool = is_bool
                visible.row, visible.head, visible.slot = allowed.stride()
        self._set_rope(context.positions.expand(B, 1).flatten().tolist(), context.end)

    def _set_rope(self, positions: list[int], end: int) -> None:
        """Point to tables of cos and sin that have a row for each position, and up to `end`."""
        rope = self.model.rope
        if rope is None:
            return
        if end > MAX_TABLE_LEN:  # a table with one row per position of this pass
            tables = rope(torch.tensor(positions, device="cpu"), end, torch.float32)
            self._far = tables
            positions = range(len(positions))
        else:
            if self._rope is None or len(self._rope[0]) < end:
                length = int(min(max(2 * end, 256), MAX_TABLE_LEN, rope.max_static_len))
                self._rope = rope(torch.arange(length, device="cpu"), length, torch.float32)
            tables = self._rope
        step = self._work.step
        step.cosines, step.sines = (table.data_ptr() for table in tables)
        self._positions[: len(positions)] = positions

    def _bind(self, cache: KVCache) -> None:
        """Point to the tensors of a cache, unless they are those of the last step."""
        if self._bound_to() is cache and self._bound_moves == cache.n_moves:
            return
        reads_cache = (native.ROTATE, native.ATTEND)
        of_layers = [one for one in self._operations if one.kind in reads_cache]
        for index, layer in enumerate(cache.layers):
            for operation in of_layers[2 * index : 2 * index + 2]:
                if "key_scale" in layer.tensors:  # codes, with a scale per vector
                    bits = layer.bits
                    operation.keys.bind_quantized(
                        layer.keys, layer.key_scale, layer.newest_keys, bits
                    )
                    operation.values.bind_quantized(
                        layer.values, layer.value_scale, layer.newest_values, bits
                    )
                else:
                    operation.keys.bind(layer.keys)
                    operation.values.bind(layer.values)
        self._work.set_scores(max(layer.keys.shape[2] for layer in cache.layers))
        self._bound_to = weakref.ref(cache)
        self._bound_moves = cache.n_moves

    def _allocate(self) -> None:
        """Allocate what the operations read and write, for up to max_rows() positions."""
        config = self.model.config
        N = native.max_rows()
        D = config.head_dim
        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        H = max(n_heads for n_heads, _ in heads)
        K = max(n_kv_heads for _, n_kv_heads in heads)

        def buffer(width: int) -> Tensor:
            return torch.empty(N, width, dtype=torch.float32, device="cpu")

        def integers() -> ctypes.Array:
            return (ctypes.c_int64 * N)()

        self._x = buffer(config.d_model)
        self._qkv = buffer((H + 2 * K) * D)
        self._y = buffer(H * D)
        self._gate_up = buffer(2 * config.d_ff)
        self._logits = buffer(config.vocab_size)
        self._work = Workspace(N, max(config.d_model, H * D, config.d_ff))
        self._tokens = self._work.step.tokens = integers()
        self._positions = self._work.step.positions = integers()
        self._cache_rows = self._work.step.cache_rows = integers()
        # By pattern: what each position attends to, of which the first two arrays are part.
        self._visible: dict[Pattern, Visible] = {}
        self._slots: dict[Pattern, tuple[ctypes.Array, ctypes.Array]] = {}
        for pattern in dict.fromkeys(config.patterns):
            slots, lengths = integers(), integers()
            self._slots[pattern] = slots, lengths
            self._visible[pattern] = Visible()
            self._visible[pattern].slots = slots
            self._visible[pattern].length = lengths

    def _list_operations(self) -> Iterator[Operation]:
        """The forward pass of Thinker, in order."""
        model = self.model
        weight = model.embedding.weight
        yield Operation(
            kind=native.EMBED,
            format=native.FORMATS[weight.dtype],
            n_out=model.config.d_model,
            weight=weight.data_ptr(),
            out=self._x.data_ptr(),
        )
        for layer, pattern in enumerate(model.config.patterns):
            block = model.blocks[layer]
            attention, mlp = block.attention, block.mlp
            yield self._linear(attention.qkv_proj, self._x, self._qkv, block.attention_norm)
            rotates = model.config.rope_of_layer(layer) != "none"
            yield from self._attention(attention, pattern, rotates)
            yield self._linear(attention.o_proj, self._y, self._x, adds=True)
            yield self._linear(mlp.gate_up_proj, self._x, self._gate_up, block.mlp_norm)
            yield self._linear(
                mlp.down_proj, self._gate_up, self._x, transform=native.SWIGLU, adds=True
            )
        yield self._linear(model.lm_head, self._x, self._logits, model.norm)

    def _attention(
        self, attention: Attention, pattern: Pattern, rotates: bool
    ) -> Iterator[Operation]:
        """From q, k and v of all heads to what the heads read."""
        shared = {
            "H": attention.n_heads,
            "K": attention.n_kv_heads,
            "D": attention.head_dim,
            "visible": ctypes.pointer(self._visible[pattern]),
            "x": self._qkv.data_ptr(),
        }
        rotate = Operation(kind=native.ROTATE, **shared)
        rotate.rotates = rotates
        norm = attention.qk_norm
        if not isinstance(norm, nn.Identity):
            rotate.norm = self._vector(norm.weight)
            rotate.eps = norm.eps
        yield rotate
        attend = Operation(kind=native.ATTEND, **shared, out=self._y.data_ptr())
        attend.attention_scale = attention.scale
        attend.softcap = attention.attn_logit_softcap or 0
        if attention.sinks is not None:
            attend.sinks = self._vector(attention.sinks)
        yield attend

    def _linear(
        self,
        module: nn.Module,
        x: Tensor,
        out: Tensor,
        norm: nn.Module | None = None,
        transform: int = native.NO_TRANSFORM,
        adds: bool = False,
    ) -> Operation:
        """out = [out +] module(transform(x)). `norm`: the transform is RMSNorm."""
        operation = linear_operation(module.kernel_weight)
        operation.x = x.data_ptr()
        operation.out = out.data_ptr()
        operation.adds = adds
        operation.transform = transform
        if module.bias is not None:
            operation.bias = self._vector(module.bias)
        if norm is not None:
            operation.transform = native.RMS_NORM
            operation.norm = self._vector(norm.weight)
            operation.eps = norm.eps
        return operation

    def _vector(self, tensor: Tensor) -> int:
        """The address of a vector in fp32."""
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()
