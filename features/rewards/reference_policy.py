"""The model that training starts from, from which a policy is not to move far."""

from __future__ import annotations

import hashlib

import torch

from thinker.features.rewards.exact.engine_log_probs import EngineLogProbs
from thinker.features.rewards.rollouts import Rollouts
from thinker.features.rewards.token_log_probs import token_log_probs
from thinker.interop import load
from thinker.model import Thinker
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

ROWS = 8  # answers at a time


class ReferencePolicy:
    """The initial model, frozen. `digest`: of its weights."""

    def __init__(self, path: str, policy: Thinker, vocab_size: int, temperature: float) -> None:
        self.path = path
        self.vocab_size = vocab_size  # of the tokenizer
        self.temperature = temperature
        model, _ = load(path)
        self.model = model.to(policy.device).eval().requires_grad_(False)
        self.model.activation_dtype = policy.activation_dtype
        digest = hashlib.sha256()
        for _, tensor in sorted(model.state_dict().items()):
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        self.digest = digest.hexdigest()

    def check(self, digest: str) -> None:
        """Raise UserError if a run started with other weights."""
        if digest != self.digest:
            raise UserError(
                f"run.init_from={self.path} has other weights than when this run started; "
                "restore it"
            )

    @torch.no_grad()
    def add(self, rollouts: Rollouts, engine: EngineLogProbs | None = None) -> None:
        """Put the log-probabilities of answers into them, those of an engine if there is one."""
        if engine is not None:
            rollouts.reference = engine(self.model, rollouts.inputs, rollouts.targets)
            return
        found = []
        for inputs, targets in zip(rollouts.inputs.split(ROWS), rollouts.targets.split(ROWS)):
            device = self.model.device
            log_probs, _ = token_log_probs(
                self.model,
                to_device(inputs, device),
                to_device(targets, device),
                self.vocab_size,
                self.temperature,
            )
            found.append(log_probs.float().cpu())
        rollouts.reference = torch.cat(found)
