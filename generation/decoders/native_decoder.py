"""A model on a CPU with a cache: its forward pass as a list of native operations, run by one
call."""

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

from thinker.generation.decoders.decoder import pass_lengths
from thinker.generation.decoders.inference_model import known_modules
from thinker.generation.sequence import SampledToken, Sequence, allowed_tokens
from thinker.model import KVCache, Thinker
from thinker.model.attention import Attention
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.model.masks import ForwardContext
from thinker.model.patterns.pattern import CAUSAL, Pattern
from thinker.model.positions import MAX_TABLE_LEN
from thinker.native import operations as native
from thinker.native.compiler import load_library
from thinker.native.operations import Operation, Visible, Workspace, linear_operation
from thinker.runtime.errors import UserError

MIN_ROWS_TO_PREFILL = 64  # below, torch reads prompts faster
MAX_BLOCKS_PER_PASS = 2  # of a row, in a cache that keeps its newest positions unrounded
MAX_STEPS = 16  # tokens per row to sample at once
MAX_SECONDS = 0.03  # for them, so that text still appears token by token to a reader


def kernel_problem(dtype: torch.dtype) -> str:
    """Why this machine has no kernels for a dtype; "" if it has."""
    if dtype not in native.FORMATS:
        return f"kernels in C support fp32 and bf16, not {dtype}".replace("torch.", "")
    try:
        load_library()
    except UserError as error:
        return str(error)
    return ""


class NativeDecoder:
    """Runs a model on a CPU without torch's overhead for each operation (see Decoder).

    Activations are in fp32. If `is_batch_invariant`, which needs full attention and a processor
    with AVX-512, all passes are native, and a position is computed alike in each: its logits, keys
    and values have the same bits whatever the batch, and however the text is split into passes.
    Otherwise the model runs the first pass of a cache, those of many rows, and those of several
    positions if a layer has a mask. It also runs all passes with recorded or patched activations,
    linear attention or choice by content, learned or sinusoidal positions, or token shift.
    """

    option = "compile"
    is_exact = True
    has_kernels = True
    kernel_problem = ""
    steps_per_read = 1
    compile_seconds = 0.0

    def __init__(self, model: Thinker) -> None:
        """`model`: from fuse_for_inference(native=True)."""
        self.model = model
        config = model.config
        by_mask = all(not (pattern.by_content or pattern.n_features) for pattern in config.patterns)
        has_native_input = config.positions in ("rope", "alibi", "none") and not config.token_shift
        is_known = all(known_modules(model))
        self.is_supported = by_mask and has_native_input and is_known
        has_causal_masks = all(pattern == CAUSAL for pattern in config.patterns)
        self.is_causal = has_causal_masks and config.positions != "alibi"
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
        self._bound_to: Callable[[], KVCache | None] = lambda: None  # a weak reference
        self._bound_moves = 0  # n_moves of that cache when it was bound
        self._rope: tuple[Tensor, Tensor] | None = None
        self._kept: list[Tensor] = []  # tensors whose memory the operations read
        if self.is_supported:
            self._allocate()
            operations = list(self._list_operations())
            self._operations = (Operation * len(operations))(*operations)
            self._lm_head = (Operation * 1)(operations[-1])

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """As Decoder.supports()."""
        return True

    def report(self) -> str:
        """As Decoder.report()."""
        return ""

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.prefill()."""
        # Where all passes are native, a query reads the same keys wherever a pass ends.
        block = None if self.is_batch_invariant else cache.pass_block
        for chunk in tokens.split(list(pass_lengths(cache, tokens.shape[1], block)), dim=1):
            logits = self._pass(chunk, cache, last_logits_only=True)
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step()."""
        return self._pass(tokens, cache, last_logits_only=False)

    def _pass(self, tokens: Tensor, cache: KVCache, last_logits_only: bool) -> Tensor:
        """tokens (B, T) -> logits (B, T or 1, V), natively or through the model."""
        B, T = tokens.shape
        if not self._is_native(tokens, cache):
            return self.model(tokens, cache=cache, last_logits_only=last_logits_only)
        if self.is_causal:
            starts = cache.reserve(B, T)
            rows: list[int] = []
            positions: list[int] = []
            for row, start in enumerate(starts):
                rows += [row] * T
                positions += range(start, start + T)
            wanted = range(B * T)
            if last_logits_only:
                wanted = wanted[T - 1 :: T]
            logits = self._read(cache, rows, positions, tokens.flatten().tolist(), wanted)
            return logits.view(B, -1, logits.shape[1])
        with self._lock:
            self._prepare_masks(self.model.make_context(tokens, tokens, None, cache), B)
            rows = list(range(B))
            return self._run(cache, tokens.flatten().tolist(), rows, rows).view(B, 1, -1)

    def _reads(self, cache: KVCache | None) -> bool:
        """Whether the kernels know the layers of a cache: those of the model, or in few bits."""
        if cache is None or not self.is_supported:
            return False
        return type(cache) is KVCache or cache.bits is not None

    def _is_native(self, tokens: Tensor, cache: KVCache) -> bool:
        """Whether the kernels run this pass."""
        if not (self._reads(cache) and self._are_valid(tokens, cache)):
            return False
        if self.is_batch_invariant:
            return True
        is_early_or_large = max(cache.lengths) == 0 or tokens.numel() > self.max_rows
        has_mask = tokens.shape[1] > 1 and not self.is_causal
        return not is_early_or_large and not has_mask

    def read(
        self, cache: KVCache, rows: list[int], tokens: list[int], wanted: AbstractSequence[int]
    ) -> Tensor:
        """As RowDecoder.read(), for a cache of full attention."""
        positions = []
        lengths = list(cache.lengths)
        for row in rows:
            positions.append(lengths[row])
            lengths[row] += 1
        assert max(lengths) <= cache.max_len
        cache.lengths = lengths
        return self._read(cache, rows, positions, tokens, wanted)

    def sample(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:
        """As Decoder.sample(). Kernels sample what needs no filters and no penalties."""
        unfiltered = [row for row, one in enumerate(sequences) if one.is_unfiltered]
        if len(unfiltered) == len(sequences):
            return self._sample_natively(sequences, cache, logits, max_steps, rows)
        from thinker.generation.sampler import sample_steps

        others = [row for row in range(len(sequences)) if row not in unfiltered]
        slow = [sequences[row] for row in others]
        # One step calls no model.
        by_row = dict(zip(others, sample_steps(slow, logits[others], 1, self.model)))
        if unfiltered:
            fast = [sequences[row] for row in unfiltered]
            tokens = self._sample_natively(fast, cache, logits[unfiltered], 1, None)
            by_row |= dict(zip(unfiltered, tokens))
        return [by_row[row] for row in range(len(sequences))]

    def _sample_natively(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None,
    ) -> list[list[SampledToken]]:
        """As sample(), for unfiltered sequences.

        Fast models sample several tokens without returning to Python, for up to MAX_SECONDS.
        """
        B = len(sequences)
        n_ids = sequences[0].tokenizer.vocab_size
        temperatures = [sequence.params.temperature for sequence in sequences]
        allowed = allowed_tokens(sequences)
        n_steps = 1
        if allowed is None and self._can_step(B, cache):
            in_time = int(MAX_SECONDS / self.seconds_per_step)
            n_steps = max(1, min(MAX_STEPS, max_steps, in_time))
        uniforms = []
        for step in range(n_steps):
            uniforms += [sequence.uniform(step) for sequence in sequences]
        logits = logits[:, 0].float().contiguous()  # (B, V)
        if n_steps == 1:
            tokens, logprobs = native.sample(logits, n_ids, temperatures, uniforms, allowed)
        else:
            rows = list(range(B)) if rows is None else rows
            tokens, logprobs = self._sample_steps(
                cache, rows, n_steps, logits, n_ids, temperatures, uniforms
            )
        sampled = []
        for row in range(B):  # the lists hold all rows of a step, then those of the next
            pairs = zip(tokens[row::B], logprobs[row::B])
            sampled.append([(token, logprob, {}) for token, logprob in pairs])
        return sampled

    def _can_step(self, n_rows: int, cache: KVCache | None) -> bool:
        """Whether the kernels can run several steps, and sample in between."""
        if not (self.is_causal and self._reads(cache)):
            return False
        return n_rows <= self.max_rows and not self._has_hooks()

    def _sample_steps(
        self,
        cache: KVCache,
        rows: list[int],
        n_steps: int,
        logits: Tensor,
        n_ids: int,
        temperatures: list[float],
        uniforms: list[float],
    ) -> tuple[list[int], list[float]]:
        """Sample `n_steps` tokens for each row of a cache, all in one call."""
        with self._lock:
            start = time.perf_counter()
            positions = [cache.lengths[row] for row in rows]
            lengths = list(cache.lengths)
            for row in rows:
                lengths[row] += n_steps - 1
            cache.lengths = lengths
            cache.high_water = list(map(max, cache.high_water, lengths))
            self._prepare_causal(positions, max(lengths))
            self._bind(cache)
            self._cache_rows[: len(rows)] = rows
            (visible,) = self._visible.values()
            sampled = self._work.sample_steps(
                self._operations, visible, logits, n_ids, temperatures, uniforms
            )
            self.seconds_per_step = (time.perf_counter() - start) / (n_steps - 1)
        return sampled

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
        max_per_row = self.max_rows
        if cache.pass_block is not None:
            max_per_row = MAX_BLOCKS_PER_PASS * cache.pass_block
        start = 0
        counts = Counter()
        for index, row in enumerate(rows):
            if index - start == self.max_rows or counts[row] == max_per_row:
                yield start, index
                start = index
                counts.clear()
            counts[row] += 1
        yield start, len(rows)

    def _run(self, cache: KVCache, tokens: list[int], rows: list[int], wanted: list[int]) -> Tensor:
        """Run all operations on prepared positions. Returns the logits (len(wanted), V)."""
        start = time.perf_counter()
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
        self.seconds_per_step = time.perf_counter() - start
        return self._logits[: len(wanted)].clone()

    def _are_valid(self, tokens: Tensor, cache: KVCache) -> bool:
        """Whether the kernels can read these inputs, and no activation is recorded.

        The model reports mistakes.
        """
        config = self.model.config
        ids = tokens.flatten().tolist()  # faster than tensor operations for a few tokens
        if tokens.dtype != torch.int64 or not 0 <= min(ids) <= max(ids) < config.vocab_size:
            return False
        fits = len(cache.layers) == config.n_layers and cache.head_dim == config.head_dim
        return fits and cache.dtype == self.model.dtype and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Whether any activation is recorded, patched, or seen by a hook of the user."""
        return any(self._hooks) or has_open_hooks(self.model)

    def _allocate(self) -> None:
        """Allocate what the operations write, for up to `max_rows` positions."""
        config = self.model.config
        N = self.max_rows
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
        for block, pattern in zip(model.blocks, model.config.patterns):
            attention, mlp = block.attention, block.mlp
            yield self._linear(attention.qkv_proj, self._x, self._qkv, block.attention_norm)
            yield from self._attention(attention, pattern)
            yield self._linear(attention.o_proj, self._y, self._x, adds=True)
            yield self._linear(mlp.gate_up_proj, self._x, self._gate_up, block.mlp_norm)
            yield self._linear(
                mlp.down_proj, self._gate_up, self._x, transform=native.SWIGLU, adds=True
            )
        yield self._linear(model.lm_head, self._x, self._logits, model.norm)

    def _attention(self, attention: Attention, pattern: Pattern) -> Iterator[Operation]:
        """From q, k and v of all heads to what the heads read."""
        shared = {
            "H": attention.n_heads,
            "K": attention.n_kv_heads,
            "D": attention.head_dim,
            "visible": ctypes.pointer(self._visible[pattern]),
            "x": self._qkv.data_ptr(),
        }
        rotate = Operation(kind=native.ROTATE, **shared)
        rotate.rotates = self.model.rope is not None and attention.use_rope
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

    def _prepare_causal(self, positions: list[int], end: int) -> None:
        """Set positions below `end`, each of which attends to all slots up to its own."""
        for slots, lengths in self._slots.values():
            slots[: len(positions)] = positions
            lengths[: len(positions)] = [position + 1 for position in positions]
        self._set_rope(positions, end)

    def _prepare_masks(self, context: ForwardContext, B: int) -> None:
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
