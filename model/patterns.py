"""Who may look at whom: predicates over absolute positions, a few lines each, and how a config spells them.

`window(64) | global(4)`: names with numbers, joined by & (before |) and parentheses. docs/attention.md draws each.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from thinker.runtime.errors import UserError, did_you_mean

INVALID_POSITION = 1 << 40  # the position of a slot that holds no key yet: after every query
LARGEST = 1 << 24  # of any number in a pattern
LONGEST = 1000  # characters of a pattern's text
MOST = {"random": (1, 256), "bigbird": (3, 256), "linear": (0, 1 << 16)}  # of which number: blocks seen, features


@dataclass
class TokenInfo:
    """Queries or keys of a pass. The tensors of the two broadcast: queries (..., T, 1) against keys (..., 1, S)."""

    position: Tensor
    document: Tensor | None = None  # where documents are isolated; positions then count from each one's beginning
    token: Tensor | None = None  # ids, for patterns that ask for them
    scores: Tensor | None = None  # (B, H, T, S), of queries: for what is chosen by score


@dataclass(frozen=True)
class Pattern:
    """Which keys each query sees: allow(head, query, key) -> bool. `|` and `&` join two.

    What else is known of it decides kernels and caches: no key is seen from `reach` positions back or more, but for
    the first `first` of all.
    """

    text: str
    allow: Callable[[Tensor, TokenInfo, TokenInfo], Tensor] = field(compare=False, repr=False)
    reach: int | None = None  # keys, the query's own included; None: all of them
    first: int = 0
    ahead: int = 0  # the first so many positions are seen from before, too
    itself: bool = True  # every query sees itself at least
    by_head: bool = False
    tokens: tuple[int, ...] = ()  # the ids it asks for
    by_score: bool = False
    heads: int = 1  # that the model must have, or a part would be unused

    def __call__(self, head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        """True where the query sees the key: in its own document, if those are told apart."""
        seen = self.allow(head, query, key)
        return seen if query.document is None else seen & (query.document == key.document)

    @property
    def by_token(self) -> bool:
        """Whether it must know the tokens' ids."""
        return bool(self.tokens)

    @property
    def fits_ring_buffer(self) -> bool:
        """Whether a ring of the newest keys, beside the first ones, is all that decoding needs."""
        return self.reach is not None and not (self.by_token or self.by_score)

    def __or__(self, other: Pattern) -> Pattern:
        reach = None if None in (self.reach, other.reach) else max(self.reach, other.reach)
        allow, itself = lambda *places: self.allow(*places) | other.allow(*places), self.itself or other.itself
        return self._join(other, "|", allow, reach, max(self.ahead, other.ahead), itself)

    def __and__(self, other: Pattern) -> Pattern:
        reach = min((r for r in (self.reach, other.reach) if r is not None), default=None)
        allow, itself = lambda *places: self.allow(*places) & other.allow(*places), self.itself and other.itself
        return self._join(other, "&", allow, reach, min(self.ahead, other.ahead), itself)

    def _join(self, other: Pattern, sign: str, *facts: Any) -> Pattern:
        allow, reach, ahead, itself = facts
        asks = self.by_head or other.by_head, self.tokens + other.tokens, self.by_score or other.by_score
        text = f"({self.text} {sign} {other.text})"
        first, heads = max(self.first, other.first), max(self.heads, other.heads)
        return Pattern(text, allow, reach, first, ahead, itself, *asks, heads)


@dataclass(frozen=True)
class Linear:
    """No pattern: attention by a state of fixed size, from so many random features (model/linear_attention.py)."""

    text: str
    features: int
    reach, first, ahead, heads, tokens = 0, 0, 0, 1, ()  # as a pattern's
    by_token, by_head, fits_ring_buffer = False, False, True


def full() -> Pattern:
    """Every earlier position and itself (Vaswani et al. 2017, arXiv:1706.03762)."""
    return Pattern("full", lambda head, query, key: key.position <= query.position)


CAUSAL = full()


def window(w: int) -> Pattern:
    """The newest w keys, itself included (Beltagy et al. 2020, arXiv:2004.05150)."""
    return Pattern(
        f"window({w})",
        lambda head, query, key: (key.position <= query.position) & (query.position - key.position < w),
        reach=w,
    )


def dilated(w: int, d: int) -> Pattern:
    """Of the newest w keys every d-th (Beltagy et al. 2020)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        back = query.position - key.position
        return (back >= 0) & (back < w) & (back % d == 0)

    return Pattern(f"dilated({w}, {d})", allow, reach=w)


def first(g: int) -> Pattern:
    """`global(g)`: the first g positions are seen by all (Beltagy et al. 2020; as sinks Xiao et al. 2023)."""
    return Pattern(
        f"global({g})",
        lambda head, query, key: (key.position < g) & (key.position <= query.position),
        reach=0,
        first=g,
        itself=False,
    )


def token(*ids: int) -> Pattern:
    """Tokens with these ids are seen by all after them, and see all before them (Beltagy et al. 2020)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        is_global = sum((query.token == i) | (key.token == i) for i in ids) > 0
        return is_global & (key.position <= query.position)

    return Pattern(f"token({', '.join(map(str, ids))})", allow, itself=False, tokens=ids)


def block(b: int, n: int = 1) -> Pattern:
    """Blocks of b positions: its own and the n - 1 before (Qiu et al. 2020, arXiv:1911.02972)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return (key.position <= query.position) & (query.position // b - key.position // b < n)

    return Pattern(f"block({b}, {n})", allow, reach=n * b)


def strided(s: int) -> Pattern:
    """The newest s keys, and every s-th before; s about √T (Child et al. 2019, arXiv:1904.10509)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        back = query.position - key.position
        return (back >= 0) & ((back < s) | (back % s == 0))

    return Pattern(f"strided({s})", allow)


def random(b: int, r: int, seed: int = 0) -> Pattern:
    """Each block of b queries sees r earlier blocks, other ones in each head (Zaheer et al. 2020, arXiv:2007.14062)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        mine, its = query.position // b, key.position // b
        seen = torch.zeros_like(mine == its)
        for i in range(r):
            seen = seen | (its == _hash(seed, head, mine, i) % mine.clamp(min=1))
        return seen & (its < mine)

    return Pattern(f"random({b}, {r}, {seed})", allow, itself=False, by_head=True)


def _hash(seed: int, head: Tensor, block: Tensor, i: int) -> Tensor:
    """An integer in [0, 2³¹) of the four, by SplitMix-like rounds: no table, so any length costs the same."""
    x = (seed * 0x9E3779B1 + i * 0x85EBCA77) % (1 << 31) + head * 0xC2B2AE3 + block * 0x27D4EB2F
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = x & 0x7FFFFFFF
        x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)


def prefix(p: int) -> Pattern:
    """The first p positions see each other, both ways; after them it is causal (Liu et al. 2018, arXiv:1801.10198)."""
    return Pattern(
        f"prefix({p})", lambda head, query, key: (key.position <= query.position) | (key.position < p), first=p, ahead=p
    )


def topk(k: int) -> Pattern:
    """Of all earlier keys and itself the k with the highest scores (Gupta et al. 2021, arXiv:2106.06899)."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        seen = CAUSAL(head, query, key)
        scores = query.scores.detach().masked_fill(~seen, -torch.inf)
        least = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]  # (B, H, T, 1)
        return seen & (scores >= least)

    return Pattern(f"topk({k})", allow, itself=False, by_score=True)


def heads(*patterns: Pattern) -> Pattern:
    """Each head its own: head h the h-th of them, counted round."""

    def allow(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        turn = head % len(patterns)
        seen = [(turn == i) & pattern.allow(head, query, key) for i, pattern in enumerate(patterns)]
        return reduce(or_, seen)

    reaches = [pattern.reach for pattern in patterns]
    return Pattern(
        f"heads({', '.join(pattern.text for pattern in patterns)})",
        allow,
        None if None in reaches else max(reaches),
        max(pattern.first for pattern in patterns),
        max(pattern.ahead for pattern in patterns),
        all(pattern.itself for pattern in patterns),
        True,
        sum((pattern.tokens for pattern in patterns), ()),
        any(pattern.by_score for pattern in patterns),
        max(len(patterns), *(pattern.heads for pattern in patterns)),
    )


def longformer(w: int, d: int, g: int) -> Pattern:
    """A window of w, every d-th key of the newest w·d, and the first g positions (Beltagy et al. 2020)."""
    return window(w) | dilated(w * d, d) | first(g)


def bigbird(w: int, g: int, b: int, r: int, seed: int = 0) -> Pattern:
    """A window of w, the first g positions, and r random blocks of b (Zaheer et al. 2020)."""
    return window(w) | first(g) | random(b, r, seed)


def linear(m: int) -> Linear:
    """m random features in place of the softmax (Choromanski et al. 2021, arXiv:2009.14794)."""
    return Linear(f"linear({m})", m)


NAMES: dict[str, Callable[..., Pattern | Linear]] = {
    "global": first,
    **{make.__name__: make for make in (full, window, dilated, token, block, strided, random, prefix, topk, heads)},
    **{make.__name__: make for make in (longformer, bigbird, linear)},
}


def parse(text: str) -> Pattern | Linear:
    """The pattern that a text spells. Raises UserError that names what is wrong with it."""
    if len(text) > LONGEST:
        raise UserError(f"model.attention has a pattern of {len(text):,} characters; {LONGEST:,} must do")
    if not text.isascii() or "_" in text:  # Python's parser would take them for other letters
        raise UserError(f"model.attention {text!r} cannot be read; write it as window(64) | global(4)")
    try:
        return _read(ast.parse(re.sub(r"\bglobal\b", "global_", text.strip()), mode="eval").body)
    except UserError as error:
        raise UserError(f"model.attention {text!r}: {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"model.attention {text!r} cannot be read; write it as window(64) | global(4)") from None


def _read(node: ast.expr) -> Pattern | Linear:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        left, right = _read(node.left), _read(node.right)
        if isinstance(left, Linear) or isinstance(right, Linear):
            raise UserError("linear attention has no pattern that could be joined with another")
        return left | right if isinstance(node.op, ast.BitOr) else left & right
    called = node.func if isinstance(node, ast.Call) and not node.keywords else node
    if not isinstance(called, ast.Name):
        raise UserError(f"{_shown(node)} is no pattern; write it as window(64) | global(4)")
    name = called.id.removesuffix("_")  # `global` alone is a word of Python's: see parse
    if name not in NAMES and name.isalpha() and (name.isupper() or set(name) <= {"l", "g"}):
        raise UserError(f"{name} are no layers: the letters are L (a window of model.window) and G (full), as in LLLG")
    if name not in NAMES:
        raise UserError(f"there is no {name}{did_you_mean(name, NAMES) or '; there are: ' + ', '.join(NAMES)}")
    make, given = NAMES[name], node.args if isinstance(node, ast.Call) else []
    least = 0 if make in (token, random, bigbird) else 1
    values = [_read(each) if make is heads else _number(each, least) for each in given]
    which, most = MOST.get(name, (0, LARGEST))
    if make is not heads and len(values) > which and values[which] > most:
        raise UserError(f"{_shown(node)} has {values[which]:,}, and at most {most:,} serve")
    signature = inspect.signature(make)
    try:
        signature.bind(*values)
    except TypeError:
        takes = [str(one).split(":")[0] + f"={one.default}" * (one.default is not one.empty)
                 for one in signature.parameters.values()]  # fmt: skip
        raise UserError(f"{name} takes ({', '.join(takes)}), and {len(values)} are given") from None
    if not values and make in (heads, token):
        raise UserError(f"{name} needs at least one")
    if any(isinstance(value, Linear) for value in values):
        raise UserError("linear attention serves whole layers, not single heads")
    if make is heads and any("heads(" in value.text for value in values):
        raise UserError("heads stands within heads; name each head's pattern once, as in heads(full, window(8), full)")
    return make(*values)


def _shown(node: ast.expr) -> str:
    return ast.unparse(node).replace("global_", "global")


def _number(node: ast.expr, least: int) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int or not least <= node.value <= LARGEST:
        raise UserError(f"{_shown(node)} must be a whole number from {least} to {LARGEST:,}")
    return node.value


def by_layer(
    attention: str | list[str], n_layers: int, window_of_l: int | None, n_heads: int
) -> list[Pattern | Linear]:
    """Each layer's pattern: one for all; a list, gone through again and again; or letters, "LLLG".

    L is a window of `window_of_l` keys, G is full. Raises UserError where that cannot be read, or a part not used.
    """
    letters = isinstance(attention, str) and set(attention) <= {"L", "G"} and attention != ""
    if letters and "L" in attention and window_of_l is None:
        raise UserError(f"model.attention {attention!r} needs model.window, how many keys a layer L sees")
    texts = [attention] if isinstance(attention, str) and not letters else list(attention)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"model.attention is {attention!r}; it must be a pattern, a list of them, or letters as in LLLG"
        )
    if any(text.count("(") != text.count(")") for text in texts) and len(texts) > 1:
        raise UserError(f"model.attention {attention!r}: in a list, quote what holds a comma: ['dilated(64, 2)', full]")
    if len(texts) > n_layers:
        raise UserError(f"model.attention {attention!r} names {len(texts)} layers, and model.n_layers is {n_layers}")
    if letters:
        texts = [f"window({window_of_l})" if letter == "L" else "full" for letter in texts]
    patterns = [parse(text) for text in texts]
    if window_of_l is not None and not (letters and "L" in attention):
        raise UserError("model.window is read where model.attention has layers L, as in LLLG; write window(64) instead")
    if max(pattern.heads for pattern in patterns) > n_heads:
        raise UserError(f"model.attention {attention!r} names patterns for more heads than the model's {n_heads}")
    return [patterns[layer % len(patterns)] for layer in range(n_layers)]
