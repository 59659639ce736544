"""Verify that generate() of transformers continues a prompt like our Generator."""

from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.errors import RunError

PROMPT = "The"  # short enough for any context
MAX_NEW_TOKENS = 60
TOLERANCE = 1e-5  # of logits, relative to the largest logit or 1


def is_likeliest(logits: Tensor, token: int) -> bool:
    """Whether the token's logit is the largest of (V,), up to rounding.

    Rounding may swap nearly equal logits.
    """
    largest = logits.abs().max().item()
    return bool(logits.max() - logits[token] <= TOLERANCE * max(1.0, largest))


def comparable_positions(model: Thinker) -> float:
    """The number of positions that a cache may hold while both sides compute the same."""
    if model.rope is None:  # learned positions end
        return model.config.max_seq_len
    # Beyond this, dynamic RoPE changes its angles, in transformers at other steps than here.
    return model.rope.max_static_len


def verify_text(model: Thinker, tokenizer: Tokenizer, hf_model: Any, hf_tokenizer: Any) -> str:
    """Compare the texts, including the BOS token, and return a summary.

    Raises RunError if they differ.
    """
    n_new = max(1, int(min(MAX_NEW_TOKENS, comparable_positions(model) - 8)))
    params = SamplingParams(max_new_tokens=n_new, temperature=0)
    ours = Generator(model, tokenizer).generate(PROMPT, params)
    new = ours[0].token_ids
    known = tokenizer.decode([*tokenizer.encode(PROMPT), *new])

    # The model may have more ids than the tokenizer. Our Generator never samples those.
    padding = None
    if model.config.vocab_size > tokenizer.vocab_size:
        padding = list(range(tokenizer.vocab_size, model.config.vocab_size))
    inputs = hf_tokenizer(PROMPT, return_tensors="pt")
    output = hf_model.generate(
        **inputs, max_new_tokens=len(new), do_sample=False, suppress_tokens=padding
    )[0]
    text = hf_tokenizer.decode(output, skip_special_tokens=True)
    if text == known:
        return f"identical text after {PROMPT!r}"

    prompt = [*tokenizer.bos_prefix, *tokenizer.encode(PROMPT)]
    n_equal = common_prefix(output.tolist(), prompt + new)
    if len(prompt) <= n_equal < len(output):
        logits = model(torch.tensor([output[:n_equal].tolist()]))[0, -1, : tokenizer.vocab_size]
        if is_likeliest(logits, int(output[n_equal])):
            n = n_equal - len(prompt)
            return f"{n} identical tokens after {PROMPT!r}, up to a tie between the largest logits"
    raise RunError(
        f"transformers continues {PROMPT!r} as {text!r}, Thinker as {known!r}; nothing was written"
    )
