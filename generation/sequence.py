"""State and results of a sequence during generation."""

import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.structured_output.constraints import Constraint
from thinker.generation.sampler import SamplingParams
from thinker.generation.streaming import TextStreamer
from thinker.runtime.checks import check_computed

SampledToken = tuple[int, float, dict[int, float]]  # token, log-probability, top log-probabilities


@dataclass
class Completion:
    """A prompt and its generated text."""

    prompt: str
    text: str = ""  # without the prompt and without the stop string
    token_ids: list[int] = field(
        default_factory=list, repr=False
    )  # all sampled tokens, including end of text
    logprobs: list[float] = field(
        default_factory=list, repr=False
    )  # per token under the unmodified model, in nats
    top_logprobs: list[dict[int, float]] = field(
        default_factory=list, repr=False
    )  # most likely tokens, per token
    finish_reason: str = (
        "length"  # "stop": end of text, a stop string, a complete constraint; "length": it was cut
    )
    constraint_met: bool | None = (
        None  # whether the text got to match json_schema or regex as a whole; None: no such
    )
    prompt_tokens: int = 0  # including the BOS token
    n_evicted: int = 0  # positions that had left the window at the end
    stored_bytes: int = 0  # memory of these positions, if they can be retrieved
    n_slides: int = 0  # times that the text continued from its newest half (generation/sliding.py)
    drafted: int = 0  # speculated tokens
    accepted: int = 0  # drafted tokens that were accepted


@dataclass(frozen=True)
class Score:
    """Likelihood of a text under the model, after the BOS token."""

    token_ids: list[int]
    logprobs: list[float]  # of each token given all earlier tokens, in nats
    top_logprobs: list[dict[int, float]]  # of the most likely tokens, per position
    n_bytes: int

    def __repr__(self) -> str:
        bits = f"{self.bits_per_byte:.4f} bits per byte"
        return f"Score({len(self.token_ids):,} tokens, {self.n_bytes:,} bytes: {self.nats:.4f} nats, {bits})"

    @property
    def nats(self) -> float:
        """The negative log-likelihood of the whole text."""
        return math.fsum(-logprob for logprob in self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8; 0 for an empty text."""
        return self.nats / math.log(2) / max(self.n_bytes, 1)


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

    def __post_init__(self) -> None:
        self.streamer = TextStreamer(self.tokenizer, self.params.stop)
        # Parameters that shape the distribution: sequences with equal keys are sampled in one batch.
        unrelated = {
            "seed": 0,
            "max_new_tokens": 1,
            "stop": (),
            "logprobs": 0,
            "json_schema": None,
            "regex": None,
        }
        self.sampling_key = replace(self.params, **unrelated)
        self._random, self._uniforms = random.Random(self.params.seed), []

    @property
    def is_unfiltered(self) -> bool:
        """Whether sampling needs only a temperature and a constraint: no filters, penalties, top log-probabilities."""
        return not (self.params.changes_logits or self.params.logprobs)

    def uniform(self, offset: int) -> float:
        """Return the random number in [0, 1) of the token `offset` positions ahead, the same in every call."""
        index = len(self.completion.token_ids) + offset
        while len(self._uniforms) <= index:
            self._uniforms.append(self._random.random())
        return self._uniforms[index]

    def extend(self, sampled: list[SampledToken]) -> tuple[str, bool]:
        """Add tokens up to the end of the text. Returns the newly certain text, and whether the text has ended."""
        completion, streamer = self.completion, self.streamer
        tokens = [token for token, *_ in sampled]
        n_to_eos = next(
            (n for n, token in enumerate(tokens, 1) if token in self.tokenizer.eos_ids), None
        )
        tokens = tokens[:n_to_eos]
        text, n_used = "", 0
        for part in [[token] for token in tokens] if self.params.stop else [tokens]:
            text, n_used = text + streamer.feed(*part), n_used + len(part)
            if streamer.stopped:
                break
        _, logprobs, top_logprobs = zip(*sampled[:n_used])
        check_computed(logprobs)
        self.tokens += tokens[:n_used]
        completion.token_ids += tokens[:n_used]
        completion.logprobs += logprobs
        if self.params.logprobs:
            completion.top_logprobs += top_logprobs
        self.n_remaining -= n_used
        is_eos = n_used == n_to_eos
        is_stop = is_eos or streamer.stopped
        if self.constraint is not None:
            is_stop |= self._follow_constraint(self.constraint, tokens, is_eos)
        if is_eos or self.n_remaining + self.n_after_sliding == 0:
            text += streamer.finish()
        completion.text += text
        if is_stop:
            completion.finish_reason = "stop"
        return text, is_stop or self.n_remaining == 0

    def _follow_constraint(self, constraint: Constraint, tokens: list[int], is_eos: bool) -> bool:
        """Tell the constraint what was sampled. Returns whether the text is complete and nothing may follow."""
        if not is_eos:
            (token,) = tokens  # the next one depends on it
            constraint.append(token)
            if not constraint.can_continue:
                self.n_remaining = self.n_after_sliding = 0
        is_complete = is_eos or constraint.is_complete
        self.completion.constraint_met = is_complete and not self.streamer.stopped
        return is_complete and not constraint.can_continue

    def penalty_inputs(self, drafts: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return which tokens are in the text with `drafts`, and how often each was generated, (V,) both."""
        tokens = torch.tensor(self.forgotten + self.tokens + drafts, device="cpu")
        in_text = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        in_text[tokens] = True
        generated = tokens[len(tokens) - len(drafts) - len(self.completion.token_ids) :]
        counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
        return in_text, counts.scatter_add_(0, generated, torch.ones_like(generated))
