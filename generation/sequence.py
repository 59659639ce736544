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
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError


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


@dataclass
class Sequence:
    """Prompt and sampled tokens of one completion, its random numbers, and when it ends."""

    index: int
    completion: Completion
    params: SamplingParams
    tokens: list[int]
    n_remaining: int  # tokens that may still be sampled
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.streamer = TextStreamer(self.tokenizer, self.params.stop)
        # The parameters that shape the distribution: sequences with the same key are sampled in one batch.
        self.sampling_key = replace(self.params, seed=0, max_new_tokens=1, stop=(), logprobs=0)
        self._random, self._uniforms = random.Random(self.params.seed), []

    def uniform(self, offset: int) -> float:
        """The random number in [0, 1) that samples the token `offset` positions ahead, however often it is asked."""
        index = len(self.completion.token_ids) + offset
        while len(self._uniforms) <= index:
            self._uniforms.append(self._random.random())
        return self._uniforms[index]

    def append(self, token: int, logprob: float, top_logprobs: dict[int, float]) -> tuple[str, bool]:
        """Add a token. Returns the text that became certain, and whether the sequence has ended."""
        completion, streamer = self.completion, self.streamer
        self.tokens.append(token)
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
        if self.params.logprobs:
            completion.top_logprobs.append(top_logprobs)
        self.n_remaining -= 1
        text, is_eos = streamer.feed(token), token in self.tokenizer.eos_ids
        if is_eos or self.n_remaining == 0:
            text += streamer.finish()
        completion.text += text
        if is_eos or streamer.stopped:
            completion.finish_reason = "stop"
        return text, is_eos or streamer.stopped or self.n_remaining == 0

    def penalty_inputs(self, drafts: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
        """If `drafts` come next: which tokens are in the text, and how often each was generated, (V,) both."""
        tokens = torch.tensor(self.tokens + drafts)
        in_text = torch.zeros(vocab_size, dtype=torch.bool)
        in_text[tokens] = True
        n_generated = len(self.completion.token_ids) + len(drafts)
        return in_text, tokens[len(tokens) - n_generated :].bincount(minlength=vocab_size)


@torch.no_grad()
def sample_next(
    sequences: list[Sequence], drafts: list[list[int]], logits: Tensor
) -> list[list[tuple[int, float, dict[int, float]]]]:
    """Sample the next tokens of every sequence: one, and one more for each draft that equals the sampled token.

    A draft never decides anything: every position is sampled from the model's own distribution with the random number
    of that position, and a draft that equals the result only means that the next position's logits are available.
    So speculation gives exactly the tokens of plain decoding, greedy or sampled.

    `drafts`: per sequence, the tokens that the model read after its last one. `logits` (B, 1 + longest draft, V): after
    the last token and each draft. Returns per sequence the tokens, their log-probabilities, and those of the likeliest.
    """
    rows = [(index, offset) for index, draft in enumerate(drafts) for offset in range(len(draft) + 1)]  # N
    if len(rows) > len(sequences):
        indices, offsets = zip(*rows)
        logits = logits[list(indices), list(offsets)]  # (N, V)
    else:
        logits = logits[:, 0]
    logits = logits[:, : sequences[0].tokenizer.vocab_size].float()  # ids above the tokenizer's are padding
    tokens = sample_tokens([(sequences[index], drafts[index][:offset]) for index, offset in rows], logits)
    logprobs = logits.log_softmax(dim=-1)  # (N, V)
    token_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    sampled = [[] for _ in sequences]
    for row, (index, offset) in enumerate(rows):
        if [token for token, *_ in sampled[index]] == drafts[index][:offset]:
            top = top_logprobs(logprobs[row], sequences[index].params.logprobs)
            sampled[index].append((tokens[row], token_logprobs[row], top))
    return sampled


def sample_tokens(contexts: list[tuple[Sequence, list[int]]], logits: Tensor) -> list[int]:
    """Sample one token per row of logits (N, V); contexts: the row's sequence and the drafts that follow it."""
    if logits.device.type == "mps":  # Apple's GPUs have no float64
        logits = logits.cpu()
    groups: dict[SamplingParams, list[int]] = {}
    for row, (sequence, _) in enumerate(contexts):
        groups.setdefault(sequence.sampling_key, []).append(row)
    uniforms = torch.tensor([sequence.uniform(len(drafts)) for sequence, drafts in contexts], dtype=torch.float64)
    tokens = [0] * len(contexts)
    for params, rows in groups.items():
        in_text = counts = None
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
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


def check_prompt_length(tokens: list[int], config: ThinkerConfig, max_len: float, hint: str = "") -> None:
    """Raise UserError if a prompt is longer than `max_len` or shorter than the model's bidirectional prefix."""
    start, prefix = f"the prompt has {len(tokens)} tokens", config.prefix
    if len(tokens) < prefix:
        raise UserError(f"{start}; the model's bidirectional prefix needs at least {prefix}")
    if len(tokens) > max_len:
        raise UserError(f"{start} and the model's context is {max_len}; shorten it to at most {max_len} tokens{hint}")
