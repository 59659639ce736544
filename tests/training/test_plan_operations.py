"""The table of operations agrees with torch's count of FLOPs and with the bytes of the real model.

The kernel is the reference, because torch's FlopCounterMode does not count SDPA on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import add_lora
from thinker.training.reports.plan_operations import (
    decoder_operations,
    describe_operations,
    format_operations,
    visible_share,
)

ROOT = Path(__file__).parents[2]
T = 96
SIZES = {"vocab_size": 100, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": T}
SHAPES = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2, "head_dim": 24},
    "multi-query, tied, two matrices in the MLP": {
        "n_kv_heads": 1,
        "tie_embeddings": True,
        "mlp": "ungated",
    },
    "window": {"attention": "window(16)", "n_kv_heads": 2},
    "window and full": {"attention": "LLG", "window": 16},
    "window and first keys": {"attention": "window(16) | global(4)"},
    "tables and biases": {
        "positions": "learned",
        "value_embeddings": True,
        "bigram_rows": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    "relative positions": {"positions": "relative"},
    "fewer heads in some layers": {"n_kv_heads": 2, "n_kv_heads_per_layer": [2, 1, 1]},
    "parallel block": {"block": "parallel_one_norm", "norm": "layernorm"},
}


def counted(model, tokens, cache=None):
    """FLOPs of a pass as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, cache=cache)
    return counter.get_total_flops()


@pytest.fixture(params=list(SHAPES))
def model(request):
    model = Thinker(ThinkerConfig(**SIZES, **SHAPES[request.param])).eval()
    model.kernel = "reference"
    return model


def test_flops_are_those_that_torch_counts(model):
    tokens = torch.zeros(1, T, dtype=torch.long)
    operations = decoder_operations(model, T, torch.float32)
    assert counted(model, tokens) == sum(row.flops for row in operations)
    cache = model.new_cache(1, T)
    counted(model, tokens[:, 1:], cache)
    next_token = sum(row.next_token_flops for row in operations)
    assert counted(model, tokens[:, :1], cache) == next_token


def test_bytes_are_those_of_the_parameters_and_the_cache(model):
    operations = decoder_operations(model, T, torch.float32)
    parameters = list(model.parameters())
    assert sum(row.n_parameters for row in operations) == sum(p.numel() for p in parameters)
    n_bytes = sum(p.nbytes for p in parameters) + model.new_cache(1, T).nbytes
    assert sum(row.nbytes for row in operations) == n_bytes


def test_each_row_is_its_formula():
    shape = {**SIZES, "n_kv_heads": 2, "head_dim": 24, "d_ff": 128}
    model = Thinker(ThinkerConfig(**shape))
    names = {"T": T, "L": 3, "C": 64, "H": 4, "K": 2, "D": 24, "F": 128, "V": 100}
    assert describe_operations(model, T, torch.float32)["sizes"] == names
    for row in decoder_operations(model, T, torch.float32):
        if row.formula != "not counted":
            assert row.flops == eval(row.formula.replace("·", "*"), names), row.name
    sizes = {row.name: row.nbytes for row in decoder_operations(model, T, torch.bfloat16)}
    assert sizes["scores"] == sizes["weighted sums"] == 3 * 2 * T * 24 * 2
    assert sizes["queries"] == 3 * 4 * 24 * 64 * 4
    assert sizes["LM head"] == sizes["embedding"] == 100 * 64 * 4
    assert sizes["norms, biases"] == (7 * 64 + 6 * 24) * 4


def test_a_tied_head_has_its_bytes_once():
    model = Thinker(ThinkerConfig(**SIZES, tie_embeddings=True))
    rows = {row.name: row for row in decoder_operations(model, T, torch.float32)}
    assert rows["LM head"].n_parameters == rows["LM head"].nbytes == 0
    assert rows["LM head"].flops == 2 * T * 64 * 100


def test_adapters_have_a_row():
    model = Thinker(ThinkerConfig(**SIZES)).eval()
    add_lora(model, 4)
    model.kernel = "reference"
    rows = {row.name: row for row in decoder_operations(model, T, torch.float32)}
    per_layer = 4 * (4 * (64 + 64) + 3 * (64 + 192))
    assert rows["adapters"].n_parameters == 3 * per_layer
    assert sum(row.n_parameters for row in rows.values()) == sum(
        p.numel() for p in model.parameters()
    )
    tokens = torch.zeros(1, T, dtype=torch.long)
    assert counted(model, tokens) == sum(row.flops for row in rows.values())


def test_linear_attention_has_no_scores():
    """Its formula is that of the sums; the chunks in which it is computed take a little more."""
    model = Thinker(ThinkerConfig(**SIZES, attention=["full", "linear(32)", "linear(32)"])).eval()
    model.kernel = "reference"
    rows = {row.name: row for row in decoder_operations(model, T, torch.float32)}
    assert rows["scores"].flops == 2 * T * T * 64  # of one layer
    assert rows["linear attention"].flops == 2 * 2 * T * 32 * (2 * 16 + 1) * (4 + 4)
    total = sum(row.flops for row in rows.values())
    assert total < counted(model, torch.zeros(1, T, dtype=torch.long)) < 1.3 * total
    text = format_operations(describe_operations(model, T, torch.float32))
    assert "m = 32" in text
    assert "Layers differ" in text


@pytest.mark.parametrize(
    "attention",
    [
        "full",
        "window(16)",
        "LLG",
        "window(16) | global(4)",
        "heads(window(16), full)",
        "linear(32)",
    ],
)
def test_the_visible_share_is_that_of_the_weights(attention):
    window = 16 if attention == "LLG" else None
    config = ThinkerConfig(**SIZES, attention=attention, window=window)
    if attention == "linear(32)":
        assert visible_share(config, T) is None
        return
    tokens = torch.randint(100, (1, T), generator=torch.Generator().manual_seed(0))
    weights = Thinker(config).attention_weights(tokens)
    assert visible_share(config, T) == pytest.approx(float((weights > 0).float().mean()))


def test_what_the_text_hides_is_not_counted():
    assert visible_share(ThinkerConfig(**SIZES, attention="topk(4)"), T) is None


def test_the_command_prints_operations(run_script, tmp_path):
    config = ["quickstart", "model.vocab_size=3072", "--no-steps"]
    plain = run_script(ROOT / "scripts" / "plan.py", *config, cwd=tmp_path)
    table = run_script(ROOT / "scripts" / "plan.py", *config, "--operations", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert "weighted sums" not in plain.stdout
    added = table.stdout.split("\n\n", 1)[1]
    assert table.stdout.count("\n") == plain.stdout.count("\n") + 1 + added.count("\n")
    assert max(map(len, added.splitlines())) <= 100
    done = run_script(ROOT / "scripts" / "plan.py", *config, "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert added.strip() == format_operations(plan["operations"])
    assert sum(row["n_parameters"] for row in plan["operations"]["rows"]) == plan["parameters"]
