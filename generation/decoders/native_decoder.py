"""The decoder on a CPU, with kernels in C."""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from thinker.generation.decoders.decoder import TOKENS_PER_STEP, pass_lengths
from thinker.generation.decoders.inference_model import unknown_parts
from thinker.generation.decoders.native_forward import NativeForward
from thinker.generation.sequence import SampledToken, Sequence, allowed_tokens
from thinker.model import KVCache, Thinker
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.model.patterns.pattern import CAUSAL
from thinker.native import operations as native
from thinker.native.compiler import load_library
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


def _unknown(model: Thinker) -> Iterator[str]:
    """What the kernels do not know of a fused model; nothing if they know all of it."""
    config = model.config
    if config.positions not in ("rope", "alibi", "none"):
        yield f"{config.positions} positions"
    if config.token_shift:
        yield "token shift"
    if config.value_embeddings:
        yield "value embeddings"
    if config.bigram_rows:
        yield "an embedding of pairs"
    if config.window_rope_theta is not None:
        yield "a RoPE base for windows"
    if any(pattern.n_features for pattern in config.patterns):
        yield "linear attention"
    if any(pattern.by_content for pattern in config.patterns):
        yield "attention by content"
    yield from unknown_parts(model)


class NativeDecoder:
    """Runs a model on a CPU without torch's overhead for each operation (see Decoder).

    Activations are in fp32. If `is_batch_invariant`, which needs full attention and a processor
    with AVX-512, or `for_all_passes`, all passes are native, and a position is computed alike in
    each: its logits, keys and values have the same bits whatever the batch, and however the text is
    split into passes.
    Otherwise the model runs the first pass of a cache, those of many rows, and those of several
    positions if a layer has a mask. It also runs all passes with recorded or patched activations,
    linear attention or choice by content, learned, relative or sinusoidal positions, token shift,
    value embeddings, or an embedding of pairs.
    """

    name = "kernels in C"
    option = "compile"
    is_exact = True
    has_kernels = True
    steps_per_read = 1
    compile_seconds = 0.0
    tokens_per_step = TOKENS_PER_STEP
    rows_problem = ""

    def __init__(self, model: Thinker, for_all_passes: bool = False) -> None:
        """`model`: from fuse_for_inference(native=True). `for_all_passes`: run those, too, that
        torch runs faster on processors without AVX-512."""
        self.model = model
        config = model.config
        unknown = list(dict.fromkeys(_unknown(model)))
        self.is_supported = not unknown
        self.kernel_problem = ""
        if unknown:
            self.kernel_problem = f"they do not know {', '.join(unknown)}"
        has_causal_masks = all(pattern == CAUSAL for pattern in config.patterns)
        self.is_causal = has_causal_masks and config.positions != "alibi"
        self.max_rows = native.max_rows()
        runs_all = for_all_passes or self.max_rows >= MIN_ROWS_TO_PREFILL
        self.is_batch_invariant = self.is_supported and self.is_causal and runs_all
        # Hooks of torch, which a user or an open record() has registered.
        self._hooks: list[dict] = []
        for module in model.modules():
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.seconds_per_step = math.inf  # of the newest step
        self._lock = threading.Lock()  # the buffers serve one call at a time
        self._forward: NativeForward | None = None
        if self.is_supported:
            self._forward = NativeForward(model)

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """As Decoder.supports()."""
        return True

    def reads_rows(self, kind: type[KVCache]) -> bool:
        """As Decoder.reads_rows()."""
        return self.is_batch_invariant

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
            self._forward.prepare_masks(self.model.make_context(tokens, tokens, None, cache), B)
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
            self._forward.prepare_causal(positions, max(lengths))
            sampled = self._forward.sample_steps(cache, rows, logits, n_ids, temperatures, uniforms)
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
                self._forward.prepare_causal(positions[part], max(positions[part]) + 1)
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
        """As NativeForward.run(); measures the time."""
        start = time.perf_counter()
        logits = self._forward.run(cache, tokens, rows, wanted)
        self.seconds_per_step = time.perf_counter() - start
        return logits

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
