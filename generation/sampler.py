"""From logits to the distribution that is drawn from, to a token: pure functions, used by everything that samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Raises UserError where a number is out of its range."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens that together have at least this probability
    min_p: float | None = None  # keep tokens of at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # above 1: tokens already in the text become less likely
    seed: int = 0  # row i of a batch draws by seed + i, whatever its neighbours are
    stop: tuple[str, ...] = ()  # end before any of these strings appears

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}; it must lie in [0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1: none)")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; it must be at least 0")
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty; it would stop before anything is said")


def distribution(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The probabilities that tokens are drawn with.

    In this order: repetition penalty (Keskar et al. 2019, arXiv:1909.05858: the logit of a seen token is divided by
    the penalty if positive, else multiplied), temperature, top-k, top-p (Holtzman et al. 2020, arXiv:1904.09751),
    min-p (Nguyen et al. 2024, arXiv:2407.01082). The filters look at the distribution before any of them cut it.
    Among equal logits the lower token id comes first. The likeliest token always stays.

    Args:
        logits: (B, V).
        seen: (B, V) boolean, True for tokens that are in the row's text.

    Returns: (B, V) fp32; rows sum to 1.
    """
    logits = logits.float()
    if seen is not None and params.repetition_penalty != 1:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if params.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)  # the first among equals
        return torch.zeros_like(logits).scatter_(1, best, 1.0)
    # The largest first taken off, so that no temperature, however small, leads beyond what fp32 holds.
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / max(params.temperature, 1e-30)).softmax(dim=-1)
    if params.top_k is None and params.top_p in (None, 1) and params.min_p is None:
        return probs
    tokens = logits.sort(dim=-1, descending=True, stable=True).indices  # (B, V)
    ranked = probs.gather(1, tokens)
    if ranked.device.type != "mps":
        ranked = ranked.double()  # a sum of many small ones in fp32 would reach top_p too soon
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k is not None:
        keep[:, params.top_k :] = False
    if params.top_p is not None and params.top_p < 1:
        keep &= ranked.cumsum(dim=-1) - ranked < params.top_p  # what comes before does not reach top_p yet
    if params.min_p is not None:
        keep &= ranked >= params.min_p * ranked[:, :1]
    keep[:, 0] = True
    kept = torch.zeros_like(ranked).scatter_(1, tokens, ranked * keep)
    return (kept / kept.sum(dim=-1, keepdim=True)).float()


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
