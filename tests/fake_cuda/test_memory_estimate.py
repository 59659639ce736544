"""Memory is predicted for every pattern, also where the GPU's kernels need tensors with
contents."""

from functools import cache

import fake_cuda
import pytest
import torch

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory, free_memory
from thinker.training.config.load import validate_config
from thinker.training.settings.memory_estimate import estimate_memory
from thinker.training.settings.resolve import resolve_settings

GPU = torch.device("cuda:0")
PATTERNS = [
    "window(64)",
    "linear(16)",
    "longformer(50, 4, 3)",
    "bigbird(50, 3, 64, 2, 1)",
    "token(3)",
    "prefix(300)",
]
SCORES = [
    {"positions": "alibi"},
    {"attn_logit_softcap": 30.0},
    {"attention_sinks": True},
    {"precision": "fp32"},
]


@cache
def peak_of_full_attention():
    return estimate_memory(resolve(), 2, GPU).peak


def resolve(attention="full", documents=False, T=1024, **options):
    shape = {
        name: options.pop(name)
        for name in ("positions", "attn_logit_softcap", "attention_sinks")
        if name in options
    }
    config = ThinkerConfig(
        vocab_size=512,
        d_model=128,
        n_layers=1,
        n_heads=2,
        max_seq_len=T,
        attention=attention,
        **shape,
    )
    data = {"seq_len": T, "document_masking": documents}
    train = {
        "precision": "bf16",
        "micro_batch_size": 2,
        "batch_size": 8,
        "max_steps": 9,
        "compile": False,
    } | options
    tree = {"data": data, "train": train, "optimizer": {"name": "adamw"}}  # Muon takes longer
    return resolve_settings(validate_config(tree), config, GPU)


@pytest.mark.parametrize(
    ("attention", "documents"), [("full", True), *((each, False) for each in PATTERNS)], ids=str
)
def test_every_pattern_takes_about_as_much_as_full_attention(attention, documents):
    found = estimate_memory(resolve(attention, documents), 2, GPU).peak
    assert found == pytest.approx(peak_of_full_attention(), rel=0.35)


@pytest.mark.parametrize("options", SCORES, ids=str)
def test_so_does_every_kind_of_score(options):
    found = estimate_memory(resolve(documents=True, **options), 2, GPU).peak
    assert found < (2.2 if "precision" in options else 1.35) * peak_of_full_attention()


def test_the_micro_batch_is_chosen_for_masked_documents():
    assert (
        resolve("window(64)", documents=True, micro_batch_size="auto").train.micro_batch_size == 8
    )


GB = 10**9


@pytest.mark.parametrize("device", [GPU, torch.device("cuda")], ids=str)
@pytest.mark.parametrize(
    ("fraction", "reserved", "free", "expected"),
    [
        (1.0, 0, 80, 80),
        (1.0, 10, 50, 50),  # other processes have 20
        (0.2, 0, 80, 16),
        (0.2, 10, 70, 6),
        (0.2, 0, 9, 9),  # others have so much that the limit does not matter
        (0.1, 10, 70, 0),  # taken before the limit
    ],
)
def test_a_limit_of_the_process_counts(
    fraction, reserved, free, expected, device, monkeypatch
):  # fmt: skip
    """`fraction` of a card of 80 GB."""
    memory = free * GB, 80 * GB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * GB)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: fraction)
    assert free_memory(device) == expected * GB
    check_memory({"weights": expected * GB}, device, "take less")
    with pytest.raises(UserError, match="the GPU has only"):
        check_memory({"weights": expected * GB + 1}, device, "take less")


def test_the_micro_batch_is_chosen_for_a_limited_process(monkeypatch):
    peak = estimate_memory(resolve(), 2, GPU).peak
    fraction = 1.1 * peak / fake_cuda.GPU.total_memory
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: fraction)
    assert resolve(micro_batch_size="auto").train.micro_batch_size == 2
