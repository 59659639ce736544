"""What a Thinker may be given: tensors of the right shape and ids it knows; mistakes are UserErrors.

Only ids in the host's memory are looked at: reading those of a GPU would make the host wait for it.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from thinker.model.config import ThinkerConfig
from thinker.model.kv_cache import KVCache
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.type_checks import describe


def check_inputs(
    config: ThinkerConfig, device: torch.device, dtype: torch.dtype, tokens: Tensor | None, embeddings: Tensor | None,
    targets: Tensor | None, document_ids: Tensor | None, cache: KVCache | None,
) -> Tensor:  # fmt: skip
    """Return the tokens, or else the embeddings. Raises UserError if they are not what a Thinker reads.

    Without targets or a cache, more tokens than the context are a warning: the model was not trained on them, but how
    it extrapolates can be measured.
    """
    if (tokens is None) == (embeddings is None):
        raise UserError("a Thinker needs either tokens or embeddings")
    given = {"tokens": tokens, "embeddings": embeddings, "targets": targets, "document_ids": document_ids}
    given = {name: value for name, value in given.items() if value is not None}
    name, inputs = next(iter(given.items()))
    if not isinstance(inputs, Tensor):
        encode = "; encode a text first: torch.tensor([tokenizer.encode(text)])" if isinstance(inputs, str) else ""
        raise UserError(f"{name} are a {type(inputs).__name__}; they must be a tensor{encode}")
    width = () if embeddings is None else (config.d_model,)
    if inputs.dim() != 2 + len(width) or 0 in inputs.shape or inputs.shape[2:] != width:
        raise UserError(f"tokens must be (B, T) and embeddings (B, T, C), not empty; got {tuple(inputs.shape)}")
    for name, value in given.items():
        shape = (*inputs.shape[:2], *(width if name == "embeddings" else ()))
        if not isinstance(value, Tensor) or value.shape != shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else describe(value)
            raise UserError(f"{name} must be a tensor {shape}, as the tokens are; got {found}")
        if value.device != device:
            raise UserError(f"{name} are on {value.device}, the model on {device}; move them: {name}.to(model.device)")
        if name != "embeddings":
            _check_ids(name, value, config.vocab_size)
    if embeddings is not None and not embeddings.is_floating_point():
        raise UserError(f"embeddings are {embeddings.dtype}; they must be of real numbers, such as torch.float32")
    if cache is not None:
        _check_cache(config, dtype, cache, document_ids)
    too_long = inputs.shape[1] > config.max_seq_len and config.positions != "learned"  # these end, as an error
    if too_long and targets is None and not (cache is not None or config.is_unbounded or torch.compiler.is_compiling()):
        warnings.warn(beyond_context(inputs.shape[1], config), stacklevel=5)  # the caller of model(...)
    return inputs


def beyond_context(n_tokens: int, config: ThinkerConfig) -> str:
    """What is said of more tokens than the model was trained on."""
    return f"{n_tokens} tokens are more than the model's context of {config.max_seq_len}, which it was trained on"


def _check_cache(config: ThinkerConfig, dtype: torch.dtype, cache: KVCache, document_ids: Tensor | None) -> None:
    if not isinstance(cache, KVCache):
        raise UserError(f"cache is {describe(cache)}; it must be one of model.new_cache()")
    if document_ids is not None:
        raise UserError("document_ids do not go with a cache")
    if (len(cache.layers), cache.head_dim) != (config.n_layers, config.head_dim):
        raise UserError("the cache is that of a model of another shape; make one with model.new_cache()")
    if cache.dtype != dtype:
        raise UserError(f"the cache is {cache.dtype} and the pass {dtype}; make one with model.new_cache()")


def _check_ids(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} are {tokens.dtype}; they must be int64, the ids of {name.removesuffix('_ids')}")
    if name == "document_ids":  # any numbers that differ
        return
    lowest = IGNORE_INDEX if name == "targets" else 0
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
        if not hasattr(tokenizer, "bos_prefix"):
            raise UserError("a text needs the tokenizer, too: attention_weights(text, tokenizer), both from load()")
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(tokens)] or [tokenizer.bos_id]
        tokens = torch.tensor([ids], device=device)
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] > config.max_seq_len:
        raise UserError(beyond_context(tokens.shape[1], config))
    return tokens
