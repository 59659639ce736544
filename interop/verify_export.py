"""Verify with transformers or llama.cpp that an export computes the same as the model."""

import random
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.verify_text import TOLERANCE, comparable_positions, is_likeliest, verify_text
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError, install_command
from thinker.runtime.process.progress import Progress

MAX_POSITIONS = 256  # compared logits
MAX_GREEDY_TOKENS = 64
TEXTS_PER_BATCH = 500

# Where tokenizers differ: characters of the same kind, and words.
KINDS = (
    "0123456789",
    " \t\n\r\u00a0\u3000\x0b\u0085",
    "\0\x01\x1b\x7f\ufeff\u200b\u200d\u0301",
    "aeiou'.,-_/\\(){}<|>",
)
WORDS = [
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


def adversarial_texts(names: list[str], seed: int = 0) -> Iterator[str]:
    """Yield random texts without end.

    They have letters of every Unicode category, digits, spaces, controls, and `names`, the names of
    special tokens.
    """
    rng = random.Random(seed)
    by_category: dict[str, list[str]] = {}
    for point in rng.sample(range(sys.maxunicode + 1), 100_000):
        character = chr(point)
        by_category.setdefault(unicodedata.category(character), []).append(character)
    by_category.pop("Cs", None)  # half of a surrogate pair is not text
    kinds = [*by_category.values(), *KINDS, *KINDS]
    if names:
        kinds.append(names)
    while True:
        parts = []
        for _ in range(rng.randrange(1, 8)):
            if rng.random() < 0.2:
                parts.append(rng.choice(WORDS))
            else:
                parts += rng.choices(rng.choice(kinds), k=rng.randrange(1, 9))
        yield "".join(parts)


def check_greedy(
    model: Thinker, tokens: Tensor, steps: int, next_logits: Callable[[Tensor], Tensor], who: str
) -> None:
    """Compare greedy tokens, decoded with a cache. Raises RunError if they differ.

    next_logits: new tokens (1, T) -> (1, T, V) or (1, 1, V).
    """
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

    base: the folder of the base model, if the export is a peft adapter. Returns a summary of the
    checks. Raises RunError if results differ, UserError without transformers.
    """
    try:
        import transformers
    except ImportError as error:
        problem = "verifying the export needs the transformers package"
        raise UserError(f"{problem}; run {install_command('hf')}") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        base or folder, dtype=torch.float32
    ).eval()
    cache = transformers.DynamicCache(config=hf_model.config)
    if base is not None:
        hf_model = _add_adapter(hf_model, folder)
    model = model.to("cpu").eval()

    summary = [_check_logits(model, hf_model), _check_greedy(model, hf_model, cache)]
    if tokenizer is not None:
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        summary.append(_check_tokenizer(tokenizer, hf_tokenizer, n_texts))
        if base is None:
            summary.append(verify_text(model, tokenizer, hf_model, hf_tokenizer))
    return ", ".join(summary)


def _add_adapter(hf_model: Any, folder: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():  # from peft's use of transformers
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(hf_model, folder).eval()


def _test_tokens(model: Thinker) -> Tensor:
    """Random tokens (2, T), always the same."""
    length = min(MAX_POSITIONS, model.config.max_seq_len)
    rng = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (2, length), generator=rng)


def _check_logits(model: Thinker, hf_model: Any) -> str:
    """Compare the logits of a batch of tokens."""
    tokens = _test_tokens(model)
    logits = model(tokens)  # (2, T, V)
    difference = (logits - hf_model(tokens).logits).abs().max().item()
    largest = logits.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):  # also if it is NaN
        raise RunError(
            f"the logits from transformers differ by {difference:.2g}; nothing was written"
        )
    return (
        f"logits equal within {difference:.1e} (largest: {largest:.0f}) "
        f"at {tokens.shape[1]} positions"
    )


def _check_greedy(model: Thinker, hf_model: Any, cache: Any) -> str:
    """Compare greedy tokens, decoded with a cache."""
    prompt = _test_tokens(model)[:1, :4]
    steps = int(min(MAX_GREEDY_TOKENS, comparable_positions(model) - 4))

    def next_logits(tokens: Tensor) -> Tensor:
        return hf_model(tokens, past_key_values=cache, use_cache=True).logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions rename past_key_values
        check_greedy(model, prompt, steps, next_logits, "transformers")
    return f"{steps} equal greedy tokens"


def _check_tokenizer(tokenizer: Tokenizer, hf_tokenizer: Any, n_texts: int) -> str:
    """Compare the tokens of random texts."""
    reason = ""
    if type(hf_tokenizer).__name__.startswith("Qwen2"):
        # transformers replaces the split pattern of the file by its own.
        reason = " (for qwen2, it always splits text as Qwen does)"
    texts = islice(adversarial_texts(list(tokenizer.special_tokens)), n_texts)
    with Progress(total=n_texts, desc="comparing tokenizers", unit=" texts", leave=False) as bar:
        while batch := list(islice(texts, TEXTS_PER_BATCH)):
            encoded = hf_tokenizer(batch, add_special_tokens=False)["input_ids"]
            for text, ids in zip(batch, encoded):
                if tokenizer.encode(text, allow_special=True) != ids:
                    raise RunError(
                        f"transformers tokenizes {text!r} differently{reason}; nothing was written"
                    )
            bar.update(len(batch))
    return f"{n_texts:,} texts tokenized identically"
