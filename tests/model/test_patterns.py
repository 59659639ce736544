"""Every pattern by every kernel that computes it, against loops over single queries in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model.attention_dispatch import attend
from thinker.model.kernels import blockwise_attention, local_attention
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.model.positions import alibi_slopes
from thinker.runtime.errors import UserError

KINDS = ("full", "window", "dilated", "global", "token", "block", "strided", "random", "prefix", "topk",
         "retrieve", "heads", "longformer", "bigbird")  # fmt: skip
FEATURES = ("attn_logit_softcap", "sinks", "alibi", "documents", "ragged")


@dataclass
class Spot:
    """A query or a key: where it stands, its token, and, of a query, how many keys before it score
    higher than one.

    retrieved(b, n) are the n earlier blocks of b with the highest products of the query with their
    mean key.
    """

    at: int
    token: int
    index: int
    higher: Callable[[int], int] | None = None
    retrieved: Callable[[int, int], list[int]] | None = None


def is_random(seed, head, mine, its, blocks):
    """The definition of the random blocks, in plain integers."""

    def mixed(i):
        x = (seed * 0x9E3779B1 + i * 0x85EBCA77) % (1 << 31) + head * 0xC2B2AE3 + mine * 0x27D4EB2F
        for factor in (0x2C1B3C6D, 0x297A2D39):
            x &= 0x7FFFFFFF
            x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
        return x ^ (x >> 15)

    return its < mine and its in {mixed(i) % mine for i in range(blocks)}


@st.composite
def spelled(draw, kind=None, depth=2):
    """A pattern as a config spells it, and the same once more in plain Python: sees(head, query,
    key)."""
    kind = kind or draw(st.sampled_from([*KINDS, "&", "|"] if depth else KINDS[:11]))
    if kind in "&|":
        (left, a), (right, b) = draw(spelled(depth=depth - 1)), draw(spelled(depth=depth - 1))
        if kind == "|":
            return f"({left}) | {right}", lambda *x: a(*x) or b(*x)
        return f"({left}) & ({right})", lambda *x: a(*x) and b(*x)
    if kind == "heads":
        parts = draw(st.lists(spelled(depth=0), min_size=1, max_size=4))
        return f"heads({', '.join(text for text, _ in parts)})", lambda h, q, k: parts[
            h % len(parts)
        ][1](h, q, k)
    a, b, c, d, s = draw(st.tuples(*[st.integers(1, 9)] * 5))
    numbers = {"full": "", "window": f"({a})", "dilated": f"({a}, {b})", "global": f"({a})", "token": f"({a}, {b})",
               "block": f"({a}, {b})", "strided": f"({a})", "random": f"({a}, {b}, {s})", "prefix": f"({a})",
               "topk": f"({a})", "retrieve": f"({a}, {b})",
               "longformer": f"({a}, {b}, {c})", "bigbird": f"({a}, {b}, {c}, {d}, {s})"}  # fmt: skip

    def sees(h, q, k):
        back = q.at - k.at
        if kind == "prefix" and k.at < a:
            return True
        if back < 0:
            return False
        return {
            "full": True,
            "prefix": True,
            "window": back < a,
            "dilated": back < a and back % b == 0,
            "global": k.at < a or q.at < a,
            "token": bool({q.token, k.token} & {a, b}),
            "block": q.at // a - k.at // a < b,
            "strided": back < a or back % a == 0,
            "random": is_random(s, h, q.at // a, k.at // a, b),
            "topk": q.higher(k.index) < a,
            "retrieve": q.at // a == k.at // a or k.at // a in q.retrieved(a, b),
            "longformer": back < a or (back < a * b and back % b == 0) or k.at < c,
            "bigbird": back < a or k.at < b or is_random(s, h, q.at // c, k.at // c, d),
        }[kind]

    return kind + numbers[kind], sees


def n_higher(scores, before, index):
    return sum(scores[other] > scores[index] for other in before)


def best_blocks(q, k, at, positions, size, n):
    """Blocks of `size` before position `at`, by the product of q (D,) with the mean of their keys;
    k: one per position.

    Of equal blocks, the earlier one comes first.
    """
    products = {}
    for block in range(at // size):
        mean = sum(key for key, position in zip(k, positions) if position // size == block) / size
        products[block] = float(sum(q * mean))
    return sorted(products, key=lambda block: (-products[block], block))[:n]


def brute_force(sees, q, k, v, query, key, attn_logit_softcap, sinks, alibi):
    """One query after the other, the keys that it sees picked out one by one. Returns (B, H, T,
    D)."""
    B, H, T, D = q.shape
    out = torch.zeros(B, H, T, v.shape[-1], dtype=q.dtype)
    rows = []
    for b in range(B):
        at, tokens = key.position[b].tolist(), key.token_id[b].tolist()
        own_at, own_tokens = query.position[b].tolist(), query.token_id[b].tolist()
        spots = [Spot(*each) for each in zip(at, tokens, range(len(at)))]
        for h in range(H):
            kv = h // (H // k.shape[1])
            for t in range(T):
                scores = k[b, kv] @ q[b, h, t] * D**-0.5  # (S,)
                if attn_logit_softcap is not None:
                    scores = attn_logit_softcap * torch.tanh(scores / attn_logit_softcap)
                if alibi is not None:
                    scores = scores - alibi[h] * (own_at[t] - key.position[b]).abs()
                near = spots
                if query.document_id is not None:
                    own = query.document_id[b, t].item()
                    near = [s for s, its in zip(spots, key.document_id[b].tolist()) if its == own]
                before = [s.index for s in near if s.at <= own_at[t]]
                keys, places = k[b, kv, [s.index for s in near]], [s.at for s in near]
                retrieved = cache(
                    partial(best_blocks, q[b, h, t].detach(), keys.detach(), own_at[t], places)
                )
                mine = Spot(
                    own_at[t],
                    own_tokens[t],
                    t,
                    partial(n_higher, scores.tolist(), before),
                    retrieved,
                )
                seen = [s.index for s in near if sees(h, mine, s)]
                if not seen:
                    rows.append(out[b, h, t])
                    continue
                logits = (
                    scores[seen] if sinks is None else torch.cat((scores[seen], sinks[h : h + 1]))
                )
                rows.append(logits.softmax(-1)[: len(seen)] @ v[b, kv, seen])
    return torch.stack(rows).view(B, H, T, -1)


@st.composite
def situations(draw, kind=None):
    """A pattern and tensors for it: shapes, groups, a chunk after others, documents, and what
    changes scores."""
    text, sees = draw(spelled(kind))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)]))
    has = {name: draw(st.integers(0, 3)) == 0 for name in FEATURES}
    return (
        text,
        sees,
        kv_heads,
        kv_heads * group,
        draw(st.integers(1, 20)),
        has,
        draw(st.integers(0, 10**6)),
    )


def check(situation, kernels, patch):
    """Values and gradients by each of the kernels. Returns which of them computed it."""
    text, sees, K, H, T, has, seed = situation
    generator = torch.Generator().manual_seed(seed)
    pattern = parse_pattern(text)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    S = T + (seed % 13 if has["ragged"] else 0)
    q, k, v = normal(2, H, T, 4), normal(2, K, S, 4), normal(2, K, S, 4)
    position, document = torch.arange(S).expand(2, S), None
    if has["documents"] and not has["ragged"]:
        begins = torch.rand(2, S, generator=generator) < 0.15
        document = begins.cumsum(1)
        position = torch.tensor(
            [[int((document[b, :s] == document[b, s]).sum()) for s in range(S)] for b in range(2)]
        )
    token = torch.randint(12, (2, S), generator=generator)
    key = TokenInfo(position, document, token)
    query = TokenInfo(*(x if x is None else x[:, S - T :] for x in (position, document, token)))
    attn_logit_softcap, sinks = (
        1.5 if has["attn_logit_softcap"] else None,
        normal(H) if has["sinks"] else None,
    )
    alibi = alibi_slopes(H).double() if has["alibi"] else None
    known = brute_force(sees, q, k, v, query, key, attn_logit_softcap, sinks, alibi)
    plain = attn_logit_softcap is None and sinks is None
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    grad = torch.randn(known.shape, generator=generator, dtype=torch.float64)
    known_grads = (
        torch.autograd.grad(known, inputs, grad, allow_unused=True) if known.requires_grad else []
    )
    if pattern.max_distance is None and not pattern.tokens and document is None:
        query, key = (
            TokenInfo(info.position[0]) for info in (query, key)
        )  # as a batch of equal rows is described
    used = []
    for kernel in kernels:
        patch.setattr(
            local_attention, "MIN_BLOCK", 1 + seed % 7
        )  # so that short sequences have several blocks
        patch.setattr(blockwise_attention, "ROWS", 1 + seed % 5)
        try:
            mask = MaskBuilder(H, torch.float64, alibi, kernel, plain).build(
                pattern, query, key, T == S
            )
        except UserError:
            assert kernel not in ("auto", "reference")
            continue
        used.append(kernel)
        ours = attend(q, k, v, mask, None, attn_logit_softcap, sinks)
        torch.testing.assert_close(ours, known, rtol=1e-9, atol=1e-9)
        for mine, right in zip(
            torch.autograd.grad(ours, inputs, grad, allow_unused=True), known_grads
        ):
            torch.testing.assert_close(
                mine, torch.zeros_like(mine) if right is None else right, rtol=1e-8, atol=1e-8
            )
    return used


CPU = ("auto", "sdpa", "blockwise", "local", "reference")


@pytest.mark.parametrize("kind", [*KINDS, "&", "|"])
def test_every_pattern_equals_brute_force(kind):
    used = []

    @given(situation=situations(kind))
    @settings(max_examples=examples(25), deadline=None)
    def test(situation):
        with pytest.MonkeyPatch.context() as patch:
            used.extend(check(situation, CPU, patch))

    test()
    assert {"auto", "reference"} <= set(used)
    if kind != "topk":
        assert "sdpa" in used
    if kind in ("window", "dilated", "global", "block", "longformer"):
        assert "local" in used
    if kind in ("full", "window", "dilated", "block", "strided", "longformer", "bigbird"):
        assert "blockwise" in used
