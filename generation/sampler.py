"""Logits to sampling probabilities to tokens: pure functions, used by everything that samples."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinker.runtime.errors import UserError

_MAX_FLOAT, _MIN_FLOAT = sys.float_info.max, math.ulp(0.0)  # the largest and the smallest float above 0
_RANGES = {  # field of SamplingParams: type, lowest and highest value, and the range in words
    "max_new_tokens": (int, 1, math.inf, "a whole number of at least 1"),
    "temperature": (float, 0, _MAX_FLOAT, "0 (greedy) or a finite number above"),
    "top_k": (int, 1, math.inf, "a whole number of at least 1"),
    "top_p": (float, _MIN_FLOAT, 1, "a number in (0, 1]"),
    "min_p": (float, 0, 1, "a number in [0, 1]"),
    "repetition_penalty": (float, _MIN_FLOAT, _MAX_FLOAT, "a finite number above 0 (1: none)"),
    "presence_penalty": (float, -_MAX_FLOAT, _MAX_FLOAT, "a finite number (0: none)"),
    "frequency_penalty": (float, -_MAX_FLOAT, _MAX_FLOAT, "a finite number (0: none)"),
    "logprobs": (int, 0, math.inf, "a whole number of at least 0"),
    "seed": (int, 0, math.inf, "a whole number of at least 0"),
}
_ROUNDING = 1e-12  # relative: sums and exponentials in float64 that are closer than this count as equal
_TOP_P_CANDIDATES = 1024  # top-p first tries to find its tokens among this many
_LIMIT = 1e100  # penalties are clamped to it and temperatures to 1 / _LIMIT, so that float64 never overflows


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `logit_bias` may also be a dict and `stop` a list; they are stored as tuples.

    Raises UserError if a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy, always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens whose probabilities add up to at least this
    min_p: float | None = None  # keep tokens with at least this fraction of the likeliest token's probability
    repetition_penalty: float = 1.0  # above 1: tokens in the text, including the prompt, become less likely
    presence_penalty: float = 0.0  # subtracted from the logit of every token generated so far
    frequency_penalty: float = 0.0  # subtracted from a token's logit once per time it was generated
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit); -inf bans the token
    logprobs: int = 0  # also report the log-probabilities of this many likeliest tokens per position
    seed: int = 0  # row i of a batch is sampled with seed + i, independently of the other rows
    stop: tuple[str, ...] = ()  # end before the first of these strings

    def __post_init__(self) -> None:
        for name, (kind, lowest, highest, expected) in _RANGES.items():
            value, is_optional = getattr(self, name), getattr(SamplingParams, name) is None
            if not (_is_number(value, kind, lowest, highest) or (value is None and is_optional)):
                raise UserError(f"{name} is {value!r}; it must be {expected}")
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop is {self.stop!r}; it must be a list of strings")
        if "" in self.stop:
            raise UserError(f"stop is {self.stop!r}; an empty string would stop before the first token")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _sorted_pairs(self.logit_bias))


def _is_number(value: object, kind: type, lowest: float, highest: float) -> bool:
    kinds = (int, float) if kind is float else int
    return (
        isinstance(value, kinds) and not isinstance(value, bool) and lowest <= value <= highest
    )  # NaN fails both comparisons


def _sorted_pairs(biases: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, bias) for token, bias in (biases.items() if isinstance(biases, dict) else biases)]
    except (TypeError, ValueError):
        raise UserError(f"logit_bias is {biases!r}; it must be a dict from token ids to numbers") from None
    for token, bias in pairs:
        if not _is_number(token, int, 0, math.inf):
            raise UserError(f"logit_bias has the token id {token!r}; it must be a whole number of at least 0")
        if not _is_number(bias, float, -_MAX_FLOAT, _MAX_FLOAT) and bias != -math.inf:
            raise UserError(f"logit_bias of token {token} is {bias!r}; it must be a finite number, or -inf to ban it")
    pairs = sorted((token, float(bias)) for token, bias in pairs)
    for (token, _), (following, _) in pairwise(pairs):
        if token == following:
            raise UserError(f"logit_bias has the token id {token} more than once; it must have one bias per token")
    return tuple(pairs)


def distribution(
    logits: Tensor, params: SamplingParams, in_text: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The probabilities that tokens are sampled with.

    In this order: repetition penalty (Keskar et al. 2019, arXiv:1909.05858: divides positive logits of tokens in the
    text by the penalty and multiplies negative ones), presence penalty, frequency penalty, logit bias, temperature,
    top-k, top-p (Holtzman et al. 2020, arXiv:1904.09751), min-p (Nguyen et al. 2024, arXiv:2407.01082). Each filter
    works on the renormalized output of the one before it. Ties go to the lower token id, also at the cut-off of top-k
    and top-p. The likeliest token always stays. A logit of -inf always gives probability 0. A row's result does not
    depend on the other rows: on a CPU it is bitwise the same.

    Args:
        logits: (B, V), below +inf and not all -inf in a row.
        in_text: (B, V) boolean, True for tokens of the row's prompt and generated text; None if there are none.
        counts: (B, V), how many times each token was generated in the row; None if none was.

    Returns:
        (B, V) fp32; rows sum to 1. At temperature 0, 1 for the likeliest token and 0 for all others.

    Raises:
        UserError: if the logit bias names a token id of V or above, or bans every token.
    """
    if logits.device.type == "mps":  # Apple's GPUs have no float64
        in_text, counts = (tensor if tensor is None else tensor.cpu() for tensor in (in_text, counts))
        return distribution(logits.cpu(), params, in_text, counts).to(logits.device)
    scores = _adjust(logits, params, in_text, counts).double()
    if params.temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)  # ties: the lowest id
        return torch.zeros_like(scores, dtype=torch.float32).scatter_(1, best, 1.0)
    scores = scores / max(params.temperature, 1 / _LIMIT)
    probs = scores.softmax(dim=-1)
    has_rank_filter = params.top_k is not None or params.top_p not in (None, 1)
    if not has_rank_filter and not params.min_p:
        return probs.float()
    if has_rank_filter:
        probs = _filter_ranked(scores, probs, params)
    if params.min_p:  # relative to the likeliest token, so the probabilities need not sum to 1 here
        probs = probs.masked_fill(probs < params.min_p * (1 - _ROUNDING) * probs.amax(dim=-1, keepdim=True), 0)
    total = probs.cumsum(dim=-1)[:, -1:]  # sum() may add up a single row in another order than the same row of a batch
    return (probs / total).float()


def _filter_ranked(scores: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p, to scores and their probabilities (B, V); the other tokens get probability 0."""
    top_p = 1.0 if params.top_p is None else params.top_p
    if params.top_k is not None:
        tokens = _rank(scores, min(params.top_k, scores.shape[1]))  # (B, k)
        ranked = scores.gather(1, tokens).softmax(dim=-1)
    else:
        tokens = _rank(scores, _TOP_P_CANDIDATES)
        ranked = probs.gather(1, tokens)
        if tokens.shape[1] < scores.shape[1] and (ranked.cumsum(dim=-1)[:, -1] < top_p).any():
            tokens = _rank(scores, scores.shape[1])  # the candidates were not enough
            ranked = probs.gather(1, tokens)
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= top_p * (1 - _ROUNDING), 0)
    return torch.zeros_like(scores).scatter_(1, tokens, ranked)


def _rank(scores: Tensor, count: int) -> Tensor:
    """The `count` tokens of highest score, (B, count), best first, ties by id; all V tokens if V is smaller."""
    if 4 * count < scores.shape[1]:  # sorting a large vocabulary would dominate the time of sampling
        best, tokens = scores.topk(count)
        if ((scores >= best[:, -1:]).sum(dim=-1) == count).all():  # no tie across the cut-off
            tokens = tokens.sort(dim=-1).values
            order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices
            return tokens.gather(1, order)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _adjust(scores: Tensor, params: SamplingParams, in_text: Tensor | None, counts: Tensor | None) -> Tensor:
    """Apply penalties and bias to scores (B, V), in float64 if there are any; arguments as for distribution()."""
    if params.logit_bias or in_text is not None or counts is not None:
        scores = scores.double()
    if in_text is not None and params.repetition_penalty != 1:
        penalty = min(max(params.repetition_penalty, 1 / _LIMIT), _LIMIT)
        scores = torch.where(in_text, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if counts is not None and params.presence_penalty:
        scores = scores - _clamp(params.presence_penalty) * (counts > 0).double()
    if counts is not None and params.frequency_penalty:
        scores = scores - _clamp(params.frequency_penalty) * counts.double()
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias)
        if tokens[-1] >= scores.shape[1]:
            raise UserError(f"logit_bias has the token id {tokens[-1]}; ids of this model are below {scores.shape[1]}")
        bias = torch.tensor([b if b == -math.inf else _clamp(b) for b in biases], dtype=torch.float64)
        bias = torch.zeros(scores.shape[1], dtype=torch.float64).index_copy_(0, torch.tensor(tokens), bias)  # (V,)
        scores = scores + bias.to(scores.device)
        if (scores.amax(dim=-1) == -torch.inf).any():
            raise UserError("logit_bias bans every token; it must leave at least one")
    return scores


def _clamp(number: float) -> float:
    return min(max(number, -_LIMIT), _LIMIT)


def sample(
    logits: Tensor, params: SamplingParams, uniforms: Tensor, in_text: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Sample one token per row, (B,) int64; arguments as for distribution() and sample_from_probs()."""
    if params.temperature == 0 and logits.device.type != "mps":
        return _adjust(logits, params, in_text, counts).argmax(dim=-1)  # ties: the lowest id
    return sample_from_probs(distribution(logits, params, in_text, counts), uniforms)


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling, one token per row: probs (B, V), uniforms (B,) in [0, 1) -> (B,) int64.

    A token of probability 0 is never sampled.
    """
    device = probs.device
    if device.type == "mps":
        probs = probs.cpu()  # Apple's GPUs have no float64
    uniforms = uniforms.to(probs.device)
    cumulative = probs.double().cumsum(dim=-1)  # (B, V)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniforms[:, None].double() * total, right=True)  # (B, 1)
    tokens = torch.minimum(tokens, (cumulative < total).sum(dim=-1, keepdim=True))  # rounding may give an id beyond
    return tokens[:, 0].to(device)
