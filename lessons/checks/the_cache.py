"""Checks of the lesson "The cache, and why not an RNN?"."""

from typing import Any

import torch
from torch import Tensor

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.masks import ForwardContext

PROMPT, N_NEW, N_READ = [1, 5, 2, 7, 3], 6, 3
BUGS = ("position", "mask", "store")
BYTES = (
    2 * 32 * 8 * 128 * 4096 * 2
)  # keys and values, layers, KV heads, width, tokens, bytes per number
MYSTERY_TEXT = [3, 1, 0, 2, 2, 1, 3]


def random_model(vocab_size: int, seed: int = 0) -> Thinker:
    """A model whose attention matters: all its matrices are random."""
    config = ThinkerConfig(vocab_size, d_model=16, n_layers=2, n_heads=2, d_ff=32, max_seq_len=32)
    model, generator = Thinker(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5, generator=generator)
    return model.eval()


class CountingModel:
    """A model that counts the positions that it reads, and how many caches it is asked for."""

    def __init__(self, model: Thinker) -> None:
        self.model, self.n_read, self.n_without_cache, self.n_caches = model, 0, 0, 0

    def __call__(self, tokens: Tensor, cache: KVCache | None = None, **options: Any) -> Tensor:
        """Logits of the model."""
        self.n_read += tokens.shape[1]
        self.n_without_cache += cache is None
        return self.model(tokens, cache=cache, **options)

    def new_cache(self, *sizes: int, **options: int) -> KVCache:
        """A cache of the model."""
        self.n_caches += 1
        return self.model.new_cache(*sizes, **options)


def continue_text(model: Thinker, prompt: list[int], n_new: int) -> list[int]:
    """The likeliest token, n_new times, each computed in a pass of its own."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(n_new):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@exercise
def check_decoding(answer: Any) -> str | None:
    """A function decode(model, prompt, n_new) -> the list of n_new likeliest tokens, with a
    cache."""
    model = CountingModel(random_model(11, seed=28))
    right = continue_text(model.model, PROMPT, N_NEW)
    with torch.no_grad():
        found = [int(token) for token in call(answer, model, list(PROMPT), N_NEW)]
    n_needed = len(PROMPT) + N_NEW - 1
    if found == [*PROMPT, *right]:
        return "Not yet: return the new tokens only, without the prompt."
    if model.n_without_cache:
        return "Not yet: at least one call of the model gets no cache. Pass cache=cache every time."
    if model.n_caches > 1:
        return f"Not yet: you made {model.n_caches} caches. One, made before the loop, serves the whole text."
    if len(found) != N_NEW:
        return f"Not yet: {N_NEW} new tokens are wanted, and you returned {len(found)}."
    if found == right:
        return describe_work(model.n_read, n_needed)
    if found[0] != right[0]:
        return "Not yet: the first new token is wrong. The prompt is read in one pass, and its last logits decide."
    if model.n_read > n_needed + 1:
        work = f"the model read {model.n_read} positions, and {n_needed} are needed"
        return f"Not yet: {work}. The cache adds what you pass to what it has: pass only the newest token."
    if found[1:] == right[:-1]:
        return "Not yet: the first new token comes twice. After the prompt, read that token, not the prompt's last one."
    return "Not yet: the first new token is right, a later one is wrong. Which token does each pass of the loop read?"


def describe_work(n_read: int, n_needed: int) -> str | None:
    """What is wrong with the work of an answer whose tokens are right."""
    if n_read <= n_needed:
        return None
    if n_read == n_needed + 1:
        return "Almost: the tokens are right, but the last one is read too, and nobody needs the logits after it."
    return f"Not yet: the tokens are right, but the model read {n_read} positions, and {n_needed} are enough."


@exercise
def check_bytes(answer: Any) -> str | None:
    """The bytes of the cache of a model with 32 layers, 8 KV heads of width 128, bf16, and 4,096
    tokens."""
    if is_near(answer, BYTES, 0.5):
        return None
    hints = {
        4: "Not yet: that is 4 times too much. Only the 8 KV heads are stored; the 32 query heads share them.",
        2: "Not yet: that is twice as much. A number in bf16 takes 2 bytes.",
        8: "Not yet: that is 8 times too much. Store 8 KV heads, not 32, and 2 bytes per number, not 4.",
        1
        / 2: "Not yet: that is half of it. Either keys or values are missing, or a number has only 1 byte.",
        1 / 32: "Not yet: that is a single layer. Each layer has keys and values of its own.",
        1 / 4096: "Not yet: those are the bytes per token. The cache holds 4,096 tokens.",
        1 / 128: "Not yet: each head has 128 numbers per token.",
        1 / 8: "Not yet: that is a single KV head. Each layer has 8.",
    }
    for factor, hint in hints.items():
        if is_near(answer, BYTES * factor, 0.5):
            return hint
    if is_near(float(answer) * 2**20, BYTES, 0.5) or is_near(float(answer) * 2**30, BYTES, 0.5):
        return "Not yet: the answer is wanted in bytes."
    return "Not yet: multiply 2 (keys and values) by layers, KV heads, width, tokens, and bytes per number."


class BrokenCache(KVCache):
    """A cache with one of BUGS, which shows when single tokens are read."""

    bug = ""

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """As KVCache.append, with the bug."""
        context = super().append(batch_size, length, tokens)
        if self.lengths[0] > length:
            if self.bug == "position":
                context.positions, context.end = context.positions + 1, context.end + 1
            else:
                allowed = torch.ones(1, 1, 1, self.lengths[0], dtype=torch.bool)
                allowed[..., N_READ if self.bug == "store" else 0 : -1] = self.bug != "store"
                allowed[..., 0] = self.bug != "mask"
                context.masks = [AttentionMask(allowed)] * len(context.masks)
        return context


def cached_logits(model: Thinker, bug: str = "") -> Tensor:
    """Logits (T, V) of MYSTERY_TEXT: N_READ tokens in one pass, then one token at a time."""
    cache = BrokenCache(model.config, 1, len(MYSTERY_TEXT), model.device, model.dtype)
    cache.bug = bug
    tokens = torch.tensor([MYSTERY_TEXT])
    parts = (tokens[:, :N_READ], *tokens[:, N_READ:].split(1, dim=1))
    with torch.no_grad():
        return torch.cat([model(part, cache=cache)[0].float() for part in parts])


def mystery_tables() -> dict[str, Tensor]:
    """Logits (7, 4) of one pass, and of the caches A, B and C: in bf16, with a bug, and in fp32."""
    model = random_model(4, seed=1)
    tables = {"one pass": model(torch.tensor([MYSTERY_TEXT]))[0].detach()}
    tables["B"], tables["C"] = cached_logits(model, "store"), cached_logits(model)
    tables["A"] = cached_logits(model.to(torch.bfloat16))
    return {name: tables[name] for name in ("one pass", "A", "B", "C")}


@exercise
def check_suspect(answer: Any) -> str | None:
    """A pair: the table of the broken cache ("A", "B" or "C"), and its bug, one of BUGS."""
    table, bug = answer
    if table is ... or bug is ...:
        return "Not answered yet: replace the dots."
    if bug not in BUGS:
        return f"Not yet: the bug is one of {', '.join(BUGS)}."
    if table == "A":
        return "Not yet: A differs a little in every row, also where nothing was cached. That is rounding."
    if table == "C":
        return "Not yet: C equals the logits of one pass in all digits that are shown."
    if table != "B":
        return "Not yet: the first part of the answer is A, B or C."
    if bug == "position":
        return "Not yet: with a wrong position, the very first token that is read alone (row 3) would be wrong."
    if bug == "mask":
        return "Not yet: if the oldest key were hidden, row 3 would be wrong: it would miss a key of the prompt."
    return None
