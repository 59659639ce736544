"""What head and loss move on a GPU at the size of GPT-2: 32,768 rows, width 768, a vocabulary of
50,304, in bf16."""

import pytest
import torch
from device_trace import DeviceTrace

from thinker.model import Thinker, ThinkerConfig
from thinker.model.kernels import linear_cross_entropy as module
from thinker.model.kernels.linear_cross_entropy import fused_loss_and_gradient, linear_cross_entropy
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep

ROWS, WIDTH, VOCAB = 32_768, 768, 50_304


def gigabytes(device, monkeypatch, is_compiled, requires_grad=True):
    """Bytes that one pass moves, backward included."""
    x = torch.empty(
        1, ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=requires_grad
    )
    weight = torch.empty(VOCAB, WIDTH, device=device, requires_grad=True)
    targets = torch.empty(1, ROWS, device=device, dtype=torch.int64)
    with DeviceTrace() as trace, torch.set_grad_enabled(requires_grad):
        monkeypatch.setattr(module, "_compiled", lambda: trace.fused(fused_loss_and_gradient))
        loss, _ = linear_cross_entropy(x, weight, targets, weight.detach().bfloat16(), is_compiled)
        if requires_grad:
            loss.backward()
    assert trace.reads == trace.uploads == {}
    return trace.bytes_moved / 1e9


@pytest.mark.parametrize(("is_compiled", "limit"), [(True, 20), (False, 75)])
def test_bytes_of_head_and_loss(gpu, monkeypatch, is_compiled, limit):
    logits = ROWS * VOCAB * 2 / 1e9  # written, made a gradient, and read by two products
    moved = gigabytes(gpu, monkeypatch, is_compiled)
    assert 5 * logits < moved <= limit


def test_evaluation_moves_no_gradient(gpu, monkeypatch):
    assert gigabytes(gpu, monkeypatch, True, requires_grad=False) < 10


@pytest.mark.parametrize("compiles", [True, False])
def test_the_loss_is_compiled_where_training_compiles(gpu, monkeypatch, compiles):
    tree = {
        "data": {"seq_len": 8},
        "train": {"compile": compiles, "max_steps": 9, "micro_batch_size": 4},
    }
    config = ThinkerConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2, max_seq_len=8)
    settings = resolve_settings(validate_config(tree), config, gpu)
    calls = []

    def compiled(*args):
        calls.append(args)
        return fused_loss_and_gradient(*args)

    monkeypatch.setattr(module, "_compiled", lambda: compiled)
    monkeypatch.setattr(torch, "compile", lambda function: function)  # the blocks
    with gpu:
        model = TrainingStep(Thinker(config), settings).model
        model(torch.zeros(2, 8, dtype=torch.int64), targets=torch.zeros(2, 8, dtype=torch.int64))
    assert len(calls) == compiles
