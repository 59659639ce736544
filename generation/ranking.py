"""The most likely tokens. Ties go to the lower id, so that they do not depend on the batch."""

import torch
from torch import Tensor


def rank(scores: Tensor, count: int) -> Tensor:
    """The `count` highest-scoring tokens, (B, count), best first, ties by id; at most V."""
    V = scores.shape[1]
    if 4 * count >= V:  # sorting a large vocabulary would dominate sampling time
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    best, tokens = scores.topk(count)
    is_above = scores > best[:, -1:]  # (B, V)
    is_tied = scores == best[:, -1:]  # (B, V)
    # topk() chooses any of the tied tokens. A GPU always chooses again: to ask whether that is
    # needed would synchronize it with the host.
    if scores.is_cuda or (is_above | is_tied).sum() > tokens.numel():
        n_missing = count - is_above.sum(dim=-1, keepdim=True)
        is_kept = is_above | (is_tied & (is_tied.cumsum(dim=-1) <= n_missing))
        ids = torch.arange(V, device=scores.device)
        tokens = torch.where(is_kept, V - ids, 0).topk(count).indices
    tokens = tokens.sort(dim=-1).values
    order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices
    return tokens.gather(1, order)


def top_tokens(logprobs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the n most likely tokens of (B, V), and these tokens, (B, n) both.

    In descending order; ties go to the lower id. topk() chooses any of them, and others for
    another n, which may be that of the whole batch.
    """
    tokens = rank(logprobs, n)
    return logprobs.gather(1, tokens), tokens


def top_logprobs(logprobs: Tensor, n: int) -> dict[int, float]:
    """The n most likely tokens of (V,) with their log-probabilities, as top_tokens()."""
    if not n:
        return {}
    values, tokens = top_tokens(logprobs[None], n)
    return dict(zip(tokens[0].tolist(), values[0].tolist()))
