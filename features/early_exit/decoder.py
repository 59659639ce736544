"""Decoding steps that skip the last layers for tokens that an earlier layer predicts with confidence."""

import torch
from torch import Tensor

from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.inspection.activation_hooks import has_open_hooks
from thinker.runtime.errors import UserError


class EarlyExitThinker:
    """model(tokens, cache=cache) for one position per row, with an exit after each layer (Elbayad et al. 2020,
    arXiv:1910.10073; Schuster et al. 2022, arXiv:2207.07061).

    After each layer, the model's norm and LM head turn the residual stream into a distribution (the logit lens). If its
    most likely token has at least the probability `threshold`, it is the result, and the later layers only compute
    their keys and values from this residual stream, so that later tokens find a complete cache. Without an exit, the
    logits are those of the model, bit for bit. The rows of a batch exit one by one; a row does not depend on others.
    """

    def __init__(self, model: Thinker, threshold: float) -> None:
        check_early_exit(model.config, threshold)
        self.model, self.threshold = model, threshold
        self.layers_used = torch.zeros(0, dtype=torch.int64)  # (B,), of the newest step
        self.n_tokens = self.n_layers = 0  # of all steps: positions, and the layers that they used

    @property
    def mean_layers(self) -> float | None:
        """Layers used per decoded token, on average; None before the first step."""
        return self.n_layers / self.n_tokens if self.n_tokens else None

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, 1) -> logits (B, 1, V). Raises UserError as the model does, and for open hooks."""
        model = self.model
        if has_open_hooks(model):
            raise UserError(
                "activations cannot be recorded or patched with early_exit; use early_exit=None"
            )
        context = model.make_context(tokens, tokens, None, cache)
        x = model.embedding(tokens).to(model.dtype)  # (B, 1, C)
        used = torch.zeros(
            len(tokens), dtype=torch.int64, device=x.device
        )  # (B,); 0: the row has not exited
        layers = zip(model.blocks, context.masks, cache.layers, context.slots)
        for number, (block, mask, layer, slots) in enumerate(layers, 1):
            is_running = used == 0  # (B,)
            if not is_running.any():
                layer.update(*block.attention.project(block.attention_norm(x), context.rope), slots)
                continue
            after = block(
                x, context.rope, mask, layer, slots
            )  # of rows that have exited, only keys and values count
            x = torch.where(is_running[:, None, None], after, x)  # (B, 1, C)
            logits = model.lm_head(model.norm(x))  # (B, 1, V)
            is_last = number == len(model.blocks)
            leaves = (
                is_running if is_last else is_running & (_max_probability(logits) >= self.threshold)
            )
            used = torch.where(leaves, number, used)
        self.layers_used = used.cpu()
        self.n_tokens += len(used)
        self.n_layers += int(self.layers_used.sum())
        return logits


def _max_probability(logits: Tensor) -> Tensor:
    """Probability of the most likely token: logits (B, 1, V) -> (B,)."""
    logits = logits[:, 0].float()  # (B, V)
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()


def check_early_exit(config: ThinkerConfig, threshold: float) -> None:
    """Raise UserError if the threshold is not a probability between 0 and 1, or the model has no exits."""
    if not 0 < threshold < 1:
        raise UserError(
            f"early_exit is {threshold}; use a probability above 0 and below 1, such as 0.9"
        )
    if config.n_layers < 2:
        raise UserError("early_exit needs at least 2 layers; this model has 1")
    unsupported = {
        "linear attention": any(pattern.n_features for pattern in config.patterns),
        "model.token_shift": config.token_shift,
        f"model.positions={config.positions}": config.positions in ("learned", "sinusoidal"),
    }
    for name, applies in unsupported.items():
        if applies:
            raise UserError(f"early_exit does not support {name}; use early_exit=None")
