"""Pure functions from logits to probabilities to tokens."""

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from thinker.features.structured_output.json_schema import canonical_schema
from thinker.runtime.checks import describe
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

_LIMIT = 1e100  # for penalties and biases; prevents overflow in float64
_RANGES = {  # by field of SamplingParams: type, lowest and highest value, range in words
    "max_new_tokens": (Integral, 1, math.inf, "an integer of at least 1"),
    "temperature": (Real, 0, _LIMIT, "0 (greedy) or a number up to 1e100"),
    "top_k": (Integral, 1, math.inf, "an integer of at least 1"),
    "top_p": (Real, math.ulp(0.0), 1, "a number in (0, 1]"),
    "min_p": (Real, 0, 1, "a number in [0, 1]"),
    "repetition_penalty": (Real, 1 / _LIMIT, _LIMIT, "a number from 1e-100 to 1e100 (1: none)"),
    "presence_penalty": (Real, -_LIMIT, _LIMIT, "a number from -1e100 to 1e100 (0: none)"),
    "frequency_penalty": (Real, -_LIMIT, _LIMIT, "a number from -1e100 to 1e100 (0: none)"),
    "logprobs": (Integral, 0, math.inf, "an integer of at least 0"),
    "seed": (Integral, 0, math.inf, "an integer of at least 0"),
}
_ROUNDING = 1e-12  # relative difference below which float64 values count as equal
_TOP_P_CANDIDATES = 1024  # number of tokens that top-p considers first


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Raises UserError for invalid values; stores `logit_bias` and `stop` as tuples."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy, always the most likely token
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the fewest top tokens with at least this total probability
    min_p: float | None = None  # keep tokens with at least this fraction of the highest probability
    repetition_penalty: float = (
        1.0  # above 1: tokens in the text, including the prompt, become less likely
    )
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # subtracted from logits per occurrence in the generated text
    logit_bias: tuple[
        tuple[int, float], ...
    ] = ()  # (token id, number added to its logit); -inf bans the token
    logprobs: int = 0  # number of top log-probabilities to report per position
    seed: int = 0  # row i of a batch is sampled with seed + i, independently of other rows
    stop: tuple[str, ...] = ()  # stop before the first of these strings
    json_schema: str | None = (
        None  # generate JSON valid under this schema: dict, JSON text, or True (any object)
    )
    regex: str | None = None  # generate a text that matches this regular expression as a whole

    def __post_init__(self) -> None:
        for name, (kind, lowest, highest, expected) in _RANGES.items():
            value, is_optional = getattr(self, name), getattr(SamplingParams, name) is None
            if not (_is_number(value, kind, lowest, highest) or (value is None and is_optional)):
                raise UserError(f"{name} is {describe(value)}; use {expected}")
            if value is not None:  # converts NumPy numbers and fractions
                object.__setattr__(self, name, int(value) if kind is Integral else float(value))
        if not isinstance(self.stop, (list, tuple)) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise UserError(f"stop is {describe(self.stop)}; use a list of non-empty strings")
        if self.regex is not None and not (isinstance(self.regex, str) and self.regex):
            raise UserError(f"regex is {describe(self.regex)}; use a non-empty string")
        for name, texts in (("stop", self.stop), ("regex", self.regex or "")):
            if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
                raise UserError(
                    f"{name} contains a lone surrogate, which is not valid text; decode it as UTF-8"
                )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", canonical_schema(self.json_schema))
        if self.json_schema is not None and self.regex is not None:
            raise UserError("json_schema and regex cannot be combined; use only one")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _sorted_pairs(self.logit_bias))

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, a bias or a filter apply, beside the temperature."""
        has_filter = self.top_k is not None or self.top_p not in (None, 1) or bool(self.min_p)
        has_penalty = (
            self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        )
        return bool(has_filter or has_penalty or self.logit_bias)


def _is_number(value: object, kind: type, lowest: float, highest: float) -> bool:
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    number = (
        value.item() if isinstance(value, np.number) else value
    )  # NumPy warns if float32 cannot represent a bound
    return is_kind and lowest <= number <= highest  # False for NaN


def _sorted_pairs(biases: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = sorted(
            (token, bias)
            for token, bias in (biases.items() if isinstance(biases, dict) else biases)
        )
        is_valid = len(dict(pairs)) == len(pairs) and all(
            _is_number(token, Integral, 0, math.inf)
            and (bias == -math.inf or _is_number(bias, Real, -_LIMIT, _LIMIT))
            for token, bias in pairs
        )
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        expected = "use distinct token ids, each with a number up to ±1e100 or -inf"
        raise UserError(f"logit_bias is {describe(biases)}; {expected}")
    return tuple((int(token), float(bias)) for token, bias in pairs)


def distribution(
    logits: Tensor,
    params: SamplingParams,
    in_text: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return sampling probabilities, (B, V) fp32; at temperature 0, 1 for the most likely token.

    In this order: repetition penalty (Keskar et al. 2019, arXiv:1909.05858: divides positive logits of tokens in the
    text by the penalty and multiplies negative ones), presence penalty, frequency penalty, logit bias, temperature,
    top-k, top-p (Holtzman et al. 2020, arXiv:1904.09751), min-p (Nguyen et al. 2024, arXiv:2407.01082). Each filter
    renormalizes its input and keeps the most likely token. Ties go to the lower token id. A row does not depend on
    other rows; on a CPU it is bitwise the same in any batch.

    `logits`: (B, V), below +inf and not all -inf in a row; -inf gives probability 0. `in_text`: (B, V) boolean, True
    for tokens of the row's prompt and generated text. `counts`: (B, V), how many times each token was generated in the
    row. Raises UserError if the logit bias bans all tokens.
    """
    scores = _adjust(logits, params, in_text, counts).double()
    if params.temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)  # ties: the lowest id
        return torch.zeros_like(scores, dtype=torch.float32).scatter_(1, best, 1.0)
    scores = scores / max(params.temperature, 1 / _LIMIT)
    probs = scores.softmax(dim=-1)
    has_rank_filter = params.top_k is not None or params.top_p not in (None, 1)
    if has_rank_filter:
        probs = _filter_ranked(scores, probs, params)
    elif not params.min_p:
        return probs.float()
    if params.min_p:  # relative to the most likely token, so no renormalization is needed
        probs = probs.masked_fill(
            probs < params.min_p * (1 - _ROUNDING) * probs.amax(dim=-1, keepdim=True), 0
        )
    total = probs.cumsum(dim=-1)[:, -1:]  # unlike cumsum(), sum() may depend on the batch size
    return (probs / total).float()


def _filter_ranked(scores: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p, to scores and probabilities (B, V); other tokens get probability 0."""
    top_p = 1.0 if params.top_p is None else params.top_p
    if params.top_k is not None:
        tokens = _rank(scores, min(params.top_k, scores.shape[1]))  # (B, k)
        ranked = scores.gather(1, tokens).softmax(dim=-1)
    else:
        tokens = _rank(scores, scores.shape[1] if scores.is_cuda else _TOP_P_CANDIDATES)
        ranked = probs.gather(1, tokens)
        if tokens.shape[1] < scores.shape[1] and (ranked.cumsum(dim=-1)[:, -1] < top_p).any():
            tokens = _rank(scores, scores.shape[1])  # the candidates were not enough
            ranked = probs.gather(1, tokens)
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= top_p * (1 - _ROUNDING), 0)
    return torch.zeros_like(scores).scatter_(1, tokens, ranked)


def _rank(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest-scoring tokens, (B, count), best first, ties by id; at most V."""
    V = scores.shape[1]
    if 4 * count >= V:  # sorting a large vocabulary would dominate sampling time
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    best, tokens = scores.topk(count)
    is_above, is_tied = scores > best[:, -1:], scores == best[:, -1:]  # (B, V)
    if (
        scores.is_cuda or (is_above | is_tied).sum() > tokens.numel()
    ):  # on a GPU, do not synchronize with the host
        n_missing = count - is_above.sum(dim=-1, keepdim=True)
        is_kept = is_above | (is_tied & (is_tied.cumsum(dim=-1) <= n_missing))
        ids = torch.arange(V, device=scores.device)
        tokens = torch.where(is_kept, V - ids, 0).topk(count).indices
    tokens = tokens.sort(dim=-1).values
    order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices
    return tokens.gather(1, order)


def _adjust(
    scores: Tensor, params: SamplingParams, in_text: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Apply penalties and bias to scores (B, V), in float64 if there are any. Arguments as in distribution()."""
    if params.logit_bias or in_text is not None or counts is not None:
        scores = scores.double()
    if in_text is not None and params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        scores = torch.where(
            in_text, torch.where(scores > 0, scores / penalty, scores * penalty), scores
        )
    if counts is not None and params.presence_penalty:
        scores = scores - params.presence_penalty * (counts > 0).double()
    if counts is not None and params.frequency_penalty:
        scores = scores - params.frequency_penalty * counts.double()
    if params.logit_bias:
        scores = scores + _bias_vector(params.logit_bias, scores.shape[1], scores.device)
    return scores


@lru_cache(maxsize=8)
def _bias_vector(
    logit_bias: tuple[tuple[int, float], ...], vocab_size: int, device: torch.device
) -> Tensor:
    """Return the logit bias of every token, (V,) float64. Raises UserError if it bans all tokens."""
    tokens, biases = zip(*logit_bias)
    if len(tokens) == vocab_size and max(biases) == -math.inf:
        raise UserError("logit_bias bans every token; leave at least one")
    vector = torch.zeros(vocab_size, dtype=torch.float64, device="cpu")
    vector[list(tokens)] = torch.tensor(biases, dtype=torch.float64, device="cpu")
    return to_device(vector, device)


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    in_text: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Sample one token per row, (B,) int64; arguments as in distribution() and sample_from_probs()."""
    if params.temperature == 0:
        return _adjust(logits, params, in_text, counts).argmax(dim=-1)  # ties: the lowest id
    return sample_from_probs(distribution(logits, params, in_text, counts), uniforms)


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling: probs (B, V), uniforms (B,) in [0, 1) -> (B,) int64, never of probability 0."""
    cumulative = probs.double().cumsum(dim=-1)  # (B, V)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(
        cumulative, uniforms.to(probs.device)[:, None].double() * total, right=True
    )  # (B, 1)
    return torch.minimum(tokens, (cumulative < total).sum(dim=-1, keepdim=True))[
        :, 0
    ]  # rounding may exceed V - 1
