"""Check that the obvious three lines of transformers continue a prompt as our Generator does, BOS token included."""

from typing import Any

from thinker.data.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker
from thinker.runtime.errors import RunError

PROMPT = "The"  # few tokens, so that it fits the shortest context
MAX_NEW_TOKENS = 60


def verify_text(model: Thinker, tokenizer: Tokenizer, hf_model: Any, hf_tokenizer: Any) -> str:
    """Compare the texts. Returns what was compared, in words; raises RunError where they differ."""
    # Dynamic RoPE changes its angles beyond this length, here and there at other moments.
    n_new = max(1, int(min(MAX_NEW_TOKENS, model.rope.max_static_len - 8)))
    ours = Generator(model, tokenizer).generate(PROMPT, SamplingParams(max_new_tokens=n_new, temperature=0))
    n_tokens, padding = len(ours[0].token_ids), [*range(tokenizer.vocab_size, model.config.vocab_size)] or None
    tokens = hf_tokenizer(PROMPT, return_tensors="pt")
    output = hf_model.generate(**tokens, max_new_tokens=n_tokens, do_sample=False, suppress_tokens=padding)[0]
    text = hf_tokenizer.decode(output, skip_special_tokens=True)
    if text != (known := tokenizer.decode([*tokenizer.encode(PROMPT), *ours[0].token_ids])):
        raise RunError(f"transformers continues {PROMPT!r} as {text!r}, generate.py as {known!r}; nothing was written")
    return f"the text after {PROMPT!r} equal"
