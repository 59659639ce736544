"""What torch.compile would be asked to compile: few programs, which no batch adds to."""

import pytest
import torch
from test_training_step import new_step
from torch._dynamo.utils import counters

OPTIONS = {
    "precision": "bf16",
    "optimizer": "muon",
    "attention": "full",
    "positions": "rope",
    "documents": False,
    "dropout": 0.0,
    "micro_batch_size": 2,
    "lora_rank": None,
    "checkpoint_every_n_blocks": None,
}


@pytest.fixture
def programs(monkeypatch):
    """Counts what is compiled; it is traced, and then runs as it is."""
    compile_ = torch.compile

    def trace(function, **options):
        return compile_(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1, "precision": "fp16"},
        {"attention": "window(8)", "documents": True, "optimizer": "adamw"},
        {"checkpoint_every_n_blocks": 1, "optimizer": "adamw", "lora_rank": 4, "precision": "fp32"},
    ],
    ids=str,
)
def test_training_compiles_few_programs(gpu, programs, options):
    options = OPTIONS | options
    step, batch = new_step(gpu, options, compile=True, n_layers=2)
    for _ in range(3):
        step(batch, 1.0)
    assert counters["graph_break"] == {}
    n_blocks = (
        2 if options["lora_rank"] else 1
    )  # the embedding is frozen: the first block's input needs no gradient
    # Shapes: those of the q, k, o, up and down matrices, and the head; one for all momenta.
    n_muon = 6 + 1 if options["optimizer"] == "muon" else 0
    assert programs() == n_blocks + 1 + n_muon  # one for the loss
