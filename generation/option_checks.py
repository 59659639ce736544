"""Checks of what a Generator is asked for: options that contradict each other, prompts that do not fit."""

from __future__ import annotations

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError


def check_generator_options(
    config: ThinkerConfig,
    use_cache: bool,
    compile: bool,
    window: int | None,
    sinks: int,
    speculate: int,
    has_draft: bool,
) -> None:
    """Raise UserError if the options of a Generator contradict each other, or the model does not support one."""
    if sinks < 0 or (window is None and sinks):
        raise UserError(f"sinks is {sinks}; it must be at least 0, and goes with a window")
    if window is not None and not 1 <= window <= config.max_seq_len - sinks:
        raise UserError(
            f"a window of {window} and {sinks} sinks; the window must be at least 1, and both together at most "
            f"the model's context, {config.max_seq_len}: it was not trained on tokens further apart"
        )
    if not 0 <= speculate <= 64:
        raise UserError(f"speculate is {speculate}; it must lie between 0 (none) and 64 drafted tokens per step")
    if has_draft and not speculate:
        raise UserError("a draft model needs speculate, the number of tokens to draft per step")
    for name, value in {"window": window, "speculate": speculate, "compile": compile}.items():
        if value and not use_cache:
            raise UserError(f"{name} needs the cache; it does not go with use_cache=False")
    if compile and not config.is_plain:
        raise UserError("compile supports models with full attention, RoPE and plain scores; leave it out")
    if speculate and any(layer.n_features for layer in config.patterns):
        raise UserError("speculate must drop rejected drafts, and a linear layer's state cannot be rolled back")
    if window is not None and not config.is_plain:
        raise UserError(
            "window needs a model with full attention and RoPE; leave it out: this model has "
            f"model.attention={config.attention}, model.positions={config.positions}"
        )
    if window is not None and (speculate or compile):
        raise UserError(f"a window does not go with {'speculate' if speculate else 'compile'}")


def check_prompt_length(tokens: list[int], config: ThinkerConfig, max_len: float, hint: str = "") -> None:
    """Raise UserError if a prompt is longer than `max_len` or shorter than the model's bidirectional prefix."""
    if len(tokens) < config.prefix:
        raise UserError(
            f"the prompt has {len(tokens)} tokens; the model's bidirectional prefix needs at least {config.prefix}"
        )
    if len(tokens) > max_len:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and the model's context is {max_len}; "
            f"shorten it to at most {max_len} tokens{hint}"
        )
