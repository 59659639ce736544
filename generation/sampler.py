"""From logits to tokens: pure functions, and the sampling of a batch of texts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinker.generation.ranking import rank, top_tokens
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import SampledToken, Sequence, allowed_tokens
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

ROUNDING = 1e-12  # relative difference below which float64 values count as equal
TOP_P_CANDIDATES = 1024  # number of tokens that top-p considers first


def distribution(
    logits: Tensor,
    params: SamplingParams,
    in_text: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Sampling probabilities, (B, V) fp32; at temperature 0, 1 for the most likely token.

    In this order: repetition penalty (Keskar et al. 2019, arXiv:1909.05858: divides positive logits
    of tokens in the text by the penalty and multiplies negative ones), presence penalty, frequency
    penalty, logit bias, temperature, top-k, top-p (Holtzman et al. 2020, arXiv:1904.09751), min-p
    (Nguyen et al. 2024, arXiv:2407.01082). Each filter renormalizes its input and keeps the most
    likely token. Ties go to the lower token id. A row does not depend on other rows; on a CPU it is
    bitwise the same in any batch.

    Args:
        logits: (B, V), below +inf and not all -inf in a row; -inf gives probability 0.
        in_text: (B, V) boolean, True for tokens of the row's prompt and generated text.
        counts: (B, V), how many times each token was generated in the row.

    Raises UserError if the logit bias bans all tokens.
    """
    scores = _adjust(logits, params, in_text, counts).double()
    if params.temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)  # ties: the lowest id
        return torch.zeros_like(scores, dtype=torch.float32).scatter_(1, best, 1.0)
    scores = scores / params.temperature
    probs = scores.softmax(dim=-1)
    has_rank_filter = params.top_k is not None or params.top_p not in (None, 1)
    if has_rank_filter:
        probs = _filter_ranked(scores, probs, params)
    elif not params.min_p:
        return probs.float()
    if params.min_p:  # relative to the most likely token, so no renormalization is needed
        lowest = params.min_p * (1 - ROUNDING) * probs.amax(dim=-1, keepdim=True)  # (B, 1)
        probs = probs.masked_fill(probs < lowest, 0)
    total = probs.cumsum(dim=-1)[:, -1:]  # unlike cumsum(), sum() may depend on the batch size
    return (probs / total).float()


def _filter_ranked(scores: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p, to scores and probabilities (B, V); others get probability 0."""
    V = scores.shape[1]
    top_p = 1.0 if params.top_p is None else params.top_p
    if params.top_k is not None:
        tokens = rank(scores, min(params.top_k, V))  # (B, k)
        ranked = scores.gather(1, tokens).softmax(dim=-1)
    else:
        n_candidates = V if scores.is_cuda else TOP_P_CANDIDATES
        tokens = rank(scores, n_candidates)
        ranked = probs.gather(1, tokens)
        if tokens.shape[1] < V and (ranked.cumsum(dim=-1)[:, -1] < top_p).any():
            tokens = rank(scores, V)  # the candidates were not enough
            ranked = probs.gather(1, tokens)
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(before >= top_p * (1 - ROUNDING), 0)
    return torch.zeros_like(scores).scatter_(1, tokens, ranked)


def _adjust(
    scores: Tensor, params: SamplingParams, in_text: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Apply penalties and bias to scores (B, V), in float64 if there are any.

    Arguments as in distribution().
    """
    if params.logit_bias or in_text is not None or counts is not None:
        scores = scores.double()
    if in_text is not None and params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        penalized = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(in_text, penalized, scores)
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
    """The logit bias of every token, (V,) float64. Raises UserError if it bans all tokens."""
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
    """Sample one token per row, (B,) int64.

    Arguments as in distribution() and sample_from_probs().
    """
    if params.temperature == 0:
        return _adjust(logits, params, in_text, counts).argmax(dim=-1)  # ties: the lowest id
    return sample_from_probs(distribution(logits, params, in_text, counts), uniforms)


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling, which never returns a token of probability 0.

    probs (B, V), uniforms (B,) in [0, 1) -> (B,) int64.
    """
    cumulative = probs.double().cumsum(dim=-1)  # (B, V)
    total = cumulative[:, -1:]  # (B, 1)
    points = uniforms.to(probs.device)[:, None].double() * total  # (B, 1)
    tokens = torch.searchsorted(cumulative, points, right=True)  # (B, 1)
    last = (cumulative < total).sum(dim=-1, keepdim=True)  # rounding may exceed V - 1
    return torch.minimum(tokens, last)[:, 0]


@dataclass
class _Group:
    """Rows of a batch that are sampled together, because they have equal parameters."""

    params: SamplingParams
    rows: Tensor | slice
    in_text: Tensor | None = None  # (rows, V), as in distribution(); None: no penalties
    counts: Tensor | None = None  # (rows, V)


class BatchSampler:
    """Samples one token per row and step on the device of the logits.

    It does not synchronize with the host. `contexts`: per row, its sequence and the drafts before
    the token.
    """

    def __init__(
        self,
        contexts: list[tuple[Sequence, list[int]]],
        vocab_size: int,
        device: torch.device,
        n_steps: int = 1,
    ) -> None:
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        uniforms = []
        for step in range(n_steps):
            uniforms.append([one.uniform(len(drafts) + step) for one, drafts in contexts])
        numbers = torch.tensor(uniforms, dtype=torch.float64, device="cpu")  # (n_steps, N)
        self._uniforms = iter(to_device(numbers, self.device))
        allowed = allowed_tokens([sequence for sequence, _ in contexts])
        self._banned: Tensor | None = None
        if allowed is not None:  # it holds for one step only
            self._banned = banned_tokens(allowed, vocab_size, self.device)
        rows_by_params: dict[SamplingParams, list[int]] = {}
        for row, (sequence, _) in enumerate(contexts):
            rows_by_params.setdefault(sequence.sampling_key, []).append(row)
        self._groups = []
        for params, rows in rows_by_params.items():
            index = slice(None)
            if len(rows_by_params) > 1:
                index = to_device(rows, self.device)
            group = _Group(params, index)
            if params.has_penalties:
                inputs = []
                for row in rows:
                    sequence, drafts = contexts[row]
                    inputs.append(sequence.penalty_inputs(drafts, vocab_size))
                in_text, counts = zip(*inputs)
                group.in_text = to_device(torch.stack(in_text), self.device)
                group.counts = to_device(torch.stack(counts), self.device)
            self._groups.append(group)

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample tokens (N,) from logits (N, V). The next call counts them as part of the text."""
        logits = logits.to(self.device)
        uniforms = next(self._uniforms)
        if self._banned is not None:
            logits = logits.masked_fill(self._banned, -torch.inf)
        first = self._groups[0]
        if len(self._groups) == 1 and first.in_text is None:  # the usual case, without a copy
            return sample(logits, first.params, uniforms, None, None)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        for group in self._groups:
            rows = group.rows
            sampled = sample(
                logits[rows], group.params, uniforms[rows], group.in_text, group.counts
            )
            tokens[rows] = sampled
            if group.in_text is not None:
                column = sampled[:, None]
                group.in_text.scatter_(1, column, True)
                group.counts.scatter_add_(1, column, torch.ones_like(column))
        return tokens


@torch.no_grad()
def sample_steps(
    sequences: list[Sequence], logits: Tensor, n_steps: int, step: Callable[[Tensor], Tensor]
) -> list[list[SampledToken]]:
    """Sample `n_steps` tokens per sequence from logits (B, 1, V).

    step(tokens (B, 1)) returns the next logits. The host waits for the device once, at the end.
    """
    vocab_size = sequences[0].tokenizer.vocab_size
    contexts = [(sequence, []) for sequence in sequences]
    sampler = BatchSampler(contexts, vocab_size, logits.device, n_steps)
    n_top = min(max(sequence.params.logprobs for sequence in sequences), vocab_size)
    steps = []
    while True:
        logits = logits[:, 0, :vocab_size].float()  # (B, V); ids above the tokenizer's are padding
        tokens = sampler(logits).to(logits.device)  # (B,)
        logprobs = logits.log_softmax(dim=-1)
        top = top_tokens(logprobs, n_top) if n_top else ()
        steps.append((tokens, logprobs.gather(1, tokens[:, None])[:, 0], *top))
        if len(steps) == n_steps:
            break
        logits = step(tokens[:, None])
    columns = [torch.stack(column, dim=1).cpu().tolist() for column in zip(*steps)]
    tokens, token_logprobs = columns[:2]  # B lists of n_steps numbers each
    sampled = []
    for row, sequence in enumerate(sequences):
        sampled.append([])
        for index, token in enumerate(tokens[row]):
            top = {}
            if sequence.params.logprobs:
                values, ids = columns[2][row][index], columns[3][row][index]
                n = sequence.params.logprobs
                top = dict(zip(ids[:n], values))
            sampled[row].append((token, token_logprobs[row][index], top))
    return sampled


def banned_tokens(allowed: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """The tokens that are not in `allowed` (N, V / 32), as (N, V) boolean on the device."""
    octets = to_device(allowed, device).view(torch.uint8)  # (N, V / 8)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    is_banned = (octets[:, :, None] & bits) == 0  # (N, V / 8, 8)
    return is_banned.flatten(1)[:, :vocab_size]


def sample_tokens(contexts: list[tuple[Sequence, list[int]]], logits: Tensor) -> list[int]:
    """Sample one token per row of logits (N, V). `contexts`: as in BatchSampler."""
    return BatchSampler(contexts, logits.shape[1], logits.device)(logits).tolist()
