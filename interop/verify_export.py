"""Check that an exported folder or file computes what the Thinker does, with transformers or llama.cpp."""

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

TOLERANCE = 1e-5  # relative to the largest logit, or to 1
MAX_POSITIONS = 256  # whose logits are compared
MAX_GREEDY_TOKENS = 64
TEXTS_PER_BATCH = 500
CHARACTERS = (
    "0123456789",
    " \t\n\r\u00a0\u3000\x0b\u0085",
    "\0\x01\x1b\x7f\ufeff\u200b\u200d\u0301",
    "aeiou'.,-_/\\(){}<|>",
)


@dataclass(frozen=True)
class Parity:
    """What an exported model and its original agree on."""

    logit_difference: float  # the largest one
    largest_logit: float
    n_positions: int
    n_greedy: int
    n_texts: int

    def __str__(self) -> str:
        texts = f", {self.n_texts:,} texts tokenized equally" if self.n_texts else ""
        logits = f"logits of up to {self.largest_logit:.0f} within {self.logit_difference:.1e}"
        return f"{logits} at {self.n_positions} positions, {self.n_greedy} greedy tokens equal{texts}"


def adversarial_texts(names: list[str], seed: int = 0) -> Iterator[str]:
    """Endless random texts: letters of every Unicode category, digits, spaces, controls, names of special tokens."""
    rng = random.Random(seed)
    by_category: dict[str, list[str]] = {}
    for point in rng.sample(range(sys.maxunicode + 1), 100_000):
        by_category.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
    by_category.pop("Cs", None)  # half of a surrogate pair is not text
    kinds = [*by_category.values(), *CHARACTERS, *CHARACTERS, *([names] if names else [])]
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
    """Compare an exported folder, as transformers opens it, with the model and tokenizer it was written from.

    base: the folder of the base model, where the exported folder holds a peft adapter for it.

    Raises RunError where they differ, UserError where transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("checking the export needs the library transformers: pip install transformers") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32).eval()
    if base is not None:
        from peft import PeftModel

        with warnings.catch_warnings():  # peft's use of transformers
            warnings.simplefilter("ignore", FutureWarning)
            hf_model = PeftModel.from_pretrained(hf_model, folder).eval()
    model, generator = model.to("cpu").eval(), torch.Generator().manual_seed(seed)
    length = min(MAX_POSITIONS, model.config.max_seq_len)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    logits = model(tokens)  # (2, T, V)
    difference = (logits - hf_model(tokens).logits).abs().max().item()
    largest = logits.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):
        raise RunError(f"transformers computes other logits: they differ by {difference:.2g}; nothing was written")
    # With dynamic RoPE, a cache ends at the pretraining length.
    steps = int(min(MAX_GREEDY_TOKENS, model.rope.max_static_len - 4))
    greedy = _greedy(model, tokens[:1, :4], steps)
    hf_greedy = _hf_greedy(hf_model, tokens[:1, :4], steps)
    for step, (token, hf_token) in enumerate(zip(greedy, hf_greedy)):
        if token != hf_token:
            raise RunError(f"transformers chooses another token at greedy step {step}; nothing was written")
    if tokenizer is None:
        return Parity(difference, largest, length, steps, 0)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    is_qwen = type(hf_tokenizer).__name__.startswith("Qwen2")
    texts = adversarial_texts(list(tokenizer.special_tokens), seed)
    with tqdm(total=n_texts, desc="comparing tokenizers", unit=" texts", leave=False) as bar:
        for start in range(0, n_texts, TEXTS_PER_BATCH):
            batch = [next(texts) for _ in range(min(TEXTS_PER_BATCH, n_texts - start))]
            hf_ids = hf_tokenizer(batch, add_special_tokens=False)["input_ids"]
            for text, ids in zip(batch, hf_ids):
                if tokenizer.encode(text, allow_special=True) != ids:
                    reason = ": for a qwen2 it splits text as Qwen does, whatever the files say" if is_qwen else ""
                    raise RunError(f"transformers tokenizes {text!r} otherwise{reason}; nothing was written")
            bar.update(len(batch))
    return Parity(difference, largest, length, steps, n_texts)


@torch.no_grad()
def verify_gguf(model: Thinker, tokenizer: Tokenizer, path: Path, exact: bool, n_texts: int = 1000) -> str:
    """Compare a GGUF file, as llama.cpp opens it, with the model and tokenizer it was written from.

    Args:
        exact: the file's weights are fp32; rounded ones may choose another token, so only texts are compared.

    Returns: what was compared, in words.

    Raises RunError where they differ.
    """
    try:
        from llama_cpp import Llama
    except ImportError:
        return "not compared with llama.cpp, which is not installed (pip install llama-cpp-python)"
    steps, tokens = min(MAX_GREEDY_TOKENS, model.config.max_seq_len - 4), torch.tensor([[tokenizer.bos_id, 0, 1, 2]])
    options = {"type_k": 0, "type_v": 0, "n_threads": 1, "verbose": False}  # a cache of fp32
    llama = Llama(str(path), n_ctx=steps + 4, logits_all=True, **options)
    try:
        llama_greedy, new_tokens = [], tokens[0].tolist()
        for _ in range(steps):
            llama.eval(new_tokens)
            new_tokens = [int(llama.scores[llama.n_tokens - 1].argmax())]
            llama_greedy += new_tokens
        if exact and _greedy(model, tokens, steps) != llama_greedy:
            raise RunError("llama.cpp chooses other greedy tokens; nothing was written")
        texts = adversarial_texts(list(tokenizer.special_tokens))
        for text in (text for text, _ in zip(texts, range(n_texts)) if "\0" not in text):  # which ends a text in C
            if llama.tokenize(text.encode(), add_bos=False, special=True) != tokenizer.encode(text, allow_special=True):
                raise RunError(f"llama.cpp tokenizes {text!r} otherwise; nothing was written")
    finally:
        llama.close()
    greedy = f"{steps} greedy tokens equal, " if exact else "weights rounded, tokens not compared (--dtype f32 would), "
    return f"compared with llama.cpp: {greedy}{n_texts:,} texts tokenized equally"


def _greedy(model: Thinker, tokens: Tensor, steps: int) -> list[int]:
    """Greedy tokens of our model, decoded with its cache."""
    cache, chosen = model.new_cache(1, tokens.shape[1] + steps), []
    for _ in range(steps):
        tokens = model(tokens, cache=cache, last_logits_only=True)[:, -1].argmax(-1, keepdim=True)  # (1, 1)
        chosen.append(tokens.item())
    return chosen


def _hf_greedy(model: torch.nn.Module, tokens: Tensor, steps: int) -> list[int]:
    """Greedy tokens of a model of transformers, decoded with its cache."""
    past, chosen = None, []
    for _ in range(steps):
        out = model(tokens, past_key_values=past, use_cache=True)
        tokens, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        chosen.append(tokens.item())
    return chosen
