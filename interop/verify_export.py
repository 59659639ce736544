"""Verify with transformers or llama.cpp that an export computes the same as the model."""

import random
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.verify_text import TOLERANCE, is_likeliest, verify_text
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError

MAX_POSITIONS = 256  # compared logits
MAX_GREEDY_TOKENS = 64
TEXTS_PER_BATCH = 500
KINDS = (
    "0123456789",
    " \t\n\r\u00a0\u3000\x0b\u0085",
    "\0\x01\x1b\x7f\ufeff\u200b\u200d\u0301",
    "aeiou'.,-_/\\(){}<|>",
)


def adversarial_texts(names: list[str]) -> Iterator[str]:
    """Yield random texts: letters of every Unicode category, digits, spaces, controls, names of special tokens."""
    rng = random.Random(0)
    by_category: dict[str, list[str]] = {}
    for point in rng.sample(range(sys.maxunicode + 1), 100_000):
        by_category.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
    by_category.pop("Cs", None)  # half of a surrogate pair is not text
    kinds = [*by_category.values(), *KINDS, *KINDS, *([names] if names else [])]
    words = [
        "don't",
        "we'LL",
        " The",
        "naïve",
        "Straße",
        "日本語",
        "🙂👩\u200d👧",
        "x = 3.14159",
        "ﬁn",
        "ا٣",
        "한국어",
    ]
    while True:
        yield "".join(
            rng.choice(words)
            if rng.random() < 0.2
            else "".join(rng.choices(rng.choice(kinds), k=rng.randrange(1, 9)))
            for _ in range(rng.randrange(1, 8))
        )


def check_greedy(
    model: Thinker, tokens: Tensor, steps: int, next_logits: Callable[[Tensor], Tensor], who: str
) -> None:
    """Compare greedy tokens, decoded with a cache. next_logits: new tokens (1, T) -> (1, T, V) or (1, 1, V)."""
    cache = model.new_cache(1, tokens.shape[1] + steps)
    for step in range(steps):
        logits = model(tokens, cache=cache, last_logits_only=True)[0, -1]  # (V,)
        other_token = int(next_logits(tokens)[0, -1].argmax())
        tokens = logits.argmax()[None, None]  # (1, 1)
        if not is_likeliest(logits, other_token):
            raise RunError(
                f"{who} chooses a different token at greedy step {step}; nothing was written"
            )


@torch.no_grad()
def verify_hf_export(
    model: Thinker,
    tokenizer: Tokenizer | None,
    folder: Path,
    n_texts: int = 5000,
    base: Path | None = None,
) -> str:
    """Compare an exported folder, opened with transformers, with the original model and tokenizer.

    base: the folder of the base model, if the export is a peft adapter. Returns a summary of the checks. Raises
    RunError if results differ, UserError without transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "verifying the export needs the transformers package; run pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        base or folder, dtype=torch.float32
    ).eval()
    cache = transformers.DynamicCache(config=hf_model.config)
    if base is not None:
        from peft import PeftModel

        with warnings.catch_warnings():  # from peft's use of transformers
            warnings.simplefilter("ignore", FutureWarning)
            hf_model = PeftModel.from_pretrained(hf_model, folder).eval()
    model, length = model.to("cpu").eval(), min(MAX_POSITIONS, model.config.max_seq_len)
    tokens = torch.randint(
        model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)
    )
    logits = model(tokens)  # (2, T, V)
    difference, largest = (
        (logits - hf_model(tokens).logits).abs().max().item(),
        logits.abs().max().item(),
    )
    if not difference <= TOLERANCE * max(1.0, largest):
        raise RunError(
            f"the logits from transformers differ by {difference:.2g}; nothing was written"
        )
    steps = int(
        min(MAX_GREEDY_TOKENS, model.rope.max_static_len - 4)
    )  # maximum of a cache with dynamic RoPE
    hf_logits = partial(hf_model, past_key_values=cache, use_cache=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions rename past_key_values
        check_greedy(model, tokens[:1, :4], steps, lambda x: hf_logits(x).logits, "transformers")
    compared = (
        f"logits equal within {difference:.1e} (largest: {largest:.0f}) at {length} positions"
    )
    compared += f", {steps} equal greedy tokens"
    if tokenizer is None:
        return compared
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    is_qwen = type(hf_tokenizer).__name__.startswith("Qwen2")
    texts = islice(adversarial_texts(list(tokenizer.special_tokens)), n_texts)
    with tqdm(total=n_texts, desc="comparing tokenizers", unit=" texts", leave=False) as bar:
        while batch := list(islice(texts, TEXTS_PER_BATCH)):
            for text, ids in zip(batch, hf_tokenizer(batch, add_special_tokens=False)["input_ids"]):
                if tokenizer.encode(text, allow_special=True) != ids:
                    reason = " (for qwen2, it always splits text as Qwen does)" if is_qwen else ""
                    raise RunError(
                        f"transformers tokenizes {text!r} differently{reason}; nothing was written"
                    )
            bar.update(len(batch))
    compared += f", {n_texts:,} texts tokenized identically"
    return (
        compared
        if base is not None
        else f"{compared}, {verify_text(model, tokenizer, hf_model, hf_tokenizer)}"
    )
