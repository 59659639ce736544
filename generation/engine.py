"""Prefill, then decoding token by token, for a batch of prompts of different lengths."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from thinker.data.tokenizer import Tokenizer
from thinker.generation.compiled_decode import CompiledThinker
from thinker.generation.inference_model import prepare_for_inference
from thinker.generation.option_checks import check_generator_options, check_prompt_length
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Score, Sequence, sample_next, top_logprobs
from thinker.generation.sink_cache import SinkCache
from thinker.generation.speculation import DraftModel, PromptLookup, check_draft_model, max_draft_len
from thinker.model import KVCache, Thinker
from thinker.runtime.errors import UserError

PREFILL_CHUNK = 512  # positions per pass: bounds the memory that a long prompt needs


class Generator:
    """Generates text with a Thinker: batches, streaming, scores, speculative decoding.

    It works on a copy of the weights, laid out for inference; the model you pass stays as it is, and training it
    further does not change the Generator.

        model, tokenizer = load("runs/quickstart")
        generator = Generator(model, tokenizer)
        for completion in generator.generate(["Once upon a time"] * 3, SamplingParams(max_new_tokens=64, seed=1)):
            print(completion.text, completion.finish_reason)
        for piece in generator.stream("Once upon a time"):
            print(piece, end="", flush=True)
        print(generator.score("Once upon a time there was a cat.").bits_per_byte)

    Args:
        model: the model to sample from.
        tokenizer: the tokenizer that the model was trained with.
        use_cache: False recomputes every position at every step, to compare.
        dtype: of weights, activations and cache; by default that of the model.
        int8: store the weights in int8 (generation.int8.Int8Linear).
        compile: run the one-token step through torch.compile, on a GPU as a CUDA graph.
        window: remember only the newest `window` positions, for texts of any length.
        sinks: with `window`, also remember the first `sinks` positions.
        speculate: draft this many tokens per step, by prompt lookup or by the draft model. The text stays the same.
        draft: a smaller Thinker with the same tokenizer, for `speculate`.

    Raises:
        UserError: if the options contradict each other, or the model does not support one of them.
    """

    def __init__(
        self,
        model: Thinker,
        tokenizer: Tokenizer,
        use_cache: bool = True,
        *,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        compile: bool = False,
        window: int | None = None,
        sinks: int = 0,
        speculate: int = 0,
        draft: Thinker | None = None,
    ) -> None:
        config = model.config
        check_generator_options(config, use_cache, compile, window, sinks, speculate, draft is not None)
        self.config, self.tokenizer, self.use_cache = config, tokenizer, use_cache
        self.window, self.sinks, self.speculate = window, sinks, speculate
        self.supports_window = use_cache and config.is_plain
        self.is_unbounded = window is not None or (config.is_unbounded and use_cache)
        self.context_len = config.max_cached_len if use_cache else config.max_seq_len  # unless is_unbounded
        dtype = dtype or model.dtype
        self.model = prepare_for_inference(model, dtype, int8)
        self.decode_model = CompiledThinker(self.model) if compile else self.model
        self.draft = None
        if draft is not None:
            check_draft_model(model, draft, self.is_unbounded)
            self.draft = prepare_for_inference(draft, dtype, int8)

    def generate(
        self, prompts: list[str], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue all prompts in one batch; equal prompts are read once.

        Args:
            prompts: texts of any length up to the context.
            params: one for all prompts, where prompt i is sampled with seed + i; or one per prompt.

        Returns:
            One Completion per prompt: text, token_ids, logprobs, finish_reason, ...

        Raises:
            UserError: if a prompt does not fit into the context, or the parameters do not fit the prompts.
        """
        completions = [Completion(prompt) for prompt in prompts]
        for _ in self.stream_batch(completions, params):
            pass
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, yielding text as it is generated; joined, the pieces are generate()'s text."""
        for _, piece in self.stream_batch([Completion(prompt)], params):
            yield piece

    def stream_batch(
        self,
        completions: list[Completion],
        params: SamplingParams | list[SamplingParams] | None = None,
        prompt_tokens: list[list[int]] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Continue several prompts at once, filling in their Completions.

        Args:
            completions: a Completion(prompt) per prompt.
            params: as for generate().
            prompt_tokens: the prompts' token ids; by default those of encode().

        Yields:
            (index of the completion, the text that became certain).
        """
        if params is None or isinstance(params, SamplingParams):
            base = params or SamplingParams()
            params = [dataclasses.replace(base, seed=base.seed + index) for index in range(len(completions))]
        if len(params) != len(completions):
            raise UserError(f"{len(completions)} prompts and {len(params)} sampling parameters: give one each, or one")
        if prompt_tokens is None:
            prompt_tokens = [self.encode(completion.prompt) for completion in completions]
        sequences = [
            self.new_sequence(index, completion, params[index], list(prompt_tokens[index]))
            for index, completion in enumerate(completions)
        ]
        if sequences:
            if self.use_cache:
                cache, logits = self._prefill_unique(self.model, sequences, self.speculate)
            else:
                cache, logits = None, self._uncached_logits(sequences)
            yield from self.decode(sequences, cache, logits)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, after the BOS token if the model was trained with one.

        Raises UserError if they do not fit into the context.
        """
        tokens = [*self.tokenizer.bos_prefix, *self.tokenizer.encode(prompt)] or [self.tokenizer.bos_id]
        self.check_length(tokens)
        return tokens

    def check_length(self, tokens: list[int]) -> None:
        """Raise UserError if a prompt is longer than the context and there is no window."""
        hint = ", or set with --window how many of the newest tokens to remember" if self.supports_window else ""
        check_prompt_length(tokens, self.config, math.inf if self.is_unbounded else self.context_len, hint)

    def check_params(self, params: SamplingParams) -> None:
        """Raise UserError if the logit bias names a token outside the vocabulary."""
        for token, _ in params.logit_bias:
            if token >= self.tokenizer.vocab_size:
                raise UserError(
                    f"logit_bias names the token {token}; the vocabulary ends at {self.tokenizer.vocab_size - 1}"
                )

    def new_sequence(self, index: int, completion: Completion, params: SamplingParams, tokens: list[int]) -> Sequence:
        """A sequence that starts with `tokens` and may grow by max_new_tokens, or as far as the context allows."""
        self.check_params(params)
        completion.prompt_tokens = len(tokens)
        n_new = params.max_new_tokens
        if not self.is_unbounded:  # the model never reads the last token, so n positions allow n + 1 tokens
            n_new = min(n_new, self.context_len + 1 - len(tokens))
        return Sequence(index, completion, params, tokens, n_new, self.tokenizer)

    def new_cache(self, model: Thinker, batch_size: int, max_len: int) -> KVCache:
        """An empty cache; a sink cache if there is a window."""
        if self.window is not None:
            return SinkCache(model, batch_size, self.window, self.sinks)
        return model.new_cache(batch_size, max_len, slack=self.speculate)

    @property
    def chunk_len(self) -> int:
        """Positions per prefill pass; a bidirectional prefix is always read in one pass."""
        return max(PREFILL_CHUNK, self.config.prefix)

    @torch.no_grad()
    def prefill(self, model: Thinker, tokens: list[list[int]], cache: KVCache) -> Tensor:
        """Read tokens (B, T) into a cache; returns the logits after the last ones, (B, V)."""
        for start in range(0, len(tokens[0]), self.chunk_len):
            chunk = torch.tensor([row[start : start + self.chunk_len] for row in tokens], device=model.device)
            logits = model(chunk, cache=cache, last_logits_only=True)[:, 0]  # (B, V)
        return logits

    def decode(self, sequences: list[Sequence], cache: KVCache | None, logits: Tensor) -> Iterator[tuple[int, str]]:
        """Sample from logits (B, 1, V) on until every sequence has ended. Yields (sequence.index, certain text)."""
        drafter = None
        if self.draft is not None:
            drafter = DraftModel(self.draft, self.speculate, self._prefill_unique)
        elif self.speculate:
            drafter = PromptLookup(self.speculate)
        drafts: list[list[int]] = [[] for _ in sequences]
        while sequences:
            unfinished = []
            for row, (sequence, sampled) in enumerate(zip(sequences, sample_next(sequences, drafts, logits))):
                completion = sequence.completion
                completion.drafted += len(drafts[row])
                for offset, sampled_token in enumerate(sampled):
                    text, ended = sequence.append(sampled_token)
                    completion.accepted += drafts[row][offset : offset + 1] == [sampled_token.token]
                    if text:
                        completion.text += text
                        yield sequence.index, text
                    if ended:
                        if self.window is not None:
                            completion.n_evicted = max(0, len(sequence.tokens) - 1 - self.sinks - self.window)
                        break
                else:
                    unfinished.append(row)
            if not unfinished:
                return
            if len(unfinished) < len(sequences):
                sequences = [sequences[row] for row in unfinished]
                for batch in (cache, drafter):
                    if batch is not None:
                        batch.select(unfinished)
            drafts, logits = self._decode_step(sequences, cache, drafter)

    @torch.no_grad()
    def score(self, text: str, n_top: int = 0) -> Score:
        """The log-probability of every token of a text, computed by the same passes as generation.

        A text longer than the context is read in windows that overlap by half, and every token is counted once, after
        at least half a context. With `window`, the text is read in one pass. Tokens inside a bidirectional prefix are
        not predicted and not counted.

        Args:
            text: any text, without the BOS token.
            n_top: also return the log-probabilities of this many likeliest tokens per position.

        Raises:
            UserError: if the whole text lies inside the model's bidirectional prefix.
        """
        ids = self.tokenizer.encode(text)
        tokens = [self.tokenizer.bos_id, *ids]
        n_skipped = max(0, self.config.prefix - 1)  # ids inside the prefix
        if n_skipped and len(ids) <= n_skipped:
            raise UserError(
                f"the text has {len(tokens)} tokens, all inside the model's bidirectional prefix of {n_skipped + 1}"
            )
        logprobs: list[float] = []
        likeliest: list[dict[int, float]] = []
        start = 0
        while n_skipped + len(logprobs) < len(ids):
            end = len(ids) if self.is_unbounded else min(start + self.context_len, len(ids))
            cache = self.new_cache(self.model, 1, end - start)
            for chunk_start in range(start, end, self.chunk_len):  # tokens[start:end] predict ids[start:end]
                chunk = tokens[chunk_start : min(chunk_start + self.chunk_len, end)]
                logits = self.model(torch.tensor([chunk], device=self.model.device), cache=cache)[0]
                logits = logits[:, : self.tokenizer.vocab_size].float()  # ids above the tokenizer's are padding
                n_counted = n_skipped + len(logprobs)
                new = logits.log_softmax(dim=-1)[max(0, n_counted - chunk_start) :]  # (T, V), those not yet counted
                targets = torch.tensor(ids[n_counted : chunk_start + len(chunk)], device=new.device)
                if len(targets):
                    logprobs += new.gather(1, targets[:, None])[:, 0].tolist()
                    likeliest += [top_logprobs(row, n_top) for row in new] if n_top else []
            start = max(0, end - max(self.context_len // 2, n_skipped))
        return Score(ids[n_skipped:], logprobs, likeliest, len(self.tokenizer.decode_bytes(ids[n_skipped:])))

    def _prefill_unique(self, model: Thinker, sequences: list[Sequence], slack: int) -> tuple[KVCache, Tensor]:
        """Read each distinct prompt once, those of equal length together. Returns a cache and logits, (B, 1, V)."""
        max_len = max(len(sequence.tokens) + sequence.n_remaining for sequence in sequences) + slack
        prompts = sorted(dict.fromkeys(tuple(sequence.tokens) for sequence in sequences), key=len)
        cache, logits = None, []
        for _, group in itertools.groupby(prompts, key=len):
            group = [list(prompt) for prompt in group]
            group_cache = self.new_cache(model, len(group), max_len)
            logits.append(self.prefill(model, group, group_cache))
            if cache is None:
                cache = group_cache
            else:
                cache.concat_rows(group_cache)
        logits = torch.cat(logits)[:, None]
        rows = [prompts.index(tuple(sequence.tokens)) for sequence in sequences]
        if rows != list(range(len(prompts))):
            cache.select(rows)
            logits = logits[rows]
        return cache, logits

    @torch.no_grad()
    def _decode_step(
        self, sequences: list[Sequence], cache: KVCache | None, drafter: PromptLookup | DraftModel | None
    ) -> tuple[list[list[int]], Tensor]:
        """Read each sequence's newest token and its drafts. Returns the drafts and the logits after each, (B, T, V)."""
        if cache is None:
            return [[] for _ in sequences], self._uncached_logits(sequences)
        cache.truncate([len(sequence.tokens) - 1 for sequence in sequences])  # drops rejected drafts
        drafts = [[] for _ in sequences] if drafter is None else drafter.propose(sequences)
        max_len = max(0, max_draft_len(self.config, sequences))
        drafts = [draft[: min(max_len, len(draft))] for draft in drafts]
        longest = max(map(len, drafts))
        batch = [
            [sequence.tokens[-1], *draft] + [0] * (longest - len(draft)) for sequence, draft in zip(sequences, drafts)
        ]
        model = self.model if longest else self.decode_model
        return drafts, model(torch.tensor(batch, device=self.model.device), cache=cache)

    @torch.no_grad()
    def _uncached_logits(self, sequences: list[Sequence]) -> Tensor:
        """The logits after each sequence, (B, 1, V), by one pass over all of its tokens."""
        logits = [
            self.model(torch.tensor([sequence.tokens], device=self.model.device), last_logits_only=True)
            for sequence in sequences
        ]
        return torch.cat(logits)
