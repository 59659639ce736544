"""SamplingParams: how to choose tokens, and when to stop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from thinker.runtime.checks import describe
from thinker.runtime.errors import UserError

LIMIT = 1e100  # for penalties, biases and divisors; prevents overflow in float64
# By field: its type, lowest and highest value, and the range in words.
RANGES = {
    "max_new_tokens": (Integral, 1, math.inf, "an integer of at least 1"),
    "temperature": (Real, 0, LIMIT, "0 (greedy) or a number up to 1e100"),
    "top_k": (Integral, 1, math.inf, "an integer of at least 1"),
    "top_p": (Real, math.ulp(0.0), 1, "a number in (0, 1]"),
    "min_p": (Real, 0, 1, "a number in [0, 1]"),
    "repetition_penalty": (Real, 1 / LIMIT, LIMIT, "a number from 1e-100 to 1e100 (1: none)"),
    "presence_penalty": (Real, -LIMIT, LIMIT, "a number from -1e100 to 1e100 (0: none)"),
    "frequency_penalty": (Real, -LIMIT, LIMIT, "a number from -1e100 to 1e100 (0: none)"),
    "logprobs": (Integral, 0, math.inf, "an integer of at least 0"),
    "seed": (Integral, 0, math.inf, "an integer of at least 0"),
}
# Fields that do not change the probabilities of the next token.
NOT_IN_KEY = ("max_new_tokens", "logprobs", "seed", "stop", "json_schema", "regex")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Raises UserError for invalid values.

    `logit_bias` and `stop` are stored as tuples.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy, always the most likely token; at least 1e-100 otherwise
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the fewest top tokens with at least this total probability
    min_p: float | None = None  # keep tokens with at least this fraction of the highest probability
    repetition_penalty: float = 1.0  # above 1: tokens of the text and the prompt get less likely
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # subtracted from logits per occurrence in the generated text
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what to add; -inf bans the token
    logprobs: int = 0  # number of top log-probabilities to report per position
    seed: int = 0  # row i of a batch is sampled with seed + i, independently of other rows
    stop: tuple[str, ...] = ()  # stop before the first of these strings
    json_schema: str | None = None  # generate such JSON: a dict, JSON text, or True (any object)
    regex: str | None = None  # generate a text that matches this regular expression as a whole

    def __post_init__(self) -> None:
        for name in RANGES:
            self._check_number(name)
        is_list = isinstance(self.stop, (list, tuple))
        if not is_list or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop is {describe(self.stop)}; use a list of non-empty strings")
        if self.regex is not None and not (isinstance(self.regex, str) and self.regex):
            raise UserError(f"regex is {describe(self.regex)}; use a non-empty string")
        check_surrogates("stop", self.stop)
        check_surrogates("regex", [self.regex or ""])
        if self.json_schema is not None or self.regex is not None:
            self._check_constraint()
        if self.temperature > 0:
            # Every sampler divides by it. Below 1 / LIMIT, all are greedy except for equal logits.
            self._set("temperature", max(self.temperature, 1 / LIMIT))
        self._set("stop", tuple(self.stop))
        self._set("logit_bias", _sorted_pairs(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    def _check_number(self, name: str) -> None:
        """Check a field, and turn numbers of NumPy and fractions into int and float."""
        kind, lowest, highest, expected = RANGES[name]
        value = getattr(self, name)
        is_optional = getattr(SamplingParams, name) is None
        if value is None and is_optional:
            return
        if not _is_number(value, kind, lowest, highest):
            raise UserError(f"{name} is {describe(value)}; use {expected}")
        convert = int if kind is Integral else float
        self._set(name, convert(value))

    def _check_constraint(self) -> None:
        from thinker.generation.constraint import constraint_source

        source = constraint_source()
        if self.json_schema is not None:
            self._set("json_schema", source.canonical_schema(self.json_schema))
        if self.json_schema is not None and self.regex is not None:
            raise UserError("json_schema and regex cannot be combined; use only one")

    def with_seed(self, seed: int) -> "SamplingParams":
        """A copy with another seed. It is fast, as the other fields were checked before."""
        changed = self._copy()
        changed._set("seed", seed)
        changed._check_number("seed")
        return changed

    def sampling_key(self) -> "SamplingParams":
        """A copy with defaults for the fields that do not change the probabilities of a token."""
        changed = self._copy()
        for name in NOT_IN_KEY:
            changed._set(name, getattr(SamplingParams, name))
        return changed

    def _copy(self) -> "SamplingParams":
        """A copy without checking the fields again."""
        new = object.__new__(SamplingParams)
        vars(new).update(vars(self))
        return new

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the text so far beyond what the model computes."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, a bias or a filter apply, beside the temperature."""
        has_filter = self.top_k is not None or self.top_p not in (None, 1) or bool(self.min_p)
        return has_filter or self.has_penalties or bool(self.logit_bias)


def params_per_prompt(
    params: SamplingParams | list[SamplingParams] | None, n_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt; with one for all, prompt i gets seed + i. Raises UserError."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params.with_seed(params.seed + index) for index in range(n_prompts)]
    is_list = isinstance(params, (list, tuple))
    if not is_list or not all(isinstance(one, SamplingParams) for one in params):
        kind = type(params).__name__
        raise UserError(f"params is a {kind}; pass a SamplingParams or a list of SamplingParams")
    if len(params) != n_prompts:
        counts = f"params has {len(params)} elements for {n_prompts} prompts"
        raise UserError(f"{counts}; pass one per prompt or only one")
    return list(params)


def check_surrogates(name: str, texts: Iterable[str]) -> None:
    """Raise UserError if a text has lone surrogates: bytes that were not UTF-8."""
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            problem = "contains a lone surrogate, which is not valid text"
            raise UserError(f"{name} {problem}; decode it as UTF-8")


def check_text(text: object, name: str) -> str:
    """Return a text unchanged. Raises UserError unless it is a valid Unicode string."""
    if not isinstance(text, str):
        raise UserError(f"{name} is a {type(text).__name__}; pass a str")
    check_surrogates(name, [text])
    return text


def _is_number(value: Any, kind: type, lowest: float, highest: float) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    if isinstance(value, np.number):  # NumPy warns if float32 cannot represent a bound
        value = value.item()
    return lowest <= value <= highest  # False for NaN


def _sorted_pairs(biases: Any) -> tuple[tuple[int, float], ...]:
    """A logit bias as pairs in the order of the tokens. Raises UserError."""
    items = biases.items() if isinstance(biases, dict) else biases
    try:
        pairs = sorted((token, bias) for token, bias in items)
        is_valid = len(dict(pairs)) == len(pairs) and all(_is_bias(*pair) for pair in pairs)
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        expected = "use distinct token ids, each with a number up to ±1e100 or -inf"
        raise UserError(f"logit_bias is {describe(biases)}; {expected}")
    return tuple((int(token), float(bias)) for token, bias in pairs)


def _is_bias(token: Any, bias: Any) -> bool:
    is_allowed = bias == -math.inf or _is_number(bias, Real, -LIMIT, LIMIT)
    return _is_number(token, Integral, 0, math.inf) and is_allowed
