"""The chunked head is cross-entropy, values and gradients."""

import functools
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model.kernels import linear_cross_entropy as module
from thinker.model.kernels.linear_cross_entropy import linear_cross_entropy


@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 50),
    chunk=st.integers(1, 400),
    seed=st.integers(0, 99),
)
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
    total, count = linear_cross_entropy(
        torch.randn(1, 2, 3), torch.randn(5, 3), torch.tensor(targets)
    )
    assert count.item() == sum(t >= 0 for t in targets[0])
    assert torch.isfinite(total)
    assert (total.item() == 0) == (count.item() == 0)


def test_bf16_is_near_fp32():
    torch.manual_seed(0)
    x, weight, targets = (
        torch.randn(1, 300, 64),
        torch.randn(1000, 64) * 0.3,
        torch.randint(0, 1000, (1, 300)),
    )
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


def chunk(targets, V=50):
    """Logits in bf16, (n, V), and targets; what autograd makes of them in fp64: the loss and its
    gradient."""
    logits = 3 * torch.randn(len(targets), V, generator=torch.Generator().manual_seed(2))
    logits, targets = logits.bfloat16(), torch.tensor(targets)
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, targets, ignore_index=-1, reduction="sum")
    return logits, targets, loss.item(), torch.autograd.grad(loss, leaf)[0]


def check_chunk(function, targets):
    logits, targets, known, known_grad = chunk(targets)
    assert function(logits, targets, False)[1] is None
    losses, grad = function(logits.clone(), targets, True)
    assert grad.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    assert losses.shape == targets.shape
    assert not losses[targets < 0].any()
    assert losses.sum().item() == pytest.approx(known, rel=1e-5)
    torch.testing.assert_close(
        grad.double(), known_grad, rtol=2**-8, atol=1e-6
    )  # rounded once, to bf16
    assert not grad[targets < 0].any()


TARGETS = [[4, 49, -1, 0, 7], [-1, -1, -1], [3], [-1], [0] * 70]


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("function", [module.loss_and_gradient, module.fused_loss_and_gradient])
def test_loss_and_gradient_of_a_chunk(function, targets):
    check_chunk(function, targets)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.stress)]
)
def test_one_program_serves_chunks_of_every_size(monkeypatch, backend):
    """It writes the gradient over the logits; a single row has a program of its own."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    compiled = module._compiled.__wrapped__()
    for targets in TARGETS:
        check_chunk(compiled, targets)
    assert counter.frame_count == 4  # with and without a gradient
    logits, targets, *_ = chunk(TARGETS[0])
    assert compiled(logits, targets, True)[1].data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_loss_of_each_target(monkeypatch, is_compiled):
    """Also over several chunks; the sum and the gradient are the same with and without them."""
    monkeypatch.setattr(module, "_compiled", lambda: module.fused_loss_and_gradient)
    monkeypatch.setattr(module, "MIN_CHUNK_ROWS", 4)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(module, "COMPILED_CHUNK_ELEMENTS", 50 * 13)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 11, 7, generator=generator, requires_grad=True)
    weight = torch.randn(50, 7, generator=generator)
    targets = torch.randint(-1, 50, (3, 11), generator=generator)
    losses = torch.full((3, 11), torch.nan)
    total, _ = linear_cross_entropy(x, weight, targets, None, is_compiled, losses)
    plain, _ = linear_cross_entropy(x, weight, targets, None, is_compiled)
    known = F.cross_entropy(
        (x @ weight.T).transpose(1, 2), targets, ignore_index=-1, reduction="none"
    )
    torch.testing.assert_close(losses, known)
    assert total == plain
    assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in (total, plain)))


@pytest.mark.parametrize("rows", [1, 20, 33])
def test_compiled_chunks_add_up(monkeypatch, rows):
    monkeypatch.setattr(module, "_compiled", lambda: module.fused_loss_and_gradient)
    monkeypatch.setattr(module, "COMPILED_CHUNK_ELEMENTS", 50 * 13)  # 33 rows: three chunks of 11
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, rows, 7, generator=generator, requires_grad=True)
    weight = torch.randn(50, 7, generator=generator, requires_grad=True)
    targets = torch.randint(-1, 50, (1, rows), generator=generator)
    ours, known = (
        linear_cross_entropy(x, weight, targets, None, is_compiled)[0]
        for is_compiled in (True, False)
    )
    torch.testing.assert_close(ours, known)
    for grad, known_grad in zip(
        torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(known, (x, weight))
    ):
        torch.testing.assert_close(grad, known_grad, rtol=1e-4, atol=1e-5)


def test_no_gradient_is_computed_where_none_is_kept(monkeypatch):
    asked = []
    original = module.loss_and_gradient
    monkeypatch.setattr(
        module, "loss_and_gradient", lambda *args: (asked.append(args[2]), original(*args))[1]
    )
    x, weight = torch.randn(1, 4, 6), torch.nn.Parameter(torch.randn(9, 6))
    with torch.no_grad():
        linear_cross_entropy(x, weight, torch.tensor([[1, 2, -1, 3]]))
    assert asked == [False]
    linear_cross_entropy(x, weight, torch.tensor([[1, 2, -1, 3]]))
    assert asked == [False, True]


def test_a_chunk_is_freed_before_the_next_one(monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 50 * 8)
    monkeypatch.setattr(module, "MIN_CHUNK_ROWS", 1)
    earlier = []

    def chunk_loss(logits, targets, needs_gradient):
        assert [gradient() for gradient in earlier] == [None] * len(earlier)
        losses, gradient = module.loss_and_gradient(logits, targets, needs_gradient)
        earlier.append(weakref.ref(gradient))
        return losses, gradient

    x = torch.randn(1, 24, 6, requires_grad=True)
    weight = torch.randn(50, 6, requires_grad=True)
    module.linear_cross_entropy(x, weight, torch.zeros(1, 24, dtype=int), chunk_loss=chunk_loss)
    assert len(earlier) == 3
