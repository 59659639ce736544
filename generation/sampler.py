"""From logits to the distribution that is drawn from, to a token: pure functions, used by everything that samples."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinker.runtime.errors import UserError

_LARGEST, _SMALLEST = sys.float_info.max, math.ulp(0.0)  # the ends of the finite floats above 0
_NUMBERS = {  # field of SamplingParams: its type, the lowest and the highest value, both in words
    "max_new_tokens": (int, 1, math.inf, "a whole number of at least 1"),
    "temperature": (float, 0, _LARGEST, "0 (greedy) or a finite number above"),
    "top_k": (int, 1, math.inf, "a whole number of at least 1"),
    "top_p": (float, _SMALLEST, 1, "a number in (0, 1]"),
    "min_p": (float, 0, 1, "a number in [0, 1]"),
    "repetition_penalty": (float, _SMALLEST, _LARGEST, "a finite number above 0 (1: none)"),
    "presence_penalty": (float, -_LARGEST, _LARGEST, "a finite number (0: none)"),
    "frequency_penalty": (float, -_LARGEST, _LARGEST, "a finite number (0: none)"),
    "logprobs": (int, 0, math.inf, "a whole number of at least 0"),
    "seed": (int, 0, math.inf, "a whole number of at least 0"),
}
_ROUNDING = 1e-12  # a share: two sums or exponentials in float64 that are nearer to each other than this are equal
_FEW = 1024  # tokens among which top-p is looked for first
_BOUND = 1e100  # no penalty goes beyond, nor a temperature below 1 / _BOUND: then nothing leads out of float64


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `logit_bias` may be given as a dict and `stop` as a list; both are kept as tuples.

    Raises UserError where a value is of the wrong type or out of its range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens that together have at least this probability
    min_p: float | None = None  # keep tokens of at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # above 1: tokens already in the text, the prompt included, become less likely
    presence_penalty: float = 0.0  # taken once from the logit of a token that was generated before
    frequency_penalty: float = 0.0  # taken from a token's logit for every time it was generated before
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); -inf bans the token
    logprobs: int = 0  # how many of the likeliest tokens' log-probabilities to report beside each drawn token
    seed: int = 0  # row i of a batch draws by seed + i, whatever its neighbours are
    stop: tuple[str, ...] = ()  # end before any of these strings appears

    def __post_init__(self) -> None:
        for name, (kind, lowest, highest, right) in _NUMBERS.items():
            value, may_be_none = getattr(self, name), getattr(SamplingParams, name) is None
            if not (_is_number(value, kind, lowest, highest) or (value is None and may_be_none)):
                raise UserError(f"{name} is {value!r}; it must be {right}")
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop is {self.stop!r}; it must be a list of strings")
        if "" in self.stop:
            raise UserError(f"stop is {self.stop!r}; an empty string would stop before anything is said")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _sorted_pairs(self.logit_bias))


def _is_number(value: object, kind: type, lowest: float, highest: float) -> bool:
    kinds = (int, float) if kind is float else int
    return isinstance(value, kinds) and not isinstance(value, bool) and lowest <= value <= highest  # NaN is in no range


def _sorted_pairs(biases: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, bias) for token, bias in (biases.items() if isinstance(biases, dict) else biases)]
    except (TypeError, ValueError):
        raise UserError(f"logit_bias is {biases!r}; it must be a dict from token ids to numbers") from None
    for token, bias in pairs:
        if not _is_number(token, int, 0, math.inf):
            raise UserError(f"logit_bias has the token id {token!r}; it must be a whole number of at least 0")
        if not _is_number(bias, float, -_LARGEST, _LARGEST) and bias != -math.inf:
            raise UserError(f"logit_bias of token {token} is {bias!r}; it must be a finite number, or -inf to ban it")
    pairs = sorted((token, float(bias)) for token, bias in pairs)
    for (token, _), (following, _) in pairwise(pairs):
        if token == following:
            raise UserError(f"logit_bias has the token id {token} more than once; it must have one bias a token")
    return tuple(pairs)


def distribution(
    logits: Tensor, params: SamplingParams, seen: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The probabilities that tokens are drawn with.

    In this order: repetition penalty (Keskar et al. 2019, arXiv:1909.05858: the logit of a seen token is divided by
    the penalty if positive, else multiplied), presence penalty, frequency penalty, logit bias, temperature, top-k,
    top-p (Holtzman et al. 2020, arXiv:1904.09751), min-p (Nguyen et al. 2024, arXiv:2407.01082). Each filter looks at
    what the one before it left, renormalised. Among equal logits the lower token id comes first, also where top-k or
    top-p cuts between them. The likeliest token always stays. A logit of -inf leads to a probability of 0, whatever
    the parameters are. A row's result does not depend on the other rows: on a CPU it is the same to the last bit.

    Args:
        logits: (B, V), below +inf and not all -inf in a row.
        params: How to sample.
        seen: (B, V) boolean, True for tokens that are in the row's text, prompt or generated. None: none are.
        counts: (B, V), how many times each token was generated in the row so far. None: never.

    Returns: (B, V) fp32; rows sum to 1. At temperature 0, 1 for the likeliest token and 0 for all others.

    Raises: UserError where the logit bias has a token id of V or above, or leaves no token to draw.
    """
    if logits.device.type == "mps":  # Apple's GPUs have no float64
        seen, counts = (tensor if tensor is None else tensor.cpu() for tensor in (seen, counts))
        return distribution(logits.cpu(), params, seen, counts).to(logits.device)
    scores = _adjust(logits, params, seen, counts).double()
    if params.temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)  # the first among equals
        return torch.zeros_like(scores, dtype=torch.float32).scatter_(1, best, 1.0)
    scores = scores / max(params.temperature, 1 / _BOUND)
    if params.top_k is None and params.top_p in (None, 1) and not params.min_p:
        return scores.softmax(dim=-1).float()
    probs = scores.softmax(dim=-1)
    if params.top_k is not None or params.top_p not in (None, 1):
        probs = _filter_ranked(scores, probs, params)
    if params.min_p:  # a share of the likeliest, so that it needs no renormalising before it
        probs = probs.masked_fill(probs < params.min_p * (1 - _ROUNDING) * probs.amax(dim=-1, keepdim=True), 0)
    total = probs.cumsum(dim=-1)[:, -1:]  # sum() may add a lone row up in another order than the same row in a batch
    return (probs / total).float()


def _filter_ranked(scores: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p, on scores and their probabilities (B, V); what they cut has probability 0."""
    top_p = 1.0 if params.top_p is None else params.top_p
    if params.top_k is not None:
        tokens = _rank(scores, min(params.top_k, scores.shape[1]))  # (B, k)
        ranked = scores.gather(1, tokens).softmax(dim=-1)
    else:
        tokens = _rank(scores, _FEW)
        ranked = probs.gather(1, tokens)
        if tokens.shape[1] < scores.shape[1] and (ranked.cumsum(dim=-1)[:, -1] < top_p).any():
            tokens = _rank(scores, scores.shape[1])  # a few were not enough
            ranked = probs.gather(1, tokens)
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= top_p * (1 - _ROUNDING), 0)
    return torch.zeros_like(scores).scatter_(1, tokens, ranked)


def _rank(scores: Tensor, count: int) -> Tensor:
    """The `count` tokens of highest score, (B, count), the highest first, of equals the lower id; all if V is less."""
    if 4 * count < scores.shape[1]:  # sorting a whole vocabulary takes longer than all else that is done here
        best, tokens = scores.topk(count)
        if ((scores >= best[:, -1:]).sum(dim=-1) == count).all():  # no equals on both sides of the border
            tokens = tokens.sort(dim=-1).values
            order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices
            return tokens.gather(1, order)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _adjust(scores: Tensor, params: SamplingParams, seen: Tensor | None, counts: Tensor | None) -> Tensor:
    """Penalties and bias on scores (B, V), in float64 where there are any; the others as for distribution()."""
    if params.logit_bias or seen is not None or counts is not None:
        scores = scores.double()
    if seen is not None and params.repetition_penalty != 1:
        penalty = min(max(params.repetition_penalty, 1 / _BOUND), _BOUND)
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if counts is not None and params.presence_penalty:
        scores = scores - _bounded(params.presence_penalty) * (counts > 0).double()
    if counts is not None and params.frequency_penalty:
        scores = scores - _bounded(params.frequency_penalty) * counts.double()
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias)
        if tokens[-1] >= scores.shape[1]:
            raise UserError(f"logit_bias has the token id {tokens[-1]}; ids of this model are below {scores.shape[1]}")
        bias = torch.tensor([b if b == -math.inf else _bounded(b) for b in biases], dtype=torch.float64)
        bias = torch.zeros(scores.shape[1], dtype=torch.float64).index_copy_(0, torch.tensor(tokens), bias)  # (V,)
        scores = scores + bias.to(scores.device)
        if (scores.amax(dim=-1) == -torch.inf).any():
            raise UserError("logit_bias bans every token; it must leave at least one to draw")
    return scores


def _bounded(number: float) -> float:
    return min(max(number, -_BOUND), _BOUND)


def sample(
    logits: Tensor, params: SamplingParams, uniforms: Tensor, seen: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """draw(distribution(logits, params, seen, counts), uniforms), (B,) int64; without the detour where it is greedy."""
    if params.temperature == 0 and logits.device.type != "mps":
        return _adjust(logits, params, seen, counts).argmax(dim=-1)  # the first among equals
    return draw(distribution(logits, params, seen, counts), uniforms)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row, by inverting the cumulative distribution: probs (B, V), uniforms (B,) in [0, 1) -> (B,) int64.

    A token of probability 0 is never drawn.
    """
    device = probs.device
    if device.type == "mps":
        probs = probs.cpu()  # Apple's GPUs have no float64
    uniforms = uniforms.to(probs.device)
    cumulative = probs.double().cumsum(dim=-1)  # (B, V)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniforms[:, None].double() * total, right=True)  # (B, 1)
    tokens = torch.minimum(tokens, (cumulative < total).sum(dim=-1, keepdim=True))  # rounding may reach the total
    return tokens[:, 0].to(device)
