"""What a Thinker may be given: tensors of the right shape and ids it knows; mistakes are UserErrors.

Only ids in the host's memory are looked at: reading those of a GPU would make the host wait for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from thinker.model.config import ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError


def check_inputs(
    config: ThinkerConfig, tokens: Tensor | None, embeddings: Tensor | None, targets: Tensor | None, has_cache: bool
) -> Tensor:
    """Return the tokens, or else the embeddings. Raises UserError if they are not what a Thinker reads.

    Without targets or a cache, more tokens than the context are a warning: the model was not trained on them, but how
    it extrapolates can be measured.
    """
    if (tokens is None) == (embeddings is None):
        raise UserError("a Thinker needs either tokens or embeddings")
    name, inputs = ("tokens", tokens) if embeddings is None else ("embeddings", embeddings)
    if not isinstance(inputs, Tensor):
        encode = "; encode a text first: torch.tensor([tokenizer.encode(text)])" if isinstance(inputs, str) else ""
        raise UserError(f"{name} are a {type(inputs).__name__}; they must be a tensor{encode}")
    width = () if embeddings is None else (config.d_model,)
    if inputs.dim() != 2 + len(width) or 0 in inputs.shape or inputs.shape[2:] != width:
        raise UserError(f"tokens must be (B, T) and embeddings (B, T, C), not empty; got {tuple(inputs.shape)}")
    if targets is not None and not (isinstance(targets, Tensor) and targets.shape == inputs.shape[:2]):
        found = tuple(targets.shape) if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise UserError(f"targets must be a tensor {tuple(inputs.shape[:2])}, as the tokens are; got {found}")
    if embeddings is None:
        _check_ids(tokens, config.vocab_size)
    if targets is not None:
        _check_ids(targets, config.vocab_size, IGNORE_INDEX)
    too_long = inputs.shape[1] > config.max_seq_len and config.positions != "learned"  # these end, as an error
    if too_long and targets is None and not (has_cache or config.is_unbounded or torch.compiler.is_compiling()):
        warnings.warn(beyond_context(inputs.shape[1], config), stacklevel=5)  # the caller of model(...)
    return inputs


def beyond_context(n_tokens: int, config: ThinkerConfig) -> str:
    """What is said of more tokens than the model was trained on."""
    return f"{n_tokens} tokens are more than the model's context of {config.max_seq_len}, which it was trained on"


def _check_ids(tokens: Tensor, vocab_size: int, lowest: int = 0) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(f"tokens are {tokens.dtype}; they must be int64, the ids of tokens")
    if type(tokens) is not Tensor or tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for token in torch.aminmax(tokens):
        if not lowest <= token.item() < vocab_size:
            ignored = f", or {lowest} where there is no target" if lowest else ""
            known = f"the vocabulary is 0 to {vocab_size - 1}{ignored}"
            raise UserError(f"the token id {token.item()} is out of range: {known}")


def tokens_to_inspect(tokens: Tensor | str, tokenizer: Any, config: ThinkerConfig, device: torch.device) -> Tensor:
    """Tokens (B, T) as they are, or a text's as the model reads a prompt, (1, T). UserError beyond the context."""
    if isinstance(tokens, str):
        if tokenizer is None:
            raise UserError("a text needs the tokenizer, too: attention_weights(text, tokenizer), both from load()")
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(tokens)] or [tokenizer.bos_id]
        tokens = torch.tensor([ids], device=device)
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] > config.max_seq_len:
        raise UserError(beyond_context(tokens.shape[1], config))
    return tokens
