"""Faster routes through norms and matrices give the definition's numbers, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model.layers import Linear, RMSNorm
from thinker.training.kernels import project_jointly


@given(
    rows=st.integers(1, 9),
    width=st.integers(2, 40),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_definition(rows, width, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    norm = RMSNorm(width, 1e-6)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    x = (torch.randn(2, rows, width, generator=generator) * scale).requires_grad_()
    grad = torch.randn(2, rows, width, generator=generator)
    known = F.rms_norm(x, (width,), norm.weight, 1e-6)
    known_grads = torch.autograd.grad(known, (x, norm.weight), grad)
    ours = norm(x)
    grads = torch.autograd.grad(ours, (x, norm.weight), grad)
    torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, known_grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item() + 1e-6)


def test_bf16_is_rounded_once_before_the_weight():
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6)
    x = torch.randn(50, 64).bfloat16()
    exact = F.rms_norm(x.float(), (64,), eps=1e-6)
    assert torch.equal(norm(x), exact.bfloat16())


def test_zeros_stay_zero():
    norm = RMSNorm(8, 1e-6)
    x = torch.zeros(1, 8, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.abs().max() == 0
    assert torch.isfinite(x.grad).all()
    assert norm.weight.grad.abs().max() == pytest.approx(0)


@pytest.mark.parametrize("bias", [False, True])
def test_matrices_with_the_same_input_in_one_product(bias):
    torch.manual_seed(0)
    linears = [Linear(16, n_out, bias) for n_out in (24, 8, 8)]
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    x = torch.randn(2, 5, 16, requires_grad=True)
    apart, together = (
        torch.cat([linear(x) for linear in linears], dim=-1),
        project_jointly(x, *linears),
    )
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad((out**2).sum(), [x, *parameters]) for out in (apart, together))
    for known, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-5)
