"""The log-probabilities of sampled tokens, by the kernels that sampled them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.rewards.rollouts import tempered
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.generation.engine import Generator
from thinker.model import Thinker
from thinker.native.operations import log_probs
from thinker.runtime.constants import IGNORE_INDEX


class EngineLogProbs:
    """ln P of targets at a temperature, with the bits that the engine stores when it samples."""

    def __init__(self, tokenizer: Tokenizer, temperature: float) -> None:
        self.tokenizer = tokenizer
        self.temperature = temperature

    @torch.no_grad()
    def __call__(self, model: Thinker, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T) fp32, 0 for IGNORE_INDEX. Raises UserError if the kernels cannot run the model."""
        # A new copy of the weights, as they may have changed since the last call.
        generator = Generator(tempered(model, self.temperature), self.tokenizer, exact=True)
        decoder = generator.decoder
        assert isinstance(decoder, NativeDecoder)
        rows, tokens, wanted, chosen = _tokens_to_read(inputs, targets)
        found = torch.zeros(targets.shape, dtype=torch.float32)
        if not wanted:
            return found
        cache = decoder.model.new_cache(*inputs.shape)
        logits = decoder.read(cache, rows, tokens, wanted)  # (targets, V)
        is_target = targets != IGNORE_INDEX
        found[is_target] = log_probs(logits, self.tokenizer.vocab_size, chosen)
        return found


def _tokens_to_read(
    inputs: Tensor, targets: Tensor
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The tokens of each row up to its last target: their rows and ids; and of those before a
    target, the indices among them and the targets."""
    rows: list[int] = []
    tokens: list[int] = []
    wanted: list[int] = []
    chosen: list[int] = []
    for row, (row_inputs, row_targets) in enumerate(zip(inputs.tolist(), targets.tolist())):
        places = [place for place, token in enumerate(row_targets) if token != IGNORE_INDEX]
        if not places:
            continue
        n = places[-1] + 1
        wanted += [len(tokens) + place for place in places]
        chosen += [row_targets[place] for place in places]
        rows += [row] * n
        tokens += row_inputs[:n]
    return rows, tokens, wanted, chosen


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """These values, with the gradient of x: for two computations of the same number that round
    differently."""
    return _WithValues.apply(x, values)
