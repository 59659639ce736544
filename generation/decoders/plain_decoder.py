"""The plain decoder: it calls a copy of the model, whose modules inference_model.py has replaced by
equal, faster ones as far as choose_model.py found them equal."""

from __future__ import annotations

import torch
from torch import Tensor

from thinker.generation.decoders.decoder import pass_lengths
from thinker.generation.sampler import sample_steps
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker

STEPS_PER_READ = 16  # on a GPU: tokens per row to sample before the host waits for them


class PlainDecoder:
    """Calls the model for each step (see Decoder)."""

    option = ""
    is_exact = True
    is_batch_invariant = False
    has_kernels = False
    compile_seconds = 0.0

    def __init__(
        self, model: Thinker, kernel_problem: str = "", can_roll_back: bool = True
    ) -> None:
        """`can_roll_back`: whether caches can drop what was sampled after the end of a text."""
        self.model = model
        self.kernel_problem = kernel_problem
        self.steps_per_read = 1
        if can_roll_back and model.device.type == "cuda":
            self.steps_per_read = STEPS_PER_READ

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """As Decoder.supports()."""
        return True

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.prefill()."""
        lengths = pass_lengths(cache, tokens.shape[1], cache.pass_block)
        for chunk in tokens.split(list(lengths), dim=1):
            logits = self.model(chunk, cache=cache, last_logits_only=True)
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step()."""
        return self.model(tokens, cache=cache)

    def sample(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:
        """As Decoder.sample()."""
        n_steps = min(self.steps_per_read, max_steps)
        if any(sequence.constraint is not None for sequence in sequences):
            n_steps = 1  # the host decides what may come next
        return sample_steps(sequences, logits, n_steps, lambda tokens: self.step(tokens, cache))

    def report(self) -> str:
        """As Decoder.report()."""
        return ""
