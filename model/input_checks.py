"""Checks of the inputs of a model: shapes, dtypes, devices and token ids. Mistakes raise UserError.

Ids are checked on the CPU only, because reading them from a GPU would make the host wait.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from thinker.model.config import ThinkerConfig
from thinker.model.kv_cache import KVCache
from thinker.runtime.checks import describe
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError


def check_inputs(
    config: ThinkerConfig,
    device: torch.device,
    dtype: torch.dtype,
    tokens: Tensor | None,
    embeddings: Tensor | None,
    targets: Tensor | None,
    document_ids: Tensor | None,
    cache: KVCache | None,
) -> Tensor:
    """Return the tokens or embeddings. Raises UserError if an input is invalid.

    Without targets or a cache, a sequence longer than the context only causes a warning, so that
    extrapolation can be measured.
    """
    if (tokens is None) == (embeddings is None):
        raise UserError("pass either tokens or embeddings to the model, not both or neither")
    if embeddings is None:
        inputs = tokens
        width = ()
        _check_form("tokens", tokens, width)
    else:
        inputs = embeddings
        width = (config.d_model,)
        _check_form("embeddings", embeddings, width)
    B, n_tokens = inputs.shape[:2]
    given = {
        "tokens": tokens,
        "embeddings": embeddings,
        "targets": targets,
        "document_ids": document_ids,
    }
    for name, value in given.items():
        if value is None:
            continue
        if name == "embeddings":
            _check_tensor(name, value, (B, n_tokens, *width), device)
        else:
            _check_tensor(name, value, (B, n_tokens), device)
            _check_ids(name, value, config.vocab_size)
    if embeddings is not None and not embeddings.is_floating_point():
        raise UserError(
            f"embeddings is {embeddings.dtype}; it must be a floating-point dtype such as "
            f"torch.float32"
        )
    if cache is not None:
        _check_cache(config, dtype, cache, document_ids)
    # Learned positions raise an error for a sequence that is too long.
    is_too_long = n_tokens > config.max_seq_len and config.positions != "learned"
    is_inference = targets is None and cache is None and not torch.compiler.is_compiling()
    if is_too_long and is_inference and not config.is_unbounded:
        message = beyond_context(n_tokens, config)
        warnings.warn(message, stacklevel=5)  # shows the line that calls model(...)
    return inputs


def _check_form(name: str, inputs: Tensor, width: tuple[int, ...]) -> None:
    """Check tokens (B, T), or embeddings (B, T, *width)."""
    if not isinstance(inputs, Tensor):
        hint = ""
        if isinstance(inputs, str):
            hint = "; encode the text first: torch.tensor([tokenizer.encode(text)])"
        raise UserError(f"{name} is a {type(inputs).__name__}; it must be a tensor{hint}")
    if inputs.dim() != 2 + len(width) or 0 in inputs.shape or inputs.shape[2:] != width:
        raise UserError(
            f"{name} has shape {tuple(inputs.shape)}; use non-empty tokens (B, T) or "
            f"embeddings (B, T, C)"
        )


def _check_tensor(name: str, value: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        found = describe(value)
        if isinstance(value, Tensor):
            found = tuple(value.shape)
        raise UserError(f"{name} is {found}; it must be a tensor of shape {shape}, like the tokens")
    if value.device != device:
        raise UserError(
            f"{name} is on {value.device}, but the model is on {device}; use "
            f"{name}.to(model.device)"
        )


def beyond_context(n_tokens: int, config: ThinkerConfig) -> str:
    """Message for a sequence longer than the context."""
    return (
        f"the sequence has {n_tokens} tokens, but the model was trained with a context of "
        f"{config.max_seq_len}"
    )


def _check_cache(
    config: ThinkerConfig, dtype: torch.dtype, cache: KVCache, document_ids: Tensor | None
) -> None:
    if not isinstance(cache, KVCache):
        raise UserError(f"cache is {describe(cache)}; it must come from model.new_cache()")
    if document_ids is not None:
        raise UserError("document_ids cannot be combined with a cache; pass only one")
    if (len(cache.layers), cache.head_dim) != (config.n_layers, config.head_dim):
        raise UserError(
            "the cache was made for a model of another shape; create a new one with "
            "model.new_cache()"
        )
    if cache.dtype != dtype:
        raise UserError(
            f"the cache is {cache.dtype}, but the model uses {dtype}; create one with "
            f"model.new_cache()"
        )


def _check_ids(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} is {tokens.dtype}; it must be torch.int64 (or int32)")
    if name == "document_ids":  # may be any numbers
        return
    if type(tokens) is not Tensor or tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lowest = 0
    known = f"use 0 to {vocab_size - 1}"
    if name == "targets":
        lowest = IGNORE_INDEX
        known += f", or {IGNORE_INDEX} for no target"
    for token in torch.aminmax(tokens):
        if not lowest <= token.item() < vocab_size:
            raise UserError(f"token id {token.item()} in {name} is out of range; {known}")


def tokens_to_inspect(
    tokens: Tensor | str, tokenizer: Any, config: ThinkerConfig, device: torch.device
) -> Tensor:
    """Return tokens (B, T), or encode a text as a prompt, (1, T). Raises UserError beyond the
    context."""
    if isinstance(tokens, str):
        if not hasattr(tokenizer, "bos_prefix"):
            remedy = "use attention_weights(text, tokenizer) with the tokenizer from load()"
            raise UserError(f"a text needs the model's tokenizer; {remedy}")
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(tokens)]
        if not ids:
            ids = [tokenizer.bos_id]
        tokens = torch.tensor([ids], device=device)
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] > config.max_seq_len:
        raise UserError(beyond_context(tokens.shape[1], config))
    return tokens
