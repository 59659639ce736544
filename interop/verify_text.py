"""Verify that generate() of transformers continues a prompt like our Generator, including the BOS token."""

import operator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.errors import RunError

PROMPT = "The"  # short enough for any context
MAX_NEW_TOKENS = 60
TOLERANCE = 1e-5  # of logits, relative to the largest logit or 1


def is_likeliest(logits: Tensor, token: int) -> bool:
    """Whether the token's logit is the largest of (V,) up to rounding, which may swap nearly equal logits."""
    return bool(logits.max() - logits[token] <= TOLERANCE * max(1.0, logits.abs().max().item()))


def verify_text(model: Thinker, tokenizer: Tokenizer, hf_model: Any, hf_tokenizer: Any) -> str:
    """Compare the texts and return a summary. Raises RunError if they differ."""
    # Beyond this length dynamic RoPE changes its angles, in transformers at other steps than here.
    n_new = max(1, int(min(MAX_NEW_TOKENS, model.rope.max_static_len - 8)))
    ours = Generator(model, tokenizer).generate(
        PROMPT, SamplingParams(max_new_tokens=n_new, temperature=0)
    )
    n_tokens, padding = (
        len(ours[0].token_ids),
        [*range(tokenizer.vocab_size, model.config.vocab_size)] or None,
    )
    tokens = hf_tokenizer(PROMPT, return_tensors="pt")
    output = hf_model.generate(
        **tokens, max_new_tokens=n_tokens, do_sample=False, suppress_tokens=padding
    )[0]
    text = hf_tokenizer.decode(output, skip_special_tokens=True)
    if text == (known := tokenizer.decode([*tokenizer.encode(PROMPT), *ours[0].token_ids])):
        return f"identical text after {PROMPT!r}"
    prompt, new = [*tokenizer.bos_prefix, *tokenizer.encode(PROMPT)], ours[0].token_ids
    n_equal = sum(takewhile(bool, map(operator.eq, output.tolist(), prompt + new)))
    if len(prompt) <= n_equal < len(output):
        logits = model(torch.tensor([output[:n_equal].tolist()]))[0, -1, : tokenizer.vocab_size]
        if is_likeliest(logits, int(output[n_equal])):
            n = n_equal - len(prompt)
            return f"{n} identical tokens after {PROMPT!r}, up to a tie between the largest logits"
    raise RunError(
        f"transformers continues {PROMPT!r} as {text!r}, generate.py as {known!r}; nothing was written"
    )
