"""Blockwise attention against the reference, values and gradients, wherever the block boundaries
fall."""

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend, attention_weights
from thinker.model.kernels import blockwise_attention as kernel


def drawn(*shape, dtype=torch.float64):
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 14), rows=st.integers(1, 15),
    scores=st.integers(1, 400), scale=st.floats(0.1, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_blocks_equal_the_reference(batch, heads, length, rows, scores, scale, seed):
    torch.manual_seed(seed)
    q, k, v = drawn(batch, heads, length, 4)
    at = torch.arange(length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "ROWS", rows)
        patch.setattr(kernel, "SCORES", scores)
        ours = kernel.blockwise_attention(q, k, v, scale)
        known = ((q @ k.mT) * scale).masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(ours, known)
        grad = torch.randn_like(ours)
        for mine, right in zip(
            torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(known, (q, k, v), grad)
        ):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("length", [1, 128, 129, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_training_in_bf16_is_as_near_as_its_precision(kv_heads, length):
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 32).requires_grad_()
    k, v = (torch.randn(2, kv_heads, length, 32).requires_grad_() for _ in range(2))
    at = torch.arange(length)
    right = attention_weights(q, k, AttentionMask(at <= at[:, None])) @ v.repeat_interleave(
        4 // kv_heads, dim=1
    )
    ours = attend(
        *(x.bfloat16() for x in (q, k, v)), AttentionMask(is_causal=True, kernel="blockwise")
    )
    assert ours.dtype == torch.bfloat16
    grad = torch.randn_like(right)
    both = zip([ours, *torch.autograd.grad(ours, (q, k, v), grad.bfloat16())],
               [right, *torch.autograd.grad(right, (q, k, v), grad)])  # fmt: skip
    for mine, known in both:
        assert (mine - known).norm() <= 0.01 * known.norm() + 1e-6


def test_a_model_in_bf16_takes_it_and_learns_the_same_with_and_without_compile(stress):
    """Compiled as far as torch's own operators, and with --stress to machine code, which takes half
    a minute."""
    config = ThinkerConfig(
        vocab_size=31, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, max_seq_len=150
    )
    tokens = torch.randint(31, (2, 151), generator=torch.Generator().manual_seed(0))
    grads = {}
    for name in ("fp32", "bf16", "compiled"):
        torch.manual_seed(0)
        model = Thinker(config)
        for block in model.blocks:  # whose zeros would hide its attention
            torch.nn.init.normal_(block.attention.o_proj.weight, std=0.2)
        torch.nn.init.normal_(model.lm_head.weight, std=0.1)
        model.activation_dtype = None if name == "fp32" else torch.bfloat16
        if name == "compiled":
            for block in model.blocks:
                block.compile(backend="inductor" if stress else "aot_eager")
        loss, count = model(tokens[:, :-1], targets=tokens[:, 1:])
        (loss / count).backward()
        assert ("_BlockwiseAttention" in called(model, tokens)) == (name != "fp32")
        grads[name] = {
            part: parameter.grad
            for part, parameter in model.named_parameters()
            if parameter.dim() == 2
        }
    for name in ("bf16", "compiled"):
        for part, known in grads["fp32"].items():
            assert (grads[name][part] - known).norm() <= 0.03 * known.norm(), part


def called(model, tokens):
    with torch.profiler.profile() as profile:
        model(tokens[:, :-1], targets=tokens[:, 1:])
    return {event.key for event in profile.key_averages()}
