"""Keys for logging figures of each layer, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinker.runtime.errors import UserError
from thinker.training.config.types import ConfigSection, Positive

if TYPE_CHECKING:
    from thinker.training.config.config import Config


class LayerLogKeys(ConfigSection):
    """Keys of the section `train`."""

    log_attention_every: Positive | None = None
    """Steps between measurements of each layer's attention; evaluations also store them. null:
    measure nothing."""
    log_grad_norms: bool = False
    """Log the gradient norm of each layer."""


def check_layer_log(config: Config) -> None:
    """Raise UserError if attention is to be logged in steps that are not logged, or has no
    logits."""
    every, log_every = config.train.log_attention_every, config.train.log_every
    if every is None:
        return
    if every % log_every:
        multiple = -(-every // log_every) * log_every
        problem = (
            f"train.log_attention_every ({every}) is not a multiple of train.log_every "
            f"({log_every})"
        )
        raise UserError(f"{problem}; use {multiple}")
    patterns = config.thinker_config(vocab_size=1).patterns
    if all(pattern.n_features for pattern in patterns):
        raise UserError(
            "train.log_attention_every measures logits, but linear attention has no logits; "
            "remove it"
        )
