"""One sequence on its way, and the drawing of its next tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinker.data.tokenizer import Tokenizer
from thinker.generation.sampler import SamplingParams, sample
from thinker.generation.streaming import TextStreamer


@dataclass
class Completion:
    """What one prompt grew into."""

    prompt: str
    text: str = ""  # without the prompt and without the stop string
    token_ids: list[int] = field(default_factory=list)  # all that were drawn, an end-of-text token too
    logprobs: list[float] = field(default_factory=list)  # of each under the model itself, in nats
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # at each, of the likeliest (params.logprobs)
    finish_reason: str = "length"  # "stop": end of text or a stop string; "length": max_new_tokens or a full context
    prompt_tokens: int = 0  # with the BOS token that begins it
    n_evicted: int = 0  # positions that a rolling cache no longer held at the end
    drafted: int = 0  # tokens that speculation proposed, and how many of them were drawn
    accepted: int = 0


@dataclass(frozen=True)
class SampledToken:
    """A token, its log-probability under the model, and the likeliest tokens' at that place."""

    token: int
    logprob: float
    top: dict[int, float]


class Row:
    """Prompt, tokens drawn so far, and what decides the next one and the end."""

    def __init__(
        self,
        index: int,
        completion: Completion,
        params: SamplingParams,
        tokens: list[int],
        limit: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.index, self.completion, self.params = index, completion, params
        self.tokens, self.limit = tokens, limit  # limit: tokens that may still be drawn
        self.eos_ids, self.vocab_size = tokenizer.eos_ids, tokenizer.vocab_size
        self.stream = TextStreamer(tokenizer, params.stop)
        self.counts = torch.zeros(tokenizer.vocab_size) if _penalised(params) else None  # of each token drawn
        # What shapes the distribution: rows that agree in it draw together.
        self.sampling_key = replace(params, seed=0, max_new_tokens=1, stop=(), logprobs=0)
        self._random, self._uniforms = random.Random(params.seed), []

    def uniform(self, ahead: int) -> float:
        """The number in [0, 1) that draws the token `ahead` places on, the same for whoever asks, and when."""
        place = len(self.completion.token_ids) + ahead
        while len(self._uniforms) <= place:
            self._uniforms.append(self._random.random())
        return self._uniforms[place]

    def take(self, drawn: SampledToken) -> tuple[str, bool]:
        """Add a token. Returns the text that became certain, and whether the row has ended."""
        completion = self.completion
        self.tokens.append(drawn.token)
        completion.token_ids.append(drawn.token)
        completion.logprobs.append(drawn.logprob)
        if self.params.logprobs:
            completion.top_logprobs.append(drawn.top)
        if self.counts is not None:
            self.counts[drawn.token] += 1
        self.limit -= 1
        piece, ended = self.stream.feed(drawn.token), drawn.token in self.eos_ids
        if (ended or self.limit == 0) and not self.stream.stopped:
            piece += self.stream.finish()
        if ended or self.stream.stopped:
            completion.finish_reason = "stop"
        return piece, ended or self.stream.stopped or self.limit == 0

    def context(self, drafts: list[int], width: int) -> tuple[Tensor, Tensor]:
        """For the penalties, if `drafts` are drawn next: which of `width` tokens are in the text; how often drawn."""
        counts = torch.zeros(width)
        counts[: self.vocab_size] = self.counts
        for token in drafts:
            counts[token] += 1
        seen = torch.zeros(width, dtype=torch.bool)
        seen[self.tokens] = True
        seen[drafts] = True
        return seen, counts


def choose(rows: list[Row], drafts: list[list[int]], logits: Tensor) -> list[list[SampledToken]]:
    """Draw the next tokens of every row: one, and one more for each draft that turns out to be what was drawn.

    A draft never decides anything: at each place a token is drawn from the model's own distribution by the number
    that belongs to the place, and a draft that equals it only means that the next place's logits are known already.
    So speculation gives the very tokens that plain decoding gives, greedy or sampled.

    Args:
        drafts: for each row, the tokens that were fed after its last one.
        logits: (B, 1 + longest draft, V), after the last token and each draft.
    """
    places = [(row, ahead) for row in range(len(rows)) for ahead in range(len(drafts[row]) + 1)]
    at_row, at_ahead = zip(*places)
    flat = logits[list(at_row), list(at_ahead)] if len(places) > len(rows) else logits[:, 0]  # (N, V)
    flat = flat[:, : rows[0].vocab_size].float()  # the ids above stand for nothing
    contexts = [(rows[row], drafts[row][:ahead]) for row, ahead in places]
    tokens = draw_each(contexts, flat)
    logprobs = flat.log_softmax(dim=-1)  # (N, V)
    own = logprobs.gather(1, torch.tensor(tokens, device=flat.device)[:, None])[:, 0].tolist()
    drawn: list[list[SampledToken]] = [[] for _ in rows]
    for place, (row, ahead) in enumerate(places):
        if ahead and drawn[row][-1].token != drafts[row][ahead - 1]:
            continue
        if len(drawn[row]) == ahead:  # every draft before it was drawn
            top = top_logprobs(logprobs[place], rows[row].params.logprobs)
            drawn[row].append(SampledToken(tokens[place], own[place], top))
    return drawn


def draw_each(contexts: list[tuple[Row, list[int]]], logits: Tensor) -> list[int]:
    """A token for each of logits (N, V), where each belongs to a row after some drafts."""
    settings: dict[SamplingParams, list[int]] = {}
    for place, (row, _) in enumerate(contexts):
        settings.setdefault(row.sampling_key, []).append(place)
    uniforms = torch.tensor([row.uniform(len(drafts)) for row, drafts in contexts], dtype=torch.float64)
    tokens = [0] * len(contexts)
    for params, group in settings.items():
        seen = counts = None
        if _penalised(params):
            both = zip(*(contexts[place][0].context(contexts[place][1], logits.shape[1]) for place in group))
            seen, counts = (torch.stack(tensors).to(logits.device) for tensors in both)
        chosen = logits if len(group) == len(contexts) else logits[group]
        drawn = sample(chosen, params, uniforms[group], seen, counts)
        for place, token in zip(group, drawn.tolist()):
            tokens[place] = token
    return tokens


def top_logprobs(logprobs: Tensor, count: int) -> dict[int, float]:
    """The `count` likeliest tokens of (V,) and their log-probabilities, the likeliest first."""
    if not count:
        return {}
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return dict(zip(tokens.tolist(), values.tolist()))


def _penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
