"""Rows of KV caches for the sequences of a continuous batch, with the prefixes that texts share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.generation.caches.cache_factory import copy_row
from thinker.generation.caches.quantized_cache import MAX_PER_PASS
from thinker.generation.decoders.decoder import TOKENS_PER_STEP, RowDecoder, pass_lengths
from thinker.generation.engine import Generator
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache

KEPT_TEXTS = 8  # that JoinedRows remembers
LEAST_SHARED = 64  # tokens; a GPU reads fewer as fast as it copies them


@dataclass(eq=False)
class Row:
    """A sequence and the place of its keys and values."""

    sequence: Sequence
    index: int  # row of the cache
    n_read: int  # tokens of the sequence that the cache holds
    prompt_cache: KVCache | None = None  # of JoinedRows, until the prompt has been read

    @property
    def n_unread(self) -> int:
        """Number of tokens that the model has not read."""
        return len(self.sequence.tokens) - self.n_read

    def next_tokens(self, n: int) -> list[int]:
        """The next n tokens for the model to read."""
        return self.sequence.tokens[self.n_read : self.n_read + n]


class PooledRows:
    """Rows of one cache of fixed size, for a decoder that reads any rows at once.

    The keys of a finished text stay in its row until the row is needed; a new text copies the
    prefix that it shares with any row.
    """

    def __init__(self, generator: Generator, n_rows: int) -> None:
        self.decoder = cast(RowDecoder, generator.decoder)
        self.tokens_per_step = self.decoder.tokens_per_step
        self.cache = generator.new_cache(n_rows, int(generator.context_len))
        # With 4 bits, the newest keys of a text that goes on differently would be missing: only all
        # but its end is shared.
        self.shares_prompts = self.cache.pass_block is None
        # Elsewhere, NaN of a later token in a pass reaches the keys of those before it, so that no
        # other text may have them until a token was sampled from finite logits.
        self.shares_at_once = generator.is_batch_invariant
        self.least_shared = 1
        if not self.shares_at_once:
            self.least_shared = LEAST_SHARED
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        for layer in self.cache.layers:  # takes the memory now, not when requests come
            for name in layer.tensors:
                getattr(layer, name).fill_(0)
        n_rows = len(self.cache.lengths)
        self.cache.lengths = [0] * n_rows
        self.texts: list[list[int]] = [[] for _ in range(n_rows)]  # tokens whose keys a row holds
        # How far each row has been read, also by a text that it was copied from.
        self.ends = [0] * n_rows
        self.free = list(range(n_rows))  # least recently used first
        self.unchecked: set[int] = set()  # rows whose keys no other text may have yet

    def open(self, sequence: Sequence) -> Row:
        """Take a free row for a sequence, with what it shares with another row."""
        tokens = sequence.tokens
        shared = [self._n_shared(row, tokens[:-1]) for row in range(len(self.texts))]
        if sequence.is_scoring:  # which needs the logits of all positions, not only their keys
            shared = [0] * len(shared)
        if not self.shares_prompts:
            shared = [n if end - n <= MAX_PER_PASS else 0 for n, end in zip(shared, self.ends)]
        source = max(range(len(shared)), key=lambda row: (shared[row], row in self.free))
        n_shared = shared[source]
        # A row whose whole text is a prefix of the new one is not needed any more.
        is_prefix = source in self.free and n_shared == len(self.texts[source])
        index = source if is_prefix else self.free[0]
        self.free.remove(index)
        self._erase(index, n_shared)
        if index != source:
            self._copy(source, index, n_shared)
        self.cache.lengths[index] = n_shared
        self.ends[index] = self.ends[source] if n_shared else 0
        self.texts[index] = sequence.tokens[:n_shared]
        if not self.shares_at_once:
            self.unchecked.add(index)
        return Row(sequence, index, n_shared)

    def _n_shared(self, row: int, tokens: list[int]) -> int:
        """How many of these tokens a new text can have from a row."""
        if row in self.unchecked:
            return 0
        n_shared = common_prefix(self.texts[row], tokens)
        return n_shared if n_shared >= self.least_shared else 0

    def will_share(self, row: Row, n: int) -> bool:
        """Whether a text whose first n tokens are those of a prompt that is being read can have
        more of them later."""
        if not self.shares_prompts or n < self.least_shared:
            return False
        return row.n_read < n or row.index in self.unchecked

    def _erase(self, index: int, start: int) -> None:
        """Erase the keys and values of an earlier text from a position on.

        A decoder that masks them would not keep out NaN, since 0 · nan is nan.
        """
        end = self.ends[index]
        for layer in self.cache.layers if start < end else ():
            for name in layer.tensors:
                if not name.startswith("newest"):
                    getattr(layer, name)[index, :, start:end] = 0

    def _copy(self, source: int, target: int, n: int) -> None:
        """Copy the first n positions of a row to another."""
        for layer in self.cache.layers:
            for name in layer.tensors:
                tensor = getattr(layer, name)
                size = tensor.shape[2] if name.startswith("newest") else n
                tensor[target, :, :size] = tensor[source, :, :size]

    def read(self, reads: list[tuple[Row, list[int]]]) -> Tensor:
        """Read tokens of each row.

        Returns the logits of the rows that have been read whole, (B, 1, V).
        """
        rows: list[int] = []
        tokens: list[int] = []
        wanted: list[int] = []
        last: list[int] = []  # of `wanted`: those after whole texts
        scoring: list[tuple[Sequence, slice]] = []  # and those in prompts that are scored
        for row, new in reads:
            rows += [row.index] * len(new)
            tokens += new
            self._append(row, new)
            if row.sequence.is_scoring:
                scoring.append((row.sequence, slice(len(wanted), len(wanted) + len(new))))
                wanted += range(len(rows) - len(new), len(rows))
            elif row.n_unread == 0:
                wanted.append(len(rows) - 1)
            if row.n_unread == 0:
                last.append(len(wanted) - 1)
        logits = self.decoder.read(self.cache, rows, tokens, wanted)
        for sequence, part in scoring:
            sequence.prompt_scores.add(logits[part])
        if scoring:
            logits = logits[last]
        return logits[:, None]

    def sample(self, rows: list[Row], logits: Tensor, max_steps: int) -> list[list[SampledToken]]:
        """Sample up to `max_steps` tokens per row; the model reads all of them but the last."""
        sequences = [row.sequence for row in rows]
        indices = [row.index for row in rows]
        sampled = self.decoder.sample(sequences, self.cache, logits, max_steps, indices)
        for row, tokens in zip(rows, sampled):
            self._append(row, [token for token, *_ in tokens[:-1]])
            self.unchecked.discard(row.index)
        return sampled

    def _append(self, row: Row, new: list[int]) -> None:
        """Count tokens that the model has read."""
        row.n_read += len(new)
        self.texts[row.index] += new
        self.ends[row.index] = max(self.ends[row.index], len(self.texts[row.index]))

    def copy(self, row: Row) -> KVCache:
        """A copy of what has been read of a sequence."""
        return copy_row(self.cache, row.index)

    def close(self, row: Row, keep: bool = True) -> None:
        """Give back the row of a sequence. `keep`: whether other texts may share its keys."""
        self.free.append(row.index)
        if not keep or row.index in self.unchecked:
            self.texts[row.index] = []
        self.unchecked.discard(row.index)


class JoinedRows:
    """For other models and devices: each prompt is read in a cache of its own, which then joins."""

    tokens_per_step = TOKENS_PER_STEP

    def __init__(self, generator: Generator, n_rows: int) -> None:
        self.generator = generator
        self.clear()
        self.max_len = generator.config.max_seq_len + 1  # unbounded caches are smaller than that
        if generator.context_len < math.inf:
            self.max_len = int(generator.context_len)
            generator.new_cache(n_rows, self.max_len)  # raises an error if they do not fit

    def clear(self) -> None:
        """Forget all rows."""
        self.cache: KVCache | None = None
        self.joined: list[Row] = []  # in the order of the cache's rows
        self.kept: list[tuple[list[int], KVCache]] = []  # texts that were read, newest last

    def will_share(self, row: Row, n: int) -> bool:
        """As PooledRows.will_share(): never."""
        return False

    def open(self, sequence: Sequence) -> Row:
        """Create a cache for the prompt of a sequence, with what it shares with a text that was
        kept."""
        least = max(1, self.generator.config.prefix)
        shared = []
        for index, (text, _) in enumerate(self.kept):
            shared.append((common_prefix(text, sequence.tokens[:-1]), index))
        if sequence.is_scoring:  # which needs the logits of all positions, not only their keys
            shared = []
        for n_shared, index in sorted(shared, reverse=True):
            cache = self.kept[index][1]
            if n_shared >= least and cache.can_truncate([n_shared]):
                self.kept.append(self.kept.pop(index))
                cache = copy_row(cache, 0)
                cache.truncate([n_shared])
                return Row(sequence, -1, n_shared, cache)
        return Row(sequence, -1, 0, self.generator.new_cache(1, self.max_len))

    def read(self, reads: list[tuple[Row, list[int]]]) -> Tensor:
        """Read tokens of each row.

        Returns the logits of the rows that have been read whole, (B, 1, V).
        """
        decoder = self.generator.decoder
        by_row: dict[Row, Tensor] = {}
        growing = list(self.joined)
        if growing:
            self.cache.lengths = [row.n_read for row in growing]
            newest = [row.next_tokens(1) for row in growing]
            tokens = torch.tensor(newest, device=decoder.model.device)  # (B, 1)
            for row, logits in zip(growing, decoder.step(tokens, self.cache)):
                by_row[row] = logits
                row.n_read += 1
        for row, new in reads:
            if row.prompt_cache is None:
                continue
            logits = self._read_prompt(row, new)
            row.n_read += len(new)
            if row.n_read == len(row.sequence.tokens):
                by_row[row] = logits[0]
                self._join(row)
        if not by_row:
            return torch.empty(0)
        return torch.stack([by_row[row] for row, _ in reads if row in by_row])

    def _read_prompt(self, row: Row, new: list[int]) -> Tensor:
        """Read the next tokens of a prompt. Returns the logits after the last one, (1, 1, V)."""
        cache = row.prompt_cache
        if not row.sequence.is_scoring:
            return self.generator.prefill([new], cache)
        model = self.generator.model
        tokens = torch.tensor([new], device=model.device)  # (1, T)
        for part in tokens.split(list(pass_lengths(cache, len(new), cache.pass_block)), dim=1):
            logits = model(part, cache=cache)
            row.sequence.prompt_scores.add(logits[0])
        return logits[:, -1:]

    def sample(self, rows: list[Row], logits: Tensor, max_steps: int) -> list[list[SampledToken]]:
        """As PooledRows.sample(). Several steps are for all rows of the cache."""
        assert max_steps == 1 or len(rows) == len(self.joined)
        # A decoder that runs several steps takes the rows in the order of the cache.
        order = sorted(range(len(rows)), key=lambda index: self.joined.index(rows[index]))
        if order != list(range(len(rows))):
            logits = logits[order]
        sequences = [rows[index].sequence for index in order]
        sampled = self.generator.decoder.sample(sequences, self.cache, logits, max_steps)
        by_row: list[list[SampledToken]] = [[] for _ in rows]
        for index, tokens in zip(order, sampled):
            rows[index].n_read += len(tokens) - 1
            by_row[index] = tokens
        return by_row

    def copy(self, row: Row) -> KVCache:
        """A copy of what has been read of a sequence whose prompt was read."""
        return copy_row(self.cache, self.joined.index(row))

    def close(self, row: Row, keep: bool = True) -> None:
        """Remove a sequence from the cache. `keep`: whether other texts may share its keys."""
        if row.prompt_cache is not None:
            return
        index = self.joined.index(row)
        text = row.sequence.tokens[: row.n_read]
        if keep:
            self._keep(text, copy_row(self.cache, index))
        else:
            self._drop_prefixes(text)
        del self.joined[index]
        others = [other for other in range(len(self.cache.lengths)) if other != index]
        if others:
            self.cache.select(others)
        else:
            self.cache = None

    def _join(self, row: Row) -> None:
        if self.cache is None:
            self.cache = copy_row(row.prompt_cache, 0)
        else:
            self.cache.concat_rows(row.prompt_cache)
        self._keep(list(row.sequence.tokens), row.prompt_cache)
        row.prompt_cache = None
        row.index = len(self.joined)
        self.joined.append(row)

    def _keep(self, text: list[int], cache: KVCache) -> None:
        self._drop_prefixes(text)
        self.kept = [*self.kept[1 - KEPT_TEXTS :], (text, cache)]

    def _drop_prefixes(self, text: list[int]) -> None:
        self.kept = [(other, cache) for other, cache in self.kept if other != text[: len(other)]]
