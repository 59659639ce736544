"""What a Generator reads: prompts as text or as token ids, and one SamplingParams for each; mistakes are UserErrors."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

from thinker.data.tokenizer import Tokenizer
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory


def check_text(text: Any, name: str) -> str:
    """Return a text as it is. Raises UserError if it is anything but a string of Unicode."""
    if not isinstance(text, str):
        raise UserError(f"{name} is a {type(text).__name__}; it must be one text, a str")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UserError(f"{name} holds a lone surrogate, which no text has; convert it to UTF-8")
    return text


def prompt_list(prompts: str | list[str]) -> list[str]:
    """The prompts as a list: a string is one prompt, never one per character. Raises UserError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise UserError(f"the prompts are a {type(prompts).__name__}; give a text (a str) or a list of texts")
    return [check_text(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]


def params_list(params: SamplingParams | list[SamplingParams] | None, n_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt; of one for all, prompt i gets seed + i. Raises UserError if they do not fit."""
    if params is None or isinstance(params, SamplingParams):
        base = params or SamplingParams()
        return [dataclasses.replace(base, seed=base.seed + index) for index in range(n_prompts)]
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        raise UserError(f"params is a {type(params).__name__}; it must be a SamplingParams, or a list of them")
    if len(params) != n_prompts:
        raise UserError(f"{n_prompts} prompts and {len(params)} sampling parameters: give one each, or one")
    return list(params)


def token_lists(
    prompt_tokens: Any, completions: list[Completion], encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """The token ids of each prompt: by default encoded. Raises UserError unless each is a list of integers."""
    if prompt_tokens is None:
        return [encode(completion.prompt) for completion in completions]
    try:
        lists = [[operator.index(token) for token in tokens] for tokens in prompt_tokens]
    except TypeError:
        raise UserError("prompt_tokens must be a list of token ids (whole numbers) for each prompt") from None
    if len(lists) != len(completions):
        raise UserError(f"{len(completions)} prompts and {len(lists)} lists of prompt_tokens: give one each")
    return lists


def check_prompt(
    tokens: list[int], tokenizer: Tokenizer, config: ThinkerConfig, max_len: float, hint: str = "",
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> None:  # fmt: skip
    """Raise UserError if a prompt is empty, too long, or too short for a bidirectional prefix, or an id is unknown."""
    start, prefix = f"the prompt has {len(tokens)} tokens", config.prefix
    if len(tokens) < max(1, prefix):
        need = f"the model's bidirectional prefix needs at least {prefix}" if prefix else "there must be at least one"
        raise UserError(f"{start}; {need}")
    if len(tokens) > max_len:
        raise UserError(f"{start} and the model's context is {max_len}; shorten it to at most {max_len} tokens{hint}")
    last = tokenizer.vocab_size - 1
    for token, _ in logit_bias:
        if token > last:
            raise UserError(f"logit_bias names the token {token}; the vocabulary ends at {last}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token <= last:
            raise UserError(f"the prompt has the token id {token}; the vocabulary is 0 to {last}")


def check_cache_fits(generator: Any, model: Thinker, n_sequences: int, max_len: int) -> None:
    """Raise UserError where a Generator's cache is more than the memory; that of one sequence takes it as it grows."""
    cached = min(max_len, math.inf if generator.window is None else generator.window + generator.sinks)
    if n_sequences > 1 and generator.use_cache:
        needed = n_sequences * KVCache(model.config, 1, cached, "meta", model.dtype).nbytes
        check_memory({"cache": needed}, model.device, "ask for fewer samples, or fewer new tokens")
