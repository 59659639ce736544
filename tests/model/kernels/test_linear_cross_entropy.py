"""The chunked head is cross-entropy, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model.kernels import linear_cross_entropy as module
from thinker.model.kernels.linear_cross_entropy import linear_cross_entropy


@given(rows=st.integers(1, 40), vocab=st.integers(2, 50), chunk=st.integers(1, 400), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_equals_cross_entropy(rows, vocab, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, rows, 7, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, 7, generator=generator, requires_grad=True)
    targets = torch.randint(-1, vocab, (1, rows), generator=generator)
    before = module.CHUNK_ELEMENTS["cpu"], module.MIN_CHUNK_ROWS
    module.CHUNK_ELEMENTS["cpu"], module.MIN_CHUNK_ROWS = chunk, 1
    try:
        ours, count = linear_cross_entropy(x, weight, targets)
        grads = torch.autograd.grad(ours * 0.3, (x, weight))
    finally:
        module.CHUNK_ELEMENTS["cpu"], module.MIN_CHUNK_ROWS = before
    known = F.cross_entropy((x @ weight.T)[0], targets[0], ignore_index=-1, reduction="sum")
    known_grads = torch.autograd.grad(known * 0.3, (x, weight))
    assert count.item() == (targets >= 0).sum().item()
    torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-5)
    for grad, known_grad in zip(grads, known_grads):
        torch.testing.assert_close(grad, known_grad, rtol=1e-4, atol=1e-5)


def test_frozen_parts_get_no_gradient():
    x = torch.randn(1, 4, 6, requires_grad=True)
    weight = torch.randn(9, 6)
    linear_cross_entropy(x, weight, torch.tensor([[1, 2, -1, 3]]))[0].backward()
    assert x.grad[0, 2].abs().max() == 0
    assert x.grad[0, 0].abs().max() > 0
    assert weight.grad is None


@pytest.mark.parametrize("targets", [[[-1, -1]], [[0, -1]]])
def test_nothing_counted_is_zero_not_nan(targets):
    total, count = linear_cross_entropy(torch.randn(1, 2, 3), torch.randn(5, 3), torch.tensor(targets))
    assert count.item() == sum(t >= 0 for t in targets[0])
    assert torch.isfinite(total)
    assert (total.item() == 0) == (count.item() == 0)


def test_bf16_is_near_fp32():
    torch.manual_seed(0)
    x, weight, targets = torch.randn(1, 300, 64), torch.randn(1000, 64) * 0.3, torch.randint(0, 1000, (1, 300))
    exact, _ = linear_cross_entropy(x, weight, targets)
    rough, _ = linear_cross_entropy(x.bfloat16(), weight, targets)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=3e-3)


def test_a_loss_scale_beyond_fp16_keeps_gradients_finite():
    """A scale of 2^17 is infinite in fp16; the gradients times it are not."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 9, 7, generator=generator).half().requires_grad_()
    weight = torch.full((30, 7), 1e-3).normal_(0, 1e-3, generator=generator)
    loss, _ = linear_cross_entropy(x, weight, torch.randint(0, 30, (1, 9), generator=generator))
    (loss * 2.0**17).backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 50
