"""Checks of the lesson "Many heads, few keys"."""

import math
from typing import Any

import torch

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.attention_dispatch import AttentionMask, attend

MIB, GIB = 2**20, 2**30
LAYOUTS = {"A": (16, 4, 256), "B": (32, 16, 128), "C": (64, 8, 64)}  # query heads, KV heads, D


def heads_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """What Thinker computes: q (H, T, D), k, v (K or H, T, D) -> (H, T, D)."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    return attend(q[None], k[None], v[None], AttentionMask(is_causal=causal), scale)[0]


def merge(y: torch.Tensor) -> torch.Tensor:
    """(H, T, D) -> (T, H · D)."""
    return y.transpose(0, 1).flatten(1)


@exercise
def check_grouped(answer: Any) -> str | None:
    """A function (q (H, T, D), k, v (K, T, D)) -> (T, H · D), causal and scaled, whose query heads
    share KV heads."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64)
    found = torch.as_tensor(call(answer, q, k, v))
    right = heads_of(q, k, v)
    if found.shape == right.shape:
        return "Not yet: the result has shape (H, T, D). Merge the heads, so that each token has one long row."
    if is_near(found, merge(right)):
        return None
    if is_near(found, right.reshape(5, 24)):
        return "Not yet: the heads were joined without a transpose, so the rows mix tokens. Put tokens first."
    if is_near(found, right.permute(1, 2, 0).flatten(1)):
        return "Not yet: the D numbers of a head have to stay together. Move H to the place between T and D."
    tiled_k, tiled_v = k.repeat(3, 1, 1), v.repeat(3, 1, 1)
    if is_near(found, merge(heads_of(q, tiled_k, tiled_v))):
        return "Not yet: the query heads read KV heads 0, 1, 0, 1, 0, 1. Neighbors have to share: 0, 0, 0, 1, 1, 1."
    if is_near(found, merge(heads_of(q, tiled_k, v))) or is_near(
        found, merge(heads_of(q, k, tiled_v))
    ):
        return "Not yet: keys and values were repeated in different orders."
    if is_near(found, merge(heads_of(q, k[:1], v[:1]))):
        return (
            "Not yet: all query heads read KV head 0. There are two, with three query heads each."
        )
    if is_near(found, merge(heads_of(q, k, v, causal=False))):
        return "Not yet: each token sees later tokens. Hide them before the softmax."
    if is_near(found, merge(heads_of(q, k, v, scale=1.0))):
        return "Not yet: the scores are not divided by √D."
    if is_near(found, merge(heads_of(q, k, v, scale=1 / math.sqrt(24)))):
        return "Not yet: divide by the root of the width of one head, not of all heads together."
    return "Not yet: check the steps one by one. Compare your heads before the merge with attend(q[None], k[None], ...)."


@exercise
def check_cache(answer: Any) -> str | None:
    """MiB of the cache of 24 layers with 16 query heads, 4 KV heads and D = 64, in bf16, for 4,096
    tokens."""
    right = cache_bytes(24, 4, 64, 2, 4096) / MIB
    if is_near(answer, right, 0.1):
        return None
    mistakes = {
        right * MIB: "these are bytes. Divide them by 2²⁰.",
        right * MIB / 1e6: "1 MiB has 2²⁰ bytes, not a million.",
        right * 4: "the cache holds keys and values of the 4 KV heads. Query heads do not count.",
        right
        / 2: "a token needs a key and also a value, or a number has more bytes than you counted.",
        right * 2: "a number in bf16 has 2 bytes.",
        right / 24: "this is the cache of one layer.",
        right / 4: "this is the cache of one KV head.",
        right / 64: "each key has D numbers.",
    }
    for wrong, hint in mistakes.items():
        if is_near(answer, wrong, 0.01 * wrong):
            return f"Not yet: {hint}"
    if is_near(answer, right * MIB / 4096) or is_near(answer, right / 4096, 1e-3):
        return "Not yet: this is the cache of a single token. There are 4,096."
    return "Not yet: first multiply 2 · layers · KV heads · D · bytes for one token, then think of all tokens."


@exercise
def check_layout(answer: Any) -> str | None:
    """The letter of the layout whose cache of 32,768 tokens fits in 3 GiB, and its GiB (32 layers,
    bf16)."""
    if isinstance(answer, str) or len(answer) != 2:
        return 'Not yet: give the letter and the number of GiB, such as ("A", 1.5).'
    letter, gib = answer
    if letter not in LAYOUTS:
        return "Not yet: the letter is A, B or C."
    query_heads, kv_heads, width = LAYOUTS[letter]
    right, queries = (
        cache_bytes(32, heads, width, 2, 2**15) / GIB for heads in (kv_heads, query_heads)
    )
    if is_near(gib, right, 0.05):
        return (
            None
            if right <= 3
            else f"Not yet: your number is right, but {right:.0f} GiB do not fit in 3 GiB."
        )
    if is_near(gib, queries, 0.05):
        return "Not yet: you counted the query heads. They store nothing, so the cache holds only the KV heads."
    if is_near(gib, right / 2, 0.05):
        return "Not yet: a token needs both a key and a value, and a number in bf16 has 2 bytes."
    if is_near(gib, right * 2, 0.05):
        return "Not yet: a number in bf16 has 2 bytes."
    if letter != "C":
        return "Not yet: few heads can be wide. Multiply the KV heads by D for all three models, and compare."
    return "Not yet: the model is right, but not the size: 2 · layers · KV heads · D · bytes, for every token."


def cache_bytes(n_layers: int, n_kv_heads: int, width: int, bytes_each: int, n_tokens: int) -> int:
    """Bytes of all keys and values."""
    return 2 * n_layers * n_kv_heads * width * bytes_each * n_tokens
