"""Whole training steps: the host waits for nothing, and only batches cross to the device."""

from itertools import combinations, product

import pytest
import torch
from device_trace import DeviceTrace

from thinker.data.batches.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep

OPTIONS = {
    "precision": ["bf16", "fp32", "fp16"],
    "optimizer": ["muon", "adamw"],
    "attention": ["full", "window(8)", "linear(8)", "heads(full, strided(3))", "token(3)"],
    "positions": ["rope", "alibi"],
    "documents": [False, True],
    "dropout": [0.0, 0.1],
    "micro_batch_size": [4, 2],
    "lora_rank": [None, 4],
    "checkpoint_every_n_blocks": [None, 1],
}
BATCH_SIZE = 4


def is_possible(options):
    has_linear_alibi = options["attention"].startswith("linear") and options["positions"] == "alibi"
    return not has_linear_alibi and not (options["lora_rank"] and options["optimizer"] == "muon")


def every_pair(choices):
    """A few combinations in which every two values of different options meet."""
    names = list(choices)
    every = [dict(zip(names, values)) for values in product(*choices.values())]
    every = [options for options in every if is_possible(options)]
    pairs = {frozenset(pair) for options in every for pair in combinations(options.items(), 2)}
    chosen = []
    while pairs:
        best = max(
            every,
            key=lambda options: len(
                pairs & {frozenset(x) for x in combinations(options.items(), 2)}
            ),
        )
        chosen.append(best)
        pairs -= {frozenset(pair) for pair in combinations(best.items(), 2)}
    return chosen


def new_step(device, options, T=32, compile=False, **shape):
    """A training step on the device, and its batch on the host."""
    shape = {
        "vocab_size": 64,
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
    } | shape
    if options["attention"].startswith("heads"):
        shape["n_kv_heads"] = shape["n_heads"]
    config = ThinkerConfig(**shape, attention=options["attention"], positions=options["positions"],
                           dropout=options["dropout"], max_seq_len=T)  # fmt: skip
    train = {
        name: options[name]
        for name in ("precision", "micro_batch_size", "lora_rank", "checkpoint_every_n_blocks")
    }
    tree = {
        "data": {"seq_len": T, "document_masking": options["documents"]},
        "run": {"init_from": "runs/base"} if options["lora_rank"] else {},
        "optimizer": {"name": options["optimizer"]},
        "train": {**train, "batch_size": BATCH_SIZE, "compile": compile, "max_steps": 9},
    }
    settings = resolve_settings(validate_config(tree), config, device)
    tokens = torch.zeros(BATCH_SIZE, T, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens.numel(), tokens if options["documents"] else None)
    with device:
        return TrainingStep(Thinker(config), settings), batch


@pytest.mark.parametrize(
    "options", every_pair(OPTIONS), ids=lambda options: "-".join(map(str, options.values()))
)
def test_a_step_waits_for_nothing_and_copies_only_its_batch(gpu, options):
    step, batch = new_step(gpu, options)
    step(batch, 1.0)  # creates the optimizers' state
    with DeviceTrace() as trace:
        loss, grad_norm = step(batch, 1.0)
    assert loss.device == grad_norm.device == gpu
    assert trace.reads == {}
    n_copies = (3 if options["documents"] else 2) * BATCH_SIZE // options["micro_batch_size"]
    assert trace.uploads == {"data/batches/prefetch.py:rows": n_copies}


@pytest.mark.parametrize(
    ("lora_rank", "n_products"), [(None, 7 + 2 * 7), (4, 7 * (1 + 2) + 7 + 2 * 7 * 2)]
)
def test_each_matrix_is_one_product_and_two_backward(gpu, lora_rank, n_products):
    """Backward for input and weight; adapters add two products each, and freeze the weight."""
    options = {name: values[0] for name, values in OPTIONS.items()} | {"lora_rank": lora_rank}
    options |= {"optimizer": "adamw", "micro_batch_size": BATCH_SIZE}
    counts = []
    for n_layers in (1, 2):
        step, batch = new_step(gpu, options, n_layers=n_layers)
        with DeviceTrace() as trace:
            step(batch, 1.0)
        counts.append(trace.launches["aten.mm"] + trace.launches["aten.addmm"])
    assert counts[1] - counts[0] == n_products
