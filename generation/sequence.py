"""State and results of a text that grows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.streaming import TextStreamer
from thinker.model import ThinkerConfig
from thinker.runtime.checks import check_computed
from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.generation.constraint import Constraint
    from thinker.generation.prompt_scores import PromptScores

SampledToken = tuple[int, float, dict[int, float]]  # token, log-probability, top log-probabilities


@dataclass
class Completion:
    """A prompt and its generated text."""

    prompt: str
    text: str = ""  # without the prompt and without the stop string
    token_ids: list[int] = field(default_factory=list, repr=False)  # as sampled, with end of text
    logprobs: list[float] = field(default_factory=list, repr=False)  # of each under the model, nats
    top_logprobs: list[dict[int, float]] = field(default_factory=list, repr=False)  # likeliest
    finish_reason: str = "length"  # it was cut; "stop": it has an end, or matches its constraint
    constraint_met: bool | None = None  # whether the text matches its json_schema or regex
    prompt_tokens: int = 0  # including the BOS token
    n_evicted: int = 0  # positions that had left the window at the end
    stored_bytes: int = 0  # memory of these positions, if they can be retrieved
    n_slides: int = 0  # times that the text continued from its newest half (Sequence.slide())
    drafted: int = 0  # speculated tokens
    accepted: int = 0  # drafted tokens that were accepted


@dataclass(eq=False)  # two requests may be equal in all fields
class Sequence:
    """Tokens, random numbers and limits of one completion."""

    index: int
    completion: Completion
    params: SamplingParams
    tokens: list[int]
    n_remaining: int  # tokens left to sample
    tokenizer: Tokenizer
    n_after_sliding: int = 0  # tokens left to sample beyond the context
    constraint: Constraint | None = None
    forgotten: list[int] = field(default_factory=list)  # tokens before `tokens`, dropped by sliding
    n_shared: int = 0  # prompt tokens whose keys another text of a continuous batch had computed
    prompt_scores: PromptScores | None = None  # which a continuous batch completes, if wanted

    def __post_init__(self) -> None:
        self.drops_space = False
        if self.tokens:
            self.drops_space = self.tokenizer.adds_space_after(self.tokens[-1])
        self.streamer = TextStreamer(self.tokenizer, self.params.stop, self.drops_space)
        # Special tokens have no text that could be a stop string: one that is named ends the text.
        self.end_ids = set(self.tokenizer.eos_ids)
        for name in self.params.stop:
            token = self.tokenizer.special_tokens.get(name)
            if token is not None and not self.tokenizer.token_bytes(token):
                self.end_ids.add(token)
        self.sampling_key = self.params.sampling_key()  # texts with equal keys are sampled together
        self._random = random.Random(self.params.seed)
        self._uniforms: list[float] = []

    @property
    def is_unfiltered(self) -> bool:
        """Whether sampling needs only a temperature and a constraint.

        That is: no filters, no penalties, no top log-probabilities.
        """
        return not (self.params.changes_logits or self.params.logprobs)

    @property
    def is_scoring(self) -> bool:
        """Whether the logits at all positions of the prompt are still needed."""
        return self.prompt_scores is not None and not self.prompt_scores.is_complete

    def uniform(self, offset: int) -> float:
        """The random number in [0, 1) of the token `offset` positions ahead, always the same."""
        index = len(self.completion.token_ids) + offset
        while len(self._uniforms) <= index:
            self._uniforms.append(self._random.random())
        return self._uniforms[index]

    def extend(self, sampled: list[SampledToken]) -> tuple[str, bool]:
        """Add tokens up to the end of the text.

        Returns the newly certain text, and whether the text has ended.
        """
        completion = self.completion
        sampled = self._until_eos(sampled)
        text, n_used = self._feed([token for token, *_ in sampled])
        sampled = sampled[:n_used]
        tokens = [token for token, *_ in sampled]
        logprobs = [logprob for _, logprob, _ in sampled]
        check_computed(logprobs)
        self.tokens += tokens
        completion.token_ids += tokens
        completion.logprobs += logprobs
        if self.params.logprobs:
            completion.top_logprobs += [top for *_, top in sampled]
        self.n_remaining -= n_used
        is_eos = tokens[-1] in self.end_ids
        is_stop = is_eos or self.streamer.stopped
        if self.constraint is not None:
            is_stop |= self._follow_constraint(self.constraint, tokens, is_eos)
        if is_eos or self.n_remaining + self.n_after_sliding == 0:
            text += self.streamer.finish()
        completion.text += text
        if is_stop:
            completion.finish_reason = "stop"
        return text, is_stop or self.n_remaining == 0

    def _until_eos(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """The tokens up to the first that ends the text, which is included."""
        for n, (token, *_) in enumerate(sampled, 1):
            if token in self.end_ids:
                return sampled[:n]
        return sampled

    def _feed(self, tokens: list[int]) -> tuple[str, int]:
        """Decode tokens up to a stop string. Returns the newly certain text and how many it
        took."""
        if not self.params.stop:
            return self.streamer.feed(*tokens), len(tokens)
        text = ""
        for n, token in enumerate(tokens, 1):
            text += self.streamer.feed(token)
            if self.streamer.stopped:
                return text, n
        return text, len(tokens)

    def _follow_constraint(self, constraint: Constraint, tokens: list[int], is_eos: bool) -> bool:
        """Tell the constraint what was sampled.

        Returns whether the text is complete and nothing may follow.
        """
        if not is_eos:
            (token,) = tokens  # the next one depends on it
            constraint.append(token)
            if not constraint.can_continue:
                self.n_remaining = self.n_after_sliding = 0
        is_complete = is_eos or constraint.is_complete
        self.completion.constraint_met = is_complete and not self.streamer.stopped
        return is_complete and not constraint.can_continue

    def penalty_inputs(self, drafts: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
        """Which tokens are in the text with `drafts`, and how often each was generated, (V,)
        both."""
        tokens = torch.tensor(self.forgotten + self.tokens + drafts, device="cpu")
        in_text = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        in_text[tokens] = True
        n_generated = len(drafts) + len(self.completion.token_ids)
        generated = tokens[len(tokens) - n_generated :]
        counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
        return in_text, counts.scatter_add_(0, generated, torch.ones_like(generated))

    def slide(self, context_len: int) -> None:
        """Make the newest half of a full context a new text, which is read from position 0."""
        n_kept = kept_when_sliding(context_len)
        n_before = len(self.tokens) - n_kept
        self.forgotten += self.tokens[:n_before]
        self.tokens = self.tokens[n_before:]
        self.n_remaining = min(self.n_after_sliding, context_len + 1 - n_kept)
        self.n_after_sliding -= self.n_remaining
        self.completion.n_slides += 1


def allowed_tokens(sequences: list[Sequence]) -> Tensor | None:
    """What may follow in each text, (N, V / 32) int32; None if no text has a constraint.

    In a text without a constraint, every token may follow.
    """
    constraints = [sequence.constraint for sequence in sequences]
    known = [constraint.allowed for constraint in constraints if constraint is not None]
    if not known:
        return None
    everything = torch.full_like(known[0], -1)
    masks = []
    for constraint in constraints:
        if constraint is None:
            masks.append(everything)
        else:
            masks.append(constraint.allowed)
    return torch.stack(masks)


def kept_when_sliding(context_len: int) -> int:
    """Number of tokens that are kept when a text slides."""
    return max(1, context_len // 2)


def check_prompt(
    tokens: list[int],
    tokenizer: Tokenizer,
    config: ThinkerConfig,
    max_len: float,
    hint: str = "",
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> None:
    """Raise UserError for a prompt that the model cannot read, or a bias of an unknown token.

    `hint`: how to read a longer prompt, for the message.
    """
    size = f"the prompt has {len(tokens)} tokens"
    if len(tokens) < config.prefix:
        needed = f"the model's bidirectional prefix needs at least {config.prefix}"
        raise UserError(f"{size}; {needed}")
    if not tokens:
        raise UserError(f"{size}; it needs at least 1")
    if len(tokens) > max_len:
        remedy = f"shorten it to at most {max_len} tokens{hint}"
        raise UserError(f"{size}, but the model's context is {max_len}; {remedy}")
    last = tokenizer.vocab_size - 1
    for token, _ in logit_bias:
        if token > last:
            raise UserError(f"logit_bias has the token id {token}; use ids from 0 to {last}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token <= last:
            raise UserError(f"the prompt has the token id {token}; use ids from 0 to {last}")
