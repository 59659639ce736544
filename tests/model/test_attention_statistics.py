"""The figures of attention are those of the weights that the model itself computes, with and
without a cache."""

import threading

import pytest
import torch
from conftest import random_model

from thinker.model.inspection.attention_statistics import FIGURES, measure_attention

PATTERNS = {
    "full": {},
    "softcap and sinks": {"attn_logit_softcap": 5.0, "attention_sinks": True},
    "alibi": {"positions": "alibi"},
    "windows in some layers": {"attention": ["full", "window(6)"]},
    "window with sinks": {"attention": "window(5) | global(2)"},
    "topk": {"attention": "topk(3)"},
    "heads": {"attention": "heads(full, window(4))"},
    "prefix": {"attention": "prefix(4)"},
    "qk norm and bias": {"qk_norm": True, "attention_bias": True},
    "linear in some layers": {"attention": ["linear(16)", "full"]},
    "token shift": {"token_shift": True},
}


def expected(model, tokens, document_ids=None):
    """From the weights and queries that the hooks record: a plain computation, key by key."""
    with model.record(
        "blocks.*.attention.weights", "blocks.*.attention.q", "blocks.*.attention.k"
    ) as cache:
        logits = model(tokens, document_ids=document_ids)
    B, T = tokens.shape
    figures = torch.full((len(model.blocks), 3, B, T), torch.nan)
    for layer, pattern in enumerate(model.config.patterns):
        if pattern.n_features:
            continue
        weights, q, k = (
            cache[f"blocks.{layer}.attention.{name}"].float() for name in ("weights", "q", "k")
        )
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        for b in range(B):
            for t in range(T):
                row = weights[b, :, t]  # (H, T)
                scores = (q[b, :, t, None] * k[b]).sum(-1) / q.shape[-1] ** 0.5
                start = (
                    0
                    if document_ids is None
                    else int((document_ids[b] == document_ids[b, t]).nonzero()[0])
                )
                figures[layer, 0, b, t] = -torch.xlogy(row, row).sum(-1).mean()
                figures[layer, 1, b, t] = scores[row > 0].max()
                figures[layer, 2, b, t] = row[:, start].mean()
    return figures, logits


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_figures_by_hand(pattern, documents):
    model = random_model(1, **PATTERNS[pattern])
    tokens = torch.randint(61, (2, 20))
    document_ids = (
        (torch.rand(2, 20) < 0.2).cumsum(dim=1) if documents and pattern != "prefix" else None
    )
    figures, logits = measure_attention(model, tokens, document_ids)
    known, known_logits = expected(model, tokens, document_ids)
    torch.testing.assert_close(figures, known, atol=1e-5, rtol=1e-4, equal_nan=True)
    is_linear = [pattern.n_features > 0 for pattern in model.config.patterns]
    assert figures.isnan().flatten(1).any(dim=1).tolist() == is_linear
    torch.testing.assert_close(logits, known_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_position_with_a_cache_has_the_figures_of_the_whole_text(pattern, dtype):
    model = random_model(2, **PATTERNS[pattern]).to(dtype)
    tokens = torch.randint(61, (1, 40))
    whole, logits = measure_attention(model, tokens)
    cache = model.new_cache(max_len=40)
    with torch.no_grad():
        model(tokens[:, :30], cache=cache)
    n_compared = 0
    for t in range(30, 40):
        figures, last = measure_attention(model, tokens[:, t : t + 1], cache=cache)
        tolerance = (
            {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.1}
        )
        if pattern == "topk" and dtype == torch.bfloat16:
            continue  # rounding changes which keys are chosen
        torch.testing.assert_close(figures[..., 0], whole[..., t], equal_nan=True, **tolerance)
        if dtype == torch.float32:
            torch.testing.assert_close(last[:, 0], logits[:, t], **tolerance)
        n_compared += 1
    assert cache.lengths == [40]
    assert n_compared == 10 or pattern == "topk"


def test_passes_of_other_threads_are_not_measured():
    model, tokens = random_model(3), torch.randint(61, (1, 9))
    alone, _ = measure_attention(model, tokens)
    inside = []

    def other_thread(module, inputs):
        if not inside:
            inside.append(True)
            thread = threading.Thread(target=model, args=(torch.randint(61, (1, 5)),))
            thread.start()
            thread.join()

    with_hook = model.blocks[0].register_forward_pre_hook(other_thread)
    assert measure_attention(model, tokens)[0].equal(alone)
    with_hook.remove()
    assert inside
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert len(FIGURES) == alone.shape[1]
