"""Options of training with each other on a GPU: every case trains, resumes, and follows the CPU."""

import math

import pytest
import torch
from test_training_options import CASES, cache, check_refusals, overrides, train  # noqa: F401 - a fixture
from training_runs import train_losses

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"


def check(case, tiny_run, cache, tmp_path):  # noqa: F811
    case = check_refusals(case, tiny_run, cache, tmp_path / "whole")
    steps = {"whole": [4], "parts": [2, 4]}
    runs = [
        overrides(case, tmp_path / name, cache, tiny_run, n, DEVICE)
        for name in steps
        for n in steps[name]
    ]
    train(case, runs)
    losses = train_losses(tmp_path / "whole")
    assert list(losses) == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert train_losses(tmp_path / "parts") == pytest.approx(losses, rel=2e-3)
    if case["model.dropout"] == "0.0":
        train(
            case, [overrides(case | {"train.compile": "false"}, tmp_path / "cpu", cache, tiny_run)]
        )
        assert train_losses(tmp_path / "cpu") == pytest.approx(losses, rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_a_pair_of_options_on_a_gpu(case, tiny_run, cache, tmp_path):  # noqa: F811
    check(case, tiny_run, cache, tmp_path)


@pytest.mark.parametrize("prune", ["none", "weights", "gates"])
@pytest.mark.parametrize("teacher", ["none", "logits"])
def test_pruning_and_distillation_compiled_on_a_gpu(prune, teacher, tiny_run, cache, tmp_path):  # noqa: F811
    plain = CASES[0].values[0] | {"train.compile": "true", "documents": "cut", "sources": "one"}
    plain |= {"train.lora_rank": "null"}
    plain |= {
        "train.ema_decay": "null",
        "model.dropout": "0.0",
        "decay": "none",
        "train.precision": "bf16",
    }
    plain |= {
        "train.checkpoint_every_n_blocks": "null",
        "train.micro_batch_size": "null",
        "optimizer.name": "muon",
    }
    check(plain | {"prune": prune, "teacher": teacher}, tiny_run, cache, tmp_path)
