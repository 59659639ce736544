"""Checks of a Generator's inputs: prompts as text or token ids, and sampling parameters."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.retrieval.block_store import stored_bytes
from thinker.features.retrieval.retrieval_cache import n_stored_blocks
from thinker.generation.caches.quantized_cache import BLOCK, cache_bytes
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory

PREFILL_CHUNK = 512  # positions per pass


def check_text(text: Any, name: str) -> str:
    """Return a text unchanged. Raises UserError unless it is a valid Unicode string."""
    if not isinstance(text, str):
        raise UserError(f"{name} is a {type(text).__name__}; pass a str")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UserError(
            f"{name} contains a lone surrogate, which is not valid text; decode it as UTF-8"
        )
    return text


def prompt_list(prompts: str | list[str]) -> list[str]:
    """Return prompts as a list; a string is one prompt. Raises UserError for other types."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise UserError(f"prompts is a {type(prompts).__name__}; pass a str or a list of str")
    return [check_text(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]


def params_list(
    params: SamplingParams | list[SamplingParams] | None, n_prompts: int
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt; if one is given for all, prompt i gets seed + i. Raises UserError."""
    if params is None or isinstance(params, SamplingParams):
        base = params or SamplingParams()
        return [dataclasses.replace(base, seed=base.seed + index) for index in range(n_prompts)]
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise UserError(
            f"params is a {type(params).__name__}; pass a SamplingParams or a list of SamplingParams"
        )
    if len(params) != n_prompts:
        raise UserError(
            f"params has {len(params)} elements for {n_prompts} prompts; pass one per prompt or only one"
        )
    return list(params)


def token_lists(
    prompt_tokens: Any, completions: list[Completion], encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the token ids of each prompt, encoding it if `prompt_tokens` is None. Raises UserError."""
    if prompt_tokens is None:
        return [encode(completion.prompt) for completion in completions]
    try:
        lists = [[operator.index(token) for token in tokens] for tokens in prompt_tokens]
    except TypeError:
        raise UserError(
            "prompt_tokens is not valid; pass a list of token ids (integers) per prompt"
        ) from None
    if len(lists) != len(completions):
        raise UserError(
            f"prompt_tokens has {len(lists)} lists for {len(completions)} prompts; pass one per prompt"
        )
    return lists


def check_prompt(
    tokens: list[int], tokenizer: Tokenizer, config: ThinkerConfig, max_len: float, hint: str = "",
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> None:  # fmt: skip
    """Raise UserError if a prompt is empty, too long, shorter than a bidirectional prefix, or has an unknown id."""
    start, prefix = f"the prompt has {len(tokens)} tokens", config.prefix
    if len(tokens) < max(1, prefix):
        need = (
            f"the model's bidirectional prefix needs at least {prefix}"
            if prefix
            else "it needs at least 1"
        )
        raise UserError(f"{start}; {need}")
    if len(tokens) > max_len:
        raise UserError(
            f"{start}, but the model's context is {max_len}; shorten it to at most {max_len} tokens{hint}"
        )
    last = tokenizer.vocab_size - 1
    for token, _ in logit_bias:
        if token > last:
            raise UserError(f"logit_bias has the token id {token}; use ids from 0 to {last}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token <= last:
            raise UserError(f"the prompt has the token id {token}; use ids from 0 to {last}")


def pass_lengths(
    start: int, length: int, prefix: int = 0, cache_bits: int | None = None
) -> list[int]:
    """Cut `length` positions from `start` on into passes, which bounds the memory; the first one holds the prefix.

    With a cache in 4 bits, a pass of the torch model ends with a block, so that each query reads the same keys
    unrounded as alone.
    """
    lengths, end = [], start + length
    while start < end:
        limit = BLOCK - start % BLOCK if cache_bits == 4 else PREFILL_CHUNK
        lengths.append(min(max(limit, prefix - start), end - start))
        start += lengths[-1]
    return lengths


def check_cache_fits(generator: Any, model: Thinker, n_sequences: int, max_len: int) -> None:
    """Raise UserError if the KV cache of several sequences exceeds the memory; one sequence allocates on demand."""
    cached = min(
        max_len, math.inf if generator.window is None else generator.window + generator.sinks
    )
    if n_sequences > 1 and generator.use_cache:
        needed = n_sequences * cache_bytes(model, 1, cached, bits=generator.cache_bits)
        if generator.retrieve:
            n_blocks = n_stored_blocks(
                max_len, generator.window, generator.sinks, generator.retrieve_block
            )
            stored = n_sequences * stored_bytes(model.config, n_blocks, generator.retrieve_block)
            check_memory(
                {"stored blocks": stored},
                torch.device("cpu"),
                "reduce the number of samples or max_new_tokens",
            )
        check_memory(
            {"cache": needed}, model.device, "reduce the number of samples or max_new_tokens"
        )
