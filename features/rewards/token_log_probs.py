"""The log-probabilities of sampled tokens, as training computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinker.runtime.constants import IGNORE_INDEX


def token_log_probs(
    model: nn.Module, inputs: Tensor, targets: Tensor, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """ln P of each target at a temperature, 0 for IGNORE_INDEX, and the entropy of each prediction
    in nats, without a gradient: (B, T) fp32 each, or fp64 as the logits.

    vocab_size: of the tokenizer. A model may have more ids, which are never sampled.
    """
    logits = model(inputs)[:, :, :vocab_size] / temperature  # (B, T, V)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.to(dtype).log_softmax(-1)
    is_target = targets != IGNORE_INDEX
    taken = log_probs.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return taken * is_target, entropy * is_target
