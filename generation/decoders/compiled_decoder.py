"""The decoding step, compiled once for all lengths, and on a GPU captured as a CUDA graph."""

import time
from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch import Tensor

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders import cuda_graph
from thinker.generation.decoders.cache_buffers import CacheBuffers, rounded_capacity
from thinker.generation.decoders.plain_decoder import PlainDecoder
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.model.masks import CacheSlots, ForwardContext
from thinker.model.positions import Rotation
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError


class CompiledDecoder(PlainDecoder):
    """Runs steps of one position per row through torch.compile (see Decoder).

    Rows are rounded up to a power of two and the cache's max_len to a multiple of 128. Each such
    bucket is captured as a CUDA graph; only the newest one is kept, to bound memory. A CPU uses
    NativeDecoder instead.
    """

    name = "torch.compile"
    option = "compile"

    def __init__(self, model: Thinker) -> None:
        super().__init__(model)
        # The pattern matcher would restore SDPA, which copies the keys.
        options = {"pattern_matcher": False, "size_asserts": False}
        # None: only dimensions that a bucket marks are dynamic. With True, heads and widths would
        # be dynamic, too.
        self._compiled = torch.compile(
            _with_own_code(_step), dynamic=None, fullgraph=True, options=options
        )
        self._bucket: _Bucket | None = None
        self.compile_seconds = 0.0  # spent on compiling and on capturing CUDA graphs

    @staticmethod
    def check(setup: Setup, caches: CacheFactory) -> None:
        """Raise UserError if the model or the other options are not supported."""
        setup.need_cache("compile")
        if caches.option == "cache_bits":
            raise UserError("cache_bits cannot be combined with compile on a GPU")
        if caches.option:
            raise UserError(f"{caches.option} cannot be combined with compile; use only one")
        setup.need_plain_attention("compile")

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """As Decoder.supports()."""
        return kind is KVCache

    def reads_rows(self, kind: type[KVCache]) -> bool:
        """As Decoder.reads_rows(): its graphs step all rows of a cache."""
        return False

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step(). Drafts are read by the model itself."""
        if tokens.shape[1] > 1:
            return super().step(tokens, cache)
        if has_open_hooks(self.model):
            raise UserError(
                "activations of a compiled model cannot be recorded or patched; use compile=False"
            )
        positions = cache.reserve(*tokens.shape)
        n_rows = 1 << (len(tokens) - 1).bit_length()
        capacity = rounded_capacity(cache)
        if self._bucket is None or self._bucket.shape != (n_rows, capacity):
            self._bucket = None  # frees its memory first
            start = time.perf_counter()
            self._bucket = _Bucket(self.model, self._compiled, n_rows, capacity)
            self.compile_seconds += time.perf_counter() - start
        self._bucket.adopt(cache)
        return self._bucket.run(tokens, positions)


def _step(
    model: Thinker, tokens: Tensor, positions: Tensor, rope_table: Rotation, cache: KVCache
) -> Tensor:
    """tokens, positions (B, 1), rope_table (S, D) each, a cache of S positions -> logits (B, 1,
    V)."""
    S = cache.layers[0].keys.shape[2]
    n_layers = len(cache.layers)
    allowed = torch.arange(S, device=positions.device) <= positions  # (B, S)
    masks = [AttentionMask(allowed[:, None, None])] * n_layers  # (B, 1, 1, S)
    cos, sin = (table[positions].unsqueeze(1) for table in rope_table)  # (B, 1, 1, D)
    slots = [CacheSlots(positions, S)] * n_layers
    context = ForwardContext(positions, S, masks, slots, [(cos, sin)] * n_layers)
    return model.lm_head(model.forward_blocks(tokens, context, cache))


def _with_own_code(function: FunctionType) -> FunctionType:
    """Copy a function to compile.

    Dynamo allows 8 programs per code object, which all models would share.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class _Bucket(CacheBuffers):
    """Tensors of a step for `n_rows` rows (some may be padding) and `capacity` positions.

    On a GPU, also a CUDA graph.
    """

    def __init__(
        self, model: Thinker, step: Callable[..., Tensor], n_rows: int, capacity: int
    ) -> None:
        assert model.config.is_plain
        super().__init__(model, n_rows, capacity)
        self.tokens = torch.zeros(n_rows, 1, dtype=int, device=model.device)
        self.positions = torch.zeros(n_rows, 1, dtype=int, device=model.device)
        every_position = torch.arange(capacity, device=model.device)
        rope_table = model.rope(every_position, capacity, model.dtype)  # (S, D) each
        for tensor in (self.tokens, self.positions, *rope_table):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for layer in self.buffers.layers:
            for tensor in (layer.keys, layer.values):
                torch._dynamo.maybe_mark_dynamic(tensor, [0, 2])
        # Not a lambda, which would refer to self and keep the memory until the next garbage
        # collection.
        self._step = partial(step, model, self.tokens, self.positions, rope_table, self.buffers)
        self._replay: Callable[[], None] | None = None
        if model.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        device = self.tokens.device
        (self._replay,) = cuda_graph.capture(device, self._warm_up, self._keep_logits)

    def _warm_up(self) -> None:
        for _ in range(2):  # compiles; adopt() clears what it writes
            self._step()

    def _keep_logits(self) -> None:
        self._logits = self._step()

    def run(self, tokens: Tensor, positions: list[int]) -> Tensor:
        """Tokens (B, 1) and their positions -> logits (B, 1, V)."""
        B = len(tokens)
        n_rows = self.shape[0]
        self.tokens[:B].copy_(tokens)
        padded = [[position] for position in positions] + [[0]] * (n_rows - B)
        self.positions.copy_(to_device(padded, self.positions.device))
        if self._replay is None:
            return self._step()[:B]
        self._replay()
        return self._logits[:B].clone()
