"""Continuous batching: sequences join and leave a running batch between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.generation.batching.batch_rows import JoinedRows, PooledRows, Row
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import Completion, SampledToken, Sequence
from thinker.runtime.errors import RunError, UserError


@dataclass
class TextUpdate:
    """What a step added to a sequence."""

    sequence: Sequence
    text: str  # newly certain text
    sampled: list[SampledToken]  # of which the tokens after the end of the text are left out
    has_ended: bool
    error: UserError | RunError | None = None  # why the sequence failed; others are not affected


class ContinuousBatch:
    """Decodes sequences that are added at any time, up to `max_rows` at once.

    Prompts are read in pieces beside the texts that grow, so that a long one delays nobody for
    long. What a prompt shares with texts that were read before is not read again. If the Generator
    is batch invariant, a sequence gets exactly the tokens that generate() gives it alone;
    otherwise, a logit may differ by a rounding error. Not thread-safe.
    """

    def __init__(self, generator: Generator, max_rows: int) -> None:
        """Allocate the cache.

        Raises UserError if it does not fit into memory, or for unsupported options.
        """
        unsupported = ""
        if not generator.caches.can_roll_back:
            unsupported = generator.caches.option
        elif not generator.decoder.is_exact:
            unsupported = generator.decoder.option
        elif generator.drafting is not None:
            unsupported = generator.drafting.option
        if unsupported:
            raise UserError(f"continuous batching does not support {unsupported}; leave it out")
        if not generator.use_cache:
            raise UserError("continuous batching needs the KV cache; use use_cache=True")
        self.generator = generator
        self.max_rows = max_rows
        self.rows: PooledRows | JoinedRows
        if generator.decoder.reads_rows(type(generator.new_cache(1, 1))):
            self.rows = PooledRows(generator, max_rows)
        else:
            self.rows = JoinedRows(generator, max_rows)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Row] = []  # oldest first

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence from Generator.new_sequence()."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, which frees its row at once."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for row in [row for row in self.running if row.sequence is sequence]:
            self._close(row)

    def clear(self) -> None:
        """Forget all sequences and all that was read, after step() has raised an error."""
        self.waiting.clear()
        self.running.clear()
        self.rows.clear()

    def warm_up(self) -> None:
        """Read and decode texts that are then forgotten, of every number that a decoder on a GPU
        prepares for, so that no request waits for its compiler."""
        generator = self.generator
        length = min(generator.config.prefix + 2, generator.config.max_seq_len)
        tokens = [generator.tokenizer.bos_id] * length
        n_texts = 1
        while n_texts < 2 * self.max_rows:
            for index in range(min(n_texts, self.max_rows)):
                params = SamplingParams(max_new_tokens=3, seed=index)
                self.add(generator.new_sequence(index, Completion(""), params, tokens))
            while not self.is_idle:
                self.step()
            n_texts *= 2
        self.clear()

    @torch.no_grad()
    def step(self) -> list[TextUpdate]:
        """Read and sample once for all sequences. Returns what was added; an ended sequence has
        left the batch."""
        self._admit()
        reads = list(self._choose_reads())
        if not reads:
            return []
        ready = [row for row, tokens in reads if len(tokens) == row.n_unread]
        logits = self.rows.read(reads)  # after the last token of each row in `ready`, (B, 1, V)
        if not ready:
            return []
        n_steps = 1
        if not self.waiting and len(ready) == len(self.running):  # nobody has to wait
            n_steps = self.generator.n_steps([row.sequence for row in ready])
        sampled = self.rows.sample(ready, logits, n_steps)
        steps = [self._extend(row, tokens) for row, tokens in zip(ready, sampled)]
        self._observe([row for row in ready if row in self.running])
        return steps

    def _observe(self, growing: list[Row]) -> None:
        """Show observers the rows that grow, without those that ended and those that slid."""
        sequences = [row.sequence for row in growing]
        for observer in self.generator.observers:
            observer.observe(
                self.generator.model, sequences, lambda index: self.rows.copy(growing[index])
            )

    def _admit(self) -> None:
        """Give free rows to waiting sequences, in order.

        Those that wait for a prefix to be read are passed over.
        """
        passed_over = []
        while self.waiting and len(self.running) < self.max_rows:
            sequence = self.waiting.popleft()
            if self._will_be_shared(sequence):
                passed_over.append(sequence)
                continue
            row = self.rows.open(sequence)
            sequence.n_shared = row.n_read
            self.running.append(row)
        self.waiting.extendleft(reversed(passed_over))

    def _will_be_shared(self, sequence: Sequence) -> bool:
        """Whether a prompt that is being read will share more with this one than it can now."""
        if sequence.is_scoring:
            return False
        for row in self.running:
            if row.n_unread > 1:
                # The last token has to be read for its logits.
                n_shared = common_prefix(row.sequence.tokens, sequence.tokens[:-1])
                if self.rows.will_share(row, n_shared):
                    return True
        return False

    def _choose_reads(self) -> Iterator[tuple[Row, list[int]]]:
        """Choose what to read in this step: the newest token of each text, then pieces of prompts.

        Half of what is left goes to the prompt that waits longest, the rest to the shortest, so
        that both advance.
        """
        growing = [row for row in self.running if row.n_unread == 1]
        prompts = [row for row in self.running if row.n_unread > 1]
        for row in growing:
            yield row, row.next_tokens(1)
        if not prompts:
            return
        most = self.rows.tokens_per_step
        budget = max(most - len(growing), most // 4)
        by_length = sorted(range(len(prompts)), key=lambda index: prompts[index].n_unread)
        shares = [(0, budget // 2), *((index, budget) for index in by_length)]
        n_chosen = [0] * len(prompts)
        for index, share in shares:
            row = prompts[index]
            n_left = row.n_unread - n_chosen[index]
            n = max(0, min(n_left, share, budget))
            if n_chosen[index] == 0:  # a bidirectional prefix has to be read in one pass
                n_prefix = self.generator.config.prefix - row.n_read
                n = max(n, min(n_prefix, n_left))
            n_chosen[index] += n
            budget -= n
        for row, n in zip(prompts, n_chosen):
            if n > 0:
                yield row, row.next_tokens(n)

    def _extend(self, row: Row, sampled: list[SampledToken]) -> TextUpdate:
        sequence = row.sequence
        n_before = len(sequence.completion.token_ids)
        try:
            text, has_ended = sequence.extend(sampled)
        except (UserError, RunError) as error:
            # NaN among its keys would reach others: even 0 times NaN is NaN.
            self._close(row, keep=False)
            return TextUpdate(sequence, "", [], True, error)
        sampled = sampled[: len(sequence.completion.token_ids) - n_before]
        if has_ended:
            self._close(row)
            if sequence.completion.finish_reason != "stop" and sequence.n_after_sliding:
                sequence.slide(self.generator.context_len)
                self.running.append(self.rows.open(sequence))  # it keeps its place
                has_ended = False
        return TextUpdate(sequence, text, sampled, has_ended)

    def _close(self, row: Row, keep: bool = True) -> None:
        self.running.remove(row)
        self.rows.close(row, keep)
