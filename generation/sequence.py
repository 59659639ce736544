"""One sequence during generation, and the sampling of the next tokens of a batch of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinker.data.tokenizer import Tokenizer
from thinker.generation.sampler import SamplingParams, sample
from thinker.generation.streaming import TextStreamer


@dataclass
class Completion:
    """A prompt and what was generated from it."""

    prompt: str
    text: str = ""  # without the prompt and without the stop string
    token_ids: list[int] = field(default_factory=list)  # all that were sampled, including an end-of-text token
    logprobs: list[float] = field(default_factory=list)  # of each token under the unmodified model, in nats
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # per token, of the likeliest (params.logprobs)
    finish_reason: str = "length"  # "stop": end of text or a stop string; "length": max_new_tokens or a full context
    prompt_tokens: int = 0  # including the BOS token
    n_evicted: int = 0  # positions that a sink cache no longer held at the end
    drafted: int = 0  # tokens that speculation proposed
    accepted: int = 0  # of these, tokens that were sampled


@dataclass(frozen=True)
class SampledToken:
    """A token, its log-probability under the model, and those of the likeliest tokens at its position."""

    token: int
    logprob: float
    top_logprobs: dict[int, float]


@dataclass(frozen=True)
class Score:
    """How likely a text is under the model, after the BOS token."""

    token_ids: list[int]
    logprobs: list[float]  # of each token given all before it, in nats
    top_logprobs: list[dict[int, float]]  # per position, of the likeliest tokens
    n_bytes: int

    @property
    def nats(self) -> float:
        """The negative log-likelihood of the whole text."""
        return math.fsum(-logprob for logprob in self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """Per byte of UTF-8; 0 for an empty text."""
        return self.nats / math.log(2) / max(self.n_bytes, 1)


class Sequence:
    """Prompt and sampled tokens of one completion, its random numbers, and when it ends."""

    def __init__(
        self,
        index: int,
        completion: Completion,
        params: SamplingParams,
        tokens: list[int],
        n_remaining: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.index, self.completion, self.params = index, completion, params
        self.tokens, self.n_remaining = tokens, n_remaining  # n_remaining: tokens that may still be sampled
        self.eos_ids, self.vocab_size = tokenizer.eos_ids, tokenizer.vocab_size
        self.streamer = TextStreamer(tokenizer, params.stop)
        self.counts = torch.zeros(tokenizer.vocab_size) if _has_penalties(params) else None  # of each sampled token
        # The parameters that shape the distribution: sequences with the same key are sampled in one batch.
        self.sampling_key = replace(params, seed=0, max_new_tokens=1, stop=(), logprobs=0)
        self._random, self._uniforms = random.Random(params.seed), []

    def uniform(self, offset: int) -> float:
        """The random number in [0, 1) that samples the token `offset` positions ahead, however often it is asked."""
        index = len(self.completion.token_ids) + offset
        while len(self._uniforms) <= index:
            self._uniforms.append(self._random.random())
        return self._uniforms[index]

    def append(self, sampled: SampledToken) -> tuple[str, bool]:
        """Add a token. Returns the text that became certain, and whether the sequence has ended."""
        completion = self.completion
        self.tokens.append(sampled.token)
        completion.token_ids.append(sampled.token)
        completion.logprobs.append(sampled.logprob)
        if self.params.logprobs:
            completion.top_logprobs.append(sampled.top_logprobs)
        if self.counts is not None:
            self.counts[sampled.token] += 1
        self.n_remaining -= 1
        text, ended = self.streamer.feed(sampled.token), sampled.token in self.eos_ids
        if (ended or self.n_remaining == 0) and not self.streamer.stopped:
            text += self.streamer.finish()
        if ended or self.streamer.stopped:
            completion.finish_reason = "stop"
        return text, ended or self.streamer.stopped or self.n_remaining == 0

    def penalty_inputs(self, drafts: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
        """If `drafts` come next: which tokens are in the text, and how often each was generated, (V,) both."""
        counts = torch.zeros(vocab_size)
        counts[: self.vocab_size] = self.counts
        for token in drafts:
            counts[token] += 1
        in_text = torch.zeros(vocab_size, dtype=torch.bool)
        in_text[self.tokens] = True
        in_text[drafts] = True
        return in_text, counts


@torch.no_grad()
def sample_next(sequences: list[Sequence], drafts: list[list[int]], logits: Tensor) -> list[list[SampledToken]]:
    """Sample the next tokens of every sequence: one, and one more for each draft that equals the sampled token.

    A draft never decides anything: every position is sampled from the model's own distribution with the random number
    of that position, and a draft that equals the result only means that the next position's logits are available.
    So speculation gives exactly the tokens of plain decoding, greedy or sampled.

    Args:
        drafts: for each sequence, the tokens that the model read after its last one.
        logits: (B, 1 + longest draft, V), after the last token and after each draft.
    """
    rows = [(index, offset) for index, draft in enumerate(drafts) for offset in range(len(draft) + 1)]  # N
    if len(rows) > len(sequences):
        indices, offsets = zip(*rows)
        logits = logits[list(indices), list(offsets)]  # (N, V)
    else:
        logits = logits[:, 0]
    logits = logits[:, : sequences[0].vocab_size].float()  # ids above the tokenizer's are padding
    tokens = sample_tokens([(sequences[index], drafts[index][:offset]) for index, offset in rows], logits)
    logprobs = logits.log_softmax(dim=-1)  # (N, V)
    token_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    sampled: list[list[SampledToken]] = [[] for _ in sequences]
    for row, (index, offset) in enumerate(rows):
        if [one.token for one in sampled[index]] == drafts[index][:offset]:
            top = top_logprobs(logprobs[row], sequences[index].params.logprobs)
            sampled[index].append(SampledToken(tokens[row], token_logprobs[row], top))
    return sampled


def sample_tokens(contexts: list[tuple[Sequence, list[int]]], logits: Tensor) -> list[int]:
    """Sample one token per row of logits (N, V); contexts: the row's sequence and the drafts that follow it."""
    groups: dict[SamplingParams, list[int]] = {}
    for row, (sequence, _) in enumerate(contexts):
        groups.setdefault(sequence.sampling_key, []).append(row)
    uniforms = torch.tensor([sequence.uniform(len(drafts)) for sequence, drafts in contexts], dtype=torch.float64)
    tokens = [0] * len(contexts)
    for params, rows in groups.items():
        in_text = counts = None
        if _has_penalties(params):
            inputs = [contexts[row][0].penalty_inputs(contexts[row][1], logits.shape[1]) for row in rows]
            in_text, counts = (torch.stack(tensors).to(logits.device) for tensors in zip(*inputs))
        group_logits = logits if len(rows) == len(contexts) else logits[rows]
        for row, token in zip(rows, sample(group_logits, params, uniforms[rows], in_text, counts).tolist()):
            tokens[row] = token
    return tokens


def top_logprobs(logprobs: Tensor, n: int) -> dict[int, float]:
    """The n likeliest tokens of (V,) and their log-probabilities, the likeliest first."""
    if not n:
        return {}
    values, tokens = logprobs.topk(min(n, len(logprobs)))
    return dict(zip(tokens.tolist(), values.tolist()))


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
