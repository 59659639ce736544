"""Whether a Hugging Face folder computes what a Thinker does: asked of transformers itself."""

from __future__ import annotations

import random
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.data.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError

TOLERANCE = 1e-5  # of the largest logit, or of 1
LENGTH = 256  # positions whose logits are compared
STEPS = 64  # greedy tokens
TOGETHER = 500  # texts that are tokenized at once
CHOICES = (
    "0123456789",
    " \t\n\r\u00a0\u3000\x0b\u0085",
    "\0\x01\x1b\x7f\ufeff\u200b\u200d\u0301",
    "aeiou'.,-_/\\(){}<|>",
)


@dataclass(frozen=True)
class Parity:
    """What was found equal."""

    logit_difference: float  # the largest
    largest_logit: float
    n_positions: int
    n_greedy: int
    n_texts: int

    def __str__(self) -> str:
        texts = f", {self.n_texts:,} texts tokenized equally" if self.n_texts else ""
        logits = f"logits of up to {self.largest_logit:.0f} within {self.logit_difference:.1e}"
        return f"{logits} at {self.n_positions} positions, {self.n_greedy} greedy tokens equal{texts}"


def adversarial_texts(names: list[str], seed: int = 0) -> Iterator[str]:
    """Texts without end: letters of every Unicode category, digits, spaces, controls, names of special tokens."""
    rng = random.Random(seed)
    by_category: dict[str, list[str]] = {}
    for point in rng.sample(range(sys.maxunicode + 1), 100_000):
        by_category.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
    by_category.pop("Cs", None)  # half of a pair is no text
    kinds = [*by_category.values(), *CHOICES, *CHOICES, *([names] if names else [])]
    words = ["don't", "we'LL", " The", "naïve", "Straße", "日本語", "🙂👩\u200d👧", "x = 3.14159", "ﬁn", "ا٣", "한국어"]
    while True:
        parts = (
            rng.choice(words) if rng.random() < 0.2 else "".join(rng.choices(rng.choice(kinds), k=rng.randrange(1, 9)))
            for _ in range(rng.randrange(1, 8))
        )
        yield "".join(parts)


@torch.no_grad()
def verify_hf_export(
    model: Thinker,
    tokenizer: Tokenizer | None,
    folder: Path,
    n_texts: int = 5000,
    seed: int = 0,
    base: Path | None = None,
) -> Parity:
    """Compare a folder, opened by transformers, with the model and tokenizer that it was written from.

    `base`: the folder holds an adapter (peft) for the model in this one.

    Raises RunError where they differ, UserError where transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "the proof that an export is right needs the library transformers: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32).eval()
    if base is not None:
        from peft import PeftModel

        with warnings.catch_warnings():  # of one library about the other
            warnings.simplefilter("ignore", FutureWarning)
            theirs = PeftModel.from_pretrained(theirs, folder).eval()
    model, generator = model.to("cpu").eval(), torch.Generator().manual_seed(seed)
    length = min(LENGTH, model.config.max_seq_len)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    ours, other = model(tokens), theirs(tokens).logits  # (2, T, V)
    difference, largest = (ours - other).abs().max().item(), ours.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):
        raise RunError(f"transformers computes other logits: they differ by {difference:.2g}; nothing was written")
    steps = int(
        min(STEPS, model.rope.max_static_len - 4)
    )  # dynamic RoPE is decoded up to the length of the pretraining
    mine, its = _greedy(model, tokens[:1, :4], steps), _their_greedy(theirs, tokens[:1, :4], steps)
    if mine != its:
        at = next(place for place, both in enumerate(zip(mine, its)) if both[0] != both[1])
        raise RunError(f"transformers goes on with another token at greedy step {at}; nothing was written")
    if tokenizer is None:
        return Parity(difference, largest, length, steps, 0)
    its_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs_is_qwen = type(its_tokenizer).__name__.startswith("Qwen2")
    texts = adversarial_texts(list(tokenizer.special_tokens), seed)
    with tqdm(total=n_texts, desc="tokenizing alike", unit=" texts", leave=False) as bar:
        for start in range(0, n_texts, TOGETHER):
            some = [next(texts) for _ in range(min(TOGETHER, n_texts - start))]
            known = its_tokenizer(some, add_special_tokens=False)["input_ids"]
            for text, ids in zip(some, known):
                if tokenizer.encode(text, allow_special=True) != ids:
                    own = ": it cuts for a qwen2 as Qwen does, whatever the files say" * theirs_is_qwen
                    raise RunError(f"transformers tokenizes {text!r} otherwise{own}; nothing was written")
            bar.update(len(some))
    return Parity(difference, largest, length, steps, n_texts)


@torch.no_grad()
def verify_gguf(model: Thinker, tokenizer: Tokenizer, path: Path, exact: bool, n_texts: int = 1000) -> str:
    """Compare a GGUF file, opened by llama.cpp, with the model and tokenizer that it was written from; says how.

    Args:
        exact: the file's weights are fp32; rounded ones may choose another token, and only texts are compared.

    Raises RunError where they differ.
    """
    try:
        from llama_cpp import Llama
    except ImportError:
        return "not compared with llama.cpp, which is not installed (pip install llama-cpp-python)"
    steps, tokens = min(STEPS, model.config.max_seq_len - 4), torch.tensor([[tokenizer.bos_id, 0, 1, 2]])
    options = {"type_k": 0, "type_v": 0, "n_threads": 1, "verbose": False}  # a cache of fp32
    other = Llama(str(path), n_ctx=steps + 4, logits_all=True, **options)
    try:
        mine, its, fed = _greedy(model, tokens, steps), [], tokens[0].tolist()
        for _ in range(steps):
            other.eval(fed)
            fed = [int(other.scores[other.n_tokens - 1].argmax())]
            its += fed
        if exact and mine != its:
            raise RunError("llama.cpp goes on with other greedy tokens; nothing was written")
        texts = adversarial_texts(list(tokenizer.special_tokens))
        for text in (text for text, _ in zip(texts, range(n_texts)) if "\0" not in text):  # where its texts end
            if other.tokenize(text.encode(), add_bos=False, special=True) != tokenizer.encode(text, allow_special=True):
                raise RunError(f"llama.cpp tokenizes {text!r} otherwise; nothing was written")
    finally:
        other.close()
    greedy = f"{steps} greedy tokens equal, " if exact else "weights rounded, tokens not compared (--dtype f32 would), "
    return f"compared with llama.cpp: {greedy}{n_texts:,} texts tokenized equally"


def _greedy(model: Thinker, tokens: Tensor, steps: int) -> list[int]:
    """Through our cache."""
    cache, drawn = model.new_cache(1, tokens.shape[1] + steps), []
    for _ in range(steps):
        tokens = model(tokens, cache=cache, last_logits_only=True)[:, -1].argmax(-1, keepdim=True)  # (1, 1)
        drawn.append(tokens.item())
    return drawn


def _their_greedy(model: torch.nn.Module, tokens: Tensor, steps: int) -> list[int]:
    """Through theirs."""
    past, drawn = None, []
    for _ in range(steps):
        out = model(tokens, past_key_values=past, use_cache=True)
        tokens, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        drawn.append(tokens.item())
    return drawn
