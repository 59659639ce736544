"""One step: the same numbers however it is cut up, and every matrix cast once."""

import contextlib
import dataclasses
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from thinker.data.batches.prefetch import Batch
from thinker.model import ThinkerConfig
from thinker.training import step as module
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

CONFIG = ThinkerConfig(
    vocab_size=50, d_model=32, n_layers=3, n_heads=2, d_ff=48, max_seq_len=16, head_init_std=0.2
)
CPU = torch.device("cpu")


def a_batch(seed=0, rows=4):
    tokens = torch.randint(50, (rows, 17), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -1
    return Batch(tokens[:, :-1].contiguous(), targets, int((targets >= 0).sum()))


def make_step(**train):
    settings = resolve_settings(validate_config({"train": train}), CONFIG, CPU)
    return TrainingStep(build_model(CONFIG, 1, CPU), settings)


def trained(steps=3, kernel="auto", **train):
    """The weights after a few steps, and the last loss."""
    train = {
        "precision": "fp32",
        "compile": False,
        "micro_batch_size": 4,
        "batch_size": 4,
        "max_steps": 9,
        **train,
    }
    step, loss = make_step(**train), None
    step.model.kernel = kernel
    for number in range(steps):
        loss, norm = step(a_batch(number), 1.0)
        assert norm > 0
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}, loss


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_give_what_one_batch_gives(size):
    whole, loss = trained()
    parts, loss_of_parts = trained(micro_batch_size=size)
    torch.testing.assert_close(loss_of_parts, loss, rtol=1e-5, atol=1e-6)
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_activations_change_no_bit(every):
    kept, loss = trained()
    again, loss_again = trained(checkpoint_every_n_blocks=every)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_shared_cast_changes_no_bit(monkeypatch):
    shared, loss = trained(precision="bf16", micro_batch_size=1)
    monkeypatch.setattr(module, "cached_weight_casts", lambda thinker: contextlib.nullcontext())
    each, loss_of_each = trained(precision="bf16", micro_batch_size=1)
    assert torch.equal(loss, loss_of_each)
    assert all(torch.equal(shared[name], each[name]) for name in shared)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("every", [None, 1])
def test_each_matrix_is_cast_once_a_step(size, every):
    train = {
        "precision": "bf16",
        "compile": False,
        "micro_batch_size": size,
        "batch_size": 4,
        "max_steps": 9,
    }
    step = make_step(**train, checkpoint_every_n_blocks=every)
    matrices = {
        p.data_ptr(): name
        for name, p in step.model.named_parameters()
        if "proj" in name or "head" in name
    }
    casts = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in matrices:
                casts.append(matrices[args[0].data_ptr()])
            return func(*args, **(kwargs or {}))

    with Watch():
        step(a_batch(), 1.0)
    assert sorted(casts) == sorted(matrices.values())
    assert not any("cast_weight" in vars(module) for module in step.model.modules())


@pytest.mark.parametrize("every", [None, 1, 2])
def test_all_blocks_share_one_compiled_program(every, monkeypatch):
    """Also those whose activations are computed again."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    options = {
        "steps": 2,
        "micro_batch_size": 2,
        "precision": "fp32",
        "checkpoint_every_n_blocks": every,
    }
    _, loss = trained(**options, compile=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    torch.testing.assert_close(loss, trained(**options)[1])


@pytest.mark.parametrize(
    ("precision", "every"),
    [
        ("bf16", 1),
        *(
            pytest.param(*each, marks=pytest.mark.stress)
            for each in (("bf16", 2), ("fp32", None), ("fp32", 2))
        ),
    ],
)
@pytest.mark.usefixtures("quickly_compiled")
def test_a_compiled_step_is_near_the_plain_one(precision, every, monkeypatch):
    """One block, recomputed, or one of each kind; by SDPA, which is compiled with the rest of its
    block."""
    monkeypatch.setitem(globals(), "CONFIG", dataclasses.replace(CONFIG, n_layers=every or 1))
    options = {"steps": 2, "micro_batch_size": 2, "precision": precision, "kernel": "sdpa"}
    start, _ = trained(steps=0)
    plain, loss = trained(**options)
    compiled, loss_of_compiled = trained(**options, compile=True, checkpoint_every_n_blocks=every)
    is_exact = precision == "fp32"
    torch.testing.assert_close(loss_of_compiled, loss, rtol=1e-4 if is_exact else 1e-3, atol=1e-5)
    for name, weight in plain.items():
        if is_exact:
            torch.testing.assert_close(compiled[name], weight, rtol=1e-2, atol=2e-3)
        elif (
            weight.dim() == 2
        ):  # AdamW moves the others by the sign of a gradient, which may be rounding alone
            assert (compiled[name] - weight).norm() < 0.2 * (weight - start[name]).norm()


@pytest.mark.parametrize("limit", [None, 1e-3, 1e9])
def test_gradients_are_clipped_as_by_torch(limit):
    model = build_model(CONFIG, 1, CPU)
    for seed, parameter in enumerate(list(model.parameters())[:-1]):  # one has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    known = [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in model.parameters()
    ]
    copies = [torch.nn.Parameter(torch.empty(0 if grad is None else grad.shape)) for grad in known]
    for copy, grad in zip(copies, known):
        copy.grad = grad
    norm = module.clip_gradients(model, limit)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(copies, limit or math.inf))
    for parameter, copy in zip(model.parameters(), copies):
        assert (parameter.grad is None and copy.grad is None) or torch.equal(
            parameter.grad, copy.grad
        )
