"""Prefill, then one token after the other, for any number of prompts of unequal length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from errors import UserError
from generation.sampler import SamplingParams, distribution, draw
from generation.stream import TextStream
from model import KVCache, Thinker


@dataclass
class Completion:
    """What one prompt grew into."""

    prompt: str
    text: str = ""  # without the prompt and without the stop string
    token_ids: list[int] = field(default_factory=list)  # all that were drawn, an end-of-text token too
    logprobs: list[float] = field(default_factory=list)  # of each under the model itself, in nats
    finish_reason: str = "length"  # "stop": end of text or a stop string; "length": max_new_tokens or a full context


@dataclass
class _Row:
    """One sequence on its way."""

    completion: Completion
    tokens: list[int]  # prompt and what was drawn
    limit: int  # tokens that may still be drawn
    random: random.Random
    stream: TextStream


class Generator:
    """Samples from a Thinker. Weights are not changed; `use_cache=False` recomputes every position at every step."""

    def __init__(self, thinker: Thinker, tokenizer: Tokenizer, use_cache: bool = True) -> None:
        self.thinker, self.tokenizer, self.use_cache = thinker, tokenizer, use_cache

    def generate(self, prompts: list[str], params: SamplingParams | None = None) -> list[Completion]:
        """Continue every prompt. Raises UserError where one leaves no room in the context."""
        params = params or SamplingParams()
        completions = [Completion(prompt) for prompt in prompts]
        for row, piece in self._run(completions, params):
            completions[row].text += piece
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, giving out text as it comes; joined, the pieces equal generate()'s text."""
        return self.stream_into(Completion(prompt), params)

    def stream_into(self, completion: Completion, params: SamplingParams | None = None) -> Iterator[str]:
        """stream() that fills in a Completion as it goes."""
        for _, piece in self._run([completion], params or SamplingParams()):
            completion.text += piece
            yield piece

    def encode(self, prompt: str) -> list[int]:
        """A prompt as the model saw texts begin: the boundary token, then its tokens. Raises UserError if too long."""
        tokens = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        longest = self.thinker.config.max_seq_len
        if len(tokens) >= longest:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and the model's context is {longest}; "
                f"shorten it to at most {longest - 1} tokens"
            )
        return tokens

    def _run(self, completions: list[Completion], params: SamplingParams) -> Iterator[tuple[int, str]]:
        """Pairs (row, certain text), the completions' tokens and finish reasons filled in meanwhile."""
        rows = {}
        for index, completion in enumerate(completions):
            tokens = self.encode(completion.prompt)
            limit = min(params.max_new_tokens, self.thinker.config.max_seq_len - len(tokens))
            draws, stream = random.Random(params.seed + index), TextStream(self.tokenizer, params.stop)
            rows[index] = _Row(completion, tokens, limit, draws, stream)
        was_training = self.thinker.training
        self.thinker.eval()
        try:
            cache, logits = self._prefill(list(rows.values())) if rows else (None, None)
            while rows:
                drawn = self._choose(logits, list(rows.values()), params)
                finished = []
                for place, (index, row) in enumerate(rows.items()):
                    piece, ended = self._take(row, *drawn[place])
                    if piece:
                        yield index, piece
                    if ended:
                        finished.append(index)
                kept = [place for place, index in enumerate(rows) if index not in finished]
                rows = {index: row for index, row in rows.items() if index not in finished}
                if rows:
                    logits = self._advance(list(rows.values()), kept, cache)
        finally:
            self.thinker.train(was_training)

    @torch.no_grad()
    def _prefill(self, rows: list[_Row]) -> tuple[KVCache | None, Tensor]:
        """All prompts at once, padded at the end. Returns the cache and the logits after each prompt, (B, V)."""
        if not self.use_cache:
            return None, self._uncached(rows)
        lengths = [len(row.tokens) for row in rows]
        cache = self.thinker.new_cache(len(rows), max(len(row.tokens) + row.limit for row in rows))
        if min(lengths) == max(lengths):
            return cache, self.thinker(self._batch([row.tokens for row in rows]), cache=cache, last_only=True)[:, 0]
        # Rows of unequal length end at unequal places: first all but each one's last token, then that.
        shorter = [row.tokens[:-1] + [0] * (max(lengths) - len(row.tokens)) for row in rows]
        self.thinker(self._batch(shorter), cache=cache, last_only=True)
        cache.rewind([length - 1 for length in lengths])
        return cache, self.thinker(self._batch([row.tokens[-1:] for row in rows]), cache=cache)[:, 0]

    @torch.no_grad()
    def _advance(self, rows: list[_Row], kept: list[int], cache: KVCache | None) -> Tensor:
        """Feed each row's newest token; `kept` are the places in the batch that are still there. Returns (B, V)."""
        if cache is None:
            return self._uncached(rows)
        if len(kept) < len(cache.lengths):
            cache.select(kept)
        return self.thinker(self._batch([row.tokens[-1:] for row in rows]), cache=cache)[:, 0]

    def _uncached(self, rows: list[_Row]) -> Tensor:
        return torch.cat([self.thinker(self._batch([row.tokens]), last_only=True)[:, 0] for row in rows])

    @torch.no_grad()
    def _choose(self, logits: Tensor, rows: list[_Row], params: SamplingParams) -> list[tuple[int, float]]:
        """Draw a token for each row from logits (B, V). Returns (token, its log-probability under the model)."""
        logits = logits.float()
        logits[:, self.tokenizer.vocab_size :] = -torch.inf  # ids that stand for nothing
        seen = None
        if params.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for place, row in enumerate(rows):
                seen[place, row.tokens] = True
        uniforms = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        tokens = draw(distribution(logits, params, seen), uniforms)
        logprobs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        return list(zip(tokens.tolist(), logprobs.tolist()))

    def _take(self, row: _Row, token: int, logprob: float) -> tuple[str, bool]:
        """Add a token to a row. Returns the text that became certain, and whether the row has ended."""
        row.tokens.append(token)
        row.completion.token_ids.append(token)
        row.completion.logprobs.append(logprob)
        row.limit -= 1
        if token == self.tokenizer.eos_id:
            row.completion.finish_reason = "stop"
            return row.stream.finish(), True
        piece = row.stream.feed(token)
        if row.stream.stopped:
            row.completion.finish_reason = "stop"
            return piece, True
        if row.limit == 0:
            piece += row.stream.finish()
            if row.stream.stopped:
                row.completion.finish_reason = "stop"
            return piece, True
        return piece, False

    def _batch(self, tokens: list[list[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.thinker.device)  # (B, T)
