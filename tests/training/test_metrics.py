import pytest
import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import add_lora
from thinker.training import metrics


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_peaks_are_those_of_the_device_itself(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_flops(torch.device("cuda"), "bf16") == peak
    assert metrics.peak_flops(torch.device("cuda"), "fp32") is None
    assert metrics.peak_flops(torch.device("cpu"), "bf16") is None


def test_flops_by_hand():
    model = Thinker(
        ThinkerConfig(vocab_size=10, d_model=8, n_layers=2, n_heads=2, head_dim=6, d_ff=16)
    )
    block = 4 * 8 * 12 + 3 * 8 * 16 + 2 * 8 + 2 * 6
    assert (
        metrics.flops_per_token(model, 100) == 6 * (2 * block + 8 + 10 * 8) + 12 * 2 * (2 * 6) * 100
    )


def test_the_matrix_part_is_what_torch_counts():
    """Products of a forward and a backward pass, attention aside: 6 FLOPs a matrix element a
    token."""
    from torch.utils.flop_counter import FlopCounterMode

    config = ThinkerConfig(
        vocab_size=40, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, head_init_std=1.0
    )
    model, T = Thinker(config), 12
    tokens = torch.randint(40, (3, T))
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens)[0].backward()
    counted = sum(
        flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operation)
    )
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if "proj" in name or "head" in name
    )
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counted == 6 * matrices * 3 * T
    assert metrics.flops_per_token(model, T) == 6 * (matrices + gains) + 12 * 2 * 16 * T


def test_frozen_weights_cost_four_flops_and_adapters_six():
    """Forward 2, back to the inputs 2, and 2 more for the gradient of a weight that is trained."""
    from torch.utils.flop_counter import FlopCounterMode

    config = ThinkerConfig(
        vocab_size=40, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, head_init_std=1.0
    )
    model, T, rank = Thinker(config), 12, 3
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    matrices += model.lm_head.weight.numel()
    add_lora(model, rank)
    kv = 2 * 4  # the width of keys and of values
    ins_outs = [(16, 16), (16, kv), (16, kv), (16, 16), (16, 24), (16, 24), (24, 16)]
    adapters = 2 * sum(rank * (n_in + n_out) for n_in, n_out in ins_outs)

    tokens = torch.randint(40, (3, T))
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens)[0].backward()
    counted = 0
    for operation, flops in counter.get_flop_counts()["Global"].items():
        if "attention" not in str(operation):
            counted += flops
    # Nothing flows back to the embedding, from the first three matrices and their adapters.
    first = 16 * (16 + kv + kv) + 3 * rank * 16
    assert counted == (4 * matrices + 6 * adapters - 2 * first) * 3 * T
    assert (
        metrics.flops_per_token(model, T) == 4 * (matrices + gains) + 6 * adapters + 12 * 2 * 16 * T
    )
