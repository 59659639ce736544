"""Decoding steps that skip the last layers for tokens that an earlier layer predicts with
confidence."""

import torch
from torch import Tensor

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.plain_decoder import PlainDecoder
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError


class EarlyExitDecoder(PlainDecoder):
    """Steps of one position per row, with an exit after each layer (see Decoder).

    Elbayad et al. 2020, arXiv:1910.10073; Schuster et al. 2022, arXiv:2207.07061. After each layer,
    the model's norm and LM head turn the residual stream into a distribution (the logit lens). If
    its most likely token has at least the probability `threshold`, it is the result, and the later
    layers only compute their keys and values from this residual stream, so that later tokens find a
    complete cache. Without an exit, the logits are those of the model, bit for bit. The rows of a
    batch exit one by one; a row does not depend on others.
    """

    name = "early exit"
    option = "early_exit"
    is_exact = False

    def __init__(self, model: Thinker, threshold: float) -> None:
        check_early_exit(model.config, threshold)
        # The host needs to know after each layer whether all rows have exited, so it does not run
        # ahead of the device.
        super().__init__(model, can_roll_back=False)
        self.threshold = threshold
        self.layers_used = torch.zeros(0, dtype=torch.int64)  # (B,), of the newest step
        # Of all steps: positions, and the layers that they used.
        self.n_tokens = 0
        self.n_layers = 0

    @property
    def mean_layers(self) -> float | None:
        """Layers used per decoded token, on average; None before the first step."""
        return self.n_layers / self.n_tokens if self.n_tokens else None

    def report(self) -> str:
        """As Decoder.report()."""
        return f"{self.mean_layers or 0:.2f} of {len(self.model.blocks)} layers per token"

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, 1) -> logits (B, 1, V). Raises UserError as the model does."""
        model = self.model
        if has_open_hooks(model):
            raise UserError(
                "activations cannot be recorded or patched with early_exit; use early_exit=None"
            )
        context = model.make_context(tokens, tokens, None, cache)
        x = model.embed(tokens, context).to(model.dtype)  # (B, 1, C)
        # Layers that each row used, (B,); 0: it has not exited.
        used = torch.zeros(len(tokens), dtype=torch.int64, device=x.device)
        per_layer = (context.ropes, context.masks, cache.layers, context.slots)
        layers = zip(model.blocks, *per_layer, context.token_values)
        for number, (block, rope, mask, layer, slots, token_values) in enumerate(layers, 1):
            is_running = used == 0  # (B,)
            if not is_running.any():
                normed = block.attention_norm(x)
                q, k, v = block.attention.query_key_value(normed, rope, token_values)
                layer.update(q, k, v, slots)
                continue
            # Of rows that have exited, only keys and values count.
            after = block(x, rope, mask, layer, slots, token_values)
            x = torch.where(is_running[:, None, None], after, x)  # (B, 1, C)
            logits = model.lm_head(model.norm(x))  # (B, 1, V)
            leaves = is_running
            if number < len(model.blocks):
                leaves = is_running & (_max_probability(logits) >= self.threshold)
            used = torch.where(leaves, number, used)
        self.layers_used = used.cpu()
        self.n_tokens += len(used)
        self.n_layers += int(self.layers_used.sum())
        return logits


def _max_probability(logits: Tensor) -> Tensor:
    """Probability of the most likely token: logits (B, 1, V) -> (B,)."""
    logits = logits[:, 0].float()  # (B, V)
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()


def make_decoder(
    setup: Setup, caches: CacheFactory, early_exit: float | None = None
) -> EarlyExitDecoder | None:
    """For the option `early_exit`: skip later layers at this probability; None: never.

    Raises UserError if it does not suit the model or other options.
    """
    check_types({"early_exit": float | None}, locals())
    if early_exit is None:
        return None
    check_early_exit(setup.config, early_exit)
    if not caches.can_roll_back:
        raise UserError(f"early_exit cannot be combined with {caches.option}; use only one")
    if setup.compile:
        raise UserError("early_exit cannot be combined with compile; use only one")
    setup.need_cache("early_exit")
    return EarlyExitDecoder(setup.fuse(setup.model), early_exit)


def check_early_exit(config: ThinkerConfig, threshold: float) -> None:
    """Raise UserError if the threshold is no probability, or the model has no exits."""
    if not 0 < threshold < 1:
        raise UserError(
            f"early_exit is {threshold}; use a probability above 0 and below 1, such as 0.9"
        )
    if config.n_layers < 2:
        raise UserError("early_exit needs at least 2 layers; this model has 1")
    unsupported = ""
    if any(pattern.n_features for pattern in config.patterns):
        unsupported = "linear attention"
    elif config.block == "parallel_one_norm":  # whose norm is not attention's own
        unsupported = f"model.block={config.block}"
    if unsupported:
        raise UserError(f"early_exit does not support {unsupported}; use early_exit=None")
